// What a probed kernel needs beside ptx.cuh; templates/host has the same functions for a CPU.

namespace ptx {

// The SM that this thread runs on, and its clock.
__device__ __forceinline__ uint32_t sm_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(index));
  return index;
}

__device__ __forceinline__ uint64_t sm_clock() {
  uint64_t clock;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock)::"memory");
  return clock;
}

__device__ __forceinline__ void reduce_min_global(uint64_t* pointer, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.min.u64 [%0], %1;" ::"l"(pointer), "l"(value) : "memory");
}

__device__ __forceinline__ void reduce_max_global(uint64_t* pointer, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(pointer), "l"(value) : "memory");
}

}  // namespace ptx
