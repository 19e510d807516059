// ---- global memory by both proxies: in kernels that hand on what bulk copies have written ----

namespace ptx {

// Orders what this thread did, or knows of, by ordinary accesses and by copies: each before it with the others after it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// What `release_global` stored, as far as it has; what was done before it is then visible.
__device__ __forceinline__ uint32_t load_acquire_global(const uint32_t* pointer) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

// Adds to a value after all that this thread did, and knows of, is visible to the whole GPU.
__device__ __forceinline__ void release_add_global(uint32_t* pointer, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// Copies `bytes` from shared memory: both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_store(float* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

}  // namespace ptx
