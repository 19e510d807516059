"""PyTorch's memory-efficient attention, of which only CUDA has an implementation, on the CPU by elementary operations.

What CUDA's refuses is refused here, and what that leaves undone is not a number here.
"""

from __future__ import annotations

import math

import torch
from torch.library import Library

from bwdtune.runtime import math_attention
from bwdtune.runtime.features import PLAIN

_ROWS = 32  # that the log-sum-exp is padded to a multiple of
_KEYS = 16  # that rows of a bias' gradient are
_ALIGNMENT_BYTES = 16


def _check(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None) -> None:
    assert k.shape[:2] == q.shape[:2]
    if bias is not None:
        assert bias.dtype == q.dtype
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.stride(3) == 1
        assert bias.data_ptr() % _ALIGNMENT_BYTES == 0
        for size, stride in zip(bias.shape[:3], bias.stride(), strict=False):
            assert size == 1 or stride * bias.element_size() % _ALIGNMENT_BYTES == 0


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    _check(query, key, attn_bias)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    output, lse = math_attention.forward(query, key, value, is_causal, scale, PLAIN, attn_bias)
    if attn_bias is not None:
        lse = lse.masked_fill(lse.isinf(), 0.0)  # of a row that sees no key
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % _ROWS), value=math.inf)
    seeds = (torch.zeros((), dtype=torch.long) for _ in range(2))
    return output.transpose(1, 2).contiguous().transpose(1, 2), padded, *seeds


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    _check(query, key, attn_bias)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    lse = logsumexp[..., : query.shape[2]]
    dq, dk, dv, *of_bias = math_attention.gradients(
        grad_out, query, key, value, out, lse, is_causal, scale, PLAIN, attn_bias, grad_input_mask[3]
    )
    inside = (gradient.transpose(1, 2).contiguous().transpose(1, 2) for gradient in (dq, dk, dv))
    if not of_bias:
        return *inside, None
    keys = key.shape[2]
    dbias = torch.nn.functional.pad(of_bias[0], (0, -keys % _KEYS))[..., :keys]
    if is_causal:
        dbias.masked_fill_(torch.ones(query.shape[2], keys, dtype=torch.bool).triu(1), math.nan)
    return *inside, dbias


library = Library("aten", "IMPL")
library.impl("_scaled_dot_product_efficient_attention", _forward, "CPU")
library.impl("_scaled_dot_product_efficient_attention_backward", _backward, "CPU")
