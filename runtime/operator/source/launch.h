// From tensors to a launch: layouts, the gradients' memory, the workspace, the stream.
#pragma once

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ge.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/masked_fill.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "table.h"

namespace bwdtune {

using at::Tensor;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kUnlimited = -1;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Where the dimensions of a tensor stand.
enum class Format { kBHSD, kBSHD, kTHD };

struct Axes {
  int batch, head, seqlen;  // batch -1: there is none
};

inline Axes axes(Format format) {
  switch (format) {
    case Format::kBHSD:
      return {0, 1, 2};
    case Format::kBSHD:
      return {0, 2, 1};
    default:
      return {-1, 1, 0};
  }
}

// The strides that a gradient has: those of `empty_like`, or those of (B, S, H, D) whatever the input's are. PyTorch's meta
// functions promise them, and compiled code asserts on them.
enum class GradientLayout { kAsInput, kBSHD };

// One call of a backward. `left` and `right` count keys before and past the diagonal, -1 for all of them.
struct Call {
  const Tensor &dout, &q, &k, &v, &out, &lse;
  Format format = Format::kBHSD;
  GradientLayout layout = GradientLayout::kAsInput;
  bool causal = false;
  double scale = 1.0;
  int64_t left = kUnlimited, right = kUnlimited;
  bool bottom_right = false;
  double softcap = 0.0;
  bool deterministic = false;
  // Of packed sequences; undefined without.
  Tensor cu_seqlens_q = {}, cu_seqlens_kv = {};
  int64_t max_seqlen_q = 0, max_seqlen_kv = 0;
  // The gradient of the log-sum-exp, which is as that is, and sinks, (Hq) in fp32, whose gradient is written to `dsink`.
  // Undefined without.
  Tensor dlse = {}, sink = {}, dsink = {};
  // What is added to the scores, (B or 1, Hq or 1, Sq or 1, Skv), whether its gradient is wanted, and ALiBi slopes, (Hq) or
  // (B, Hq) in fp32. Undefined without.
  Tensor bias = {}, alibi_slopes = {};
  bool bias_grad = false;
};

// All gradients of one call but those of sinks; that of a bias is undefined where it is not wanted.
struct Found {
  Tensor dq, dk, dv, dbias;

  Found(Gradients gradients, Tensor of_bias = {})
      : dq(std::move(std::get<0>(gradients))),
        dk(std::move(std::get<1>(gradients))),
        dv(std::move(std::get<2>(gradients))),
        dbias(std::move(of_bias)) {}
};

inline bool deterministic(std::optional<bool> asked) { return asked.value_or(at::globalContext().deterministicAlgorithms()); }

// TMA's rule: an aligned base, a unit last stride, and other strides that are positive and aligned.
inline bool describe(const Tensor& tensor, const Axes& at, bwdtune_tensor& described) {
  constexpr int64_t kElementBytes = 2, kAlignmentBytes = 16, kStrideLimitBytes = int64_t{1} << 40;
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t head_dim = sizes.back();
  if (strides.back() != 1) return false;
  described.data = tensor.data_ptr();
  if (reinterpret_cast<uintptr_t>(described.data) % kAlignmentBytes) return false;
  const auto stride = [&](int dim, int64_t& out) {
    // The stride of a dimension of size one is never multiplied by anything but zero, yet torch allows any value there and
    // TMA does not: a row's length always suits it.
    out = dim < 0 || sizes[dim] == 1 ? head_dim : strides[dim];
    const int64_t bytes = out * kElementBytes;
    return bytes > 0 && bytes % kAlignmentBytes == 0 && bytes < kStrideLimitBytes;
  };
  return stride(at.batch, described.stride_batch) && stride(at.head, described.stride_head) &&
         stride(at.seqlen, described.stride_seqlen);
}

// A tensor that a kernel can address: itself, or a copy that `held` keeps.
inline void describe_input(const Tensor& tensor, const Axes& at, bwdtune_tensor& described, Tensor& held) {
  if (describe(tensor, at, described)) return;
  held = tensor.clone(at::MemoryFormat::Contiguous);
  TORCH_INTERNAL_ASSERT(describe(held, at, described));
}

inline Tensor empty_gradient(const Tensor& input, GradientLayout layout) {
  if (layout == GradientLayout::kAsInput) return at::empty_like(input);
  const int64_t heads = input.size(1), seqlen = input.size(2), head_dim = input.size(3);
  return at::empty_strided(input.sizes(), {seqlen * heads * head_dim, head_dim, heads * head_dim, 1}, input.options());
}

// The gradient that is returned, and where its layout is not one that a kernel can write to another one that it writes.
struct Output {
  Tensor gradient, written;

  Output(const Tensor& input, GradientLayout layout, const Axes& at, bwdtune_tensor& described, bool clear)
      : gradient(empty_gradient(input, layout)) {
    written = gradient;
    if (!describe(gradient, at, described)) {
      written = at::empty_like(gradient, gradient.options(), at::MemoryFormat::Contiguous);
      TORCH_INTERNAL_ASSERT(describe(written, at, described));
    }
    if (clear) written.zero_();
  }

  Tensor finished() {
    if (!written.is_same(gradient)) gradient.copy_(written);
    return std::move(gradient);
  }
};

// How kernels take a bias: `Problem::bias`; 0 where they do not.
inline int64_t bias_pattern(const Tensor& bias, const Tensor& q, const Tensor& k) {
  if (bias.dim() != 4 || bias.size(3) != k.size(2) || bias.device() != q.device()) return 0;
  int64_t pattern = 8;
  for (int dim = 0; dim < 3; dim++) {
    if (bias.size(dim) == q.size(dim))
      pattern |= 4 >> dim;
    else if (bias.size(dim) != 1)
      return 0;
  }
  return pattern;
}

// The problem in its simplest terms, as `runtime.attention` has it: problems that are the same have the same winner.
inline std::optional<Reason> problem_of(const Call& call, Problem& problem) {
  const Tensor &q = call.q, &k = call.k, &v = call.v;
  if (!call.dout.defined()) return kUndefinedGradient;
  const int dims = call.format == Format::kTHD ? 3 : 4;
  if (q.dim() != dims || k.dim() != dims || v.dim() != dims) return kDimensions;
  const Axes at = axes(call.format);
  const bool varlen = call.format == Format::kTHD;
  const int64_t head_dim = q.size(dims - 1), heads_q = q.size(at.head), heads_kv = k.size(at.head);
  const int64_t head_dim_v = v.size(dims - 1);
  const auto rows_of = [&](const Tensor& tensor) { return tensor.sizes().slice(0, dims - 1); };
  if (rows_of(k) != rows_of(v) || k.size(dims - 1) != head_dim || (!varlen && k.size(0) != q.size(0)) ||
      call.out.dim() != dims || rows_of(call.out) != rows_of(q) || call.out.size(dims - 1) != head_dim_v ||
      call.dout.sizes() != call.out.sizes())
    return kShapes;
  if (!q.numel() || !k.numel() || !v.numel()) return kEmpty;
  if (heads_q % heads_kv) return kShapes;
  if (head_dim % 8 || head_dim_v % 8) return kHeadDim;
  const auto dtype = q.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return kDtype;
  for (const Tensor* tensor : {&k, &v, &call.out, &call.dout})
    if (tensor->scalar_type() != dtype) return kDtype;
  for (const Tensor* tensor : {&k, &v, &call.out, &call.dout, &call.lse})
    if (tensor->device() != q.device()) return kDevices;
  if (!(call.scale > 0) || !std::isfinite(call.scale)) return kScale;

  const int64_t rows_q = q.size(at.seqlen), rows_kv = k.size(at.seqlen);
  const int64_t seqlen_q = varlen ? call.max_seqlen_q : rows_q, seqlen_kv = varlen ? call.max_seqlen_kv : rows_kv;
  if (seqlen_q < 1 || seqlen_kv < 1) return kEmpty;
  int64_t left = call.left, right = call.causal ? 0 : call.right;
  bool bottom_right = call.bottom_right;
  if (varlen) {
    // Nothing else tells without waiting for the device that all lengths are the same.
    if (call.cu_seqlens_q.is_same(call.cu_seqlens_kv) || call.cu_seqlens_q.data_ptr() == call.cu_seqlens_kv.data_ptr())
      bottom_right = false;
  } else {
    const int64_t diagonal = bottom_right ? seqlen_kv - seqlen_q : 0;
    if (left != kUnlimited && diagonal - left <= 1 - seqlen_q) left = kUnlimited;      // the last query sees the first key
    if (right != kUnlimited && diagonal + right >= seqlen_kv - 1) right = kUnlimited;  // the first query sees the last one
    if (seqlen_q == seqlen_kv) bottom_right = false;
  }
  const bool causal = right == 0;
  problem = {
      q.is_cuda() ? q.get_device() : -1,
      dtype == at::kHalf,
      varlen ? call.cu_seqlens_q.numel() - 1 : q.size(0),
      heads_q,
      heads_kv,
      seqlen_q,
      seqlen_kv,
      head_dim,
      causal,
      left,
      causal ? kUnlimited : right,
      bottom_right && (left != kUnlimited || right != kUnlimited),
      call.softcap != 0,
      varlen,
      call.deterministic,
      call.dlse.defined(),
      call.sink.defined(),
      call.alibi_slopes.defined(),
      call.bias_grad,
      0,
      0,
      head_dim_v == head_dim ? 0 : head_dim_v,
  };
  if (call.bias.defined()) {
    const auto bias_dtype = call.bias.scalar_type();
    problem.bias = varlen || call.format != Format::kBHSD ? 0 : bias_pattern(call.bias, q, k);
    problem.bias_dtype = bias_dtype == at::kFloat ? 2 : bias_dtype == at::kHalf;
    if (!problem.bias || (problem.bias_dtype == 0 && bias_dtype != at::kBFloat16)) return kBias;
  }
  return problem.batch < 1 ? std::optional<Reason>(kEmpty) : std::nullopt;
}

// fp32, contiguous, (B, Hq, Sq), or with packed sequences (Hq, Tq). cuDNN's has a last dimension of one, and the
// memory-efficient kernel's rows are padded. Undefined where it is none of these.
inline Tensor log_sum_exp(const Call& call) {
  const Axes at = axes(call.format);
  const int64_t rows = call.q.size(at.seqlen), heads = call.q.size(at.head);
  Tensor lse = call.lse;
  if (lse.scalar_type() != at::kFloat) return {};
  if (call.format == Format::kTHD)
    return lse.dim() == 2 && lse.size(0) == heads && lse.size(1) == rows ? lse.contiguous() : Tensor();
  if (lse.dim() == 4 && lse.size(3) == 1) lse = lse.squeeze(3);
  if (lse.dim() != 3 || lse.size(0) != call.q.size(0) || lse.size(1) != heads || lse.size(2) < rows) return {};
  if (lse.size(2) > rows) lse = lse.narrow(2, 0, rows);
  return lse.contiguous();
}

// From a tensor's first element to the end of its last one; other tensors may lie between.
inline int64_t extent_bytes(const Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return (last + 1) * static_cast<int64_t>(tensor.element_size());
}

struct LaunchFailed {
  std::string text;
};

// The strides of a bias or its gradient; 0 where there is one element.
inline void describe_bias(const Tensor& bias, bwdtune_tensor& described) {
  const auto stride = [&](int dim) { return bias.size(dim) == 1 ? 0 : bias.stride(dim); };
  described = {bias.data_ptr(), stride(0), stride(1), stride(2)};
}

// A log-sum-exp without rows whose scores are all so low that they count as none: `runtime.row_features.without_unseen`.
inline Tensor without_unseen(const Tensor& lse) {
  constexpr double kLargestScore = 1e30;
  return lse.masked_fill(lse.ge(-kLargestScore).logical_not(), -kInfinity);
}

inline Found launch(Kernel& kernel, const Problem& problem, const Call& call, const Tensor& given_lse) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Axes at = axes(call.format);
  bwdtune_arguments arguments{};
  arguments.struct_bytes = sizeof arguments;
  Tensor held[5];
  describe_input(call.q, at, arguments.q, held[0]);
  describe_input(call.k, at, arguments.k, held[1]);
  describe_input(call.v, at, arguments.v, held[2]);
  describe_input(call.out, at, arguments.o, held[3]);
  describe_input(call.dout, at, arguments.dout, held[4]);
  Output dq(call.q, call.layout, at, arguments.dq, false);
  Output dk(call.k, call.layout, at, arguments.dk, !kernel.writes_all_rows);
  Output dv(call.v, call.layout, at, arguments.dv, !kernel.writes_all_rows);
  const Tensor lse = problem.bias ? without_unseen(given_lse) : given_lse;
  arguments.lse = lse.data_ptr<float>();
  Tensor bias, dbias;
  if (problem.bias) {
    bias = call.bias.stride(3) == 1 || call.bias.size(3) == 1 ? call.bias : call.bias.contiguous();
    describe_bias(bias, arguments.bias);
  }
  if (problem.bias_grad) {
    dbias = at::empty(bias.sizes(), bias.options());
    describe_bias(dbias, arguments.dbias);
  }
  if (problem.alibi) {
    arguments.alibi_slopes = call.alibi_slopes.data_ptr<float>();
    arguments.alibi_batch_stride = call.alibi_slopes.dim() == 2 ? problem.heads_q : 0;
  }
  Tensor dlse;
  if (problem.lse_grad) {
    dlse = call.dlse.to(at::kFloat).contiguous();
    arguments.dlse = dlse.data_ptr<float>();
  }
  if (problem.sink) {
    arguments.sink = call.sink.data_ptr<float>();
    arguments.dsink = call.dsink.data_ptr<float>();
  }
  arguments.batch = problem.batch;
  arguments.heads_q = problem.heads_q;
  arguments.heads_kv = problem.heads_kv;
  arguments.seqlen_q = problem.seqlen_q;
  arguments.seqlen_kv = problem.seqlen_kv;
  arguments.scale = static_cast<float>(call.scale);
  arguments.device = static_cast<int32_t>(problem.device < 0 ? 0 : problem.device);
  arguments.window_left = problem.window_left;
  arguments.window_right = problem.causal ? 0 : problem.window_right;
  arguments.positions_q = call.q.size(at.seqlen);
  arguments.positions_kv = call.k.size(at.seqlen);
  arguments.softcap = static_cast<float>(call.softcap);
  Tensor cu_seqlens_q, cu_seqlens_kv;
  if (problem.varlen) {
    cu_seqlens_q = call.cu_seqlens_q.contiguous();
    cu_seqlens_kv = call.cu_seqlens_kv.contiguous();
    arguments.cu_seqlens_q = cu_seqlens_q.data_ptr<int32_t>();
    arguments.cu_seqlens_kv = cu_seqlens_kv.data_ptr<int32_t>();
  }
  if (problem.device >= 0) {
    const auto current_stream = state().current_stream.load(std::memory_order_relaxed);
    if (!current_stream || current_stream(arguments.device, &arguments.stream))
      throw LaunchFailed{"PyTorch does not tell its current stream"};
  }
  const int64_t bytes = kernel.workspace_bytes(&arguments);
  if (bytes < 0) throw LaunchFailed{kernel.error_text(static_cast<int>(bytes))};
  const Tensor workspace = at::empty({bytes}, call.q.options().dtype(at::kByte));
  arguments.workspace = workspace.data_ptr();
  arguments.workspace_bytes = bytes;
  if (kernel.host_register) {
    const auto watch = [&](const char* name, const Tensor& tensor, const void* data, int writable) {
      kernel.host_register(name, const_cast<void*>(data), extent_bytes(tensor), writable);
    };
    const Tensor* inputs[5] = {&call.q, &call.k, &call.v, &call.out, &call.dout};
    const bwdtune_tensor* described[5] = {&arguments.q, &arguments.k, &arguments.v, &arguments.o, &arguments.dout};
    const char* names[5] = {"q", "k", "v", "o", "dout"};
    for (int i = 0; i < 5; i++) watch(names[i], held[i].defined() ? held[i] : *inputs[i], described[i]->data, 0);
    watch("lse", lse, arguments.lse, 0);
    if (problem.lse_grad) watch("dlse", dlse, arguments.dlse, 0);
    if (problem.sink) {
      watch("sink", call.sink, arguments.sink, 0);
      watch("dsink", call.dsink, arguments.dsink, 1);
    }
    if (problem.bias) watch("bias", bias, arguments.bias.data, 0);
    if (problem.bias_grad) watch("dbias", dbias, arguments.dbias.data, 1);
    if (problem.alibi) watch("alibi_slopes", call.alibi_slopes, arguments.alibi_slopes, 0);
    if (problem.varlen) {
      watch("cu_seqlens_q", cu_seqlens_q, arguments.cu_seqlens_q, 0);
      watch("cu_seqlens_kv", cu_seqlens_kv, arguments.cu_seqlens_kv, 0);
    }
    watch("dq", dq.written, arguments.dq.data, 1);
    watch("dk", dk.written, arguments.dk.data, 1);
    watch("dv", dv.written, arguments.dv.data, 1);
    watch("workspace", workspace, arguments.workspace, 1);
  }
  const int code = kernel.backward(&arguments);
  if (kernel.host_clear) kernel.host_clear();
  if (code) throw LaunchFailed{kernel.error_text(code)};
  kernel.launches.fetch_add(1, std::memory_order_relaxed);
  return {{dq.finished(), dk.finished(), dv.finished()}, std::move(dbias)};
}

// The gradients by the kernel that is chosen for this problem; nothing where PyTorch has to compute them. Never throws.
inline std::optional<Found> compute(const Call& call) noexcept {
  State& shared = state();
  try {
    Problem problem;
    if (const auto reason = problem_of(call, problem)) {
      shared.pytorch_because(*reason);
      return std::nullopt;
    }
    const Tensor lse = log_sum_exp(call);
    if (!lse.defined()) {
      shared.pytorch_because(kLogSumExp);
      return std::nullopt;
    }
    if (problem.varlen && (call.cu_seqlens_q.scalar_type() != at::kInt || call.cu_seqlens_kv.scalar_type() != at::kInt ||
                           call.cu_seqlens_kv.numel() != call.cu_seqlens_q.numel())) {
      shared.pytorch_because(kShapes);
      return std::nullopt;
    }
    const Decision decision = shared.table.find(problem);
    const int32_t failure = decision.kernel ? decision.kernel->failure.load(std::memory_order_relaxed) : kNone;
    if (!decision.kernel || failure != kNone) {
      shared.pytorch_because(decision.kernel ? failure : decision.reason);
      return std::nullopt;
    }
    try {
      return launch(*decision.kernel, problem, call, lse);
    } catch (const LaunchFailed& failure) {
      const int32_t reason = shared.pytorch_after("a launch failed: ", failure.text);
      decision.kernel->failure.store(reason, std::memory_order_relaxed);
      if (const Failed failed = shared.failed.load(std::memory_order_acquire)) failed(decision.kernel, failure.text.c_str());
    }
  } catch (const c10::OutOfMemoryError&) {
    shared.pytorch_because(kOutOfMemory);
  } catch (const std::exception& error) {
    shared.pytorch_after("an error within bwdtune: ", error.what());
  }
  return std::nullopt;
}

}  // namespace bwdtune
