// ---- global memory by both proxies: for kernels whose blocks tell each other of what bulk copies have written ----

namespace ptx {

// Orders this thread's ordinary accesses and its copies: all before the fence come before all after it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The same of accesses to global memory alone: without the membar.gpu that the compiler puts before a fence of all memory.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// What `release_global` has stored; all that was done before that store is then visible.
__device__ __forceinline__ uint32_t load_acquire_global(const uint32_t* pointer) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

// Returns once the word has that value or a larger one. What was done before `release_add_global` is then visible.
__device__ __forceinline__ void wait_for_at_least_global(const uint32_t* pointer, uint32_t value) {
  while (load_acquire_global(pointer) < value) {
  }
}

// Adds to a value once all that this thread has done or observed is visible to the whole GPU.
__device__ __forceinline__ void release_add_global(uint32_t* pointer, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// Copies `bytes` from shared memory: both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_store(float* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

}  // namespace ptx
