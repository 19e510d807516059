// The functions of ptx.cuh in plain C++, with the semantics of the PTX ISA, for one CPU thread a block. A `line` that a caller
// does not pass is the caller's own: it is where diagnoses point to.
#pragma once

#include <time.h>

#include "launch.hpp"

// A kernel's parameter holds 64-byte aligned tensor maps; how GCC 4.5 passed those concerns nobody.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace bwdtune_host __attribute__((visibility("hidden"))) {

// threadIdx.x and its like: read where they are used, as the thread changes under them.
template <unsigned (*READ)()>
struct Special {
  operator unsigned() const { return READ(); }
};
inline unsigned thread_x() { return current_fiber->thread_index.x; }
inline unsigned thread_y() { return current_fiber->thread_index.y; }
inline unsigned thread_z() { return current_fiber->thread_index.z; }
inline unsigned block_x() { return current_fiber->block->index().x; }
inline unsigned block_y() { return current_fiber->block->index().y; }
inline unsigned block_z() { return current_fiber->block->index().z; }
inline unsigned block_size_x() { return current_fiber->block->launch().block.x; }
inline unsigned block_size_y() { return current_fiber->block->launch().block.y; }
inline unsigned block_size_z() { return current_fiber->block->launch().block.z; }
inline unsigned grid_x() { return current_fiber->block->launch().grid.x; }
inline unsigned grid_y() { return current_fiber->block->launch().grid.y; }
inline unsigned grid_z() { return current_fiber->block->launch().grid.z; }

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

using bwdtune_host::Block;
using bwdtune_host::current_fiber;
using bwdtune_host::Fiber;
using bwdtune_host::Warp;
using bwdtune_host::WARP_SIZE;
using bwdtune_host::WarpInstruction;

inline Block& block() { return *current_fiber->block; }

inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// ---- element types: 16 bits in memory, packed in pairs in registers ----

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

constexpr uint32_t CANONICAL_NAN = 0x7fff;  // of both types, as cvt gives it

template <class Element>
uint32_t round_to(float value);

template <>
inline uint32_t round_to<bf16>(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return CANONICAL_NAN;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

template <>
inline uint32_t round_to<fp16>(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return CANONICAL_NAN;
  if (magnitude >= 0x47800000u) return sign | 0x7c00u;  // 2^16 and up
  if (magnitude >= 0x38800000u)                         // 2^-14 and up: normal; a carry out of the mantissa is right, up to infinity
    return sign | (((magnitude + 0xfffu + (magnitude >> 13 & 1)) >> 13) - (112u << 10));
  // The subnormals' spacing 2^-24 is that of floats from 0.5 to 1: the addition rounds.
  return sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f));
}

template <class Element>
float widen(uint32_t bits);

template <>
inline float widen<bf16>(uint32_t bits) {
  return float_of(bits << 16);
}

template <>
inline float widen<fp16>(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ffu;
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
  return float_of(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13);
}

template <class Element>
uint32_t pack(float low, float high) {
  return round_to<Element>(low) | round_to<Element>(high) << 16;
}

template <class Element>
float2 unpack(uint32_t packed) {
  return make_float2(widen<Element>(packed & 0xffffu), widen<Element>(packed >> 16));
}

// Of the result and of x, subnormals are zero.
inline float exp2_approx(float x) {
  const float y = exp2f(fabsf(x) < 0x1p-126f ? 0.0f : x);
  return y < 0x1p-126f ? 0.0f : y;
}

inline float reciprocal_approx(float x) {
  const float y = 1.0f / (fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x);
  return fabsf(y) < 0x1p-126f ? copysignf(0.0f, y) : y;
}

inline uint32_t optimization_barrier(uint32_t value) { return value; }

// ---- threads ----

inline void sync_threads(int line = __builtin_LINE()) { block().sync_threads(line); }

template <class Operands>
Operands& operands_of(Warp& warp, uint32_t lane) {
  return *static_cast<Operands*>(warp.lanes[lane].operands);
}

inline void execute_elect(Warp& warp) {
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++) operands_of<bool>(warp, lane) = lane == 0;
}
constexpr WarpInstruction ELECT = {"elect.sync", execute_elect};

inline void execute_sync_warp(Warp& warp) { warp.lanes[0].block->join_warp(warp); }
constexpr WarpInstruction SYNC_WARP = {"bar.warp.sync", execute_sync_warp};

inline void sync_warp(int line = __builtin_LINE()) { block().execute_in_warp(SYNC_WARP, nullptr, line); }

inline bool elect_one(int line = __builtin_LINE()) {
  bool elected;
  block().execute_in_warp(ELECT, &elected, line);
  return elected;
}

inline uint32_t lane_id() { return current_fiber->lane; }

struct NamedBarrierOperands {
  int barrier, threads, line;
  uint32_t use;
};

inline void execute_named_barrier(Warp& warp) {
  const NamedBarrierOperands& first = operands_of<NamedBarrierOperands>(warp, 0);
  const uint32_t use =
      warp.lanes[0].block->arrive_at_named_barrier(warp, first.barrier, first.threads, warp.instruction->name, first.line);
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++) operands_of<NamedBarrierOperands>(warp, lane).use = use;
}
constexpr WarpInstruction BAR_SYNC = {"bar.sync", execute_named_barrier};
constexpr WarpInstruction BAR_ARRIVE = {"bar.arrive", execute_named_barrier};

inline void named_barrier_sync(int barrier, int threads, int line = __builtin_LINE()) {
  NamedBarrierOperands operands = {barrier, threads, line, 0};
  block().execute_in_warp(BAR_SYNC, &operands, line);
  block().wait_at_named_barrier(barrier, operands.use, line);
}

inline void named_barrier_arrive(int barrier, int threads, int line = __builtin_LINE()) {
  NamedBarrierOperands operands = {barrier, threads, line, 0};
  block().execute_in_warp(BAR_ARRIVE, &operands, line);
}

struct ShuffleOperands {
  uint32_t value, lane_mask, result;
};

inline void execute_shuffle_xor(Warp& warp) {
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
    ShuffleOperands& operands = operands_of<ShuffleOperands>(warp, lane);
    const uint32_t source = lane ^ (operands.lane_mask % WARP_SIZE);
    operands.result = operands_of<ShuffleOperands>(warp, source).value;
  }
}
constexpr WarpInstruction SHUFFLE_XOR = {"shfl.sync.bfly", execute_shuffle_xor};

inline uint32_t shuffle_xor(uint32_t value, int lane_mask, int line = __builtin_LINE()) {
  ShuffleOperands operands = {value, static_cast<uint32_t>(lane_mask), 0};
  block().execute_in_warp(SHUFFLE_XOR, &operands, line);
  return operands.result;
}

inline float shuffle_xor(float value, int lane_mask, int line = __builtin_LINE()) {
  return float_of(shuffle_xor(bits_of(value), lane_mask, line));
}

inline void execute_broadcast(Warp& warp) {
  const int first = operands_of<int>(warp, 0);
  for (uint32_t lane = 1; lane < WARP_SIZE; lane++) operands_of<int>(warp, lane) = first;
}
constexpr WarpInstruction BROADCAST = {"shfl.sync.idx", execute_broadcast};

inline int broadcast(int value, int line = __builtin_LINE()) {
  block().execute_in_warp(BROADCAST, &value, line);
  return value;
}

// ---- shared memory ----

inline uint32_t shared_memory_base() { return bwdtune_host::SHARED_BASE; }

inline void store_shared(uint32_t address, uint32_t value, int line = __builtin_LINE()) {
  memcpy(block().write_shared(*current_fiber, address, sizeof value, sizeof value, "st.shared", line), &value, sizeof value);
}

inline void store_shared(uint32_t address, float4 value, int line = __builtin_LINE()) {
  memcpy(block().write_shared(*current_fiber, address, sizeof value, sizeof value, "st.shared.v4", line), &value, sizeof value);
}

inline void store_shared(uint32_t address, uint4 value, int line = __builtin_LINE()) {
  memcpy(block().write_shared(*current_fiber, address, sizeof value, sizeof value, "st.shared.v4", line), &value, sizeof value);
}

template <class T>
T load_shared(uint32_t address, int line = __builtin_LINE()) {
  T value;
  memcpy(&value, block().read_shared(*current_fiber, address, sizeof value, "ld.shared", line), sizeof value);
  return value;
}

// ---- global memory ----

template <class T>
T load_global(const T* pointer, int line = __builtin_LINE()) {
  block().check_global(pointer, sizeof(T), sizeof(T), false, "ld.global", line);
  return *pointer;
}

template <class T>
void store_global(T* pointer, T value, int line = __builtin_LINE()) {
  block().check_global(pointer, sizeof(T), sizeof(T), true, "st.global", line);
  *pointer = value;
}

// Subnormals, of the operands and of the sum, are zeros of their sign: so adds in global memory on a card.
inline float flush(float value) { return fabsf(value) < 0x1p-126f ? copysignf(0.0f, value) : value; }

inline void atomic_add(float* pointer, float value) {
  uint32_t* word = reinterpret_cast<uint32_t*>(pointer);
  uint32_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(word, &old, bits_of(flush(flush(float_of(old)) + flush(value))), true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

inline void reduce_add_global(float* pointer, float value, int line = __builtin_LINE()) {
  block().check_global(pointer, 4, 4, true, "red.global.add.f32", line);
  atomic_add(pointer, value);
}

inline void reduce_add_global(float* pointer, float2 value, int line = __builtin_LINE()) {
  block().check_global(pointer, 8, 8, true, "red.global.add.v2.f32", line);
  atomic_add(pointer, value.x);
  atomic_add(pointer + 1, value.y);
}

inline void reduce_add_global(float* pointer, float4 value, int line = __builtin_LINE()) {
  block().check_global(pointer, 16, 16, true, "red.global.add.v4.f32", line);
  atomic_add(pointer, value.x);
  atomic_add(pointer + 1, value.y);
  atomic_add(pointer + 2, value.z);
  atomic_add(pointer + 3, value.w);
}

inline uint32_t fetch_add_global(uint32_t* pointer, uint32_t value, int line = __builtin_LINE()) {
  block().check_global(pointer, 4, 4, true, "atom.global.add.u32", line);
  return __atomic_fetch_add(pointer, value, __ATOMIC_RELAXED);
}

// A kernel runs when the one before it has ended, also where it may overlap it: that it waits is checked.
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() { current_fiber->waited_for_kernel_before = true; }

// Blocks run to their end one after another on an OS thread: a word that waits for a later block would never change. The block's
// other threads go on meanwhile.
inline void wait_for_global(const uint32_t* pointer, uint32_t value, int line = __builtin_LINE()) {
  block().check_global(pointer, 4, 4, false, "ld.acquire.global.u32", line);
  constexpr int PATIENCE_MS = 20000;
  timespec pause = {0, 100000};
  for (int waited = 0; __atomic_load_n(pointer, __ATOMIC_ACQUIRE) != value;) {
    if (waited > PATIENCE_MS * 10 || __atomic_load_n(&block().launch().faulted, __ATOMIC_ACQUIRE))
      block().fault(*current_fiber, cudaErrorLaunchTimeout, line,
                    "deadlock: waits for global address %p to be %u, which is %u", static_cast<const void*>(pointer), value,
                    __atomic_load_n(pointer, __ATOMIC_RELAXED));
    if (block().let_others_run()) continue;
    nanosleep(&pause, nullptr);
    waited++;
  }
  current_fiber->acquired_unfenced = true;
}

inline uint32_t load_acquire_global(const uint32_t* pointer, int line = __builtin_LINE()) {
  block().check_global(pointer, 4, 4, false, "ld.acquire.global.u32", line);
  current_fiber->acquired_unfenced = true;
  return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}

inline void release_global(uint32_t* pointer, uint32_t value, int line = __builtin_LINE()) {
  block().check_global(pointer, 4, 4, true, "st.release.global.u32", line);
  block().check_handing_on("st.release.global.u32", line);
  __atomic_store_n(pointer, value, __ATOMIC_RELEASE);
}

inline void release_add_global(uint32_t* pointer, uint32_t value, int line = __builtin_LINE()) {
  block().check_global(pointer, 4, 4, true, "red.release.global.add.u32", line);
  block().check_handing_on("red.release.global.add.u32", line);
  __atomic_fetch_add(pointer, value, __ATOMIC_RELEASE);
}

// ---- mbarrier and TMA ----

inline void mbarrier_init(uint32_t barrier, uint32_t arrivals, int line = __builtin_LINE()) {
  block().mbarrier_init(barrier, arrivals, line);
}

inline void mbarrier_fence_init() { block().mbarrier_fence_init(); }

inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes, int line = __builtin_LINE()) {
  block().mbarrier_arrive_expect_tx(barrier, bytes, line);
}

inline void mbarrier_arrive(uint32_t barrier, bool arrives, int line = __builtin_LINE()) {
  if (arrives) block().mbarrier_arrive(barrier, line);
}

inline void mbarrier_wait(uint32_t barrier, uint32_t parity, int line = __builtin_LINE()) {
  block().mbarrier_wait(barrier, parity, line);
}

// The mbarrier that an asynchronous copy is to complete on.
inline bwdtune_host::Mbarrier& mbarrier_of_copy(uint32_t barrier, const char* what, int line) {
  bwdtune_host::Mbarrier& mbarrier = block().mbarrier_at(barrier, what, line);
  if (!mbarrier.fenced)
    block().fault(*current_fiber, cudaErrorLaunchFailure, line,
                  "%s completes on an mbarrier whose initialiser has not called mbarrier_fence_init", what);
  return mbarrier;
}

// Its alignment is its type's: not looked at, as compilers do not all keep it in a parameter's copy.
inline const bwdtune_host::TensorMap& tensor_map_of(const CUtensorMap* map, int line) {
  const auto& decoded = *reinterpret_cast<const bwdtune_host::TensorMap*>(map);
  if (decoded.magic != bwdtune_host::TENSOR_MAP_MAGIC)
    block().fault(*current_fiber, cudaErrorLaunchFailure, line, "there is no encoded tensor map at %p", map);
  return decoded;
}

// One row of a box: `columns` elements from `row` on into `to`, whose shared address is `address`. Elements before the first
// or past the last column, and all of a row that lies outside (null), are zero. The swizzle permutes 16-byte chunks: the
// address' bits 4 and up are xored with as many of its bits 7 and up.
inline void copy_box_row(const bwdtune_host::TensorMap& map, uint8_t* to, uint32_t address, const uint8_t* row, int64_t c0,
                         int line) {
  uint8_t bytes[256 * 4] = {};
  const int64_t size = static_cast<int64_t>(map.size[0]), first = c0 < 0 ? -c0 : 0;
  const int64_t last = c0 + map.box[0] > size ? size - c0 : map.box[0];
  if (row && first < last) {
    const uint8_t* source = row + (c0 + first) * map.element_bytes;
    const uint64_t count = static_cast<uint64_t>(last - first) * map.element_bytes;
    block().check_global(source, count, 1, false, "cp.async.bulk.tensor", line);
    memcpy(bytes + first * map.element_bytes, source, count);
  }
  const uint32_t mask = map.swizzle_bytes ? map.swizzle_bytes / 16u - 1 : 0;
  for (uint32_t at = 0; at < map.box[0] * map.element_bytes; at += 16) {
    const uint32_t swizzled = (address + at) ^ ((address + at) >> 7 & mask) << 4;
    memcpy(to + static_cast<int32_t>(swizzled - address), bytes + at, 16);
  }
}

// Calls `visit(row, at)` for each row of a box whose first element is at `coordinates`: the address of the row's column 0 in
// the tensor, null where it lies outside, and how many bytes of the box come before it. Addresses wrap around at 2^64.
template <class Visit>
void for_each_box_row(const bwdtune_host::TensorMap& tensor, const int* coordinates, Visit visit) {
  uint32_t rows = 1;
  for (uint32_t d = 1; d < tensor.rank; d++) rows *= tensor.box[d];
  for (uint32_t number = 0; number < rows; number++) {
    uint64_t row = reinterpret_cast<uint64_t>(tensor.base);
    bool inside = true;
    for (uint32_t d = 1, left = number; d < tensor.rank; left /= tensor.box[d++]) {
      const int64_t at = int64_t{coordinates[d]} + left % tensor.box[d];
      inside = inside && at >= 0 && static_cast<uint64_t>(at) < tensor.size[d];
      row += static_cast<uint64_t>(at) * tensor.stride[d - 1];
    }
    visit(inside ? reinterpret_cast<uint8_t*>(row) : nullptr, number * tensor.box[0] * tensor.element_bytes);
  }
}

inline uint32_t box_bytes(const bwdtune_host::TensorMap& tensor) {
  uint32_t bytes = tensor.element_bytes;
  for (uint32_t d = 0; d < tensor.rank; d++) bytes *= tensor.box[d];
  return bytes;
}

inline void check_box(const bwdtune_host::TensorMap& tensor, uint32_t rank, int line) {
  const uint32_t pitch = tensor.box[0] * tensor.element_bytes;
  if (tensor.rank != rank)
    block().fault(*current_fiber, cudaErrorLaunchFailure, line, "a %u-D copy with a tensor map of rank %u", rank,
                  tensor.rank);
  if (tensor.swizzle_bytes && pitch != tensor.swizzle_bytes)
    block().fault(*current_fiber, cudaErrorLaunchFailure, line,
                  "box rows of %u bytes with a swizzle of %u: the host target takes them equal", pitch,
                  tensor.swizzle_bytes);
}

template <uint32_t RANK>
void tma_load(uint32_t destination, const CUtensorMap* map, const int (&coordinates)[RANK], uint32_t barrier, int line) {
  const bwdtune_host::TensorMap& tensor = tensor_map_of(map, line);
  check_box(tensor, RANK, line);
  bwdtune_host::Mbarrier& mbarrier = mbarrier_of_copy(barrier, "cp.async.bulk.tensor", line);
  const uint32_t bytes = box_bytes(tensor);
  // A swizzle's pattern repeats every 8 of its rows; a destination inside of it would shift the data against the reader's.
  const uint32_t alignment = tensor.swizzle_bytes > 16 ? 8u * tensor.swizzle_bytes : 128u;
  uint8_t* to = block().write_shared(*current_fiber, destination, bytes, alignment, "cp.async.bulk.tensor", line, &mbarrier);
  for_each_box_row(tensor, coordinates, [&](const uint8_t* row, uint32_t at) {
    copy_box_row(tensor, to + at, destination + at, row, coordinates[0], line);
  });
  block().mbarrier_complete_tx(mbarrier, bytes, line);
}

inline void tma_load_4d(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2, int c3, uint32_t barrier,
                        int line = __builtin_LINE()) {
  tma_load(destination, map, {c0, c1, c2, c3}, barrier, line);
}

inline void tma_load_5d(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4,
                        uint32_t barrier, int line = __builtin_LINE()) {
  tma_load(destination, map, {c0, c1, c2, c3, c4}, barrier, line);
}

inline void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                      int line = __builtin_LINE()) {
  const char* what = "cp.async.bulk";
  if (!bytes || bytes % 16)
    block().fault(*current_fiber, cudaErrorLaunchFailure, line, "%s of %u bytes: they must be a multiple of 16", what, bytes);
  bwdtune_host::Mbarrier& mbarrier = mbarrier_of_copy(barrier, what, line);
  block().check_global(source, bytes, 16, false, what, line);
  memcpy(block().write_shared(*current_fiber, destination, bytes, 16, what, line, &mbarrier), source, bytes);
  block().mbarrier_complete_tx(mbarrier, bytes, line);
}

// ---- copies from shared memory ----

inline void fence_proxy_async_shared() { block().proxy_fence(); }
inline void fence_proxy_async() { block().proxy_fence_of_all_memory(); }

// Registers the reads that the copy will make, so that nothing of it may be missing now.
inline void issue_bulk(bwdtune_host::BulkOperation& operation, uint32_t alignment, const char* what) {
  const Fiber& fiber = *current_fiber;
  if (operation.source % alignment)
    block().fault(fiber, cudaErrorMisalignedAddress, operation.line, "%s from shared address 0x%x, which is not %u-byte aligned",
                  what, operation.source, alignment);
  block().begin_operands();
  for (uint32_t at = 0; at < operation.bytes; at += 16)
    block().read_shared_async(fiber, operation.source + at, 16, what, operation.line);
  operation.version = block().operands_version();
  block().issue_bulk(operation);
}

// What the copy reads, as it is done.
inline const uint8_t* read_bulk(const Fiber& fiber, const bwdtune_host::BulkOperation& operation, const char* what) {
  block().begin_operands();
  for (uint32_t at = 0; at < operation.bytes; at += 16)
    block().read_shared_async(fiber, operation.source + at, 16, what, operation.line);
  block().check_operands(fiber, operation.version, what, operation.line);
  return block().read_shared(fiber, operation.source, 16, what, operation.line);
}

inline void execute_reduce_add(const Fiber& fiber, const bwdtune_host::BulkOperation& operation) {
  const uint8_t* source = read_bulk(fiber, operation, "cp.reduce.async.bulk");
  for (uint32_t i = 0; i < operation.bytes / 4; i++) {
    float value;
    memcpy(&value, source + 4 * i, sizeof value);
    atomic_add(static_cast<float*>(operation.destination) + i, value);
  }
}

inline void execute_bulk_store(const Fiber& fiber, const bwdtune_host::BulkOperation& operation) {
  memcpy(operation.destination, read_bulk(fiber, operation, "cp.async.bulk"), operation.bytes);
}

// A copy from shared memory to as many bytes of global memory.
inline void bulk_to_global(void (*execute)(const Fiber&, const bwdtune_host::BulkOperation&), float* destination,
                           uint32_t source, uint32_t bytes, const char* what, int line) {
  if (!bytes || bytes % 16)
    block().fault(*current_fiber, cudaErrorLaunchFailure, line, "%s of %u bytes: they must be a multiple of 16", what, bytes);
  block().check_global(destination, bytes, 16, true, what, line);
  bwdtune_host::BulkOperation operation = {};
  operation.execute = execute;
  operation.thread = current_fiber->thread;
  operation.group = current_fiber->bulk_groups;
  operation.source = source;
  operation.bytes = bytes;
  operation.line = line;
  operation.destination = destination;
  issue_bulk(operation, 16, what);
}

inline void bulk_reduce_add(float* destination, uint32_t source, uint32_t bytes, int line = __builtin_LINE()) {
  bulk_to_global(execute_reduce_add, destination, source, bytes, "cp.reduce.async.bulk", line);
}

inline void bulk_store(float* destination, uint32_t source, uint32_t bytes, int line = __builtin_LINE()) {
  bulk_to_global(execute_bulk_store, destination, source, bytes, "cp.async.bulk", line);
}

inline void execute_tma_store(const Fiber& fiber, const bwdtune_host::BulkOperation& operation) {
  const bwdtune_host::TensorMap& tensor = tensor_map_of(operation.map, operation.line);
  const uint32_t mask = tensor.swizzle_bytes ? tensor.swizzle_bytes / 16u - 1 : 0;
  const uint32_t pitch = tensor.box[0] * tensor.element_bytes, chunk_elements = 16 / tensor.element_bytes;
  const uint8_t* source = read_bulk(fiber, operation, "cp.async.bulk.tensor");
  for_each_box_row(tensor, operation.coordinates, [&](uint8_t* row, uint32_t row_at) {
    const uint32_t address = operation.source + row_at;
    for (uint32_t at = 0; row && at < pitch; at += 16) {
      const uint32_t swizzled = (address + at) ^ ((address + at) >> 7 & mask) << 4;
      const uint8_t* chunk = source + (swizzled - operation.source);
      const int64_t column = int64_t{operation.coordinates[0]} + at / tensor.element_bytes;
      uint8_t* to = row + column * tensor.element_bytes;
      for (uint32_t i = 0; i < chunk_elements; i++) {
        if (column + i < 0 || static_cast<uint64_t>(column + i) >= tensor.size[0]) continue;
        block().check_global(to + i * tensor.element_bytes, tensor.element_bytes, 1, true, "cp.async.bulk.tensor",
                             operation.line);
        memcpy(to + i * tensor.element_bytes, chunk + i * tensor.element_bytes, tensor.element_bytes);
      }
    }
  });
}

template <uint32_t RANK>
void tma_store(const CUtensorMap* map, const int (&coordinates)[RANK], uint32_t source, int line) {
  const bwdtune_host::TensorMap& tensor = tensor_map_of(map, line);
  check_box(tensor, RANK, line);
  bwdtune_host::BulkOperation operation = {};
  operation.execute = execute_tma_store;
  operation.thread = current_fiber->thread;
  operation.group = current_fiber->bulk_groups;
  operation.source = source;
  operation.bytes = box_bytes(tensor);
  operation.line = line;
  operation.map = map;
  memcpy(operation.coordinates, coordinates, sizeof coordinates);
  issue_bulk(operation, tensor.swizzle_bytes > 16 ? 8u * tensor.swizzle_bytes : 128u, "cp.async.bulk.tensor");
}

inline void tma_store_4d(const CUtensorMap* map, int c0, int c1, int c2, int c3, uint32_t source,
                         int line = __builtin_LINE()) {
  tma_store(map, {c0, c1, c2, c3}, source, line);
}

inline void tma_store_5d(const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4, uint32_t source,
                         int line = __builtin_LINE()) {
  tma_store(map, {c0, c1, c2, c3, c4}, source, line);
}

inline void bulk_commit() { current_fiber->bulk_groups++; }

template <int LEFT>
void bulk_wait_read() {
  block().wait_bulk(LEFT, true);
}

template <int LEFT>
void bulk_wait() {
  block().wait_bulk(LEFT, false);
}

// ---- tensor cores ----

struct LdmatrixOperands {
  uint32_t* fragment;
  uint32_t address;
  int line;
};

// Matrix m has its rows at the addresses of lanes 8m to 8m + 7. Lane l receives two elements of each matrix: row l / 4,
// columns 2 (l % 4) and the next; transposed, row and column change places.
template <bool TRANSPOSED>
void execute_ldmatrix(Warp& warp) {
  Block& block = *warp.lanes[0].block;
  for (uint32_t matrix = 0; matrix < 4; matrix++) {
    uint16_t rows[8][8];
    for (uint32_t row = 0; row < 8; row++) {
      const Fiber& fiber = warp.lanes[8 * matrix + row];
      const LdmatrixOperands& operands = operands_of<LdmatrixOperands>(warp, fiber.lane);
      memcpy(rows[row], block.read_shared(fiber, operands.address, 16, "ldmatrix", operands.line), 16);
    }
    for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
      const uint32_t major = lane / 4, minor = lane % 4 * 2;
      const uint32_t low = TRANSPOSED ? rows[minor][major] : rows[major][minor];
      const uint32_t high = TRANSPOSED ? rows[minor + 1][major] : rows[major][minor + 1];
      operands_of<LdmatrixOperands>(warp, lane).fragment[matrix] = low | high << 16;
    }
  }
}
constexpr WarpInstruction LDMATRIX = {"ldmatrix.x4", execute_ldmatrix<false>};
constexpr WarpInstruction LDMATRIX_TRANS = {"ldmatrix.x4.trans", execute_ldmatrix<true>};

inline void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t address, int line = __builtin_LINE()) {
  LdmatrixOperands operands = {fragment, address, line};
  block().execute_in_warp(LDMATRIX, &operands, line);
}

inline void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t address, int line = __builtin_LINE()) {
  LdmatrixOperands operands = {fragment, address, line};
  block().execute_in_warp(LDMATRIX_TRANS, &operands, line);
}

inline void execute_movmatrix(Warp& warp) {
  uint32_t rows[8][4];
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++) rows[lane / 4][lane % 4] = operands_of<uint32_t>(warp, lane);
  const auto element = [&](uint32_t row, uint32_t column) { return rows[row][column / 2] >> column % 2 * 16 & 0xffffu; };
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
    const uint32_t row = lane / 4, column = lane % 4 * 2;
    operands_of<uint32_t>(warp, lane) = element(column, row) | element(column + 1, row) << 16;
  }
}
constexpr WarpInstruction MOVMATRIX = {"movmatrix", execute_movmatrix};

inline uint32_t movmatrix_trans(uint32_t fragment, int line = __builtin_LINE()) {
  block().execute_in_warp(MOVMATRIX, &fragment, line);
  return fragment;
}

struct StmatrixOperands {
  const uint32_t* fragment;
  uint32_t address;
  int line;
};

template <bool TRANSPOSED>
void execute_stmatrix(Warp& warp) {
  Block& block = *warp.lanes[0].block;
  for (uint32_t matrix = 0; matrix < 4; matrix++)
    for (uint32_t row = 0; row < 8; row++) {
      const auto element = [&](uint32_t column) {
        const uint32_t major = TRANSPOSED ? column : row, minor = TRANSPOSED ? row : column;
        return operands_of<StmatrixOperands>(warp, 4 * major + minor / 2).fragment[matrix] >> minor % 2 * 16 & 0xffffu;
      };
      uint32_t pairs[4];
      for (uint32_t i = 0; i < 4; i++) pairs[i] = element(2 * i) | element(2 * i + 1) << 16;
      const Fiber& fiber = warp.lanes[8 * matrix + row];
      const StmatrixOperands& operands = operands_of<StmatrixOperands>(warp, fiber.lane);
      memcpy(block.write_shared(fiber, operands.address, 16, 16, "stmatrix", operands.line), pairs, 16);
    }
}
constexpr WarpInstruction STMATRIX = {"stmatrix.x4", execute_stmatrix<false>};
constexpr WarpInstruction STMATRIX_TRANS = {"stmatrix.x4.trans", execute_stmatrix<true>};

inline void stmatrix_x4(uint32_t address, const uint32_t (&fragment)[4], int line = __builtin_LINE()) {
  StmatrixOperands operands = {fragment, address, line};
  block().execute_in_warp(STMATRIX, &operands, line);
}

inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&fragment)[4], int line = __builtin_LINE()) {
  StmatrixOperands operands = {fragment, address, line};
  block().execute_in_warp(STMATRIX_TRANS, &operands, line);
}

struct MmaOperands {
  float* accumulator;
  const uint32_t* a;
  uint32_t b[2];
};

// With g = lane / 4 and t = 2 (lane % 4), a lane holds of A the pairs (g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8); of B
// the pairs (t, g) and (t + 8, g), along k; of the accumulator (g, t) and (g + 8, t).
template <class Element>
void execute_mma(Warp& warp) {
  // Four floats: what every CPU has in one register.
  typedef float Quad __attribute__((vector_size(16), may_alias));
  float a[16][16];
  alignas(16) float b[16][8], accumulator[16][8];
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
    const MmaOperands& operands = operands_of<MmaOperands>(warp, lane);
    const uint32_t g = lane / 4, t = lane % 4 * 2;
    for (uint32_t i = 0; i < 4; i++) {
      const float2 pair = unpack<Element>(operands.a[i]);
      a[g + i % 2 * 8][t + i / 2 * 8] = pair.x;
      a[g + i % 2 * 8][t + i / 2 * 8 + 1] = pair.y;
      accumulator[g + i / 2 * 8][t + i % 2] = operands.accumulator[i];
    }
    for (uint32_t i = 0; i < 2; i++) {
      const float2 pair = unpack<Element>(operands.b[i]);
      b[t + i * 8][g] = pair.x;
      b[t + i * 8 + 1][g] = pair.y;
    }
  }
  for (uint32_t m = 0; m < 16; m++) {
    Quad* sums = reinterpret_cast<Quad*>(accumulator[m]);
    Quad left = sums[0], right = sums[1];
    for (uint32_t k = 0; k < 16; k++) {
      const Quad* row = reinterpret_cast<const Quad*>(b[k]);
      left += a[m][k] * row[0];
      right += a[m][k] * row[1];
    }
    sums[0] = left;
    sums[1] = right;
  }
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
    const MmaOperands& operands = operands_of<MmaOperands>(warp, lane);
    const uint32_t g = lane / 4, t = lane % 4 * 2;
    for (uint32_t i = 0; i < 4; i++) operands.accumulator[i] = accumulator[g + i / 2 * 8][t + i % 2];
  }
}
template <class Element>
constexpr WarpInstruction MMA = {"mma.m16n8k16", execute_mma<Element>};

template <class Element>
void mma_m16n8k16(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line = __builtin_LINE()) {
  MmaOperands operands = {accumulator, a, {b0, b1}};
  block().execute_in_warp(MMA<Element>, &operands, line);
}

// ---- tensor cores, by warpgroups ----

// A warp computes 16 of the 64 rows, so that each does its share by itself.

template <int COUNT>
void change_registers(int line) {
  static_assert(COUNT >= 24 && COUNT <= 256 && COUNT % 8 == 0, "setmaxnreg takes multiples of 8 from 24 to 256");
  static constexpr WarpInstruction SETMAXNREG = {"setmaxnreg", [](Warp&) {}};
  block().execute_in_warp(SETMAXNREG, nullptr, line);
}

template <int COUNT>
void increase_registers(int line = __builtin_LINE()) {
  change_registers<COUNT>(line);
}

template <int COUNT>
void decrease_registers(int line = __builtin_LINE()) {
  change_registers<COUNT>(line);
}

constexpr WarpInstruction WGMMA_FENCE = {"wgmma.fence", [](Warp& warp) { warp.wgmma_fenced = true; }};
constexpr WarpInstruction WGMMA_COMMIT = {"wgmma.commit_group", [](Warp& warp) { warp.wgmma_groups++; }};

inline void wgmma_fence(int line = __builtin_LINE()) { block().execute_in_warp(WGMMA_FENCE, nullptr, line); }
inline void wgmma_commit(int line = __builtin_LINE()) { block().execute_in_warp(WGMMA_COMMIT, nullptr, line); }

template <int LEFT>
void wgmma_wait(int line = __builtin_LINE()) {
  static constexpr WarpInstruction WGMMA_WAIT = {"wgmma.wait_group", [](Warp& warp) {
                                                   warp.wgmma_fenced = false;
                                                   warp.lanes[0].block->wait_wgmma(warp, LEFT);
                                                 }};
  block().execute_in_warp(WGMMA_WAIT, nullptr, line);
}

template <int N>
void wgmma_fence_operand(float (&)[N]) {}

// A matrix of 16 (k) x `count` elements in shared memory, read by rows of k. Of the descriptor: bits 0-13 start address / 16,
// 16-29 leading byte offset / 16, 32-45 stride byte offset / 16, 62-63 swizzle: 1, 2, 3 for 128, 64 and 32 bytes.
// A row of `swizzle` bytes and its 7 successors are an atom. Not transposed, such a row is along k, and SBO is the distance
// of atoms along the other dimension; transposed, it is along the other dimension, with LBO between atoms there and SBO along k.
class MatrixDescriptor {
 public:
  MatrixDescriptor(uint64_t bits, bool transposed)
      : start_((bits & 0x3fff) << 4),
        leading_((bits >> 16 & 0x3fff) << 4),
        stride_((bits >> 32 & 0x3fff) << 4),
        mode_(bits >> 62),
        base_offset_(bits >> 49 & 7),
        transposed_(transposed) {}

  void read(Warp& warp, float (*widen)(uint32_t), int first, int count, float (*matrix)[256], int line) const {
    const Fiber& fiber = warp.lanes[0];
    if (!mode_ || base_offset_)
      block().fault(fiber, cudaErrorLaunchFailure, line,
                    "a matrix descriptor of layout %u and base offset %u: the host target takes swizzled ones that start with "
                    "their pattern", mode_, base_offset_);
    const int row_bytes = 256 >> mode_, row_elements = row_bytes / 2;
    const uint32_t mask = row_bytes / 16 - 1;
    for (int major = 0; major < (transposed_ ? 16 : count); major++)
      for (int minor = 0; minor < (transposed_ ? count : 16); minor += 8) {
        const int at_major = major + (transposed_ ? 0 : first), at_minor = minor + (transposed_ ? first : 0);
        uint32_t address = start_ + at_major / 8 * stride_ + at_major % 8 * row_bytes;
        address += transposed_ ? at_minor / row_elements * leading_ + at_minor % row_elements * 2 : at_minor * 2;
        address ^= (address >> 7 & mask) << 4;
        uint16_t elements[8];
        memcpy(elements, block().read_shared_async(fiber, address, 16, "wgmma", line), 16);
        for (int i = 0; i < 8; i++)
          (transposed_ ? matrix[major][minor + i] : matrix[minor + i][major]) = widen(elements[i]);
      }
  }

 private:
  const uint32_t start_, leading_, stride_, mode_, base_offset_;
  const bool transposed_;
};

template <class Element, bool A_IN_REGISTERS, bool TRANSPOSED_A, bool TRANSPOSED_B>
struct Wgmma {
  // The operands of 16 rows, from shared memory and from the lanes' fragments, both by rows of k.
  static void read(Warp& warp, const bwdtune_host::WgmmaOperation& operation, float (*a)[256], float (*b)[256]) {
    const int first_row = warp.index % 4 * 16;
    if (!A_IN_REGISTERS)
      MatrixDescriptor(operation.a_descriptor, TRANSPOSED_A).read(warp, widen<Element>, first_row, 16, a, operation.line);
    MatrixDescriptor(operation.b_descriptor, TRANSPOSED_B)
        .read(warp, widen<Element>, 0, operation.columns, b, operation.line);
    for (uint32_t lane = 0; A_IN_REGISTERS && lane < WARP_SIZE; lane++)
      for (uint32_t i = 0; i < 4; i++) {
        const float2 pair = unpack<Element>(operation.a[lane][i]);
        const uint32_t row = lane / 4 + i % 2 * 8, k = lane % 4 * 2 + i / 2 * 8;
        a[k][row] = pair.x;
        a[k + 1][row] = pair.y;
      }
  }

  static void execute(Warp& warp, const bwdtune_host::WgmmaOperation& operation) {
    float a[16][256], b[16][256];
    block().begin_operands();
    read(warp, operation, a, b);
    block().check_operands(warp.lanes[0], operation.version, "wgmma", operation.line);
    for (uint32_t row = 0; row < 16; row++) {
      float sums[256] = {};
      float* parts[4];
      for (uint32_t t = 0; t < 4; t++) parts[t] = operation.accumulators[row % 8 * 4 + t] + row / 8 * 2;
      if (operation.accumulate)
        for (int n = 0; n < operation.columns; n++) sums[n] = parts[n % 8 / 2][n / 8 * 4 + n % 2];
      for (int k = 0; k < 16; k++)
        for (int n = 0; n < operation.columns; n++) sums[n] += a[k][row] * b[k][n];
      for (int n = 0; n < operation.columns; n++) parts[n % 8 / 2][n / 8 * 4 + n % 2] = sums[n];
    }
  }

  struct Operands {
    float* accumulator;
    uint32_t a[4];
    uint64_t a_descriptor, b_descriptor;
    int columns, line;
    bool accumulate;
  };

  static void issue(Warp& warp) {
    const Operands& first = operands_of<Operands>(warp, 0);
    bwdtune_host::WgmmaOperation& operation = block().issue_wgmma(warp, first.line);
    operation.execute = execute;
    operation.columns = first.columns;
    operation.accumulate = first.accumulate;
    operation.a_descriptor = first.a_descriptor;
    operation.b_descriptor = first.b_descriptor;
    for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
      const Operands& operands = operands_of<Operands>(warp, lane);
      if (operands.a_descriptor != first.a_descriptor || operands.b_descriptor != first.b_descriptor ||
          operands.accumulate != first.accumulate)
        block().fault(warp.lanes[lane], cudaErrorLaunchFailure, first.line, "wgmma with operands that differ between lanes");
      operation.accumulators[lane] = operands.accumulator;
      memcpy(operation.a[lane], operands.a, sizeof operands.a);
    }
    float a[16][256], b[16][256];
    block().begin_operands();
    read(warp, operation, a, b);
    operation.version = block().operands_version();
  }
  static constexpr WarpInstruction INSTRUCTION = {"wgmma.mma_async", issue};
};

template <class Element, bool TRANSPOSED_A, bool TRANSPOSED_B, int SIZE>
void wgmma_ss(float (&accumulator)[SIZE], uint64_t a, uint64_t b, bool accumulate, int line = __builtin_LINE()) {
  using Instruction = Wgmma<Element, false, TRANSPOSED_A, TRANSPOSED_B>;
  typename Instruction::Operands operands = {accumulator, {}, a, b, 2 * SIZE, line, accumulate};
  block().execute_in_warp(Instruction::INSTRUCTION, &operands, line);
}

template <class Element, bool TRANSPOSED_B, int SIZE>
void wgmma_rs(float (&accumulator)[SIZE], const uint32_t (&a)[4], uint64_t b, bool accumulate,
              int line = __builtin_LINE()) {
  using Instruction = Wgmma<Element, true, false, TRANSPOSED_B>;
  typename Instruction::Operands operands = {accumulator, {a[0], a[1], a[2], a[3]}, 0, b, 2 * SIZE, line, accumulate};
  block().execute_in_warp(Instruction::INSTRUCTION, &operands, line);
}

// ---- what only probed kernels need ----

// All blocks run on one SM, whose clock counts nanoseconds.
inline uint32_t sm_index() { return 0; }

inline uint64_t sm_clock() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

inline void reduce_min_global(uint64_t* pointer, uint64_t value, int line = __builtin_LINE()) {
  block().check_global(pointer, 8, 8, true, "red.global.min.u64", line);
  uint64_t old = __atomic_load_n(pointer, __ATOMIC_RELAXED);
  while (value < old && !__atomic_compare_exchange_n(pointer, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

inline void reduce_max_global(uint64_t* pointer, uint64_t value, int line = __builtin_LINE()) {
  block().check_global(pointer, 8, 8, true, "red.global.max.u64", line);
  uint64_t old = __atomic_load_n(pointer, __ATOMIC_RELAXED);
  while (value > old && !__atomic_compare_exchange_n(pointer, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// A CPU keeps no pace, and dummy mma change no result: there are none.
inline void pace_begin() {}
inline uint32_t pace_end() { return 0; }

}  // namespace ptx
