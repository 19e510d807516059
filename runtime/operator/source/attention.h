// `bwdtune::attention` and `bwdtune::attention_varlen`: one of PyTorch's forwards, with `bwdtune::backward` as its backward.
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "aten.h"

namespace bwdtune {

using c10::SymInt;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Forwarded = std::tuple<Tensor, Tensor>;
// dq, dk, dv, dsink and dbias: the last two undefined where there are no sinks, or no gradient of a bias is wanted.
using AllGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using GradientsOfBias = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using GradientsVarlen = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // without a bias, which packed sequences do not have
using MaybeBool = std::optional<bool>;
using MaybeDouble = std::optional<double>;

template <class Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
}

// What an attention is besides its tensors: the arguments that all of our operators share.
struct Mask {
  bool causal;
  double scale;
  int64_t left, right;
  bool bottom_right;
  double softcap;
};

// What is added to the scores: `Call`.
struct Biases {
  MaybeTensor bias, alibi_slopes;
  bool bias_grad = false;
};

struct Packed {
  Tensor cu_seqlens_q, cu_seqlens_kv;
  SymInt max_seqlen_q, max_seqlen_kv;
};
using MaybePacked = std::optional<Packed>;

// ---------------------------------------------------------------------------------------------------------------------------
// PyTorch's forwards, each with its backward

// A window that is aligned top-left, as one that is aligned bottom-right: of fewer keys. Those past the last query's window are
// not seen; without them the two alignments differ by a shift of the limits that leaves none of them negative.
struct Window {
  SymInt keys, left, right;

  Window(const Mask& mask, const SymInt& seqlen_q, const SymInt& seqlen_kv)
      : keys(seqlen_kv), left(mask.left), right(mask.causal ? 0 : mask.right) {
    if (mask.bottom_right) return;
    const bool bounded = right != kUnlimited;
    if (bounded) keys = seqlen_kv.min(seqlen_q + right);
    const SymInt diagonal = keys - seqlen_q;
    if (mask.left != kUnlimited) left = left + diagonal;
    if (bounded) right = right - diagonal;
  }
};

inline Tensor or_none(const MaybeTensor& tensor) { return tensor.value_or(Tensor()); }

inline Tensor bshd(const Tensor& tensor) { return tensor.transpose(1, 2); }

inline Tensor expand_heads(const Tensor& q, const Tensor& tensor) {
  const SymInt group = q.sym_size(1) / tensor.sym_size(1);
  return group == 1 ? tensor : tensor.repeat_interleave_symint(group, 1);
}

inline Tensor sum_heads(const Tensor& gradient, const Tensor& tensor) {
  const SymInt heads = tensor.sym_size(1);
  if (gradient.sym_size(1) == heads) return gradient;
  return gradient
      .reshape_symint({gradient.sym_size(0), heads, gradient.sym_size(1) / heads, gradient.sym_size(2), gradient.sym_size(3)})
      .sum(2);
}

inline Tensor padded(const Tensor& gradient, const SymInt& rows) {
  const SymInt missing = rows - gradient.sym_size(2);
  return missing == 0 ? gradient : at::constant_pad_nd_symint(gradient, {0, 0, 0, missing}, 0);
}

// What makes `runtime.torch_attention.efficient_bias`
inline bool plainly_causal(const Mask& mask, const Tensor& q, const Tensor& k) {
  const bool causal = mask.left == kUnlimited && (mask.causal || mask.right == 0);
  return causal && (!mask.bottom_right || q.sym_size(2) == k.sym_size(2));
}

// (Sq, Skv), true where a query does not see a key; undefined where all see all.
inline Tensor unseen(const Mask& mask, const Tensor& q, const Tensor& k) {
  const SymInt rows = q.sym_size(2), keys = k.sym_size(2), diagonal = mask.bottom_right ? keys - rows : SymInt(0);
  const int64_t right = mask.causal ? 0 : mask.right;
  if (mask.left == kUnlimited && right == kUnlimited) return {};
  const auto options = q.options().dtype(at::kLong);
  const Tensor places = at::arange(keys, options).sub(at::arange(rows, options).unsqueeze(1));
  Tensor found;
  if (mask.left != kUnlimited) found = places.lt(diagonal - mask.left);
  if (right == kUnlimited) return found;
  const Tensor past = places.gt(diagonal + right);
  return found.defined() ? found.logical_or(past) : past;
}

inline Tensor masked_bias(const Tensor& bias, const Mask& mask, const Tensor& q, const Tensor& k) {
  const Tensor hidden = plainly_causal(mask, q, k) ? Tensor() : unseen(mask, q, k);
  return hidden.defined() ? bias.masked_fill(hidden, -kInfinity) : bias;
}

inline Tensor expanded_bias(Tensor bias, const Tensor& q) {
  constexpr int64_t kPadding = 16;
  const int64_t vector = 16 / static_cast<int64_t>(bias.element_size());
  const SymInt keys = bias.sym_size(3);
  bool aligned = bias.sym_stride(3) == 1 && bias.sym_storage_offset() % vector == 0;
  for (int dim = 0; dim < 3; dim++) aligned = aligned && (bias.sym_size(dim) == 1 || bias.sym_stride(dim) % vector == 0);
  if (!aligned) {
    const SymInt missing = (kPadding - keys % kPadding) % kPadding;
    bias = at::constant_pad_nd_symint(bias, {0, missing}, 0).contiguous().narrow_symint(3, 0, keys);
  }
  return bias.expand_symint({q.sym_size(0), q.sym_size(1), q.sym_size(2), keys});
}

// `runtime.torch_attention._sees_nothing`
inline Tensor sees_nothing(const Tensor& bias, const Tensor& q, bool causal) {
  if (!causal) return bias.amax(-1).eq(-kInfinity);
  const auto [sees, first] = bias.ne(-kInfinity).to(at::kByte).max(-1);
  return sees.eq(0).logical_or(first.gt(at::arange(q.sym_size(2), q.options().dtype(at::kLong))));
}

struct Forward {
  Tensor out, lse;
  MaybeTensor seed, offset;  // what PyTorch's backward needs besides
};

// Zeros for columns that other tensors have more of: `runtime.torch_attention._of_one_head_dim`.
inline Tensor with_columns(const Tensor& tensor, const SymInt& columns) {
  const SymInt missing = columns - tensor.sym_size(-1);
  return missing == 0 ? tensor : at::constant_pad_nd_symint(tensor, {0, missing}, 0);
}

inline Tensor columns_of(const Tensor& wide, const Tensor& like) { return wide.narrow_symint(-1, 0, like.sym_size(-1)); }

inline SymInt most_columns(const Tensor& q, const Tensor& v) { return q.sym_size(-1).max(v.sym_size(-1)); }

// Whether a forward has to be given more columns: it takes one head_dim, and v has another than q and k.
inline bool needs_columns(const Tensor& q, const Tensor& v, c10::string_view which) {
  return (which == "flash" || which == "flash_window" || which == "cpu") && q.sym_size(-1) != v.sym_size(-1);
}

// A forward of q, k and v, `run`, which is given them with as many columns each.
template <class Run>
Forward with_one_head_dim(const Tensor& q, const Tensor& k, const Tensor& v, const Run& run) {
  const SymInt most = most_columns(q, v);
  Forward wide = run(with_columns(q, most), with_columns(k, most), with_columns(v, most));
  wide.out = columns_of(wide.out, v);
  return wide;
}

// The same for a backward of dout, q, k, v and out.
template <class Run>
Found with_one_head_dim(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Run& run) {
  const SymInt most = most_columns(q, v);
  const auto wide = [&](const Tensor& tensor) { return with_columns(tensor, most); };
  const Found found = run(wide(dout), wide(q), wide(k), wide(v), wide(out));
  return Gradients{columns_of(found.dq, q), columns_of(found.dk, k), columns_of(found.dv, v)};
}

inline Forward forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask, c10::string_view which, const Biases& biases) {
  if (needs_columns(q, v, which))
    return with_one_head_dim(q, k, v, [&](const auto&... wide) { return forward(wide..., mask, which, biases); });
  if (which == "cudnn") {
    auto result = at::_scaled_dot_product_cudnn_attention(
        q, k, v, std::nullopt, /*compute_log_sumexp=*/true, 0.0, mask.causal, false, mask.scale);
    return {std::get<0>(result), std::get<1>(result), std::get<6>(result), std::get<7>(result)};
  }
  if (which == "flash") {
    auto result = at::_scaled_dot_product_flash_attention(q, k, v, 0.0, mask.causal, false, mask.scale);
    return {std::get<0>(result), std::get<1>(result), std::get<6>(result), std::get<7>(result)};
  }
  if (which == "efficient") {
    const bool causal = plainly_causal(mask, q, k);
    const Tensor masked = biases.bias ? masked_bias(*biases.bias, mask, q, k) : Tensor();
    MaybeTensor bias;
    if (biases.bias) bias = expanded_bias(masked, q);
    auto [out, lse, seed, offset] = at::_scaled_dot_product_efficient_attention(
        q, expand_heads(q, k), expand_heads(q, v), bias, /*compute_log_sumexp=*/true, 0.0, causal, mask.scale);
    // The kernel has 0 for a row that sees no key; its backward takes infinity as well.
    if (biases.bias) lse.narrow_symint(2, 0, q.sym_size(2)).masked_fill_(sees_nothing(masked, q, causal), kInfinity);
    return {out, lse, seed, offset};
  }
  if (which == "flash_window") {
    const Window window(mask, q.sym_size(2), k.sym_size(2));
    auto result = at::_flash_attention_forward_symint(
        bshd(q), bshd(k.narrow_symint(2, 0, window.keys)), bshd(v.narrow_symint(2, 0, window.keys)), std::nullopt, std::nullopt,
        q.sym_size(2), window.keys, 0.0, false, false, mask.scale, window.left, window.right);
    return {bshd(std::get<0>(result)), std::get<1>(result), std::get<2>(result), std::get<3>(result)};
  }
  if (which == "cpu") {
    auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
        q, expand_heads(q, k), expand_heads(q, v), 0.0, mask.causal, std::nullopt, mask.scale);
    return {out, lse};
  }
  static const auto python = find<Forwarded(
      const Tensor&, const Tensor&, const Tensor&, bool, double, int64_t, int64_t, bool, double, c10::string_view,
      const MaybeTensor&, const MaybeTensor&)>("bwdtune::forward");
  auto [out, lse] = python.call(
      q, k, v, mask.causal, mask.scale, mask.left, mask.right, mask.bottom_right, mask.softcap, which, biases.bias,
      biases.alibi_slopes);
  return {out, lse};
}

// PyTorch's deterministic mode for the time of a block, where it is asked for.
class Deterministic {
 public:
  explicit Deterministic(bool asked)
      : before_(at::globalContext().deterministicAlgorithms()),
        warns_(at::globalContext().deterministicAlgorithmsWarnOnly()),
        changes_(asked && !before_) {
    if (changes_) at::globalContext().setDeterministicAlgorithms(true, warns_);
  }
  ~Deterministic() {
    if (changes_) at::globalContext().setDeterministicAlgorithms(before_, warns_);
  }
  Deterministic(const Deterministic&) = delete;

 private:
  const bool before_, warns_, changes_;
};

inline Found pytorch_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const MaybeTensor& seed, const MaybeTensor& offset, const Mask& mask, bool repeatable, c10::string_view which,
    const Biases& biases) {
  if (needs_columns(q, v, which))
    return with_one_head_dim(dout, q, k, v, out, [&](const auto&... wide) {
      return pytorch_backward(wide..., lse, seed, offset, mask, repeatable, which, biases);
    });
  const PytorchOnly pytorch;
  const Deterministic deterministic(repeatable);
  if (which == "cudnn")
    return at::_scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, or_none(seed), or_none(offset), {}, {}, {}, q.size(2), k.size(2), 0.0, mask.causal,
        mask.scale);
  if (which == "flash")
    return at::_scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, {}, {}, q.size(2), k.size(2), 0.0, mask.causal, or_none(seed), or_none(offset), mask.scale);
  if (which == "efficient") {
    const bool causal = plainly_causal(mask, q, k);
    const Tensor bias = biases.bias ? expanded_bias(masked_bias(*biases.bias, mask, q, k), q) : Tensor();
    auto [dq, dk, dv, ds] = at::_scaled_dot_product_efficient_attention_backward(
        dout, q, expand_heads(q, k), expand_heads(q, v), bias, out, lse, or_none(seed), or_none(offset), 0.0,
        {true, true, true, biases.bias_grad}, causal, mask.scale);
    Tensor dbias;
    if (biases.bias_grad) {
      if (causal) ds = ds.masked_fill(unseen(mask, q, k), 0.0);  // which the kernel leaves out
      dbias = ds.sum_to_size_symint(biases.bias->sym_sizes());
    }
    return {{dq, sum_heads(dk, k), sum_heads(dv, v)}, dbias};
  }
  if (which == "flash_window") {
    const Window window(mask, q.sym_size(2), k.sym_size(2));
    auto [dq, dk, dv] = at::_flash_attention_backward_symint(
        bshd(dout), bshd(q), bshd(k.narrow_symint(2, 0, window.keys)), bshd(v.narrow_symint(2, 0, window.keys)), bshd(out), lse,
        {}, {}, q.sym_size(2), window.keys, 0.0, false, or_none(seed), or_none(offset), mask.scale, window.left, window.right);
    return Gradients{bshd(dq), padded(bshd(dk), k.sym_size(2)), padded(bshd(dv), v.sym_size(2))};
  }
  if (which == "cpu") {
    auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, expand_heads(q, k), expand_heads(q, v), out, lse, 0.0, mask.causal, std::nullopt, mask.scale);
    return Gradients{dq, sum_heads(dk, k), sum_heads(dv, v)};
  }
  static const auto python = find<GradientsOfBias(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, double, int64_t, int64_t,
      bool, double, bool, c10::string_view, const MaybeTensor&, const MaybeTensor&, bool)>("bwdtune::forward_backward");
  auto [dq, dk, dv, dbias] = python.call(
      dout, q, k, v, out, lse, mask.causal, mask.scale, mask.left, mask.right, mask.bottom_right, mask.softcap, repeatable,
      which, biases.bias, biases.alibi_slopes, biases.bias_grad);
  return {{dq, dk, dv}, dbias};
}

inline Forward forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Packed& packed, const Mask& mask, c10::string_view which,
    const MaybeTensor& slopes) {
  if (needs_columns(q, v, which))
    return with_one_head_dim(q, k, v, [&](const auto&... wide) { return forward(wide..., packed, mask, which, slopes); });
  if (which == "flash") {
    auto result = at::_flash_attention_forward_symint(
        q, k, v, packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv, 0.0, false, false,
        mask.scale, SymInt(mask.left), SymInt(mask.causal ? 0 : mask.right));
    return {std::get<0>(result), std::get<1>(result), std::get<2>(result), std::get<3>(result)};
  }
  static const auto python = find<Forwarded(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, SymInt, SymInt, bool, double, int64_t, int64_t,
      bool, double, c10::string_view, const MaybeTensor&)>("bwdtune::forward_varlen");
  auto [out, lse] = python.call(
      q, k, v, packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv, mask.causal, mask.scale,
      mask.left, mask.right, mask.bottom_right, mask.softcap, which, slopes);
  return {out, lse};
}

// (B, Hq, Sq) of any of PyTorch's: cuDNN's has a last dimension of one, the memory-efficient kernel's rows are padded.
inline Tensor plain_lse(const Tensor& lse, const Tensor& q, bool packed) {
  if (packed) return lse;
  const Tensor flat = lse.dim() == 4 ? lse.squeeze(3) : lse;
  return flat.sym_size(2) == q.sym_size(2) ? flat : flat.narrow_symint(2, 0, q.sym_size(2));
}

// Has a forward's results, which it alone holds, count a sink: `runtime.row_features.add_sink`.
inline void add_sink(const Forward& result, const Tensor& q, const Tensor& sink, bool packed) {
  const Tensor lse = plain_lse(result.lse, q, packed);
  const Tensor wide = sink.scalar_type() == lse.scalar_type() ? sink : sink.to(lse.scalar_type());
  const Tensor scores = wide.unsqueeze(1), seen = at::isfinite(lse);
  const Tensor with_sink = at::where(seen, at::logaddexp(lse, scores), scores);
  const Tensor left = at::where(seen, at::exp(lse.sub(with_sink)), 0.0);
  result.out.mul_((packed ? left.t() : left).unsqueeze(-1));
  lse.copy_(with_sink);
}

inline Found pytorch_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const MaybeTensor& seed, const MaybeTensor& offset, const Packed& packed, const Mask& mask, bool repeatable,
    c10::string_view which, const MaybeTensor& slopes) {
  if (needs_columns(q, v, which))
    return with_one_head_dim(dout, q, k, v, out, [&](const auto&... wide) {
      return pytorch_backward(wide..., lse, seed, offset, packed, mask, repeatable, which, slopes);
    });
  const PytorchOnly pytorch;
  const Deterministic deterministic(repeatable);
  if (which == "flash")
    return at::_flash_attention_backward_symint(
        dout, q, k, v, out, lse, packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv, 0.0,
        false, or_none(seed), or_none(offset), mask.scale, SymInt(mask.left), SymInt(mask.causal ? 0 : mask.right));
  static const auto python = find<Gradients(
      const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
      SymInt, SymInt, bool, double, int64_t, int64_t, bool, double, bool, c10::string_view, const MaybeTensor&)>(
      "bwdtune::forward_varlen_backward");
  return python.call(
      dout, q, k, v, out, lse, packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv,
      mask.causal, mask.scale, mask.left, mask.right, mask.bottom_right, mask.softcap, repeatable, which, slopes);
}

// ---------------------------------------------------------------------------------------------------------------------------
// `bwdtune::backward`, `bwdtune::backward_varlen`

// Gradients in the layouts that the fake implementation promises: PyTorch's kernels have layouts of their own.
inline Tensor laid_out(Tensor gradient, const Tensor& input) {
  const Tensor promised = at::empty_like(input);
  if (gradient.strides() == promised.strides()) return gradient;
  promised.copy_(gradient);
  return promised;
}

// The gradients of a call: ours where a kernel is chosen for it, else PyTorch's, `theirs`, which are given dout, v and out and
// know neither sinks nor a gradient of the log-sum-exp: `runtime.row_features` says how they come to both.
template <class Theirs>
AllGradients gradients(
    Call& call, const MaybeTensor& dlse, const MaybeTensor& sink, const Biases& biases, const Theirs& theirs) {
  const Tensor &dout = call.dout, &q = call.q, &k = call.k, &v = call.v, &out = call.out;
  const bool packed = call.format == Format::kTHD;
  if (dlse) call.dlse = *dlse;
  if (sink) {
    call.sink = sink->to(at::kFloat).contiguous();
    call.dsink = at::empty_like(call.sink);
  }
  if (biases.bias) call.bias = *biases.bias;
  if (biases.alibi_slopes) call.alibi_slopes = *biases.alibi_slopes;
  call.bias_grad = biases.bias_grad;
  const auto dsink_of_theirs = [&] {
    if (!sink) return Tensor();
    static const auto python = find<Tensor(
        const Tensor&, const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&, const MaybeTensor&)>(
        "bwdtune::sink_gradient");
    return python.call(
        *sink, out, plain_lse(call.lse, q, packed), dout, dlse, packed ? MaybeTensor(call.cu_seqlens_q) : std::nullopt);
  };
  if (!q.numel() || !k.numel()) {
    Tensor dbias;
    if (biases.bias_grad) dbias = at::empty(biases.bias->sizes(), biases.bias->options()).zero_();
    return {at::zeros_like(q), at::zeros_like(k), at::zeros_like(v), dsink_of_theirs(), std::move(dbias)};
  }
  if (auto found = compute(call)) {
    auto& [dq, dk, dv, dbias] = *found;
    const Tensor dsink = sink ? call.dsink.to(sink->scalar_type()) : dsink_of_theirs();
    return {std::move(dq), std::move(dk), std::move(dv), dsink, std::move(dbias)};
  }
  auto [dq, dk, dv, dbias] = theirs(dout, v, out);
  if (dlse) {
    static const auto python = find<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&)>("bwdtune::lse_factors");
    const auto [units, terms] = python.call(packed ? dlse->t() : *dlse, out);
    const auto [more_dq, more_dk, unused, more_dbias] = theirs(units, at::zeros_like(v), terms);
    dq = dq.add(more_dq);
    dk = dk.add(more_dk);
    if (biases.bias_grad) dbias = dbias.add(more_dbias);
  }
  if (biases.bias_grad) dbias = dbias.contiguous();
  return {
      laid_out(std::move(dq), q), laid_out(std::move(dk), k), laid_out(std::move(dv), v), dsink_of_theirs(), std::move(dbias)};
}

inline AllGradients backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const MaybeTensor& seed, const MaybeTensor& offset, bool is_causal, double scale, int64_t window_left, int64_t window_right,
    bool bottom_right, double softcap, MaybeBool asked, c10::string_view which, const MaybeTensor& dlse,
    const MaybeTensor& sink, const MaybeTensor& bias, const MaybeTensor& alibi_slopes, bool bias_grad) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool repeatable = deterministic(asked);
  Call call{dout, q, k, v, out, lse};
  call.causal = is_causal;
  call.scale = scale;
  call.left = window_left;
  call.right = window_right;
  call.bottom_right = bottom_right;
  call.softcap = softcap;
  call.deterministic = repeatable;
  const Mask mask{is_causal, scale, window_left, window_right, bottom_right, softcap};
  const Biases biases{bias, alibi_slopes, bias_grad};
  return gradients(call, dlse, sink, biases, [&](const Tensor& dout, const Tensor& v, const Tensor& out) {
    return pytorch_backward(dout, q, k, v, out, lse, seed, offset, mask, repeatable, which, biases);
  });
}

inline GradientsVarlen backward_varlen(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const MaybeTensor& seed, const MaybeTensor& offset, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_kv,
    int64_t max_seqlen_q, int64_t max_seqlen_kv, bool is_causal, double scale, int64_t window_left, int64_t window_right,
    bool bottom_right, double softcap, MaybeBool asked, c10::string_view which, const MaybeTensor& dlse,
    const MaybeTensor& sink, const MaybeTensor& alibi_slopes) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool repeatable = deterministic(asked);
  Call call{dout, q, k, v, out, lse};
  call.format = Format::kTHD;
  call.causal = is_causal;
  call.scale = scale;
  call.left = window_left;
  call.right = window_right;
  call.bottom_right = bottom_right;
  call.softcap = softcap;
  call.deterministic = repeatable;
  call.cu_seqlens_q = cu_seqlens_q;
  call.cu_seqlens_kv = cu_seqlens_kv;
  call.max_seqlen_q = max_seqlen_q;
  call.max_seqlen_kv = max_seqlen_kv;
  const Mask mask{is_causal, scale, window_left, window_right, bottom_right, softcap};
  const Packed packed{cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv};
  const Biases biases{std::nullopt, alibi_slopes};
  auto [dq, dk, dv, dsink, unused] =
      gradients(call, dlse, sink, biases, [&](const Tensor& dout, const Tensor& v, const Tensor& out) {
        return pytorch_backward(dout, q, k, v, out, lse, seed, offset, packed, mask, repeatable, which, alibi_slopes);
      });
  return {std::move(dq), std::move(dk), std::move(dv), std::move(dsink)};
}

// ---------------------------------------------------------------------------------------------------------------------------
// Autograd

// PyTorch refuses any C++ autograd function while a transform of torch.func is active, as it cannot know that a function of
// one level alone is meant. At the Autograd key it is one: what the function calls goes down to the next level by itself, as
// from PyTorch's own derivatives. So the transforms are put aside for the check, and are back before the function's body.
class OneLevel {
 public:
  OneLevel() { aside() = std::move(at::functorch::functorchTLSAccessor()); }
  ~OneLevel() { put_back(); }
  OneLevel(const OneLevel&) = delete;
  static void put_back() {
    if (aside()) at::functorch::functorchTLSAccessor() = std::move(aside());
  }

 private:
  static std::unique_ptr<at::functorch::FuncTorchTLSBase>& aside() {
    thread_local std::unique_ptr<at::functorch::FuncTorchTLSBase> value;
    return value;
  }
};

template <class Function, class... Args>
variable_list apply(Args&&... args) {
  const OneLevel one_level;
  return Function::apply(std::forward<Args>(args)...);
}

inline bool needs_gradient(std::initializer_list<const Tensor*> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const Tensor* tensor : tensors)
    if (tensor->defined() && tensor->requires_grad()) return true;
  return false;
}

[[noreturn]] inline void differentiated_twice() {
  TORCH_CHECK(
      false,
      "the gradients of bwdtune.attention cannot be differentiated again: use "
      "torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH");
}

using Backward = AllGradients(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&,
    const MaybeTensor&, bool, double, int64_t, int64_t, bool, double, MaybeBool, c10::string_view, const MaybeTensor&,
    const MaybeTensor&, const MaybeTensor&, const MaybeTensor&, bool);
using BackwardVarlen = GradientsVarlen(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const MaybeTensor&,
    const MaybeTensor&, const Tensor&, const Tensor&, SymInt, SymInt, bool, double, int64_t, int64_t, bool, double, MaybeBool,
    c10::string_view, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&);

inline AllGradients call_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const MaybeTensor& seed, const MaybeTensor& offset, const MaybePacked& packed, const Mask& mask, MaybeBool deterministic,
    c10::string_view which, const MaybeTensor& dlse, const MaybeTensor& sink, const Biases& biases) {
  if (packed) {
    static const auto op = find<BackwardVarlen>("bwdtune::backward_varlen");
    auto [dq, dk, dv, dsink] = op.call(
        dout, q, k, v, out, lse, seed, offset, packed->cu_seqlens_q, packed->cu_seqlens_kv, packed->max_seqlen_q,
        packed->max_seqlen_kv, mask.causal, mask.scale, mask.left, mask.right, mask.bottom_right, mask.softcap, deterministic,
        which, dlse, sink, biases.alibi_slopes);
    return {std::move(dq), std::move(dk), std::move(dv), std::move(dsink), Tensor()};
  }
  static const auto op = find<Backward>("bwdtune::backward");
  return op.call(
      dout, q, k, v, out, lse, seed, offset, mask.causal, mask.scale, mask.left, mask.right, mask.bottom_right, mask.softcap,
      deterministic, which, dlse, sink, biases.bias, biases.alibi_slopes, biases.bias_grad);
}

// The gradients as something that can be asked for, and not be differentiated again. PyTorch's `create_graph` is on in
// torch.func.grad, whether a second derivative is wanted or not.
struct Once : torch::autograd::Function<Once> {
  static constexpr bool is_traceable = true;

  static variable_list forward(
      AutogradContext*, const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
      const Tensor& lse, const MaybeTensor& seed, const MaybeTensor& offset, const MaybePacked& packed, const Mask& mask,
      MaybeBool deterministic, c10::string_view which, const MaybeTensor& dlse, const MaybeTensor& sink,
      const MaybeTensor& bias, const MaybeTensor& alibi_slopes, bool bias_grad) {
    OneLevel::put_back();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Biases biases{bias, alibi_slopes, bias_grad};
    auto [dq, dk, dv, dsink, dbias] =
        call_backward(dout, q, k, v, out, lse, seed, offset, packed, mask, deterministic, which, dlse, sink, biases);
    variable_list found = {dq, dk, dv};
    for (const Tensor& gradient : {dsink, dbias})
      if (gradient.defined()) found.push_back(gradient);
    return found;
  }

  static variable_list backward(AutogradContext*, const variable_list&) { differentiated_twice(); }
};

inline AllGradients backward_of(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const MaybeTensor& seed, const MaybeTensor& offset, const MaybePacked& packed, const Mask& mask, MaybeBool deterministic,
    c10::string_view which, const MaybeTensor& dlse, const MaybeTensor& sink, const Biases& biases) {
  const Tensor given_dlse = or_none(dlse), given_sink = or_none(sink), given_bias = or_none(biases.bias);
  if (!needs_gradient({&dout, &q, &k, &v, &out, &lse, &given_dlse, &given_sink, &given_bias})) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_backward(dout, q, k, v, out, lse, seed, offset, packed, mask, deterministic, which, dlse, sink, biases);
  }
  const auto found = apply<Once>(
      dout, q, k, v, out, lse, seed, offset, packed, mask, deterministic, which, dlse, sink, biases.bias, biases.alibi_slopes,
      biases.bias_grad);
  const Tensor dbias = biases.bias_grad ? found.back() : Tensor();
  return {found[0], found[1], found[2], sink ? found[3] : Tensor(), dbias};
}

inline AllGradients backward_autograd(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const MaybeTensor& seed, const MaybeTensor& offset, bool is_causal, double scale, int64_t window_left, int64_t window_right,
    bool bottom_right, double softcap, MaybeBool deterministic, c10::string_view which, const MaybeTensor& dlse,
    const MaybeTensor& sink, const MaybeTensor& bias, const MaybeTensor& alibi_slopes, bool bias_grad) {
  const Mask mask{is_causal, scale, window_left, window_right, bottom_right, softcap};
  const Biases biases{bias, alibi_slopes, bias_grad};
  return backward_of(dout, q, k, v, out, lse, seed, offset, std::nullopt, mask, deterministic, which, dlse, sink, biases);
}

inline GradientsVarlen backward_varlen_autograd(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const MaybeTensor& seed, const MaybeTensor& offset, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_kv,
    SymInt max_seqlen_q, SymInt max_seqlen_kv, bool is_causal, double scale, int64_t window_left, int64_t window_right,
    bool bottom_right, double softcap, MaybeBool deterministic, c10::string_view which, const MaybeTensor& dlse,
    const MaybeTensor& sink, const MaybeTensor& alibi_slopes) {
  const Mask mask{is_causal, scale, window_left, window_right, bottom_right, softcap};
  const Packed packed{cu_seqlens_q, cu_seqlens_kv, std::move(max_seqlen_q), std::move(max_seqlen_kv)};
  const Biases biases{std::nullopt, alibi_slopes};
  auto [dq, dk, dv, dsink, unused] =
      backward_of(dout, q, k, v, out, lse, seed, offset, packed, mask, deterministic, which, dlse, sink, biases);
  return {std::move(dq), std::move(dk), std::move(dv), std::move(dsink)};
}

inline Forward forward_of(
    const Tensor& q, const Tensor& k, const Tensor& v, const MaybePacked& packed, const Mask& mask, c10::string_view which,
    const MaybeTensor& sink, const Biases& biases) {
  Forward result = packed ? forward(q, k, v, *packed, mask, which, biases.alibi_slopes) : forward(q, k, v, mask, which, biases);
  if (sink) add_sink(result, q, *sink, packed.has_value());
  return result;
}

struct Attention : torch::autograd::Function<Attention> {
  static constexpr bool is_traceable = true;

  static variable_list forward(
      AutogradContext* context, const Tensor& q, const Tensor& k, const Tensor& v, const MaybePacked& packed, const Mask& mask,
      MaybeBool deterministic, c10::string_view which, const MaybeTensor& sink, const MaybeTensor& bias,
      const MaybeTensor& alibi_slopes, bool bias_grad) {
    OneLevel::put_back();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    Forward result = forward_of(q, k, v, packed, mask, which, sink, {bias, alibi_slopes, bias_grad});
    variable_list saved = {q, k, v, result.out, result.lse};
    auto& data = context->saved_data;
    if (packed) {
      saved.insert(saved.end(), {packed->cu_seqlens_q, packed->cu_seqlens_kv});
      data["max_seqlen_q"] = packed->max_seqlen_q;
      data["max_seqlen_kv"] = packed->max_seqlen_kv;
    }
    saved.insert(saved.end(), {or_none(result.seed), or_none(result.offset), or_none(sink)});
    if (bias || alibi_slopes) saved.insert(saved.end(), {or_none(bias), or_none(alibi_slopes)});
    context->save_for_backward(std::move(saved));
    data["packed"] = packed.has_value();
    data["causal"] = mask.causal;
    data["scale"] = mask.scale;
    data["left"] = mask.left;
    data["right"] = mask.right;
    data["bottom_right"] = mask.bottom_right;
    data["softcap"] = mask.softcap;
    data["deterministic"] = deterministic;
    data["which"] = std::string(which);
    if (bias_grad) data["bias_grad"] = true;
    context->set_materialize_grads(false);
    return {result.out, plain_lse(result.lse, q, packed.has_value())};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list found(11);
    if (!gradients[0].defined() && !gradients[1].defined()) return found;
    auto& data = context->saved_data;
    const auto saved = context->get_saved_variables();
    MaybePacked packed;
    size_t used = 5;
    if (data["packed"].toBool()) {
      packed = Packed{saved[5], saved[6], data["max_seqlen_q"].toSymInt(), data["max_seqlen_kv"].toSymInt()};
      used = 7;
    }
    const auto or_nothing = [](const Tensor& tensor) { return tensor.defined() ? MaybeTensor(tensor) : std::nullopt; };
    const Tensor dout = gradients[0].defined() ? gradients[0] : at::zeros_like(saved[3]);
    const MaybeTensor sink = or_nothing(saved[used + 2]);
    const Mask mask{data["causal"].toBool(), data["scale"].toDouble(),      data["left"].toInt(),
                    data["right"].toInt(),   data["bottom_right"].toBool(), data["softcap"].toDouble()};
    const std::string which = data["which"].toStringRef();
    Biases biases;
    if (saved.size() > used + 3)
      biases = {or_nothing(saved[used + 3]), or_nothing(saved[used + 4]), data.count("bias_grad") > 0};
    Tensor dsink, dbias;
    std::tie(found[0], found[1], found[2], dsink, dbias) = call_backward(
        dout, saved[0], saved[1], saved[2], saved[3], saved[4], or_nothing(saved[used]), or_nothing(saved[used + 1]), packed,
        mask, data["deterministic"].toOptional<bool>(), which, or_nothing(gradients[1]), sink, biases);
    if (sink) found[7] = dsink;
    if (biases.bias_grad) found[8] = dbias;
    return found;
  }
};

inline Mask mask_of(
    const Tensor& q, const Tensor& k, int head_axis, bool is_causal, MaybeDouble scale, bool enable_gqa, int64_t window_left,
    int64_t window_right, bool bottom_right, double softcap) {
  TORCH_CHECK_VALUE(
      enable_gqa || q.sym_size(head_axis) == k.sym_size(head_axis), q.sym_size(head_axis), " query heads and ",
      k.sym_size(head_axis), " key and value heads need enable_gqa");
  const double head_dim = static_cast<double>(q.sym_size(-1).guard_int(__FILE__, __LINE__));
  return {is_causal, scale.value_or(1 / std::sqrt(head_dim)), window_left, window_right, bottom_right, softcap};
}

inline Forwarded attention(
    const Tensor& q, const Tensor& k, const Tensor& v, bool is_causal, MaybeDouble scale, bool enable_gqa, int64_t window_left,
    int64_t window_right, bool bottom_right, double softcap, MaybeBool, c10::string_view which, const MaybeTensor& sink,
    const MaybeTensor& bias, const MaybeTensor& alibi_slopes) {
  const Mask mask = mask_of(q, k, 1, is_causal, scale, enable_gqa, window_left, window_right, bottom_right, softcap);
  const Forward result = forward_of(q, k, v, std::nullopt, mask, which, sink, {bias, alibi_slopes});
  return {result.out, plain_lse(result.lse, q, false)};
}

inline Forwarded attention_autograd(
    const Tensor& q, const Tensor& k, const Tensor& v, bool is_causal, MaybeDouble scale, bool enable_gqa, int64_t window_left,
    int64_t window_right, bool bottom_right, double softcap, MaybeBool deterministic, c10::string_view which,
    const MaybeTensor& sink, const MaybeTensor& bias, const MaybeTensor& alibi_slopes) {
  const Tensor given_sink = or_none(sink), given_bias = or_none(bias);
  if (!needs_gradient({&q, &k, &v, &given_sink, &given_bias})) {
    static const auto op = find<Forwarded(
        const Tensor&, const Tensor&, const Tensor&, bool, MaybeDouble, bool, int64_t, int64_t, bool, double, MaybeBool,
        c10::string_view, const MaybeTensor&, const MaybeTensor&, const MaybeTensor&)>("bwdtune::attention");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(
        q, k, v, is_causal, scale, enable_gqa, window_left, window_right, bottom_right, softcap, deterministic, which, sink,
        bias, alibi_slopes);
  }
  const Mask mask = mask_of(q, k, 1, is_causal, scale, enable_gqa, window_left, window_right, bottom_right, softcap);
  const bool bias_grad = needs_gradient({&given_bias});
  const auto found = apply<Attention>(q, k, v, MaybePacked(), mask, deterministic, which, sink, bias, alibi_slopes, bias_grad);
  return {found[0], found[1]};
}

inline Forwarded attention_varlen(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_kv,
    SymInt max_seqlen_q, SymInt max_seqlen_kv, bool is_causal, MaybeDouble scale, bool enable_gqa, int64_t window_left,
    int64_t window_right, bool bottom_right, double softcap, MaybeBool, c10::string_view which, const MaybeTensor& sink,
    const MaybeTensor& alibi_slopes) {
  const Mask mask = mask_of(q, k, 1, is_causal, scale, enable_gqa, window_left, window_right, bottom_right, softcap);
  const Packed packed{cu_seqlens_q, cu_seqlens_kv, std::move(max_seqlen_q), std::move(max_seqlen_kv)};
  const Forward result = forward_of(q, k, v, packed, mask, which, sink, {std::nullopt, alibi_slopes});
  return {result.out, result.lse};
}

inline Forwarded attention_varlen_autograd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_kv,
    SymInt max_seqlen_q, SymInt max_seqlen_kv, bool is_causal, MaybeDouble scale, bool enable_gqa, int64_t window_left,
    int64_t window_right, bool bottom_right, double softcap, MaybeBool deterministic, c10::string_view which,
    const MaybeTensor& sink, const MaybeTensor& alibi_slopes) {
  const Tensor given_sink = or_none(sink);
  if (!needs_gradient({&q, &k, &v, &given_sink})) {
    static const auto op = find<Forwarded(
        const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, SymInt, SymInt, bool, MaybeDouble, bool,
        int64_t, int64_t, bool, double, MaybeBool, c10::string_view, const MaybeTensor&, const MaybeTensor&)>(
        "bwdtune::attention_varlen");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.call(
        q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, is_causal, scale, enable_gqa, window_left,
        window_right, bottom_right, softcap, deterministic, which, sink, alibi_slopes);
  }
  const Mask mask = mask_of(q, k, 1, is_causal, scale, enable_gqa, window_left, window_right, bottom_right, softcap);
  const Packed packed{cu_seqlens_q, cu_seqlens_kv, std::move(max_seqlen_q), std::move(max_seqlen_kv)};
  const auto found = apply<Attention>(
      q, k, v, MaybePacked(packed), mask, deterministic, which, sink, MaybeTensor(), alibi_slopes, false);
  return {found[0], found[1]};
}

}  // namespace bwdtune
