"""Attention by the book, in the dtype of its inputs, and what is compared with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from bwdtune.gen.problem import visible_range

Tensors = tuple[torch.Tensor, ...]


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alignment: str = "top-left",
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensors:
    """The textbook's attention: a sink is a column of scores that is dropped after the softmax."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    left, right = window_size
    low, high = visible_range(q.shape[2], k.shape[2], left, 0 if is_causal else right, alignment == "bottom-right")
    places = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
    seen = (places >= low) & (places <= high)
    s = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if alibi_slopes is not None:
        distances = (torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])).abs()
        s = s - torch.atleast_2d(alibi_slopes.double())[..., None, None] * distances
    seen = seen & (s > -1e30)
    s = s.masked_fill(~seen, -1e300)
    if sink is not None:
        s = torch.cat([s, sink[:, None, None].expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1)[..., : k.shape[2]] * seen
    lse = s.logsumexp(-1)
    return p @ v, lse if sink is not None else lse.masked_fill(~seen.any(-1), -math.inf)


def assert_near(found: torch.Tensor, right: torch.Tensor) -> None:
    assert found.shape == right.shape
    assert torch.equal(found.isfinite(), right.isfinite())
    found, right = found.double().nan_to_num(0, 0, 0), right.nan_to_num(0, 0, 0)
    assert (found - right).norm() <= 0.01 * right.norm() + 1e-4


def assert_right(
    attention: Callable[..., Any], reference: Callable[..., Tensors], inputs: Tensors, return_lse: bool
) -> None:
    """Results and gradients of all of them."""
    found = attention(*inputs) if return_lse else (attention(*inputs),)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    right = reference(*wide)[: len(found)]
    generator = torch.Generator().manual_seed(5)
    upstream = [torch.randn(result.shape, generator=generator) for result in found]
    for ours, theirs in zip(found, right, strict=True):
        assert_near(ours.detach(), theirs.detach())
    gradients = torch.autograd.grad(
        found, inputs, [one.to(result.dtype) for one, result in zip(upstream, found, strict=True)]
    )
    # Of a row that sees no key the log-sum-exp is a constant.
    finite = [result.where(result.isfinite(), 0.0) for result in right]
    expected = torch.autograd.grad(
        finite, wide, [one.to(result.dtype).double() for one, result in zip(upstream, found, strict=True)]
    )
    for given, gradient, theirs in zip(inputs, gradients, expected, strict=True):
        assert gradient.dtype == given.dtype
        assert_near(gradient, theirs)
