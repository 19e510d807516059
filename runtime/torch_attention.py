"""PyTorch's own attention: the forward that yields the log-sum-exp, and the backward that belongs to it."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..gen.problem import UNLIMITED, visible_range
from . import forwards, math_attention, row_features
from .features import PLAIN, Features
from .forwards import flash_3, linear_bias

_aten = torch.ops.aten

_ALIGNMENT_BYTES = 16  # of the vectors that fused kernels load

_BIAS_PADDING = 16  # elements that a row of a bias is padded to where the memory-efficient kernel would not read it

Gradients = tuple[torch.Tensor, ...]
"""dq, dk and dv, and where it is asked for that of a bias."""


@dataclass(frozen=True, eq=False)
class Forward:
    """The result of one of PyTorch's forwards.

    Attributes:
        output: (B, Hq, Sq, Dv), in the dtype of q.
        lse: (B, Hq, Sq), fp32, contiguous, natural logarithm; infinite where a row sees no key.
        saved: The tensors that `gradients` needs besides dout: q, k, v, `output`, the log-sum-exp as this forward has
            it, a bias if there is one, and more. They are apart from it, so that autograd keeps them its own way.
        gradients: PyTorch's backward of this forward: dout, *saved -> dq, dk, dv, and with `bias_grad` that of the
            bias. Asynchronous; may be called again.
    """

    output: torch.Tensor
    lse: torch.Tensor
    saved: tuple[Any, ...]
    gradients: Callable[..., Gradients]

    def backward(self, dout: torch.Tensor, dlse: torch.Tensor | None = None) -> Gradients:
        """What `gradients` gives, of an output and perhaps of a log-sum-exp with gradients."""
        return row_features.gradients(self.gradients, dout, dlse, *self.saved)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    features: Features = PLAIN,
    name: str | None = None,
    sink: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_grad: bool = False,
) -> Forward:
    """A forward that yields the log-sum-exp for this mask.

    The fused ones are given tensors that they can read: see `readable`. None has sinks: output and log-sum-exp are
    corrected for them, in one more pass (`row_features.add_sink`).

    Args:
        q: (B, Hq, Sq, D), bf16 or fp16 for a fused one.
        k: (B, Hkv, Skv, D); Hkv divides Hq.
        v: (B, Hkv, Skv, Dv).
        causal: Whether query i sees the keys 0..i only, or as `features` aligns it.
        scale: The softmax scale.
        features: The rest.
        name: Of `forwards.choose`; None for that of `forwards.by_mask`.
        sink: (Hq), a score of each query head in all of its softmaxes.
        bias: (B or 1, Hq or 1, Sq or 1, Skv), added to the scores.
        bias_grad: Whether its gradient is wanted.
    """
    name = name or forwards.by_mask(q, k, v, causal, scale, features, None if bias is None else bias.dtype)
    if name == forwards.MATH:
        result = _math(q, k, v, causal, scale, features, bias, bias_grad)
    elif name == forwards.ALIBI:
        result = _with_columns(q, k, v, causal, scale, features)
    elif bias is not None:
        result = _efficient_biased(readable(q), readable(k), readable(v), bias, causal, scale, features, bias_grad)
        found = result.gradients
        result = replace(result, gradients=lambda dout, *saved: found(readable(dout), *saved))
    else:
        result = _fused(name, readable(q), readable(k), readable(v), causal, scale, features)
        found = result.gradients  # apart from the result: what that saved must not be held here
        result = replace(result, gradients=lambda dout, *saved: found(readable(dout), *saved))
    if sink is None:
        return result
    lse = row_features.rows_of(result.saved[4], q)
    row_features.add_sink(result.saved[3], lse, sink)
    return replace(result, lse=lse.contiguous())


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it where it lies as no fused kernel reads it: they load 16 bytes at a time along D.

    PyTorch's dispatcher refuses some of these layouts before a fused operator sees them; the operators do not.
    """
    if torch.compiler.is_compiling():  # there is no storage yet; PyTorch's compiler aligns what it hands on
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor if _is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _is_aligned(tensor: torch.Tensor) -> bool:
    bytes_each, strides, shape = tensor.element_size(), tensor.stride(), tensor.shape
    aligned = tensor.data_ptr() % _ALIGNMENT_BYTES == 0 and (strides[-1] == 1 or shape[-1] <= 1)
    for dim in range(len(shape) - 1):
        aligned = aligned and (shape[dim] <= 1 or strides[dim] * bytes_each % _ALIGNMENT_BYTES == 0)
    return aligned


def _fused(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, features: Features
) -> Forward:
    if q.shape[3] != v.shape[3] and name in forwards.OF_ONE_HEAD_DIM:
        return _of_one_head_dim(name, q, k, v, causal, scale, features)
    if name == forwards.FOR_CPU:
        return _for_cpu(q, k, v, causal, scale)
    for dim in (0, 1):
        if q.shape[dim] > forwards.LARGEST_GRID:
            return _in_parts(name, q, k, v, causal, scale, features, dim)
    if name == forwards.CUDNN:
        return cudnn(q, k, v, causal, scale)
    if name == forwards.EFFICIENT:
        return _efficient(q, k, v, causal, scale)
    left, right = features.limits(causal)
    if name == forwards.FLASH_3:
        return _flash_3(q, k, v, left, right, scale, features)
    if name == forwards.FLASH_WINDOW:
        return _flash_band(q, k, v, left, right, features.bottom_right, scale)
    if features.sequences:
        return _flash_packed(q, k, v, left, right, scale, features)
    return flash(q, k, v, causal, scale)


def _of_one_head_dim(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, features: Features
) -> Forward:
    """`_fused` where v has another head_dim, by a forward that takes one for all: with columns of zeros."""
    most = max(q.shape[3], v.shape[3])

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, most - tensor.shape[3]))

    result = _fused(name, wide(q), wide(k), wide(v), causal, scale, features)
    backward = result.gradients  # apart from the result, as in `forward`

    def gradients(dout: torch.Tensor, *saved: Any) -> Gradients:
        q, k, v, output, *rest = saved
        found = backward(wide(dout), wide(q), wide(k), wide(v), wide(output), *rest)
        return tuple(gradient[..., : one.shape[3]] for gradient, one in zip(found, (q, k, v), strict=True))

    output = result.output[..., : v.shape[3]]
    return Forward(output, result.lse, (q, k, v, output, *result.saved[4:]), gradients)


def _in_parts(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    features: Features,
    dim: int,
) -> Forward:
    """`_fused`, with the batch or the heads in parts that PyTorch's kernels take."""
    parts = -(-q.shape[dim] // forwards.LARGEST_GRID)
    size = -(-k.shape[dim] // parts)
    rows = size * (q.shape[dim] // k.shape[dim])
    # The query heads of one key head are too many, or those of packed sequences are.
    if rows == q.shape[dim] or features.sequences:
        return _math(q, k, v, causal, scale, features)

    def split(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return list(zip(q.split(rows, dim), k.split(size, dim), v.split(size, dim), strict=True))

    results = [_fused(name, *part, causal, scale, features) for part in split(q, k, v)]
    # Apart from the results: what they saved must not be held here.
    backwards = [(result.gradients, len(result.saved) - 5) for result in results]

    def gradients(dout: torch.Tensor, *saved: Any) -> Gradients:
        q, k, v, output, lse, *rest = saved
        others = iter(rest)
        by_rows = zip(*(tensor.split(rows, dim) for tensor in (dout, output, lse)), strict=True)
        found = [
            backward(dout_part, *part, output_part, lse_part, *itertools.islice(others, count))
            for (backward, count), (dout_part, output_part, lse_part), part in zip(
                backwards, by_rows, split(q, k, v), strict=True
            )
        ]
        dq, dk, dv = (torch.cat(gradients, dim) for gradients in zip(*found, strict=True))
        return dq, dk, dv

    output, lse, yielded = (
        torch.cat(parts, dim)
        for parts in zip(*((result.output, result.lse, result.saved[4]) for result in results), strict=True)
    )
    saved = (q, k, v, output, yielded, *(tensor for result in results for tensor in result.saved[5:]))
    return Forward(output, lse, saved, gradients)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Forward:
    """FlashAttention on CUDA. See `forward` for the arguments.

    Raises:
        ValueError: A causal mask with Sq != Skv, which this one aligns bottom-right.
    """
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError("PyTorch's flash attention aligns a causal mask bottom-right where Sq and Skv differ")
    output, lse, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )

    def gradients(dout: torch.Tensor, *saved: Any) -> Gradients:
        *inputs, seed, offset = saved
        found: Gradients = _aten._scaled_dot_product_flash_attention_backward(
            dout, *inputs, max_q, max_k, 0.0, causal, seed, offset, scale=scale
        )
        return found

    saved = (q, k, v, output, lse, cum_seq_q, cum_seq_k, seed, offset)
    return Forward(output, lse.contiguous(), saved, gradients)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Forward:
    """cuDNN's attention. See `forward` for the arguments.

    Raises:
        RuntimeError: cuDNN is missing, too old or has no plan for this problem.
    """
    output, lse, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )

    def gradients(dout: torch.Tensor, *saved: Any) -> Gradients:
        *inputs, cum_seq_q, cum_seq_k = saved
        found: Gradients = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, *inputs, None, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, causal, scale=scale
        )
        return found

    saved = (q, k, v, output, lse, seed, offset, cum_seq_q, cum_seq_k)
    return Forward(output, lse.reshape(q.shape[:3]).contiguous(), saved, gradients)


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Forward:
    output, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
        q, _expand_heads(q, k), _expand_heads(q, v), None, True, 0.0, causal, scale=scale
    )

    def gradients(dout: torch.Tensor, *saved: Any) -> Gradients:
        q, k, v, *rest = saved
        keys, values = _expand_heads(q, k), _expand_heads(q, v)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout, q, keys, values, None, *rest, 0.0, [True, True, True, False], causal, scale=scale
        )
        return dq, _sum_heads(dk, k), _sum_heads(dv, v)

    # The kernel pads its rows to a multiple of 32.
    padded = lse[..., : q.shape[2]].contiguous()
    return Forward(output, padded, (q, k, v, output, lse, seed, offset), gradients)


def _for_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Forward:
    output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, _expand_heads(q, k), _expand_heads(q, v), 0.0, causal, scale=scale
    )

    def gradients(dout: torch.Tensor, *saved: Any) -> Gradients:
        q, k, v, *rest = saved
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, _expand_heads(q, k), _expand_heads(q, v), *rest, 0.0, causal, scale=scale
        )
        return dq, _sum_heads(dk, k), _sum_heads(dv, v)

    return Forward(output, lse.contiguous(), (q, k, v, output, lse), gradients)


def _with_columns(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, features: Features
) -> Forward:
    """ALiBi by a forward that has none: see `linear_bias`."""
    head_dim = q.shape[3]
    plain = Features(features.window, features.bottom_right, 0.0, features.sequences)
    wide_q, wide_k, terms = linear_bias.extended(q, k, scale, features)
    name = forwards.by_mask(wide_q, wide_k, v, causal, scale, plain)
    wide = _fused(name, wide_q, wide_k, v, causal, scale, plain)
    backward, packed = wide.gradients, wide.saved[4].dim() == 2  # apart from the result, as in `forward`

    def gradients(dout: torch.Tensor, *saved: Any) -> Gradients:
        q, k, v, output, lse, *rest = saved
        wide_q, wide_k, terms = linear_bias.extended(q, k, scale, features)
        wide_lse = lse - terms
        dq, dk, dv = backward(dout, wide_q, wide_k, v, output, wide_lse[0] if packed else wide_lse, *rest)
        return dq[..., :head_dim], dk[..., :head_dim], dv

    output, lse = wide.output, wide.lse + terms
    return Forward(output, lse, (q, k, v, output, lse, *wide.saved[5:]), gradients)


def _efficient_biased(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    causal: bool,
    scale: float,
    features: Features,
    bias_grad: bool,
) -> Forward:
    """Memory-efficient attention with a bias, of any mask: what that kernel has not is made part of the bias."""
    own = _is_plainly_causal(q, k, causal, features)
    masked = _masked_bias(bias, q, k, causal, features)
    output, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
        q,
        _expand_heads(q, k),
        _expand_heads(q, v),
        _expanded_bias(masked, q),
        True,
        0.0,
        own,
        scale=scale,
    )

    def gradients(dout: torch.Tensor, *saved: Any) -> Gradients:
        q, k, v, output, lse, bias, seed, offset = saved
        given = efficient_bias(bias, q, k, causal, features)
        wanted = [True, True, True, bias_grad]
        dq, dk, dv, ds = _aten._scaled_dot_product_efficient_attention_backward(
            dout,
            q,
            _expand_heads(q, k),
            _expand_heads(q, v),
            given,
            output,
            lse,
            seed,
            offset,
            0.0,
            wanted,
            own,
            scale=scale,
        )
        found = (dq, _sum_heads(dk, k), _sum_heads(dv, v))
        if not bias_grad:
            return found
        if own:  # it leaves out what no query sees
            ds = ds.masked_fill(_unseen(q, k, causal, features), 0.0)
        summed = [dim for dim in range(3) if bias.shape[dim] == 1 and ds.shape[dim] != 1]
        return (*found, ds.sum(summed, keepdim=True) if summed else ds)

    rows = row_features.rows_of(lse, q)
    # The kernel has 0 for a row that sees no key; its backward takes infinity as well.
    rows.masked_fill_(_sees_nothing(masked, q, own), math.inf)
    return Forward(output, rows.contiguous(), (q, k, v, output, lse, bias, seed, offset), gradients)


def _sees_nothing(bias: torch.Tensor, q: torch.Tensor, causal: bool) -> torch.Tensor:
    """(B or 1, Hq or 1, Sq or 1), true where a bias leaves a row of q no key, or none at or before the diagonal."""
    if not causal:
        return bias.amax(-1) == -math.inf
    sees, first = (bias != -math.inf).byte().max(-1)
    return (sees == 0) | (first > torch.arange(q.shape[2], device=q.device))


def efficient_bias(
    bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, causal: bool, features: Features
) -> torch.Tensor:
    """A bias as the memory-efficient kernel reads it: (B, Hq, Sq, Skv), a view with aligned rows, and with the mask in
    it unless that is PyTorch's causal one.

    Args:
        bias: (B or 1, Hq or 1, Sq or 1, Skv), in the dtype of q.
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Skv, D).
        causal: See `forward`.
        features: The mask, without a cap.
    """
    return _expanded_bias(_masked_bias(bias, q, k, causal, features), q)


def _masked_bias(
    bias: torch.Tensor, q: torch.Tensor, k: torch.Tensor, causal: bool, features: Features
) -> torch.Tensor:
    if features.limits(causal) != PLAIN.window and not _is_plainly_causal(q, k, causal, features):
        return bias.masked_fill(_unseen(q, k, causal, features), -math.inf)
    return bias


def _expanded_bias(bias: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    keys = bias.shape[3]
    compiling = torch.compiler.is_compiling()
    if not (bias.stride(3) == 1 and keys % _BIAS_PADDING == 0 if compiling else _is_aligned(bias)):
        bias = torch.nn.functional.pad(bias, (0, -keys % _BIAS_PADDING)).contiguous()[..., :keys]
    return bias.expand(*q.shape[:3], keys)


def _is_plainly_causal(q: torch.Tensor, k: torch.Tensor, causal: bool, features: Features) -> bool:
    aligned = not features.bottom_right or q.shape[2] == k.shape[2]
    return features.limits(causal) == (UNLIMITED, 0) and aligned


def _unseen(q: torch.Tensor, k: torch.Tensor, causal: bool, features: Features) -> torch.Tensor:
    """(Sq, Skv), true where a query does not see a key."""
    rows, keys = q.shape[2], k.shape[2]
    low, high = visible_range(rows, keys, *features.limits(causal), features.bottom_right)
    places = torch.arange(keys, device=q.device) - torch.arange(rows, device=q.device)[:, None]
    return (places < low) | (places > high)


def _math(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    features: Features,
    bias: torch.Tensor | None = None,
    bias_grad: bool = False,
) -> Forward:
    output, lse = math_attention.forward(q, k, v, causal, scale, features, bias)
    saved = (q, k, v, output, lse) if bias is None else (q, k, v, output, lse, bias)
    return Forward(output, lse, saved, elementary_backward(causal, scale, features, bias_grad))


def elementary_backward(
    causal: bool, scale: float, features: Features, bias_grad: bool = False
) -> Callable[..., Gradients]:
    """`Forward.gradients` by elementary operations: of any forward that saves q, k, v, the output, the log-sum-exp as
    `Forward.lse` has it, and perhaps a bias."""

    def gradients(dout: torch.Tensor, *saved: torch.Tensor) -> Gradients:
        q, k, v, output, lse, *biases = saved
        bias = biases[0] if biases else None
        return math_attention.gradients(dout, q, k, v, output, lse, causal, scale, features, bias, bias_grad)

    return gradients


def _flash_band(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int, right: int, bottom_right: bool, scale: float
) -> Forward:
    """FlashAttention with a window, which it aligns bottom-right; of no more queries than keys."""
    rows, keys = q.shape[2], k.shape[2]
    if not bottom_right:
        keys, left, right = as_bottom_right(rows, keys, left, right)
    # Its tensors are (B, S, H, D); with limits given, its `is_causal` only repeats that of the right one.
    seen = [tensor.transpose(1, 2) for tensor in (q, k[:, :, :keys], v[:, :, :keys])]
    output, lse, state, unused, _ = _aten._flash_attention_forward(
        *seen, None, None, rows, keys, 0.0, False, False, scale=scale, window_size_left=left, window_size_right=right
    )

    def gradients(dout: torch.Tensor, *saved: Any) -> Gradients:
        q, k, v, output, lse, state, unused = saved
        seen = [tensor.transpose(1, 2) for tensor in (q, k[:, :, :keys], v[:, :, :keys])]
        found = _aten._flash_attention_backward(
            dout.transpose(1, 2),
            *seen,
            output.transpose(1, 2),
            lse,
            None,
            None,
            rows,
            keys,
            0.0,
            False,
            state,
            unused,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        dq, dk, dv = (gradient.transpose(1, 2) for gradient in found)
        return dq, _padded(dk, k.shape[2]), _padded(dv, v.shape[2])

    output = output.transpose(1, 2)
    return Forward(output, lse.contiguous(), (q, k, v, output, lse, state, unused), gradients)


def as_bottom_right(seqlen_q: int, seqlen_kv: int, left: int, right: int) -> tuple[int, int, int]:
    """A window that is aligned top-left, as one that is aligned bottom-right: of fewer keys.

    Keys past the last query's window are not seen: without them, the two alignments differ by a shift of the limits
    that leaves none of them negative.

    Args:
        seqlen_q: Sq.
        seqlen_kv: Skv, no less.
        left: Keys before the diagonal that are seen, or -1 for all.
        right: Keys past it.

    Returns:
        The number of keys that count, and the limits.
    """
    keys = seqlen_kv if right == UNLIMITED else min(seqlen_kv, seqlen_q + right)
    diagonal = keys - seqlen_q
    return (
        keys,
        UNLIMITED if left == UNLIMITED else left + diagonal,
        UNLIMITED if right == UNLIMITED else right - diagonal,
    )


def _flash_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int, right: int, scale: float, features: Features
) -> Forward:
    """FlashAttention on packed sequences."""
    sequences = features.sequences
    assert sequences
    sizes = (sequences.cu_seqlens_q, sequences.cu_seqlens_kv, sequences.seqlen_q, sequences.seqlen_kv)

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[0].transpose(0, 1)

    output, lse, state, unused, _ = _aten._flash_attention_forward(
        packed(q),
        packed(k),
        packed(v),
        *sizes,
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )

    def gradients(dout: torch.Tensor, *saved: Any) -> Gradients:
        q, k, v, output, lse, state, unused = saved
        found = _aten._flash_attention_backward(
            packed(dout),
            packed(q),
            packed(k),
            packed(v),
            packed(output),
            lse,
            *sizes,
            0.0,
            False,
            state,
            unused,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        dq, dk, dv = (gradient.transpose(0, 1)[None] for gradient in found)
        return dq, dk, dv

    whole = output.transpose(0, 1)[None]
    return Forward(whole, lse[None].contiguous(), (q, k, v, whole, lse, state, unused), gradients)


def _flash_3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int, right: int, scale: float, features: Features
) -> Forward:
    """FlashAttention-3's forward; without a backward of its own, since it is taken where a kernel of ours is that."""
    keys = k.shape[2]
    seen_left, seen_right = left, right
    if not features.sequences and not features.bottom_right:
        keys, seen_left, seen_right = as_bottom_right(q.shape[2], keys, left, right)
    output, lse = flash_3.forward(q, k[:, :, :keys], v[:, :, :keys], seen_left, seen_right, scale, features)
    limits = replace(features, window=(left, right))
    return Forward(output, lse.contiguous(), (q, k, v, output, lse), elementary_backward(False, scale, limits))


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """PyTorch's deterministic mode, for the time of a ``with`` block."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=all(before))
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """(B, H, S, D) with more rows, of zeros."""
    missing = length - tensor.shape[2]
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor


def _expand_heads(q: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    group = q.shape[1] // tensor.shape[1]
    return tensor if group == 1 else tensor.repeat_interleave(group, 1)


def _sum_heads(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    group = gradient.shape[1] // tensor.shape[1]
    return gradient if group == 1 else gradient.unflatten(1, (tensor.shape[1], group)).sum(2)
