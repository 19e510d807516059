// What the CUDA runtime and driver do for a kernel's launcher: errors, the device, tensor maps.
#pragma once

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_host.hpp"

namespace bwdtune_host __attribute__((visibility("hidden"))) {

// What the last refusal or fault of this OS thread was: cudaGetErrorString tells it in place of a general text.
struct LastError {
  cudaError_t code;
  char text[640];
};
inline thread_local LastError last_error;

__attribute__((format(printf, 2, 3))) inline cudaError_t refuse(cudaError_t code, const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(last_error.text, sizeof last_error.text, format, values);
  va_end(values);
  return last_error.code = code;
}

// An integer from the environment, which Python may change between launches.
inline long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtol(text, nullptr, 10) : otherwise;
}

// The most dynamic shared memory of a block on the card that is stood for: an H200's unless told.
inline long shared_memory_limit() { return setting("BWDTUNE_HOST_SMEM_LIMIT", 232448); }

}  // namespace bwdtune_host

const char* cudaGetErrorString(cudaError_t code) {
  if (code == bwdtune_host::last_error.code) return code ? bwdtune_host::last_error.text : "no error";
  return code ? "an error of an earlier call, or of another thread" : "no error";
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device == 0) return cudaSuccess;
  return bwdtune_host::refuse(cudaErrorInvalidDevice, "device %d: the host target has device 0 alone", device);
}

// Blocks run one after another, whatever their number: a kernel that sizes its grid by this gets two, unless told.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (attribute != cudaDevAttrMultiProcessorCount || device != 0)
    return bwdtune_host::refuse(cudaErrorInvalidValue, "attribute %d of device %d: the host target has none such", attribute,
                                device);
  *value = static_cast<int>(bwdtune_host::setting("BWDTUNE_HOST_SM_COUNT", 2));
  return cudaSuccess;
}

// ---- tensor maps ----

namespace bwdtune_host __attribute__((visibility("hidden"))) {

constexpr uint32_t TENSOR_MAP_MAGIC = 0x62776474;
constexpr uint32_t MAX_RANK = 5;

struct TensorMap {
  uint32_t magic;
  uint8_t rank, element_bytes, swizzle_bytes;   // swizzle_bytes: the span that is permuted, 0 for none
  const uint8_t* base;
  uint64_t size[MAX_RANK];                      // elements
  uint64_t stride[MAX_RANK - 1];                // bytes, of dimensions 1 and up
  uint16_t box[MAX_RANK];                       // elements
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

inline uint32_t element_bytes(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
  }
  return 0;
}

__attribute__((format(printf, 1, 2))) inline CUresult refuse_map(const char* format, ...) {
  char text[256];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  refuse(cudaErrorInvalidValue, "cuTensorMapEncodeTiled: %s", text);
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace bwdtune_host

// With the checks of the CUDA driver API's reference. Interleaved layouts, strided boxes and NaN fill are refused: no kernel
// uses them.
CUresult cuTensorMapEncodeTiled(CUtensorMap* encoded, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                       const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                       CUtensorMapFloatOOBfill fill) {
  using namespace bwdtune_host;
  const uint32_t bytes = element_bytes(type);
  if (reinterpret_cast<uintptr_t>(encoded) % 64) return refuse_map("the map lies at %p: it must be 64-byte aligned", encoded);
  if (!bytes) return refuse_map("data type %d is unknown", type);
  if (rank < 1 || rank > MAX_RANK) return refuse_map("rank %u: it must lie between 1 and 5", rank);
  if (!address || reinterpret_cast<uintptr_t>(address) % 16)
    return refuse_map("base address %p: it must be 16-byte aligned and not null", address);
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
    return refuse_map("interleave %d, fill %d: the host target has neither", interleave, fill);
  if (promotion < 0 || promotion > CU_TENSOR_MAP_L2_PROMOTION_L2_256B)
    return refuse_map("L2 promotion %d is unknown", promotion);
  if (swizzle < 0 || swizzle > CU_TENSOR_MAP_SWIZZLE_128B) return refuse_map("swizzle %d is unknown", swizzle);
  TensorMap map = {};
  map.magic = TENSOR_MAP_MAGIC;
  map.rank = static_cast<uint8_t>(rank);
  map.element_bytes = static_cast<uint8_t>(bytes);
  map.swizzle_bytes = static_cast<uint8_t>(swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16 << swizzle);
  map.base = static_cast<const uint8_t*>(address);
  for (uint32_t i = 0; i < rank; i++) {
    if (sizes[i] < 1 || sizes[i] > uint64_t{1} << 32)
      return refuse_map("size %" PRIu64 " of dimension %u: it must lie between 1 and 2^32", sizes[i], i);
    if (box[i] < 1 || box[i] > 256)
      return refuse_map("box size %u of dimension %u: it must lie between 1 and 256", box[i], i);
    if (element_strides[i] != 1)
      return refuse_map("element stride %u of dimension %u: the host target takes 1", element_strides[i], i);
    map.size[i] = sizes[i];
    map.box[i] = static_cast<uint16_t>(box[i]);
    if (i == 0) continue;
    if (strides[i - 1] % 16 || strides[i - 1] >= uint64_t{1} << 40)
      return refuse_map("stride of %" PRIu64 " bytes of dimension %u: it must be a multiple of 16 below 2^40",
                        strides[i - 1], i);
    map.stride[i - 1] = strides[i - 1];
  }
  if (box[0] * bytes % 16) return refuse_map("box rows of %u bytes: they must be a multiple of 16", box[0] * bytes);
  if (map.swizzle_bytes && box[0] * bytes > map.swizzle_bytes)
    return refuse_map("box rows of %u bytes exceed the swizzle's %u", box[0] * bytes, map.swizzle_bytes);
  memset(encoded, 0, sizeof *encoded);
  memcpy(encoded, &map, sizeof map);
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result) {
  const bool known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (known) return cudaSuccess;
  return bwdtune_host::refuse(cudaErrorSymbolNotFound, "the host target has no driver function %s", symbol);
}
