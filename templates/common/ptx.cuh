// Every instruction and intrinsic that plain C++ does not have, one function each: the only inline PTX of the project.
// templates/host implements the same functions on a CPU. Shared-memory addresses are 32-bit, as the instructions take them.
// Source of all semantics: the PTX ISA.

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace ptx {

// ---- element types: 16 bits in memory, packed in pairs in registers ----

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// Rounds two floats to nearest even; `low` goes to the lower half, which is the lower address.
template <class Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack<fp16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <class Element>
__device__ __forceinline__ float2 unpack(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack<bf16>(uint32_t packed) {
  return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}

template <>
__device__ __forceinline__ float2 unpack<fp16>(uint32_t packed) {
  float2 values;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(values.x), "=f"(values.y)
      : "r"(packed));
  return values;
}

// 2^x, within 2 ulp; subnormal results are flushed to zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, within 1 ulp; subnormals are flushed to zero.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// An optimisation barrier: the value itself, which the compiler takes for a new one. What depends on it is computed again
// rather than kept in registers.
__device__ __forceinline__ uint32_t optimization_barrier(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// ---- threads ----

__device__ __forceinline__ void sync_threads() { __syncthreads(); }

// Orders what the lanes of a warp did before it and do after it.
__device__ __forceinline__ void sync_warp() { __syncwarp(); }

// Barriers 1 to 15 of the block, for `threads` threads in whole warps. Returns when all of them have come, some of them
// perhaps by the function below.
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Comes to the barrier and goes on. It may come again only when the barrier has completed in between.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// True in exactly one thread of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// The lane within its warp, read where it is asked for: of use where a register that holds it over a loop is too dear.
__device__ __forceinline__ uint32_t lane_id() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ float shuffle_xor(float value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

__device__ __forceinline__ uint32_t shuffle_xor(uint32_t value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

// The first lane's value. The compiler knows that it is the same in all lanes, and keeps what follows from it in registers
// that a warp has once.
__device__ __forceinline__ int broadcast(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// ---- shared memory ----

// The block's dynamic shared memory: 1024-byte aligned, as the widest swizzle's pattern repeats every 1024 bytes.
__device__ __forceinline__ uint32_t shared_memory_base() {
  extern __shared__ __align__(1024) uint8_t dynamic_shared_memory[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(dynamic_shared_memory));
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, float4 value) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value.x), "f"(value.y), "f"(value.z),
               "f"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

template <class T>
__device__ __forceinline__ T load_shared(uint32_t address);

template <>
__device__ __forceinline__ float2 load_shared<float2>(uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address));
  return value;
}

template <>
__device__ __forceinline__ float4 load_shared<float4>(uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address));
  return value;
}

template <>
__device__ __forceinline__ uint32_t load_shared<uint32_t>(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

template <>
__device__ __forceinline__ uint4 load_shared<uint4>(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address));
  return value;
}

// ---- global memory ----

// Of memory that no thread of this kernel writes.
template <class T>
__device__ __forceinline__ T load_global(const T* pointer) {
  return __ldg(pointer);
}

template <class T>
__device__ __forceinline__ void store_global(T* pointer, T value) {
  *pointer = value;
}

__device__ __forceinline__ void reduce_add_global(float* pointer, float value) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(pointer), "f"(value) : "memory");
}

__device__ __forceinline__ void reduce_add_global(float* pointer, float2 value) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(pointer), "f"(value.x), "f"(value.y)
               : "memory");
}

__device__ __forceinline__ void reduce_add_global(float* pointer, float4 value) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

// The value before.
__device__ __forceinline__ uint32_t fetch_add_global(uint32_t* pointer, uint32_t value) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(pointer), "r"(value) : "memory");
  return old;
}

// Returns once the word has that value. What was done before `release_global` is then visible.
__device__ __forceinline__ void wait_for_global(const uint32_t* pointer, uint32_t value) {
  uint32_t found;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(pointer) : "memory");
  } while (found != value);
}

// Stores a value after all that this thread did, and knows of, is visible to the whole GPU.
__device__ __forceinline__ void release_global(uint32_t* pointer, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

// ---- mbarrier and TMA ----

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the asynchronous proxy, which TMA completes them through.
__device__ __forceinline__ void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives where `arrives`: a predicate rather than a branch, which would cut the caller's loop into pieces that the
// compiler schedules one by one.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, bool arrives) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}" ::"r"(barrier),
      "r"(static_cast<uint32_t>(arrives))
      : "memory");
}

// Returns once the phase of that parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies one box of a 4-D tensor to shared memory and counts its bytes on `barrier`. The destination is named .shared::cta:
// for sm_120, .shared::cluster compiles to a call with a stack frame.
__device__ __forceinline__ void tma_load_4d(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2, int c3,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
      ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}

// The same of a 5-D tensor.
__device__ __forceinline__ void tma_load_5d(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2, int c3,
                                            int c4, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
      ::"r"(destination),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
      : "memory");
}

// Copies `bytes` bytes to shared memory and counts them on `barrier`; both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// ---- copies from shared memory ----

// Makes what this thread has written to shared memory visible to the asynchronous proxy: bulk copies, TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Adds `bytes` bytes of floats to global memory, in no order and without waiting; addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_reduce_add(float* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination), "r"(source),
               "r"(bytes)
               : "memory");
}

// Copies one box from shared memory into a 4-D tensor; what lies outside of the tensor is left out.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, int c0, int c1, int c2, int c3, uint32_t source) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(c0),
               "r"(c1), "r"(c2), "r"(c3), "r"(source)
               : "memory");
}

// The same of a 5-D tensor.
__device__ __forceinline__ void tma_store_5d(const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4,
                                             uint32_t source) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(source)
               : "memory");
}

// The copies above that this thread has issued since its last commit become a group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Returns when at most LEFT of this thread's groups still read shared memory.
template <int LEFT>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// Returns when at most LEFT of this thread's groups are not complete.
template <int LEFT>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ---- tensor cores ----

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address));
}

// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address));
}

// The inverse of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

// An 8x8 matrix of 16-bit elements, of which each lane has two, transposed.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t fragment) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(fragment));
  return transposed;
}

// accumulator (16x8, fp32) += a (16x16) * b (16x8).
template <class Element>
__device__ __forceinline__ void mma_m16n8k16(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0,
                                                   uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<fp16>(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0,
                                                   uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(accumulator[0]), "+f"(accumulator[1]), "+f"(accumulator[2]), "+f"(accumulator[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Comes between mma and the first use of what they have added: nothing on a GPU. Where the kernel runs on a CPU, a warp's lanes
// have left their operands by then, and the products are computed.
__device__ __forceinline__ void mma_done() {}

}  // namespace ptx
