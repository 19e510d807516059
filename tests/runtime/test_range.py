"""Gradients far from ordinary size, and scores far from it: as right as at ordinary size."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from bwdtune.gen.build.jobs import build_one
from bwdtune.gen.device import HOST
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime import math_attention
from bwdtune.runtime.features import PLAIN
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import Kernel, backward

HEAD_DIM, LENGTH = 64, 70
ON_GPU = [pytest.param(preset, "cuda", marks=pytest.mark.gpu) for preset in ("v2", "t64", "w64", "w64conv")]
PLACES = [pytest.param("v2", "cpu"), pytest.param("t64", "cpu", marks=pytest.mark.slow), *ON_GPU]


@functools.cache
def kernel(preset: str, device: str) -> Kernel:
    problem = Problem("bf16", 1, 2, 2, LENGTH, LENGTH, HEAD_DIM, causal=True)
    arch = HOST.arch if device == "cpu" else current_device().arch
    library = build_one(render(problem, PRESETS[preset]), arch).library
    assert library
    return Kernel.load(library)


def errors(preset: str, device: str, *, scale: float = 0.125, **factors: float) -> list[float]:
    """Relative errors of dq, dk and dv with q, k, v or dout multiplied: of the kernel's, against fp64."""
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Any] = {}
    for name in ("q", "k", "v", "dout"):
        drawn = torch.randn(1, 2, LENGTH, HEAD_DIM, generator=generator) * factors.get(name, 1.0)
        inputs[name] = drawn.bfloat16().to(device)
    q, k, v, dout = inputs.values()
    output, lse = math_attention.forward(q, k, v, True, scale, PLAIN)
    found = backward(kernel(preset, device), q, k, v, output, dout, lse, scale)
    wide = [tensor.double() for tensor in (q, k, v, dout)]
    exact_output, exact_lse = math_attention.forward(*wide[:3], True, scale, PLAIN)
    exact = math_attention.gradients(wide[3], *wide[:3], exact_output, exact_lse, True, scale, PLAIN)
    return [float((ours.double() - right).norm() / right.norm()) for ours, right in zip(found, exact, strict=True)]


@pytest.mark.parametrize("factors", [{"dout": 2.0**power} for power in (40, 18, -20, -40)] + [{"v": 2.0**30}], ids=str)
@pytest.mark.parametrize(("preset", "device"), PLACES)
def test_loss_scaling_does_not_leave_the_range(preset: str, device: str, factors: dict[str, float]) -> None:
    """Powers of two change exponents alone: what is between has bf16's range, or fp32's."""
    ordinary = errors(preset, device)
    for scaled, unscaled in zip(errors(preset, device, **factors), ordinary, strict=True):
        assert scaled == pytest.approx(unscaled, rel=0.05)


@pytest.mark.parametrize("scores", [{"scale": 3.0}, {"scale": 1e-4}, {"q": 4.0, "k": 4.0}], ids=str)
@pytest.mark.parametrize(("preset", "device"), PLACES)
def test_large_and_small_scores(preset: str, device: str, scores: dict[str, float]) -> None:
    """No probability above 1: where a row is one key's alone, its gradient cancels but for rounding."""
    ordinary = max(errors(preset, device))
    found = errors(preset, device, **scores)
    assert found[2] <= 3 * ordinary, "dv has no cancellation"
    assert max(found) <= 12 * ordinary


@pytest.mark.parametrize(("preset", "device"), PLACES)
def test_scores_of_one_key_alone_stay_finite(preset: str, device: str) -> None:
    assert all(error < 1e6 for error in errors(preset, device, q=30.0, k=30.0, scale=100.0)[2:])
