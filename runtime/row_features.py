"""What a row of queries may have besides, in PyTorch: a sink, and a gradient of its log-sum-exp.

Kernels have both in the pass that makes delta. Here is what a forward needs of them, and what PyTorch's own backwards,
which know neither, make of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .math_attention import LARGEST_SCORE

Gradients = tuple[torch.Tensor, ...]
"""dq, dk and dv, and perhaps a bias' gradient."""

_TERMS = 3  # 16-bit values that a float is a sum of


def rows_of(lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(B, Hq, Sq), a view, of the log-sum-exp of any of PyTorch's forwards of q, (B, Hq, Sq, D).

    cuDNN's has a last dimension of one, the memory-efficient kernel's rows are padded, packed sequences have (Hq, Tq).
    """
    if lse.dim() == 2:
        return lse[None]
    return (lse.squeeze(3) if lse.dim() == 4 else lse)[:, :, : q.shape[2]]


def add_sink(output: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> None:
    """Has an attention's results count a sink: L' = logaddexp(L, sink), O' = O exp(L - L').

    Args:
        output: (B, Hq, Sq, D), of an attention without sinks; changed in place.
        lse: (B, Hq, Sq), its log-sum-exp; changed in place. An infinite one is that of a row that sees no key, whatever
            its sign.
        sink: (Hq), of any floating dtype.
    """
    scores = sink.to(lse.dtype)[:, None]
    seen = lse.isfinite()
    with_sink = torch.where(seen, torch.logaddexp(lse, scores), scores)
    output.mul_(torch.where(seen, torch.exp(lse - with_sink), 0.0)[..., None])
    lse.copy_(with_sink)


def without_unseen(lse: torch.Tensor) -> torch.Tensor:
    """A log-sum-exp with minus infinity for rows whose scores are all so low that they count as none, or no number.

    Kernels multiply by log2(e), where `torch.finfo(dtype).min` of a bias and such a row's log-sum-exp would be infinite
    both: see `math_attention.LARGEST_SCORE`.
    """
    return lse.masked_fill(~(lse >= -LARGEST_SCORE), -math.inf)


def sink_gradient(
    sink: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of sinks, -sum over rows of exp(sink - L') (rowsum(dO O') - dL').

    Args:
        sink: (Hq).
        output: (B, Hq, Sq, D), O'.
        lse: (B, Hq, Sq), L'.
        dout: (B, Hq, Sq, D).
        dlse: (B, Hq, Sq), if there is any.
        cu_seqlens_q: Of packed sequences: rows that belong to none do not count.

    Returns:
        (Hq), in the dtype of the sinks.
    """
    delta = (dout.to(lse.dtype) * output).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    counts = lse.isfinite()
    if cu_seqlens_q is not None:
        rows = torch.arange(lse.shape[-1], device=lse.device)
        counts = counts & (rows >= cu_seqlens_q[0]) & (rows < cu_seqlens_q[-1])
    terms = torch.exp(sink.to(lse.dtype)[:, None] - lse) * delta
    return -torch.where(counts, terms, 0.0).sum((0, 2)).to(sink.dtype)


def gradients(
    found: Callable[..., Gradients], dout: torch.Tensor, dlse: torch.Tensor | None, *saved: torch.Tensor
) -> Gradients:
    """The gradients by a backward that knows of no gradient of the log-sum-exp.

    dS = P (dP - delta + dL) is a sum of two backwards. The second one has no dP, since its v is zero, and an output
    and its gradient whose row sums are -dL.

    Args:
        found: The backward: dout, *saved -> dq, dk, dv, and perhaps more that are sums of dS.
        dout: (B, Hq, Sq, D).
        dlse: (B, Hq, Sq), if there is any.
        *saved: q, k, v, the output and its log-sum-exp, and more.
    """
    of_output = found(dout, *saved)
    if dlse is None:
        return of_output
    q, k, v, output, *rest = saved
    units, terms = lse_factors(dlse, output)
    of_lse = found(units, q, k, torch.zeros_like(v), terms, *rest)
    dq, dk, dv, *others = of_output
    more_dq, more_dk, _, *more_others = of_lse
    return (dq + more_dq, dk + more_dk, dv, *(a + b for a, b in zip(others, more_others, strict=True)))


def lse_factors(dlse: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors whose products' row sums are -dlse: a power of 2, and what is left of dlse by it.

    Args:
        dlse: Of any shape.
        like: Has the dtype, which may have fewer bits than `dlse`, and the shape: one dimension more.
    """
    limits = torch.finfo(like.dtype)
    lowest, highest = (math.frexp(limit)[1] - 1 for limit in (limits.tiny, limits.max))
    unit = torch.ldexp(torch.ones_like(dlse), torch.frexp(dlse)[1].clamp(lowest, highest))
    rest, columns = dlse / unit, min(_TERMS, like.shape[-1])
    units, terms = torch.zeros_like(like), torch.zeros_like(like)
    units[..., :columns] = unit[..., None]
    for column in range(columns):
        term = rest.to(like.dtype)
        terms[..., column] = -term
        rest = rest - term
    return units, terms
