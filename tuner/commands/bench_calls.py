"""``tuner bench --direction forward|both``: whole calls of attention, PyTorch's and ours, in one interleaved run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Protocol

from ...db.records import Environment
from ...gen.device import Device
from ...gen.errors import UsageError
from ...gen.problem import Problem
from ..lab.calls import BEST, BOTH, CALLS, DEFAULT, FORWARD
from ..lab.timing import BENCH_POLICY, Policy, Timing, Timings
from ..text_table import Column, TextTable, numeric

DIRECTIONS = (FORWARD, BOTH)
DEFAULT_CALLS = tuple(CALLS)
_MATMULS = {FORWARD: 2, BOTH: 7}
_BACKWARD_MATMULS = 5  # which `Problem.flops` counts


class CallTimer(Protocol):
    """Times calls. `gpu_client.Worker` is the real one, and documents it."""

    def time_calls(
        self, problem: Problem, calls: Sequence[str], direction: str, policy: Policy
    ) -> tuple[Timings, str]: ...


@dataclass(frozen=True)
class CallsReport:
    """One race of calls.

    Attributes:
        problem: What was computed.
        direction: ``forward`` or ``both``.
        device: The card.
        environment: Where it ran.
        command: The command line.
        date: When it ended, UTC.
        calls: Names of `lab.calls.CALLS`, in the order that they were asked for.
        timings: By these names; what did not run has its reason there.
        config: The id of the configuration that ``best`` ran; empty where it did not.
    """

    problem: Problem
    direction: str
    device: Device
    environment: Environment
    command: str
    date: datetime
    calls: tuple[str, ...]
    timings: Timings
    config: str

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``tuner bench --json``."""
        return {
            "gpu": self.environment.gpu.name,
            "driver": self.environment.driver,
            "torch": self.environment.torch,
            "nvcc": self.environment.toolkit,
            "arch": self.environment.arch,
            "command": self.command,
            "date": self.date.isoformat(timespec="seconds"),
            "policy": BENCH_POLICY.of(self.problem).id,
            "direction": self.direction,
            **self.problem.to_dict(),
            "rows": [self._row(name) for name in self.calls],
            "notices": [self.timings.notice] if self.timings.notice else [],
        }

    def table(self) -> TextTable:
        """A line a call; one that did not run has its reason for a configuration."""
        what = "forward and backward" if self.direction == BOTH else self.direction
        columns = [
            Column("Call"),
            *numeric("Latency"),
            *numeric("10 % to 90 %", "Effective TFLOPS", optional=1),
            *numeric("times as fast as the default"),
            Column("backward's configuration", folds=True),
        ]
        title = f"{what}, {self.problem.label} on {self.environment.gpu.name}"
        table = TextTable(title, columns, caption=self.timings.notice)
        for name in self.calls:
            row = self._row(name)
            if row["ms"] is None:
                table.add_row(CALLS[name], "n/a", "", "", "", row["note"])
                continue
            times = "" if row["times_as_fast"] is None else f"{row['times_as_fast']:.3f}"
            interval = f"{row['low_ms']:.4f} to {row['high_ms']:.4f}"
            table.add_row(
                CALLS[name], f"{row['ms']:.4f} ms", interval, f"{row['tflops']:.2f}", times, row["config"] or ""
            )
        return table

    def _row(self, name: str) -> dict[str, Any]:
        timing: Timing | None = self.timings.get(name)
        default: Timing | None = self.timings.get(DEFAULT)
        flops = self.problem.flops * _MATMULS[self.direction] / _BACKWARD_MATMULS
        return {
            "kernel": name,
            "config": self.config if timing and name == BEST else None,
            "ms": timing.median_ms if timing else None,
            "low_ms": timing.low_ms if timing else None,
            "high_ms": timing.high_ms if timing else None,
            "tflops": flops / timing.median_ms / 1e9 if timing else None,
            "times_as_fast": default.median_ms / timing.median_ms if timing and default else None,
            "note": "" if timing else self.timings.unavailable.get(name, "it was not timed"),
        }


def check_calls(calls: Sequence[str], direction: str) -> None:
    """Refuses what `bench_calls` cannot do.

    Raises:
        UsageError: An unknown call.
    """
    for name in calls:
        if name not in CALLS:
            raise UsageError(f"unknown call {name!r} with --direction {direction}: use {', '.join(CALLS)}")


def bench_calls(
    problem: Problem,
    calls: Sequence[str],
    device: Device,
    *,
    environment: Environment,
    worker: CallTimer,
    command_line: str,
    direction: str,
) -> CallsReport:
    """Times calls against each other, through autograd, as a training step makes them.

    Args:
        problem: What is computed.
        calls: ``default``, ``flash`` and ``best`` (`bwdtune.attention`, with the kernel that dispatch chooses).
        device: The card.
        environment: Where the worker measures.
        worker: Times.
        command_line: For the report.
        direction: ``forward`` (which saves what a backward needs) or ``both``.

    Raises:
        UsageError: An unknown call.
        BwdtuneError: The GPU cannot run the problem at all.
    """
    check_calls(calls, direction)
    names = tuple(dict.fromkeys(calls))
    timings, config = worker.time_calls(problem, names, direction, BENCH_POLICY.of(problem))
    now = datetime.now(timezone.utc)
    return CallsReport(problem, direction, device, environment, command_line, now, names, timings, config)
