"""What PyTorch would take by itself: named, and timed beside ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bwdtune.db.records import NO_FUSED_BACKWARD
from bwdtune.gen.problem import Problem
from bwdtune.runtime.verification.cases import Case
from bwdtune.runtime.verification.inputs import make_inputs
from bwdtune.tuner.lab.gpu_client import Worker
from bwdtune.tuner.lab.peers import PEERS, SAME_KERNEL, pytorchs_default
from bwdtune.tuner.lab.timing import SEARCH_POLICY

FUSED = {"cudnn", "flash", "flash_window", "efficient"}


def default_of(device: str, **features: Any) -> str:
    problem = Problem.parse("1_4_2_256_64", **features)
    return pytorchs_default(problem, make_inputs(Case(problem, "normal"), torch.device(device)))


def test_it_is_named_on_a_cpu_too() -> None:
    assert default_of("cpu", causal=True) == "cpu"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pytorch_has_no_fused_backward_of_a_softcap(device: str) -> None:
    assert default_of(device, causal=True, softcap=True) == NO_FUSED_BACKWARD


@pytest.mark.gpu
@pytest.mark.parametrize(
    "features",
    [{}, {"causal": True}, {"window_left": 64, "causal": True}, {"varlen": True}, {"varlen": True, "causal": True}],
    ids=str,
)
def test_it_is_a_fused_kernel(features: dict[str, Any]) -> None:
    assert default_of("cuda", **features) in FUSED


@pytest.mark.gpu
@pytest.mark.parametrize(
    "features",
    [{}, {"deterministic": True}, {"window_left": 64, "causal": True}, {"varlen": True, "causal": True}],
    ids=str,
)
def test_it_is_timed_beside_the_others(features: dict[str, Any]) -> None:
    worker, problem = Worker("cuda:0"), Problem.parse("1_4_2_512_64", **features)
    try:
        timings = worker.time(problem, [], tuple(PEERS), SEARCH_POLICY)
    finally:
        worker.close()
    assert timings.default_kernel in FUSED, timings.unavailable
    assert timings["default"].median_ms > 0
    alias = SAME_KERNEL.get(timings.default_kernel)
    if alias in timings and not problem.varlen:
        assert timings["default"] == timings[alias], "one kernel is timed once"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "problem",
    [
        Problem.parse("1_4_2_512_64", causal=True, softcap=True),
        Problem.parse("2_4_2_100x300_64", causal=True, varlen=True),  # aligned top-left, with different lengths
    ],
    ids=lambda problem: problem.features_label,
)
def test_what_pytorch_lacks_is_not_timed(problem: Problem) -> None:
    worker = Worker("cuda:0")
    try:
        timings = worker.time(problem, [], ("default", "fa"), SEARCH_POLICY)
    finally:
        worker.close()
    assert not timings.by_name
    assert timings.default_kernel == NO_FUSED_BACKWARD
    assert "no fused backward" in timings.unavailable["default"]
    assert "PyTorch's fa has no" in timings.unavailable["fa"]


def test_packed_sequences_say_that_their_lengths_are_the_same() -> None:
    """As a caller does: else PyTorch's fused kernels, which align bottom-right, would not be their peers."""
    for shape, same in (("2_4_2_100_64", True), ("2_4_2_100x300_64", False)):
        case = Case(Problem.parse(shape, causal=True, varlen=True), "normal")
        sequences = case.features(torch.device("cpu")).sequences
        assert sequences
        assert (sequences.cu_seqlens_q is sequences.cu_seqlens_kv) == same
