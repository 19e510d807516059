// ---- clusters: blocks that run at the same time and reach each other's shared memory ----

namespace ptx {

// The block's number in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Returns when all threads of the cluster have come; what they did before is then visible.
__device__ __forceinline__ void sync_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}

// Where a block of the cluster has what this block has at a shared-memory address.
__device__ __forceinline__ uint32_t map_shared(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

__device__ __forceinline__ void store_in_cluster(uint32_t mapped, uint32_t value) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(mapped), "r"(value) : "memory");
}

__device__ __forceinline__ void store_in_cluster(uint32_t mapped, uint4 value) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(mapped), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

// Arrives, where `arrives`, at an mbarrier of any block of the cluster. It says that this thread, or a wgmma or a copy that
// it has waited for, has read something: that what it has written is visible there takes the function below.
__device__ __forceinline__ void mbarrier_arrive_in_cluster(uint32_t mapped, bool arrives) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [%0];\n"
      "}" ::"r"(mapped),
      "r"(static_cast<uint32_t>(arrives))
      : "memory");
}

__device__ __forceinline__ void mbarrier_release_in_cluster(uint32_t mapped) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapped) : "memory");
}

// `mbarrier_wait` for what threads of other blocks wrote before `mbarrier_release_in_cluster`.
__device__ __forceinline__ void mbarrier_wait_in_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies one box of a 4-D tensor to the same place in each block whose bit `blocks` has, and counts its bytes on each one's
// `barrier`.
__device__ __forceinline__ void tma_load_4d_multicast(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2,
                                                      int c3, uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "h"(blocks)
      : "memory");
}

// The same of a 5-D tensor.
__device__ __forceinline__ void tma_load_5d_multicast(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2,
                                                      int c3, int c4, uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier), "h"(blocks)
      : "memory");
}

// Copies `bytes` bytes of this block's shared memory to a block of the cluster, and counts them on an mbarrier of that
// block; addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_copy_in_cluster(uint32_t mapped_destination, uint32_t source, uint32_t bytes,
                                                     uint32_t mapped_barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   mapped_destination),
               "r"(source), "r"(bytes), "r"(mapped_barrier)
               : "memory");
}

}  // namespace ptx
