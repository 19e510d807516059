// One thread block on a CPU: its threads as fibers, its shared memory with a record of who wrote each word, its barriers.
// Or a cluster of blocks: a block's threads follow those of the block before, its shared memory is a window of its own.
//
// Every wait of a thread is a call into here, which switches to another thread; a block in which nobody can go on is a
// deadlock and is reported. Copies of TMA land at once, but a thread may only read them when the order of waits and barriers
// says that they have landed: order is tracked by vector clocks. Each thread counts the points at which it publishes what it
// did; each mbarrier counts its phases, as one more thread would. A thread knows of another's work up to the count that a
// barrier has handed on to it.
#pragma once

#include "driver.hpp"
#include "fiber.hpp"

namespace bwdtune_host __attribute__((visibility("hidden"))) {

constexpr uint32_t WARP_SIZE = 32, MAX_WARPS = 32, MAX_CLUSTER = 2;
constexpr uint32_t MAX_MBARRIERS = 64, NAMED_BARRIERS = 16;  // of a block
constexpr uint32_t ALL_LANES = 0xffffffffu;
constexpr int32_t MAX_TRANSACTION_BYTES = (1 << 20) - 1;

// ---- memory that kernels may touch, told by whoever owns it ----

struct Buffer {
  uintptr_t begin, end;
  bool writable;
  char name[24];
};

// Of the OS thread that launches. With none registered, global addresses are not checked.
struct Buffers {
  static constexpr int CAPACITY = 64;
  Buffer entries[CAPACITY];
  int count = 0;
};
inline thread_local Buffers registered_buffers;

// ---- a launch ----

struct Launch {
  const void* kernel;
  dim3 grid, block;
  uint32_t cluster;                // blocks of one
  uint32_t threads, shared_bytes;  // of a block
  bool race_check;
  bool overlaps;  // the kernel before, until a thread has waited for it
  void (*invoke)(const void* call);
  const void* call;
  const Buffers* buffers;
  // Of each buffer, what lies between the first and the last byte that ordinary stores of this kernel have written so far.
  struct {
    uintptr_t begin = UINTPTR_MAX, end = 0;
  } stored[Buffers::CAPACITY];

  uint64_t next_cluster = 0;
  uint64_t clusters() const { return uint64_t{grid.x} * grid.y * grid.z / cluster; }

  // OS threads that run blocks. Once each of them only waits for words of global memory, and none has released a word since it
  // last looked at all of its own, no word will change any more.
  static constexpr int MAX_WORKERS = 64;
  int workers_started = 0, workers = 0;
  uint64_t releases = 0;
  uint64_t stuck_at[MAX_WORKERS] = {};  // a worker's count of releases when it found nothing to do, plus one; 0: it goes on

  bool all_workers_are_stuck(uint64_t at) const {
    int stuck = 0;
    for (const uint64_t& worker : stuck_at) stuck += __atomic_load_n(&worker, __ATOMIC_SEQ_CST) == at + 1;
    return stuck == __atomic_load_n(&workers, __ATOMIC_SEQ_CST);
  }

  // The first fault: set once, then no block is started any more.
  int faulted = 0;
  cudaError_t code = cudaSuccess;
  char text[512];

  void fault(cudaError_t error, const char* diagnosis) {
    if (__atomic_exchange_n(&faulted, 1, __ATOMIC_ACQ_REL)) return;
    code = error;
    snprintf(text, sizeof text, "%s", diagnosis);
  }
};

// ---- threads and warps ----

class Block;
struct Warp;

// Work of a thread or a warp that the asynchronous proxy does some time between its issue and the wait for it: done at the wait,
// so that who overwrites its operands too early, or reads its results, gets wrong numbers. Such work comes in groups.
struct WgmmaOperation;
struct BulkOperation;

// An instruction that the 32 lanes execute together.
struct WarpInstruction {
  const char* name;
  void (*execute)(Warp&);
};

// Of a thread that does not wait for its warp: Warp::arrived has those.
enum class State : uint8_t { READY, AT_BLOCK_BARRIER, AT_NAMED_BARRIER, AT_MBARRIER, EXITED };

constexpr uint32_t KEPT_PROXY_FENCES = 8;

struct Fiber {
  Context context;
  Block* block;
  Warp* warp;
  uint3 thread_index;
  uint32_t rank;          // of its block
  uint32_t thread, lane;  // of the cluster, of the warp
  State state;
  int line;               // of the .cu, where it waits
  uint32_t mma;           // it has left operands of, which are not computed
  uint32_t awaited_mbarrier, awaited_parity, awaited_named_barrier;
  // Its last proxy fences, as counts of its clock: what it wrote up to there is visible to the asynchronous proxy.
  uint32_t proxy_fences[KEPT_PROXY_FENCES], proxy_fence_count;
  uint32_t bulk_groups;   // committed
  uint32_t bulk_complete;  // of them, waited for until they were in global memory
  uint32_t bulk_handed_on;  // of these, complete when others were last told to go on
  // What it did with global memory by one proxy, which nothing has ordered yet before what it does by the other.
  bool completed_unfenced, acquired_unfenced;
  bool waited_for_kernel_before;
  bool polls;
  uint32_t reached_peers;  // its clock when it last accessed another block's shared memory
  // What it knows of each thread and mbarrier beyond what the last block barrier told everybody; valid in that barrier's epoch.
  uint32_t* known;
  uint32_t known_epoch;
};

// An mma of a warp: what its lanes leave, by lane.
struct MmaOperation {
  void (*execute)(const MmaOperation&);
  const char* name;
  int line;
  float* accumulators[WARP_SIZE];
  alignas(16) uint32_t a[WARP_SIZE][4];
  uint32_t b[WARP_SIZE][2];
};
constexpr uint32_t MAX_MMA_OPERATIONS = 16;

struct Warp {
  Fiber* lanes;
  uint32_t index, size;
  uint32_t ready, exited;
  uint32_t arrived;  // at `instruction`
  const WarpInstruction* instruction;
  int line;
  bool wgmma_fenced;      // since registers may last have been touched
  uint32_t wgmma_groups;  // committed
  uint32_t wgmma_count;   // operations that have not been waited for
  uint32_t mma_count;     // operations that some lane has left operands for
  // Of `instruction`, by lane: apart from their stacks, of which no two share a cache line.
  void* operands[WARP_SIZE];
  uint32_t addresses[WARP_SIZE];
};

inline thread_local Fiber* current_fiber;

// ---- mbarriers ----

struct Mbarrier {
  uint32_t address;
  uint32_t count, pending;  // arrivals of a phase; those still missing in this one
  int32_t bytes;            // expected minus arrived in this phase
  uint32_t phases;          // completed
  uint32_t waited;          // the latest completed phase that any thread has waited for
  uint32_t copies;          // the phase count at which every copy so far has landed
  uint32_t initialiser, initialiser_clock;
  bool fenced;              // its initialisation is visible to TMA
  uint32_t waiting;         // warps with a thread that waits
  uint32_t* released;       // what arrivals publish, joined
  uint32_t* completed;      // the same when the last phase completed: what a wait learns
};

// ---- named barriers ----

struct NamedBarrier {
  uint32_t expected, arrived;  // threads; both 0 between two uses
  uint32_t completed_uses;
  uint32_t waiting;            // warps with a thread that waits
  int line;                    // of the first arrival
  uint32_t* released;          // what arrivals publish, joined
  uint32_t* completed;         // the same when the last use completed
};

// ---- asynchronous work ----

constexpr uint32_t MAX_WGMMA_OPERATIONS = 64, MAX_BULK_OPERATIONS = 64;

// A state of shared memory and of what is known of reads by one thread: no write and none of its barriers lies between equal ones.
struct Moment {
  uint64_t writes;
  uint32_t clock;
};

// A warp's share of a wgmma: 16 rows.
struct WgmmaOperation {
  void (*execute)(Warp&, const WgmmaOperation&);
  uint32_t group;
  int line;
  ptx::WgmmaOperands operands;  // lane 0's
  uint64_t version;             // of what it reads of shared memory
  Moment issued;
  float* accumulators[WARP_SIZE];
  uint32_t a[WARP_SIZE][4];
};

// A copy from shared to global memory.
struct BulkOperation {
  void (*execute)(const Fiber&, const BulkOperation&);
  uint32_t thread, group;
  uint32_t source, bytes;
  int line;
  uint64_t version;        // of what it reads
  void* destination;       // of plain memory,
  const CUtensorMap* map;  // or a box of a tensor
  int coordinates[MAX_RANK];
};

// ---- shared memory ----

struct Word {
  uint32_t clock;
  uint16_t writer;  // a thread, or threads + index of the mbarrier that a copy completes on, or one of the below
  uint16_t line;

  bool operator==(const Word& other) const { return memcmp(this, &other, sizeof *this) == 0; }
};
constexpr uint16_t NEVER_WRITTEN = 0xffff, HOLDS_MBARRIER = 0xfffe;

// Whose shared memory an instruction may name.
enum class Reach : uint8_t { OWN_BLOCK, CLUSTER };

constexpr const char* BLOCK_BARRIER = "a block barrier";

// Four at a time: what every CPU has in one register.
typedef float Quad __attribute__((vector_size(16), may_alias));
typedef uint32_t Words __attribute__((vector_size(16), may_alias));
typedef int32_t Clocks __attribute__((vector_size(16), may_alias));

template <class T>
T* allocate(size_t count) {
  return static_cast<T*>(calloc(count ? count : 1, sizeof(T)));
}

class Block {
 public:
  explicit Block(Launch& launch)
      : launch_(launch),
        worker_(__atomic_fetch_add(&launch.workers_started, 1, __ATOMIC_RELAXED)),
        threads_(launch.cluster * launch.threads),
        warps_count_((threads_ + WARP_SIZE - 1) / WARP_SIZE),
        participants_((threads_ + launch.cluster * MAX_MBARRIERS + 3) / 4 * 4),
        shared_words_(((launch.cluster - 1) * SHARED_WINDOW + launch.shared_bytes + 15) / 16 * 4),
        stacks_(threads_),
        fibers_(allocate<Fiber>(threads_)),
        known_(allocate<uint32_t>(static_cast<size_t>(threads_) * participants_)),
        told_to_all_(allocate<uint32_t>(participants_)),
        clocks_(allocate<uint32_t>(threads_)),
        mbarrier_clocks_(allocate<uint32_t>(2 * launch.cluster * MAX_MBARRIERS * participants_)),
        named_barrier_clocks_(allocate<uint32_t>(2 * launch.cluster * NAMED_BARRIERS * participants_)),
        wgmma_operations_(allocate<WgmmaOperation>(static_cast<size_t>(warps_count_) * MAX_WGMMA_OPERATIONS)),
        mma_operations_(allocate<MmaOperation>(static_cast<size_t>(warps_count_) * MAX_MMA_OPERATIONS)),
        shared_(allocate<uint8_t>(4 * shared_words_)),
        words_(allocate<Word>(shared_words_)),
        reader_warps_(allocate<uint32_t>(launch.race_check ? shared_words_ : 0)),
        reads_(allocate<uint32_t>(launch.race_check ? shared_words_ * warps_count_ : 0)) {}

  ~Block() {
    for (void* pointer : {static_cast<void*>(fibers_), static_cast<void*>(known_), static_cast<void*>(told_to_all_),
                          static_cast<void*>(clocks_), static_cast<void*>(mbarrier_clocks_),
                          static_cast<void*>(named_barrier_clocks_), static_cast<void*>(wgmma_operations_),
                          static_cast<void*>(mma_operations_), static_cast<void*>(shared_), static_cast<void*>(words_),
                          static_cast<void*>(reader_warps_), static_cast<void*>(reads_)})
      free(pointer);
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  bool allocated() const {
    return stacks_.allocated() && fibers_ && known_ && told_to_all_ && clocks_ && mbarrier_clocks_ && named_barrier_clocks_ &&
           wgmma_operations_ && mma_operations_ && shared_ && words_ && reader_warps_ && reads_;
  }

  // Of the block that a thread belongs to.
  dim3 index(uint32_t rank) const { return dim3(index_.x + rank, index_.y, index_.z); }
  const Launch& launch() const { return launch_; }

  // Runs the cluster with that number from its first thread's entry to its last thread's exit, or to a fault.
  void run(uint64_t number) {
    number *= launch_.cluster;
    index_ = dim3(static_cast<unsigned>(number % launch_.grid.x),
                  static_cast<unsigned>(number / launch_.grid.x % launch_.grid.y),
                  static_cast<unsigned>(number / launch_.grid.x / launch_.grid.y));
    faulted_ = false;
    alive_ = threads_;
    for (uint32_t& alive : block_alive_) alive = launch_.threads;
    barrier_arrived_ = 0;
    mbarrier_count_ = 0;
    bulk_count_ = 0;
    epoch_ = 1;
    const uint32_t named_barriers = launch_.cluster * NAMED_BARRIERS;
    memset(named_barrier_clocks_, 0, 2 * named_barriers * participants_ * sizeof *named_barrier_clocks_);
    for (uint32_t i = 0; i < named_barriers; i++) {
      uint32_t* clocks = named_barrier_clocks_ + 2 * i * participants_;
      named_barriers_[i] = {0, 0, 0, 0, 0, clocks, clocks + participants_};
    }
    memset(told_to_all_, 0, participants_ * sizeof *told_to_all_);
    memset(words_, 0xff, shared_words_ * sizeof *words_);
    if (launch_.race_check) memset(reader_warps_, 0, shared_words_ * sizeof *reader_warps_);
    for (uint32_t t = 0; t < threads_; t++) {
      Fiber& fiber = fibers_[t];
      fiber.block = this;
      fiber.thread = t;
      fiber.rank = t / launch_.threads;
      const uint32_t in_block = t % launch_.threads;
      fiber.thread_index = {in_block % launch_.block.x, in_block / launch_.block.x % launch_.block.y,
                            in_block / launch_.block.x / launch_.block.y};
      fiber.lane = t % WARP_SIZE;
      fiber.warp = &warps_[t / WARP_SIZE];
      fiber.state = State::READY;
      fiber.known = known_ + static_cast<size_t>(t) * participants_;
      fiber.known_epoch = 0;
      fiber.proxy_fence_count = 0;
      fiber.bulk_groups = fiber.bulk_complete = fiber.bulk_handed_on = 0;
      fiber.completed_unfenced = fiber.acquired_unfenced = false;
      fiber.waited_for_kernel_before = !launch_.overlaps;
      fiber.polls = false;
      fiber.reached_peers = 0;
      fiber.mma = 0;
      clocks_[t] = 1;
      fiber.context.prepare(stacks_.bottom(t), stacks_.top(t), &Block::enter);
    }
    for (uint32_t w = 0; w < warps_count_; w++) {
      const uint32_t size = threads_ - w * WARP_SIZE < WARP_SIZE ? threads_ - w * WARP_SIZE : WARP_SIZE;
      warps_[w] = {fibers_ + w * WARP_SIZE, w, size, size == WARP_SIZE ? ALL_LANES : (1u << size) - 1, 0, 0, nullptr, 0,
                   false, 0, 0, 0, {}, {}};
    }
    current_ = &current_fiber;
    resume(scheduler_, fibers_[0]);
    current_fiber = nullptr;
    if (!faulted_) check_mbarriers_at_exit();
    if (!faulted_) check_named_barriers_at_exit();
    if (!faulted_) check_asynchronous_work_at_exit();
  }

  // ---- faults ----

  // Reports a fault of that thread and leaves the block; its threads are not resumed.
  [[noreturn]] __attribute__((format(printf, 5, 6))) void fault(const Fiber& fiber, cudaError_t code, int line,
                                                                const char* format, ...) {
    char what[320];
    va_list values;
    va_start(values, format);
    vsnprintf(what, sizeof what, format, values);
    va_end(values);
    char text[480];
    const dim3 block = index(fiber.rank);
    snprintf(text, sizeof text, "block (%u,%u,%u), thread %u (warp %u, lane %u), line %d: %s", block.x, block.y, block.z,
             fiber.thread, fiber.warp->index, fiber.lane, line, what);
    abandon(code, text);
  }

  // ---- warps ----

  // Joins the warp's lanes in `instruction`; returns when all have arrived and it has been executed.
  void execute_in_warp(const WarpInstruction& instruction, void* operands, int line, uint32_t address = 0) {
    Fiber& fiber = *running_;
    Warp& warp = *fiber.warp;
    if (warp.exited || warp.size < WARP_SIZE) fault_partial(fiber, instruction.name, line);
    if (!warp.arrived) {
      warp.instruction = &instruction;
      warp.line = line;
    } else if (warp.instruction != &instruction || warp.line != line) {
      fault(fiber, cudaErrorLaunchFailure, line,
            "%s is reached by a part of its warp only: lanes 0x%08x are at %s of line %d", instruction.name,
            warp.arrived, warp.instruction->name, warp.line);
    }
    warp.operands[fiber.lane] = operands;
    warp.addresses[fiber.lane] = address;
    const uint32_t bit = 1u << fiber.lane;
    warp.arrived |= bit;
    if (warp.arrived != ALL_LANES) {
      warp.ready &= ~bit;
      suspend(fiber);
      return;
    }
    warp.arrived = 0;
    if (warp.mma_count) execute_mma(warp);
    instruction.execute(warp);
    warp.ready = ALL_LANES;
  }

  // Where a lane is to leave its operands of the warp's next mma. Lanes do so one after another: their results have to be waited
  // for by mma_done.
  MmaOperation& leave_mma(Fiber& fiber, const char* name, void (*execute)(const MmaOperation&), int line) {
    Warp& warp = *fiber.warp;
    if (warp.exited || warp.size < WARP_SIZE) fault_partial(fiber, name, line);
    MmaOperation& operation = mma_operations_[warp.index * MAX_MMA_OPERATIONS + fiber.mma];
    if (fiber.mma == warp.mma_count) {
      operation.execute = execute;
      operation.name = name;
      operation.line = line;
      warp.mma_count++;
    } else if (operation.execute != execute || operation.line != line) {
      fault(fiber, cudaErrorLaunchFailure, line,
            "%s is reached by a part of its warp only: other lanes are at %s of line %d", name, operation.name, operation.line);
    }
    fiber.mma++;
    return operation;
  }

  // Computes those that the lanes have left operands for, which must be the same for each.
  void execute_mma(Warp& warp) {
    const MmaOperation* operations = mma_operations_ + warp.index * MAX_MMA_OPERATIONS;
    for (uint32_t lane = 0; lane < WARP_SIZE; lane++) {
      Fiber& fiber = warp.lanes[lane];
      if (fiber.mma < warp.mma_count)
        fault(fiber, cudaErrorLaunchFailure, warp.line, "%s of line %d is reached by a part of its warp only: this thread has "
              "not come to it", operations[fiber.mma].name, operations[fiber.mma].line);
      fiber.mma = 0;
    }
    for (uint32_t i = 0; i < warp.mma_count; i++) operations[i].execute(operations[i]);
    warp.mma_count = 0;
  }

  // What its lanes did is known to all of them from here on.
  void join_warp(const Warp& warp) {
    Fiber* lanes = warp.lanes;
    for (uint32_t lane = 0; lane < WARP_SIZE; lane++) catch_up(lanes[lane]);
    for (uint32_t lane = 1; lane < WARP_SIZE; lane++) join(lanes[0].known, lanes[lane].known);
    for (uint32_t lane = 0; lane < WARP_SIZE; lane++)
      lanes[0].known[lanes[lane].thread] = clocks_[lanes[lane].thread]++;
    for (uint32_t lane = 1; lane < WARP_SIZE; lane++)
      memcpy(lanes[lane].known, lanes[0].known, participants_ * sizeof *lanes[0].known);
  }

  // ---- waits that the block does not know of ----

  // For a thread that polls: goes on with others, which come back to it. False where those that are ready poll as well.
  bool let_others_run() {
    Fiber& fiber = *running_;
    fiber.polls = true;
    bool others = false;
    const Warp* next = nullptr;
    for (uint32_t w = 1; w <= warps_count_; w++) {
      const Warp& warp = warps_[(fiber.warp->index + w) % warps_count_];
      if (warp.ready && !next) next = &warp;
      for (uint32_t ready = warp.ready; ready; ready &= ready - 1) others = others || !warp.lanes[__builtin_ctz(ready)].polls;
    }
    const uint32_t later = fiber.warp->ready & ~((2u << fiber.lane) - 1);
    Fiber& resumed = later ? fiber.warp->lanes[__builtin_ctz(later)] : next->lanes[__builtin_ctz(next->ready)];
    if (&resumed != &fiber) {
      resume(fiber.context, resumed);
    }
    fiber.polls = false;
    return others;
  }

  // A thread that polls has found nothing. `releases` are those before it looked, and `others` is what let_others_run said.
  // Returns whether no word will change any more.
  bool polled_in_vain(uint64_t releases, bool others) {
    if (others || releases != releases_seen_) fruitless_polls_ = 0;
    releases_seen_ = releases;
    // Those that poll take turns: after so many each has looked.
    const bool stuck = fruitless_polls_++ > threads_;
    __atomic_store_n(&launch_.stuck_at[worker_], stuck ? releases + 1 : 0, __ATOMIC_SEQ_CST);
    return stuck && launch_.all_workers_are_stuck(releases);
  }

  void count_release() { __atomic_fetch_add(&launch_.releases, 1, __ATOMIC_SEQ_CST); }

  void polled_with_success() {
    fruitless_polls_ = 0;
    __atomic_store_n(&launch_.stuck_at[worker_], 0, __ATOMIC_SEQ_CST);
  }

  // ---- the block barrier, or a cluster's ----

  void sync_all(int line) {
    Fiber& fiber = *running_;
    if (fiber.warp->arrived)
      fault(fiber, cudaErrorLaunchFailure, line, "a block barrier is reached by a part of its warp only: lanes 0x%08x are "
            "at %s of line %d", fiber.warp->arrived, fiber.warp->instruction->name, fiber.warp->line);
    fiber.line = line;
    if (++barrier_arrived_ < threads_) {
      fiber.state = State::AT_BLOCK_BARRIER;
      fiber.warp->ready &= ~(1u << fiber.lane);
      suspend(fiber);
      return;
    }
    barrier_arrived_ = 0;
    // Everybody now knows all that anybody did or knew.
    for (uint32_t t = 0; t < threads_; t++) {
      told_to_all_[t] = clocks_[t]++;
      fibers_[t].state = State::READY;
    }
    for (uint32_t i = 0; i < mbarrier_count_; i++) told_to_all_[threads_ + i] = mbarriers_[i].waited;
    epoch_++;
    for (uint32_t w = 0; w < warps_count_; w++)
      warps_[w].ready = warps_[w].size == WARP_SIZE ? ALL_LANES : (1u << warps_[w].size) - 1;
  }

  // ---- named barriers ----

  // All lanes of a warp arrive. Returns the uses completed before: to wait is to wait until there are more.
  uint32_t arrive_at_named_barrier(const Warp& warp, int index, int threads, const char* what, int line) {
    const Fiber& fiber = warp.lanes[0];
    if (index < (what == BLOCK_BARRIER ? 0 : 1) || index >= static_cast<int>(NAMED_BARRIERS))
      fault(fiber, cudaErrorLaunchFailure, line, "%s of barrier %d: they are 1 to 15, and 0 is the block's own", what, index);
    if (threads < 1 || threads % static_cast<int>(WARP_SIZE) || static_cast<uint32_t>(threads) > launch_.threads)
      fault(fiber, cudaErrorLaunchFailure, line, "%s for %d threads: they must be whole warps of the block's %u threads", what,
            threads, launch_.threads);
    index += static_cast<int>(fiber.rank * NAMED_BARRIERS);
    NamedBarrier& barrier = named_barriers_[index];
    if (!barrier.arrived) {
      barrier.expected = static_cast<uint32_t>(threads);
      barrier.line = line;
    } else if (barrier.expected != static_cast<uint32_t>(threads)) {
      fault(fiber, cudaErrorLaunchFailure, line, "%s of barrier %d for %d threads, which line %d uses for %u", what, index,
            threads, barrier.line, barrier.expected);
    }
    for (uint32_t lane = 0; lane < WARP_SIZE; lane++) publish(warp.lanes[lane], barrier.released);
    barrier.arrived += WARP_SIZE;
    const uint32_t use = barrier.completed_uses;
    if (barrier.arrived < barrier.expected) return use;
    barrier.arrived = barrier.expected = 0;
    barrier.completed_uses++;
    memcpy(barrier.completed, barrier.released, participants_ * sizeof *barrier.released);
    for (uint32_t warps = barrier.waiting; warps; warps &= warps - 1) {
      Warp& other = warps_[__builtin_ctz(warps)];
      for (uint32_t lane = 0; lane < other.size; lane++) {
        Fiber& waiting = other.lanes[lane];
        if (waiting.state != State::AT_NAMED_BARRIER || waiting.awaited_named_barrier != static_cast<uint32_t>(index)) continue;
        waiting.state = State::READY;
        other.ready |= 1u << lane;
      }
    }
    barrier.waiting = 0;
    return use;
  }

  void wait_at_named_barrier(int index, uint32_t use, int line) {
    Fiber& fiber = *running_;
    index += static_cast<int>(fiber.rank * NAMED_BARRIERS);
    NamedBarrier& barrier = named_barriers_[index];
    if (barrier.completed_uses == use) {
      fiber.state = State::AT_NAMED_BARRIER;
      fiber.line = line;
      fiber.awaited_named_barrier = static_cast<uint32_t>(index);
      fiber.warp->ready &= ~(1u << fiber.lane);
      barrier.waiting |= 1u << fiber.warp->index;
      suspend(fiber);
    }
    learn(fiber, barrier.completed);
  }

  // ---- shared memory ----

  // The bytes at an address, for a read of `bytes` (a multiple of 4) by that thread.
  const uint8_t* read_shared(const Fiber& fiber, uint32_t address, uint32_t bytes, const char* what, int line) {
    const uint32_t offset = check_shared(fiber, address, bytes, bytes, what, line);
    Word readable = {0, NEVER_WRITTEN, 0};
    for (uint32_t i = offset / 4; i < (offset + bytes) / 4; i++) {
      if (words_[i] == readable) continue;
      readable = words_[i];
      if (!may_read(fiber, readable)) fault_read(fiber, i, what, line);
    }
    note_reads(fiber, offset / 4, (offset + bytes) / 4);
    return shared_ + offset;
  }

  // The bytes at an address, for a write of `bytes` (a multiple of 4) by that thread or by a copy that it starts, which
  // completes on `mbarrier`.
  uint8_t* write_shared(const Fiber& fiber, uint32_t address, uint32_t bytes, uint32_t alignment, const char* what, int line,
                        const Mbarrier* mbarrier = nullptr, Reach reach = Reach::OWN_BLOCK) {
    const uint32_t offset = check_shared(fiber, address, bytes, alignment, what, line, reach);
    const Word written = mbarrier ? Word{mbarrier->phases + 1, static_cast<uint16_t>(threads_ + (mbarrier - mbarriers_)),
                                         static_cast<uint16_t>(line)}
                                  : Word{clocks_[fiber.thread], static_cast<uint16_t>(fiber.thread),
                                         static_cast<uint16_t>(line)};
    const uint32_t first = offset / 4, end = (offset + bytes) / 4;
    for (uint32_t i = first; i < end; i++)
      if (words_[i].writer == HOLDS_MBARRIER)
        fault(fiber, cudaErrorLaunchFailure, line, "%s overwrites the mbarrier at shared offset %u", what, 4 * i);
    if (launch_.race_check) check_write_races(fiber, first, end, what, line);
    for (uint32_t i = first; i < end; i++) words_[i] = written;
    writes_++;
    return shared_ + offset;
  }

  // ---- the asynchronous proxy ----

  // What this thread has written so far is visible to the asynchronous proxy, for those who know of the fence.
  void proxy_fence() {
    Fiber& fiber = *running_;
    fiber.proxy_fences[fiber.proxy_fence_count++ % KEPT_PROXY_FENCES] = clocks_[fiber.thread]++;
  }

  // In global memory, what this thread did by either proxy comes before what it does by the other.
  void proxy_fence_of_global_memory() { running_->completed_unfenced = running_->acquired_unfenced = false; }

  // Both.
  void proxy_fence_of_all_memory() {
    proxy_fence();
    proxy_fence_of_global_memory();
  }

  // Before others are told that they may go on with what this thread's copies write: some since the last time have to be
  // complete. Others may be under way, which it will tell of later.
  void check_handing_on(const char* what, int line) {
    Fiber& fiber = *running_;
    if (fiber.bulk_complete != fiber.bulk_groups && fiber.bulk_complete == fiber.bulk_handed_on)
      fault(fiber, cudaErrorLaunchFailure, line, "%s while what bulk copies of this thread write may not be in memory yet",
            what);
    if (fiber.completed_unfenced)
      fault(fiber, cudaErrorLaunchFailure, line, "%s with no proxy fence since bulk copies of this thread were complete", what);
    fiber.bulk_handed_on = fiber.bulk_complete;
  }

  // `read_shared` for the asynchronous proxy, on behalf of that thread.
  const uint8_t* read_shared_async(const Fiber& fiber, uint32_t address, uint32_t bytes, const char* what, int line) {
    constexpr uint64_t PRIME = 0x100000001b3;
    const uint32_t offset = check_shared(fiber, address, bytes, bytes, what, line);
    const uint32_t first = offset / 4, end = (offset + bytes) / 4;
    // One write, of a copy or of a thread, is mostly of several words.
    const Word expected = operand_word_;
    uint32_t i = first;
    while (i < end && words_[i] == expected) i++;
    operand_words_ += i - first;
    for (; i < end; i++) {
      const Word word = words_[i];
      if (word == operand_word_) {
        operand_words_++;
        continue;
      }
      if (!may_read(fiber, word)) fault_read(fiber, i, what, line);
      if (word.writer < threads_ && !knows_proxy_fence(fiber, word))
        fault(fiber, cudaErrorLaunchFailure, line,
              "%s reads shared offset %u, which thread %u wrote at line %u with no proxy fence between", what, 4 * i,
              word.writer, word.line);
      operand_word_ = word;
      // Which words have been the same ones' so far, and who wrote this one.
      operands_version_ = (operands_version_ ^ operand_words_) * PRIME;
      operands_version_ = (operands_version_ ^ word.clock ^ static_cast<uint64_t>(word.writer) << 32) * PRIME;
    }
    note_reads(fiber, first, end);
    return shared_ + offset;
  }

  // Between the two calls, an operation reads its operands, on behalf of one thread: first as it is issued, again as it is
  // done. The version that the second returns tells whether anything was written in between.
  void begin_operands() {
    operands_version_ = operand_words_ = 0;
    operand_word_ = {0, NEVER_WRITTEN, 0};
  }
  uint64_t operands_version() const { return operands_version_ + operand_words_; }

  void check_operands(const Fiber& fiber, uint64_t issued, uint64_t done, const char* what, int line) {
    if (issued != done)
      fault(fiber, cudaErrorLaunchFailure, line, "the operands of %s were written to before it was waited for", what);
  }

  Moment moment(const Fiber& fiber) const { return {writes_, clocks_[fiber.thread]}; }
  // Bytes whose read has been checked.
  const uint8_t* shared_at(uint32_t address) const { return shared_ + (address - SHARED_BASE); }

  // A new operation of the warp's open group.
  WgmmaOperation& issue_wgmma(Warp& warp, int line) {
    if (warp.wgmma_count == MAX_WGMMA_OPERATIONS)
      fault(warp.lanes[0], cudaErrorLaunchFailure, line, "the host target keeps %u wgmma in flight", MAX_WGMMA_OPERATIONS);
    if (!warp.wgmma_fenced)
      fault(warp.lanes[0], cudaErrorLaunchFailure, line,
            "wgmma with no wgmma.fence since its registers were free to be used: at the start, or after a wait");
    WgmmaOperation& operation = wgmma_operations_[warp.index * MAX_WGMMA_OPERATIONS + warp.wgmma_count++];
    operation.group = warp.wgmma_groups;
    operation.line = line;
    return operation;
  }

  // Does all that the warp has committed except for the last `left` groups.
  void wait_wgmma(Warp& warp, uint32_t left) {
    WgmmaOperation* operations = wgmma_operations_ + warp.index * MAX_WGMMA_OPERATIONS;
    uint32_t done = 0;
    while (done < warp.wgmma_count && operations[done].group + left < warp.wgmma_groups) {
      operations[done].execute(warp, operations[done]);
      done++;
    }
    warp.wgmma_count -= done;
    memmove(operations, operations + done, warp.wgmma_count * sizeof *operations);
  }

  void issue_bulk(const BulkOperation& operation) {
    if (bulk_count_ == MAX_BULK_OPERATIONS)
      fault(*running_, cudaErrorLaunchFailure, operation.line, "the host target keeps %u bulk copies in flight",
            MAX_BULK_OPERATIONS);
    check_acquired(operation.line);
    bulk_operations_[bulk_count_++] = operation;
  }

  // Refuses a bulk copy that may not be ordered after what this thread has waited for.
  void check_acquired(int line) {
    if (running_->acquired_unfenced)
      fault(*running_, cudaErrorLaunchFailure, line,
            "a bulk copy with no proxy fence since this thread waited for a word of global memory");
  }

  // The same of a copy from global memory, if this kernel has written there: what others have was there at its start.
  void check_acquired_source(const void* source, uint32_t bytes, int line) {
    if (!launch_.buffers->count) return;
    const auto& stored = launch_.stored[last_buffer_];
    const uintptr_t begin = reinterpret_cast<uintptr_t>(source);
    if (begin < __atomic_load_n(&stored.end, __ATOMIC_RELAXED) &&
        begin + bytes > __atomic_load_n(&stored.begin, __ATOMIC_RELAXED))
      check_acquired(line);
  }

  // Does all that the thread has committed except for the last `left` groups. Where it waits for their reads alone, nobody may
  // count on what they write.
  void wait_bulk(uint32_t left, bool reads_alone) {
    Fiber& fiber = *running_;
    if (!reads_alone && fiber.bulk_groups > fiber.bulk_complete + left) {
      fiber.bulk_complete = fiber.bulk_groups - left;
      fiber.completed_unfenced = true;
    }
    uint32_t kept = 0;
    for (uint32_t i = 0; i < bulk_count_; i++) {
      const BulkOperation& operation = bulk_operations_[i];
      if (operation.thread == fiber.thread && operation.group + left < fiber.bulk_groups)
        operation.execute(fiber, operation);
      else
        bulk_operations_[kept++] = operation;
    }
    bulk_count_ = kept;
  }

  // ---- mbarriers ----

  void mbarrier_init(uint32_t address, uint32_t arrivals, int line) {
    Fiber& fiber = *running_;
    if (arrivals < 1 || arrivals >= 1u << 20)
      fault(fiber, cudaErrorLaunchFailure, line, "mbarrier.init with %u arrivals: they must lie between 1 and 2^20 - 1",
            arrivals);
    write_shared(fiber, address, 8, 8, "mbarrier.init", line);
    if (mbarrier_count_ == launch_.cluster * MAX_MBARRIERS)
      fault(fiber, cudaErrorLaunchFailure, line, "the host target keeps %u mbarriers a block", MAX_MBARRIERS);
    const uint32_t word = (address - SHARED_BASE) / 4;
    words_[word].writer = words_[word + 1].writer = HOLDS_MBARRIER;
    words_[word].clock = mbarrier_count_;
    uint32_t* clocks = mbarrier_clocks_ + 2 * mbarrier_count_ * participants_;
    memset(clocks, 0, 2 * participants_ * sizeof *clocks);
    Mbarrier& mbarrier = mbarriers_[mbarrier_count_++];
    mbarrier = {};
    mbarrier.address = address;
    mbarrier.count = mbarrier.pending = arrivals;
    mbarrier.initialiser = fiber.thread;
    mbarrier.initialiser_clock = clocks_[fiber.thread];
    mbarrier.released = clocks;
    mbarrier.completed = clocks + participants_;
  }

  void mbarrier_fence_init() {
    for (uint32_t i = 0; i < mbarrier_count_; i++)
      if (mbarriers_[i].initialiser == running_->thread) mbarriers_[i].fenced = true;
  }

  // The mbarrier at an address, which must have been initialised before this thread's last barrier.
  Mbarrier& mbarrier_at(uint32_t address, const char* what, int line, Reach reach = Reach::OWN_BLOCK) {
    const Fiber& fiber = *running_;
    const uint32_t offset = check_shared(fiber, address, 8, 8, what, line, reach), word = offset / 4;
    if (words_[word].writer != HOLDS_MBARRIER ||
        mbarriers_[words_[word].clock % (MAX_CLUSTER * MAX_MBARRIERS)].address != address)
      fault(fiber, cudaErrorLaunchFailure, line, "%s names shared offset %u, where no mbarrier was initialised", what,
            offset);
    Mbarrier& mbarrier = mbarriers_[words_[word].clock];
    if (!knows(fiber, mbarrier.initialiser, mbarrier.initialiser_clock))
      fault(fiber, cudaErrorLaunchFailure, line,
            "%s names the mbarrier at shared offset %u, which thread %u initialised with no block barrier since", what,
            offset, mbarrier.initialiser);
    return mbarrier;
  }

  void mbarrier_arrive_expect_tx(uint32_t address, uint32_t bytes, int line) {
    Fiber& fiber = *running_;
    Mbarrier& mbarrier = mbarrier_at(address, "mbarrier.arrive", line);
    count_bytes(mbarrier, static_cast<int64_t>(bytes), line);
    arrive(fiber, mbarrier, line);
  }

  void mbarrier_arrive(uint32_t address, int line, Reach reach = Reach::OWN_BLOCK) {
    arrive(*running_, mbarrier_at(address, "mbarrier.arrive", line, reach), line);
  }

  // A copy that this thread has started has read its source when it completes there.
  void publish_to(const Mbarrier& mbarrier) { publish(*running_, mbarrier.released); }

  void mbarrier_complete_tx(Mbarrier& mbarrier, uint32_t bytes, int line) {
    mbarrier.copies = mbarrier.phases + 1;
    count_bytes(mbarrier, -static_cast<int64_t>(bytes), line);
    complete_phase_if_due(mbarrier, line);
  }

  void mbarrier_wait(uint32_t address, uint32_t parity, int line) {
    Fiber& fiber = *running_;
    Mbarrier& mbarrier = mbarrier_at(address, "mbarrier.try_wait", line);
    if (parity > 1) fault(fiber, cudaErrorLaunchFailure, line, "mbarrier.try_wait with parity %u: it is 0 or 1", parity);
    // Asked again after each completion: who comes back too late to see its phase waits for the next but one, as on a card.
    while (mbarrier.phases % 2 == parity) {
      fiber.state = State::AT_MBARRIER;
      fiber.line = line;
      fiber.awaited_mbarrier = static_cast<uint32_t>(&mbarrier - mbarriers_);
      fiber.awaited_parity = parity;
      fiber.warp->ready &= ~(1u << fiber.lane);
      mbarrier.waiting |= 1u << fiber.warp->index;
      suspend(fiber);
    }
    if (mbarrier.waited < mbarrier.phases) mbarrier.waited = mbarrier.phases;
    learn(fiber, mbarrier.completed);
    uint32_t& phases = fiber.known[threads_ + (&mbarrier - mbarriers_)];
    if (phases < mbarrier.phases) phases = mbarrier.phases;
  }

  // ---- global memory ----

  void check_global(const void* pointer, uint64_t bytes, uint64_t alignment, bool write, const char* what, int line) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(pointer), end = begin + bytes;
    if (begin % alignment)
      fault(*running_, cudaErrorMisalignedAddress, line, "%s of global address %p, which is not %u-byte aligned", what,
            pointer, static_cast<unsigned>(alignment));
    if (!running_->waited_for_kernel_before)
      fault(*running_, cudaErrorLaunchFailure, line, "%s of global address %p, before the kernel before is waited for", what,
            pointer);
    const Buffers& buffers = *launch_.buffers;
    if (!buffers.count) return;
    const auto within = [&](const Buffer& buffer) {
      return begin >= buffer.begin && end <= buffer.end && (buffer.writable || !write);
    };
    // Most accesses hit the buffer of the one before.
    if (last_buffer_ < buffers.count && within(buffers.entries[last_buffer_])) return;
    for (last_buffer_ = 0; last_buffer_ < buffers.count; last_buffer_++)
      if (within(buffers.entries[last_buffer_])) return;
    fault_global(begin, bytes, write, what, line);
  }

  // An ordinary store, just checked.
  void note_store(const void* pointer, uint32_t bytes) {
    if (!launch_.buffers->count) return;
    auto& stored = launch_.stored[last_buffer_];
    const uintptr_t begin = reinterpret_cast<uintptr_t>(pointer), end = begin + bytes;
    uintptr_t old = __atomic_load_n(&stored.begin, __ATOMIC_RELAXED);
    while (begin < old && !__atomic_compare_exchange_n(&stored.begin, &old, begin, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    old = __atomic_load_n(&stored.end, __ATOMIC_RELAXED);
    while (end > old && !__atomic_compare_exchange_n(&stored.end, &old, end, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }

 private:
  // ---- running ----

  void resume(Context& from, Fiber& next) {
    running_ = *current_ = &next;
    Context::go(from, next.context);
  }

  static void enter() {
    Fiber& fiber = *current_fiber;
    fiber.block->launch_.invoke(fiber.block->launch_.call);
    fiber.block->exit(fiber);
  }

  [[noreturn]] void fault_partial(const Fiber& fiber, const char* name, int line) {
    const Warp& warp = *fiber.warp;
    fault(fiber, cudaErrorLaunchFailure, line, "%s is reached by a part of its warp only: lanes 0x%08x %s", name,
          warp.exited ? warp.exited : ~((1u << warp.size) - 1), warp.exited ? "have exited" : "do not exist");
  }

  [[noreturn]] void exit(Fiber& fiber) {
    Warp& warp = *fiber.warp;
    if (warp.arrived)
      fault(fiber, cudaErrorLaunchFailure, warp.line,
            "%s is reached by a part of its warp only: this thread exits, lanes 0x%08x have arrived",
            warp.instruction->name, warp.arrived);
    if (warp.mma_count) {
      const MmaOperation& operation = mma_operations_[warp.index * MAX_MMA_OPERATIONS];
      fault(fiber, cudaErrorLaunchFailure, operation.line,
            fiber.mma ? "%s has no mma_done before this thread exits"
                      : "%s is reached by a part of its warp only: this thread exits",
            operation.name);
    }
    fiber.state = State::EXITED;
    warp.ready &= ~(1u << fiber.lane);
    warp.exited |= 1u << fiber.lane;
    if (--block_alive_[fiber.rank] == 0) check_peers_at_exit(fiber);
    if (--alive_ == 0) Context::go(fiber.context, scheduler_);
    suspend(fiber);
    __builtin_unreachable();
  }

  // Goes on with another thread: the next of this warp, else the first of another.
  void suspend(Fiber& fiber) {
    // A stack that is too small is noticed when the others' locals, which lie below, are overwritten, but before they are used.
    if (static_cast<uint8_t*>(__builtin_frame_address(0)) < stacks_.bottom(fiber.thread))
      fault(fiber, cudaErrorLaunchFailure, fiber.warp->arrived >> fiber.lane & 1 ? fiber.warp->line : fiber.line,
            "local variables take more than a thread's %zu KiB of stack", Stacks::STRIDE >> 10);
    const Warp* warp = fiber.warp;
    uint32_t ready = warp->ready & ~((2u << fiber.lane) - 1);
    if (!ready) ready = warp->ready;
    for (uint32_t w = 1; !ready && w < warps_count_; w++) {
      warp = &warps_[(fiber.warp->index + w) % warps_count_];
      ready = warp->ready;
    }
    if (!ready) report_deadlock();
    Fiber& next = warp->lanes[__builtin_ctz(ready)];
    resume(fiber.context, next);
  }

  [[noreturn]] void abandon(cudaError_t code, const char* text) {
    launch_.fault(code, text);
    faulted_ = true;
    Context::go(running_->context, scheduler_);
    __builtin_unreachable();
  }

  const char* barrier_of_all() const { return launch_.cluster > 1 ? "cluster" : "block"; }

  void describe(const Fiber& fiber, char* text, size_t bytes) const {
    if (fiber.warp->arrived >> fiber.lane & 1) {
      snprintf(text, bytes, "thread %u waits for its warp in %s of line %d", fiber.thread, fiber.warp->instruction->name,
               fiber.warp->line);
      return;
    }
    switch (fiber.state) {
      case State::READY: snprintf(text, bytes, "thread %u runs", fiber.thread); break;
      case State::EXITED: snprintf(text, bytes, "thread %u has exited", fiber.thread); break;
      case State::AT_BLOCK_BARRIER:
        snprintf(text, bytes, "thread %u waits at the %s barrier of line %d", fiber.thread, barrier_of_all(), fiber.line);
        break;
      case State::AT_NAMED_BARRIER: {
        const NamedBarrier& barrier = named_barriers_[fiber.awaited_named_barrier];
        snprintf(text, bytes, "thread %u waits at line %d for named barrier %u, which %u of %u threads have reached",
                 fiber.thread, fiber.line, fiber.awaited_named_barrier % NAMED_BARRIERS, barrier.arrived, barrier.expected);
        break;
      }
      case State::AT_MBARRIER: {
        const Mbarrier& mbarrier = mbarriers_[fiber.awaited_mbarrier];
        snprintf(text, bytes,
                 "thread %u waits at line %d for parity %u of the mbarrier at shared offset %u (phase %u misses %u of %u "
                 "arrivals and %d bytes)",
                 fiber.thread, fiber.line, fiber.awaited_parity, mbarrier.address - SHARED_BASE, mbarrier.phases,
                 mbarrier.pending, mbarrier.count, mbarrier.bytes);
        break;
      }
    }
  }

  // The first thread that is not in `state`, described; or the first one.
  void describe_other(State state, char* text, size_t bytes) const {
    const Fiber* other = fibers_;
    for (uint32_t t = 0; t < threads_; t++)
      if (fibers_[t].state != state) {
        other = &fibers_[t];
        break;
      }
    describe(*other, text, bytes);
  }

  [[noreturn]] void report_deadlock() {
    char who[200], text[480];
    const Warp* warp = nullptr;
    for (uint32_t w = 0; w < warps_count_ && !warp; w++)
      if (warps_[w].arrived) warp = &warps_[w];
    const char* at = "block (%u,%u,%u): deadlock: ";
    int used = snprintf(text, sizeof text, at, index_.x, index_.y, index_.z);
    if (warp) {
      describe(warp->lanes[__builtin_ctz(~warp->arrived)], who, sizeof who);
      snprintf(text + used, sizeof text - used, "%s of line %d is reached by lanes 0x%08x of warp %u only; %s",
               warp->instruction->name, warp->line, warp->arrived, warp->index, who);
    } else if (barrier_arrived_) {
      describe_other(State::AT_BLOCK_BARRIER, who, sizeof who);
      const Fiber* waiting = fibers_;
      while (waiting->state != State::AT_BLOCK_BARRIER) waiting++;
      snprintf(text + used, sizeof text - used, "the %s barrier of line %d is reached by %u of %u threads; %s",
               barrier_of_all(), waiting->line, barrier_arrived_, threads_, who);
    } else {
      describe_other(State::EXITED, who, sizeof who);
      snprintf(text + used, sizeof text - used, "%s", who);
    }
    abandon(cudaErrorLaunchTimeout, text);
  }

  // ---- order ----

  bool knows(const Fiber& fiber, uint32_t participant, uint32_t clock) const {
    return told_to_all_[participant] >= clock || participant == fiber.thread ||
           (fiber.known_epoch == epoch_ && fiber.known[participant] >= clock);
  }

  // Into what is known of each participant, what else is. Clocks stay far below 2^31, and signed ones compare faster.
  void join(uint32_t* known, const uint32_t* others) const { join(known, known, others); }

  void join(uint32_t* joined, const uint32_t* known, const uint32_t* others) const {
    for (uint32_t i = 0; i < participants_; i += 4) {
      const Clocks ours = *reinterpret_cast<const Clocks*>(known + i), theirs = *reinterpret_cast<const Clocks*>(others + i);
      *reinterpret_cast<Clocks*>(joined + i) = ours < theirs ? theirs : ours;
    }
  }

  // Brings a thread's own record up to the last block barrier.
  void catch_up(Fiber& fiber) {
    if (fiber.known_epoch == epoch_) return;
    memcpy(fiber.known, told_to_all_, participants_ * sizeof *told_to_all_);
    fiber.known_epoch = epoch_;
  }

  // Joins what a thread did and knows into `released`.
  void publish(const Fiber& fiber, uint32_t* released) {
    join(released, fiber.known_epoch == epoch_ ? fiber.known : told_to_all_);
    released[fiber.thread] = clocks_[fiber.thread]++;
  }

  void learn(Fiber& fiber, const uint32_t* completed) {
    join(fiber.known, fiber.known_epoch == epoch_ ? fiber.known : told_to_all_, completed);
    fiber.known_epoch = epoch_;
  }

  // Whether the asynchronous proxy, on behalf of that thread, sees what a thread wrote: it fenced it, and the reader knows.
  bool knows_proxy_fence(const Fiber& reader, const Word& word) const {
    const Fiber& writer = fibers_[word.writer];
    const uint32_t kept = min(writer.proxy_fence_count, KEPT_PROXY_FENCES);
    for (uint32_t age = 0; age < kept; age++) {
      const uint32_t fence = writer.proxy_fences[(writer.proxy_fence_count - 1 - age) % KEPT_PROXY_FENCES];
      if (fence < word.clock) return false;
      // Any of them does that the reader knows of.
      if (!launch_.race_check || knows(reader, word.writer, fence)) return true;
    }
    return kept == KEPT_PROXY_FENCES;  // perhaps an older one
  }

  // ---- shared memory ----

  // The offset of an address, which must be aligned and lie within a block's memory with all its bytes: that of the thread's
  // own block, unless the instruction reaches the whole cluster.
  uint32_t check_shared(const Fiber& fiber, uint32_t address, uint32_t bytes, uint32_t alignment, const char* what, int line,
                        Reach reach) {
    const uint32_t rank = (address - SHARED_BASE) / SHARED_WINDOW;
    if (reach == Reach::OWN_BLOCK || rank == fiber.rank || rank >= launch_.cluster)
      return check_shared(fiber, address, bytes, alignment, what, line);
    if (!block_alive_[rank])
      fault(fiber, cudaErrorIllegalAddress, line, "%s in the shared memory of block %u of the cluster, which has exited", what,
            rank);
    running_->reached_peers = clocks_[fiber.thread];
    return check_shared(fibers_[rank * launch_.threads], address, bytes, alignment, what, line);
  }

  uint32_t check_shared(const Fiber& fiber, uint32_t address, uint32_t bytes, uint32_t alignment, const char* what,
                        int line) {
    if (address % alignment)
      fault(fiber, cudaErrorMisalignedAddress, line, "%s at shared address 0x%x, which is not %u-byte aligned", what,
            address, alignment);
    const uint32_t window = fiber.rank * SHARED_WINDOW, offset = address - SHARED_BASE - window;
    if (address < SHARED_BASE + window || offset > launch_.shared_bytes || launch_.shared_bytes - offset < bytes)
      fault(fiber, cudaErrorIllegalAddress, line, "%s of %u bytes at shared offset %d of a block with %u bytes", what,
            bytes, static_cast<int>(offset), launch_.shared_bytes);
    return offset + window;
  }

  // Whether a thread may read what was written there, and when.
  bool may_read(const Fiber& fiber, const Word& word) const {
    if (word.writer >= participants_) return false;
    return (word.writer < threads_ && !launch_.race_check) || knows(fiber, word.writer, word.clock);
  }

  [[noreturn]] void fault_read(const Fiber& fiber, uint32_t i, const char* what, int line) {
    const Word& word = words_[i];
    if (word.writer < threads_)
      fault(fiber, cudaErrorLaunchFailure, line,
            "race: %s reads shared offset %u, which thread %u wrote at line %u with no barrier between", what, 4 * i,
            word.writer, word.line);
    if (word.writer == NEVER_WRITTEN)
      fault(fiber, cudaErrorLaunchFailure, line, "%s reads shared offset %u, which was never written", what, 4 * i);
    if (word.writer == HOLDS_MBARRIER)
      fault(fiber, cudaErrorLaunchFailure, line, "%s reads shared offset %u, which holds an mbarrier", what, 4 * i);
    fault(fiber, cudaErrorLaunchFailure, line,
          "%s reads shared offset %u, which a copy of line %u writes: this thread has not waited for its mbarrier at "
          "offset %u (phase %u)", what, 4 * i, word.line, mbarriers_[word.writer - threads_].address - SHARED_BASE,
          word.clock - 1);
  }

  // For the race check: those words are read by that thread now.
  void note_reads(const Fiber& fiber, uint32_t first, uint32_t end) {
    if (!launch_.race_check) return;
    uint32_t* reads = reads_ + fiber.warp->index * shared_words_;
    const uint32_t read = clocks_[fiber.thread] << 5 | fiber.lane, warp = 1u << fiber.warp->index;
    uint32_t i = first;
    for (; i % 4 == 0 && i + 4 <= end; i += 4) {
      *reinterpret_cast<Words*>(reader_warps_ + i) |= warp;
      *reinterpret_cast<Words*>(reads + i) = Words{read, read, read, read};
    }
    for (; i < end; i++) {
      reader_warps_[i] |= warp;
      reads[i] = read;
    }
  }

  // Before a write of those words: all earlier reads and writes of other threads must be known to the writer.
  void check_write_races(const Fiber& fiber, uint32_t first, uint32_t end, const char* what, int line) {
    Word known = {0, NEVER_WRITTEN, 0};
    uint32_t readers = 0;
    for (uint32_t i = first; i < end; i++) {
      readers |= reader_warps_[i];
      const Word word = words_[i];
      if (word == known || word.writer == NEVER_WRITTEN) continue;
      known = word;
      if (knows(fiber, word.writer, word.clock)) continue;
      const bool copy = word.writer >= threads_;
      fault(fiber, cudaErrorLaunchFailure, line,
            "race: %s writes shared offset %u, which %s %u wrote at line %u with no barrier between", what, 4 * i,
            copy ? "a copy of mbarrier" : "thread", copy ? word.writer - threads_ : word.writer, word.line);
    }
    for (; readers; readers &= readers - 1) {
      const uint32_t warp = static_cast<uint32_t>(__builtin_ctz(readers));
      const uint32_t* reads = reads_ + warp * shared_words_;
      uint32_t known_read = 0;  // clocks begin with 1
      for (uint32_t i = first; i < end; i++) {
        if (!(reader_warps_[i] >> warp & 1) || reads[i] == known_read) continue;
        known_read = reads[i];
        const uint32_t reader = warp * WARP_SIZE + known_read % WARP_SIZE;
        if (!knows(fiber, reader, known_read >> 5))
          fault(fiber, cudaErrorLaunchFailure, line,
                "race: %s writes shared offset %u, which thread %u read with no barrier between", what, 4 * i, reader);
      }
    }
    for (uint32_t i = first; i < end; i++) reader_warps_[i] = 0;
  }

  // ---- mbarriers ----

  void arrive(const Fiber& fiber, Mbarrier& mbarrier, int line) {
    if (!mbarrier.pending)
      fault(fiber, cudaErrorLaunchFailure, line,
            "more arrivals than the %u of the mbarrier at shared offset %u, whose phase %u still misses %d bytes",
            mbarrier.count, mbarrier.address - SHARED_BASE, mbarrier.phases, mbarrier.bytes);
    mbarrier.pending--;
    publish(fiber, mbarrier.released);
    complete_phase_if_due(mbarrier, line);
  }

  void count_bytes(Mbarrier& mbarrier, int64_t bytes, int line) {
    const int64_t total = mbarrier.bytes + bytes;
    if (total > MAX_TRANSACTION_BYTES || total < -MAX_TRANSACTION_BYTES)
      fault(*running_, cudaErrorLaunchFailure, line,
            "the mbarrier at shared offset %u would count %" PRId64 " bytes: 2^20 - 1 are the most",
            mbarrier.address - SHARED_BASE, total);
    mbarrier.bytes = static_cast<int32_t>(total);
  }

  void complete_phase_if_due(Mbarrier& mbarrier, int line) {
    if (mbarrier.pending) return;
    if (mbarrier.bytes < 0)
      fault(*running_, cudaErrorLaunchFailure, line,
            "%d bytes more than expected arrive at the mbarrier at shared offset %u in phase %u", -mbarrier.bytes,
            mbarrier.address - SHARED_BASE, mbarrier.phases);
    if (mbarrier.bytes) return;
    mbarrier.phases++;
    mbarrier.pending = mbarrier.count;
    memcpy(mbarrier.completed, mbarrier.released, participants_ * sizeof *mbarrier.released);
    const uint32_t index = static_cast<uint32_t>(&mbarrier - mbarriers_);
    for (uint32_t warps = mbarrier.waiting; warps; warps &= warps - 1) {
      Warp& warp = warps_[__builtin_ctz(warps)];
      for (uint32_t lane = 0; lane < warp.size; lane++) {
        Fiber& fiber = warp.lanes[lane];
        if (fiber.state != State::AT_MBARRIER || fiber.awaited_mbarrier != index) continue;
        fiber.state = State::READY;
        warp.ready |= 1u << lane;
      }
    }
    mbarrier.waiting = 0;
  }

  void check_mbarriers_at_exit() {
    for (uint32_t i = 0; i < mbarrier_count_; i++) {
      const Mbarrier& mbarrier = mbarriers_[i];
      char text[320];
      if (mbarrier.bytes)
        snprintf(text, sizeof text,
                 "block (%u,%u,%u) exits while the mbarrier at shared offset %u misses %d bytes in phase %u", index_.x,
                 index_.y, index_.z, mbarrier.address - SHARED_BASE, mbarrier.bytes, mbarrier.phases);
      else if (mbarrier.waited < mbarrier.copies)
        snprintf(text, sizeof text,
                 "block (%u,%u,%u) exits with a copy in flight: nobody waited for phase %u of the mbarrier at shared "
                 "offset %u",
                 index_.x, index_.y, index_.z, mbarrier.copies - 1, mbarrier.address - SHARED_BASE);
      else
        continue;
      launch_.fault(cudaErrorLaunchFailure, text);
      return;
    }
  }

  // A block that exits gives up its shared memory: what other blocks did with it must have come before.
  void check_peers_at_exit(const Fiber& last) {
    for (uint32_t t = 0; t < threads_; t++) {
      const Fiber& other = fibers_[t];
      if (other.rank != last.rank && other.reached_peers && !knows(last, t, other.reached_peers))
        fault(last, cudaErrorIllegalAddress, last.line,
              "the block exits with no barrier since thread %u of another block accessed its shared memory", t);
    }
  }

  void check_named_barriers_at_exit() {
    for (uint32_t i = 0; i < launch_.cluster * NAMED_BARRIERS; i++) {
      const NamedBarrier& barrier = named_barriers_[i];
      if (!barrier.arrived) continue;
      char text[320];
      snprintf(text, sizeof text, "block (%u,%u,%u) exits while named barrier %u of line %d has %u of %u threads", index_.x,
               index_.y, index_.z, i % NAMED_BARRIERS, barrier.line, barrier.arrived, barrier.expected);
      launch_.fault(cudaErrorLaunchFailure, text);
      return;
    }
  }

  void check_asynchronous_work_at_exit() {
    char text[320];
    for (uint32_t w = 0; w < warps_count_; w++)
      if (warps_[w].wgmma_count) {
        snprintf(text, sizeof text, "block (%u,%u,%u) exits with a wgmma of line %d in flight in warp %u", index_.x, index_.y,
                 index_.z, wgmma_operations_[w * MAX_WGMMA_OPERATIONS].line, w);
        return launch_.fault(cudaErrorLaunchFailure, text);
      }
    if (bulk_count_) {
      snprintf(text, sizeof text, "block (%u,%u,%u) exits with a bulk copy of line %d in flight in thread %u", index_.x,
               index_.y, index_.z, bulk_operations_[0].line, bulk_operations_[0].thread);
      launch_.fault(cudaErrorLaunchFailure, text);
    }
  }

  // ---- global memory ----

  [[noreturn]] void fault_global(uintptr_t begin, uint64_t bytes, bool write, const char* what, int line) {
    const Buffers& buffers = *launch_.buffers;
    const Buffer* nearest = nullptr;
    uint64_t nearest_distance = UINT64_MAX;
    for (int i = 0; i < buffers.count; i++) {
      const Buffer& buffer = buffers.entries[i];
      const uint64_t distance = begin < buffer.begin ? buffer.begin - begin : begin < buffer.end ? 0 : begin - buffer.end;
      if (distance >= nearest_distance) continue;
      nearest = &buffer;
      nearest_distance = distance;
    }
    const bool read_only = write && begin >= nearest->begin && begin + bytes <= nearest->end;
    fault(*running_, cudaErrorIllegalAddress, line,
          "%s of %u bytes at global address %p: %s (offset %" PRId64 " of the nearest, %s, which has %" PRIu64 " bytes)", what,
          static_cast<unsigned>(bytes), reinterpret_cast<void*>(begin),
          read_only ? "the buffer is not to be written" : "outside all buffers",
          static_cast<int64_t>(begin - nearest->begin), nearest->name,
          static_cast<uint64_t>(nearest->end - nearest->begin));
  }

  Launch& launch_;
  const int worker_;  // this OS thread's number
  const uint32_t threads_, warps_count_;
  const uint32_t participants_;  // whose work is ordered: threads, then mbarriers; in fours
  const size_t shared_words_;    // in fours
  Stacks stacks_;
  Context scheduler_;

  dim3 index_;
  bool faulted_;
  Fiber* running_;    // this OS thread's current_fiber,
  Fiber** current_;   // which is here: to look a thread's variable up takes a call
  uint32_t alive_, barrier_arrived_, mbarrier_count_;
  uint32_t block_alive_[MAX_CLUSTER];
  uint32_t bulk_count_;
  uint64_t operands_version_;  // of what the operation that reads its operands has read
  Word operand_word_;          // the last one of these, which it may read
  uint64_t operand_words_;     // repetitions of the one before
  uint64_t writes_ = 0;        // of shared memory
  uint32_t epoch_;  // block barriers passed, plus 1
  int last_buffer_ = 0;
  uint64_t releases_seen_ = 0;
  uint32_t fruitless_polls_ = 0;

  Warp warps_[MAX_WARPS];
  Mbarrier mbarriers_[MAX_CLUSTER * MAX_MBARRIERS];
  BulkOperation bulk_operations_[MAX_BULK_OPERATIONS];
  NamedBarrier named_barriers_[MAX_CLUSTER * NAMED_BARRIERS];
  Fiber* const fibers_;
  uint32_t* const known_;            // (threads, participants)
  uint32_t* const told_to_all_;      // (participants): what the last block barrier told everybody
  uint32_t* const clocks_;           // (threads)
  uint32_t* const mbarrier_clocks_;  // (mbarriers, 2, participants)
  uint32_t* const named_barrier_clocks_;  // (named barriers, 2, participants)
  WgmmaOperation* const wgmma_operations_;  // (warps, MAX_WGMMA_OPERATIONS)
  MmaOperation* const mma_operations_;      // (warps, MAX_MMA_OPERATIONS)
  uint8_t* const shared_;
  Word* const words_;
  // Reads since the last write of a word, for the race check: the warps, and for each of them clock << 5 | lane.
  uint32_t* const reader_warps_;  // (words)
  uint32_t* const reads_;         // (warps, words)
};

}  // namespace bwdtune_host
