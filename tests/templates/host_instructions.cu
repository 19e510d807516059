// One kernel for each instruction of ptx.cuh, for tests/templates/test_host_instructions.py.
#include "ptx_host.hpp"

namespace {

template <class Arguments>
int launch(void (*kernel)(Arguments), const Arguments& arguments, unsigned blocks = 1, unsigned threads = 32,
           size_t shared_bytes = 0, unsigned cluster = 1) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.attrs = &attribute;
  config.numAttrs = 1;
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

struct Words {
  const uint32_t* in;
  uint32_t* out;
};

// A 1 KiB tile comes to shared memory; each lane reads four matrices at its own address.
struct Ldmatrix {
  const uint32_t* tile;       // (256)
  const uint32_t* addresses;  // (32): offsets in bytes
  uint32_t* fragments;        // (32, 4)
  bool transposed;
};

__global__ void ldmatrix_kernel(const __grid_constant__ Ldmatrix a) {
  const uint32_t shared = ptx::shared_memory_base();
  for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) ptx::store_shared(shared + 4 * i, ptx::load_global(a.tile + i));
  ptx::sync_threads();
  uint32_t fragment[4];
  const uint32_t address = shared + ptx::load_global(a.addresses + threadIdx.x);
  if (a.transposed)
    ptx::ldmatrix_x4_trans(fragment, address);
  else
    ptx::ldmatrix_x4(fragment, address);
  for (int i = 0; i < 4; i++) ptx::store_global(a.fragments + 4 * threadIdx.x + i, fragment[i]);
}

// Each block of a cluster tells the other one its index by a store, and copies 64 words of it to there; both get what one
// loads for the cluster.
struct Exchange {
  CUtensorMap map;  // boxes of 8 rows of 16 bytes
  uint32_t* out;    // (blocks, 1 + 64 + 32)
};

__global__ void exchange_kernel(const __grid_constant__ Exchange a) {
  const uint32_t shared = ptx::shared_memory_base(), rank = ptx::cluster_rank(), peer = rank ^ 1;
  const uint32_t own = shared, copied = shared + 256, loaded = shared + 512, told = shared + 640;
  const uint32_t arrived = told + 16, stored = arrived + 8;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(arrived, 1);
    ptx::mbarrier_init(stored, 1);
    ptx::mbarrier_fence_init();
    for (uint32_t i = 0; i < 64; i++) ptx::store_shared(own + 4 * i, 100 * blockIdx.x + i);
    ptx::fence_proxy_async_shared();
  }
  ptx::sync_cluster();
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(arrived, 256 + 128);
    ptx::bulk_copy_in_cluster(ptx::map_shared(copied, peer), own, 256, ptx::map_shared(arrived, peer));
    if (rank == 1) ptx::tma_load_4d_multicast(loaded, &a.map, 0, 8, 0, 0, arrived, 3);
    ptx::store_in_cluster(ptx::map_shared(told, peer), blockIdx.x);
    ptx::mbarrier_release_in_cluster(ptx::map_shared(stored, peer));
  }
  ptx::mbarrier_wait(arrived, 0);
  ptx::mbarrier_wait_in_cluster(stored, 0);
  uint32_t* out = a.out + blockIdx.x * 97;
  if (threadIdx.x == 0) ptx::store_global(out, ptx::load_shared<uint32_t>(told));
  for (uint32_t i = threadIdx.x; i < 64; i += blockDim.x)
    ptx::store_global(out + 1 + i, ptx::load_shared<uint32_t>(copied + 4 * i));
  ptx::store_global(out + 65 + threadIdx.x, ptx::load_shared<uint32_t>(loaded + 4 * threadIdx.x));
  ptx::sync_cluster();
}

// A bulk copy, handed from the warp that waits for it to another one by a named barrier, and on by an mbarrier's arrivals.
struct Relay {
  const float* in;  // (64)
  float* out;       // (64)
};

__global__ void relay_kernel(const __grid_constant__ Relay a) {
  const uint32_t tile = ptx::shared_memory_base(), copied = tile + 512, read = copied + 8;
  const int warp = ptx::broadcast(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(copied, 1);
    ptx::mbarrier_init(read, 2);
    ptx::mbarrier_fence_init();
    ptx::mbarrier_arrive_expect_tx(copied, 256);
    ptx::bulk_load(tile, a.in, 256, copied);
  }
  ptx::sync_threads();
  float4 values = {};
  if (warp == 0) {
    ptx::mbarrier_wait(copied, 0);
    values = ptx::load_shared<float4>(tile + ptx::lane_id() % 16 * 16);
    ptx::sync_warp();
    if (ptx::lane_id() < 16) ptx::store_shared(tile + 256 + ptx::lane_id() * 16, values);
    ptx::named_barrier_arrive(1, 64);
  } else {
    ptx::named_barrier_sync(1, 64);
    values = ptx::load_shared<float4>(tile + 256 + ptx::lane_id() % 16 * 16);
  }
  ptx::sync_warp();
  ptx::mbarrier_arrive(read, ptx::lane_id() == 0);
  ptx::mbarrier_wait(read, 0);
  if (threadIdx.x / 16 == 2) ptx::store_global(reinterpret_cast<float4*>(a.out) + threadIdx.x % 16, values);
}

struct Mma {
  const uint32_t* a;   // (32, 4)
  const uint32_t* b;   // (32, 2)
  float* accumulator;  // (32, 4)
};

template <class Element>
__global__ void mma_kernel(const __grid_constant__ Mma m) {
  uint32_t a[4];
  float accumulator[4];
  for (int i = 0; i < 4; i++) a[i] = m.a[4 * threadIdx.x + i];
  for (int i = 0; i < 4; i++) accumulator[i] = m.accumulator[4 * threadIdx.x + i];
  ptx::mma_m16n8k16<Element>(accumulator, a, m.b[2 * threadIdx.x], m.b[2 * threadIdx.x + 1]);
  ptx::mma_done();
  for (int i = 0; i < 4; i++) m.accumulator[4 * threadIdx.x + i] = accumulator[i];
}

struct Warp {
  const float* values;  // (32)
  float* shuffled;      // (32)
  uint32_t* words;      // (32): the same of the bits
  int32_t* first;       // (32): the first lane's
  int32_t* elected;     // (32)
  int lane_mask;
};

__global__ void warp_kernel(const __grid_constant__ Warp a) {
  ptx::store_global(a.shuffled + threadIdx.x, ptx::shuffle_xor(ptx::load_global(a.values + threadIdx.x), a.lane_mask));
  ptx::store_global(a.words + threadIdx.x,
                    ptx::shuffle_xor(ptx::bits_of(ptx::load_global(a.values + threadIdx.x)), a.lane_mask));
  ptx::store_global(a.first + threadIdx.x, static_cast<int32_t>(ptx::broadcast(7 + ptx::lane_id())));
  ptx::store_global(a.elected + threadIdx.x, static_cast<int32_t>(ptx::elect_one()));
}

// One box comes to shared memory, and all of it goes out as ldmatrix reads it: 16 bytes for a lane's address.
struct Box {
  CUtensorMap map;
  uint32_t* out;  // bytes / 4
  int rank, coordinates[5];
  uint32_t bytes;
};

__global__ void box_kernel(const __grid_constant__ Box a) {
  const uint32_t tile = ptx::shared_memory_base(), barrier = tile + a.bytes;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::mbarrier_fence_init();
    ptx::mbarrier_arrive_expect_tx(barrier, a.bytes);
    const int* at = a.coordinates;
    if (a.rank == 4)
      ptx::tma_load_4d(tile, &a.map, at[0], at[1], at[2], at[3], barrier);
    else
      ptx::tma_load_5d(tile, &a.map, at[0], at[1], at[2], at[3], at[4], barrier);
  }
  ptx::sync_threads();
  ptx::mbarrier_wait(barrier, 0);
  for (uint32_t at = 0; at < a.bytes; at += 32 * 16) {
    uint32_t fragment[4];
    ptx::ldmatrix_x4(fragment, tile + min(at + 16 * threadIdx.x, a.bytes - 16));
    for (uint32_t matrix = 0; matrix < 4; matrix++) {
      const uint32_t word = (at + 16 * 8 * matrix) / 4 + threadIdx.x;
      if (word < a.bytes / 4) ptx::store_global(a.out + word, fragment[matrix]);
    }
  }
}

// A ring of two stages: each round, all threads read a tile and then one of them loads the next but one into its place.
struct Ring {
  CUtensorMap map;   // (rounds, 8) of 16-bit elements
  uint32_t* out;     // (rounds, 32)
  int rounds;
};

__global__ void ring_kernel(const __grid_constant__ Ring a) {
  const uint32_t stages = ptx::shared_memory_base(), barriers = stages + 2 * 128;
  const auto load = [&](int round) {
    ptx::mbarrier_arrive_expect_tx(barriers + round % 2 * 8, 128);
    ptx::tma_load_4d(stages + round % 2 * 128, &a.map, 0, 8 * round, 0, 0, barriers + round % 2 * 8);
  };
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barriers, 1);
    ptx::mbarrier_init(barriers + 8, 1);
    ptx::mbarrier_fence_init();
    for (int round = 0; round < min(2, a.rounds); round++) load(round);
  }
  ptx::sync_threads();
  for (int round = 0; round < a.rounds; round++) {
    ptx::mbarrier_wait(barriers + round % 2 * 8, round / 2 % 2);
    uint32_t fragment[4];
    ptx::ldmatrix_x4(fragment, stages + round % 2 * 128 + threadIdx.x % 8 * 16);
    ptx::store_global(a.out + round * 32 + threadIdx.x, fragment[0]);
    ptx::sync_threads();
    if (threadIdx.x == 0 && round + 2 < a.rounds) load(round + 2);
  }
}

struct Adds {
  float* sums;          // (4): every thread of every block adds to each of them
  const float* values;  // (4)
  int vector;
};

__global__ void add_kernel(const __grid_constant__ Adds a) {
  const float x = a.values[0], y = a.values[1], z = a.values[2], w = a.values[3];
  if (a.vector == 4) ptx::reduce_add_global(a.sums, make_float4(x, y, z, w));
  if (a.vector == 2) {
    ptx::reduce_add_global(a.sums, make_float2(x, y));
    ptx::reduce_add_global(a.sums + 2, make_float2(z, w));
  }
  if (a.vector == 1)
    for (int i = 0; i < 4; i++) ptx::reduce_add_global(a.sums + i, a.values[i]);
}

// A warpgroup multiplies what lies in shared memory as given, or fragments of its lanes, by what lies there.
struct Wgmma {
  const uint32_t* image;   // (words)
  const uint32_t* a;       // (128, 4)
  float* accumulator;      // (128, n / 2)
  float* before_wait;      // (128, n / 2): as the accumulator was then
  uint64_t a_descriptor, b_descriptor;  // with addresses that count from the image's start
  int words;
  bool accumulate;
};

template <class Element, int N, bool A_IN_REGISTERS, bool TRANSPOSED_A, bool TRANSPOSED_B>
__global__ void wgmma_kernel(const __grid_constant__ Wgmma w) {
  const uint32_t shared = ptx::shared_memory_base();
  for (int i = threadIdx.x; i < w.words; i += blockDim.x) ptx::store_shared(shared + 4 * i, w.image[i]);
  ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  float accumulator[N / 2];
  for (int i = 0; i < N / 2; i++) accumulator[i] = w.accumulator[N / 2 * threadIdx.x + i];
  ptx::wgmma_fence();
  if constexpr (A_IN_REGISTERS) {
    uint32_t a[4];
    for (int i = 0; i < 4; i++) a[i] = w.a[4 * threadIdx.x + i];
    ptx::wgmma_rs<Element, TRANSPOSED_B>(accumulator, a, w.b_descriptor + shared / 16, w.accumulate);
  } else {
    ptx::wgmma_ss<Element, TRANSPOSED_A, TRANSPOSED_B>(accumulator, w.a_descriptor + shared / 16,
                                                       w.b_descriptor + shared / 16, w.accumulate);
  }
  ptx::wgmma_commit();
  for (int i = 0; i < N / 2; i++) w.before_wait[N / 2 * threadIdx.x + i] = accumulator[i];
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_operand(accumulator);
  for (int i = 0; i < N / 2; i++) w.accumulator[N / 2 * threadIdx.x + i] = accumulator[i];
}

template <class Element, int N>
int run_wgmma_of(bool a_in_registers, bool transposed_a, bool transposed_b, const Wgmma& w) {
  const auto kernel = a_in_registers ? transposed_b ? wgmma_kernel<Element, N, true, false, true>
                                                    : wgmma_kernel<Element, N, true, false, false>
                      : transposed_a ? transposed_b ? wgmma_kernel<Element, N, false, true, true>
                                                    : wgmma_kernel<Element, N, false, true, false>
                      : transposed_b ? wgmma_kernel<Element, N, false, false, true>
                                     : wgmma_kernel<Element, N, false, false, false>;
  return launch(kernel, w, 1, 128, 4 * w.words);
}

// A group of wgmma may be waited for while the ones after it are in flight: x x, then x x y.
struct WgmmaGroups {
  float* out;  // (2, 128): one element of each accumulator, after the first wait
};

__global__ void wgmma_groups_kernel(const __grid_constant__ WgmmaGroups w) {
  const uint32_t shared = ptx::shared_memory_base();
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) ptx::store_shared(shared + 4 * i, 0x3f803f80u);  // ones
  ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  const uint64_t ones = uint64_t{1} << 62 | uint64_t{0} << 32 | shared / 16;
  float x[8] = {}, y[8] = {};
  ptx::wgmma_fence();
  ptx::wgmma_ss<ptx::bf16, false, false>(x, ones, ones, false);
  ptx::wgmma_ss<ptx::bf16, false, false>(x, ones, ones, true);
  ptx::wgmma_commit();
  ptx::wgmma_ss<ptx::bf16, false, false>(y, ones, ones, true);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
  w.out[threadIdx.x] = x[0];
  w.out[128 + threadIdx.x] = y[0];
  ptx::wgmma_wait<0>();
}

// Fragments to shared memory, and all of it out again; and each lane's register through movmatrix.
struct Stmatrix {
  const uint32_t* fragments;  // (32, 4)
  const uint32_t* addresses;  // (32): offsets in bytes, all different
  uint32_t* tile;             // (128)
  uint32_t* moved;            // (32)
  bool transposed;
};

__global__ void stmatrix_kernel(const __grid_constant__ Stmatrix a) {
  const uint32_t shared = ptx::shared_memory_base();
  uint32_t fragment[4];
  for (int i = 0; i < 4; i++) fragment[i] = a.fragments[4 * threadIdx.x + i];
  const uint32_t address = shared + a.addresses[threadIdx.x];
  if (a.transposed)
    ptx::stmatrix_x4_trans(address, fragment);
  else
    ptx::stmatrix_x4(address, fragment);
  ptx::sync_warp();
  for (int i = 0; i < 4; i++)
    a.tile[32 * i + threadIdx.x] = ptx::load_shared<uint32_t>(shared + 4 * (32 * i + threadIdx.x));
  a.moved[threadIdx.x] = ptx::movmatrix_trans(fragment[0]);
}

// A box goes out as it lies in shared memory, and floats are added to others.
struct Store {
  CUtensorMap map;
  const uint32_t* image;  // (bytes / 4)
  int rank, coordinates[5];
  uint32_t bytes;
  float* sums;            // (bytes / 4)
};

__global__ void store_kernel(const __grid_constant__ Store a) {
  const uint32_t shared = ptx::shared_memory_base();
  for (uint32_t i = threadIdx.x; i < a.bytes / 4; i += blockDim.x) ptx::store_shared(shared + 4 * i, a.image[i]);
  ptx::fence_proxy_async_shared();
  ptx::sync_threads();
  if (threadIdx.x != 0) return;
  const int* at = a.coordinates;
  if (a.rank == 4)
    ptx::tma_store_4d(&a.map, at[0], at[1], at[2], at[3], shared);
  else
    ptx::tma_store_5d(&a.map, at[0], at[1], at[2], at[3], at[4], shared);
  ptx::bulk_commit();
  ptx::bulk_reduce_add(a.sums, shared, a.bytes);
  ptx::bulk_commit();
  ptx::bulk_wait_read<1>();
  ptx::bulk_wait<0>();
}

// Every thread of every block takes numbers from one counter.
struct Counter {
  uint32_t* counter;
  uint32_t* taken;  // (blocks, threads, 2)
};

__global__ void counter_kernel(const __grid_constant__ Counter a) {
  uint32_t* taken = a.taken + 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  taken[0] = ptx::fetch_add_global(a.counter, 1);
  taken[1] = ptx::fetch_add_global(a.counter, 1);
}

struct Places {
  uint32_t* out;  // (blocks, threads, 4)
};

__global__ void place_kernel(const __grid_constant__ Places a) {
  uint32_t* out = a.out + 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  out[0] = threadIdx.x;
  out[1] = blockIdx.x;
  out[2] = blockDim.x;
  out[3] = gridDim.x;
}

struct Nothing {};
__global__ void empty_kernel(const __grid_constant__ Nothing) {}

}  // namespace

extern "C" {

const char* error_text(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

void unpack_all(int fp16, float* out) {
  for (uint32_t i = 0; i < 65536; i++)
    out[i] = fp16 ? ptx::unpack<ptx::fp16>(i << 16).y : ptx::unpack<ptx::bf16>(i << 16).y;
}

void pack_pairs(int fp16, const float* pairs, uint32_t* out, int count) {
  for (int i = 0; i < count; i++) {
    const float low = pairs[2 * i], high = pairs[2 * i + 1];
    out[i] = fp16 ? ptx::pack<ptx::fp16>(low, high) : ptx::pack<ptx::bf16>(low, high);
  }
}

void exp2_all(const float* in, float* out, int count) {
  for (int i = 0; i < count; i++) out[i] = ptx::exp2_approx(in[i]);
}

int run_ldmatrix(const uint32_t* tile, const uint32_t* addresses, uint32_t* fragments, int transposed) {
  return launch(ldmatrix_kernel, Ldmatrix{tile, addresses, fragments, transposed != 0}, 1, 32, 1024);
}

int run_mma(int fp16, const uint32_t* a, const uint32_t* b, float* accumulator) {
  return launch(fp16 ? mma_kernel<ptx::fp16> : mma_kernel<ptx::bf16>, Mma{a, b, accumulator});
}

int run_relay(const float* in, float* out) { return launch(relay_kernel, Relay{in, out}, 1, 64, 512 + 16); }

int run_warp(const float* values, float* shuffled, uint32_t* words, int32_t* first, int32_t* elected, int lane_mask) {
  return launch(warp_kernel, Warp{values, shuffled, words, first, elected, lane_mask});
}

// Through the driver's entry point, as a kernel's launcher finds it. Of 16-bit elements; a CUresult.
int encode(CUtensorMap* map, int type, unsigned rank, void* base, const uint64_t* sizes, const uint64_t* strides,
           const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int promotion, int fill) {
  void* function;
  cudaDriverEntryPointQueryResult found;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) ||
      found != cudaDriverEntryPointSuccess)
    return -1;
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      map, static_cast<CUtensorMapDataType>(type), rank, base, sizes, strides, box, element_strides,
      static_cast<CUtensorMapInterleave>(interleave), static_cast<CUtensorMapSwizzle>(swizzle),
      static_cast<CUtensorMapL2promotion>(promotion), static_cast<CUtensorMapFloatOOBfill>(fill));
}

int run_box(const CUtensorMap* map, uint32_t* out, int rank, const int* coordinates, uint32_t bytes) {
  Box box = {*map, out, rank, {}, bytes};
  memcpy(box.coordinates, coordinates, rank * sizeof(int));
  cudaFuncSetAttribute(box_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 17);
  return launch(box_kernel, box, 1, 32, bytes + 8);
}

int run_ring(const CUtensorMap* map, uint32_t* out, int rounds) {
  return launch(ring_kernel, Ring{*map, out, rounds}, 1, 32, 2 * 128 + 2 * 8);
}

int run_exchange(const CUtensorMap* map, uint32_t* out, unsigned blocks, unsigned cluster) {
  return launch(exchange_kernel, Exchange{*map, out}, blocks, 32, 672, cluster);
}

int run_add(float* sums, const float* values, int vector, unsigned blocks, unsigned threads) {
  return launch(add_kernel, Adds{sums, values, vector}, blocks, threads);
}

int run_wgmma(int fp16, int n, int a_in_registers, int transposed_a, int transposed_b, const uint32_t* image, int words,
              uint64_t a_descriptor, uint64_t b_descriptor, const uint32_t* a, float* accumulator, float* before_wait,
              int accumulate) {
  const Wgmma w = {image, a, accumulator, before_wait, a_descriptor, b_descriptor, words, accumulate != 0};
  const auto run = [&](auto run64, auto run128, auto run32) {
    return (n == 64 ? run64 : n == 128 ? run128 : run32)(a_in_registers != 0, transposed_a != 0, transposed_b != 0, w);
  };
  return fp16 ? run(run_wgmma_of<ptx::fp16, 64>, run_wgmma_of<ptx::fp16, 128>, run_wgmma_of<ptx::fp16, 32>)
              : run(run_wgmma_of<ptx::bf16, 64>, run_wgmma_of<ptx::bf16, 128>, run_wgmma_of<ptx::bf16, 32>);
}

int run_wgmma_groups(float* out) { return launch(wgmma_groups_kernel, WgmmaGroups{out}, 1, 128, 4096); }

int run_stmatrix(const uint32_t* fragments, const uint32_t* addresses, uint32_t* tile, uint32_t* moved, int transposed) {
  return launch(stmatrix_kernel, Stmatrix{fragments, addresses, tile, moved, transposed != 0}, 1, 32, 512);
}

int run_store(const CUtensorMap* map, const uint32_t* image, int rank, const int* coordinates, uint32_t bytes,
              float* sums) {
  Store store = {*map, image, rank, {}, bytes, sums};
  memcpy(store.coordinates, coordinates, rank * sizeof(int));
  return launch(store_kernel, store, 1, 64, bytes);
}

int run_counter(uint32_t* counter, uint32_t* taken, unsigned blocks, unsigned threads) {
  return launch(counter_kernel, Counter{counter, taken}, blocks, threads);
}

int run_places(uint32_t* out, unsigned blocks, unsigned threads) {
  return launch(place_kernel, Places{out}, blocks, threads);
}

int run_empty(const unsigned* grid, const unsigned* block, size_t shared_bytes, int allowed) {
  if (allowed >= 0)
    if (const int error = cudaFuncSetAttribute(empty_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed))
      return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid[0], grid[1], grid[2]);
  config.blockDim = dim3(block[0], block[1], block[2]);
  config.dynamicSmemBytes = shared_bytes;
  return cudaLaunchKernelEx(&config, empty_kernel, Nothing{});
}

int set_device(int device) { return cudaSetDevice(device); }

int find_driver_function(const char* name) {
  void* function;
  return cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault);
}

}  // extern "C"
