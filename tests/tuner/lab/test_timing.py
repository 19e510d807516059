"""Timing: policies, quantiles, interleaving, poisoned outputs."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from bwdtune.gen.errors import UsageError
from bwdtune.gen.problem import Problem
from bwdtune.runtime.gpu import GpuState
from bwdtune.tuner.lab import stopwatch
from bwdtune.tuner.lab.stopwatch import Timed, time_kernels
from bwdtune.tuner.lab.timing import BENCH_POLICY, RACE_POLICY, SEARCH_POLICY, Policy, Timing, Timings, TimingStyle

CPU = torch.device("cpu")
QUICK = Policy(warmup_ms=1, budget_ms=20, min_samples=4, max_samples=8)


def test_quantiles() -> None:
    found = Timing.of([float(value) for value in range(1, 12)])
    assert (found.median_ms, found.low_ms, found.high_ms, found.samples) == (6, 2, 10, 11)
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0, 1)


def test_a_policys_id_names_all_that_matters() -> None:
    assert SEARCH_POLICY.id == "events1_cold-l2_w50ms_b150ms_n10-100"
    assert len({SEARCH_POLICY.id, RACE_POLICY.id, BENCH_POLICY.id, QUICK.id}) == 4


def test_a_style_is_a_part_of_the_policy() -> None:
    assert TimingStyle.parse("").applied_to(SEARCH_POLICY) == SEARCH_POLICY
    warm = TimingStyle.parse("sustained, warm,graph").applied_to(SEARCH_POLICY)
    assert warm.id == "events1_warm-l2_graph_w2000ms_b150ms_n10-100"
    assert TimingStyle.parse("sustained").applied_to(BENCH_POLICY) == BENCH_POLICY


def test_lengths_of_packed_sequences_are_a_part_of_the_policy() -> None:
    equal, listed = (
        SEARCH_POLICY.of(Problem.parse("2_2_100_64", varlen=True, lengths_as=how)) for how in ("equal", "1,2")
    )
    assert equal.id == SEARCH_POLICY.id + "_lengths-equal"
    assert listed.id == SEARCH_POLICY.id + "_lengths-2-of-17f8af97"
    assert SEARCH_POLICY.of(Problem.parse("2_2_100_64", varlen=True)) == SEARCH_POLICY


@pytest.mark.parametrize("text", ["hot", "warm,cold", "eager,graph", "l2"])
def test_an_unknown_style(text: str) -> None:
    with pytest.raises(UsageError, match="cold or warm, eager or graph, burst or sustained"):
        TimingStyle.parse(text)


def test_kernels_take_turns_and_outputs_are_poisoned_before_each_run() -> None:
    calls: list[str] = []

    def kernel(name: str) -> Timed:
        return Timed(lambda: calls.append(name), lambda: calls.append(f"poison {name}"))

    first_runs: list[str | None] = []
    timings = time_kernels({name: kernel(name) for name in "abc"}, QUICK, CPU, first_runs.append)
    assert first_runs == ["a", "b", "c", None]
    assert calls[::2] == [f"poison {name}" for name in calls[1::2]]
    order = calls[1::2]
    counted = order[-3 * QUICK.max_samples :]
    rounds = ["".join(counted[start : start + 3]) for start in range(0, len(counted), 3)]
    assert {"".join(sorted(round)) for round in rounds} == {"abc"}
    assert len(set(rounds)) > 2, "in an order that is drawn anew"
    assert all(len(times) == QUICK.max_samples for times in timings.rounds_ms.values())
    assert {timing.samples for timing in timings.values()} == {QUICK.max_samples}


def test_times_are_in_milliseconds_and_slow_kernels_run_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def lasting(seconds: float) -> Timed:
        def run() -> None:
            nonlocal now_s
            now_s += seconds

        return Timed(run)

    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: now_s))
    timings = time_kernels({"slow": lasting(0.02), "quick": lasting(0.001)}, QUICK, CPU)
    assert timings["slow"].median_ms == pytest.approx(20)
    assert timings["quick"].median_ms == pytest.approx(1)
    assert timings["slow"].samples == QUICK.min_samples
    assert time_kernels({"quick": lasting(0.001)}, QUICK, CPU)["quick"].samples == QUICK.max_samples


def test_a_failing_kernel_is_known_by_its_first_run() -> None:
    def fail() -> None:
        raise RuntimeError

    first_runs: list[str | None] = []
    with pytest.raises(RuntimeError):
        time_kernels({"a": Timed(lambda: None), "b": Timed(fail)}, QUICK, CPU, first_runs.append)
    assert first_runs == ["a", "b"]


@pytest.mark.parametrize(
    ("low", "high", "processes", "words"),
    [
        (0.99, 1.01, 3, []),
        (0.9, 1.4, None, ["the times of b spread by 50%"]),
        (0.9, 1.4, 3, ["the times of b spread by 50%", "(2 other processes use it)"]),
        (0.9, 1.4, 1, ["something else?"]),
    ],
)
def test_a_busy_gpu_is_noticed(low: float, high: float, processes: int | None, words: list[str]) -> None:
    notice = stopwatch._notice({"a": Timing(1, 1, 1.05, 9), "b": Timing(1, low, high, 9)}, processes)
    assert bool(notice) == bool(words)
    assert all(word in notice for word in words)


def test_the_clocks_own_grain_is_no_noise() -> None:
    assert stopwatch._notice({"tiny": Timing(0.01, 0.008, 0.012, 9)}, None) == ""


def test_timings_are_a_mapping_that_travels_between_processes() -> None:
    state = GpuState(clock_mhz=1800.0, power_w=699.0, throttled=("power cap",))
    timings = Timings({"a": Timing(1, 1, 1, 1)}, state=state, notice="noisy", unavailable={"fa": "no GPU"})
    copy = pickle.loads(pickle.dumps(timings))
    assert copy == timings
    assert dict(copy) == {"a": Timing(1, 1, 1, 1)}
    assert copy.state.clock_mhz == 1800.0


@pytest.mark.gpu
def test_events_on_the_gpu() -> None:
    device = torch.device("cuda:0")
    small, large = (torch.zeros(size, device=device) for size in (2**20, 2**28))
    timings = time_kernels(
        {"small": Timed(lambda: small.add_(1)), "large": Timed(lambda: large.add_(1))}, QUICK, device
    )
    assert 0 < timings["small"].median_ms < timings["large"].median_ms < 50
    assert timings.state.clock_mhz is None or timings.state.clock_mhz > 100
