"""``tuner bench --direction both``: whole calls, from a table of times and on the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from bwdtune.db.records import Environment, GpuKey
from bwdtune.gen.device import H200
from bwdtune.gen.errors import UsageError
from bwdtune.gen.problem import Problem
from bwdtune.tuner.commands.bench_calls import CallsReport, bench_calls
from bwdtune.tuner.lab.gpu_client import Worker
from bwdtune.tuner.lab.timing import BENCH_POLICY, Policy, Timing, Timings

SEED = Problem.parse("8_16_4096_128", causal=True)
ENVIRONMENT = Environment(GpuKey("NVIDIA H200", "9.0"), "sm_90a", "580.65.06", "13.0.88", "2.11.0")


@dataclass
class FakeWorker:
    """Times from a table."""

    times_ms: dict[str, float] = field(default_factory=lambda: {"default": 3.93, "flash": 7.69, "best": 3.04})
    asked: list[tuple[Sequence[str], str]] = field(default_factory=list)

    def time_calls(self, problem: Problem, calls: Sequence[str], direction: str, policy: Policy) -> tuple[Timings, str]:
        assert policy == BENCH_POLICY
        self.asked.append((calls, direction))
        timings = {name: Timing(ms, ms * 0.99, ms * 1.01, 40) for name, ms in self.times_ms.items() if name in calls}
        reasons = {name: "there is no kernel: nothing is stored" for name in calls if name not in timings}
        return Timings(timings, unavailable=reasons), "w64"


def run(
    worker: FakeWorker, calls: Sequence[str] = ("default", "flash", "best"), direction: str = "both"
) -> CallsReport:
    options = {"environment": ENVIRONMENT, "command_line": "tuner bench", "direction": direction}
    return bench_calls(SEED, calls, H200, worker=worker, **options)


def shown(report: CallsReport) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report.table())
    return capture.get()


def test_both_directions() -> None:
    worker = FakeWorker()
    report = run(worker)
    assert worker.asked == [(("default", "flash", "best"), "both")]
    found = json.loads(json.dumps(report.to_dict()))
    assert (found["direction"], found["shape"], found["gpu"]) == ("both", "8_16_4096_128", "NVIDIA H200")
    rows = {row["kernel"]: row for row in found["rows"]}
    assert [row["ms"] for row in rows.values()] == [3.93, 7.69, 3.04]
    assert rows["best"]["times_as_fast"] == pytest.approx(1.293, abs=1e-3)
    assert rows["default"]["times_as_fast"] == 1
    assert rows["best"]["config"] == "w64"
    # Seven products where the backward has five.
    assert rows["best"]["tflops"] == pytest.approx(SEED.flops * 1.4 / 3.04e9)
    text = shown(report)
    for part in ("forward and backward", "bwdtune.attention()", "3.0400 ms", "1.293", "w64"):
        assert part in text


def test_the_forward_alone() -> None:
    report = run(FakeWorker(), direction="forward")
    assert report.to_dict()["rows"][0]["tflops"] == pytest.approx(SEED.flops * 0.4 / 3.93e9)


def test_without_a_kernel_there_is_a_reason() -> None:
    report = run(FakeWorker({"default": 3.93}), ("default", "best"))
    default, best = report.to_dict()["rows"]
    assert default["ms"] == 3.93
    assert (best["ms"], best["note"]) == (None, "there is no kernel: nothing is stored")
    assert "nothing is stored" in shown(report)


def test_an_unknown_call() -> None:
    with pytest.raises(UsageError, match="unknown call 'v3' with --direction both: use default, flash, best"):
        run(FakeWorker(), ("v3",))


def test_calls_on_the_cpu() -> None:
    """The real process: PyTorch's calls run there, and of ours there is no kernel."""
    problem = Problem.parse("1_4_2_40_32", causal=True)
    with Worker("cpu") as worker:
        timings, config = worker.time_calls(problem, ("default", "best"), "both", Policy(0, 1, 2, 2))
    assert timings["default"].median_ms > 0
    assert "there is no kernel" in timings.unavailable["best"]
    assert not config
