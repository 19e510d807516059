// What of the CUDA runtime an exported example calls, with the memory of the CPU: its kernel then runs as plain C++.
#include <cuda_runtime_api.h>
#include <cstdlib>
#include <cstring>
extern "C" {
cudaError_t cudaMalloc(void** p, size_t n) { *p = std::aligned_alloc(1024, (n + 1023) / 1024 * 1024); return *p ? cudaSuccess : cudaErrorMemoryAllocation; }
cudaError_t cudaFree(void* p) { std::free(p); return cudaSuccess; }
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) { std::memcpy(to, from, n); return cudaSuccess; }
cudaError_t cudaMemset(void* p, int v, size_t n) { std::memset(p, v, n); return cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { *d = 0; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "error"; }
}
