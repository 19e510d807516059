// Kernels that are right, and the same with one fault planted, for tests/templates/test_host_faults.py.
#include "ptx_host.hpp"

extern "C" struct Arguments {
  CUtensorMap map;        // (1, 1, 64, 8) of 16-bit elements: boxes of 8 rows of 16 bytes
  CUtensorMap wide;       // (1, 1, 64, 64), swizzled by 128 bytes: boxes of 8 rows of 128 bytes
  float* readable;        // (256)
  float* writable;        // (256)
  uint32_t expected;      // bytes of a box of `map`: 128
};

namespace {

constexpr uint32_t TILE = 0, BARRIER = 4096, SHARED_BYTES = 4096 + 16;
constexpr unsigned THREADS = 64;

uint32_t tile() { return ptx::shared_memory_base() + TILE; }
uint32_t barrier() { return ptx::shared_memory_base() + BARRIER; }
bool first() { return threadIdx.x == 0; }
uint32_t lane_row() { return tile() + threadIdx.x % 8 * 16; }

uint32_t read(uint32_t address) {
  uint32_t fragment[4];
  ptx::ldmatrix_x4(fragment, address);
  return fragment[0];
}

void write_tile() {
  for (uint32_t i = threadIdx.x; i < 1024; i += THREADS) ptx::store_shared(tile() + 4 * i, i);
}

void init_barrier(uint32_t arrivals = 1) {
  if (first()) {
    ptx::mbarrier_init(barrier(), arrivals);
    ptx::mbarrier_fence_init();
  }
  ptx::sync_threads();
}

void copy(const Arguments& a, uint32_t bytes, uint32_t offset = 0) {
  ptx::mbarrier_arrive_expect_tx(barrier(), bytes);
  ptx::tma_load_4d(tile() + offset, &a.map, 0, 0, 0, 0, barrier());
}

// ---- addresses ----

template <bool FAULT>
__global__ void shared_read_outside(const __grid_constant__ Arguments) {
  write_tile();
  ptx::sync_threads();
  read(FAULT && threadIdx.x == 37 ? tile() + SHARED_BYTES : lane_row());
}

template <bool FAULT>
__global__ void shared_write_outside(const __grid_constant__ Arguments) {
  ptx::store_shared(FAULT ? tile() - 4 * (1 + threadIdx.x) : tile() + 4 * threadIdx.x, 1);
}

template <bool FAULT>
__global__ void global_read_outside(const __grid_constant__ Arguments a) {
  ptx::load_global(a.readable + (FAULT ? 256 : 255));
}

template <bool FAULT>
__global__ void global_read_across_the_end(const __grid_constant__ Arguments a) {
  ptx::load_global(reinterpret_cast<const float4*>(a.readable + 256 - 4 + (FAULT ? 4 : 0)));
}

template <bool FAULT>
__global__ void global_write_outside(const __grid_constant__ Arguments a) {
  ptx::store_global(a.writable - (FAULT ? 1 : 0), 1.0f);
}

template <bool FAULT>
__global__ void global_add_outside(const __grid_constant__ Arguments a) {
  ptx::reduce_add_global(a.writable + (FAULT ? 256 : 254), make_float2(1, 1));
}

template <bool FAULT>
__global__ void write_of_an_input(const __grid_constant__ Arguments a) {
  ptx::store_global(FAULT ? a.readable : a.writable, 1.0f);
}

template <bool FAULT>
__global__ void misaligned_vector(const __grid_constant__ Arguments a) {
  ptx::load_global(reinterpret_cast<const float4*>(a.readable + (FAULT ? 1 : 4)));
}

template <bool FAULT>
__global__ void misaligned_add(const __grid_constant__ Arguments a) {
  ptx::reduce_add_global(a.writable + (FAULT ? 2 : 4), make_float4(1, 2, 3, 4));
}

template <bool FAULT>
__global__ void misaligned_ldmatrix(const __grid_constant__ Arguments) {
  write_tile();
  ptx::sync_threads();
  read(lane_row() + (FAULT ? 8 : 0));
}

template <bool FAULT>
__global__ void misaligned_copy(const __grid_constant__ Arguments a) {
  init_barrier();
  if (first()) copy(a, a.expected, FAULT ? 64 : 128);
  ptx::mbarrier_wait(barrier(), 0);
}

template <bool FAULT>
__global__ void copy_off_its_pattern(const __grid_constant__ Arguments a) {
  init_barrier();
  if (first()) {
    ptx::mbarrier_arrive_expect_tx(barrier(), 1024);
    ptx::tma_load_4d(tile() + (FAULT ? 128 : 1024), &a.wide, 0, 0, 0, 0, barrier());
  }
  ptx::mbarrier_wait(barrier(), 0);
}

template <bool FAULT>
__global__ void copy_from_outside(const __grid_constant__ Arguments a) {
  init_barrier();
  if (first()) {
    ptx::mbarrier_arrive_expect_tx(barrier(), 1024);
    ptx::tma_load_4d(tile(), &a.wide, 0, FAULT ? 8 : 64, 0, 0, barrier());  // from row 64 on: past the end, zeros
  }
  ptx::mbarrier_wait(barrier(), 0);
}

// ---- what shared memory holds ----

template <bool FAULT>
__global__ void read_of_nothing(const __grid_constant__ Arguments) {
  if (!FAULT || threadIdx.x != 5) ptx::store_shared(tile() + 4 * threadIdx.x, 1);
  ptx::sync_threads();
  read(lane_row());
}

template <bool FAULT>
__global__ void read_before_the_wait(const __grid_constant__ Arguments a) {
  init_barrier();
  if (first()) copy(a, a.expected);
  if (!FAULT) ptx::mbarrier_wait(barrier(), 0);
  ptx::sync_threads();
  read(lane_row());
  ptx::mbarrier_wait(barrier(), 0);
}

template <bool FAULT>
__global__ void wait_of_another_thread(const __grid_constant__ Arguments a) {
  init_barrier();
  if (first()) {
    copy(a, a.expected);
    ptx::mbarrier_wait(barrier(), 0);
  }
  if (!FAULT) ptx::sync_threads();
  if (threadIdx.x < 32) read(lane_row());
}

template <bool FAULT>
__global__ void wait_for_the_wrong_phase(const __grid_constant__ Arguments a) {
  init_barrier();
  if (first()) copy(a, a.expected);
  ptx::mbarrier_wait(barrier(), 0);
  ptx::sync_threads();
  if (first()) copy(a, a.expected);
  ptx::mbarrier_wait(barrier(), FAULT ? 0 : 1);
  read(lane_row());
}

template <bool FAULT>
__global__ void wait_that_passes_at_once(const __grid_constant__ Arguments a) {
  init_barrier();
  ptx::mbarrier_wait(barrier(), 1);  // of the phase before the first: passes
  ptx::sync_threads();
  if (first()) copy(a, a.expected);
  if (!FAULT) ptx::mbarrier_wait(barrier(), 0);
  read(lane_row());
  ptx::mbarrier_wait(barrier(), 0);
}

template <bool FAULT>
__global__ void write_over_an_mbarrier(const __grid_constant__ Arguments) {
  init_barrier();
  if (first()) ptx::store_shared(barrier() + (FAULT ? 4 : 8), 0);
}

template <bool FAULT>
__global__ void read_of_an_mbarrier(const __grid_constant__ Arguments) {
  init_barrier();
  write_tile();
  ptx::sync_threads();
  read(FAULT ? barrier() : lane_row());
}

// ---- barriers ----

template <bool FAULT>
__global__ void barrier_without_an_exited_thread(const __grid_constant__ Arguments) {
  if (FAULT && threadIdx.x == 63) return;
  ptx::sync_threads();
}

template <bool FAULT>
__global__ void barrier_in_a_branch(const __grid_constant__ Arguments a) {
  init_barrier();
  if (first()) copy(a, a.expected);
  if (threadIdx.x < 32 || !FAULT)
    ptx::sync_threads();
  else
    ptx::mbarrier_wait(barrier(), 1), ptx::mbarrier_wait(barrier(), 1);
  ptx::mbarrier_wait(barrier(), 0);
}

template <bool FAULT>
__global__ void mbarrier_that_never_completes(const __grid_constant__ Arguments a) {
  init_barrier();
  if (first()) copy(a, a.expected + (FAULT ? 16 : 0));
  ptx::mbarrier_wait(barrier(), 0);
}

template <bool FAULT>
__global__ void more_arrivals_than_the_count(const __grid_constant__ Arguments a) {
  init_barrier(FAULT ? 63 : 64);
  ptx::mbarrier_arrive_expect_tx(barrier(), a.expected / THREADS);
  ptx::sync_threads();
  if (first()) ptx::tma_load_4d(tile(), &a.map, 0, 0, 0, 0, barrier());
  ptx::mbarrier_wait(barrier(), 0);
}

template <bool FAULT>
__global__ void more_bytes_than_expected(const __grid_constant__ Arguments a) {
  init_barrier(2);
  if (first()) {
    copy(a, a.expected - (FAULT ? 16 : 0));
    ptx::mbarrier_arrive_expect_tx(barrier(), 0);
  }
  ptx::mbarrier_wait(barrier(), 0);
}

template <bool FAULT>
__global__ void bytes_left_at_exit(const __grid_constant__ Arguments) {
  init_barrier();
  if (first()) ptx::mbarrier_arrive_expect_tx(barrier(), FAULT ? 16 : 0);
}

template <bool FAULT>
__global__ void copy_in_flight_at_exit(const __grid_constant__ Arguments a) {
  init_barrier();
  if (first()) {
    copy(a, a.expected);
    if (!FAULT) ptx::mbarrier_wait(barrier(), 0);
  }
}

template <bool FAULT>
__global__ void mbarrier_not_initialised(const __grid_constant__ Arguments) {
  init_barrier();
  if (first()) ptx::mbarrier_arrive_expect_tx(barrier() + (FAULT ? 8 : 0), 0);
}

template <bool FAULT>
__global__ void mbarrier_initialised_by_another_thread(const __grid_constant__ Arguments) {
  if (first()) ptx::mbarrier_init(barrier(), 64);
  if (!FAULT) ptx::sync_threads();
  ptx::mbarrier_arrive_expect_tx(barrier(), 0);
}

template <bool FAULT>
__global__ void mbarrier_initialised_twice(const __grid_constant__ Arguments) {
  init_barrier();
  if (FAULT) init_barrier();
}

template <bool FAULT>
__global__ void copy_without_the_fence(const __grid_constant__ Arguments a) {
  if (first()) {
    ptx::mbarrier_init(barrier(), 1);
    if (!FAULT) ptx::mbarrier_fence_init();
    copy(a, a.expected);
  }
  ptx::sync_threads();
  ptx::mbarrier_wait(barrier(), 0);
}

// ---- a warp's instructions ----

template <bool FAULT>
__global__ void half_a_warp(const __grid_constant__ Arguments) {
  if (!FAULT || threadIdx.x % 32 < 16) ptx::shuffle_xor(1.0f, 1);
}

template <bool FAULT>
__global__ void half_a_warp_at_a_barrier(const __grid_constant__ Arguments) {
  if (!FAULT || threadIdx.x % 32 >= 16) ptx::shuffle_xor(1.0f, 1);
  ptx::sync_threads();
}

template <bool FAULT>
__global__ void two_places_in_one_warp(const __grid_constant__ Arguments) {
  if (FAULT && threadIdx.x % 2)
    ptx::shuffle_xor(1.0f, 1);
  else
    ptx::shuffle_xor(2.0f, 1);
}

template <bool FAULT>
__global__ void too_many_local_variables(const __grid_constant__ Arguments) {
  const auto wait = [] {
    char locals[FAULT ? 300 << 10 : 1];
    locals[0] = 1;
    ptx::elect_one();
    return locals[0];
  };
  if (threadIdx.x / 32 == 1) wait();
}

template <bool FAULT>
__global__ void half_a_warp_waits_forever(const __grid_constant__ Arguments) {
  init_barrier();
  if (FAULT && threadIdx.x == 7) ptx::mbarrier_wait(barrier(), 0);
  ptx::elect_one();
}

void add_mma(float (&accumulator)[4], int line) {
  const uint32_t a[4] = {};
  ptx::mma_m16n8k16<ptx::bf16>(accumulator, a, 0, 0, line);
}

template <bool FAULT>
__global__ void mma_in_half_a_warp(const __grid_constant__ Arguments) {
  float accumulator[4] = {};
  if (!FAULT || threadIdx.x % 32 < 16) add_mma(accumulator, __LINE__);
  ptx::mma_done();
}

template <bool FAULT>
__global__ void mma_at_two_places(const __grid_constant__ Arguments) {
  float accumulator[4] = {};
  add_mma(accumulator, FAULT ? __LINE__ + threadIdx.x % 2 : __LINE__);
  ptx::mma_done();
}

template <bool FAULT>
__global__ void mma_that_is_not_done(const __grid_constant__ Arguments) {
  float accumulator[4] = {};
  add_mma(accumulator, __LINE__);
  if (!FAULT) ptx::mma_done();
}

// ---- work of the asynchronous proxy ----

// Of the tile with itself: its descriptor has the 128-byte swizzle, and all rows in one pattern.
uint64_t matrix() { return uint64_t{1} << 62 | tile() / 16; }

template <bool FAULT>
__global__ void wgmma_without_its_fence(const __grid_constant__ Arguments) {
  write_tile();
  ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  float accumulator[4];
  if (!FAULT) ptx::wgmma_fence();
  ptx::wgmma_ss<ptx::bf16, false, false>(accumulator, matrix(), matrix(), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
}

template <bool FAULT>
__global__ void wgmma_of_what_is_not_fenced(const __grid_constant__ Arguments) {
  write_tile();
  if (!FAULT || threadIdx.x != 9) ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  float accumulator[4];
  ptx::wgmma_fence();
  ptx::wgmma_ss<ptx::bf16, false, false>(accumulator, matrix(), matrix(), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
}

// The barrier before the fence says nothing of it.
template <bool FAULT>
__global__ void wgmma_of_what_is_fenced_too_late(const __grid_constant__ Arguments) {
  write_tile();
  if (!FAULT) ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  if (FAULT) ptx::fence_proxy_async_shared();
  float accumulator[4];
  ptx::wgmma_fence();
  ptx::wgmma_ss<ptx::bf16, false, false>(accumulator, matrix(), matrix(), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
}

template <bool FAULT>
__global__ void wgmma_in_flight_at_exit(const __grid_constant__ Arguments) {
  write_tile();
  ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  float accumulator[4];
  ptx::wgmma_fence();
  ptx::wgmma_ss<ptx::bf16, false, false>(accumulator, matrix(), matrix(), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<FAULT ? 1 : 0>();
}

template <bool FAULT>
__global__ void store_of_what_is_not_fenced(const __grid_constant__ Arguments a) {
  write_tile();
  if (!FAULT) ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  if (!first()) return;
  ptx::bulk_reduce_add(a.writable, tile(), 1024);
  ptx::bulk_commit();
  ptx::bulk_wait<0>();
}

// The write comes after a barrier, but the copy still reads.
template <bool FAULT>
__global__ void store_of_what_is_overwritten(const __grid_constant__ Arguments a) {
  write_tile();
  ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  if (first()) {
    ptx::bulk_reduce_add(a.writable, tile(), 1024);
    ptx::bulk_commit();
    if (!FAULT) ptx::bulk_wait_read<0>();
  }
  ptx::sync_threads();
  if (threadIdx.x == 40) ptx::store_shared(tile(), 1);
  ptx::fence_proxy_async_shared();
  ptx::named_barrier_sync(1, THREADS);
  if (first()) ptx::bulk_wait<0>();
}

template <bool FAULT>
__global__ void wgmma_of_what_is_overwritten(const __grid_constant__ Arguments) {
  write_tile();
  ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  float accumulator[4];
  ptx::wgmma_fence();
  ptx::wgmma_ss<ptx::bf16, false, false>(accumulator, matrix(), matrix(), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<FAULT ? 1 : 0>();
  ptx::sync_threads();
  if (first()) ptx::store_shared(tile(), 1);
  ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  ptx::wgmma_wait<0>();
}

template <bool FAULT>
__global__ void store_in_flight_at_exit(const __grid_constant__ Arguments a) {
  write_tile();
  ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  if (!first()) return;
  ptx::bulk_reduce_add(a.writable, tile(), 1024);
  if (!FAULT) ptx::bulk_commit();
  ptx::bulk_wait<0>();
}

// What a bulk copy adds to is handed on from block to block: between the word that says so and the copy, both are fenced.
void hand_on(const Arguments& a, bool reads_alone, bool fenced) {
  write_tile();
  ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  if (!first()) return;
  ptx::bulk_reduce_add(a.writable, tile(), 512);
  ptx::bulk_commit();
  if (reads_alone)
    ptx::bulk_wait_read<0>();
  else
    ptx::bulk_wait<0>();
  if (fenced)
    ptx::fence_proxy_async();
  else
    ptx::fence_proxy_async_shared();
  ptx::release_global(reinterpret_cast<uint32_t*>(a.writable) + 200, 1);
}

template <bool FAULT>
__global__ void turn_of_what_is_read_only(const __grid_constant__ Arguments a) {
  hand_on(a, FAULT, true);
}

template <bool FAULT>
__global__ void turn_with_no_fence(const __grid_constant__ Arguments a) {
  hand_on(a, false, !FAULT);
}

template <bool FAULT>
__global__ void store_with_no_fence_after_a_turn(const __grid_constant__ Arguments a) {
  write_tile();
  ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  if (!first()) return;
  uint32_t* word = reinterpret_cast<uint32_t*>(a.writable) + 200 + blockIdx.x;
  ptx::store_global(word, 1u);
  ptx::wait_for_global(word, 1);
  if (!FAULT) ptx::fence_proxy_async();
  ptx::bulk_reduce_add(a.writable, tile(), 512);
  ptx::bulk_commit();
  ptx::bulk_wait<0>();
}

// ---- races, found where they are looked for ----

template <bool FAULT>
__global__ void race_of_write_and_read(const __grid_constant__ Arguments) {
  write_tile();
  if (!FAULT) ptx::sync_threads();
  if (threadIdx.x >= 32) read(lane_row());
}

template <bool FAULT>
__global__ void race_of_two_writes(const __grid_constant__ Arguments) {
  ptx::store_shared(tile() + 4 * (FAULT ? threadIdx.x / 2 : threadIdx.x), 1);
}

template <bool FAULT>
__global__ void race_of_read_and_write(const __grid_constant__ Arguments) {
  write_tile();
  ptx::sync_threads();
  read(lane_row());
  if (!FAULT) ptx::sync_threads();
  if (threadIdx.x == 63) ptx::store_shared(tile(), 1);
}

template <bool FAULT>
__global__ void race_of_read_and_copy(const __grid_constant__ Arguments a) {
  init_barrier();
  if (first()) copy(a, a.expected);
  ptx::mbarrier_wait(barrier(), 0);
  read(lane_row());
  if (!FAULT) ptx::sync_threads();
  if (threadIdx.x == 32) copy(a, a.expected);
  ptx::mbarrier_wait(barrier(), 1);
}

template <bool FAULT>
__global__ void race_of_copy_and_write(const __grid_constant__ Arguments a) {
  init_barrier();
  if (first()) copy(a, a.expected);
  if (!FAULT) ptx::mbarrier_wait(barrier(), 0);
  if (threadIdx.x == 40) ptx::store_shared(tile(), 1);
  ptx::mbarrier_wait(barrier(), 0);
}

// Threads hand work on through an mbarrier alone: each arrives once it has written, who waits may read.
template <bool FAULT>
__global__ void race_past_an_mbarrier(const __grid_constant__ Arguments) {
  init_barrier(64);
  write_tile();
  ptx::mbarrier_arrive_expect_tx(barrier(), 0);
  if (FAULT && threadIdx.x == 9) ptx::store_shared(tile() + 36, 1);
  ptx::mbarrier_wait(barrier(), 0);
  read(lane_row());
}

template <bool FAULT>
__global__ void race_within_a_warp(const __grid_constant__ Arguments) {
  if (threadIdx.x >= 32) return;
  for (uint32_t i = 0; i < 4; i++) ptx::store_shared(tile() + 4 * (i * 32 + threadIdx.x), i);
  if (!FAULT) ptx::sync_warp();
  read(tile() + threadIdx.x % 8 * 64);
}

// The first warp writes, the second reads.
template <bool FAULT>
__global__ void race_past_a_named_barrier(const __grid_constant__ Arguments) {
  const uint32_t row = tile() + threadIdx.x % 8 * 16;
  uint32_t fragment[4] = {};
  if (threadIdx.x / 32 == 0) {
    if (!FAULT) ptx::stmatrix_x4(row + threadIdx.x / 8 * 128, fragment);
    ptx::named_barrier_arrive(3, 64);
    if (FAULT) ptx::stmatrix_x4(row + threadIdx.x / 8 * 128, fragment);
  } else {
    ptx::named_barrier_sync(3, 64);
    ptx::named_barrier_sync(4, 32);
    read(row);
  }
}

// A lane's arrival publishes what its warp did only if the warp was synchronised before.
template <bool FAULT>
__global__ void race_of_one_lanes_arrival(const __grid_constant__ Arguments) {
  init_barrier(2);
  write_tile();
  if (!FAULT) ptx::sync_warp();
  ptx::mbarrier_arrive(barrier(), threadIdx.x % 32 == 0);
  ptx::mbarrier_wait(barrier(), 0);
  read(lane_row());
}

// ---- named barriers, bulk copies ----

template <bool FAULT>
__global__ void named_barrier_that_never_completes(const __grid_constant__ Arguments) {
  if (threadIdx.x < 32 || !FAULT) ptx::named_barrier_sync(2, 64);
}

template <bool FAULT>
__global__ void named_barrier_of_two_sizes(const __grid_constant__ Arguments) {
  ptx::named_barrier_sync(2, FAULT && threadIdx.x >= 32 ? 32 : 64);
}

template <bool FAULT>
__global__ void named_barrier_left_at_exit(const __grid_constant__ Arguments) {
  if (threadIdx.x < 32 || !FAULT) ptx::named_barrier_arrive(15, 64);
}

template <bool FAULT>
__global__ void named_barrier_in_half_a_warp(const __grid_constant__ Arguments) {
  if (!FAULT || threadIdx.x % 32 < 16) ptx::named_barrier_sync(1, 64);
}

template <bool FAULT>
__global__ void bulk_copy_of_odd_bytes(const __grid_constant__ Arguments a) {
  init_barrier();
  if (first()) {
    ptx::mbarrier_arrive_expect_tx(barrier(), 32);
    ptx::bulk_load(tile(), a.readable, FAULT ? 24 : 32, barrier());
  }
  ptx::mbarrier_wait(barrier(), 0);
}

// ---- clusters of two blocks ----

uint32_t peers(uint32_t address) { return ptx::map_shared(address, ptx::cluster_rank() ^ 1); }

template <bool FAULT>
__global__ void store_to_another_block(const __grid_constant__ Arguments) {
  const uint32_t to = peers(tile() + 4 * threadIdx.x);
  if (FAULT)
    ptx::store_shared(to, 1u);
  else
    ptx::store_in_cluster(to, 1u);
  ptx::sync_cluster();
}

template <bool FAULT>
__global__ void block_that_is_not_there(const __grid_constant__ Arguments) {
  ptx::map_shared(tile(), FAULT ? 2 : 1);
}

template <bool FAULT>
__global__ void exit_before_the_other_blocks_store(const __grid_constant__ Arguments) {
  if (ptx::cluster_rank() == 0) ptx::store_in_cluster(peers(tile() + 4 * threadIdx.x), 1u);
  if (!FAULT) ptx::sync_cluster();
}

template <bool FAULT>
__global__ void copy_to_a_block_of_what_is_not_fenced(const __grid_constant__ Arguments) {
  if (first()) ptx::mbarrier_init(barrier(), 1);
  ptx::mbarrier_fence_init();
  if (first()) {
    for (uint32_t i = 0; i < 4; i++) ptx::store_shared(tile() + 4 * i, i);
    if (!FAULT) ptx::fence_proxy_async_shared();
  }
  ptx::sync_cluster();
  if (first()) {
    ptx::mbarrier_arrive_expect_tx(barrier(), 16);
    ptx::bulk_copy_in_cluster(peers(tile() + 16), tile(), 16, peers(barrier()));
    ptx::mbarrier_wait(barrier(), 0);
    ptx::load_shared<uint4>(tile() + 16);
  }
  ptx::sync_cluster();
}

// A block's own barrier does not order what another block does.
template <bool FAULT>
__global__ void race_of_two_blocks(const __grid_constant__ Arguments) {
  if (ptx::cluster_rank() == 0) ptx::store_in_cluster(peers(tile() + 4 * threadIdx.x), 1u);
  if (FAULT)
    ptx::sync_threads();
  else
    ptx::sync_cluster();
  if (ptx::cluster_rank() == 1) ptx::load_shared<uint32_t>(tile() + 4 * threadIdx.x);
  ptx::sync_cluster();
}

#define CASE(name) {#name, {name<false>, name<true>}, 1}
#define CLUSTER_CASE(name) {#name, {name<false>, name<true>}, 2}

struct Case {
  const char* name;
  void (*kernels[2])(Arguments);
  unsigned cluster;
} const CASES[] = {
    CASE(shared_read_outside),
    CASE(shared_write_outside),
    CASE(global_read_outside),
    CASE(global_read_across_the_end),
    CASE(global_write_outside),
    CASE(global_add_outside),
    CASE(write_of_an_input),
    CASE(misaligned_vector),
    CASE(misaligned_add),
    CASE(misaligned_ldmatrix),
    CASE(misaligned_copy),
    CASE(copy_off_its_pattern),
    CASE(copy_from_outside),
    CASE(read_of_nothing),
    CASE(read_before_the_wait),
    CASE(wait_of_another_thread),
    CASE(wait_for_the_wrong_phase),
    CASE(wait_that_passes_at_once),
    CASE(write_over_an_mbarrier),
    CASE(read_of_an_mbarrier),
    CASE(barrier_without_an_exited_thread),
    CASE(barrier_in_a_branch),
    CASE(mbarrier_that_never_completes),
    CASE(more_arrivals_than_the_count),
    CASE(more_bytes_than_expected),
    CASE(bytes_left_at_exit),
    CASE(copy_in_flight_at_exit),
    CASE(mbarrier_not_initialised),
    CASE(mbarrier_initialised_by_another_thread),
    CASE(mbarrier_initialised_twice),
    CASE(copy_without_the_fence),
    CASE(half_a_warp),
    CASE(half_a_warp_at_a_barrier),
    CASE(two_places_in_one_warp),
    CASE(half_a_warp_waits_forever),
    CASE(too_many_local_variables),
    CASE(mma_in_half_a_warp),
    CASE(mma_at_two_places),
    CASE(mma_that_is_not_done),
    CASE(named_barrier_that_never_completes),
    CASE(named_barrier_of_two_sizes),
    CASE(named_barrier_left_at_exit),
    CASE(named_barrier_in_half_a_warp),
    CASE(bulk_copy_of_odd_bytes),
    CASE(wgmma_without_its_fence),
    CASE(wgmma_of_what_is_not_fenced),
    CASE(wgmma_of_what_is_fenced_too_late),
    CASE(wgmma_in_flight_at_exit),
    CASE(store_of_what_is_not_fenced),
    CASE(store_of_what_is_overwritten),
    CASE(wgmma_of_what_is_overwritten),
    CASE(store_in_flight_at_exit),
    CASE(turn_of_what_is_read_only),
    CASE(turn_with_no_fence),
    CASE(store_with_no_fence_after_a_turn),
    CLUSTER_CASE(store_to_another_block),
    CLUSTER_CASE(block_that_is_not_there),
    CLUSTER_CASE(exit_before_the_other_blocks_store),
    CLUSTER_CASE(copy_to_a_block_of_what_is_not_fenced),
    CASE(race_of_write_and_read),
    CASE(race_of_two_writes),
    CASE(race_of_read_and_write),
    CASE(race_of_read_and_copy),
    CASE(race_of_copy_and_write),
    CASE(race_past_an_mbarrier),
    CASE(race_within_a_warp),
    CASE(race_past_a_named_barrier),
    CASE(race_of_one_lanes_arrival),
    CLUSTER_CASE(race_of_two_blocks),
};

}  // namespace

extern "C" {

const char* error_text(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

const char* case_name(unsigned index) { return index < sizeof CASES / sizeof *CASES ? CASES[index].name : nullptr; }

// `input` holds 64 rows of 8 elements, then 8 of the 64 rows of 64 elements that `wide` promises; all of it is registered,
// and so are the floats.
int run_case(unsigned index, int fault, void* input, float* readable, float* writable) {
  Arguments arguments = {};
  const uint64_t sizes[4] = {8, 64, 1, 1}, wide_sizes[4] = {64, 64, 1, 1};
  const uint64_t strides[3] = {16, 1024, 1024}, wide_strides[3] = {128, 8192, 8192};
  const uint32_t box[4] = {8, 8, 1, 1}, wide_box[4] = {64, 8, 1, 1}, ones[4] = {1, 1, 1, 1};
  void* wide_input = static_cast<char*>(input) + 1024;
  if (cuTensorMapEncodeTiled(&arguments.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, input, sizes, strides, box, ones,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) ||
      cuTensorMapEncodeTiled(&arguments.wide, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, wide_input, wide_sizes, wide_strides,
                             wide_box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
    return -1;
  arguments.readable = readable;
  arguments.writable = writable;
  arguments.expected = 128;
  bwdtune_host_clear();
  bwdtune_host_register("input", input, 1024 + 8 * 128, 0);
  bwdtune_host_register("readable", readable, 1024, 0);
  bwdtune_host_register("writable", writable, 1024, 1);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(2);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = SHARED_BYTES;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {CASES[index].cluster, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, CASES[index].kernels[fault], arguments);
}

}  // extern "C"
