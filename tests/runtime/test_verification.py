"""The third gate: right kernels pass, each kind of wrong kernel is rejected with its reason."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import covering_configs, valid_presets
from stub_kernels import stub_library

from bwdtune.gen.build.jobs import build
from bwdtune.gen.device import HOST
from bwdtune.gen.families import PRESETS, Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import Kernel
from bwdtune.runtime.verification.cases import Case, cases
from bwdtune.runtime.verification.inputs import INPUTS, make_inputs
from bwdtune.runtime.verification.reference import head_reference
from bwdtune.runtime.verification.verifier import Verifier

VERIFIER = Verifier("cpu")
PROBLEM = Problem.parse("2_2_1000_32", causal=True)


def stub(problem: Problem = PROBLEM, fault: str = "NONE") -> Kernel:
    return Kernel.load(stub_library(dtype=problem.dtype, head_dim=problem.head_dim, causal=problem.causal, fault=fault))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", ["4_8_4096_32", "1_6_2_70_64"])
def test_a_right_kernel_passes(shape: str, dtype: str, causal: bool) -> None:
    problem = Problem.parse(shape, dtype=dtype, causal=causal)
    record = VERIFIER.verify(problem, stub(problem))
    assert record.passed, record.reason
    assert record.reason == ""
    assert 0 < record.max_error < (0.02 if dtype == "bf16" else 0.0025)
    assert list(record.errors) == [case.name for case in cases(problem, cuda=False)]
    for errors in record.errors.values():
        assert set(errors) == {"dq", "dk", "dv", "torch_dq", "torch_dk", "torch_dv"}
        assert max(errors.values()) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("HALF_OF_THE_ROWS", "of dk were not written"),
        ("ACCUMULATES", "of dq were not written or are not finite"),
        ("OTHER_MASK", "the relative error of"),
        ("CHANGES_AN_INPUT", "it changed its input k"),
        ("NAN_TAIL", "elements of dq were not written or are not finite"),
        ("ONE_ELEMENT", "an element of dv is off|the relative error of dv"),
        ("WRITES_PAST_THE_END", "it wrote outside dk"),
        ("FORGETS_THE_SCALE", "the relative error of dq"),
        ("READS_THE_WORKSPACE", "of dq were not written or are not finite"),
        ("FORGETS_STRIDES", r"\(B, S, H, D\): the relative error of"),
        ("ERROR_CODE", "stub: unspecified launch failure"),
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_wrong_kernel_is_rejected(fault: str, reason: str, causal: bool) -> None:
    problem = Problem.parse("2_2_1000_32", causal=causal)
    record = VERIFIER.verify(problem, stub(problem, fault))
    assert not record.passed
    assert re.search(reason, record.reason), record.reason


def test_a_group_of_heads_must_be_summed_up() -> None:
    problem = Problem.parse("1_4_2_64_32")
    assert "the relative error of dv" in VERIFIER.verify(problem, stub(problem, "ONE_QUERY_HEAD")).reason
    single = Problem.parse("1_2_64_32")
    assert VERIFIER.verify(single, stub(single, "ONE_QUERY_HEAD")).passed


def test_a_kernel_for_the_other_mask_is_rejected() -> None:
    full = Problem.parse("2_2_1000_32", causal=False)
    assert not VERIFIER.verify(full, stub(PROBLEM)).passed
    assert not VERIFIER.verify(PROBLEM, stub(full)).passed


def test_a_right_kernel_after_a_wrong_one_and_the_reverse() -> None:
    """Buffers are not shared: nobody passes or fails on what another has written."""
    faults = ("NONE", "HALF_OF_THE_ROWS", "NONE", "CHANGES_AN_INPUT", "NONE")
    verdicts = [VERIFIER.verify(PROBLEM, stub(fault=fault)).passed for fault in faults]
    assert verdicts == [True, False, True, False, True]


def test_at_the_problems_own_sizes() -> None:
    problem = Problem.parse("3_4_2_100_32", causal=True)
    record = VERIFIER.verify_at(problem, stub(problem))
    assert record.passed, record.reason
    assert list(record.errors) == ["3_4_2_100_32 bf16 causal normal"]
    assert not VERIFIER.verify_at(problem, stub(problem, "ONE_ELEMENT")).passed


def test_chance_beats_no_right_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this draw the errors of a kernel and PyTorch's, which are alike over many of them, are far apart."""
    problem = Problem.parse("1_1_64_64", dtype="fp16")
    unlucky = Case(problem, "far below zero", draw=111)
    (kernel,) = built(problem, [PRESETS["t64"]], HOST.arch)
    record = VERIFIER.verify_on([unlucky], kernel)
    assert record.passed, record.reason
    errors = record.errors[unlucky.name]
    assert errors["dk"] < 1.6 * errors["torch_dk"]
    monkeypatch.setattr("bwdtune.runtime.verification.verifier._NEAR", 0.0)
    assert "the relative error of dk" in VERIFIER.verify_on([unlucky], kernel).reason


def test_what_is_always_a_little_wrong_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, drawn = stub(), []
    launch = kernel.launch

    def launch_wrongly(*tensors: torch.Tensor, **options: Any) -> None:
        launch(*tensors, **options)
        options["dk"].mul_(1.008)
        drawn.append(options["dk"])

    monkeypatch.setattr(kernel, "launch", launch_wrongly)
    case = Case(Problem.parse("1_2_70_32", causal=True), "normal")
    record = VERIFIER.verify_on([case], kernel)
    assert len(drawn) > 1, "the error is near its limit"
    assert "the relative error of dk" in record.reason


@pytest.mark.parametrize("always", [False, True])
def test_a_bias_gradient_is_judged_over_many_draws_too(monkeypatch: pytest.MonkeyPatch, always: bool) -> None:
    """What is near its limit once passes, and what always is does not."""
    problem = Problem("fp16", 1, 2, 2, 33, 40, 32, bias="1_1_S", bias_grad=True)
    (kernel,) = built(problem, [PRESETS["v2"]], HOST.arch)
    launch, calls = kernel.launch, 0

    def launch_wrongly(*tensors: torch.Tensor, **options: Any) -> None:
        nonlocal calls
        launch(*tensors, **options)
        if always or not calls:
            options["dbias"].mul_(1.0018)
        calls += 1

    monkeypatch.setattr(kernel, "launch", launch_wrongly)
    record = VERIFIER.verify_on([Case(problem, "normal")], kernel)
    assert calls > 1, "the error is near its limit"
    assert record.passed is not always, record.reason
    assert not always or "the relative error of dbias" in record.reason


@pytest.mark.parametrize("heads_inside", [False, True])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize(
    "problem", [Problem("bf16", 2, 4, 2, 40, 23, 32, True), Problem("fp16", 1, 2, 2, 23, 40, 32, False)]
)
def test_the_reference_is_the_derivative(problem: Problem, inputs: str, heads_inside: bool) -> None:
    case = Case(problem, inputs, heads_inside)
    made = make_inputs(case, torch.device("cpu"))
    leaves = [tensor.double().requires_grad_() for tensor in (made.q, made.k, made.v)]
    output = F.scaled_dot_product_attention(*leaves, is_causal=problem.causal, enable_gqa=True)
    assert torch.allclose(output, made.forward.output.double(), atol=0.03 * float(output.detach().abs().max()))
    exact = torch.autograd.grad(output, leaves, made.dout.double())
    for batch in range(problem.batch):
        for head in range(problem.heads_kv):
            reference = head_reference(case, made, batch, head)
            errors = reference.errors(exact)
            assert max(relative for relative, _ in errors.values()) < 1e-12
            assert max(worst for _, worst in errors.values()) < 1e-12


def test_the_reference_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(Problem("bf16", 1, 2, 1, 50, 30, 32, True), "normal")
    made = make_inputs(case, torch.device("cpu"))
    whole = head_reference(case, made, 0, 0)
    monkeypatch.setattr("bwdtune.runtime.verification.reference._CHUNK_ELEMENTS", 30 * 7)
    blocks = head_reference(case, made, 0, 0)
    for a, b in zip((*whole.gradients, *whole.terms), (*blocks.gradients, *blocks.terms), strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize(
    "problem", [Problem.parse("8_16_4096_128", causal=True), Problem.parse("1_8_2_9_64", dtype="fp16")]
)
@pytest.mark.parametrize("cuda", [True, False])
def test_cases_keep_what_a_kernel_is_compiled_for(problem: Problem, cuda: bool) -> None:
    found = cases(problem, cuda=cuda)
    for case in found:
        assert (case.problem.dtype, case.problem.head_dim, case.problem.causal) == (
            problem.dtype,
            problem.head_dim,
            problem.causal,
        )
        assert case.problem.heads_q // case.problem.heads_kv == problem.heads_q // problem.heads_kv
    assert {case.inputs for case in found} == set(INPUTS)
    lengths = {(case.problem.seqlen_q, case.problem.seqlen_kv) for case in found}
    assert (1, 1) in lengths
    assert any(q < kv for q, kv in lengths)
    assert any(q > kv for q, kv in lengths)
    assert any(q % 16 and kv % 16 and q > 128 for q, kv in lengths)
    assert len({case.name for case in found}) == len(found)


def test_errors_of_what_is_not_finite() -> None:
    case = Case(Problem("bf16", 1, 1, 1, 4, 4, 32, False), "normal")
    made = make_inputs(case, torch.device("cpu"))
    reference = head_reference(case, made, 0, 0)
    broken = tuple(torch.full((1, 1, 4, 32), math.nan) for _ in range(3))
    assert set(reference.errors(broken).values()) == {(math.inf, math.inf)}


@pytest.fixture(scope="module")
def gpu_verifier() -> Verifier:
    return Verifier("cuda:0")


def built(problem: Problem, configs: Iterable[Config], arch: str) -> list[Kernel]:
    variants = build([render(problem, config) for config in configs], arch)
    for variant in variants:
        assert variant.library, f"{variant.source.name}: {variant.error}"
    return [Kernel.load(variant.library) for variant in variants if variant.library]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", ["1_2_512_64", "1_2_512_128", "1_4_2_512_128"])
def test_presets_on_a_gpu(gpu_verifier: Verifier, shape: str, dtype: str, causal: bool) -> None:
    problem, device = Problem.parse(shape, dtype=dtype, causal=causal), current_device()
    presets = valid_presets(problem, device)
    assert presets
    for kernel in built(problem, presets.values(), device.arch):
        for record in (gpu_verifier.verify(problem, kernel), gpu_verifier.verify_at(problem, kernel)):
            assert record.passed, f"{kernel.info.config}: {record.reason}"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_value_of_every_parameter_on_a_gpu(gpu_verifier: Verifier, head_dim: int, causal: bool) -> None:
    problem, device = Problem.parse(f"1_4_2_512_{head_dim}", causal=causal), current_device()
    failures = []
    for kernel in built(problem, covering_configs(problem, device), device.arch):
        record = gpu_verifier.verify(problem, kernel)
        if not record.passed:
            failures.append(f"{kernel.info.config}: {record.reason}")
    assert not failures


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["OTHER_SCALE", "OTHER_MASK"])
def test_a_wrong_kernel_is_rejected_on_a_gpu(gpu_verifier: Verifier, fault: str) -> None:
    """By a right one that is asked for something else."""
    problem, device = Problem.parse("1_2_512_64", causal=True), current_device()
    other = problem if fault == "OTHER_SCALE" else Problem.parse("1_2_512_64", causal=False)
    (kernel,) = built(other, [PRESETS["v2"]], device.arch)
    if fault == "OTHER_SCALE":
        launch = kernel.launch
        kernel.launch = lambda *tensors, scale, **options: launch(*tensors, scale=scale * 1.02, **options)  # type: ignore[method-assign]
    record = gpu_verifier.verify(problem, kernel)
    assert not record.passed
    assert "error of" in record.reason
