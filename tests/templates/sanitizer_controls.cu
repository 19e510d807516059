// What kernels of mmat and wgmma synchronise by, in a few lines each, rightly and wrongly: whether the tools can tell them apart.
// argv[1] chooses.
#include <stdio.h>
#include <string.h>

#include "ptx.cuh"

namespace {

constexpr int WARPS = 4, ROUNDS = 8, STAGES = 2, WORDS = 64 * WARPS;

// Rows of floats come by bulk copies, two rounds ahead, and each lane reads some. A place takes the next row when all warps say
// that they have read it, which those that are `RACING` say before they have.
template <bool RACING>
__global__ void bulk_copies(const float* rows, float* sums) {
  __shared__ alignas(128) float stages[STAGES][WORDS];
  __shared__ alignas(8) uint64_t barriers[STAGES + 1];
  const uint32_t tiles = static_cast<uint32_t>(__cvta_generic_to_shared(stages));
  const uint32_t full = static_cast<uint32_t>(__cvta_generic_to_shared(barriers)), empty = full + 8 * STAGES;
  const int warp = ptx::broadcast(threadIdx.x / 32), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) ptx::mbarrier_init(full + 8 * i, 1);
    ptx::mbarrier_init(empty, WARPS);
    ptx::mbarrier_fence_init();
  }
  ptx::sync_threads();
  const auto load = [&](int round) {
    if (!ptx::elect_one()) return;
    const int stage = round % STAGES;
    ptx::mbarrier_arrive_expect_tx(full + 8 * stage, WORDS * 4);
    ptx::bulk_load(tiles + stage * WORDS * 4, rows + round * WORDS, WORDS * 4, full + 8 * stage);
  };
  if (warp == 0)
    for (int i = 0; i < STAGES; i++) load(i);
  float sum = 0;
#pragma unroll 1
  for (int i = 0; i < ROUNDS; i++) {
    ptx::mbarrier_wait(full + 8 * (i % STAGES), i / STAGES % 2);
    if (RACING) ptx::mbarrier_arrive(empty, lane == 0);
    const float2 values = ptx::load_shared<float2>(tiles + (i % STAGES * WORDS + (warp * 32 + lane) * 2) * 4);
    sum += values.x + values.y;
    ptx::sync_warp();
    if (!RACING) ptx::mbarrier_arrive(empty, lane == 0);
    ptx::mbarrier_wait(empty, i % 2);
    if (warp == 0 && i + STAGES < ROUNDS) load(i + STAGES);
  }
  sums[threadIdx.x] = sum;
}

// Each thread stores a word and reads one of another warp's: no barrier but mbarriers, at which one lane of a warp arrives.
template <bool RACING>
__global__ void words(float* sums) {
  __shared__ alignas(16) uint32_t stored[32 * WARPS];
  __shared__ alignas(8) uint64_t barriers[2];
  const uint32_t tile = static_cast<uint32_t>(__cvta_generic_to_shared(stored));
  const uint32_t full = static_cast<uint32_t>(__cvta_generic_to_shared(barriers)), empty = full + 8;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, WARPS);
    ptx::mbarrier_init(empty, WARPS);
    ptx::mbarrier_fence_init();
  }
  ptx::sync_threads();
  uint32_t sum = 0;
#pragma unroll 1
  for (int i = 0; i < ROUNDS; i++) {
    ptx::store_shared(tile + threadIdx.x * 4, threadIdx.x + i);
    ptx::sync_warp();
    ptx::mbarrier_arrive(full, threadIdx.x % 32 == 0);
    ptx::mbarrier_wait(full, i % 2);
    if (RACING) ptx::mbarrier_arrive(empty, threadIdx.x % 32 == 0);
    sum += ptx::load_shared<uint32_t>(tile + (threadIdx.x + 32) % (32 * WARPS) * 4);
    ptx::sync_warp();
    if (!RACING) ptx::mbarrier_arrive(empty, threadIdx.x % 32 == 0);
    ptx::mbarrier_wait(empty, i % 2);
  }
  sums[threadIdx.x] = static_cast<float>(sum);
}

// Warps that go different ways meet at a named barrier, each by an instruction of its own.
__global__ void copies(float* sums) {
  __shared__ uint32_t stored[32 * WARPS];
  const uint32_t tile = static_cast<uint32_t>(__cvta_generic_to_shared(stored));
  const auto place = [&](int thread) { return tile + thread % (32 * WARPS) * 4; };
  if (threadIdx.x < 32 * WARPS / 2) {
    ptx::store_shared(place(threadIdx.x), threadIdx.x);
    ptx::named_barrier_sync(1, 32 * WARPS);
  } else {
    ptx::store_shared(place(threadIdx.x), 2 * threadIdx.x);
    ptx::named_barrier_sync(1, 32 * WARPS);
  }
  sums[threadIdx.x] = static_cast<float>(ptx::load_shared<uint32_t>(place(threadIdx.x + 32)));
}

}  // namespace

int main(int count, char** names) {
  float *rows, *sums;
  cudaMalloc(&rows, ROUNDS * WORDS * sizeof(float));
  cudaMalloc(&sums, 32 * WARPS * sizeof(float));
  cudaMemset(rows, 0, ROUNDS * WORDS * sizeof(float));
  cudaMemset(sums, 0, 32 * WARPS * sizeof(float));
  const char* name = count == 2 ? names[1] : "";
  if (!strcmp(name, "bulk_copies")) bulk_copies<false><<<1, 32 * WARPS>>>(rows, sums);
  if (!strcmp(name, "racing_bulk_copies")) bulk_copies<true><<<1, 32 * WARPS>>>(rows, sums);
  if (!strcmp(name, "words")) words<false><<<1, 32 * WARPS>>>(sums);
  if (!strcmp(name, "racing_words")) words<true><<<1, 32 * WARPS>>>(sums);
  if (!strcmp(name, "copies")) copies<<<1, 32 * WARPS>>>(sums);
  const bool ended = cudaDeviceSynchronize() == cudaSuccess;
  printf("%s\n", ended ? "PASSED" : "FAILED");
  return ended ? 0 : 1;
}
