"""What the database holds, as tables and as JSON: ``tuner list`` and ``tuner show``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...db.records import (
    EMULATED,
    EmulatedBest,
    Environment,
    GpuKey,
    ProblemHistory,
    StoredMeasurement,
    StoredSearch,
    Winner,
)
from ...db.shipped import Shipped
from ...db.shipped import shipped_to_dict as _shipped_row
from ...gen.families import short_form
from ...gen.problem import Problem
from ..text_table import Column, TextTable, numeric

_PROBLEM_COLUMNS = (Column("shape"), Column("dtype", optional=1), Column("mask"))


def winner_to_dict(winner: Winner) -> dict[str, Any]:
    """A winner as JSON."""
    return {
        "origin": "stored",
        **winner.problem.to_dict(),
        "limits": winner.limits,
        **_environment_to_dict(winner.environment),
        "config": winner.config.id,
        "family": winner.config.family,
        "ms": winner.median_ms,
        "low_ms": winner.low_ms,
        "high_ms": winner.high_ms,
        "tflops": _tflops(winner),
        "max_error": winner.max_error,
        "registers": winner.registers,
        "spill_bytes": winner.spill_bytes,
        "shared_memory_bytes": winner.shared_memory_bytes,
        "partial": winner.partial,
        "policy": winner.policy,
        "default_ms": winner.default_ms,
        "default_kernel": winner.default_kernel,
        "times_as_fast_as_default": winner.advantage,
        "source_hash": winner.source_hash,
        "template_hash": winner.template_hash,
        "machine_code": winner.machine_code,
        "created_at": winner.created_at.isoformat(),
    }


def winners_table(winners: Sequence[Winner]) -> TextTable:
    """One row a winner."""
    table = TextTable(
        "winners",
        [
            *_PROBLEM_COLUMNS,
            Column("GPU", optional=2),
            Column("limits", optional=3),
            Column("configuration", folds=True),
            Column("ms", numeric=True),
            Column("× PyTorch's default", numeric=True, optional=2),
            *numeric("TFLOPS", "max error", optional=3),
            Column("found", optional=3),
        ],
    )
    for winner in winners:
        table.add_row(
            *_problem_cells(winner.problem),
            winner.environment.gpu.name,
            winner.limits or "-",
            short_form(winner.config),
            f"{winner.median_ms:.3f}",
            "-" if winner.advantage is None else f"{winner.advantage:.2f}",
            f"{_tflops(winner):.1f}",
            f"{winner.max_error:.1e}",
            _found(winner),
        )
    return table


def best_to_dict(best: EmulatedBest) -> dict[str, Any]:
    """A best emulated configuration as JSON."""
    return {
        "origin": "emulated",
        **best.problem.to_dict(),
        "emulate": best.target,
        **_environment_to_dict(best.environment),
        "config": best.config.id,
        "family": best.config.family,
        "cycles": best.cycles,
        "max_error": best.max_error,
        "registers": best.registers,
        "spill_bytes": best.spill_bytes,
        "partial": best.partial,
        "policy": best.policy,
        "source_hash": best.source_hash,
        "template_hash": best.template_hash,
        "created_at": best.created_at.isoformat(),
    }


def bests_table(bests: Sequence[EmulatedBest]) -> TextTable:
    """One row a best emulated configuration."""
    table = TextTable(
        "best emulated configurations: not measured on these cards, and used by nothing",
        [
            *_PROBLEM_COLUMNS,
            Column("emulated", optional=1),
            Column("on", optional=2),
            Column("configuration", folds=True),
            Column("Mcycles", numeric=True),
            Column("max error", numeric=True, optional=3),
            Column("found", optional=3),
        ],
    )
    for best in bests:
        table.add_row(
            *_problem_cells(best.problem),
            best.target,
            best.environment.gpu.name,
            short_form(best.config),
            f"{best.cycles / 1e6:.3f}",
            f"{best.max_error:.1e}",
            _found(best),
        )
    return table


def shipped_to_dict(shipped: Shipped) -> dict[str, Any]:
    """A shipped configuration as JSON."""
    return {
        "origin": "shipped",
        **_shipped_row(shipped),
        **shipped.problem.to_dict(),
        "config": shipped.config.id,
        "family": shipped.config.family,
    }


def shipped_table(rows: Sequence[Shipped]) -> TextTable:
    """One row a shipped configuration."""
    table = TextTable(
        "shipped: used where nothing is stored",
        [
            *_PROBLEM_COLUMNS,
            Column("for", optional=2),
            Column("configuration", folds=True),
            Column("where it comes from", folds=True, optional=3),
            Column("ms", numeric=True),
            Column("× PyTorch's default", numeric=True, optional=2),
            Column("Mcycles", numeric=True, optional=1),
            Column("max error", numeric=True, optional=3),
            Column("found", optional=3),
        ],
    )
    for row in rows:
        table.add_row(
            *_problem_cells(row.problem),
            row.gpu.name,
            short_form(row.config),
            row.origin,
            "-" if row.ms is None else f"{row.ms:.3f}",
            f"{row.race.advantage:.2f}" if row.race and row.race.advantage else "-",
            "-" if row.cycles is None else f"{row.cycles / 1e6:.3f}",
            f"{row.max_error:.1e}",
            row.date,
        )
    return table


def history_to_dict(history: ProblemHistory) -> dict[str, Any]:
    """The JSON of ``tuner show --json``."""
    return {
        **history.problem.to_dict(),
        "winners": [winner_to_dict(winner) for winner in history.winners],
        "searches": [_search_to_dict(search) for search in history.searches],
        "measurements": [_measurement_to_dict(measurement) for measurement in history.measurements],
        "failures": [
            {"config": variant.config.id, "arch": variant.arch, "gate": gate, "reason": reason}
            for variant, gate, reason in _failures(history)
        ],
    }


def history_tables(history: ProblemHistory) -> list[TextTable]:
    """Winners, searches, measurements and failures of a problem; what there is none of has no table."""
    tables = [winners_table(history.winners)] if history.winners else []
    if history.searches:
        tables.append(_searches_table(history.searches))
    if history.measurements:
        tables.append(_measurements_table(history.measurements))
    if history.failures or history.rejected:
        tables.append(_failures_table(history))
    return tables


def _searches_table(searches: Sequence[StoredSearch]) -> TextTable:
    table = TextTable(
        "searches, oldest first",
        [
            Column("search", numeric=True),
            Column("began"),
            Column("ended", folds=True),
            Column("GPU", folds=True, optional=1),
            Column("limits", optional=4),
            Column("sampler", optional=2),
            *numeric("seed", "decided", optional=2),
            Column("power limit, W", numeric=True, optional=4),
            Column("host", optional=3),
            Column("versions", folds=True, optional=4),
        ],
    )
    for search in searches:
        record, emulated = search.record, search.record.options.get("emulate")
        table.add_row(
            f"{search.id}",
            f"{search.started_at:%Y-%m-%d %H:%M}",
            _how_it_ended(search),
            f"{record.gpu.name} ({record.gpu_uuid})" if record.gpu and record.gpu_uuid else _name_of(record.gpu),
            f"{emulated} (emulated)" if emulated else record.options.get("limits") or "-",
            record.sampler,
            f"{record.seed}",
            f"{search.decided}",
            "-" if record.power_limit_w is None else f"{record.power_limit_w:.0f}",
            record.host,
            ", ".join(f"{name} {version}" for name, version in _versions(search).items() if version),
        )
    return table


def _how_it_ended(search: StoredSearch) -> str:
    if search.ended_at is None:
        return "no: it runs, or was killed"
    took = f"{search.status} after {(search.ended_at - search.started_at).total_seconds():.0f} s"
    return f"{took}: {search.error}" if search.error else took


def _name_of(gpu: GpuKey | None) -> str:
    return gpu.name if gpu else "none"


def _versions(search: StoredSearch) -> dict[str, str | None]:
    record = search.record
    return {
        "bwdtune": record.bwdtune,
        "driver": record.driver,
        "nvcc": record.toolkit,
        "torch": record.torch,
        "optuna": record.optuna,
    }


def _search_to_dict(search: StoredSearch) -> dict[str, Any]:
    record = search.record
    return {
        "search": search.id,
        "uid": search.uid,
        "study": record.study or None,
        "status": search.status,
        "error": search.error or None,
        "started_at": search.started_at.isoformat(),
        "ended_at": search.ended_at.isoformat() if search.ended_at else None,
        "decided": search.decided,
        "sampler": record.sampler,
        "seed": record.seed,
        "options": dict(record.options),
        "host": record.host,
        "gpu": record.gpu.name if record.gpu else None,
        "compute_capability": record.gpu.capability if record.gpu else None,
        "gpu_uuid": record.gpu_uuid,
        "power_limit_w": record.power_limit_w,
        "arch": record.arch,
        **_versions(search),
    }


def _measurements_table(measurements: Sequence[StoredMeasurement]) -> TextTable:
    table = TextTable(
        "measurements, fastest first",
        [
            Column("configuration", folds=True),
            Column("GPU", optional=2),
            Column("limits", optional=2),
            Column("ms", numeric=True),
            Column("low to high", numeric=True, optional=1),
            Column("Mcycles", numeric=True, optional=1),
            Column("samples", numeric=True, optional=3),
            *numeric("max error", "registers", "spills, bytes", optional=2),
            Column("policy", optional=4),
        ],
    )
    for measurement in measurements:
        record, variant = measurement.record, measurement.variant
        emulated = record.kind == EMULATED
        table.add_row(
            short_form(variant.config),
            record.environment.gpu.name,
            f"{record.limits} (emulated)" if emulated else record.limits or "-",
            "-" if emulated else f"{record.median_ms:.3f}",
            "-" if emulated else f"{record.low_ms:.3f} to {record.high_ms:.3f}",
            "-" if record.cycles is None else f"{record.cycles / 1e6:.3f}",
            f"{record.samples}",
            _verified(measurement),
            "-" if variant.registers is None else f"{variant.registers}",
            "-" if variant.spill_bytes is None else f"{variant.spill_bytes:,}",
            record.policy,
        )
    return table


def _verified(measurement: StoredMeasurement) -> str:
    if not measurement.trusted:
        return "claimed, not verified"
    return f"{measurement.verification.max_error:.1e}" if measurement.verification else "not verified"


def _failures_table(history: ProblemHistory) -> TextTable:
    table = TextTable(
        "failures",
        [Column("configuration", folds=True), Column("arch", optional=1), Column("gate"), Column("reason", folds=True)],
    )
    for variant, gate, reason in _failures(history):
        table.add_row(short_form(variant.config), variant.arch, gate, reason)
    return table


def _failures(history: ProblemHistory) -> list[tuple[Any, str, str]]:
    compiler = [(variant, "compiler", variant.error or variant.status) for variant in history.failures]
    return compiler + [(variant, "numbers", verification.reason) for variant, verification in history.rejected]


def _measurement_to_dict(measurement: StoredMeasurement) -> dict[str, Any]:
    record, variant, verification = measurement.record, measurement.variant, measurement.verification
    emulated = record.kind == EMULATED
    return {
        "config": variant.config.id,
        "family": variant.config.family,
        **_environment_to_dict(record.environment),
        "limits": record.limits,
        "kind": record.kind,
        "policy": record.policy,
        "search": measurement.search_id,
        "trusted": measurement.trusted,
        "ms": None if emulated else record.median_ms,
        "low_ms": None if emulated else record.low_ms,
        "high_ms": None if emulated else record.high_ms,
        "cycles": record.cycles,
        "samples": record.samples,
        "verified": bool(verification and verification.passed),
        "max_error": verification.max_error if verification and verification.passed else None,
        "registers": variant.registers,
        "spill_bytes": variant.spill_bytes,
        "shared_memory_bytes": variant.shared_memory_bytes,
        "created_at": measurement.created_at.isoformat(),
    }


def _problem_cells(problem: Problem) -> tuple[str, str, str]:
    """Of `_PROBLEM_COLUMNS`."""
    return problem.shape, problem.dtype, problem.features_label


def _found(best: Winner | EmulatedBest) -> str:
    return f"{best.created_at:%Y-%m-%d %H:%M}{' (partial)' if best.partial else ''}"


def _tflops(winner: Winner) -> float:
    return winner.problem.flops / winner.median_ms / 1e9


def _environment_to_dict(environment: Environment) -> dict[str, Any]:
    values = asdict(environment)
    gpu = values.pop("gpu")
    return {"gpu": gpu["name"], "compute_capability": gpu["capability"], "nvcc": values.pop("toolkit"), **values}
