// Threads of a block as fibers: a stack each, and a switch that keeps the callee-saved registers. No signals, no locks, no
// system call at a switch: a tile of a backward switches some 100,000 times.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#if !(defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__)))
#include <ucontext.h>
#endif

#if defined(__linux__) && defined(__x86_64__)
extern "C" __attribute__((visibility("hidden"))) void bwdtune_host_switch(void** from, void* to);
asm(R"(
  .pushsection .text
  .p2align 4
  .type bwdtune_host_switch, @function
bwdtune_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size bwdtune_host_switch, . - bwdtune_host_switch
  .popsection
)");
#elif defined(__linux__) && defined(__aarch64__)
extern "C" __attribute__((visibility("hidden"))) void bwdtune_host_switch(void** from, void* to);
asm(R"(
  .pushsection .text
  .p2align 4
  .type bwdtune_host_switch, %function
bwdtune_host_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size bwdtune_host_switch, . - bwdtune_host_switch
  .popsection
)");
#endif

namespace bwdtune_host __attribute__((visibility("hidden"))) {

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))

// A point to go on from: its stack pointer, with the saved registers above it.
class Context {
 public:
  // Makes this a first entry of `entry`, which must not return, on the stack that ends at `top` (16-byte aligned).
  void prepare(uint8_t*, uint8_t* top, void (*entry)()) {
    void** slots = reinterpret_cast<void**>(top);
#if defined(__x86_64__)
    // From the top down: a return address that is never used (it aligns the entry as a call does), the entry, six registers.
    constexpr int USED = 8, ENTRY = 6;
#else
    constexpr int USED = 20, ENTRY = 11;  // x30, where `ret` goes to
#endif
    for (int i = 0; i < USED; i++) slots[i - USED] = nullptr;
    slots[ENTRY - USED] = reinterpret_cast<void*>(entry);
    stack_pointer_ = slots - USED;
  }

  static void go(Context& from, Context& to) { bwdtune_host_switch(&from.stack_pointer_, to.stack_pointer_); }

 private:
  void* stack_pointer_;
};

#else

// Elsewhere the C library's, which are slower: each switch saves the signal mask too.
class Context {
 public:
  void prepare(uint8_t* bottom, uint8_t* top, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = bottom;
    context_.uc_stack.ss_size = static_cast<size_t>(top - bottom);
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }

  static void go(Context& from, Context& to) { swapcontext(&from.context_, &to.context_); }

 private:
  ucontext_t context_;
};

#endif

// Stacks for `count` fibers; pages are only taken where they are touched. Below the lowest is room without access. To guard each
// stack so would take a launch longer than most of what it runs: see Block::suspend.
class Stacks {
 public:
  static constexpr size_t STRIDE = size_t{256} << 10;

  explicit Stacks(uint32_t count) : bytes_((count + 1) * STRIDE) {
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED)
      base_ = nullptr;
    else
      mprotect(base_, STRIDE, PROT_NONE);
  }
  ~Stacks() {
    if (base_) munmap(base_, bytes_);
  }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;

  bool allocated() const { return base_ != nullptr; }
  uint8_t* bottom(uint32_t i) const { return base_ + (i + 1) * STRIDE; }
  // Staggered: stacks that all end at one offset of a page would compete for the same few cache sets.
  uint8_t* top(uint32_t i) const { return bottom(i) + STRIDE - i * STAGGER % PAGE; }

 private:
  static constexpr size_t PAGE = 4096, STAGGER = 13 * 64;
  size_t bytes_;
  uint8_t* base_;
};

}  // namespace bwdtune_host
