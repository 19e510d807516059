"""One row of a table: a kernel, its resources, and its time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...gen.device import Device
from ...gen.emulation import emulation
from ...gen.families import Config
from ...gen.problem import Problem
from ..lab.paired import Ratio
from ..lab.timing import Cycles, Timing
from .tensor_activity import tensor_activity

CYCLE_HEADINGS = ("Mcycles", "low to high", "tensor active")
"""Of `Row.cycle_cells`."""


@dataclass(frozen=True)
class Row:
    """One line of a search's or a bench's table.

    Attributes:
        kernel: A preset's name, one of `lab.peers.PEERS` for PyTorch's own, else ``best``, ``finalist`` or
            ``candidate``.
        config: The configuration; None for PyTorch's kernels.
        timing: Its times in the race; None where it was not timed, and of an emulated row, since a time that the dummy
            mma were part of is nobody's.
        ratio: How many times as long as the winner it took in the same rounds; None where that is not known.
        counted: What it counted of itself, where it did.
        max_error: The largest relative L2 error of its verification.
        registers: A thread's, of the main kernel, as the compiler says.
        spill_bytes: A thread's spill stores and loads.
        shared_memory_bytes: A block's, as it is launched.
        threads: Threads of a block.
        occupancy: Resident warps as a part of an SM's most, 0 to 1.
        note: Why a number is missing, or which kernel PyTorch's default is.
        emulate: The card that was emulated (``sm_120``), else None.
        tensor_activity: Part of the time that the tensor cores work; see `tensor_activity.tensor_activity`.
        predicted_ms: What `cost_model.predict` says, where nothing was there to time it; None of an emulated row.
        predicted_cycles: Of the main kernel alone.
    """

    kernel: str
    config: Config | None = None
    timing: Timing | None = None
    ratio: Ratio | None = None
    counted: Cycles | None = None
    max_error: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_memory_bytes: int | None = None
    threads: int | None = None
    occupancy: float | None = None
    note: str = ""
    emulate: str | None = None
    tensor_activity: float | None = None
    predicted_ms: float | None = None
    predicted_cycles: float | None = None

    @property
    def ms(self) -> float | None:
        """The median time."""
        return self.timing.median_ms if self.timing else None

    @property
    def cycles(self) -> float | None:
        """The median cycles of the main kernel on the longest SM."""
        return self.counted.median if self.counted else None

    def with_cycles(self, cycles: Cycles, problem: Problem, device: Device) -> Row:
        """The same with what the kernel counted of itself on a card; emulated if the row is."""
        clocks = emulation(self.emulate, device).clocks_per_mma if self.emulate else device.clocks_per_mma
        activity = None
        if clocks and self.config and self.config.has_probe:
            activity = tensor_activity(problem, self.config, device, cycles=cycles.median, clocks_per_mma=clocks)
        return replace(self, counted=cycles, tensor_activity=activity)

    def cycle_cells(self) -> list[str]:
        """Cycles in millions, their interval and the tensor cores' activity, for a table."""
        if self.counted is None:
            return ["-"] * len(CYCLE_HEADINGS)
        median, low, high = (cycles / 1e6 for cycles in (self.counted.median, self.counted.low, self.counted.high))
        return [f"{median:.3f}", f"{low:.3f} to {high:.3f}", cell(self.tensor_activity, "{:.1%}")]

    @property
    def beside_winner(self) -> str:
        """How much longer than the winner it takes, for a table."""
        if self.ratio is None:
            return "-"
        if self.ratio.median == self.ratio.low == self.ratio.high == 1:
            return "winner"
        return f"{self.ratio.median - 1:+.1%}" if self.ratio.told_apart else "not told apart"

    def tflops(self, problem: Problem) -> float | None:
        """Effective TFLOPS: the problem's operations over the time."""
        return None if self.ms is None else problem.flops / self.ms / 1e9

    def percent_of_peak(self, problem: Problem, device: Device) -> float | None:
        """Effective TFLOPS as a part of what the card's tensor cores could do."""
        tflops = self.tflops(problem)
        return None if tflops is None else 100 * tflops / device.peak_tflops

    def to_dict(self, problem: Problem, device: Device) -> dict[str, Any]:
        """The JSON of a row."""
        timing, counted = self.timing, self.counted
        return {
            "kernel": self.kernel,
            "config": self.config.id if self.config else None,
            "family": self.config.family if self.config else None,
            "ms": self.ms,
            "low_ms": timing.low_ms if timing else None,
            "high_ms": timing.high_ms if timing else None,
            "ratio_to_winner": self.ratio.to_dict() if self.ratio else None,
            "tflops": self.tflops(problem),
            "percent_of_peak": self.percent_of_peak(problem, device),
            "max_error": self.max_error,
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "shared_memory_bytes": self.shared_memory_bytes,
            "threads": self.threads,
            "occupancy": self.occupancy,
            "note": self.note,
            "emulate": self.emulate,
            "cycles": self.cycles,
            "low_cycles": counted.low if counted else None,
            "high_cycles": counted.high if counted else None,
            "tensor_activity": self.tensor_activity,
            "predicted_ms": self.predicted_ms,
            "predicted_cycles": self.predicted_cycles,
        }


def cell(value: object, form: str) -> str:
    """A value in a table; a dash where there is none."""
    return "-" if value is None else form.format(value)
