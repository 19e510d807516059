// Which kernel computes a problem, and what was counted of it. Python decides (`resolve`); what it decided is looked up here
// without Python and without a lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "interface.h"

namespace bwdtune {

// One attention backward, as `gen.problem.Problem` has it. All members are 64 bits wide: there is no padding, so that two
// problems are equal where their bytes are. `native._Problem` repeats the struct.
struct Problem {
  int64_t device;  // CUDA's ordinal; -1 on the CPU
  int64_t fp16;    // else bf16
  int64_t batch;
  int64_t heads_q;
  int64_t heads_kv;
  int64_t seqlen_q;
  int64_t seqlen_kv;
  int64_t head_dim;
  int64_t causal;
  int64_t window_left;  // -1: no limit
  int64_t window_right;
  int64_t bottom_right;
  int64_t softcap;
  int64_t varlen;
  int64_t deterministic;
  int64_t lse_grad;
  int64_t sink;
  int64_t alibi;
  int64_t bias_grad;
  int64_t bias;  // 0 for none, else 8 and what it is not broadcast over: 4 batches, 2 heads, 1 queries
  int64_t bias_dtype;  // 0 for bf16 or none, 1 for fp16, 2 for fp32
  int64_t value_head_dim;  // of v and the output, where they have another than q and k, else 0

  bool operator==(const Problem& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }

  size_t hash() const {
    uint64_t words[sizeof(Problem) / 8], mixed = 0;
    std::memcpy(words, this, sizeof words);
    for (const uint64_t word : words) mixed = (mixed ^ word) * 0x9e3779b97f4a7c15u, mixed ^= mixed >> 32;
    return mixed;
  }
};

// Why a call was PyTorch's. The first ones are found here, Python adds what it decides for.
enum Reason : int32_t {
  kNone = -1,
  kUndefinedGradient,
  kDropout,
  kMask,
  kNested,
  kDimensions,
  kShapes,
  kHeadDim,
  kDtype,
  kDevices,
  kScale,
  kEmpty,
  kLogSumExp,
  kBias,
  kOutOfMemory,
  kUndecided,
  kTooManyReasons,
  kFirstOfPython,
};

constexpr std::array<const char*, kFirstOfPython> kReasons = {
    "no gradient flows into the output",
    "dropout is asked for",
    "a mask tensor is given",
    "the sequences are those of a nested tensor",
    "the tensors are not four-dimensional (three with packed sequences)",
    "the shapes of q, k, v, the output and its gradient do not belong to one attention",
    "head_dim is not a multiple of 8",
    "the dtypes are not all bfloat16 or all float16",
    "the tensors are on several devices",
    "the scale is not positive",
    "the input is empty",
    "the log-sum-exp has a shape or dtype that kernels do not take",
    "the bias does not go with the scores, has another dtype than kernels take or goes with packed sequences",
    "memory for the gradients or the workspace is short",
    "nothing decides which kernel to use",
    "other reasons",
};

// The C interface of a loaded library (templates/interface.h). Libraries are never unloaded.
struct Kernel {
  int (*backward)(const bwdtune_arguments*);
  int64_t (*workspace_bytes)(const bwdtune_arguments*);
  const char* (*error_text)(int);
  // Of kernels of the host target: the memory that the next launch may access. Null for all others.
  void (*host_register)(const char* name, void* data, int64_t bytes, int writable);
  void (*host_clear)();
  bool writes_all_rows;  // also those that belong to no packed sequence
  std::atomic<int64_t> launches{0};
  std::atomic<int32_t> failure{kNone};  // the reason's number, where a launch has failed: it is not tried again
};

struct Decision {
  Kernel* kernel = nullptr;  // null: PyTorch's
  int32_t reason = kUndecided;
};

using Resolve = void (*)(const Problem*, Decision*);
using Failed = void (*)(const Kernel*, const char* reason);
using Log = void (*)(const char* message);

class Reasons {
 public:
  static constexpr size_t kLimit = 1024;

  Reasons() {
    for (const char* text : kReasons) entries_.emplace_back(text);
  }

  // The number of a reason; one that is new and past the limit goes by the name of others.
  int32_t number(const std::string& text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < entries_.size(); i++)
      if (entries_[i].text == text) return static_cast<int32_t>(i);
    if (entries_.size() >= kLimit) return kTooManyReasons;
    entries_.emplace_back(text);
    return static_cast<int32_t>(entries_.size() - 1);
  }

  // How often it was met before.
  int64_t count(int32_t number) { return entry(number).count.fetch_add(1, std::memory_order_relaxed); }
  int64_t counted(int32_t number) { return entry(number).count.load(std::memory_order_relaxed); }
  const char* text(int32_t number) { return entry(number).text.c_str(); }

  int32_t size() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int32_t>(entries_.size());
  }

 private:
  struct Entry {
    explicit Entry(std::string words) : text(std::move(words)) {}
    const std::string text;
    std::atomic<int64_t> count{0};
  };

  Entry& entry(int32_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return entries_[number];
  }

  std::mutex mutex_;
  std::deque<Entry> entries_;  // whose elements stay where they are
};

class Table {
 public:
  // Each thread remembers what it met lately; a change of the epoch makes all of them forget. The table that they share
  // is asked next, under a lock, and Python last.
  Decision find(const Problem& problem) {
    thread_local std::unique_ptr<Lately[]> remembered(new Lately[kRemembered]);
    const size_t hash = problem.hash();
    Lately& place = remembered[hash % kRemembered];
    const uint64_t epoch = epoch_.load(std::memory_order_acquire);
    if (place.epoch == epoch && place.problem == problem) return place.decision;
    Decision decision;
    if (!shared(problem, epoch, decision)) {
      const Resolve resolve = resolve_.load(std::memory_order_acquire);
      if (!resolve) return decision;
      resolve(&problem, &decision);
      if (!share(problem, epoch, decision)) return decision;
    }
    place = {epoch, problem, decision};
    return decision;
  }

  void forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    decisions_.clear();
    epoch_.fetch_add(1, std::memory_order_acq_rel);
  }

  void ask(Resolve resolve) { resolve_.store(resolve, std::memory_order_release); }

 private:
  static constexpr size_t kRemembered = 256;  // problems of a thread
  static constexpr size_t kShared = 16384;

  struct Lately {
    uint64_t epoch = 0;
    Problem problem;
    Decision decision;
  };

  struct Hash {
    size_t operator()(const Problem& problem) const { return problem.hash(); }
  };

  bool shared(const Problem& problem, uint64_t epoch, Decision& decision) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = decisions_.find(problem);
    if (found == decisions_.end() || epoch != epoch_.load(std::memory_order_relaxed)) return false;
    decision = found->second;
    return true;
  }

  // False where all was forgotten while Python decided: what it said may be of before.
  bool share(const Problem& problem, uint64_t epoch, const Decision& decision) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (epoch != epoch_.load(std::memory_order_relaxed)) return false;
    if (decisions_.size() >= kShared) decisions_.clear();
    decisions_[problem] = decision;
    return true;
  }

  std::mutex mutex_;
  std::atomic<uint64_t> epoch_{1};
  std::atomic<Resolve> resolve_{nullptr};
  std::unordered_map<Problem, Decision, Hash> decisions_;
};

// What lives as long as the process, also while threads of it still run at its end.
struct State {
  Table table;
  Reasons reasons;
  std::atomic<bool> enabled{false};
  std::atomic<Failed> failed{nullptr};
  std::atomic<Log> log{nullptr};
  std::atomic<int (*)(int32_t device, void** stream)> current_stream{nullptr};

  void say(const std::string& message) {
    if (const Log to = log.load(std::memory_order_acquire)) to(message.c_str());
  }

  // Counts one. Python tells of its own reasons when it gives them.
  void pytorch_because(int32_t reason) {
    if (reasons.count(reason) == 0 && reason < kFirstOfPython) say(kReasons[reason]);
  }

  // The same where something went wrong; the number of the reason. What is said has one line.
  int32_t pytorch_after(const char* what, std::string why) {
    const int32_t reason = reasons.number(what + why.substr(0, why.find('\n')));
    if (reasons.count(reason) == 0) say(reasons.text(reason));
    return reason;
  }
};

inline State& state() {
  static State* const instance = new State;
  return *instance;
}

}  // namespace bwdtune
