"""What tests on a GPU draw, and how they compare PyTorch's forwards and our gradients with elementary operations."""

from __future__ import annotations

import torch

from bwdtune.runtime import math_attention, torch_attention
from bwdtune.runtime.features import Features

_SCALE = 0.125


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert torch.equal(found.isfinite(), expected.isfinite())
    found, expected = (tensor.float().nan_to_num(0, 0, 0) for tensor in (found, expected))
    assert (found - expected).norm() <= 0.01 * expected.norm() + 1e-4


def assert_as_in_mathematics(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, features: Features, name: str | None = None
) -> None:
    """Output, log-sum-exp (infinite in the same rows) and gradients of one of PyTorch's forwards, or of the chosen."""
    forward = torch_attention.forward(q, k, v, causal, _SCALE, features, name)
    output, lse = math_attention.forward(q, k, v, causal, _SCALE, features)
    assert_near(forward.output, output)
    assert_near(forward.lse, lse)
    dout = torch.randn_like(output)
    expected = math_attention.gradients(dout, q, k, v, output, lse, causal, _SCALE, features)
    for ours, theirs in zip(forward.backward(dout), expected, strict=True):
        assert_near(ours, theirs)
