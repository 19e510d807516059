"""Kernels with every feature: a sample of the matrix on the host target, all of it on the GPU."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import feature_matrix
import pytest
import torch

from bwdtune.gen.build.jobs import build
from bwdtune.gen.device import HOST, Device
from bwdtune.gen.families import FAMILIES, PRESETS, Config, MmaConfig, TransposedMmaConfig, WgmmaConfig
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime import torch_attention
from bwdtune.runtime.features import Sequences
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import Kernel, KernelError, backward
from bwdtune.runtime.verification.cases import Case
from bwdtune.runtime.verification.inputs import make_inputs
from bwdtune.runtime.verification.verifier import Verifier

pytestmark = pytest.mark.slow

MATRIX, SAMPLE = feature_matrix.matrix(), feature_matrix.sample()


def wrong(kernels: Sequence[feature_matrix.Kernel], verifier: Verifier, device: Device) -> list[str]:
    """What the kernels compute wrong, but for a few that need all registers and of which ptxas makes no fast kernel."""
    sources = [render(kernel.problem, kernel.config(device)) for kernel in kernels]
    faults, serialized = [], 0
    for kernel, variant in zip(kernels, build(sources, device.arch), strict=True):
        if "C7512" in (variant.error or ""):
            serialized += 1
            continue
        assert variant.library, variant.error
        record = verifier.verify_on(kernel.cases, Kernel.load(variant.library))
        if not record.passed:
            faults.append(f"{variant.source.name}: {record.reason}")
    assert serialized <= len(kernels) // 20
    return faults


def test_the_matrix_has_every_mask_with_every_feature_and_thousands_of_cases() -> None:
    assert sum(len(kernel.cases) for kernel in MATRIX) >= 2000
    assert len({kernel.name for kernel in MATRIX}) == len(MATRIX)
    assert all(case.problem.kernel_spec == kernel.problem.kernel_spec for kernel in MATRIX for case in kernel.cases)
    for name in ("split_gqa_heads", "dq_bulk_reduce"):
        assert {getattr(kernel.config(HOST), name, None) for kernel in SAMPLE} >= {False, True}
    assert {kernel.problem.head_dim for kernel in MATRIX} >= {32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256}


def test_the_sample_has_every_feature_of_every_family() -> None:
    for family, config_type in FAMILIES.items():
        kernels = [kernel for kernel in SAMPLE if kernel.family == family]
        assert {feature for kernel in kernels for feature in kernel.problem.required_features} == config_type.features


@pytest.mark.parametrize("kernel", SAMPLE, ids=lambda kernel: kernel.name)
def test_a_sample_on_the_host(kernel: feature_matrix.Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_RACECHECK", "1")
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", "2")
    small = tuple(case for case in kernel.cases if sum(case.positions) <= 400)
    assert not wrong([replace(kernel, cases=small[:5])], Verifier("cpu"), HOST)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "head_dims"), sorted({(kernel.family, kernel.problem.head_dims) for kernel in MATRIX})
)
def test_all_of_it_on_the_gpu(family: str, head_dims: str) -> None:
    device = current_device()
    if family == WgmmaConfig.family and not device.has_wgmma:
        pytest.skip(f"{device.name} has no wgmma")
    kernels = [kernel for kernel in MATRIX if (kernel.family, kernel.problem.head_dims) == (family, head_dims)]
    assert not wrong(kernels, Verifier("cuda"), device)


WINDOW = {"window_left": 200, "window_right": 100}
DETERMINISTIC_PROBLEMS = [
    Problem("bf16", 4, 8, 4, 1500, 1300, 64, **{**mask, **(WINDOW if "window_left" in mask else {})}, **packed)
    for mask in feature_matrix.MASKS
    for packed in ({"deterministic": True}, {"deterministic": True, "varlen": True})
]
DETERMINISTIC = [
    feature_matrix.Kernel(family, problem)
    for family, config_type in FAMILIES.items()
    for problem in DETERMINISTIC_PROBLEMS
    if set(problem.required_features) <= config_type.features
]


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", DETERMINISTIC, ids=lambda drawn: drawn.name)
def test_the_same_bits_fifty_times(drawn: feature_matrix.Kernel) -> None:
    """Many more blocks than fit at a time, next to other work on another stream, so that their order varies."""
    device, problem = current_device(), drawn.problem
    if drawn.family == WgmmaConfig.family and not device.has_wgmma:
        pytest.skip(f"{device.name} has no wgmma")
    (variant,) = build([render(problem, drawn.config(device))], device.arch)
    assert variant.library, variant.error
    kernel, case = Kernel.load(variant.library), Case(problem, "normal")
    inputs = make_inputs(case, torch.device("cuda"))
    forward = inputs.forward
    tensors = (inputs.q, inputs.k, inputs.v, forward.output, inputs.dout, forward.lse)
    noise, stream = torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    first = backward(kernel, *tensors, case.scale, inputs.features)
    for _ in range(50):
        with torch.cuda.stream(stream):
            torch.mm(noise, noise)
        again = backward(kernel, *tensors, case.scale, inputs.features)
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a, b)


ORDERED: dict[str, Config] = {
    **{name: PRESETS[name] for name in ("v3", "t64", "t128", "w64", "w64first")},
    "t64 in bulk": replace(PRESETS["t64"], dq_bulk_reduce=True),
    "w64lag": replace(PRESETS["w64lag"], skip_masked=False),
}


@pytest.mark.parametrize("name", ORDERED)
def test_the_same_bits_whatever_runs_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of keys add to dQ what is huge and cancels: any other between them is rounded with it."""
    problem = Problem("bf16", 1, 2, 1, 128, 7 * 128, 64, deterministic=True)
    case = Case(problem, "normal")
    inputs = make_inputs(case, torch.device("cpu"))
    q, k, v = inputs.q, inputs.k, inputs.v
    k[:, :, 128:256], v[:, :, 128:256] = k[:, :, :128], v[:, :, :128]
    q[..., 0], k[:, :, :128, 0], k[:, :, 128:256, 0] = 0, 2.0**20, -(2.0**20)
    forward = torch_attention.forward(q, k, v, False, case.scale)
    kernel = Kernel.load(library_of(problem, ORDERED[name]))

    def gradients() -> tuple[torch.Tensor, ...]:
        return backward(kernel, q, k, v, forward.output, inputs.dout, forward.lse, case.scale, inputs.features)

    first = gradients()
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", "4")
    monkeypatch.setenv("BWDTUNE_HOST_SM_COUNT", "4")
    for _ in range(10):
        for a, b in zip(first, gradients(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", ["full", "causal", "softcap"])
def test_others_wait_for_who_stores_first(mask: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks run beside each other, in a workspace full of what was there before; heads are grouped, lengths differ."""
    features = {} if mask == "full" else {mask: True}
    config = (
        PRESETS["w64first"]
        if mask != "softcap"
        else replace(PRESETS["w64first"], lse_delta_k_step=False, v_fragments=0)
    )
    monkeypatch.setenv("BWDTUNE_HOST_RACECHECK", "1")
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", "4")
    monkeypatch.setenv("BWDTUNE_HOST_SM_COUNT", "4")
    for lengths in ((130, 400), (400, 150)):
        problem = Problem("bf16", 1, 4, 2, *lengths, 64, **features, deterministic=deterministic)
        record = Verifier("cpu").verify_on([Case(problem, "normal")], Kernel.load(library_of(problem, config)))
        assert record.passed, record.reason


QUEUED = {
    "t128, keys that no query sees": (PRESETS["t128"], Problem("bf16", 2, 4, 2, 70, 300, 64, causal=True)),
    "t64, more stages": (
        replace(PRESETS["t64"], q_stages=3, do_stages=2, v_in_registers=False),
        Problem("bf16", 2, 4, 4, 200, 200, 64),
    ),
    "two groups": (
        TransposedMmaConfig(block_q=32, block_kv=128, num_warps=8, query_groups=2, q_stages=3),
        Problem("fp16", 3, 2, 2, 150, 260, 64),
    ),
    "bulk": (replace(PRESETS["t64"], dq_bulk_reduce=True), Problem("bf16", 2, 4, 2, 130, 260, 64, window_left=60)),
    "packed": (PRESETS["t64"], Problem("bf16", 3, 2, 2, 260, 260, 64, causal=True, varlen=True)),
    "packed, warpgroups": (PRESETS["w64lag"], Problem("bf16", 3, 4, 2, 260, 260, 64, causal=True, varlen=True)),
    "packed, who stores first": (
        PRESETS["w64first"],
        Problem("fp16", 3, 2, 2, 260, 260, 64, varlen=True, deterministic=True),
    ),
}


@pytest.mark.parametrize("name", QUEUED)
def test_blocks_take_items_beside_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes several, whose iterations are odd in number, or none; of short sequences, some have no keys."""
    config, problem = QUEUED[name]
    monkeypatch.setenv("BWDTUNE_HOST_RACECHECK", "1")
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", "3")
    monkeypatch.setenv("BWDTUNE_HOST_SM_COUNT", "3")
    lengths = ((260, 260), (33, 20), (1, 150)) if problem.varlen else ()
    record = Verifier("cpu").verify_on(
        [Case(problem, "normal", lengths=lengths)], Kernel.load(library_of(problem, config))
    )
    assert record.passed, record.reason


FOLLOWED = Problem("bf16", 2, 2, 1, 100, 100, 64, causal=True, varlen=True)


def leaks(kernel: Kernel) -> bool:
    """Whether what lies behind a sequence reaches its gradients."""
    case = Case(FOLLOWED, "normal", lengths=((100, 70), (50, 100)))
    inputs = make_inputs(case, torch.device("cpu"))
    tensors = [inputs.q, inputs.k, inputs.v, inputs.forward.output, inputs.dout, inputs.forward.lse]
    expected = backward(kernel, *tensors, case.scale, inputs.features)
    inputs.q[:, :, 100:] = inputs.dout[:, :, 100:] = math.nan
    inputs.k[:, :, 70:] = inputs.v[:, :, 70:] = math.nan
    found = backward(kernel, *tensors, case.scale, inputs.features)
    ends = {"dq": 100, "dk": 70, "dv": 70}
    return not all(
        torch.equal(ours[:, :, :end], theirs[:, :, :end])
        for ours, theirs, end in zip(found, expected, ends.values(), strict=True)
    )


def test_what_lies_behind_a_sequence_does_not_matter() -> None:
    """Its last tile holds rows of the next one: not a number times nothing must be nothing."""
    no_swizzle = MmaConfig(64, 64, 2, k_in_registers=False, v_in_registers=False, swizzle=0)
    added_by_threads = replace(PRESETS["w64lag"], dq_bulk_reduce=False)
    presets = [PRESETS[name] for name in ("v3", "t64", "t128", "w64lag", "w64first")]
    for config in (*presets, no_swizzle, added_by_threads):
        assert not leaks(Kernel.load(library_of(FOLLOWED, config))), config.id


def test_it_is_caught_that_a_copy_has_no_bounds() -> None:
    """The same row by other coordinates: one that no end is near, and one that is past the rows."""
    source = render(FOLLOWED, PRESETS["w64"])
    bounded, unbounded = "END_OF_ROWS - length + row, head, first + length", "row, head, first + END_OF_ROWS"
    assert bounded in source.text
    (variant,) = build([replace(source, text=source.text.replace(bounded, unbounded))], HOST.arch)
    assert variant.library, variant.error
    # Past all rows lies what is no tensor, or another one: which, the allocator decides.
    try:
        found = leaks(Kernel.load(variant.library))
    except KernelError as error:
        found = "outside all buffers" in str(error)
    assert found


@pytest.mark.parametrize(
    "config",
    [PRESETS["v3"], replace(PRESETS["v3"], split_gqa_heads=True), PRESETS["t64"], PRESETS["w64first"]],
    ids=str,
)
def test_keys_outside_of_all_sequences_are_left_as_they_were_or_zero(config: Config) -> None:
    problem = Problem("bf16", 2, 4, 2, 40, 40, 64, causal=True, varlen=True)
    kernel = Kernel.load(library_of(problem, config))
    case = Case(problem, "normal", lengths=((20, 30), (40, 40)))
    inputs = make_inputs(case, torch.device("cpu"))
    tensors = [inputs.q, inputs.k, inputs.v, inputs.forward.output, inputs.dout, inputs.forward.lse]
    _, *expected = backward(kernel, *tensors, case.scale, inputs.features)
    before, after = 16, 8
    k, v = (torch.nn.functional.pad(tensor, (0, 0, before, after), value=math.nan) for tensor in tensors[1:3])
    sequences = inputs.features.sequences
    assert sequences
    moved = replace(sequences, cu_seqlens_kv=sequences.cu_seqlens_kv + before)
    dq, dk, dv = torch.empty_like(inputs.q), torch.full_like(k, 7.0), torch.full_like(v, 7.0)
    q, _, _, o, dout, lse = tensors
    kernel.launch(
        q, k, v, o, dout, lse, dq, dk, dv, scale=case.scale, features=replace(inputs.features, sequences=moved)
    )
    for gradient, exact in zip((dk, dv), expected, strict=True):
        inside = gradient[:, :, before:-after]
        assert (inside - exact).norm() <= 1e-2 * exact.norm()
        outside = 0 if kernel.info.writes_all_rows else 7
        assert (gradient[:, :, :before] == outside).all()
        assert (gradient[:, :, -after:] == outside).all()
    assert kernel.info.writes_all_rows == isinstance(config, WgmmaConfig)


PACKED_CONFIGS: dict[str, tuple[Config, bool]] = {
    "v3, deterministic": (PRESETS["v3"], True),
    "v3 split": (replace(PRESETS["v3"], split_gqa_heads=True), False),
    "t64, deterministic": (PRESETS["t64"], True),
    "w64lag": (PRESETS["w64lag"], False),
    "w64, deterministic": (PRESETS["w64"], True),
    "w64first": (PRESETS["w64first"], False),
}
"""With whether gradients must be the same bits: who waits for a turn must not wait for one that never comes."""
WRONG_LENGTHS = {
    # cu_seqlens of q and of keys, the longest of each; and what of 300 rows is right all the same
    "ends past the tensors": ((0, 100, 150, 350), (0, 100, 180, 400), (170, 170), (slice(0, 300), slice(0, 300))),
    "falls": ((0, 100, 60, 250), (0, 100, 60, 250), (200, 200), (slice(0, 0), slice(0, 0))),
    "begins before the tensors": (
        (-50, 100, 150, 300),
        (-5, 100, 180, 300),
        (150, 150),
        (slice(0, 300), slice(0, 300)),
    ),
    "the longest is said to be shorter": ((0, 200, 220, 300), (0, 150, 300, 300), (64, 64), (slice(200, 220), None)),
}


@pytest.mark.parametrize("wrong", WRONG_LENGTHS)
@pytest.mark.parametrize("name", PACKED_CONFIGS)
def test_lengths_that_cannot_be(name: str, wrong: str) -> None:
    """No access outside of the tensors, which the host target finds, and no endless wait; and what can be right is."""
    config, deterministic = PACKED_CONFIGS[name]
    problem = Problem("bf16", 3, 2, 1, 300, 300, 64, causal=True, varlen=True, deterministic=deterministic)
    kernel = Kernel.load(library_of(problem, config))
    starts_q, starts_kv, longest, right = WRONG_LENGTHS[wrong]

    def within(starts: tuple[int, ...]) -> list[int]:
        return [min(max(start, 0), 300) for start in starts]

    pairs = [[b - a for a, b in itertools.pairwise(within(starts))] for starts in (starts_q, starts_kv)]
    lengths = tuple(zip(*([max(length, 0) for length in lengths] for lengths in pairs), strict=True))
    case = Case(problem, "normal", lengths=((300, 300), (0, 0), (0, 0)) if wrong == "falls" else lengths)
    inputs = make_inputs(case, torch.device("cpu"))
    tensors = [inputs.q, inputs.k, inputs.v, inputs.forward.output, inputs.dout, inputs.forward.lse]
    expected = backward(kernel, *tensors, case.scale, inputs.features)
    sequences = Sequences(*(torch.tensor(starts, dtype=torch.int32) for starts in (starts_q, starts_kv)), *longest)
    found = backward(kernel, *tensors, case.scale, replace(inputs.features, sequences=sequences))
    for gradient, ours, theirs in zip(("dq", "dk", "dv"), found, expected, strict=True):
        rows = right[0 if gradient == "dq" else 1]
        if rows is not None:
            assert torch.allclose(ours[:, :, rows].float(), theirs[:, :, rows].float(), rtol=1e-2, atol=1e-4), gradient


@pytest.mark.parametrize("name", ["w64lag", "w64first"])
def test_many_sequences(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a warp has lanes, so that a lane of the schedule has several; and empty ones of each kind."""
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", "2")
    monkeypatch.setenv("BWDTUNE_HOST_SM_COUNT", "3")
    drawn = random.Random(7)
    lengths = [(drawn.choice((0, 1, 17, 64, 65)), drawn.choice((0, 3, 64, 130))) for _ in range(70)]
    lengths[40] = (300, 200)
    problem = Problem("bf16", len(lengths), 2, 1, 300, 200, 64, causal=True, varlen=True)
    kernel = Kernel.load(library_of(problem, PRESETS[name]))
    record = Verifier("cpu").verify_on([Case(problem, "normal", lengths=tuple(lengths))], kernel)
    assert record.passed, record.reason


@pytest.mark.parametrize("preset", ["v3", "t64", "w64lag"])
def test_queries_outside_of_all_sequences_add_nothing_to_the_gradient_of_sinks(preset: str) -> None:
    problem = Problem("bf16", 2, 4, 2, 40, 40, 64, causal=True, varlen=True, lse_grad=True, sink=True)
    kernel = Kernel.load(library_of(problem, PRESETS[preset]))
    case = Case(problem, "normal", lengths=((20, 30), (40, 40)))
    inputs = make_inputs(case, torch.device("cpu"))
    tensors = [inputs.q, inputs.k, inputs.v, inputs.forward.output, inputs.dout, inputs.forward.lse]
    exact = backward(kernel, *tensors, case.scale, inputs.features, dlse=inputs.dlse, sink=inputs.sink)[-1]
    before, after = 16, 8

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        sides = (0, 0, before, after) if tensor.dim() == 4 else (before, after)
        return torch.nn.functional.pad(tensor, sides, value=3.0)

    q, k, v, output, dout, lse = tensors
    assert inputs.features.sequences
    assert inputs.dlse is not None
    starts = inputs.features.sequences.cu_seqlens_q + before
    features = replace(inputs.features, sequences=replace(inputs.features.sequences, cu_seqlens_q=starts))
    rows = [moved(tensor) for tensor in (q, output, dout, lse, inputs.dlse)]
    run = partial(
        backward, kernel, rows[0], k, v, rows[1], rows[2], rows[3], case.scale, dlse=rows[4], sink=inputs.sink
    )
    assert torch.allclose(run(features)[-1], exact, rtol=1e-5)
    # Nor do rows past the length that the longest sequence is said to have.
    shorter = replace(features, sequences=replace(features.sequences, seqlen_q=20))
    for tensor in rows:
        tensor.narrow(2, before + 40, 20).fill_(math.nan)
    short = [tensor[:, :, :40] for tensor in (q, output, dout, lse, inputs.dlse)]
    starts = torch.tensor([0, 20, 40], dtype=torch.int32)
    as_short = replace(inputs.features, sequences=replace(inputs.features.sequences, cu_seqlens_q=starts))
    alone = backward(
        kernel, short[0], k, v, short[1], short[2], short[3], case.scale, as_short, dlse=short[4], sink=inputs.sink
    )
    assert torch.allclose(run(shorter)[-1], alone[-1], rtol=1e-5)


@pytest.mark.parametrize("preset", ["t64", "w64"])
def test_rows_that_a_bias_hides_add_nothing_where_no_gradient_flows_into_them(preset: str) -> None:
    """Such a bias leaves no digits for the scores, and a log-sum-exp is rounded: P must stay a number."""
    problem = Problem("bf16", 1, 2, 2, 100, 130, 64, bias="1_1_S", bias_dtype="fp32", bias_grad=True)
    case = Case(problem, "normal")
    inputs = make_inputs(case, torch.device("cpu"))
    assert inputs.bias is not None
    q, k, v, dout, hidden = inputs.q, inputs.k, inputs.v, inputs.dout, slice(40, 50)
    dout[:, :, hidden] = 0
    kernel = Kernel.load(library_of(problem, PRESETS[preset]))
    found = []
    for value in (0.0, -1e15):
        bias = inputs.bias.clone()
        bias[:, :, hidden] = value
        forward = torch_attention.forward(q, k, v, False, case.scale, bias=bias)
        lse = forward.lse.clone()
        lse[:, :, hidden] = lse[:, :, hidden].nextafter(torch.tensor(-math.inf))
        found.append(backward(kernel, q, k, v, forward.output, dout, lse, case.scale, bias=bias))
    for shown, gradient in zip(*found, strict=True):
        assert torch.equal(shown, gradient)


def library_of(problem: Problem, config: Config) -> Path:
    (variant,) = build([render(problem, config)], HOST.arch)
    assert variant.library, variant.error
    return variant.library


@pytest.mark.parametrize(("name", "head_dim", "head_dim_v"), [("w64split", 136, 136), ("w64mla", 136, 64)])
def test_probabilities_that_a_sink_leaves_tiny(name: str, head_dim: int, head_dim_v: int) -> None:
    """Of about 2^-23, below the normal numbers of fp16, in which P is kept until dS is made of it."""
    problem = Problem("bf16", 1, 2, 1, 64, 64, head_dim, value_head_dim=head_dim_v, sink=True)
    generator, sink = torch.Generator().manual_seed(0), torch.full((2,), 16.0)
    q, k, v, dout = (
        torch.randn(1, heads, 64, columns, generator=generator).bfloat16()
        for heads, columns in ((2, head_dim), (1, head_dim), (1, head_dim_v), (2, head_dim_v))
    )
    scale = problem.softmax_scale
    forward = torch_attention.forward(q, k, v, False, scale, sink=sink)
    kernel = Kernel.load(library_of(problem, PRESETS[name]))
    *found, _ = backward(kernel, q, k, v, forward.output, dout, forward.lse, scale, sink=sink)
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    scores = torch.cat((exact[0] @ exact[1].mT * scale, sink.double().view(1, 2, 1, 1).expand(1, 2, 64, 1)), dim=-1)
    expected = torch.autograd.grad(scores.softmax(-1)[..., :-1] @ exact[2], exact, dout.double())
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).norm() <= 0.005 * theirs.norm()
