"""Layouts that PyTorch's dispatcher keeps from fused operators, groups of heads, and dtypes under autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import bwdtune
from bwdtune.runtime.torch_attention import readable

HEAD_DIM = 32
OPTIONS: dict[str, dict[str, Any]] = {
    "deterministic": {"is_causal": True, "deterministic": True},
    "window": {"window_size": (5, 0)},
}


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return storage[1:].view(tensor.shape).copy_(tensor)


def with_odd_rows(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 1, dtype=tensor.dtype)
    wide[..., :-1] = tensor
    return wide[..., :-1]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last stride not 1": lambda tensor: tensor.mT.contiguous().mT,
    "every second element": lambda tensor: torch.stack([tensor, -tensor], -1).flatten(-2)[..., ::2],
    "storage not aligned": misaligned,
    "rows not aligned": with_odd_rows,
    "heads expanded by hand": lambda tensor: tensor[:, :1].expand_as(tensor),
    "heads and rows swapped": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
}


def draw(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(2, 2, 20, HEAD_DIM, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_inputs_and_of_the_gradient(layout: str, options: str) -> None:
    inputs = [LAYOUTS[layout](tensor).detach().requires_grad_() for tensor in draw()]
    plain = [tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for tensor in inputs]
    output, expected = (bwdtune.attention(*tensors, **OPTIONS[options]) for tensors in (inputs, plain))
    assert torch.allclose(output, expected, atol=1e-6)
    if options == "deterministic":
        assert torch.allclose(expected, F.scaled_dot_product_attention(*plain, is_causal=True), atol=1e-6)
    dout = LAYOUTS[layout](torch.randn(output.shape))
    found = torch.autograd.grad(output, inputs, dout)
    for gradient, right in zip(found, torch.autograd.grad(expected, plain, dout.contiguous()), strict=True):
        assert torch.allclose(gradient, right, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_fused_kernel_reads(layout: str) -> None:
    tensor = LAYOUTS[layout](torch.randn(2, 2, 20, HEAD_DIM).bfloat16())
    read = readable(tensor)
    assert torch.equal(read, tensor)
    assert (read is tensor) == (layout in ("heads expanded by hand", "heads and rows swapped"))
    assert read.stride(-1) == 1
    assert read.data_ptr() % 16 == 0


@pytest.mark.parametrize("heads", [(6, 2), (9, 3), (8, 1), (71, 1), (12, 4)])
def test_groups_of_heads(heads: tuple[int, int]) -> None:
    heads_q, heads_kv = heads
    q = torch.randn(1, heads_q, 7, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, heads_kv, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    output = bwdtune.attention(q, k, v, is_causal=True, enable_gqa=True, deterministic=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.allclose(output, expected)
    dout = torch.randn_like(output)
    for found, right, tensor in zip(
        torch.autograd.grad(output, (q, k, v), dout),
        torch.autograd.grad(expected, (q, k, v), dout),
        (q, k, v),
        strict=True,
    ):
        assert found.shape == tensor.shape
        assert torch.allclose(found, right)


AUTOCAST: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    "fp32": (torch.float32,) * 3,
    "fp64": (torch.float64,) * 3,
    "bf16": (torch.bfloat16,) * 3,
    "mixed": (torch.float32, torch.bfloat16, torch.float16),
}


@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["plain", *OPTIONS])
@pytest.mark.parametrize("dtypes", AUTOCAST)
def test_autocast_casts_what_pytorchs_function_casts(dtypes: str, options: dict[str, Any]) -> None:
    inputs = [tensor.to(dtype).requires_grad_() for tensor, dtype in zip(draw(), AUTOCAST[dtypes], strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        output = bwdtune.attention(*inputs, **options)
        assert output.dtype == F.scaled_dot_product_attention(*inputs).dtype
    for gradient, tensor in zip(torch.autograd.grad(output.sum(), inputs), inputs, strict=True):
        assert gradient.dtype == tensor.dtype
