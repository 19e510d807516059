// ---- programmatic dependent launch (PDL): kernels that overlap at their ends ----

namespace ptx {

// Lets the stream's next kernel start once all blocks have said so or ended, if it was launched to overlap this one.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Returns when the previous kernel has ended and what it wrote is visible.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace ptx
