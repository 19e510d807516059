// ---- global memory by both proxies: in kernels that hand on what bulk copies have written ----

namespace ptx {

// Orders what this thread did, or knows of, by ordinary accesses and by copies: each before it with the others after it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace ptx
