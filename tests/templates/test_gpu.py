"""The generated kernels on the GPU: every parameter value, both dtypes, both masks, head_dims and lengths."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from covering import covering_configs, valid_presets

from bwdtune.gen.build.jobs import build, build_one
from bwdtune.gen.device import HOST
from bwdtune.gen.families import PRESETS, Config, TransposedMmaConfig, WgmmaConfig
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.gen.space import refusal
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import Kernel, backward
from bwdtune.runtime.verification.cases import Case
from bwdtune.runtime.verification.inputs import make_inputs
from bwdtune.runtime.verification.verifier import Verifier

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
    splits = tuple(replace(PRESETS[name], split_gqa_heads=True) for name in ("v1", "v2", "v3"))
    for shape in ("2_8_2_512_128", "1_6_1_512_128", "2_4_4_512_128"):
        check(verifier, Problem.parse(shape, causal=causal), (*presets.values(), *splits))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_are_as_exact_as_flash_attentions(
    verifier: Verifier, dtype: str, causal: bool, head_dim: int
) -> None:
    problem, device = Problem.parse(f"1_4_1024_{head_dim}", dtype=dtype, causal=causal), current_device()
    cases = [Case(problem, "normal", draw=draw) for draw in range(5)]
    presets = valid_presets(problem, device)
    variants = build([render(problem, config) for config in presets.values()], device.arch)
    for config, variant in zip(presets.values(), variants, strict=True):
        assert variant.library, variant.error
        record = verifier.verify_on(cases, Kernel.load(variant.library))
        assert record.passed, record.reason
        # For P between bf16's roundings there is fp16; for fp16's there is nothing.
        bound = 1.3 if dtype == "fp16" and config.family == TransposedMmaConfig.family else 1.2
        for name in ("dq", "dk", "dv"):
            ours, flash = (
                math.hypot(*(errors[key] for errors in record.errors.values())) for key in (name, f"torch_{name}")
            )
            assert ours <= bound * flash, f"{config.id}: {name}"


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


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_host_target_computes_the_same(preset: str, dtype: str) -> None:
    """The same text on the same inputs: all that may differ is an approximate exponential and the order of sums."""
    problem = Problem(dtype, 1, 4, 2, 300, 200, 128, causal=True)
    device, config = current_device(), PRESETS[preset]
    if reason := refusal(problem, config, device):
        pytest.skip(reason)
    on_device, on_host = (
        Kernel.load(build_one(render(problem, config), arch).library or Path()) for arch in (device.arch, HOST.arch)
    )
    inputs = make_inputs(Case(problem, "normal"), torch.device("cpu"))
    tensors = (inputs.q, inputs.k, inputs.v, inputs.forward.output, inputs.dout, inputs.forward.lse)
    expected = backward(on_host, *tensors, problem.softmax_scale)
    found = backward(on_device, *(tensor.cuda() for tensor in tensors), problem.softmax_scale)
    step = torch.finfo(inputs.q.dtype).eps / 2
    for name, ours, theirs in zip(("dq", "dk", "dv"), found, expected, strict=True):
        difference = (ours.cpu().float() - theirs.float()).norm() / theirs.float().norm()
        assert difference <= step / 2, f"{name}: {difference:.2g}"


QUEUED = (
    PRESETS["v3"],
    PRESETS["w64"],
    WgmmaConfig(dq_delayed=True, v_fragments=3, resync=True),
    PRESETS["w64first"],
    PRESETS["w64last"],
    replace(PRESETS["w64last"], delta_in_kernel=True),
    PRESETS["w64conv"],
    replace(PRESETS["t64"], dq_bulk_reduce=True),
)


@pytest.mark.parametrize("replayed", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("config", QUEUED, ids=lambda config: config.id)
def test_a_thousand_launches_on_two_streams(config: Config, deterministic: bool, replayed: bool) -> None:
    """Each stream has a workspace, in which anything lies at first. No hang, and no wrong bit of what has an order."""
    problem = Problem("bf16", 2, 8, 4, 1000, 1000, 128, causal=True, deterministic=deterministic)
    device, launches, at_a_time = current_device(), 1000, 10
    if reason := refusal(problem, config, device):
        pytest.skip(reason)
    (variant,) = build([render(problem, config)], device.arch)
    assert variant.library, variant.error
    kernel, case = Kernel.load(variant.library), Case(problem, "normal")
    inputs = make_inputs(case, torch.device("cuda"))
    tensors = (inputs.q, inputs.k, inputs.v, inputs.forward.output, inputs.dout, inputs.forward.lse)
    expected = backward(kernel, *tensors, case.scale, inputs.features)
    ordered = slice(0 if deterministic else 1, 3)  # dQ's additions may have none
    found = [tuple(torch.full_like(gradient, torch.nan) for gradient in expected) for _ in range(2)]
    workspaces = [
        torch.full_like(kernel.prepare(*tensors, *found[0], scale=case.scale).tensors[-1], 0xFF) for _ in range(2)
    ]
    wrong = [torch.zeros((), dtype=torch.bool, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()

    def launch(index: int) -> None:
        for _ in range(at_a_time):
            kernel.launch(*tensors, *found[index], scale=case.scale, workspace=workspaces[index])
            for ours, theirs in zip(found[index][ordered], expected[ordered], strict=True):
                wrong[index].logical_or_((ours != theirs).any())

    streams, graphs = [torch.cuda.Stream() for _ in range(2)], [torch.cuda.CUDAGraph() for _ in range(2)]
    for index in range(2) if replayed else ():
        with torch.cuda.graph(graphs[index], stream=streams[index]):
            launch(index)
    for _ in range(launches // (2 * at_a_time)):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                graphs[index].replay() if replayed else launch(index)
    torch.cuda.synchronize()
    assert not any(map(bool, wrong))
    for gradients in found:
        for ours, theirs in zip(gradients, expected, strict=True):
            assert (ours.float() - theirs.float()).norm() <= 1e-3 * theirs.float().norm()


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (Problem.parse("1_80_1000_128", causal=True), PRESETS["w64conv"]),
        (Problem.parse("1_80_1000_128", causal=True), PRESETS["w64last"]),
        (
            Problem.parse("1_80_1000_128", causal=True),
            replace(PRESETS["w64last"], delta_in_kernel=True, preprocess_rows=4),
        ),
        (Problem.parse("4_60_30_700_64"), replace(PRESETS["w128"], dq_epilogue_in_kernel=True)),
    ],
    ids=["causal", "the last key tile converts", "delta of the later heads in the kernel", "groups"],
)
def test_a_place_for_dq_is_used_again(problem: Problem, config: Config) -> None:
    """By more heads than there are places for, which are 72, or 56 where the last key tile converts."""
    device = current_device()
    if reason := refusal(problem, config, device):
        pytest.skip(reason)
    record = Verifier("cuda").verify_at(
        problem, Kernel.load(build_one(render(problem, config), device.arch).library or Path())
    )
    assert record.passed, record.reason
