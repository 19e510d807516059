"""Attention in PyTorch's elementary operations: for what none of its fused kernels takes.

A block of rows of the score matrix at a time in fp32, so memory stays bounded, but all of it: tens of times slower than
a fused kernel. What multiplies the rounded inputs is rounded like them, as tensor cores would have it, so that the
errors are a fused kernel's.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ..gen.problem import visible_range
from .features import Features

_BLOCK_ELEMENTS = 2**25  # of the score matrix, over all heads

LARGEST_SCORE = 1e30
"""Where all scores of a row are below minus this one, as a bias of `torch.finfo(dtype).min` makes them, the row counts
as one that sees no key. Such a score leaves no digits for what is added to it, the log-sum-exp included."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _without_autocast(function: _Function) -> _Function:
    """Autocast would round the scores to 16 bits: what is computed in fp32 here is to stay so."""

    @functools.wraps(function)
    def wrapped(first: torch.Tensor, *others: Any, **options: Any) -> Any:
        device = first.device.type
        casts = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if casts else contextlib.nullcontext():
            return function(first, *others, **options)

    return wrapped  # type: ignore[return-value]


@_without_autocast
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    features: Features,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp; of a row that sees no key, 0 and -inf.

    Args:
        q: (B, Hq, Sq, D), of any floating dtype and on any device.
        k: (B, Hkv, Skv, D); Hkv divides Hq.
        v: (B, Hkv, Skv, Dv).
        causal: Whether a query sees no key past its diagonal.
        scale: The softmax scale.
        features: The rest.
        bias: (B or 1, Hq or 1, Sq or 1, Skv), added to the scores; not with packed sequences.

    Returns:
        (B, Hq, Sq, Dv) in the dtype of q, and (B, Hq, Sq) in fp32 (fp64 for fp64).
    """
    wide = _wide(q)
    output = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
    for block in _blocks(q, k, causal, features):
        s, _ = block.scores(q, k, scale, features, bias)
        block_lse = s.logsumexp(-1)
        block_lse = block_lse.masked_fill(block_lse < -LARGEST_SCORE, -math.inf)
        p = _probabilities(s, block_lse)
        output[:, :, block.rows] = (p @ block.keys_of(v)).flatten(1, 2).to(q.dtype)
        lse[:, :, block.rows] = block_lse.flatten(1, 2)
    return output, lse


@_without_autocast
def gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
    features: Features,
    bias: torch.Tensor | None = None,
    bias_grad: bool = False,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv, and with `bias_grad` that of the bias, of a forward that gave `output` and `lse`.

    See `forward` for the other arguments.
    """
    wide = _wide(q)
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros(tensor.shape, dtype=wide, device=tensor.device) for tensor in (k, v))
    dbias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and bias_grad else None
    for block in _blocks(q, k, causal, features):
        s, derivative = block.scores(q, k, scale, features, bias)
        queries, grads, outputs = (block.rows_of(tensor) for tensor in (q, dout, output))
        p = _probabilities(s, block.by_group(lse[:, :, block.rows]))
        ds = p * (grads @ block.keys_of(v).mT - (grads * outputs).sum(-1, keepdim=True))
        if dbias is not None:
            block.add_to_bias(dbias, ds)
        if derivative is not None:
            ds = ds * derivative
        p, ds = (tensor.to(q.dtype).to(wide) for tensor in (p, ds))
        dq[:, :, block.rows] = (ds @ block.keys_of(k) * scale).flatten(1, 2).to(q.dtype)
        dk[:, :, block.keys] += (ds.mT @ queries).sum(2) * scale
        dv[:, :, block.keys] += (p.mT @ grads).sum(2)
    found = (dq, dk.to(k.dtype), dv.to(v.dtype))
    return found if bias is None or dbias is None else (*found, dbias.to(bias.dtype))


@_without_autocast
def differentiable(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    features: Features,
    sink: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of operations that `torch.func` transforms and autograd differentiates, as often as one likes.

    See `forward` for the arguments. Nothing is made anew in the backward: the probabilities are kept.

    Args:
        sink: (Hq), a score of each query head in all of its softmaxes.
    """
    wide, at = _wide(q), 0
    unseen = torch.full(q.shape[1:2], -math.inf, dtype=wide, device=q.device) if sink is None else sink.to(wide)
    outputs, lses = [], []

    def leave_out(end: int) -> None:
        """Rows up to there see no key."""
        outputs.append(q.new_zeros(*q.shape[:2], end - at, v.shape[3]))
        lses.append(unseen[:, None].expand(q.shape[0], -1, end - at))

    for block in _blocks(q, k, causal, features):
        leave_out(block.rows.start)
        s, _ = block.scores(q, k, scale, features, bias)
        if sink is not None:
            s = torch.cat([s, block.by_group(unseen[None])[..., None, None].expand(*s.shape[:-1], 1)], -1)
        seen = s > -LARGEST_SCORE
        # Of a row that sees no key, a softmax of nothing but infinities would be no number.
        s = s.masked_fill(~seen, torch.finfo(s.dtype).min)
        p = (s.softmax(-1) * seen)[..., : block.keys.stop - block.keys.start]
        outputs.append((p @ block.keys_of(v)).flatten(1, 2).to(q.dtype))
        lses.append(s.logsumexp(-1).masked_fill(~seen.any(-1), -math.inf).flatten(1, 2))
        at = block.rows.stop
    leave_out(q.shape[2])
    return torch.cat(outputs, 2), torch.cat(lses, 2)


class _Block:
    """Some rows of q of one sequence (or of each of a batch), and the keys of that sequence."""

    def __init__(
        self,
        rows: slice,
        first_row: int,
        keys: slice,
        limits: tuple[int, int],
        heads_kv: int,
        diagonal: int,
        slopes: torch.Tensor | None,
    ) -> None:
        self.rows, self.keys = rows, keys
        self._first_row, self._band, self._heads_kv = first_row, limits, heads_kv
        self._diagonal, self._slopes = diagonal, slopes

    def by_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """(B, Hq, ...) as (B, Hkv, Hq / Hkv, ...)."""
        return tensor.unflatten(1, (self._heads_kv, -1))

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.by_group(tensor[:, :, self.rows].to(_wide(tensor)))

    def keys_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:, :, None, self.keys].to(_wide(tensor))

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, scale: float, features: Features, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The masked scores (B, Hkv, Hq / Hkv, rows, keys), and where they are capped the cap's derivative."""
        s, derivative = self.rows_of(q) @ self.keys_of(k).mT * scale, None
        if softcap := features.softcap:
            capped = torch.tanh(s / softcap)
            s, derivative = capped * softcap, 1 - capped.square()
        low, high = self._band
        rows = self._first_row + torch.arange(s.shape[-2], device=q.device)[:, None]
        keys = torch.arange(s.shape[-1], device=q.device)
        if bias is not None:
            of_rows = bias[:, :, self._rows_of_bias(bias)].to(s.dtype)
            s = s + (of_rows[:, :, None] if bias.shape[1] == 1 else self.by_group(of_rows))
        if self._slopes is not None:
            s = s - self.by_group(self._slopes)[..., None, None] * (rows + self._diagonal - keys).abs()
        return s.masked_fill((keys < rows + low) | (keys > rows + high), -math.inf), derivative

    def add_to_bias(self, dbias: torch.Tensor, ds: torch.Tensor) -> None:
        """Adds these rows' part to the gradient of a bias: ds, summed over what the bias is broadcast over."""
        rows, by_head = self._rows_of_bias(dbias), ds.flatten(1, 2)
        summed = [dim for dim in range(3) if dbias.shape[dim] == 1 and by_head.shape[dim] != 1]
        dbias[:, :, rows] += by_head.sum(summed, keepdim=True) if summed else by_head

    def _rows_of_bias(self, bias: torch.Tensor) -> slice:
        return slice(None) if bias.shape[2] == 1 else self.rows


def _blocks(q: torch.Tensor, k: torch.Tensor, causal: bool, features: Features) -> Iterator[_Block]:
    whole = [(slice(0, q.shape[2]), slice(0, k.shape[2]))]
    slopes = None if features.alibi_slopes is None else torch.atleast_2d(features.alibi_slopes)
    for number, (rows, keys) in enumerate(features.sequences.slices() if features.sequences else whole):
        seqlen_q, seqlen_kv = rows.stop - rows.start, keys.stop - keys.start
        if not seqlen_kv:
            continue
        limits = visible_range(seqlen_q, seqlen_kv, *features.limits(causal), features.bottom_right)
        own = slopes
        if own is not None and len(own) > 1 and features.sequences:  # each of which is a batch of one here
            own = own[number : number + 1]
        size = max(1, _BLOCK_ELEMENTS // max(1, q.shape[0] * q.shape[1] * seqlen_kv))
        for first in range(0, seqlen_q, size):
            block = slice(rows.start + first, rows.start + min(first + size, seqlen_q))
            yield _Block(block, first, keys, limits, k.shape[1], seqlen_kv - seqlen_q, own)


def _probabilities(s: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(s - lse), and 0 in a row that sees no key, whose log-sum-exp may have either sign."""
    return torch.exp(s - torch.where(lse.abs() > LARGEST_SCORE, math.inf, lse)[..., None])


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
