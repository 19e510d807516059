"""What goes into the database and comes out of it. Plain dataclasses: importing them loads no database library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..gen.families import Config
from ..gen.problem import Problem
from .errors import InvalidRecord

MEASURED = "measured"
EMULATED = "emulated"
VARIANT_STATUSES = ("ok", "failed", "timeout")
RUNNING = "running"
SEARCH_STATUSES = (RUNNING, "complete", "partial", "predicted", "failed")
NO_FUSED_BACKWARD = "none"
"""The name of PyTorch's default kernel where it has none for a problem, such as one with a softcap."""


@dataclass(frozen=True)
class GpuKey:
    """The kind of card that a winner is for.

    Attributes:
        name: As the driver reports it.
        capability: Compute capability, such as ``9.0``.
    """

    name: str
    capability: str

    @property
    def arch(self) -> str:
        """The compile target, such as ``sm_90a``."""
        return f"sm_{self.capability.replace('.', '')}a" if "." in self.capability else self.capability


@dataclass(frozen=True)
class Environment:
    """Where something was measured; all of it is part of a measurement's identity.

    Attributes:
        gpu: The card.
        arch: The compile target, such as ``sm_90a``.
        driver: Version of the driver.
        toolkit: Version of nvcc.
        torch: Version of PyTorch.
    """

    gpu: GpuKey
    arch: str
    driver: str
    toolkit: str
    torch: str


@dataclass(frozen=True)
class VariantRecord:
    """A configuration's rendered source, compiled or refused by the compiler.

    Attributes:
        config: The configuration.
        source_hash: Hash of the rendered source.
        template_hash: Hash of the templates that it was rendered from.
        arch: The compile target.
        toolchain: Version of the compiler.
        status: ``ok``, ``failed`` or ``timeout``.
        error: One line that says why, unless ``ok``.
        registers: Registers a thread. As all below: of the main kernel, and None where the compiler does not say.
        spill_bytes: Spill stores and loads.
        stack_bytes: Stack frame.
        shared_memory_bytes: Shared memory a block.
        threads: Threads a block.
        compile_seconds: Wall time of the compiler.
        machine_code: Hash of its machine code (`gen.build.machine_code`); None for the target ``host``, where nothing
            was compiled, and in what was stored before there was such a hash.
    """

    config: Config
    source_hash: str
    template_hash: str
    arch: str
    toolchain: str
    status: str = "ok"
    error: str = ""
    registers: int | None = None
    spill_bytes: int | None = None
    stack_bytes: int | None = None
    shared_memory_bytes: int | None = None
    threads: int | None = None
    compile_seconds: float | None = None
    machine_code: str | None = None

    def __post_init__(self) -> None:
        if self.status not in VARIANT_STATUSES:
            raise InvalidRecord(f"a variant's status is {self.status!r}: use one of {', '.join(VARIANT_STATUSES)}")


@dataclass(frozen=True)
class VerificationRecord:
    """The third gate's verdict on a variant.

    Attributes:
        passed: Whether every gradient of every case was near enough to the fp64 reference.
        max_error: The largest relative L2 error; not finite where a gradient was not.
        errors: For each case its errors by name (``dq``, ``dk``, ``dv``, ``torch_dq``, ...).
        reason: One line that says why it did not pass.
    """

    passed: bool
    max_error: float
    errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    reason: str = ""

    def __post_init__(self) -> None:
        if self.passed and not (math.isfinite(self.max_error) and self.max_error >= 0):
            raise InvalidRecord(f"a verification cannot pass with an error of {self.max_error}")


@dataclass(frozen=True)
class MeasurementRecord:
    """How long a variant took.

    Attributes:
        environment: Where.
        policy: How it was timed: the timing policy's id.
        median_ms: Median of the samples.
        low_ms: Lower end of the interval.
        high_ms: Upper end of the interval.
        samples: Number of samples.
        clock_mhz: SM clock while it ran, where it is known.
        limits: The card whose limits the search kept to (``sm_120``), or None for the card's own. Of an emulated one
            the card that was emulated.
        kind: ``measured`` on the card, or ``emulated`` (which can never win).
        cycles: Median of the main kernel's cycles on the longest SM, where they were counted; an emulated one has them,
            and its times say nothing of the card that it stands for.
        default_ms: Median time of PyTorch's default backward of the problem in the same race, where it ran.
        default_kernel: The kernel that PyTorch chose: ``cudnn``, ``flash``, ``efficient`` or ``math``;
            `NO_FUSED_BACKWARD` where it has none, and None where it was not determined.

    Raises:
        InvalidRecord: A time or a number of cycles is not positive and finite, the median lies outside its interval, or
            an emulated one has no cycles or no card.
    """

    environment: Environment
    policy: str
    median_ms: float
    low_ms: float
    high_ms: float
    samples: int
    clock_mhz: float | None = None
    limits: str | None = None
    kind: str = MEASURED
    cycles: float | None = None
    default_ms: float | None = None
    default_kernel: str | None = None

    def __post_init__(self) -> None:
        if self.default_ms is not None and not (math.isfinite(self.default_ms) and self.default_ms > 0):
            raise InvalidRecord(f"not a time of PyTorch's default: {self.default_ms} ms")
        if self.default_ms is not None and self.default_kernel is None:
            raise InvalidRecord("a time of PyTorch's default needs the name of its kernel")
        if self.cycles is not None and not (math.isfinite(self.cycles) and self.cycles > 0):
            raise InvalidRecord(f"not a number of cycles: {self.cycles}")
        if self.kind == EMULATED and (self.cycles is None or self.limits is None):
            raise InvalidRecord("an emulated measurement needs its cycles, and the card that was emulated")
        if self.kind not in (MEASURED, EMULATED):
            raise InvalidRecord(f"a measurement's kind is {self.kind!r}: it must be {MEASURED} or {EMULATED}")
        times = (self.low_ms, self.median_ms, self.high_ms)
        if not all(math.isfinite(time) and time > 0 for time in times):
            raise InvalidRecord(f"not a time: median {self.median_ms} ms, interval {self.low_ms} to {self.high_ms} ms")
        if not self.low_ms <= self.median_ms <= self.high_ms:
            raise InvalidRecord(
                f"the median {self.median_ms} ms lies outside its interval {self.low_ms} to {self.high_ms} ms"
            )
        if self.samples < 1:
            raise InvalidRecord(f"a measurement has {self.samples} samples: it needs one at least")


@dataclass(frozen=True)
class SearchRecord:
    """A search as it begins: what it is for, what was chosen, and where it runs.

    Attributes:
        problem: What it searches for.
        study: The name of the Optuna study that has its trials; empty where nothing is timed.
        arch: The compile target.
        sampler: What proposes candidates.
        seed: What seeds the sampler.
        options: What else was chosen, by name: ``trials``, ``time_s``, ``limits``, ``emulate``, ….
        host: The machine's name.
        gpu: The kind of card. As the three below, None where there is none to measure on.
        gpu_uuid: Which card; of several, between commas.
        driver: Version of the driver.
        power_limit_w: What the card may draw at most; None where nothing says it, too.
        bwdtune: Version of this package. As those below, empty where it is not known.
        toolkit: Version of nvcc.
        torch: Version of PyTorch.
        optuna: Version of Optuna.

    Raises:
        InvalidRecord: The seed is negative.
    """

    problem: Problem
    study: str
    arch: str
    sampler: str
    seed: int
    options: Mapping[str, Any]
    host: str
    gpu: GpuKey | None
    gpu_uuid: str | None
    driver: str | None
    power_limit_w: float | None
    bwdtune: str
    toolkit: str
    torch: str
    optuna: str

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InvalidRecord(f"a search's seed is {self.seed}: it must not be negative")


@dataclass(frozen=True)
class StoredSearch:
    """A search as it is stored.

    Attributes:
        id: What measurements, and trials of its study (the attribute ``search``), refer to.
        uid: The same in every database that it is handed on to.
        record: As it began.
        started_at: UTC.
        ended_at: UTC; None where it runs, or was killed.
        status: ``running``; or how it ended: ``complete``, ``partial`` (interrupted), ``predicted`` (without a GPU),
            ``failed``.
        decided: Candidates decided so far.
        error: Why it failed.
    """

    id: int
    uid: str
    record: SearchRecord
    started_at: datetime
    ended_at: datetime | None
    status: str
    decided: int
    error: str

    def __post_init__(self) -> None:
        if self.status not in SEARCH_STATUSES:
            raise InvalidRecord(f"a search's status is {self.status!r}: use one of {', '.join(SEARCH_STATUSES)}")


@dataclass(frozen=True)
class MeasuredConfig:
    """How long a configuration took, without what else is stored of it.

    Attributes:
        problem: The problem.
        config: What was measured.
        record: The times, and where and how they were taken.
    """

    problem: Problem
    config: Config
    record: MeasurementRecord


@dataclass(frozen=True)
class StoredMeasurement:
    """A measurement as it is stored, with what was measured and the newest verdict on it.

    Attributes:
        id: For `Store.set_winner`.
        problem: The problem.
        variant_id: For `Store.record_measurement` and `Store.record_verification`.
        variant: What was measured.
        record: The times, and where and how they were taken.
        verification_id: The newest verification of this variant for this problem, if any; for `Store.set_winner`.
        verification: Its verdict.
        created_at: UTC.
        search_id: The search that took it; None in what was stored before searches were, or by none.
        trusted: Whether it was measured by whoever uses this database, or its kernel was verified here since. One that
            is not is what another database claims: it stands in for no measurement, and wins nothing.
    """

    id: int
    problem: Problem
    variant_id: int
    variant: VariantRecord
    record: MeasurementRecord
    verification_id: int | None
    verification: VerificationRecord | None
    created_at: datetime
    search_id: int | None = None
    trusted: bool = True

    @property
    def verified(self) -> bool:
        """Whether its variant is verified."""
        passed = self.verification is not None and self.verification.passed
        return passed and self.variant.status == "ok"

    @property
    def valid(self) -> bool:
        """Whether it was measured on a card, and its variant is verified: whether it may win."""
        return self.verified and self.trusted and self.record.kind == MEASURED


@dataclass(frozen=True)
class Winner:
    """The best verified and measured variant for a problem on a kind of card.

    Attributes:
        problem: The problem.
        config: Its configuration, checked.
        environment: Where it was measured.
        source_hash: Hash of the source that was measured.
        template_hash: Hash of the templates that it came from.
        median_ms: Median time.
        low_ms: Lower end of the interval.
        high_ms: Upper end of the interval.
        max_error: Largest relative L2 error of its verification.
        registers: Registers a thread, where the compiler says so.
        spill_bytes: Spill stores and loads.
        shared_memory_bytes: Shared memory a block.
        partial: Whether the search that stored it was interrupted.
        policy: How it was timed.
        limits: As `MeasurementRecord.limits`.
        created_at: UTC.
        machine_code: Hash of the machine code that was verified and timed; None in what was stored before there was
            such a hash.
        default_ms: As `MeasurementRecord.default_ms`.
        default_kernel: As `MeasurementRecord.default_kernel`.
        measurement_id: The measurement that it wins by.
    """

    problem: Problem
    config: Config
    environment: Environment
    source_hash: str
    template_hash: str
    median_ms: float
    low_ms: float
    high_ms: float
    max_error: float
    registers: int | None
    spill_bytes: int | None
    shared_memory_bytes: int | None
    partial: bool
    policy: str
    limits: str | None
    created_at: datetime
    machine_code: str | None = None
    default_ms: float | None = None
    default_kernel: str | None = None
    measurement_id: int | None = None

    @property
    def advantage(self) -> float | None:
        """How many times as fast as PyTorch's default it was in the same race; None where that did not run."""
        return self.default_ms / self.median_ms if self.default_ms else None

    @property
    def beats_default(self) -> bool | None:
        """Whether it was faster than PyTorch's default; None where that did not run."""
        return None if self.advantage is None else self.advantage > 1


@dataclass(frozen=True)
class EmulatedBest:
    """The best verified configuration for a problem on an emulated card. It is not a winner, and never used as
    one.

    Attributes:
        problem: The problem.
        config: Its configuration, checked.
        target: The card that was emulated, such as ``sm_120``.
        environment: Where it ran.
        source_hash: Hash of the source that ran, with its dummy mma.
        template_hash: Hash of the templates that it came from.
        cycles: Median cycles of the main kernel on the longest SM.
        max_error: Largest relative L2 error of its verification.
        registers: Registers a thread of what ran, where the compiler says so.
        spill_bytes: Its spill stores and loads.
        partial: Whether the search was interrupted.
        policy: How it was timed.
        created_at: UTC.
        measurement_id: The measurement that it is best by.
        machine_code: Hash of the machine code that ran; None in what was stored before there was such a hash.
    """

    problem: Problem
    config: Config
    target: str
    environment: Environment
    source_hash: str
    template_hash: str
    cycles: float
    max_error: float
    registers: int | None
    spill_bytes: int | None
    partial: bool
    policy: str
    created_at: datetime
    measurement_id: int | None = None
    machine_code: str | None = None


@dataclass(frozen=True)
class Holder:
    """Who claims something: a search.

    Attributes:
        id: Unique to it.
        host: The machine's name.
        process: Its process there.
    """

    id: str
    host: str
    process: int


@dataclass(frozen=True)
class ProblemHistory:
    """All that is known of a problem.

    Attributes:
        problem: The problem.
        winners: One a card and limit.
        measurements: Fastest first.
        rejected: Variants that did not pass verification, with the verdict.
        failures: Variants of this kind of problem that the compiler refused or did not finish.
        searches: Oldest first.
    """

    problem: Problem
    winners: tuple[Winner, ...]
    measurements: tuple[StoredMeasurement, ...]
    rejected: tuple[tuple[VariantRecord, VerificationRecord], ...]
    failures: tuple[VariantRecord, ...]
    searches: tuple[StoredSearch, ...] = ()
