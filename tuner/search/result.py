"""The result of a search: as data, as JSON, and as a table with a summary."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...db.records import Environment
from ...gen.device import Device
from ...gen.families import Config, short_form
from ...gen.problem import Problem
from ..text_table import Column, TextTable, numeric
from .rows import CYCLE_HEADINGS, Row, cell
from .trials import Trial

_SHOWN_FAILURES = 10


@dataclass
class Counts:
    """How many configurations went which way.

    Attributes:
        valid: Configurations that the arithmetic lets through.
        refused_by_arithmetic: Those that it does not.
        earlier: Valid ones that other searches have settled, before this one or meanwhile.
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
        status: ``complete``; ``partial`` where it was interrupted; ``predicted`` where nothing was there to time;
            ``failed`` where the database was lost on the way: then the rows are what was found by then.
        exhausted: Whether every valid configuration is settled.
        winner: The winner's row, or None.
        rows: The final race: winner, finalists, presets and PyTorch's kernels, fastest first. Where nothing was
            measured: the survivors, the least predicted time first.
        counts: How many went which way.
        arithmetic_refusals: Kinds of refusal before compiling, and how often.
        trials: The candidates that were decided, in this order.
        seconds: Wall time as `clock.SearchClock` splits it: ``verify`` and ``time`` (a GPU is at work), ``compile``
            (only compilers are), ``overhead`` (all the rest), ``total``; and what the process took for ``begin``, which
            lists the space, and for ``propose``, which chooses candidates, whether or not anything waited for it.
        notes: What else a person should know.
        emulate: The card whose pace candidates were slowed to (``sm_120``), else None. Then cycles rank, and ``winner``
            is the best emulated one, which is nobody's winner.
        error: Why it failed.
        expected_gain: How much less than the best the best of the trials that were left, when the last candidate was
            proposed or none was any more, was expected to cost (0.01: 1 %); None where nothing is learned of that.
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
    trials: tuple[Trial, ...]
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()
    emulate: str | None = None
    error: str = ""
    expected_gain: float | None = None

    @property
    def interrupted(self) -> bool:
        return self.status == "partial"

    @property
    def failures(self) -> tuple[tuple[Config, str], ...]:
        """Candidates that the compiler gate refused or that failed, each with its reason."""
        fallen = ((trial.row.config, trial.outcome.reason) for trial in self.trials)
        return tuple((config, reason) for config, reason in fallen if config and reason)

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
            "error": self.error or None,
            "exhausted": self.exhausted,
            "winner": best if not self.emulate else None,
            "emulated_best": best if self.emulate else None,
            "rows": [row.to_dict(self.problem, self.device) for row in self.rows],
            "counts": asdict(self.counts),
            "arithmetic_refusals": dict(self.arithmetic_refusals),
            "trials": [trial.to_dict(self.problem, self.device) for trial in self.trials],
            "failures": [{"config": config.id, "reason": reason} for config, reason in self.failures],
            "expected_gain": self.expected_gain,
            "seconds": dict(self.seconds),
            "notes": list(self.notes),
        }

    def table(self) -> TextTable:
        """The final race, or the survivors of all gates and what is predicted of them."""
        title = f"{self.problem.label} on {self.device.name}"
        if self.emulate:
            title += f", emulated: at the pace of {self.emulate}"
        elif self.limits:
            title += f", within the limits of {self.limits}"
        measured = self.environment is not None
        if not measured:
            predicted = "predicted Mcycles" if self.emulate else "predicted ms"
            figures = [*numeric(predicted), *numeric("max error", "occupancy", optional=1)]
        elif self.emulate:
            cycles, *others = CYCLE_HEADINGS
            figures = [*numeric(cycles), *numeric(*others, "max error", optional=1)]
        else:
            figures = [
                *numeric("ms"),
                *numeric("beside the winner", "low to high", "TFLOPS", "% of peak", "max error", optional=1),
            ]
        resources = numeric("registers", "spills, bytes", "shared memory, bytes", "threads", optional=2)
        table = TextTable(title, [Column("kernel"), Column("configuration", folds=True), *figures, *resources])
        for row in self.rows:
            cells = self._measured_cells(row) if measured else self._predicted_cells(row)
            table.add_row(
                f"{row.kernel} (emulated)" if row.emulate else row.kernel,
                short_form(row.config) if row.config else row.note,
                *cells,
                cell(row.registers, "{}"),
                cell(row.spill_bytes, "{:,}"),
                cell(row.shared_memory_bytes, "{:,}"),
                cell(row.threads, "{}"),
                bold=self.winner is not None and row == self.winner,
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
        share = f"{overhead:.1f} s ({100 * overhead / total:.1f} %)"
        parts = f"beginning took {self.seconds['begin']:.1f} s, proposing {self.seconds['propose']:.1f} s"
        lines.append(f"{total:.1f} s: waiting for {shares}; overhead {share}; {parts}, most of it beside the others")
        return lines

    def _predicted_cells(self, row: Row) -> list[str]:
        millions = None if row.predicted_cycles is None else row.predicted_cycles / 1e6
        predicted = millions if self.emulate else row.predicted_ms
        verified = cell(row.max_error, "{:.1e}") if row.max_error is not None else "not verified"
        return [cell(predicted, "{:.3f}"), verified, cell(row.occupancy, "{:.1%}")]

    def _measured_cells(self, row: Row) -> list[str]:
        if self.emulate:
            return [*row.cycle_cells(), cell(row.max_error, "{:.1e}")]
        interval = f"{row.timing.low_ms:.3f} to {row.timing.high_ms:.3f}" if row.timing else None
        return [
            cell(row.ms, "{:.3f}"),
            row.beside_winner,
            cell(interval, "{}"),
            cell(row.tflops(self.problem), "{:.1f}"),
            cell(row.percent_of_peak(self.problem, self.device), "{:.1f}"),
            cell(row.max_error, "{:.1e}"),
        ]


def kinds_of_refusal(reasons: Mapping[str, int], device: Device) -> dict[str, int]:
    """Counts refusals that differ in their numbers only as one kind, the most frequent first."""
    kinds: dict[str, int] = {}
    for reason, count in reasons.items():
        kind = re.sub(r"\d[\d,.]*\d|\d", "N", reason.replace(device.name, "the card"))
        kinds[kind] = kinds.get(kind, 0) + count
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))
