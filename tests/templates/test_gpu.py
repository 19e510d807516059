"""The generated kernels on the GPU: every parameter value, both dtypes, both masks, head_dims and lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from covering import covering_configs, valid_presets

from bwdtune.gen.build import build
from bwdtune.gen.config import PRESETS, Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.gen.space import refusal
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import Kernel
from bwdtune.tuner.verify import Verifier

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    """One for all tests: references are computed once for each problem."""
    return Verifier("cuda")


def check(verifier: Verifier, problem: Problem, configs: tuple[Config, ...]) -> None:
    wrong = []
    for variant in build([render(problem, config) for config in configs], current_device().arch):
        assert variant.library, variant.error
        record = verifier.verify(problem, Kernel.load(variant.library))
        if not record.passed:
            wrong.append(f"{variant.source.name}: {record.reason}")
    assert not wrong


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_presets_and_every_value_of_every_parameter(
    verifier: Verifier, dtype: str, causal: bool, head_dim: int
) -> None:
    problem = Problem.parse(f"2_4_2_512_{head_dim}", dtype=dtype, causal=causal)
    device = current_device()
    check(verifier, problem, (*valid_presets(problem, device).values(), *covering_configs(problem, device)))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim", [16, 32, 48, 80, 96, 112, 160, 192, 256])
def test_other_head_dims(verifier: Verifier, causal: bool, head_dim: int) -> None:
    problem = Problem.parse(f"2_4_512_{head_dim}", causal=causal)
    check(verifier, problem, covering_configs(problem, current_device()))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_grouped_queries(verifier: Verifier, causal: bool) -> None:
    presets = valid_presets(Problem.parse("2_8_2_512_128", causal=causal), current_device())
    splits = tuple(replace(PRESETS[name], split_group=True) for name in ("v1", "v2", "v3"))
    for shape in ("2_8_2_512_128", "1_6_1_512_128", "2_4_4_512_128"):
        check(verifier, Problem.parse(shape, causal=causal), (*presets.values(), *splits))


@pytest.mark.parametrize("preset", PRESETS)
def test_dk_and_dv_are_the_same_bits_every_time(preset: str) -> None:
    """Many blocks, few keys: a race in shared memory would show in some of the repeats (dQ is summed by atomics)."""
    problem = Problem("bf16", 4, 8, 8, 2048, 128, 128, causal=False)
    device = current_device()
    if reason := refusal(problem, PRESETS[preset], device):
        pytest.skip(reason)
    (variant,) = build([render(problem, PRESETS[preset])], device.arch)
    assert variant.library
    kernel = Kernel.load(variant.library)
    torch.manual_seed(0)
    q, o, dout = (torch.randn(4, 8, 2048, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    k, v = (torch.randn(4, 8, 128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lse = torch.randn(4, 8, 2048, device="cuda").abs() + 4

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        kernel.launch(q, k, v, o, dout, lse, dq, dk, dv, scale=problem.softmax_scale)
        return dk, dv

    first = run()
    for _ in range(50):
        again = run()
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
