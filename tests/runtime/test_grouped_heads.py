"""Grouped heads of any sizes and strides, through the runtime, on the host target: a kernel of each family and of each
way to sum up a group.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bwdtune.gen.build.jobs import build
from bwdtune.gen.device import HOST
from bwdtune.gen.families import PRESETS, Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime.kernel import Kernel, backward, is_addressable

HEAD_DIM = 64
SCALE = HEAD_DIM**-0.5
PROBLEM = Problem("bf16", 1, 2, 1, 1, 1, HEAD_DIM, causal=True)
CONFIGS: dict[str, Config] = {
    "mma": PRESETS["v3"],
    "mma, split": replace(PRESETS["v3"], split_gqa_heads=True),
    "mma, split, four floats at a time": replace(PRESETS["v2"], split_gqa_heads=True, dq_vector=4),
    "mmat": PRESETS["t64"],
    "wgmma": PRESETS["w64"],
}


@pytest.fixture(autouse=True)
def _race_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_RACECHECK", "1")


@functools.cache
def kernels() -> dict[str, Kernel]:
    variants = build([render(PROBLEM, config) for config in CONFIGS.values()], HOST.arch)
    libraries = {name: variant.library for name, variant in zip(CONFIGS, variants, strict=True)}
    return {name: Kernel.load(library) for name, library in libraries.items() if library}


@st.composite
def layouts(draw: st.DrawFn, values: torch.Tensor) -> torch.Tensor:
    """The same values in any order of dimensions, with gaps that hold no numbers, aligned or not."""
    order = draw(st.permutations(range(3)))
    gaps = [*(draw(st.integers(0, 1)) for _ in order), draw(st.sampled_from((0, 0, 8, 3)))]
    step = draw(st.sampled_from((1, 1, 1, 2)))
    extents = [values.shape[dimension] + gap for dimension, gap in zip((*order, 3), gaps, strict=True)]
    storage = torch.full((*extents[:3], extents[3] * step), torch.nan, dtype=values.dtype)
    view = storage.permute(*(order.index(dimension) for dimension in range(3)), 3)
    batch, heads, seqlen, head_dim = values.shape
    first = draw(st.integers(0, extents[3] - head_dim))
    view = view[:batch, :heads, :seqlen, first * step : (first + head_dim) * step : step]
    return view.copy_(values)


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """q, k, v, o, dout and lse; o and lse of a causal mask, aligned top-left."""
    batch, heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    seqlen_q, seqlen_kv = draw(st.integers(0, 140)), draw(st.integers(0, 140))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))

    def drawn(heads: int, seqlen: int) -> torch.Tensor:
        return torch.randn(batch, heads, seqlen, HEAD_DIM, generator=generator).bfloat16()

    values = {name: drawn(heads_kv * group, seqlen_q) for name in ("q", "dout")}
    values |= {name: drawn(heads_kv, seqlen_kv) for name in ("k", "v")}
    p = probabilities(values["q"], values["k"])
    values["o"] = (p @ expanded(values["v"], group)).bfloat16()
    lse = scores(values["q"], values["k"]).logsumexp(-1).float()
    return {**{name: draw(layouts(tensor)) for name, tensor in values.items()}, "lse": lse}


def expanded(tensor: torch.Tensor, group: int) -> torch.Tensor:
    return tensor.double().repeat_interleave(group, 1)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    s = q.double() @ expanded(k, q.shape[1] // k.shape[1]).mT * SCALE
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)


def probabilities(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return scores(q, k).softmax(-1).nan_to_num(0.0)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv by the textbook, in fp64."""
    group = q.shape[1] // k.shape[1]
    p, dp = probabilities(q, k), dout.double() @ expanded(v, group).mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * SCALE
    dk, dv = (part.unflatten(1, (k.shape[1], group)).sum(2) for part in (ds.mT @ q.double(), p.mT @ dout.double()))
    return ds @ expanded(k, group), dk, dv


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@settings(
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(given=inputs())
def test_any_sizes_and_strides(name: str, given: dict[str, torch.Tensor]) -> None:
    q, k, v, o, dout, lse = (given[key] for key in ("q", "k", "v", "o", "dout", "lse"))
    gradients = backward(kernels()[name], q, k, v, o, dout, lse, SCALE)
    for gradient, reference, tensor in zip(gradients, exact(q, k, v, dout), (q, k, v), strict=True):
        like = torch.empty_like(tensor)
        assert gradient.shape == tensor.shape
        if tensor.numel() and is_addressable(like):
            assert gradient.stride() == like.stride()
        # Each head for itself: a small one that is wrong must not vanish beside the others.
        errors = (gradient.double() - reference).norm(dim=(-2, -1))
        assert (errors <= 0.015 * reference.norm(dim=(-2, -1)) + 1e-3).all(), errors
