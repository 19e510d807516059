"""`torch.func`, batched gradients, tracing and scripting of code that calls `attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import bwdtune

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "deterministic": {"is_causal": True, "deterministic": True},
    "window": {"window_size": (3, 1)},
    "softcap": {"softcap": 2.0},
    "bottom-right": {"is_causal": True, "alignment": "bottom-right"},
}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=FEATURES)
def attention(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    options = FEATURES[request.param]
    return lambda q, k, v: bwdtune.attention(q, k, v, **options)


def test_the_functional_gradient(attention: Callable[..., torch.Tensor]) -> None:
    q, k, v = (draw(1, 2, 7, 8, seed=seed).requires_grad_() for seed in range(3))
    expected = torch.autograd.grad(attention(q, k, v).square().sum(), (q, k, v))
    found = torch.func.grad(lambda *inputs: attention(*inputs).square().sum(), (0, 1, 2))(q, k, v)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs)


def test_a_gradient_for_each_sample(attention: Callable[..., torch.Tensor]) -> None:
    q, k, v = (draw(3, 1, 2, 7, 8, seed=seed) for seed in range(3))
    each = torch.func.vmap(torch.func.grad(lambda *inputs: attention(*inputs).square().sum()))(q, k, v)
    for index in range(3):
        one = q[index].clone().requires_grad_()
        (expected,) = torch.autograd.grad(attention(one, k[index], v[index]).square().sum(), one)
        assert torch.allclose(each[index], expected)


def test_packed_sequences_under_a_transform() -> None:
    starts = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    q, k, v = (draw(9, 2, 8, seed=seed).requires_grad_() for seed in range(3))

    def loss(q: torch.Tensor) -> torch.Tensor:
        return bwdtune.attention_varlen(q, k, v, starts, starts, 5, 5, is_causal=True).square().sum()

    assert torch.allclose(torch.func.grad(loss)(q), torch.autograd.grad(loss(q), q)[0])


def test_a_row_that_sees_no_key_under_a_transform() -> None:
    q, k, v = draw(1, 1, 5, 8), draw(1, 1, 2, 8, seed=1), draw(1, 1, 2, 8, seed=2)

    def loss(q: torch.Tensor) -> torch.Tensor:
        return bwdtune.attention(q, k, v, is_causal=True, alignment="bottom-right").square().sum()

    gradient = torch.func.grad(loss)(q)
    assert not gradient[:, :, :3].any()
    assert gradient[:, :, 4].any()


def test_batched_gradients() -> None:
    """`vmap` of the backward alone."""
    inputs = [draw(1, 2, 7, 8, seed=seed).requires_grad_() for seed in range(3)]
    output = bwdtune.attention(*inputs, window_size=(3, 1))
    douts = draw(4, *output.shape, seed=9)
    batched = torch.func.vmap(lambda dout: torch.autograd.grad(output, inputs, dout, retain_graph=True))(douts)
    for index, dout in enumerate(douts):
        for ours, theirs in zip(batched, torch.autograd.grad(output, inputs, dout, retain_graph=True), strict=True):
            assert torch.allclose(ours[index], theirs)


@pytest.mark.parametrize("features", FEATURES)
def test_symbolic_tracing_keeps_the_call(features: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return bwdtune.attention(q, k, v, **FEATURES[features]) * 2

    inputs = [draw(1, 2, 7, 8, seed=seed) for seed in range(3)]
    traced = torch.fx.symbolic_trace(Model())
    assert next(node.target for node in traced.graph.nodes if node.op == "call_function") is bwdtune.attention
    assert torch.allclose(traced(*inputs), Model()(*inputs))
