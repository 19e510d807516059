"""`attention` in the shape of the ``flash_attn`` package: (B, S, H, D), for code that calls that one.

    from bwdtune.flash_attn import flash_attn_func, flash_attn_varlen_func

Arguments have FlashAttention-2's names, order and defaults. As there, masks are aligned bottom-right, and the heads of
K and V may be fewer than those of Q.
"""

from __future__ import annotations

from typing import Any

import torch

from ..gen.problem import BOTTOM_RIGHT, UNLIMITED
from .attention import attention, attention_varlen

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (UNLIMITED, UNLIMITED),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """`attention` of (B, S, H, D) tensors.

    Args:
        q: (B, Sq, Hq, D).
        k: (B, Skv, Hkv, D); Hkv divides Hq.
        v: (B, Skv, Hkv, Dv).
        dropout_p: Must be 0.
        softmax_scale: 1/sqrt(D) by default.
        causal: Query i sees no key past ``i + Skv - Sq``.
        window_size: Keys before and past that place which a query sees; -1 (or None) for all.
        softcap: Scores are ``softcap * tanh(score / softcap)``; 0 for none.
        alibi_slopes: fp32, (Hq) or (B, Hq): ``-slope * abs(i + Skv - Sq - j)`` is added to the score of query i and key
            j. As in FlashAttention no gradient flows into them; ones that require one are refused.
        deterministic: Gradients are the same bits at each call; so they are in PyTorch's deterministic mode.
        return_attn_probs: Whether to return more than the output, as FlashAttention does without dropout.

    Returns:
        (B, Sq, Hq, Dv), contiguous. With `return_attn_probs` that, the log-sum-exp, and None in the place of
        probabilities. The log-sum-exp is (B, Hq, Sq), fp32; here it is differentiable, and where a query sees no key
        minus infinity. With slopes and a causal mask FlashAttention's lacks ``slope * (i + Skv - Sq)``, which no output
        depends on.

    Raises:
        ValueError: Dropout is asked for, or an argument makes no sense.
    """
    _refuse(dropout_p=dropout_p)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    queries, keys, values = (tensor.transpose(1, 2) for tensor in (q, k, v))
    found = attention(queries, keys, values, alignment=BOTTOM_RIGHT, **options)
    output, *lse = found if return_attn_probs else (found,)
    output = output.transpose(1, 2).contiguous()
    return (output, *lse, None) if return_attn_probs else output


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (UNLIMITED, UNLIMITED),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """`attention_varlen` in FlashAttention's words. See `flash_attn_func` for the other arguments.

    Args:
        q: (Tq, Hq, D): the rows of all sequences.
        k: (Tkv, Hkv, D).
        v: (Tkv, Hkv, Dv).
        cu_seqlens_q: int32 (B + 1), on the device of q: where each sequence begins, and one past the end of the last.
        cu_seqlens_k: The same for k and v; the same tensor where the lengths are the same.
        max_seqlen_q: Length of the longest sequence in q, or a bound on it.
        max_seqlen_k: The same for k and v.
        dropout_p: Must be 0.
        softmax_scale: See `flash_attn_func`.
        causal: See `flash_attn_func`.
        window_size: See `flash_attn_func`.
        softcap: See `flash_attn_func`.
        alibi_slopes: See `flash_attn_func`; B is the number of sequences.
        deterministic: See `flash_attn_func`.
        return_attn_probs: See `flash_attn_func`.
        block_table: Must be None.

    Returns:
        (Tq, Hq, Dv), contiguous. With `return_attn_probs` that, the log-sum-exp, (Hq, Tq), and None.

    Raises:
        ValueError: As `flash_attn_func`, or for a paged cache.
    """
    _refuse(dropout_p=dropout_p, block_table=block_table)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    found = attention_varlen(q, k, v, *lengths, **options)
    output, *lse = found if return_attn_probs else (found,)
    return (output.contiguous(), *lse, None) if return_attn_probs else output.contiguous()


_REASONS = {
    "dropout_p": "no kernel drops probabilities",
    "block_table": "paged keys and values are for inference, which has no backward",
}


def _refuse(**asked: Any) -> None:
    for name, value in asked.items():
        if value is not None and (isinstance(value, torch.Tensor) or value):
            shown = "given" if isinstance(value, torch.Tensor) else value
            raise ValueError(f"{name} is {shown}: {_REASONS[name]}; use flash_attn's own function for that")


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
) -> dict[str, Any]:
    """In the words of `attention`."""
    left, right = (UNLIMITED if limit is None else limit for limit in window_size)
    return {
        "is_causal": causal,
        "scale": softmax_scale,
        "enable_gqa": True,
        "window_size": (left, right),
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic or None,
        "return_lse": return_attn_probs,
    }
