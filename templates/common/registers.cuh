// ---- registers, divided among a block's warpgroups (128 threads each) ----

namespace ptx {

// Gives registers back to the SM, or takes more of them once they are free; for all threads of a warpgroup.
template <int COUNT>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

}  // namespace ptx
