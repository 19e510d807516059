// The functions of ptx.cuh in plain C++, with the semantics of the PTX ISA, for one CPU thread a block. A `line` that a caller
// does not pass is the caller's own: it is where diagnoses point to.
//
// This is what a kernel is compiled against. What the functions do is in instructions.hpp, on top of the files that it
// includes: compiled with each kernel, or, where BWDTUNE_HOST_LINKED is defined, once by itself (runtime.cpp) and linked.
#pragma once

#include "cuda_host.hpp"

// A kernel's parameter holds 64-byte aligned tensor maps; how GCC 4.5 passed those concerns nobody.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace bwdtune_host __attribute__((visibility("hidden"))) {

// Where dynamic shared memory begins: as on a card, address 0 is not part of it. That of a cluster's next block is so much
// further on: a multiple of what wgmma's descriptors count addresses by.
constexpr uint32_t SHARED_BASE = 1024, SHARED_WINDOW = 1 << 18;

// threadIdx.x and its like: read where they are used, as the thread changes under them.
template <unsigned (*READ)()>
struct Special {
  operator unsigned() const { return READ(); }
};
unsigned thread_x();
unsigned thread_y();
unsigned thread_z();
unsigned block_x();
unsigned block_y();
unsigned block_z();
unsigned block_size_x();
unsigned block_size_y();
unsigned block_size_z();
unsigned grid_x();
unsigned grid_y();
unsigned grid_z();

template <unsigned (*X)(), unsigned (*Y)(), unsigned (*Z)()>
struct Special3 {
  Special<X> x;
  Special<Y> y;
  Special<Z> z;
};

}  // namespace bwdtune_host

constexpr bwdtune_host::Special3<bwdtune_host::thread_x, bwdtune_host::thread_y, bwdtune_host::thread_z> threadIdx;
constexpr bwdtune_host::Special3<bwdtune_host::block_x, bwdtune_host::block_y, bwdtune_host::block_z> blockIdx;
constexpr bwdtune_host::Special3<bwdtune_host::block_size_x, bwdtune_host::block_size_y, bwdtune_host::block_size_z>
    blockDim;
constexpr bwdtune_host::Special3<bwdtune_host::grid_x, bwdtune_host::grid_y, bwdtune_host::grid_z> gridDim;

namespace ptx __attribute__((visibility("hidden"))) {

inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// ---- element types: 16 bits in memory, packed in pairs in registers ----

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// Of bf16 and fp16; see instructions.hpp. Not inline, as kernels are compiled without optimisation.
template <class Element>
uint32_t pack(float low, float high);
template <class Element>
float2 unpack(uint32_t packed);

float exp2_approx(float x);
float reciprocal_approx(float x);

inline uint32_t optimization_barrier(uint32_t value) { return value; }

// ---- threads ----

void sync_threads(int line = __builtin_LINE());
void sync_warp(int line = __builtin_LINE());
bool elect_one(int line = __builtin_LINE());
uint32_t lane_id();
void named_barrier_sync(int barrier, int threads, int line = __builtin_LINE());
void named_barrier_arrive(int barrier, int threads, int line = __builtin_LINE());
int broadcast(int value, int line = __builtin_LINE());
uint32_t shuffle_xor(uint32_t value, int lane_mask, int line = __builtin_LINE());

inline float shuffle_xor(float value, int lane_mask, int line = __builtin_LINE()) {
  return float_of(shuffle_xor(bits_of(value), lane_mask, line));
}

// ---- shared memory ----

uint32_t shared_memory_base();

void store_shared(uint32_t address, uint32_t value, int line = __builtin_LINE());
void store_shared(uint32_t address, float4 value, int line = __builtin_LINE());
void store_shared(uint32_t address, uint4 value, int line = __builtin_LINE());

// The bytes at an address, which are read as one value.
const void* at_shared(uint32_t address, uint32_t bytes, int line);

template <class T>
T load_shared(uint32_t address, int line = __builtin_LINE()) {
  T value;
  __builtin_memcpy(&value, at_shared(address, sizeof value, line), sizeof value);
  return value;
}

// ---- global memory ----

// Refuses an access to one value that this kernel may not make.
void check_global(const void* pointer, uint32_t bytes, bool write, const char* what, int line);

template <class T>
T load_global(const T* pointer, int line = __builtin_LINE()) {
  check_global(pointer, sizeof(T), false, "ld.global", line);
  return *pointer;
}

template <class T>
void store_global(T* pointer, T value, int line = __builtin_LINE()) {
  check_global(pointer, sizeof(T), true, "st.global", line);
  *pointer = value;
}

void reduce_add_global(float* pointer, float value, int line = __builtin_LINE());
void reduce_add_global(float* pointer, float2 value, int line = __builtin_LINE());
void reduce_add_global(float* pointer, float4 value, int line = __builtin_LINE());
uint32_t fetch_add_global(uint32_t* pointer, uint32_t value, int line = __builtin_LINE());

// A kernel runs when the one before it has ended, also where it may overlap it: that it waits is checked.
inline void griddepcontrol_launch_dependents() {}
void griddepcontrol_wait();

void wait_for_global(const uint32_t* pointer, uint32_t value, int line = __builtin_LINE());
void wait_for_at_least_global(const uint32_t* pointer, uint32_t value, int line = __builtin_LINE());
uint32_t load_acquire_global(const uint32_t* pointer, int line = __builtin_LINE());
void release_global(uint32_t* pointer, uint32_t value, int line = __builtin_LINE());
void release_add_global(uint32_t* pointer, uint32_t value, int line = __builtin_LINE());

// ---- mbarrier and TMA ----

void mbarrier_init(uint32_t barrier, uint32_t arrivals, int line = __builtin_LINE());
void mbarrier_fence_init();
void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes, int line = __builtin_LINE());
void mbarrier_arrive(uint32_t barrier, bool arrives, int line = __builtin_LINE());
void mbarrier_wait(uint32_t barrier, uint32_t parity, int line = __builtin_LINE());
void tma_load_4d(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2, int c3, uint32_t barrier,
                 int line = __builtin_LINE());
void tma_load_5d(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4, uint32_t barrier,
                 int line = __builtin_LINE());
void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier, int line = __builtin_LINE());

// ---- clusters ----

uint32_t cluster_rank();
void sync_cluster(int line = __builtin_LINE());
uint32_t map_shared(uint32_t address, uint32_t rank, int line = __builtin_LINE());
void store_in_cluster(uint32_t mapped, uint32_t value, int line = __builtin_LINE());
void store_in_cluster(uint32_t mapped, uint4 value, int line = __builtin_LINE());
void mbarrier_arrive_in_cluster(uint32_t mapped, bool arrives, int line = __builtin_LINE());
inline void mbarrier_release_in_cluster(uint32_t mapped, int line = __builtin_LINE()) {
  mbarrier_arrive_in_cluster(mapped, true, line);
}
inline void mbarrier_wait_in_cluster(uint32_t barrier, uint32_t parity, int line = __builtin_LINE()) {
  mbarrier_wait(barrier, parity, line);
}
void tma_load_4d_multicast(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2, int c3, uint32_t barrier,
                           uint16_t blocks, int line = __builtin_LINE());
void tma_load_5d_multicast(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4,
                           uint32_t barrier, uint16_t blocks, int line = __builtin_LINE());
void bulk_copy_in_cluster(uint32_t mapped_destination, uint32_t source, uint32_t bytes, uint32_t mapped_barrier,
                          int line = __builtin_LINE());

// ---- copies from shared memory ----

void fence_proxy_async_shared();
void fence_proxy_async();
void fence_proxy_async_global();
void bulk_reduce_add(float* destination, uint32_t source, uint32_t bytes, int line = __builtin_LINE());
void bulk_store(float* destination, uint32_t source, uint32_t bytes, int line = __builtin_LINE());
void tma_store_4d(const CUtensorMap* map, int c0, int c1, int c2, int c3, uint32_t source, int line = __builtin_LINE());
void tma_store_5d(const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4, uint32_t source,
                  int line = __builtin_LINE());
void bulk_commit();
void bulk_wait(uint32_t left, bool reads_alone);

template <int LEFT>
void bulk_wait_read() {
  bulk_wait(LEFT, true);
}

template <int LEFT>
void bulk_wait() {
  bulk_wait(LEFT, false);
}

// ---- tensor cores ----

void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t address, int line = __builtin_LINE());
void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t address, int line = __builtin_LINE());
uint32_t movmatrix_trans(uint32_t fragment, int line = __builtin_LINE());
void stmatrix_x4(uint32_t address, const uint32_t (&fragment)[4], int line = __builtin_LINE());
void stmatrix_x4_trans(uint32_t address, const uint32_t (&fragment)[4], int line = __builtin_LINE());

// Of bf16 and fp16, as `wgmma`: there are no others. It leaves a lane's operands, without a wait for the others': the products are
// computed at mma_done, before the warp's next instruction of another kind, or when there are many.
template <class Element>
void mma_m16n8k16(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line = __builtin_LINE());
void mma_done(int line = __builtin_LINE());

// ---- tensor cores, by warpgroups ----

// A warp computes 16 of the 64 rows, so that each does its share by itself.

void change_registers(int line);

template <int COUNT>
void increase_registers(int line = __builtin_LINE()) {
  static_assert(COUNT >= 24 && COUNT <= 256 && COUNT % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
  change_registers(line);
}

template <int COUNT>
void decrease_registers(int line = __builtin_LINE()) {
  increase_registers<COUNT>(line);
}

void wgmma_fence(int line = __builtin_LINE());
void wgmma_commit(int line = __builtin_LINE());
void wgmma_wait(uint32_t left, int line);

template <int LEFT>
void wgmma_wait(int line = __builtin_LINE()) {
  wgmma_wait(LEFT, line);
}

template <int N>
void wgmma_fence_operand(float (&)[N]) {}

// What a lane gives to a wgmma. Of the whole warp, all but the pointer and A's fragment must be the same.
struct WgmmaOperands {
  float* accumulator;
  uint32_t a[4];  // unless A has a descriptor
  uint64_t a_descriptor, b_descriptor;
  int columns;
  bool accumulate, a_in_registers, transposed_a, transposed_b;
};

template <class Element>
void wgmma(WgmmaOperands& operands, int line);

template <class Element, bool TRANSPOSED_A, bool TRANSPOSED_B, int SIZE>
void wgmma_ss(float (&accumulator)[SIZE], uint64_t a, uint64_t b, bool accumulate, int line = __builtin_LINE()) {
  WgmmaOperands operands = {accumulator, {}, a, b, 2 * SIZE, accumulate, false, TRANSPOSED_A, TRANSPOSED_B};
  wgmma<Element>(operands, line);
}

template <class Element, bool TRANSPOSED_B, int SIZE>
void wgmma_rs(float (&accumulator)[SIZE], const uint32_t (&a)[4], uint64_t b, bool accumulate,
              int line = __builtin_LINE()) {
  WgmmaOperands operands = {accumulator, {a[0], a[1], a[2], a[3]}, 0, b, 2 * SIZE, accumulate, true, false, TRANSPOSED_B};
  wgmma<Element>(operands, line);
}

// ---- what only probed kernels need ----

// All blocks run on one SM, whose clock counts nanoseconds.
inline uint32_t sm_index() { return 0; }
uint64_t sm_clock();
void reduce_min_global(uint64_t* pointer, uint64_t value, int line = __builtin_LINE());
void reduce_max_global(uint64_t* pointer, uint64_t value, int line = __builtin_LINE());

// A CPU keeps no pace, and dummy mma change no result: there are none.
inline void pace_begin() {}
inline uint32_t pace_end() { return 0; }

}  // namespace ptx

#ifndef BWDTUNE_HOST_LINKED
#include "instructions.hpp"
#endif
