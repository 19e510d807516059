// Kernel launches: the checks of the runtime, the blocks of a grid one after another or on a few OS threads, and the names of
// kernels in diagnoses.
#pragma once

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <fenv.h>
#include <link.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <new>

#include "block.hpp"

namespace bwdtune_host __attribute__((visibility("hidden"))) {

// What a kernel may use of dynamic shared memory without being allowed more.
constexpr long DEFAULT_SHARED_BYTES = 48 << 10;

struct AllowedShared {
  const void* kernel;
  long bytes;
};
inline AllowedShared allowed_shared[16];
inline pthread_mutex_t allowed_shared_mutex = PTHREAD_MUTEX_INITIALIZER;

// Sets what a kernel is allowed (bytes >= 0), and returns it.
inline long allow_shared(const void* kernel, long bytes) {
  pthread_mutex_lock(&allowed_shared_mutex);
  long allowed = DEFAULT_SHARED_BYTES;
  for (AllowedShared& entry : allowed_shared) {
    if (entry.kernel && entry.kernel != kernel) continue;
    if (bytes >= 0) entry = {kernel, bytes};
    if (entry.kernel) allowed = entry.bytes;
    break;
  }
  pthread_mutex_unlock(&allowed_shared_mutex);
  return allowed;
}

cudaError_t set_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
    return refuse(cudaErrorInvalidValue, "function attribute %d: the host target has none such", attribute);
  const long limit = shared_memory_limit();
  if (value < 0 || value > limit)
    return refuse(cudaErrorInvalidValue, "%d bytes of shared memory a block: the card has %ld", value, limit);
  allow_shared(kernel, value);
  return cudaSuccess;
}

// A name as C++ has it, or null; to be freed. Of the C++ library, which a kernel is not linked with: the linker would read all of
// its names for this one.
inline char* demangle(const char* symbol) {
  using Demangle = char*(const char*, char*, size_t*, int*);
  void* found = dlsym(RTLD_DEFAULT, "__cxa_demangle");
  for (const char* name : {"libstdc++.so.6", "libc++abi.so.1"}) {
    if (found) break;
    if (void* library = dlopen(name, RTLD_LAZY | RTLD_LOCAL)) found = dlsym(library, "__cxa_demangle");
  }
  int failed;
  return found ? reinterpret_cast<Demangle*>(found)(symbol, nullptr, nullptr, &failed) : nullptr;
}

// The kernel's name from its library's symbol table, which also has the names of an anonymous namespace.
inline void name_kernel(const void* kernel, char* name, size_t bytes) {
  snprintf(name, bytes, "kernel %p", kernel);
#if defined(__linux__)
  Dl_info library;
  struct stat status;
  if (!dladdr(kernel, &library)) return;
  const int file = open(library.dli_fname, O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  void* mapped = fstat(file, &status) ? MAP_FAILED : mmap(nullptr, status.st_size, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return;
  const char* image = static_cast<const char*>(mapped);
  const auto* header = static_cast<const ElfW(Ehdr)*>(mapped);
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(image + header->e_shoff);
  const uintptr_t value = reinterpret_cast<uintptr_t>(kernel) - reinterpret_cast<uintptr_t>(library.dli_fbase);
  for (int s = 0; s < header->e_shnum; s++) {
    if (sections[s].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(image + sections[s].sh_offset);
    const char* names = image + sections[sections[s].sh_link].sh_offset;
    for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; i++) {
      if (symbols[i].st_value != value || (symbols[i].st_info & 15) != STT_FUNC) continue;
      const char* symbol = names + symbols[i].st_name;
      char* demangled = demangle(symbol);
      const char* text = demangled ? demangled : symbol;
      if (const char* scope = strstr(text, ")::")) text = scope + 3;  // (anonymous namespace)::
      snprintf(name, bytes, "%.*s", static_cast<int>(strcspn(text, "(")), text);
      free(demangled);
    }
  }
  munmap(mapped, status.st_size);
#endif
}

inline void* run_blocks(void* argument) {
  Launch& launch = *static_cast<Launch*>(argument);
  void* memory = malloc(sizeof(Block));
  Block* block = memory ? new (memory) Block(launch) : nullptr;
  // Kernels round to nearest even and keep subnormals, whatever the caller's thread has set.
  fenv_t callers;
  fegetenv(&callers);
  fesetenv(FE_DFL_ENV);
  if (!block || !block->allocated()) launch.fault(cudaErrorMemoryAllocation, "out of memory for the threads of a block");
  while (!__atomic_load_n(&launch.faulted, __ATOMIC_ACQUIRE)) {
    const uint64_t number = __atomic_fetch_add(&launch.next_cluster, 1, __ATOMIC_RELAXED);
    if (number >= launch.clusters()) break;
    block->run(number);
  }
  if (block) block->~Block();
  free(memory);
  __atomic_fetch_sub(&launch.workers, 1, __ATOMIC_SEQ_CST);
  fesetenv(&callers);
  return nullptr;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, void (*invoke)(const void*),
                          const void* call) {
  char name[128];
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (!threads || threads > 1024 || block.x > 1024 || block.y > 1024 || block.z > 64) {
    name_kernel(kernel, name, sizeof name);
    return refuse(cudaErrorInvalidConfiguration, "%s: a block of (%u,%u,%u) threads: 1 to 1024 are possible", name, block.x,
                  block.y, block.z);
  }
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    name_kernel(kernel, name, sizeof name);
    return refuse(cudaErrorInvalidConfiguration, "%s: a grid of (%u,%u,%u) blocks: at most (2^31 - 1, 65535, 65535)", name,
                  grid.x, grid.y, grid.z);
  }
  const long allowed = allow_shared(kernel, -1);
  if (config.dynamicSmemBytes > static_cast<size_t>(allowed)) {
    name_kernel(kernel, name, sizeof name);
    return refuse(cudaErrorInvalidValue, "%s: %zu bytes of dynamic shared memory: the kernel is allowed %ld", name,
                  config.dynamicSmemBytes, allowed);
  }
  Launch state = {};
  state.kernel = kernel;
  state.grid = grid;
  state.block = block;
  state.threads = static_cast<uint32_t>(threads);
  state.shared_bytes = static_cast<uint32_t>(config.dynamicSmemBytes);
  state.race_check = setting("BWDTUNE_HOST_RACECHECK", 0) != 0;
  state.cluster = 1;
  for (unsigned i = 0; i < config.numAttrs; i++) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      state.overlaps = attribute.val.programmaticStreamSerializationAllowed != 0;
    } else if (attribute.id == cudaLaunchAttributeClusterDimension) {
      const auto& cluster = attribute.val.clusterDim;
      state.cluster = cluster.x;
      if (cluster.x < 1 || cluster.x > MAX_CLUSTER || cluster.y != 1 || cluster.z != 1 || grid.x % cluster.x ||
          (cluster.x > 1 && (threads % WARP_SIZE || threads * cluster.x > MAX_WARPS * WARP_SIZE))) {
        name_kernel(kernel, name, sizeof name);
        return refuse(cudaErrorInvalidClusterSize,
                      "%s: clusters of (%u,%u,%u) in a grid of (%u,%u,%u): the host target has clusters of up to (%u,1,1), of "
                      "whole warps and %u threads in all, and the grid must be a multiple of them",
                      name, cluster.x, cluster.y, cluster.z, grid.x, grid.y, grid.z, MAX_CLUSTER, MAX_WARPS * WARP_SIZE);
      }
    }
  }
  state.invoke = invoke;
  state.call = call;
  state.buffers = &registered_buffers;

  // The launching thread works too; a helper that cannot be started is done without.
  pthread_t helpers[Launch::MAX_WORKERS];
  int started = 0;
  const long wanted = max(min(setting("BWDTUNE_HOST_THREADS", 1), Launch::MAX_WORKERS), 1);
  state.workers = static_cast<int>(min(static_cast<uint64_t>(wanted), state.clusters()));  // of which there is at least one
  for (int i = state.workers; i > 1; i--) {
    if (pthread_create(&helpers[started], nullptr, run_blocks, &state) == 0)
      started++;
    else
      __atomic_fetch_sub(&state.workers, 1, __ATOMIC_SEQ_CST);
  }
  run_blocks(&state);
  for (int i = 0; i < started; i++) pthread_join(helpers[i], nullptr);

  if (!state.faulted) return cudaSuccess;
  name_kernel(kernel, name, sizeof name);
  return refuse(state.code, "%s, %s", name, state.text);
}

}  // namespace bwdtune_host

// ---- for the loader of the library ----

extern "C" {

// Tells the kernels launched from this OS thread of memory that they may read, or also write. With at least one such buffer
// registered, every other global address is a fault, which is told by the buffer's name. 0, or -1 where there is no more room.
__attribute__((visibility("default"))) int bwdtune_host_register(const char* name, void* base, int64_t bytes, int writable) {
  bwdtune_host::Buffers& buffers = bwdtune_host::registered_buffers;
  if (bytes < 0 || buffers.count == bwdtune_host::Buffers::CAPACITY) return -1;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(base);
  bwdtune_host::Buffer& buffer = buffers.entries[buffers.count++];
  buffer = {begin, begin + static_cast<uintptr_t>(bytes), writable != 0, {}};
  snprintf(buffer.name, sizeof buffer.name, "%s", name);
  return 0;
}

__attribute__((visibility("default"))) void bwdtune_host_clear(void) { bwdtune_host::registered_buffers.count = 0; }

}  // extern "C"
