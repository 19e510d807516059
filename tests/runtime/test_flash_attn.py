"""The functions of the ``flash_attn`` package, by ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bwdtune
from bwdtune.flash_attn import flash_attn_func, flash_attn_varlen_func

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "window without limits": {"window_size": (None, None)},
    "causal window": {"causal": True, "window_size": (4, -1), "softmax_scale": 0.3},
    "softcap": {"causal": True, "softcap": 2.0, "deterministic": True},
    "ALiBi": {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.9, 4)},
}


def ours(options: dict[str, Any]) -> dict[str, Any]:
    names = {"causal": "is_causal", "softmax_scale": "scale"}
    given = {names.get(name, name): value for name, value in options.items() if value != (None, None)}
    return {"alignment": "bottom-right", "enable_gqa": True, **given}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", [(9, 9), (5, 12), (12, 5)])
def test_dense(lengths: tuple[int, int], options: dict[str, Any]) -> None:
    inputs = [draw(2, lengths[0], 4, 8, seed=0), draw(2, lengths[1], 2, 8, seed=1), draw(2, lengths[1], 2, 8, seed=2)]
    output = flash_attn_func(*inputs, **options)
    assert output.shape == inputs[0].shape
    assert output.is_contiguous()
    expected = bwdtune.attention(*(tensor.transpose(1, 2) for tensor in inputs), **ours(options)).transpose(1, 2)
    assert torch.equal(output, expected)
    gradients = torch.autograd.grad(output.square().sum(), inputs)
    for found, right in zip(gradients, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        assert torch.allclose(found, right)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed(options: dict[str, Any]) -> None:
    starts_q, starts_k = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 4, 4, 9], [0, 6, 7, 12]))
    inputs = [draw(9, 4, 8, seed=0), draw(12, 2, 8, seed=1), draw(12, 2, 8, seed=2)]
    output = flash_attn_varlen_func(*inputs, starts_q, starts_k, 5, 6, **options)
    expected = bwdtune.attention_varlen(*inputs, starts_q, starts_k, 5, 6, **ours(options))
    assert output.is_contiguous()
    assert torch.equal(output, expected)


def test_the_log_sum_exp_is_returned_in_the_place_of_probabilities() -> None:
    """As FlashAttention does without dropout, which returns no probabilities then."""
    inputs = [draw(2, 9, 4, 8, seed=0), draw(2, 5, 2, 8, seed=1), draw(2, 5, 2, 8, seed=2)]
    output, lse, probabilities = flash_attn_func(*inputs, causal=True, return_attn_probs=True)
    assert torch.equal(output, flash_attn_func(*inputs, causal=True))
    assert output.is_contiguous()
    q, k, _ = (tensor.transpose(1, 2) for tensor in inputs)
    scores = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    seen = torch.arange(5) <= torch.arange(9)[:, None] - 4
    assert torch.allclose(lse, scores.masked_fill(~seen, -torch.inf).logsumexp(-1))
    assert (lse[:, :, :4] == -torch.inf).all(), "these see no key"
    assert probabilities is None
    starts = torch.tensor([0, 5], dtype=torch.int32)
    rows = [tensor[0, :5] for tensor in inputs]
    output, lse, probabilities = flash_attn_varlen_func(*rows, starts, starts, 5, 5, return_attn_probs=True)
    assert torch.allclose(lse, scores[0, :, :5].logsumexp(-1))
    assert (output.shape, probabilities) == (rows[0].shape, None)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": 0.1}, "dropout_p is 0.1: no kernel drops probabilities"),
    ({"window_size": (-2, 0)}, "window_size is"),
    ({"alibi_slopes": torch.zeros(2, requires_grad=True)}, "alibi_slopes requires a gradient, and has none"),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_what_is_refused_has_a_reason(options: dict[str, Any], reason: str) -> None:
    q = draw(1, 4, 2, 8, seed=0)
    with pytest.raises(ValueError, match=reason):
        flash_attn_func(q, q, q, **options)


def test_a_paged_cache_is_refused() -> None:
    q, starts = draw(4, 2, 8, seed=0), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="block_table is given"):
        flash_attn_varlen_func(q, q, q, starts, starts, 4, 4, block_table=torch.zeros(1, 1))
