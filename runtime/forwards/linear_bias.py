"""ALiBi for a fused forward that has none: as more columns of q and k.

Of keys at or before the bottom-right diagonal the bias is linear: ``-slope * (i + Skv - Sq - j)`` is ``slope * j``, a
product of what a query head and a key have, and a term of the row alone, which a softmax does not see. The products of
the columns are exact: a place is digits of 8 bits, a slope two numbers of the inputs' dtype, and sums are in fp32.
"""

from __future__ import annotations

import torch

from ...gen.problem import UNLIMITED
from ..features import Features

COLUMNS = 8
"""Columns more; some are zero."""

LARGEST_INVERSE_SCALE = 256.0
"""With this the columns of any slope below 16 are numbers of fp16."""

_TWO_DIGITS = 2**16
_DIGIT_BITS = 8
_SHARE = 16  # of a digit's weight that is the key's column's


def is_linear(causal: bool, features: Features, seqlen_q: int, seqlen_kv: int) -> bool:
    """Whether no query sees a key past the bottom-right diagonal, at a scale that the columns have room for."""
    aligned = features.bottom_right or features.sequences is not None or seqlen_q == seqlen_kv
    return features.limits(causal)[1] == 0 and aligned and features.window[1] in (UNLIMITED, 0)


def extended(
    q: torch.Tensor, k: torch.Tensor, scale: float, features: Features
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k with more columns, and what is left of the bias.

    Args:
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Skv, D).
        scale: The softmax scale.
        features: The slopes, and the sequences.

    Returns:
        (B, Hq, Sq, D + `COLUMNS`), (B, Hkv, Skv, D + `COLUMNS`), and the rows' terms, (B or 1, Hq, Sq), which the
        log-sum-exp of attention to these lacks.
    """
    assert features.alibi_slopes is not None
    wide = torch.promote_types(q.dtype, torch.float32)
    slopes = torch.atleast_2d(features.alibi_slopes).to(wide)
    if sequences := features.sequences:
        of_rows, rows = _places(sequences.cu_seqlens_q, q.shape[2])
        _, keys = _places(sequences.cu_seqlens_kv, k.shape[2])
        rows = rows + (sequences.cu_seqlens_kv.diff() - sequences.cu_seqlens_q.diff())[of_rows]
        by_row = slopes[of_rows].T[None] if len(slopes) > 1 else slopes[:, :, None]
        longest = sequences.seqlen_kv
    else:
        keys = torch.arange(k.shape[2], device=k.device)
        rows = torch.arange(q.shape[2], device=q.device) + k.shape[2] - q.shape[2]
        by_row, longest = slopes[:, :, None], k.shape[2]
    center = longest // 2  # sums are as small as they can be
    keys, rows = keys - center, rows - center

    asked = by_row / scale
    first = asked.to(q.dtype)
    second = (asked - first).to(q.dtype)
    digits = [keys & (2**_DIGIT_BITS - 1), keys >> _DIGIT_BITS]
    if longest > _TWO_DIGITS:
        digits[1:] = [digits[1] & (2**_DIGIT_BITS - 1), keys >> 2 * _DIGIT_BITS]
    of_queries = [
        term * (2.0 ** (_DIGIT_BITS * number) / _SHARE) for number in range(len(digits)) for term in (first, second)
    ]
    of_keys = [(digit * _SHARE).to(k.dtype) for digit in digits for _ in range(2)]
    return (
        _with_columns(q, torch.stack(of_queries, -1)),
        _with_columns(k, torch.stack(of_keys, -1)[None, None]),
        -(first.to(wide) + second.to(wide)) * scale * rows,
    )


def _places(starts: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each row, and its place there; of rows that belong to none, those of another."""
    places = torch.arange(rows, device=starts.device)
    of_rows = torch.searchsorted(starts[1:].contiguous(), places, right=True, out_int32=True).clamp(max=len(starts) - 2)
    return of_rows, places - starts[of_rows]


def _with_columns(tensor: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    missing = torch.nn.functional.pad(columns, (0, COLUMNS - columns.shape[-1]))
    return torch.cat([tensor, missing.expand(*tensor.shape[:3], COLUMNS)], -1)
