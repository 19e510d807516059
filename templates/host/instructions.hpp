// What the functions of ptx_host.hpp do. The 32 lanes of a warp execute an instruction together, when the last of them has
// come to it: each leaves its operands where the others find them.
#pragma once

#include <time.h>

#include "launch.hpp"
#include "ptx_host.hpp"

namespace bwdtune_host __attribute__((visibility("hidden"))) {

unsigned thread_x() { return current_fiber->thread_index.x; }
unsigned thread_y() { return current_fiber->thread_index.y; }
unsigned thread_z() { return current_fiber->thread_index.z; }
unsigned block_x() { return current_fiber->block->index(current_fiber->rank).x; }
unsigned block_y() { return current_fiber->block->index(current_fiber->rank).y; }
unsigned block_z() { return current_fiber->block->index(current_fiber->rank).z; }
unsigned block_size_x() { return current_fiber->block->launch().block.x; }
unsigned block_size_y() { return current_fiber->block->launch().block.y; }
unsigned block_size_z() { return current_fiber->block->launch().block.z; }
unsigned grid_x() { return current_fiber->block->launch().grid.x; }
unsigned grid_y() { return current_fiber->block->launch().grid.y; }
unsigned grid_z() { return current_fiber->block->launch().grid.z; }

}  // namespace bwdtune_host

namespace ptx __attribute__((visibility("hidden"))) {

using bwdtune_host::Block;
using bwdtune_host::current_fiber;
using bwdtune_host::Fiber;
using bwdtune_host::Launch;
using bwdtune_host::Quad;
using bwdtune_host::Reach;
using bwdtune_host::Warp;
using bwdtune_host::WARP_SIZE;
using bwdtune_host::WarpInstruction;
using bwdtune_host::Words;

inline Block& block() { return *current_fiber->block; }

// ---- values ----

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

template uint32_t pack<bf16>(float, float);
template uint32_t pack<fp16>(float, float);

template <class Element>
float2 unpack(uint32_t packed) {
  return make_float2(widen<Element>(packed & 0xffffu), widen<Element>(packed >> 16));
}
template float2 unpack<bf16>(uint32_t);
template float2 unpack<fp16>(uint32_t);

// Of the result and of x, subnormals are zero.
float exp2_approx(float x) {
  const float y = exp2f(fabsf(x) < 0x1p-126f ? 0.0f : x);
  return y < 0x1p-126f ? 0.0f : y;
}

float reciprocal_approx(float x) {
  const float y = 1.0f / (fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x);
  return fabsf(y) < 0x1p-126f ? copysignf(0.0f, y) : y;
}

// ---- threads ----

template <class Operands>
Operands& operands_of(Warp& warp, uint32_t lane) {
  return *static_cast<Operands*>(warp.operands[lane]);
}

inline void execute_elect(Warp& warp) {
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++) operands_of<bool>(warp, lane) = lane == 0;
}
constexpr WarpInstruction ELECT = {"elect.sync", execute_elect};

inline void execute_sync_warp(Warp& warp) { warp.lanes[0].block->join_warp(warp); }
constexpr WarpInstruction SYNC_WARP = {"bar.warp.sync", execute_sync_warp};

void sync_warp(int line) { block().execute_in_warp(SYNC_WARP, nullptr, line); }

bool elect_one(int line) {
  bool elected;
  block().execute_in_warp(ELECT, &elected, line);
  return elected;
}

uint32_t lane_id() { return current_fiber->lane; }

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

void named_barrier_sync(int barrier, int threads, int line) {
  NamedBarrierOperands operands = {barrier, threads, line, 0};
  block().execute_in_warp(BAR_SYNC, &operands, line);
  block().wait_at_named_barrier(barrier, operands.use, line);
}

void named_barrier_arrive(int barrier, int threads, int line) {
  NamedBarrierOperands operands = {barrier, threads, line, 0};
  block().execute_in_warp(BAR_ARRIVE, &operands, line);
}

constexpr WarpInstruction SYNC_BLOCK = {bwdtune_host::BLOCK_BARRIER, execute_named_barrier};

void sync_threads(int line) {
  if (block().launch().cluster == 1) return block().sync_all(line);
  NamedBarrierOperands operands = {0, static_cast<int>(block().launch().threads), line, 0};
  block().execute_in_warp(SYNC_BLOCK, &operands, line);
  block().wait_at_named_barrier(0, operands.use, line);
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

uint32_t shuffle_xor(uint32_t value, int lane_mask, int line) {
  ShuffleOperands operands = {value, static_cast<uint32_t>(lane_mask), 0};
  block().execute_in_warp(SHUFFLE_XOR, &operands, line);
  return operands.result;
}

inline void execute_broadcast(Warp& warp) {
  const int first = operands_of<int>(warp, 0);
  for (uint32_t lane = 1; lane < WARP_SIZE; lane++) operands_of<int>(warp, lane) = first;
}
constexpr WarpInstruction BROADCAST = {"shfl.sync.idx", execute_broadcast};

int broadcast(int value, int line) {
  block().execute_in_warp(BROADCAST, &value, line);
  return value;
}

// ---- shared memory ----

uint32_t shared_memory_base() { return bwdtune_host::SHARED_BASE + current_fiber->rank * bwdtune_host::SHARED_WINDOW; }

void store_shared(uint32_t address, uint32_t value, int line) {
  memcpy(block().write_shared(*current_fiber, address, sizeof value, sizeof value, "st.shared", line), &value, sizeof value);
}

void store_shared(uint32_t address, float4 value, int line) {
  memcpy(block().write_shared(*current_fiber, address, sizeof value, sizeof value, "st.shared.v4", line), &value, sizeof value);
}

void store_shared(uint32_t address, uint4 value, int line) {
  memcpy(block().write_shared(*current_fiber, address, sizeof value, sizeof value, "st.shared.v4", line), &value, sizeof value);
}

const void* at_shared(uint32_t address, uint32_t bytes, int line) {
  return block().read_shared(*current_fiber, address, bytes, "ld.shared", line);
}

// ---- global memory ----

void check_global(const void* pointer, uint32_t bytes, bool write, const char* what, int line) {
  block().check_global(pointer, bytes, bytes, write, what, line);
  if (write) block().note_store(pointer, bytes);
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

void reduce_add_global(float* pointer, float value, int line) {
  block().check_global(pointer, 4, 4, true, "red.global.add.f32", line);
  atomic_add(pointer, value);
}

void reduce_add_global(float* pointer, float2 value, int line) {
  block().check_global(pointer, 8, 8, true, "red.global.add.v2.f32", line);
  atomic_add(pointer, value.x);
  atomic_add(pointer + 1, value.y);
}

void reduce_add_global(float* pointer, float4 value, int line) {
  block().check_global(pointer, 16, 16, true, "red.global.add.v4.f32", line);
  atomic_add(pointer, value.x);
  atomic_add(pointer + 1, value.y);
  atomic_add(pointer + 2, value.z);
  atomic_add(pointer + 3, value.w);
}

uint32_t fetch_add_global(uint32_t* pointer, uint32_t value, int line) {
  block().check_global(pointer, 4, 4, true, "atom.global.add.u32", line);
  return __atomic_fetch_add(pointer, value, __ATOMIC_RELAXED);
}

void griddepcontrol_wait() { current_fiber->waited_for_kernel_before = true; }

// Blocks run to their end one after another on an OS thread: a word that waits for a later block would never change. The block's
// other threads go on meanwhile.
template <class Reached>
void poll_global(const uint32_t* pointer, uint32_t value, int line, const char* wanted, Reached reached) {
  block().check_global(pointer, 4, 4, false, "ld.acquire.global.u32", line);
  const Launch& launch = block().launch();
  timespec pause = {0, 100000};
  for (;;) {
    const uint64_t releases = __atomic_load_n(&launch.releases, __ATOMIC_SEQ_CST);
    if (reached(__atomic_load_n(pointer, __ATOMIC_ACQUIRE))) break;
    const bool others = block().let_others_run();
    if (block().polled_in_vain(releases, others) || __atomic_load_n(&launch.faulted, __ATOMIC_ACQUIRE))
      block().fault(*current_fiber, cudaErrorLaunchTimeout, line,
                    "deadlock: waits for global address %p to be %s%u, which is %u", static_cast<const void*>(pointer), wanted,
                    value, __atomic_load_n(pointer, __ATOMIC_RELAXED));
    if (!others) nanosleep(&pause, nullptr);
  }
  block().polled_with_success();
  current_fiber->acquired_unfenced = true;
}

void wait_for_global(const uint32_t* pointer, uint32_t value, int line) {
  poll_global(pointer, value, line, "", [&](uint32_t found) { return found == value; });
}

void wait_for_at_least_global(const uint32_t* pointer, uint32_t value, int line) {
  poll_global(pointer, value, line, "at least ", [&](uint32_t found) { return found >= value; });
}

uint32_t load_acquire_global(const uint32_t* pointer, int line) {
  block().check_global(pointer, 4, 4, false, "ld.acquire.global.u32", line);
  current_fiber->acquired_unfenced = true;
  return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}

void release_global(uint32_t* pointer, uint32_t value, int line) {
  block().check_global(pointer, 4, 4, true, "st.release.global.u32", line);
  block().check_handing_on("st.release.global.u32", line);
  __atomic_store_n(pointer, value, __ATOMIC_RELEASE);
  block().count_release();
}

void release_add_global(uint32_t* pointer, uint32_t value, int line) {
  block().check_global(pointer, 4, 4, true, "red.release.global.add.u32", line);
  block().check_handing_on("red.release.global.add.u32", line);
  __atomic_fetch_add(pointer, value, __ATOMIC_RELEASE);
  block().count_release();
}

// ---- mbarrier and TMA ----

void mbarrier_init(uint32_t barrier, uint32_t arrivals, int line) {
  block().mbarrier_init(barrier, arrivals, line);
}

void mbarrier_fence_init() { block().mbarrier_fence_init(); }

void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes, int line) {
  block().mbarrier_arrive_expect_tx(barrier, bytes, line);
}

void mbarrier_arrive(uint32_t barrier, bool arrives, int line) {
  if (arrives) block().mbarrier_arrive(barrier, line);
}

void mbarrier_wait(uint32_t barrier, uint32_t parity, int line) {
  block().mbarrier_wait(barrier, parity, line);
}

// The mbarrier that an asynchronous copy is to complete on.
inline bwdtune_host::Mbarrier& mbarrier_of_copy(uint32_t barrier, const char* what, int line,
                                                Reach reach = Reach::OWN_BLOCK) {
  bwdtune_host::Mbarrier& mbarrier = block().mbarrier_at(barrier, what, line, reach);
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
  uint8_t bytes[256 * 4];
  memset(bytes, 0, map.box[0] * map.element_bytes);
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
void tma_load(uint32_t destination, const CUtensorMap* map, const int (&coordinates)[RANK], uint32_t barrier, int line,
              Reach reach = Reach::OWN_BLOCK) {
  const bwdtune_host::TensorMap& tensor = tensor_map_of(map, line);
  check_box(tensor, RANK, line);
  bwdtune_host::Mbarrier& mbarrier = mbarrier_of_copy(barrier, "cp.async.bulk.tensor", line, reach);
  const uint32_t bytes = box_bytes(tensor);
  // A swizzle's pattern repeats every 8 of its rows; a destination inside of it would shift the data against the reader's.
  const uint32_t alignment = tensor.swizzle_bytes > 16 ? 8u * tensor.swizzle_bytes : 128u;
  uint8_t* to =
      block().write_shared(*current_fiber, destination, bytes, alignment, "cp.async.bulk.tensor", line, &mbarrier, reach);
  for_each_box_row(tensor, coordinates, [&](const uint8_t* row, uint32_t at) {
    copy_box_row(tensor, to + at, destination + at, row, coordinates[0], line);
  });
  block().mbarrier_complete_tx(mbarrier, bytes, line);
}

void tma_load_4d(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2, int c3, uint32_t barrier,
                        int line) {
  tma_load(destination, map, {c0, c1, c2, c3}, barrier, line);
}

void tma_load_5d(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4,
                        uint32_t barrier, int line) {
  tma_load(destination, map, {c0, c1, c2, c3, c4}, barrier, line);
}

void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                      int line) {
  const char* what = "cp.async.bulk";
  if (!bytes || bytes % 16)
    block().fault(*current_fiber, cudaErrorLaunchFailure, line, "%s of %u bytes: they must be a multiple of 16", what, bytes);
  bwdtune_host::Mbarrier& mbarrier = mbarrier_of_copy(barrier, what, line);
  block().check_global(source, bytes, 16, false, what, line);
  block().check_acquired_source(source, bytes, line);
  memcpy(block().write_shared(*current_fiber, destination, bytes, 16, what, line, &mbarrier), source, bytes);
  block().mbarrier_complete_tx(mbarrier, bytes, line);
}

// ---- clusters ----

uint32_t cluster_rank() { return current_fiber->rank; }

void sync_cluster(int line) { block().sync_all(line); }

uint32_t map_shared(uint32_t address, uint32_t rank, int line) {
  if (rank >= block().launch().cluster)
    block().fault(*current_fiber, cudaErrorIllegalAddress, line, "mapa to block %u of a cluster of %u", rank,
                  block().launch().cluster);
  return address + (rank - current_fiber->rank) * bwdtune_host::SHARED_WINDOW;
}

template <class Value>
void write_in_cluster(uint32_t mapped, const Value& value, int line) {
  memcpy(block().write_shared(*current_fiber, mapped, sizeof value, sizeof value, "st.shared::cluster", line, nullptr,
                              Reach::CLUSTER),
         &value, sizeof value);
}

void store_in_cluster(uint32_t mapped, uint32_t value, int line) { write_in_cluster(mapped, value, line); }
void store_in_cluster(uint32_t mapped, uint4 value, int line) { write_in_cluster(mapped, value, line); }

void mbarrier_arrive_in_cluster(uint32_t mapped, bool arrives, int line) {
  if (arrives) block().mbarrier_arrive(mapped, line, Reach::CLUSTER);
}

template <uint32_t RANK>
void tma_load_multicast(uint32_t destination, const CUtensorMap* map, const int (&coordinates)[RANK], uint32_t barrier,
                        uint16_t blocks, int line) {
  for (uint32_t rank = 0; blocks >> rank; rank++)
    if (blocks >> rank & 1)
      tma_load(map_shared(destination, rank, line), map, coordinates, map_shared(barrier, rank, line), line, Reach::CLUSTER);
}

void tma_load_4d_multicast(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2, int c3, uint32_t barrier,
                           uint16_t blocks, int line) {
  tma_load_multicast(destination, map, {c0, c1, c2, c3}, barrier, blocks, line);
}

void tma_load_5d_multicast(uint32_t destination, const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4,
                           uint32_t barrier, uint16_t blocks, int line) {
  tma_load_multicast(destination, map, {c0, c1, c2, c3, c4}, barrier, blocks, line);
}

void bulk_copy_in_cluster(uint32_t mapped_destination, uint32_t source, uint32_t bytes, uint32_t mapped_barrier, int line) {
  const char* what = "cp.async.bulk.shared::cluster";
  Fiber& fiber = *current_fiber;
  if (!bytes || bytes % 16)
    block().fault(fiber, cudaErrorLaunchFailure, line, "%s of %u bytes: they must be a multiple of 16", what, bytes);
  bwdtune_host::Mbarrier& mbarrier = mbarrier_of_copy(mapped_barrier, what, line, Reach::CLUSTER);
  block().begin_operands();
  for (uint32_t at = 0; at < bytes; at += 16) block().read_shared_async(fiber, source + at, 16, what, line);
  uint8_t* to = block().write_shared(fiber, mapped_destination, bytes, 16, what, line, &mbarrier, Reach::CLUSTER);
  memcpy(to, block().shared_at(source), bytes);
  block().publish_to(mbarrier);
  block().mbarrier_complete_tx(mbarrier, bytes, line);
}

// ---- copies from shared memory ----

void fence_proxy_async_shared() { block().proxy_fence(); }
void fence_proxy_async() { block().proxy_fence_of_all_memory(); }
void fence_proxy_async_global() { block().proxy_fence_of_global_memory(); }

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
  block().check_operands(fiber, operation.version, block().operands_version(), what, operation.line);
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

void bulk_reduce_add(float* destination, uint32_t source, uint32_t bytes, int line) {
  bulk_to_global(execute_reduce_add, destination, source, bytes, "cp.reduce.async.bulk", line);
}

void bulk_store(float* destination, uint32_t source, uint32_t bytes, int line) {
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

void tma_store_4d(const CUtensorMap* map, int c0, int c1, int c2, int c3, uint32_t source,
                         int line) {
  tma_store(map, {c0, c1, c2, c3}, source, line);
}

void tma_store_5d(const CUtensorMap* map, int c0, int c1, int c2, int c3, int c4, uint32_t source,
                         int line) {
  tma_store(map, {c0, c1, c2, c3, c4}, source, line);
}

void bulk_commit() { current_fiber->bulk_groups++; }

void bulk_wait(uint32_t left, bool reads_alone) { block().wait_bulk(left, reads_alone); }

// ---- tensor cores ----

typedef uint16_t Halves __attribute__((vector_size(16), may_alias));

// An 8x8 matrix, in three rounds: each interleaves rows that are 4 apart.
inline void transpose(uint16_t (*rows)[8]) {
  Halves from[8], to[8];
  memcpy(from, rows, sizeof from);
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < 4; i++) {
      to[2 * i] = __builtin_shufflevector(from[i], from[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      to[2 * i + 1] = __builtin_shufflevector(from[i], from[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    memcpy(from, to, sizeof from);
  }
  memcpy(rows, from, sizeof from);
}

// Matrix m has its rows at the addresses of lanes 8m to 8m + 7. Lane l receives two elements of each matrix: row l / 4,
// columns 2 (l % 4) and the next, so word l of it; transposed, row and column change places.
template <bool TRANSPOSED>
void execute_ldmatrix(Warp& warp) {
  Block& block = *warp.lanes[0].block;
  alignas(16) uint16_t rows[WARP_SIZE][8];
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++)
    memcpy(rows[lane], block.read_shared(warp.lanes[lane], warp.addresses[lane], 16, "ldmatrix", warp.line), 16);
  if (TRANSPOSED)
    for (uint32_t matrix = 0; matrix < 4; matrix++) transpose(rows + 8 * matrix);
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
    uint32_t fragment[4];
    for (uint32_t matrix = 0; matrix < 4; matrix++) memcpy(fragment + matrix, rows[8 * matrix + lane / 4] + lane % 4 * 2, 4);
    memcpy(warp.operands[lane], fragment, sizeof fragment);
  }
}
constexpr WarpInstruction LDMATRIX = {"ldmatrix.x4", execute_ldmatrix<false>};
constexpr WarpInstruction LDMATRIX_TRANS = {"ldmatrix.x4.trans", execute_ldmatrix<true>};

void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t address, int line) {
  block().execute_in_warp(LDMATRIX, fragment, line, address);
}

void ldmatrix_x4_trans(uint32_t (&fragment)[4], uint32_t address, int line) {
  block().execute_in_warp(LDMATRIX_TRANS, fragment, line, address);
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

uint32_t movmatrix_trans(uint32_t fragment, int line) {
  block().execute_in_warp(MOVMATRIX, &fragment, line);
  return fragment;
}

template <bool TRANSPOSED>
void execute_stmatrix(Warp& warp) {
  Block& block = *warp.lanes[0].block;
  alignas(16) uint16_t rows[WARP_SIZE][8];  // as ldmatrix reads them
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++)
    for (uint32_t matrix = 0; matrix < 4; matrix++)
      memcpy(rows[8 * matrix + lane / 4] + lane % 4 * 2, static_cast<const uint32_t*>(warp.operands[lane]) + matrix, 4);
  if (TRANSPOSED)
    for (uint32_t matrix = 0; matrix < 4; matrix++) transpose(rows + 8 * matrix);
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++)
    memcpy(block.write_shared(warp.lanes[lane], warp.addresses[lane], 16, 16, "stmatrix", warp.line), rows[lane], 16);
}
constexpr WarpInstruction STMATRIX = {"stmatrix.x4", execute_stmatrix<false>};
constexpr WarpInstruction STMATRIX_TRANS = {"stmatrix.x4.trans", execute_stmatrix<true>};

void stmatrix_x4(uint32_t address, const uint32_t (&fragment)[4], int line) {
  block().execute_in_warp(STMATRIX, const_cast<uint32_t*>(fragment), line, address);
}

void stmatrix_x4_trans(uint32_t address, const uint32_t (&fragment)[4], int line) {
  block().execute_in_warp(STMATRIX_TRANS, const_cast<uint32_t*>(fragment), line, address);
}

// `widen` of four values.
template <class Element>
Quad widen_four(Words bits);

template <>
inline Quad widen_four<bf16>(Words bits) {
  return reinterpret_cast<Quad>(bits << 16);
}

template <>
inline Quad widen_four<fp16>(Words bits) {
  const Words magnitude = bits & 0x7fffu;
  // Moved to its place in a float, the exponent is 112 too small, that of a subnormal too. That of infinity and of what is not
  // a number has all bits set.
  const Quad values = reinterpret_cast<Quad>(magnitude << 13) * 0x1p112f;
  const Words exponent = (magnitude >= 0x7c00u) & 0x7f800000u;
  return reinterpret_cast<Quad>(reinterpret_cast<Words>(values) | exponent | (bits & 0x8000u) << 16);
}

// With g = lane / 4 and t = 2 (lane % 4), a lane holds of A the pairs (g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8); of B
// the pairs (t, g) and (t + 8, g), along k; of the accumulator (g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1). So do the sums
// of this, four a lane: each k adds A's two rows, by B's two columns.
template <class Element>
void execute_mma(const bwdtune_host::MmaOperation& operation) {
  Quad a[8][16], b[16][4];          // (g, k): a row twice, and that 8 below twice; (k, t / 2): two columns, and again
  alignas(16) uint32_t pairs[2][4][8];  // of B, by columns
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
    const Words of_a = *reinterpret_cast<const Words*>(operation.a[lane]);
    const Quad even = widen_four<Element>(of_a & 0xffffu), odd = widen_four<Element>(of_a >> 16);
    Quad* rows = a[lane / 4] + lane % 4 * 2;
    rows[0] = Quad{even[0], even[0], even[1], even[1]};
    rows[1] = Quad{odd[0], odd[0], odd[1], odd[1]};
    rows[8] = Quad{even[2], even[2], even[3], even[3]};
    rows[9] = Quad{odd[2], odd[2], odd[3], odd[3]};
    for (uint32_t half = 0; half < 2; half++) pairs[half][lane % 4][lane / 4] = operation.b[lane][half];
  }
  for (uint32_t k = 0; k < 16; k += 2)
    for (uint32_t half = 0; half < 2; half++) {
      const Words words = *reinterpret_cast<const Words*>(pairs[k / 8][k / 2 % 4] + 4 * half);
      const Quad even = widen_four<Element>(words & 0xffffu), odd = widen_four<Element>(words >> 16);
      b[k][2 * half] = Quad{even[0], even[1], even[0], even[1]};
      b[k][2 * half + 1] = Quad{even[2], even[3], even[2], even[3]};
      b[k + 1][2 * half] = Quad{odd[0], odd[1], odd[0], odd[1]};
      b[k + 1][2 * half + 1] = Quad{odd[2], odd[3], odd[2], odd[3]};
    }
  for (uint32_t g = 0; g < 8; g++) {
    float* const* accumulators = operation.accumulators + 4 * g;
    Quad sums[4];
    for (uint32_t i = 0; i < 4; i++) memcpy(&sums[i], accumulators[i], sizeof sums[i]);
    for (uint32_t k = 0; k < 16; k++)
      for (uint32_t i = 0; i < 4; i++) sums[i] += a[g][k] * b[k][i];
    for (uint32_t i = 0; i < 4; i++) memcpy(accumulators[i], &sums[i], sizeof sums[i]);
  }
}

constexpr WarpInstruction MMA_DONE = {"mma_done", [](Warp&) {}};

void mma_done(int line) { block().execute_in_warp(MMA_DONE, nullptr, line); }

template <class Element>
void mma_m16n8k16(float (&accumulator)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line) {
  Fiber& fiber = *current_fiber;
  if (fiber.mma == bwdtune_host::MAX_MMA_OPERATIONS) mma_done(line);
  bwdtune_host::MmaOperation& operation = fiber.block->leave_mma(fiber, "mma.m16n8k16", execute_mma<Element>, line);
  const uint32_t lane = fiber.lane;
  operation.accumulators[lane] = accumulator;
  memcpy(operation.a[lane], a, sizeof a);
  operation.b[lane][0] = b0;
  operation.b[lane][1] = b1;
}
template void mma_m16n8k16<bf16>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t, int);
template void mma_m16n8k16<fp16>(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t, int);

// ---- tensor cores, by warpgroups ----

constexpr WarpInstruction SETMAXNREG = {"setmaxnreg", [](Warp&) {}};
constexpr WarpInstruction WGMMA_FENCE = {"wgmma.fence", [](Warp& warp) { warp.wgmma_fenced = true; }};
constexpr WarpInstruction WGMMA_COMMIT = {"wgmma.commit_group", [](Warp& warp) { warp.wgmma_groups++; }};

void change_registers(int line) { block().execute_in_warp(SETMAXNREG, nullptr, line); }
void wgmma_fence(int line) { block().execute_in_warp(WGMMA_FENCE, nullptr, line); }
void wgmma_commit(int line) { block().execute_in_warp(WGMMA_COMMIT, nullptr, line); }

inline void execute_wgmma_wait(Warp& warp) {
  warp.wgmma_fenced = false;
  warp.lanes[0].block->wait_wgmma(warp, operands_of<uint32_t>(warp, 0));
}
constexpr WarpInstruction WGMMA_WAIT = {"wgmma.wait_group", execute_wgmma_wait};

void wgmma_wait(uint32_t left, int line) { block().execute_in_warp(WGMMA_WAIT, &left, line); }

// A matrix of 16 (k) x `count` elements in shared memory. Of the descriptor: bits 0-13 start address / 16, 16-29 leading byte
// offset / 16, 32-45 stride byte offset / 16, 62-63 swizzle: 1, 2, 3 for 128, 64 and 32 bytes.
// A row of `swizzle` bytes and its 7 successors are an atom. Not transposed, such a row is along k, and SBO is the distance
// of atoms along the other dimension; transposed, it is along the other dimension, with LBO between atoms there and SBO along k.
class MatrixDescriptor {
 public:
  MatrixDescriptor(uint64_t bits, bool transposed, int line)
      : start_(((bits & 0x3fff) << 4) + current_fiber->rank * bwdtune_host::SHARED_WINDOW),
        leading_((bits >> 16 & 0x3fff) << 4),
        stride_((bits >> 32 & 0x3fff) << 4),
        mode_(bits >> 62),
        transposed_(transposed) {
    const uint32_t base_offset = bits >> 49 & 7;
    if (!mode_ || base_offset)
      block().fault(current_fiber->warp->lanes[0], cudaErrorLaunchFailure, line,
                    "a matrix descriptor of layout %u and base offset %u: the host target takes swizzled ones that start with "
                    "their pattern", mode_, base_offset);
  }

  // Calls `visit(address, k, at)` for each 16 bytes: eight elements from k, or, transposed, from `at` on.
  template <class Visit>
  void for_each_chunk(int first, int count, Visit visit) const {
    const int row_bytes = 256 >> mode_, row_elements_log2 = 7 - static_cast<int>(mode_);
    const uint32_t mask = row_bytes / 16 - 1;
    for (int major = 0; major < (transposed_ ? 16 : count); major++)
      for (int minor = 0; minor < (transposed_ ? count : 16); minor += 8) {
        const int at_major = major + (transposed_ ? 0 : first), at_minor = minor + (transposed_ ? first : 0);
        uint32_t address = start_ + at_major / 8 * stride_ + at_major % 8 * row_bytes;
        address += transposed_ ? (at_minor >> row_elements_log2) * leading_ + (at_minor & ((1 << row_elements_log2) - 1)) * 2
                               : at_minor * 2;
        address ^= (address >> 7 & mask) << 4;
        visit(address, transposed_ ? major : minor, transposed_ ? minor : major);
      }
  }

 private:
  const uint32_t start_, leading_, stride_, mode_;
  const bool transposed_;
};

// Calls `visit_a` and `visit_b` for each 16 bytes that a warp reads of shared memory.
template <class VisitA, class VisitB>
void for_each_operand_chunk(const Warp& warp, const bwdtune_host::WgmmaOperation& operation, VisitA visit_a, VisitB visit_b) {
  const WgmmaOperands& shape = operation.operands;
  if (!shape.a_in_registers)
    MatrixDescriptor(shape.a_descriptor, shape.transposed_a, operation.line)
        .for_each_chunk(static_cast<int>(warp.index % 4 * 16), 16, visit_a);
  MatrixDescriptor(shape.b_descriptor, shape.transposed_b, operation.line).for_each_chunk(0, shape.columns, visit_b);
}

// Reads all operands as the asynchronous proxy does, and returns their version.
inline uint64_t read_operands(const Warp& warp, const bwdtune_host::WgmmaOperation& operation) {
  const auto read = [&](uint32_t address, int, int) {
    block().read_shared_async(warp.lanes[0], address, 16, "wgmma", operation.line);
  };
  block().begin_operands();
  for_each_operand_chunk(warp, operation, read, read);
  return block().operands_version();
}

// Eight elements, widened.
template <class Element>
void widen_chunk(const uint8_t* bytes, Quad (&values)[2]) {
  uint16_t elements[8];
  memcpy(elements, bytes, 16);
  for (uint32_t half = 0; half < 2; half++) {
    const uint16_t* four = elements + 4 * half;
    values[half] = widen_four<Element>(Words{four[0], four[1], four[2], four[3]});
  }
}

template <class Element>
void execute_wgmma(Warp& warp, const bwdtune_host::WgmmaOperation& operation) {
  const WgmmaOperands& shape = operation.operands;
  const bwdtune_host::Moment now = block().moment(warp.lanes[0]);
  if (now.writes != operation.issued.writes || now.clock != operation.issued.clock)
    block().check_operands(warp.lanes[0], operation.version, read_operands(warp, operation), "wgmma", operation.line);
  alignas(16) float a[16][16], b[256][16];  // by k and row; by column and k
  for_each_operand_chunk(
      warp, operation,
      [&](uint32_t address, int k, int row) {
        Quad values[2];
        widen_chunk<Element>(block().shared_at(address), values);
        for (int i = 0; i < 8; i++) (shape.transposed_a ? a[k][row + i] : a[k + i][row]) = values[i / 4][i % 4];
      },
      [&](uint32_t address, int k, int column) {
        Quad values[2];
        widen_chunk<Element>(block().shared_at(address), values);
        if (shape.transposed_b)
          for (int i = 0; i < 8; i++) b[column + i][k] = values[i / 4][i % 4];
        else
          memcpy(&b[column][k], values, sizeof values);
      });
  for (uint32_t lane = 0; shape.a_in_registers && lane < WARP_SIZE; lane++)
    for (uint32_t i = 0; i < 4; i++) {
      const float2 pair = unpack<Element>(operation.a[lane][i]);
      const uint32_t row = lane / 4 + i % 2 * 8, k = lane % 4 * 2 + i / 2 * 8;
      a[k][row] = pair.x;
      a[k + 1][row] = pair.y;
    }
  // Of a column, lane 4 (row % 8) + column % 8 / 2 has two rows, 8 apart.
  for (int column = 0; column < shape.columns; column++) {
    float* const* lanes = operation.accumulators + column % 8 / 2;
    const int place = column / 8 * 4 + column % 2;
    Quad sums[4] = {};
    for (int row = 0; shape.accumulate && row < 16; row++)
      sums[row / 4][row % 4] = lanes[row % 8 * 4][place + row / 8 * 2];
    for (int k = 0; k < 16; k++) {
      const Quad* rows = reinterpret_cast<const Quad*>(a[k]);
      for (int i = 0; i < 4; i++) sums[i] += rows[i] * b[column][k];
    }
    for (int row = 0; row < 16; row++) lanes[row % 8 * 4][place + row / 8 * 2] = sums[row / 4][row % 4];
  }
}

template <class Element>
void issue_wgmma(Warp& warp) {
  const WgmmaOperands& first = operands_of<WgmmaOperands>(warp, 0);
  bwdtune_host::WgmmaOperation& operation = block().issue_wgmma(warp, warp.line);
  operation.execute = execute_wgmma<Element>;
  operation.operands = first;
  for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
    const WgmmaOperands& operands = operands_of<WgmmaOperands>(warp, lane);
    if (operands.a_descriptor != first.a_descriptor || operands.b_descriptor != first.b_descriptor ||
        operands.columns != first.columns || operands.accumulate != first.accumulate ||
        operands.a_in_registers != first.a_in_registers || operands.transposed_a != first.transposed_a ||
        operands.transposed_b != first.transposed_b)
      block().fault(warp.lanes[lane], cudaErrorLaunchFailure, warp.line, "wgmma with operands that differ between lanes");
    operation.accumulators[lane] = operands.accumulator;
    memcpy(operation.a[lane], operands.a, sizeof operands.a);
  }
  operation.version = read_operands(warp, operation);
  operation.issued = block().moment(warp.lanes[0]);
}
template <class Element>
constexpr WarpInstruction WGMMA = {"wgmma.mma_async", issue_wgmma<Element>};

template <class Element>
void wgmma(WgmmaOperands& operands, int line) {
  block().execute_in_warp(WGMMA<Element>, &operands, line);
}
template void wgmma<bf16>(WgmmaOperands&, int);
template void wgmma<fp16>(WgmmaOperands&, int);

// ---- what only probed kernels need ----

uint64_t sm_clock() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

void reduce_min_global(uint64_t* pointer, uint64_t value, int line) {
  block().check_global(pointer, 8, 8, true, "red.global.min.u64", line);
  uint64_t old = __atomic_load_n(pointer, __ATOMIC_RELAXED);
  while (value < old && !__atomic_compare_exchange_n(pointer, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

void reduce_max_global(uint64_t* pointer, uint64_t value, int line) {
  block().check_global(pointer, 8, 8, true, "red.global.max.u64", line);
  uint64_t old = __atomic_load_n(pointer, __ATOMIC_RELAXED);
  while (value > old && !__atomic_compare_exchange_n(pointer, &old, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

}  // namespace ptx
