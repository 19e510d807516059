"""Takes over `F.scaled_dot_product_attention`, so that models need not be changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..gen.problem import BOTTOM_RIGHT, TOP_LEFT
from .attention import attention

_pytorch = F.scaled_dot_product_attention
_on = False


def enable() -> None:
    """From now on `F.scaled_dot_product_attention` goes through `attention` where it can: with no mask tensor but a
    `CausalBias`, and no dropout. For the whole process; calling it again changes nothing.
    """
    global _on
    _on = True
    if F.scaled_dot_product_attention is _pytorch:
        F.scaled_dot_product_attention = _scaled_dot_product_attention  # type: ignore[assignment]


def disable() -> None:
    """Undoes `enable`."""
    global _on
    _on = False
    # Where another program has replaced ours in turn it may hold on to ours, which hands all on by now.
    if F.scaled_dot_product_attention is _scaled_dot_product_attention:
        F.scaled_dot_product_attention = _pytorch


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """`enable` for the time of a ``with`` block."""
    before = _on
    enable()
    try:
        yield
    finally:
        if not before:
            disable()


def _scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if _on and not dropout_p:
        if attn_mask is None:
            return attention(query, key, value, is_causal, scale, enable_gqa)
        if isinstance(attn_mask, CausalBias) and not is_causal and _fits(attn_mask, query, key):
            alignment = TOP_LEFT if attn_mask.variant == CausalVariant.UPPER_LEFT else BOTTOM_RIGHT
            return attention(query, key, value, True, scale, enable_gqa, alignment=alignment)
    return _pytorch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _fits(mask: CausalBias, query: torch.Tensor, key: torch.Tensor) -> bool:
    return query.dim() == key.dim() == 4 and (mask.seq_len_q, mask.seq_len_kv) == (query.shape[2], key.shape[2])
