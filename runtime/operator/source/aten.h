// PyTorch's own attention backward operators: our kernels stand before the ones that PyTorch registers, and what they do not
// take goes on to those.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <map>
#include <string_view>

#include "launch.h"

namespace bwdtune {

// Set while PyTorch's backward is asked for on purpose: it must not come back to us.
inline bool& pytorch_only() {
  thread_local bool value = false;
  return value;
}

class PytorchOnly {
 public:
  PytorchOnly() : before_(pytorch_only()) { pytorch_only() = true; }
  ~PytorchOnly() { pytorch_only() = before_; }
  PytorchOnly(const PytorchOnly&) = delete;

 private:
  const bool before_;
};

// The dispatcher's entry of an operator is private. A template argument may name a private member, which is how the kernel
// that is registered for a dispatch key is got at: PyTorch has a public way to it (`getComputedKernelForDispatchKey`) only
// since 2.10.
template <class Tag, auto member>
struct Reach {
  friend auto reach(Tag) { return member; }
};
struct OperatorDef {
  friend auto reach(OperatorDef);
};
template struct Reach<OperatorDef, &c10::OperatorHandle::operatorDef_>;

inline c10::KernelFunction registered_kernel(const c10::OperatorHandle& op, c10::DispatchKey key) {
  return (op.*reach(OperatorDef{}))->op.kernelForDispatchKey(key);
}

// How an operator's mask and tensors are to be read: `runtime.operator.aten.AtenBackward`.
struct AtenBackward {
  Format format;
  GradientLayout layout;
  bool bottom_right;  // where the diagonal of `is_causal` lies
  bool packs;         // `cum_seq_q` makes it one of packed sequences, else of a nested tensor
};

// Where an operator's arguments stand on the stack. Found by name: their order differs between operators.
class Arguments {
 public:
  explicit Arguments(const c10::FunctionSchema& schema) : count_(static_cast<int>(schema.arguments().size())) {
    const auto at = [&](std::string_view name) {
      for (int i = 0; i < count_; i++)
        if (schema.arguments()[i].name() == name) return i;
      return -1;
    };
    dout = at("grad_out") >= 0 ? at("grad_out") : at("grad_out_");
    q = at("query"), k = at("key"), v = at("value"), out = at("out"), lse = at("logsumexp");
    dropout = at("dropout_p"), causal = at("is_causal"), scale = at("scale");
    bias = at("attn_bias") >= 0 ? at("attn_bias") : at("attn_mask");
    wanted = at("grad_input_mask");
    cum_seq_q = at("cum_seq_q"), cum_seq_k = at("cum_seq_k"), max_q = at("max_q"), max_k = at("max_k");
    left = at("window_size_left"), right = at("window_size_right");
    for (const int needed : {dout, q, k, v, out, lse, dropout, causal, scale})
      TORCH_CHECK(needed >= 0, "this PyTorch's ", schema, " has other arguments than bwdtune knows");
  }

  const c10::IValue& of(const torch::jit::Stack& stack, int index) const { return stack[stack.size() - count_ + index]; }

  bool defined(const torch::jit::Stack& stack, int index) const {
    return index >= 0 && of(stack, index).isTensor() && of(stack, index).toTensor().defined();
  }

  int64_t limit(const torch::jit::Stack& stack, int index, int64_t keys) const {
    if (index < 0 || of(stack, index).isNone()) return kUnlimited;
    const int64_t limit = of(stack, index).toInt();
    return limit < 0 || limit >= keys ? kUnlimited : limit;  // as PyTorch's own forward reads it
  }

  int count() const { return count_; }

  int dout, q, k, v, out, lse, dropout, causal, scale, bias, wanted, cum_seq_q, cum_seq_k, max_q, max_k, left, right;

 private:
  int count_;
};

class Override : public c10::OperatorKernel {
 public:
  Override(const c10::OperatorHandle& op, c10::DispatchKey key, AtenBackward how)
      : original_(registered_kernel(op, key)), arguments_(op.schema()), results_(op.schema().returns().size()), how_(how) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    std::optional<Found> found;
    if (!pytorch_only() && state().enabled.load(std::memory_order_relaxed)) found = ours(*stack);
    if (!found) {
      const PytorchOnly pytorch;  // which makes one of these operators of another one
      original_.callBoxed(op, keys, stack);
      return;
    }
    torch::jit::drop(*stack, arguments_.count());
    auto& [dq, dk, dv, dbias] = *found;
    torch::jit::push(*stack, std::move(dq), std::move(dk), std::move(dv));
    for (size_t i = 3; i < results_; i++) torch::jit::push(*stack, std::move(dbias));
  }

 private:
  std::optional<Found> ours(const torch::jit::Stack& stack) const noexcept {
    const auto because = [](Reason reason) {
      state().pytorch_because(reason);
      return std::nullopt;
    };
    try {
      const Arguments& at = arguments_;
      const auto tensor = [&](int index) -> const Tensor& { return at.of(stack, index).toTensor(); };
      if (!at.defined(stack, at.dout)) return because(kUndefinedGradient);
      if (at.of(stack, at.dropout).toDouble() != 0) return because(kDropout);
      const bool biased = at.defined(stack, at.bias);
      if (biased && (how_.format != Format::kBHSD || tensor(at.bias).scalar_type() == at::kBool)) return because(kMask);
      const bool varlen = at.defined(stack, at.cum_seq_q);
      if (varlen && !(how_.packs && at.defined(stack, at.cum_seq_k))) return because(kNested);
      Call call{tensor(at.dout), tensor(at.q), tensor(at.k), tensor(at.v), tensor(at.out), tensor(at.lse)};
      if (call.q.dim() < 3) return because(kDimensions);
      call.format = varlen ? Format::kTHD : how_.format;
      call.layout = how_.layout;
      call.causal = at.of(stack, at.causal).toBool();
      const auto& scale = at.of(stack, at.scale);
      call.scale = scale.isNone() ? 1 / std::sqrt(static_cast<double>(call.q.size(-1))) : scale.toDouble();
      call.bottom_right = how_.bottom_right;
      call.deterministic = deterministic(std::nullopt);
      if (varlen) {
        call.cu_seqlens_q = tensor(at.cum_seq_q);
        call.cu_seqlens_kv = tensor(at.cum_seq_k);
        call.max_seqlen_q = at.of(stack, at.max_q).toInt();
        call.max_seqlen_kv = at.of(stack, at.max_k).toInt();
      }
      if (at.left >= 0) {
        const int64_t keys = varlen ? call.max_seqlen_kv : call.k.size(axes(call.format).seqlen);
        call.left = at.limit(stack, at.left, keys);
        call.right = at.limit(stack, at.right, keys);
      }
      if (!biased) return compute(call);
      const Tensor& bias = tensor(at.bias);
      call.bias_grad = at.wanted >= 0 && at.of(stack, at.wanted).toBoolList().get(3);
      call.bias = call.bias_grad ? bias : without_copies(bias);
      auto found = compute(call);
      if (found && call.bias_grad) found->dbias = with_aligned_rows(found->dbias);
      return found;
    } catch (const std::exception& error) {
      state().pytorch_after("an error within bwdtune: ", error.what());
      return std::nullopt;
    }
  }

  // A bias of four dimensions, of which those that were expanded are one element. Its gradient would be that of all of them.
  static Tensor without_copies(Tensor bias) {
    while (bias.dim() < 4) bias = bias.unsqueeze(0);
    for (int64_t dim = 0; dim + 1 < bias.dim(); dim++)
      if (bias.stride(dim) == 0 && bias.size(dim) > 1) bias = bias.narrow(dim, 0, 1);
    return bias;
  }

  // The strides that PyTorch's meta function promises for the gradient of a bias: rows of a multiple of 16.
  static Tensor with_aligned_rows(const Tensor& gradient) {
    constexpr int64_t kAlignment = 16;
    const int64_t keys = gradient.size(3), aligned = (keys + kAlignment - 1) / kAlignment * kAlignment;
    if (keys == aligned) return gradient;
    auto sizes = gradient.sizes().vec();
    sizes[3] = aligned;
    Tensor promised = at::empty(sizes, gradient.options()).narrow(3, 0, keys);
    promised.copy_(gradient);
    return promised;
  }

  const c10::KernelFunction original_;
  const Arguments arguments_;
  const size_t results_;
  const AtenBackward how_;
};

// Hands the dispatcher's word on an overridden kernel to nobody, and every other warning to who would have got it.
class QuietOverride : public c10::WarningHandler {
 public:
  QuietOverride() : before_(c10::WarningUtils::get_warning_handler()), always_(c10::WarningUtils::get_warnAlways()) {
    c10::WarningUtils::set_warning_handler(this);
    c10::WarningUtils::set_warnAlways(true);  // a warning that is given once would be spent here
  }
  ~QuietOverride() override {
    c10::WarningUtils::set_warnAlways(always_);
    c10::WarningUtils::set_warning_handler(before_);
  }
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("verriding a previously registered kernel") == std::string::npos) before_->process(warning);
  }

 private:
  c10::WarningHandler* const before_;
  const bool always_;
};

// Puts ours before PyTorch's, once in a process. It stays there: taking it away while other threads dispatch is not safe, and
// what `disable` asks for is a flag.
// False where this PyTorch has no such kernel.
inline bool install(const char* name, const char* dispatch_key, const AtenBackward& how) {
  static std::mutex mutex;
  static auto* const installed = new std::map<std::string, std::unique_ptr<torch::Library>>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& library = (*installed)[std::string(name) + " " + dispatch_key];
  if (library) return true;
  const c10::DispatchKey key = c10::parseDispatchKey(dispatch_key);
  const auto found = c10::Dispatcher::singleton().findSchema({std::string("aten::") + name, ""});
  if (!found || !found->hasKernelForDispatchKey(key)) return false;
  auto made = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  auto kernel = std::make_unique<Override>(*found, key, how);
  const QuietOverride quiet;
  made->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  library = std::move(made);
  return true;
}

}  // namespace bwdtune
