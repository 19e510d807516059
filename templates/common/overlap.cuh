// ---- kernels that overlap: programmatic dependent launch ----

namespace ptx {

// Lets the stream's next kernel start, where it was launched to overlap this one, once all blocks have said so or ended.
__device__ __forceinline__ void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Returns when the kernel before has ended, and what it wrote is visible.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace ptx
