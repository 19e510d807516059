// What PyTorch and Python see: the operators' implementations, and a C interface for `runtime.operator.native`, which needs
// neither Python's headers nor pybind11. The operators' schemas are `runtime.operator.schemas`.
#include "attention.h"

namespace {

TORCH_LIBRARY_IMPL(bwdtune, CUDA, m) {
  m.impl("backward", bwdtune::backward);
  m.impl("backward_varlen", bwdtune::backward_varlen);
}

// For tests without a GPU, and for what is asked of PyTorch's own kernels there.
TORCH_LIBRARY_IMPL(bwdtune, CPU, m) {
  m.impl("backward", bwdtune::backward);
  m.impl("backward_varlen", bwdtune::backward_varlen);
}

// These call other operators only, which have fake implementations.
TORCH_LIBRARY_IMPL(bwdtune, CompositeExplicitAutograd, m) {
  m.impl("attention", bwdtune::attention);
  m.impl("attention_varlen", bwdtune::attention_varlen);
}

TORCH_LIBRARY_IMPL(bwdtune, Autograd, m) {
  m.impl("attention", bwdtune::attention_autograd);
  m.impl("attention_varlen", bwdtune::attention_varlen_autograd);
  m.impl("backward", bwdtune::backward_autograd);
  m.impl("backward_varlen", bwdtune::backward_varlen_autograd);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Sets what is called back: to decide for a kernel, to hear of one that failed, to say a line; and PyTorch's way to its current
// stream.
EXPORT void bwdtune_operator_connect(
    bwdtune::Resolve resolve, bwdtune::Failed failed, bwdtune::Log log, int (*current_stream)(int32_t, void**)) {
  bwdtune::state().table.ask(resolve);
  bwdtune::state().failed.store(failed, std::memory_order_release);
  bwdtune::state().log.store(log, std::memory_order_release);
  bwdtune::state().current_stream.store(current_stream, std::memory_order_release);
}

// A kernel from what its library says of itself and its functions; never freed. The last two may be null.
EXPORT void* bwdtune_operator_add_kernel(
    int writes_all_rows, void* backward, void* workspace_bytes, void* error_text, void* host_register, void* host_clear) {
  auto* const kernel = new bwdtune::Kernel;
  kernel->writes_all_rows = writes_all_rows != 0;
  kernel->backward = reinterpret_cast<decltype(kernel->backward)>(backward);
  kernel->workspace_bytes = reinterpret_cast<decltype(kernel->workspace_bytes)>(workspace_bytes);
  kernel->error_text = reinterpret_cast<decltype(kernel->error_text)>(error_text);
  kernel->host_register = reinterpret_cast<decltype(kernel->host_register)>(host_register);
  kernel->host_clear = reinterpret_cast<decltype(kernel->host_clear)>(host_clear);
  return kernel;
}

EXPORT int64_t bwdtune_operator_launches(const void* kernel) {
  return static_cast<const bwdtune::Kernel*>(kernel)->launches.load(std::memory_order_relaxed);
}

// The number by which a decision names its reason.
EXPORT int32_t bwdtune_operator_reason(const char* text) { return bwdtune::state().reasons.number(text); }
EXPORT int32_t bwdtune_operator_reasons() { return bwdtune::state().reasons.size(); }
EXPORT const char* bwdtune_operator_reason_text(int32_t number) { return bwdtune::state().reasons.text(number); }
EXPORT int64_t bwdtune_operator_fallbacks(int32_t number) { return bwdtune::state().reasons.counted(number); }

// Has all problems decided anew.
EXPORT void bwdtune_operator_forget() { bwdtune::state().table.forget(); }

EXPORT void bwdtune_operator_enable(int enabled) { bwdtune::state().enabled.store(enabled != 0, std::memory_order_release); }

// Puts ours before the implementation of an operator of aten. 0, or 1 where this PyTorch does not have it; -1 with a line to
// the log.
EXPORT int bwdtune_operator_install(
    const char* name, const char* dispatch_key, int heads_inside, int inside_gradients, int bottom_right, int packs) {
  try {
    const bwdtune::AtenBackward how{
        heads_inside ? bwdtune::Format::kBSHD : bwdtune::Format::kBHSD,
        inside_gradients ? bwdtune::GradientLayout::kBSHD : bwdtune::GradientLayout::kAsInput, bottom_right != 0, packs != 0};
    return bwdtune::install(name, dispatch_key, how) ? 0 : 1;
  } catch (const std::exception& error) {
    bwdtune::state().say(std::string("aten::") + name + " stays PyTorch's: " + error.what());
    return -1;
  }
}
