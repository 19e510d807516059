// The kernels' C interface over a kernel that ruins the CUDA context it runs in, or never ends.
#include <cuda_runtime.h>

#include "interface.h"

#define ILLEGAL_ACCESS 1
#define TRAP 2
#define ENDLESS 3

namespace {

__global__ void faulty(int* nowhere) {
  if (FAULT == ILLEGAL_ACCESS) nowhere[1 << 20] = 1;
  if (FAULT == TRAP) __trap();
  volatile int turns = 0;
  while (FAULT == ENDLESS) turns = turns + 1;
}

}  // namespace

extern "C" {

int64_t bwdtune_workspace_bytes(const bwdtune_arguments*) { return 16; }

int bwdtune_backward(const bwdtune_arguments* arguments) {
  faulty<<<1, 1, 0, static_cast<cudaStream_t>(arguments->stream)>>>(nullptr);
  return cudaGetLastError();
}

const char* bwdtune_error_text(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

int bwdtune_get_info(bwdtune_info* info) {
  if (info->struct_bytes != sizeof(bwdtune_info)) return -1;
  info->abi_version = BWDTUNE_ABI_VERSION;
  info->head_dim = info->head_dim_v = 64;
  info->mask = BWDTUNE_MASK_CAUSAL;
  info->bottom_right = info->softcap = info->varlen = info->deterministic = 0;
  info->writes_all_rows = 1;
  info->threads = 1;
  info->shared_memory_bytes = 0;
  info->dtype = "bf16";
  info->config = "faulty";
  info->bias = info->bias_dtype = "";
  return 0;
}
}
