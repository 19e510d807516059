// The few functions of libcuda.so.1 and libnvidia-ml.so.1 that are asked for, for one card that does not exist.
#include <cstring>

#ifndef INIT_STATUS
#define INIT_STATUS 0
#endif
#ifndef MAJOR
#define MAJOR 12
#endif

extern "C" {

int cuInit(unsigned) { return INIT_STATUS; }

int cuDeviceGetCount(int* count) {
  *count = 2;
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal + 40;
  return 0;
}

int cuDeviceGetName(char* name, int length, int device) {
  std::strncpy(name, device == 40 ? "NVIDIA Imaginary 1" : "NVIDIA GeForce RTX 5090", length);
  return 0;
}

int cuDeviceGetUuid(unsigned char* uuid, int device) {
  for (int i = 0; i < 16; i++) uuid[i] = static_cast<unsigned char>(device + i);
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 13: *value = 2000000; return 0;    // clock, kHz
    case 16: *value = 100; return 0;        // multiprocessors
    case 36: *value = 14001000; return 0;   // memory clock, kHz
    case 37: *value = 512; return 0;        // bus width
    case 39: *value = 1536; return 0;       // threads an SM
    case 75: *value = MAJOR; return 0;
    case 76: *value = 1; return 0;
    case 81: *value = 102400; return 0;     // shared memory an SM
    case 82: *value = 65536; return 0;      // registers an SM
    case 97: *value = 101376; return 0;     // shared memory a block
    default: return 1;
  }
}

int nvmlInitWithFlags(unsigned) { return 0; }

const char* nvmlErrorString(int) { return "an error"; }

int nvmlSystemGetDriverVersion(char* text, unsigned length) {
  std::strncpy(text, "580.95.05", length);
  return 0;
}

int nvmlDeviceGetHandleByUUID(const char* uuid, void** handle) {
  static int device;
  *handle = &device;
  return std::strcmp(uuid, "GPU-28292a2b-2c2d-2e2f-3031-323334353637") == 0 ? 0 : 6;
}

int nvmlDeviceGetClockInfo(void*, int type, unsigned* mhz) {
  *mhz = type == 1 ? 1755 : 0;
  return 0;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, void* processes) {
  *count = 3;
  return processes ? 0 : 7;
}
}
