"""`attention` and `attention_varlen`: PyTorch's own forward with the stored winner as its backward."""

from __future__ import annotations

import contextlib
import math
import os
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import handle_torch_function, has_torch_function

from ..gen.errors import UsageError
from ..gen.problem import BOTTOM_RIGHT, TOP_LEFT, UNLIMITED, Problem, visible_range
from . import autograd, dispatch, forwards, math_attention
from .call import DTYPE_NAMES, Bias, Call
from .dispatch import counters, notices
from .dispatch.records import Cause
from .features import PLAIN, Features, Sequences
from .forwards import operators

CHECK_LENGTHS = "BWDTUNE_CHECK_LENGTHS"
"""The environment variable by which lengths of packed sequences are looked at on a GPU, too."""

_DEVICE_TYPES = ("cuda",)
_TENSORS = {torch.Tensor, torch.nn.Parameter}

# As it is before `sdpa.enable` replaces it: what is handed back to PyTorch must not come here again.
_pytorch = F.scaled_dot_product_attention


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    window_size: tuple[int, int] = ...,
    alignment: str = ...,
    softcap: float = ...,
    deterministic: bool | None = ...,
    sink: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
    window: tuple[int, int] | None = ...,
    bias: torch.Tensor | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    window_size: tuple[int, int] = ...,
    alignment: str = ...,
    softcap: float = ...,
    deterministic: bool | None = ...,
    sink: torch.Tensor | None = ...,
    return_lse: Literal[True],
    window: tuple[int, int] | None = ...,
    bias: torch.Tensor | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window_size: tuple[int, int] = (UNLIMITED, UNLIMITED),
    alignment: str = TOP_LEFT,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    window: tuple[int, int] | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product attention: `F.scaled_dot_product_attention` with a tuned backward, and with more masks.

    The forward is the fastest there is for the mask (`forwards.choose`): where that is plain PyTorch's own choice. The
    backward is the kernel that was stored or shipped for this problem, or for one near it, on such a GPU
    (`dispatch.choose`); one that has yet to be compiled is compiled in the background, and PyTorch's backward serves
    until then. Where there is none, or the input is not one that a kernel takes (on the CPU, not 4-dimensional, of
    another dtype, empty, a tensor subclass, with a scale that is not positive, while PyTorch's fused attention is off),
    the whole call is PyTorch's, and one line in the log of ``bwdtune`` says why, once. So it is, without a line, where
    no gradient is needed, and under `torch.compile` without the C++ operator (`runtime.operator`).

    PyTorch has no fused forward with a softcap (but for FlashAttention-3, where it is installed), with a bias of
    another dtype than q, or with ALiBi of keys past the diagonal: those are made of elementary operations, tens of
    times slower. Under the transforms of `torch.func`, so is all that PyTorch's function lacks.

    Under autocast the inputs are cast as for PyTorch's function, which leaves fp64 alone. The gradient cannot be
    differentiated again. A query that sees no key has an output and a gradient of zero.

    Args:
        q: (B, Hq, Sq, D), bf16 or fp16, any strides.
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, Dv); Dv is mostly D, and less in multi-head latent attention.
        is_causal: A query sees no key past its diagonal.
        scale: The softmax scale; 1/sqrt(D) by default.
        enable_gqa: Allow Hkv to be a divisor of Hq.
        window_size: How many keys before and past its diagonal a query sees; -1 for all. With `is_causal` none past it.
        alignment: Where the diagonal lies: ``top-left``, query i at key i, as PyTorch's `is_causal`; or
            ``bottom-right``, query i at key ``i + Skv - Sq``, as FlashAttention. The default is that of the function
            that this one stands in for: `F.scaled_dot_product_attention`.
        softcap: Scores are ``softcap * tanh(score / softcap)``; 0 for none.
        deterministic: Whether gradients must be the same bits at each call; by default whether
            `torch.use_deterministic_algorithms` is on. Such kernels have winners of their own.
        sink: (Hq), of any floating dtype, differentiable: a score of each query head that takes part in all of its
            softmaxes and has no value (gpt-oss's attention sinks). A query that sees no key then has it alone.
        return_lse: Whether to return the log-sum-exp of the scores too, which is differentiable: results for parts of
            the keys can be merged by it, as ring attention does. With `sink` it counts that one.
        window: The former name of `window_size`.
        bias: Added to the scaled scores, after the cap and before the mask; differentiable. Any shape that broadcasts
            to (B, Hq, Sq, Skv), of a floating dtype; under autocast it is cast like q. An element of minus infinity
            masks its key. Where all scores of a row are minus infinity, or below -1e30 as `torch.finfo(dtype).min`
            makes them, the row's gradients are zero.
        alibi_slopes: (Hq) or (B, Hq), of a floating dtype: ``-slope * abs(i + Skv - Sq - j)`` is added to the score of
            query i and key j, whatever the alignment of the mask (FlashAttention's ALiBi). No gradient flows into them.

    Returns:
        (B, Hq, Sq, Dv). With `return_lse` that and (B, Hq, Sq), in fp32 (fp64 for fp64), natural logarithm; minus
        infinity for a query that sees no key.

    Raises:
        ValueError: q, k and v are on different devices, or an argument makes no sense.
    """
    if has_torch_function((q, k, v, sink, bias, alibi_slopes)):  # a subclass that overrides functions, torch.fx
        features_given = {"window_size": _one_window(window_size, window), "alignment": alignment, "softcap": softcap}
        options: dict[str, Any] = {**features_given, "deterministic": deterministic}
        if sink is not None or return_lse:
            options.update(sink=sink, return_lse=return_lse)
        if bias is not None or alibi_slopes is not None:
            options.update(bias=bias, alibi_slopes=alibi_slopes)
        relevant = (q, k, v, sink, bias, alibi_slopes)
        return _overridden(attention, relevant, q, k, v, is_causal, scale, enable_gqa, **options)
    _same_device(q=q, k=k, v=v, **_named_others(q, sink, bias, alibi_slopes))
    features = _features(_one_window(window_size, window), alignment, softcap)
    if q.dim() == k.dim() == 4:
        is_causal, features = _simplest(q.shape[2], k.shape[2], is_causal, features)
    plain = features.plain and sink is None and not return_lse and bias is None and alibi_slopes is None
    if not plain and (reason := _shape_objection(q, k, v, enable_gqa)):
        raise ValueError(reason)
    cast_q, cast_k, cast_v = _autocast(q, k, v)
    features, bias, of_bias = _biased(q, k, cast_q.dtype, features, bias, alibi_slopes)
    scale_used = q.shape[-1] ** -0.5 if scale is None else scale
    call = Call(is_causal, scale_used, features, deterministic, enable_gqa, return_lse, sink is not None, of_bias)
    gradient = _needs_gradient(q, k, v, sink, bias)
    found = None
    if gradient and (forward := _forward_name(call, cast_q, cast_k, cast_v)):
        found = _with_our_backward(call, cast_q, cast_k, cast_v, sink, bias, forward)
    # What is not plain PyTorch's function does not take, and where it cannot be told to be deterministic we are.
    taken = plain or (features.plain and sink is None and not return_lse and _is_mask(bias, cast_q, is_causal))
    own = not taken or (deterministic and gradient and _shape_objection(q, k, v, enable_gqa) is None)
    if found is None and own:
        found = _without_kernel(call, cast_q, cast_k, cast_v, sink, bias)
    if found is not None:
        return (found[0], _without_signs(found[1])) if return_lse else found[0]
    # Of an empty batch, PyTorch's fused kernels may make no tensor at all.
    empty = not torch.compiler.is_compiling() and not (q.numel() and k.numel())
    with sdpa_kernel(SDPBackend.MATH) if empty else contextlib.nullcontext():
        return _pytorch(q, k, v, bias, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    window_size: tuple[int, int] = ...,
    alignment: str = ...,
    softcap: float = ...,
    deterministic: bool | None = ...,
    sink: torch.Tensor | None = ...,
    return_lse: Literal[False] = ...,
    window: tuple[int, int] | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
) -> torch.Tensor: ...


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    window_size: tuple[int, int] = ...,
    alignment: str = ...,
    softcap: float = ...,
    deterministic: bool | None = ...,
    sink: torch.Tensor | None = ...,
    return_lse: Literal[True],
    window: tuple[int, int] | None = ...,
    alibi_slopes: torch.Tensor | None = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window_size: tuple[int, int] = (UNLIMITED, UNLIMITED),
    alignment: str = BOTTOM_RIGHT,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    window: tuple[int, int] | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention within each of several sequences, which lie one after another in one tensor.

    As `attention` otherwise. Give the same tensor as both `cu_seqlens_q` and `cu_seqlens_kv` where the lengths are the
    same: nothing else tells, without waiting for the GPU, that both alignments are then one. With different lengths and
    ``top-left``, with a softcap and with ALiBi of keys past the diagonal PyTorch has no fused forward, and its
    elementary operations take its place. A bias tensor has no shape that sequences of several lengths share: there is
    none here.

    The lengths lie on the GPU, and to look at them would be to wait for it: they are checked where the tensors are on
    a CPU, and elsewhere with ``BWDTUNE_CHECK_LENGTHS=1`` in the environment, which is for debugging. It is the caller's
    part that `cu_seqlens_q` and `cu_seqlens_kv` begin with 0, never decrease and end within the tensors, and that no
    sequence is longer than `max_seqlen_q` and `max_seqlen_kv`. Where they do not, our kernels touch nothing outside of
    the tensors, but rows are left out or have gradients that mean nothing; PyTorch's promise less.

    Args:
        q: (Tq, Hq, D): the rows of all sequences.
        k: (Tkv, Hkv, D).
        v: (Tkv, Hkv, Dv).
        cu_seqlens_q: int32 (B + 1), on the device of q: where each sequence begins, and one past the end of the last.
        cu_seqlens_kv: The same for k and v.
        max_seqlen_q: Length of the longest sequence in q, or a bound on it.
        max_seqlen_kv: The same for k and v.
        is_causal: As for `attention`.
        scale: As for `attention`.
        enable_gqa: As for `attention`.
        window_size: As for `attention`.
        alignment: As for `attention`, but ``bottom-right`` by default, as of the functions that this one stands in for:
            FlashAttention's `flash_attn_varlen_func` and PyTorch's `varlen_attn`.
        softcap: As for `attention`.
        deterministic: As for `attention`.
        sink: As for `attention`.
        return_lse: As for `attention`.
        window: The former name of `window_size`.
        alibi_slopes: As for `attention`, with B the number of sequences, and Sq and Skv each sequence's own lengths.

    Returns:
        (Tq, Hq, Dv). With `return_lse` that and (Hq, Tq). Rows that belong to no sequence have values of no meaning.

    Raises:
        ValueError: The tensors are on different devices or of impossible shapes, or an argument makes no sense.
    """
    if has_torch_function((q, k, v, sink, alibi_slopes)):
        lengths = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv)
        features_given = {"window_size": _one_window(window_size, window), "alignment": alignment, "softcap": softcap}
        options: dict[str, Any] = {**features_given, "deterministic": deterministic}
        if sink is not None or return_lse:
            options.update(sink=sink, return_lse=return_lse)
        if alibi_slopes is not None:
            options["alibi_slopes"] = alibi_slopes
        arguments = (q, k, v, *lengths, is_causal, scale, enable_gqa)
        return _overridden(attention_varlen, (q, k, v, sink, alibi_slopes), *arguments, **options)
    starts = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    _same_device(q=q, k=k, v=v, **starts, **_named_others(q, sink, None, alibi_slopes))
    if not q.dim() == k.dim() == v.dim() == 3:
        raise ValueError(f"q, k and v have {q.dim()}, {k.dim()} and {v.dim()} dimensions: they must be (T, H, D)")
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    if reason := _shape_objection(q, k, v, enable_gqa):
        raise ValueError(reason)
    for name, tensor in starts.items():
        if tensor.dim() != 1 or tensor.dtype != torch.int32 or not tensor.numel():
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: it must be int32 (B + 1)")
    if cu_seqlens_q.shape != cu_seqlens_kv.shape:
        raise ValueError(f"cu_seqlens_q has {cu_seqlens_q.numel()} values and cu_seqlens_kv {cu_seqlens_kv.numel()}")
    _check_lengths("q", cu_seqlens_q, max_seqlen_q, q.shape[2])
    _check_lengths("kv", cu_seqlens_kv, max_seqlen_kv, k.shape[2])
    bottom_right = _aligned_bottom_right(alignment)
    limits = _limits(_one_window(window_size, window))
    masked = is_causal or limits != PLAIN.window
    features = Features(
        limits,
        bottom_right and masked and cu_seqlens_q is not cu_seqlens_kv,
        _cap(softcap),
        Sequences(cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv),
    )
    if alibi_slopes is not None:
        features = _with_slopes(features, alibi_slopes, cu_seqlens_q.numel() - 1, q.shape[1])
    scale_used = q.shape[-1] ** -0.5 if scale is None else scale
    call = Call(is_causal, scale_used, features, deterministic, enable_gqa, return_lse, sink is not None)
    gradient = _needs_gradient(q, k, v, sink)
    q, k, v = _autocast(q, k, v)
    found = None
    if gradient and (forward := _forward_name(call, q, k, v)):
        found = _with_our_backward(call, q, k, v, sink, None, forward)
    if found is None:
        found = _without_kernel(call, q, k, v, sink, None)
    output, lse = found
    rows = output[0].transpose(0, 1)
    return (rows, _without_signs(lse)[0]) if return_lse else rows


def _same_device(**tensors: torch.Tensor) -> None:
    if len({tensor.device for tensor in tensors.values()}) > 1:
        first, *middle, last = (f"{name} on {tensor.device}" for name, tensor in tensors.items())
        places = ", ".join([first.replace(" on ", " is on "), *middle])
        raise ValueError(f"{places} and {last}: they must be on one device")


def _overridden(function: Any, relevant: tuple[Any, ...], *arguments: Any, **options: Any) -> Any:
    """What a subclass makes of a call. PyTorch has no types for functions with overloads."""
    return handle_torch_function(function, relevant, *arguments, **options)


def _named_others(
    q: torch.Tensor, sink: torch.Tensor | None, bias: torch.Tensor | None, slopes: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Those that are given, by their arguments' names. Sinks are checked."""
    named = {}
    if sink is not None:
        if sink.shape != q.shape[1:2] or not sink.is_floating_point():
            shape = tuple(sink.shape)
            raise ValueError(
                f"sink is {sink.dtype} {shape}: it must be a score for each query head of q, {tuple(q.shape)}"
            )
        named["sink"] = sink
    if bias is not None:
        named["bias"] = bias
    if slopes is not None:
        named["alibi_slopes"] = slopes
    return named


def _broadcastable(bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bias as (B or 1, Hq or 1, Sq or 1, Skv), in the dtype in which it is taken: beside q of the given one."""
    scores = (*q.shape[:3], k.shape[2])
    if bias.dtype == torch.bool:
        raise ValueError("bias is a boolean mask, which has PyTorch's attention: give it to its function as attn_mask")
    sizes = (1,) * (len(scores) - bias.dim()) + tuple(bias.shape)
    fits = len(sizes) == len(scores) and all(a in (1, b) for a, b in zip(sizes, scores, strict=True))
    if not fits or not bias.is_floating_point():
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)}: it must be floating and broadcast to the scores, {scores}"
        )
    bias = bias.reshape(sizes) if bias.dim() < len(scores) else bias
    if sizes[3] != scores[3]:
        bias = bias.expand(*sizes[:3], scores[3])
    if not _needs_gradient(bias):  # a mask that was expanded is as one that was not
        for dim in range(3):
            bias = bias.narrow(dim, 0, 1) if bias.stride(dim) == 0 and bias.shape[dim] > 1 else bias
    if _autocasts(bias.device.type):
        bias = bias.to(_autocast_dtype(bias))
    # What has more bits than the sums that it is added to loses them there.
    wide = torch.promote_types(dtype, torch.float32)
    return bias if torch.promote_types(bias.dtype, wide) == wide else bias.to(wide)


def _biased(
    q: torch.Tensor,
    k: torch.Tensor,
    dtype: torch.dtype,
    features: Features,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None,
) -> tuple[Features, torch.Tensor | None, Bias | None]:
    """The features with ALiBi slopes, a bias as it is taken beside q of the given dtype, and what a call says of it."""
    of_bias = None
    if bias is not None:
        bias = _broadcastable(bias, q, k, dtype)
        of_bias = Bias(bias.shape, bias.dtype, _needs_gradient(bias))
    if slopes is not None:
        features = _with_slopes(features, slopes, q.shape[0], q.shape[1])
    return features, bias, of_bias


def _is_mask(bias: torch.Tensor | None, q: torch.Tensor, causal: bool) -> bool:
    """Whether PyTorch's function takes a bias as its mask: alone, and in the dtype of q."""
    return bias is not None and bias.dtype == q.dtype and not causal


def _with_slopes(features: Features, slopes: torch.Tensor, batch: int, heads: int) -> Features:
    if slopes.shape not in ((heads,), (batch, heads)) or not slopes.is_floating_point():
        raise ValueError(
            f"alibi_slopes is {slopes.dtype} {tuple(slopes.shape)}: it must be a slope for each query head, "
            f"({heads}) or ({batch}, {heads})"
        )
    if _needs_gradient(slopes):
        raise ValueError("alibi_slopes requires a gradient, and has none: detach it, or give a bias made of it")
    slopes = slopes.detach().to(torch.float32).contiguous()
    return Features(features.window, features.bottom_right, features.softcap, features.sequences, slopes)


def _without_signs(lse: torch.Tensor) -> torch.Tensor:
    """Minus infinity where a query sees no key: of PyTorch's forwards, some have it with a plus."""
    return lse.masked_fill(lse == math.inf, -math.inf)


def _aligned_bottom_right(alignment: str) -> bool:
    if alignment not in (TOP_LEFT, BOTTOM_RIGHT):
        raise ValueError(f"alignment is {alignment!r}: it must be {TOP_LEFT!r} or {BOTTOM_RIGHT!r}")
    return alignment == BOTTOM_RIGHT


def _one_window(window_size: tuple[int, int], window: tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return window_size
    if tuple(window_size) != PLAIN.window:
        raise ValueError(f"window_size is {window_size} and window, its former name, {window}: give one of them")
    return window


def _limits(window: tuple[int, int]) -> tuple[int, int]:
    if len(window) != 2 or any(limit < UNLIMITED or limit % 1 for limit in window):
        raise ValueError(f"window_size is {window}: it must be two numbers of keys, or -1 for all of them")
    return window[0], window[1]


def _features(window: tuple[int, int], alignment: str, softcap: float) -> Features:
    limits, bottom_right, cap = _limits(window), _aligned_bottom_right(alignment), _cap(softcap)
    return Features(limits, bottom_right, cap) if bottom_right or cap or limits != PLAIN.window else PLAIN


def _check_lengths(name: str, starts: torch.Tensor, longest: int, rows: int) -> None:
    """Refuses lengths that do not fit, where looking at them is no wait for a GPU, or that wait is asked for."""
    if torch.compiler.is_compiling():
        return
    if starts.device.type != "cpu":
        asked = os.environ.get(CHECK_LENGTHS, "0") not in ("", "0")
        if not asked or (starts.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        starts = starts.cpu()
    lengths = starts.diff()
    if starts[0] != 0 or (lengths < 0).any() or starts[-1] > rows:
        raise ValueError(f"cu_seqlens_{name} must begin with 0, never decrease and end within the {rows} rows")
    if lengths.numel() and (length := int(lengths.max())) > longest:
        raise ValueError(f"max_seqlen_{name} is {longest}, and a sequence has {length} rows")


def _cap(softcap: float) -> float:
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap is {softcap}: it must be positive, or 0 for none")
    return softcap


def _simplest(seqlen_q: int, seqlen_kv: int, causal: bool, features: Features) -> tuple[bool, Features]:
    """The same mask in its simplest terms, so that problems that are the same have the same winner."""
    left, right = features.limits(causal)
    low, high = visible_range(seqlen_q, seqlen_kv, left, right, features.bottom_right)
    if low <= 1 - seqlen_q:  # the last query sees the first key
        left = UNLIMITED
    if high >= seqlen_kv - 1:  # the first query sees the last key
        right = UNLIMITED
    causal = right == 0
    window = (left, UNLIMITED if causal else right)
    masked = causal or window != PLAIN.window
    bottom_right = features.bottom_right and masked and seqlen_q != seqlen_kv
    if window == features.window and not features.bottom_right:
        return causal, features
    # Not by `replace`, which torch.compile knows of late.
    return causal, Features(window, bottom_right, features.softcap, features.sequences)


def _needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if not _autocasts(tensors[0].device.type):
        return tensors
    return tuple(tensor.to(_autocast_dtype(tensor)) for tensor in tensors)


def _autocasts(device: str) -> bool:
    """Whether to cast for autocast: elsewhere PyTorch's own function is called, which casts by itself."""
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What autocast makes of a tensor where PyTorch's function is called."""
    device = tensor.device.type
    castable = _autocasts(device) and tensor.is_floating_point() and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(device) if castable else tensor.dtype


def problem_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window_size: tuple[int, int] = (UNLIMITED, UNLIMITED),
    alignment: str = TOP_LEFT,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    sink: torch.Tensor | None = None,
    return_lse: bool = False,
    window: tuple[int, int] | None = None,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> Problem | str:
    """The problem that a call of `attention` has a kernel compute, or why no kernel takes its input.

    The arguments are those of `attention`.
    """
    _same_device(q=q, k=k, v=v, **_named_others(q, sink, bias, alibi_slopes))
    features = _features(_one_window(window_size, window), alignment, softcap)
    if q.dim() == k.dim() == 4:
        is_causal, features = _simplest(q.shape[2], k.shape[2], is_causal, features)
    if (bias is not None or alibi_slopes is not None) and (reason := _shape_objection(q, k, v, enable_gqa)):
        raise ValueError(reason)
    q, k, v = _autocast(q, k, v)
    features, bias, of_bias = _biased(q, k, q.dtype, features, bias, alibi_slopes)
    scale_used = q.shape[-1] ** -0.5 if scale is None else scale
    call = Call(is_causal, scale_used, features, deterministic, enable_gqa, return_lse, sink is not None, of_bias)
    try:
        return _admission(call, q, k, v)[1] or call.problem(q, k, v)
    except UsageError as error:  # a size that no problem can have
        return str(error)


def _forward_name(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """The forward where a kernel may be the backward; None where no kernel takes this input: the log says why, once."""
    name, reason = _admission(call, q, k, v)
    if reason and not torch.compiler.is_compiling():
        counters.fell_back(Cause.INPUT)
        notices.warn_once(reason, f"attention has PyTorch's backward: {reason}")
    return name


def _admission(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[str | None, str | None]:
    """The forward's name, or why no kernel takes this input."""
    if reason := _objection(call, q, k, v):
        return None, reason
    name = call.forward_name(q, k, v, kernel=True)
    if call.features.plain and not call.bias and name == forwards.MATH:
        return None, "PyTorch's fused attention, whose forward is used, is turned off or does not take this input"
    return name, None


_Results = tuple[torch.Tensor, torch.Tensor]
"""The output and the log-sum-exp."""


def _with_our_backward(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    forward: str,
) -> _Results | None:
    """Attention with a kernel's backward; None where there is no kernel, which dispatch has said.

    The operator asks dispatch by itself, in the backward; where it finds no kernel there, PyTorch's backward of the
    same forward serves.
    """
    by_operator = max(q.shape[:2]) <= forwards.LARGEST_GRID and operators.ready()
    # The operator has no backward of PyTorch's for these: it is asked where there is a kernel.
    compiling, of_kernels = torch.compiler.is_compiling(), forward in (forwards.FLASH_3, forwards.ALIBI)
    if by_operator and (compiling or not of_kernels):
        return operators.attention(call, q, k, v, sink, bias, forward)
    if compiling:
        return None
    try:
        capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
        choice = dispatch.choose(call.problem(q, k, v), q.device.index or 0, capturing=capturing)
    except UsageError as error:  # a size that no problem can have
        counters.fell_back(Cause.INPUT)
        notices.warn_once(str(error), f"attention has PyTorch's backward: {error}")
        return None
    if choice.kernel is None:
        counters.fell_back(choice.cause)
        return None
    if by_operator:
        return operators.attention(call, q, k, v, sink, bias, forward)
    return autograd.run(call, q, k, v, sink, bias, forward, choice.kernel)


def _without_kernel(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> _Results:
    """PyTorch's forward and backward of what its function does not have."""
    if torch._C._are_functorch_transforms_active():
        return math_attention.differentiable(q, k, v, call.causal, call.scale, call.features, sink, bias)
    return autograd.run(call, q, k, v, sink, bias, call.forward_name(q, k, v, kernel=False), None)


def unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why no kernel takes such tensors, whatever their shapes: a line for people; None where one may.

    Under autocast their dtypes are those that they will be cast to.
    """
    if not {type(q), type(k), type(v)} <= _TENSORS:
        return "a tensor is of a subclass of torch.Tensor"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is active"
    if q.device.type not in _DEVICE_TYPES:
        return f"the tensors are on {q.device.type}"
    dtypes = [q.dtype, k.dtype, v.dtype]
    if _autocasts(q.device.type):
        dtypes = [_autocast_dtype(tensor) for tensor in (q, k, v)]
    if dtypes[0] not in DTYPE_NAMES or not dtypes[0] == dtypes[1] == dtypes[2]:
        return f"the dtypes are {dtypes[0]}, {dtypes[1]} and {dtypes[2]}: kernels are for bfloat16 and float16"
    return None


def _objection(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why no kernel takes this input, whatever is stored."""
    if reason := unsupported(q, k, v):
        return reason
    if reason := _shape_objection(q, k, v, call.enable_gqa):
        return reason
    if not 0 < call.scale < math.inf:  # a masked score is minus infinity before it is scaled
        return f"the scale is {call.scale}: kernels are for positive ones"
    sequences = call.features.sequences
    if not (q.numel() and k.numel() and v.numel()) or (sequences and not min(sequences.seqlen_q, sequences.seqlen_kv)):
        return "the input is empty"
    return None


def _shape_objection(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> str | None:
    """Why these are not q, k and v of one attention; (B, H, S, D)."""
    if not q.dim() == k.dim() == v.dim() == 4:
        return f"the tensors have {q.dim()}, {k.dim()} and {v.dim()} dimensions, not four"
    if k.shape[:3] != v.shape[:3] or (k.shape[0], k.shape[3]) != (q.shape[0], q.shape[3]):
        return f"the shapes are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_q != heads_kv and (not enable_gqa or not heads_kv or heads_q % heads_kv):
        return f"{heads_q} query heads do not go with {heads_kv} key and value heads"
    return None
