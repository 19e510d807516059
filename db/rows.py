"""Queries, and the way from rows to records. Whatever is read is checked: anybody may have written it."""

from __future__ import annotations

import functools
import json
import math
from datetime import timezone
from typing import Any

import sqlalchemy as sa

from ..gen.errors import BwdtuneError
from ..gen.families import Config, config_from_dict
from ..gen.problem import BIAS, CAUSAL, FLAGS, VALUE_HEAD_DIM, WINDOW, Problem
from .errors import InvalidRecord
from .models import (
    BestRow,
    ConfigurationRow,
    EmulatedBestRow,
    MeasurementRow,
    ProblemRow,
    SearchRow,
    VariantRow,
    VerificationRow,
    WinnerRow,
)
from .records import (
    EmulatedBest,
    Environment,
    GpuKey,
    MeasuredConfig,
    MeasurementRecord,
    SearchRecord,
    StoredMeasurement,
    StoredSearch,
    VariantRecord,
    VerificationRecord,
    Winner,
)

Condition = sa.ColumnElement[bool]


def equal(row_type: Any, **values: Any) -> list[Condition]:
    """The conditions that a row's columns have these values."""
    return [_equals(row_type, name, value) for name, value in values.items()]


@functools.lru_cache(maxsize=4096, typed=True)
def _equals(row_type: Any, name: str, value: Any) -> Condition:
    """Kept: SQLAlchemy takes longer to make the conditions of a problem's identity than SQLite to find it."""
    condition: Condition = getattr(row_type, name) == value
    return condition


def kind_of(problem: Problem) -> dict[str, Any]:
    """What a rendered source depends on, apart from its configuration."""
    return {
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "causal": problem.mask == CAUSAL,
        "windowed": problem.mask == WINDOW,
        **{name: getattr(problem, name) for name in (*FLAGS, *BIAS, VALUE_HEAD_DIM)},
    }


def identity_of(problem: Problem) -> dict[str, Any]:
    """All of a problem, by column."""
    return problem.to_stored()


def select_variants(*conditions: Condition) -> sa.Executable:
    """For `variant_record`; oldest first."""
    return (
        sa.select(VariantRow, ConfigurationRow)
        .join(ConfigurationRow, ConfigurationRow.id == VariantRow.configuration_id)
        .where(*conditions)
        .order_by(VariantRow.id)
    )


def select_verdicts(*conditions: Condition) -> sa.Executable:
    """For `judged_variant`: variants with their verdicts, oldest first."""
    return (
        sa.select(VariantRow, ConfigurationRow, VerificationRow)
        .join(ConfigurationRow, ConfigurationRow.id == VariantRow.configuration_id)
        .join(VerificationRow, VerificationRow.variant_id == VariantRow.id)
        .join(ProblemRow, ProblemRow.id == VerificationRow.problem_id)
        .where(*conditions)
        .order_by(VerificationRow.id)
    )


def select_measurements(*conditions: Condition) -> sa.Executable:
    """For `stored_measurement`: each with the newest verdict on its variant at its problem.

    By problem, then fastest first.
    """
    newest = (
        sa.select(sa.func.max(VerificationRow.id))
        .where(
            VerificationRow.problem_id == MeasurementRow.problem_id,
            VerificationRow.variant_id == MeasurementRow.variant_id,
        )
        .correlate(MeasurementRow)
        .scalar_subquery()
    )
    return (
        sa.select(MeasurementRow, ProblemRow, VariantRow, ConfigurationRow, VerificationRow)
        .join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
        .join(VariantRow, VariantRow.id == MeasurementRow.variant_id)
        .join(ConfigurationRow, ConfigurationRow.id == VariantRow.configuration_id)
        .outerjoin(VerificationRow, VerificationRow.id == newest)
        .where(*conditions)
        .order_by(ProblemRow.id, MeasurementRow.median_ms, MeasurementRow.id)
    )


def select_outcomes(*conditions: Condition, newest: int) -> sa.Executable:
    """For `measured_config`; newest first."""
    return (
        sa.select(MeasurementRow, ProblemRow, VariantRow.arch, ConfigurationRow)
        .join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
        .join(VariantRow, VariantRow.id == MeasurementRow.variant_id)
        .join(ConfigurationRow, ConfigurationRow.id == VariantRow.configuration_id)
        .where(*conditions)
        .order_by(MeasurementRow.id.desc())
        .limit(newest)
    )


def select_searches(*conditions: Condition) -> sa.Executable:
    """For `stored_search`; oldest first."""
    return (
        sa.select(SearchRow, ProblemRow)
        .join(ProblemRow, ProblemRow.id == SearchRow.problem_id)
        .where(*conditions)
        .order_by(SearchRow.started_at, SearchRow.id)
    )


def select_winners(*conditions: Condition) -> sa.Executable:
    """For `winner_record`; by problem, card and limits."""
    return _select_best(WinnerRow, *conditions)


def select_emulated_bests(*conditions: Condition) -> sa.Executable:
    """For `emulated_best`; by problem, card and the card that was emulated."""
    return _select_best(EmulatedBestRow, *conditions)


def _select_best(best: type[BestRow], *conditions: Condition) -> sa.Executable:
    return (
        sa.select(best, ProblemRow, VariantRow, ConfigurationRow, MeasurementRow, VerificationRow)
        .join(ProblemRow, ProblemRow.id == best.problem_id)
        .join(VariantRow, VariantRow.id == best.variant_id)
        .join(ConfigurationRow, ConfigurationRow.id == VariantRow.configuration_id)
        .join(MeasurementRow, MeasurementRow.id == best.measurement_id)
        .join(VerificationRow, VerificationRow.id == best.verification_id)
        .where(*conditions, VerificationRow.passed)
        .order_by(
            ProblemRow.dtype,
            ProblemRow.causal,
            ProblemRow.window_left,
            ProblemRow.window_right,
            *(getattr(ProblemRow, name) for name in (*FLAGS, *BIAS)),
            ProblemRow.head_dim,
            ProblemRow.value_head_dim,
            ProblemRow.batch,
            ProblemRow.heads_q,
            ProblemRow.seqlen_q,
            ProblemRow.id,
            best.gpu_name,
            best.limits,
        )
    )


def config_name(config: Config) -> str:
    """The parameters that have no default, or another value, by the names they are stored under.

    Not `Config.id`, which states most parameters: the default of a new one is what kernels did until then, so that what
    was stored before stays the same configuration.
    """
    values = ((one, getattr(config, name)) for name, one in config.parameters.items())
    return " ".join([config.family, *(f"{one.stored}={int(value)}" for one, value in values if value != one.default)])


def config_columns(config: Config) -> dict[str, Any]:
    """A configuration's row."""
    return {
        "name": config_name(config),
        "family": config.family,
        "parameters": json.dumps(config.to_stored(), sort_keys=True),
    }


def config_of(row: ConfigurationRow) -> Config:
    """The configuration of a row.

    Raises:
        InvalidRecord: What is stored is no configuration of this version, or another one's.
    """
    try:
        config = config_from_dict(dict(json.loads(row.parameters)))
    except (BwdtuneError, TypeError, ValueError) as error:
        raise InvalidRecord(f"the parameters of {row.name!r} are of no configuration: {error}") from None
    if config_name(config) != row.name:
        raise InvalidRecord(f"the parameters of {row.name!r} are those of {config.id}")
    return config


def problem_of(row: ProblemRow) -> Problem:
    """The problem of a row."""
    return Problem(**{name: getattr(row, name) for name in Problem.stored_names()})


def outcome_columns(variant: VariantRecord) -> dict[str, Any]:
    """What compiling the same source once more may change."""
    return {
        "template_hash": variant.template_hash,
        "machine_code": variant.machine_code,
        "status": variant.status,
        "error": variant.error,
        "registers": variant.registers,
        "spill_bytes": variant.spill_bytes,
        "stack_bytes": variant.stack_bytes,
        "shared_memory_bytes": variant.shared_memory_bytes,
        "threads": variant.threads,
        "compile_seconds": variant.compile_seconds,
    }


def variant_record(row: VariantRow, configuration: ConfigurationRow) -> VariantRecord:
    return VariantRecord(
        config=config_of(configuration),
        source_hash=row.source_hash,
        template_hash=row.template_hash,
        arch=row.arch,
        toolchain=row.toolchain,
        status=row.status,
        error=row.error,
        registers=row.registers,
        spill_bytes=row.spill_bytes,
        stack_bytes=row.stack_bytes,
        shared_memory_bytes=row.shared_memory_bytes,
        threads=row.threads,
        compile_seconds=row.compile_seconds,
        machine_code=row.machine_code,
    )


def verdict_columns(verification: VerificationRecord) -> dict[str, Any]:
    """A verification's row, but for what it is about."""
    return {
        "passed": verification.passed,
        "max_error": verification.max_error if math.isfinite(verification.max_error) else None,
        "errors": json.dumps(_named(verification.errors), allow_nan=False),
        "reason": verification.reason,
    }


def _verification(row: VerificationRow) -> VerificationRecord:
    return VerificationRecord(
        passed=row.passed,
        max_error=math.nan if row.max_error is None else row.max_error,
        errors=_unnamed(json.loads(row.errors)),
        reason=row.reason,
    )


def _named(value: Any) -> Any:
    """The same with the numbers that JSON does not have as strings: ``nan``, ``inf``, ``-inf``."""
    if isinstance(value, dict):
        return {name: _named(inner) for name, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _unnamed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unnamed(inner) for name, inner in value.items()}
    return float(value) if value in ("nan", "inf", "-inf") else value


def judged_variant(
    variant: VariantRow, configuration: ConfigurationRow, verification: VerificationRow
) -> tuple[VariantRecord, VerificationRecord]:
    return variant_record(variant, configuration), _verification(verification)


def measurement_columns(measurement: MeasurementRecord) -> dict[str, Any]:
    """A measurement's row, but for what was measured."""
    environment = measurement.environment
    return {
        **condition_columns(environment, measurement.policy, measurement.limits),
        "kind": measurement.kind,
        "median_ms": measurement.median_ms,
        "low_ms": measurement.low_ms,
        "high_ms": measurement.high_ms,
        "samples": measurement.samples,
        "clock_mhz": measurement.clock_mhz,
        "cycles": measurement.cycles,
        "default_ms": measurement.default_ms,
        "default_kernel": measurement.default_kernel,
    }


def card_columns(gpu: GpuKey, limits: str | None) -> dict[str, Any]:
    """What a winner is for, beside its problem."""
    return {"gpu_name": gpu.name, "gpu_capability": gpu.capability, "limits": limits or ""}


def condition_columns(environment: Environment, policy: str, limits: str | None) -> dict[str, Any]:
    """Where and how something was measured. The target is the variant's."""
    return {
        **card_columns(environment.gpu, limits),
        "driver": environment.driver,
        "toolkit": environment.toolkit,
        "torch": environment.torch,
        "policy": policy,
    }


def _measurement(row: MeasurementRow, arch: str) -> MeasurementRecord:
    return MeasurementRecord(
        environment=Environment(
            gpu=GpuKey(row.gpu_name, row.gpu_capability),
            arch=arch,
            driver=row.driver,
            toolkit=row.toolkit,
            torch=row.torch,
        ),
        policy=row.policy,
        median_ms=row.median_ms,
        low_ms=row.low_ms,
        high_ms=row.high_ms,
        samples=row.samples,
        clock_mhz=row.clock_mhz,
        limits=row.limits or None,
        kind=row.kind,
        cycles=row.cycles,
        default_ms=row.default_ms,
        default_kernel=row.default_kernel,
    )


def stored_measurement(
    row: MeasurementRow,
    problem: ProblemRow,
    variant: VariantRow,
    configuration: ConfigurationRow,
    verification: VerificationRow | None,
) -> StoredMeasurement:
    return StoredMeasurement(
        id=row.id,
        problem=problem_of(problem),
        variant_id=variant.id,
        variant=variant_record(variant, configuration),
        record=_measurement(row, variant.arch),
        verification_id=verification.id if verification else None,
        verification=_verification(verification) if verification else None,
        created_at=row.created_at.replace(tzinfo=timezone.utc),
        search_id=row.search_id,
        trusted=row.trusted,
    )


def measured_config(
    row: MeasurementRow, problem: ProblemRow, arch: str, configuration: ConfigurationRow
) -> MeasuredConfig:
    return MeasuredConfig(problem_of(problem), config_of(configuration), _measurement(row, arch))


def search_columns(search: SearchRecord) -> dict[str, Any]:
    """A search's row as it begins, but for its problem and when that is."""
    return {
        "study": search.study,
        "arch": search.arch,
        "sampler": search.sampler,
        "seed": search.seed,
        "options": json.dumps(dict(search.options), sort_keys=True, allow_nan=False),
        "host": search.host,
        "gpu_name": search.gpu.name if search.gpu else None,
        "gpu_capability": search.gpu.capability if search.gpu else None,
        "gpu_uuid": search.gpu_uuid,
        "driver": search.driver,
        "power_limit_w": search.power_limit_w,
        "bwdtune": search.bwdtune,
        "toolkit": search.toolkit,
        "torch": search.torch,
        "optuna": search.optuna,
    }


def stored_search(row: SearchRow, problem: ProblemRow) -> StoredSearch:
    return StoredSearch(
        id=row.id,
        uid=row.uid,
        record=SearchRecord(
            problem=problem_of(problem),
            study=row.study,
            arch=row.arch,
            sampler=row.sampler,
            seed=row.seed,
            options=dict(json.loads(row.options)),
            host=row.host,
            gpu=GpuKey(row.gpu_name, row.gpu_capability) if row.gpu_name and row.gpu_capability else None,
            gpu_uuid=row.gpu_uuid,
            driver=row.driver,
            power_limit_w=row.power_limit_w,
            bwdtune=row.bwdtune,
            toolkit=row.toolkit,
            torch=row.torch,
            optuna=row.optuna,
        ),
        started_at=row.started_at.replace(tzinfo=timezone.utc),
        ended_at=row.ended_at.replace(tzinfo=timezone.utc) if row.ended_at else None,
        status=row.status,
        decided=row.decided,
        error=row.error,
    )


def winner_record(
    row: WinnerRow,
    problem: ProblemRow,
    variant: VariantRow,
    configuration: ConfigurationRow,
    measurement: MeasurementRow,
    verification: VerificationRow,
) -> Winner:
    measured = _measurement(measurement, variant.arch)
    compiled = variant_record(variant, configuration)
    return Winner(
        problem=problem_of(problem),
        config=compiled.config,
        environment=measured.environment,
        source_hash=compiled.source_hash,
        template_hash=compiled.template_hash,
        median_ms=measured.median_ms,
        low_ms=measured.low_ms,
        high_ms=measured.high_ms,
        max_error=_verification(verification).max_error,
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        shared_memory_bytes=compiled.shared_memory_bytes,
        partial=row.partial,
        policy=measured.policy,
        limits=measured.limits,
        created_at=row.created_at.replace(tzinfo=timezone.utc),
        machine_code=compiled.machine_code,
        default_ms=measured.default_ms,
        default_kernel=measured.default_kernel,
        measurement_id=row.measurement_id,
    )


def emulated_best(
    row: EmulatedBestRow,
    problem: ProblemRow,
    variant: VariantRow,
    configuration: ConfigurationRow,
    measurement: MeasurementRow,
    verification: VerificationRow,
) -> EmulatedBest:
    emulated = _measurement(measurement, variant.arch)
    compiled = variant_record(variant, configuration)
    if emulated.cycles is None:
        raise AssertionError("the schema sees to that")
    return EmulatedBest(
        problem=problem_of(problem),
        config=compiled.config,
        target=row.limits,
        environment=emulated.environment,
        source_hash=compiled.source_hash,
        template_hash=compiled.template_hash,
        cycles=emulated.cycles,
        max_error=_verification(verification).max_error,
        registers=compiled.registers,
        spill_bytes=compiled.spill_bytes,
        partial=row.partial,
        policy=emulated.policy,
        created_at=row.created_at.replace(tzinfo=timezone.utc),
        measurement_id=row.measurement_id,
        machine_code=compiled.machine_code,
    )
