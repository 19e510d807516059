"""What a search found, as data, as a table and as JSON; and how it tells of itself while it runs."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ...db.records import Environment
from ...gen.device import Device
from ...gen.emulation import emulation
from ...gen.families import Config, short_form
from ...gen.problem import Problem
from .tensor_activity import tensor_activity

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..lab.timing import Cycles

CYCLE_HEADINGS = ("Mcycles", "low to high", "tensor active")
"""Of `Row.cycle_cells`."""

_PLAIN_INTERVAL_S = 5.0
_SHOWN_FAILURES = 10


@dataclass(frozen=True)
class Row:
    """One line of a search's table.

    Attributes:
        kernel: A preset's name, ``fa`` or ``cudnn`` for PyTorch's own, else ``best`` or ``finalist``.
        config: The configuration; None for PyTorch's kernels.
        ms: Median of the final race, None where it was not timed.
        low_ms: Lower end of the interval.
        high_ms: Upper end of it.
        max_error: The largest relative L2 error of its verification.
        registers: A thread's, of the main kernel, as the compiler says.
        spill_bytes: A thread's spill stores and loads.
        shared_memory_bytes: A block's, as it is launched.
        threads: Threads of a block.
        occupancy: Resident warps as a part of an SM's most, 0 to 1.
        note: Why a number is missing.
        emulate: The card that was emulated (``sm_120``), else None. An emulated row has cycles and no time: a time that
            the dummy mma were part of is nobody's.
        cycles: Median cycles of the main kernel on the longest SM, where they were counted.
        low_cycles: Lower end of the interval.
        high_cycles: Upper end of it.
        tensor_activity: Part of the time that the tensor cores work; see `tensor_activity.tensor_activity`.
        predicted_ms: What `cost_model.predict` says, where nothing was there to time it; None of an emulated row.
        predicted_cycles: Of the main kernel alone.
    """

    kernel: str
    config: Config | None = None
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    max_error: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_memory_bytes: int | None = None
    threads: int | None = None
    occupancy: float | None = None
    note: str = ""
    emulate: str | None = None
    cycles: float | None = None
    low_cycles: float | None = None
    high_cycles: float | None = None
    tensor_activity: float | None = None
    predicted_ms: float | None = None
    predicted_cycles: float | None = None

    def counted(self, cycles: Cycles, problem: Problem, device: Device) -> Row:
        """The same with what a kernel counted of itself on a card; emulated if the row is."""
        clocks = emulation(self.emulate, device).clocks_per_mma if self.emulate else device.clocks_per_mma
        activity = None
        if clocks and self.config and self.config.has_probe:
            activity = tensor_activity(problem, self.config, device, cycles=cycles.median, clocks_per_mma=clocks)
        return replace(
            self,
            cycles=cycles.median,
            low_cycles=cycles.low,
            high_cycles=cycles.high,
            tensor_activity=activity,
        )

    def cycle_cells(self) -> list[str]:
        """Cycles in millions, their interval and the tensor cores' activity, for a table."""
        if self.cycles is None or self.low_cycles is None or self.high_cycles is None:
            return ["-"] * 3
        return [
            f"{self.cycles / 1e6:.3f}",
            f"{self.low_cycles / 1e6:.3f} to {self.high_cycles / 1e6:.3f}",
            _cell(self.tensor_activity, "{:.1%}"),
        ]

    def tflops(self, problem: Problem) -> float | None:
        """Effective TFLOPS: the problem's operations over the time."""
        return None if self.ms is None else problem.flops / self.ms / 1e9

    def to_dict(self, problem: Problem, device: Device) -> dict[str, Any]:
        tflops = self.tflops(problem)
        return {
            **asdict(self),
            "config": self.config.id if self.config else None,
            "family": self.config.family if self.config else None,
            "tflops": tflops,
            "percent_of_peak": None if tflops is None else 100 * tflops / device.peak_tflops,
        }


@dataclass
class Counts:
    """How many configurations went which way.

    Attributes:
        valid: Configurations that the arithmetic lets through.
        refused_by_arithmetic: Those that it does not.
        earlier: Valid ones that earlier searches had settled.
        decided: Candidates of this search that were settled, by whatever gate.
        passed: Those that passed every gate where nothing was there to time them.
        verified: Those of them whose gradients were checked, on the CPU.
        measured: Those that were verified and timed.
        stored: Those that a stored result answered.
        refused: Those that the compiler gate refused.
        failed: Those that did not compile, verify or run.
    """

    valid: int = 0
    refused_by_arithmetic: int = 0
    earlier: int = 0
    decided: int = 0
    passed: int = 0
    verified: int = 0
    measured: int = 0
    stored: int = 0
    refused: int = 0
    failed: int = 0


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        problem: The problem.
        device: The card that it was for.
        limits: ``sm_120`` where it kept to that card's limits, else None.
        sampler: Which sampler chose.
        seed: Its seed.
        environment: Where it was measured; None where nothing was.
        status: ``complete``; ``partial`` where it was interrupted; ``predicted`` where nothing was there to time.
        exhausted: Whether every valid configuration is settled.
        winner: The winner's row, or None.
        rows: The final race: winner, finalists, presets and PyTorch's kernels, fastest first. Where nothing was
            measured: the survivors, the least predicted time first.
        counts: How many went which way.
        arithmetic_refusals: Kinds of refusal before compiling, and how often.
        failures: Candidates that the compiler gate refused or that failed, each with its reason.
        seconds: Wall time by phase: ``compile`` (waiting for it), ``verify``, ``time``, ``overhead`` (all the
            rest), ``total``.
        notes: What else a person should know.
        emulate: The card whose pace candidates were slowed to (``sm_120``), else None. Then cycles rank, and ``winner``
            is the best emulated one, which is nobody's winner.
    """

    problem: Problem
    device: Device
    limits: str | None
    sampler: str
    seed: int | None
    environment: Environment | None
    status: str
    exhausted: bool
    winner: Row | None
    rows: tuple[Row, ...]
    counts: Counts
    arithmetic_refusals: Mapping[str, int]
    failures: tuple[tuple[Config, str], ...]
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()
    emulate: str | None = None

    @property
    def interrupted(self) -> bool:
        return self.status == "partial"

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``tuner search --json``."""
        best = self.winner.to_dict(self.problem, self.device) if self.winner else None
        return {
            "command": "search",
            "gpu": self.environment.gpu.name if self.environment else None,
            "driver": self.environment.driver if self.environment else None,
            "torch": self.environment.torch if self.environment else None,
            "nvcc": self.environment.toolkit if self.environment else None,
            "arch": self.device.arch,
            **self.problem.to_dict(),
            "limits": self.limits,
            "emulate": self.emulate,
            "sampler": self.sampler,
            "seed": self.seed,
            "status": self.status,
            "exhausted": self.exhausted,
            "winner": best if not self.emulate else None,
            "emulated_best": best if self.emulate else None,
            "rows": [row.to_dict(self.problem, self.device) for row in self.rows],
            "counts": asdict(self.counts),
            "arithmetic_refusals": dict(self.arithmetic_refusals),
            "failures": [{"config": config.id, "reason": reason} for config, reason in self.failures],
            "seconds": dict(self.seconds),
            "notes": list(self.notes),
        }

    def table(self) -> Table:
        """The final race, or the survivors of all gates and what is predicted of them."""
        from rich.table import Table

        title = f"{self.problem.label} on {self.device.name}"
        if self.emulate:
            title += f", emulated: at the pace of {self.emulate}"
        elif self.limits:
            title += f", within the limits of {self.limits}"
        table = Table(title=title, title_justify="left")
        table.add_column("kernel")
        table.add_column("configuration", overflow="fold")
        measured = self.environment is not None
        if not measured:
            headings = ["predicted Mcycles" if self.emulate else "predicted ms", "max error", "occupancy"]
        elif self.emulate:
            headings = [*CYCLE_HEADINGS, "max error"]
        else:
            headings = ["ms", "low to high", "TFLOPS", "% of peak", "max error"]
        for heading in (*headings, "registers", "spills, bytes", "shared memory, bytes", "threads"):
            table.add_column(heading, justify="right")
        for row in self.rows:
            figures = self._measured_cells(row) if measured else self._predicted_cells(row)
            table.add_row(
                f"{row.kernel} (emulated)" if row.emulate else row.kernel,
                short_form(row.config) if row.config else row.note,
                *figures,
                _cell(row.registers, "{}"),
                _cell(row.spill_bytes, "{:,}"),
                _cell(row.shared_memory_bytes, "{:,}"),
                _cell(row.threads, "{}"),
                style="bold" if self.winner and row == self.winner else None,
            )
        return table

    def summary(self) -> list[str]:
        """What was tried, what fell where and why, and where the time went: lines for people."""
        counts, lines = self.counts, list(self.notes)
        noted = [(row, row.config) for row in self.rows if row.config and row.note]
        lines += [f"{row.kernel} ({short_form(config)}): {row.note}" for row, config in noted]
        ways = {
            "measured": counts.measured,
            f"passed ({counts.verified} verified on the CPU)": counts.passed,
            "answered by stored results": counts.stored,
            "refused by the compiler gate": counts.refused,
            "failed": counts.failed,
        }
        decided = ", ".join(f"{count} {way}" for way, count in ways.items() if count) or "none"
        earlier = f"; {counts.earlier} were settled earlier" if counts.earlier else ""
        lines.append(
            f"{counts.valid:,} valid configurations ({counts.refused_by_arithmetic:,} are refused by arithmetic); "
            f"{counts.decided} decided: {decided}{earlier}"
        )
        if self.exhausted:
            lines.append("space exhausted: every valid configuration is settled")
        lines += [f"  {count:>6,} x {reason}" for reason, count in self.arithmetic_refusals.items()]
        for config, reason in self.failures[:_SHOWN_FAILURES]:
            lines.append(f"  {short_form(config)}: {reason}")
        if len(self.failures) > _SHOWN_FAILURES:
            lines.append(f"  … and {len(self.failures) - _SHOWN_FAILURES} more: `tuner show` or --json lists them all")
        total = self.seconds["total"]
        shares = ", ".join(f"{phase} {self.seconds[phase]:.1f} s" for phase in ("compile", "verify", "time"))
        overhead = self.seconds["overhead"]
        lines.append(f"{total:.1f} s: waiting for {shares}; overhead {overhead:.1f} s ({100 * overhead / total:.1f} %)")
        return lines

    def _predicted_cells(self, row: Row) -> list[str]:
        millions = None if row.predicted_cycles is None else row.predicted_cycles / 1e6
        predicted = millions if self.emulate else row.predicted_ms
        verified = _cell(row.max_error, "{:.1e}") if row.max_error is not None else "not verified"
        return [_cell(predicted, "{:.3f}"), verified, _cell(row.occupancy, "{:.1%}")]

    def _measured_cells(self, row: Row) -> list[str]:
        if self.emulate:
            return [*row.cycle_cells(), _cell(row.max_error, "{:.1e}")]
        tflops = row.tflops(self.problem)
        interval = None if row.low_ms is None or row.high_ms is None else f"{row.low_ms:.3f} to {row.high_ms:.3f}"
        return [
            _cell(row.ms, "{:.3f}"),
            _cell(interval, "{}"),
            _cell(tflops, "{:.1f}"),
            _cell(None if tflops is None else 100 * tflops / self.device.peak_tflops, "{:.1f}"),
            _cell(row.max_error, "{:.1e}"),
        ]


def kinds_of_refusal(reasons: Mapping[str, int], device: Device) -> dict[str, int]:
    """Counts refusals that differ in their numbers only as one kind, the most frequent first."""
    kinds: dict[str, int] = {}
    for reason, count in reasons.items():
        kind = re.sub(r"\d[\d,.]*\d|\d", "N", reason.replace(device.name, "the card"))
        kinds[kind] = kinds.get(kind, 0) + count
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


class PhaseClock:
    """Splits wall time into named phases; what lies in none of them is overhead."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds = {"compile": 0.0, "verify": 0.0, "time": 0.0}

    def add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] += seconds

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start

    def seconds(self) -> dict[str, float]:
        """By phase, with ``overhead`` and ``total``."""
        total = self.elapsed_s()
        return {**self._seconds, "overhead": total - sum(self._seconds.values()), "total": total}


@dataclass(frozen=True)
class Status:
    """Where a search stands.

    Attributes:
        phase: What it does now.
        counts: See `Counts`.
        total: Candidates that this search may decide.
        best: The best configuration so far and its time in ms, or emulated cycles; or None.
        last: The candidate that was just decided and what became of it.
        emulated: Whether cycles rank.
    """

    phase: str
    counts: Counts
    total: int
    best: tuple[Config, float] | None = None
    last: tuple[Config, str] | None = None
    emulated: bool = False

    def text(self) -> str:
        counts = self.counts
        fallen = f"refused {counts.refused}, failed {counts.failed}"
        if counts.passed:
            return f"passed {counts.passed}, {fallen}"
        best = "no best yet"
        if self.best:
            config, cost = self.best
            cost_text = f"{cost / 1e6:.3f} Mcycles, emulated," if self.emulated else f"{cost:.3f} ms"
            best = f"best {cost_text} {short_form(config)}"
        return f"{best} | measured {counts.measured + counts.stored}, {fallen}"


class Progress(Protocol):
    """Tells people how a search goes."""

    def __enter__(self) -> Progress: ...

    def __exit__(self, *exception: object) -> None: ...

    def update(self, status: Status) -> None:
        """Called whenever something was decided or another phase began."""

    def notice(self, text: str) -> None:
        """Something that a person should read now."""


class PlainProgress:
    """Lines for logs: each failure as it happens, and where it stands every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told = 0.0
        self._phase = ""

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, status: Status) -> None:
        if status.last and status.last[1]:
            self.notice(f"{short_form(status.last[0])}: {status.last[1]}")
        now = time.monotonic()
        if (
            status.phase != self._phase
            or now - self._told >= _PLAIN_INTERVAL_S
            or status.counts.decided == status.total
        ):
            self._told, self._phase = now, status.phase
            self.notice(f"{status.phase} {status.counts.decided}/{status.total}: {status.text()}")

    def notice(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class BarProgress:
    """For terminals: a bar, and below it the best so far and what fell."""

    def __init__(self, console: Console) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        text = TextColumn("{task.description}", markup=False)
        self._bar = Bar(SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self._task = self._bar.add_task("starting", total=None)
        self._status = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._status), console=console, refresh_per_second=5)
        self._console = console

    def __enter__(self) -> BarProgress:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self, status: Status) -> None:
        if status.last and status.last[1]:
            self.notice(f"{short_form(status.last[0])}: {status.last[1]}")
        self._bar.update(self._task, description=status.phase, total=status.total, completed=status.counts.decided)
        self._status.plain = status.text()

    def notice(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def progress_for(console: Console) -> Progress:
    """A bar on a terminal, lines elsewhere."""
    return BarProgress(console) if console.is_terminal else PlainProgress(console)


def _cell(value: object, form: str) -> str:
    return "-" if value is None else form.format(value)
