"""The schema: a new database has it from here, an older one is upgraded by `migrations`. A test holds the two together.

A winner refers to its verification and measurement by composite foreign keys that carry the problem, the variant and
the verdict, and CHECKs pin the verdict: a winner that did not pass, was not measured, or borrows another variant's
verification cannot be stored by whatever program. Emulated results have a table of their own for their best, under the
same rules: there none that was measured, among the winners none that was emulated.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

VERSION_TABLE = "bwdtune_schema_version"
"""Alembic's version table. Not Alembic's own name for it: Optuna keeps its `alembic_version` in the same database."""

SCHEMA = "0010"
"""The schema of this version of the program: the newest revision in `migrations`."""

# CHECKs cannot name infinity portably. NaN fails as well: SQLite makes it NULL, PostgreSQL puts it above all numbers.
_TIME = "{0} > 0 AND {0} < 1e30"


class Base(DeclarativeBase):
    type_annotation_map: ClassVar[dict[Any, Any]] = {float: sa.Double()}
    metadata = sa.MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(constraint_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class ProblemRow(Base):
    __tablename__ = "problems"
    __table_args__ = (
        sa.UniqueConstraint(
            "dtype",
            "batch",
            "heads_q",
            "heads_kv",
            "seqlen_q",
            "seqlen_kv",
            "head_dim",
            "causal",
            "window_left",
            "window_right",
            "bottom_right",
            "softcap",
            "varlen",
            "deterministic",
            "lse_grad",
            "sink",
            "alibi",
            "bias",
            "bias_dtype",
            "bias_grad",
            "value_head_dim",
            name="identity",
        ),
        sa.CheckConstraint(
            "batch > 0 AND heads_q > 0 AND heads_kv > 0 AND seqlen_q > 0 AND seqlen_kv > 0 AND head_dim > 0",
            name="sizes",
        ),
        sa.CheckConstraint("window_left >= -1 AND window_right >= -1", name="window"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    dtype: Mapped[str] = mapped_column(sa.String(16))
    batch: Mapped[int]
    heads_q: Mapped[int]
    heads_kv: Mapped[int]
    seqlen_q: Mapped[int]
    seqlen_kv: Mapped[int]
    head_dim: Mapped[int]
    causal: Mapped[bool]
    # What was stored before there was any of this had none of it.
    window_left: Mapped[int] = mapped_column(server_default="-1")
    window_right: Mapped[int] = mapped_column(server_default="-1")
    bottom_right: Mapped[bool] = mapped_column(server_default=sa.false())
    softcap: Mapped[bool] = mapped_column(server_default=sa.false())
    varlen: Mapped[bool] = mapped_column(server_default=sa.false())
    deterministic: Mapped[bool] = mapped_column(server_default=sa.false())
    lse_grad: Mapped[bool] = mapped_column(server_default=sa.false())
    sink: Mapped[bool] = mapped_column(server_default=sa.false())
    alibi: Mapped[bool] = mapped_column(server_default=sa.false())
    bias: Mapped[str] = mapped_column(sa.String(16), server_default="")
    bias_dtype: Mapped[str] = mapped_column(sa.String(16), server_default="")
    bias_grad: Mapped[bool] = mapped_column(server_default=sa.false())
    value_head_dim: Mapped[int] = mapped_column(server_default="0")


class ConfigurationRow(Base):
    __tablename__ = "configurations"
    __table_args__ = (sa.UniqueConstraint("name", name="name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    family: Mapped[str] = mapped_column(sa.String(32))
    name: Mapped[str] = mapped_column(sa.String(500))
    """`rows.config_name`: it never changes for a configuration."""
    parameters: Mapped[str] = mapped_column(sa.Text)
    """`Config.to_stored()` as JSON. Text, so that one damaged row does not break the reading of the others."""


class VariantRow(Base):
    __tablename__ = "variants"
    __table_args__ = (
        sa.UniqueConstraint(
            "configuration_id",
            "dtype",
            "head_dim",
            "causal",
            "windowed",
            "bottom_right",
            "softcap",
            "varlen",
            "deterministic",
            "lse_grad",
            "sink",
            "alibi",
            "bias",
            "bias_dtype",
            "bias_grad",
            "value_head_dim",
            "source_hash",
            "arch",
            "toolchain",
            name="identity",
        ),
        sa.CheckConstraint("status IN ('ok', 'failed', 'timeout')", name="status"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    configuration_id: Mapped[int] = mapped_column(sa.ForeignKey("configurations.id"))
    dtype: Mapped[str] = mapped_column(sa.String(16))
    head_dim: Mapped[int]
    causal: Mapped[bool]
    """Whether the mask is the causal one; a window is `windowed` and not this, whatever it shows to the right."""
    windowed: Mapped[bool] = mapped_column(server_default=sa.false())
    bottom_right: Mapped[bool] = mapped_column(server_default=sa.false())
    softcap: Mapped[bool] = mapped_column(server_default=sa.false())
    varlen: Mapped[bool] = mapped_column(server_default=sa.false())
    deterministic: Mapped[bool] = mapped_column(server_default=sa.false())
    lse_grad: Mapped[bool] = mapped_column(server_default=sa.false())
    sink: Mapped[bool] = mapped_column(server_default=sa.false())
    alibi: Mapped[bool] = mapped_column(server_default=sa.false())
    bias: Mapped[str] = mapped_column(sa.String(16), server_default="")
    bias_dtype: Mapped[str] = mapped_column(sa.String(16), server_default="")
    bias_grad: Mapped[bool] = mapped_column(server_default=sa.false())
    value_head_dim: Mapped[int] = mapped_column(server_default="0")
    source_hash: Mapped[str] = mapped_column(sa.String(64))
    template_hash: Mapped[str] = mapped_column(sa.String(64))
    machine_code: Mapped[str | None] = mapped_column(sa.String(64))
    """`gen.build.machine_code`: NULL for the target `host`, where nothing was compiled, and in what was stored before
    there was such a hash."""
    arch: Mapped[str] = mapped_column(sa.String(32))
    toolchain: Mapped[str] = mapped_column(sa.String(64))
    status: Mapped[str] = mapped_column(sa.String(16))
    error: Mapped[str] = mapped_column(sa.Text)
    registers: Mapped[int | None]
    spill_bytes: Mapped[int | None]
    stack_bytes: Mapped[int | None]
    shared_memory_bytes: Mapped[int | None]
    threads: Mapped[int | None]
    compile_seconds: Mapped[float | None]
    created_at: Mapped[datetime]
    """UTC, as everywhere here."""


class VerificationRow(Base):
    __tablename__ = "verifications"
    __table_args__ = (
        sa.UniqueConstraint("id", "problem_id", "variant_id", "passed", name="verdict"),
        sa.Index(None, "problem_id", "variant_id"),
        sa.CheckConstraint(
            "passed = false OR (max_error IS NOT NULL AND max_error >= 0 AND max_error < 1e30)", name="error"
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    problem_id: Mapped[int] = mapped_column(sa.ForeignKey("problems.id"))
    variant_id: Mapped[int] = mapped_column(sa.ForeignKey("variants.id"))
    passed: Mapped[bool]
    max_error: Mapped[float | None]
    """NULL where it is not finite."""
    errors: Mapped[str] = mapped_column(sa.Text)
    """JSON; a number that is not finite is written as its name in a string."""
    reason: Mapped[str] = mapped_column(sa.Text)
    created_at: Mapped[datetime]


class SearchRow(Base):
    """A search: written when it begins, and when it ends. One that was killed stays as it was."""

    __tablename__ = "searches"
    __table_args__ = (
        sa.UniqueConstraint("uid", name="uid"),
        sa.Index(None, "problem_id"),
        sa.CheckConstraint("status IN ('running', 'complete', 'partial', 'predicted', 'failed')", name="status"),
        sa.CheckConstraint("seed >= 0 AND decided >= 0", name="counts"),
        sa.CheckConstraint("(status = 'running') = (ended_at IS NULL)", name="end"),
        sa.CheckConstraint(f"power_limit_w IS NULL OR ({_TIME.format('power_limit_w')})", name="power_limit_w"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    uid: Mapped[str] = mapped_column(sa.String(32))
    """The same in every database that it is handed on to."""
    problem_id: Mapped[int] = mapped_column(sa.ForeignKey("problems.id"))
    study: Mapped[str] = mapped_column(sa.String(512))
    """The name of the Optuna study that has its trials; the empty string where nothing is timed."""
    arch: Mapped[str] = mapped_column(sa.String(32))
    sampler: Mapped[str] = mapped_column(sa.String(32))
    seed: Mapped[int] = mapped_column(sa.BigInteger)
    options: Mapped[str] = mapped_column(sa.Text)
    """JSON."""
    host: Mapped[str] = mapped_column(sa.String(255))
    gpu_name: Mapped[str | None] = mapped_column(sa.String(255))
    """NULL, as the three below, where there was no GPU to measure on."""
    gpu_capability: Mapped[str | None] = mapped_column(sa.String(16))
    gpu_uuid: Mapped[str | None] = mapped_column(sa.Text)
    """Of several cards, between commas."""
    driver: Mapped[str | None] = mapped_column(sa.String(64))
    power_limit_w: Mapped[float | None]
    bwdtune: Mapped[str] = mapped_column(sa.String(64))
    toolkit: Mapped[str] = mapped_column(sa.String(64))
    torch: Mapped[str] = mapped_column(sa.String(64))
    optuna: Mapped[str] = mapped_column(sa.String(64))
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    status: Mapped[str] = mapped_column(sa.String(16))
    decided: Mapped[int]
    """Candidates decided so far."""
    error: Mapped[str] = mapped_column(sa.Text)


class MeasurementRow(Base):
    __tablename__ = "measurements"
    __table_args__ = (
        sa.UniqueConstraint(
            "id", "problem_id", "variant_id", "gpu_name", "gpu_capability", "limits", "kind", name="result"
        ),
        sa.Index(None, "problem_id", "variant_id"),
        sa.Index(None, "search_id"),
        sa.CheckConstraint(_TIME.format("median_ms"), name="median_ms"),
        sa.CheckConstraint(_TIME.format("low_ms"), name="low_ms"),
        sa.CheckConstraint(_TIME.format("high_ms"), name="high_ms"),
        sa.CheckConstraint("low_ms <= median_ms AND median_ms <= high_ms", name="interval"),
        sa.CheckConstraint("samples > 0", name="samples"),
        sa.CheckConstraint("kind IN ('measured', 'emulated')", name="kind"),
        sa.CheckConstraint(f"cycles IS NULL OR ({_TIME.format('cycles')})", name="cycles"),
        sa.CheckConstraint("kind = 'measured' OR (cycles IS NOT NULL AND limits <> '')", name="emulated"),
        sa.CheckConstraint(f"default_ms IS NULL OR ({_TIME.format('default_ms')})", name="default_ms"),
        sa.CheckConstraint("default_ms IS NULL OR default_kernel IS NOT NULL", name="default_kernel"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    problem_id: Mapped[int] = mapped_column(sa.ForeignKey("problems.id"))
    variant_id: Mapped[int] = mapped_column(sa.ForeignKey("variants.id"))
    gpu_name: Mapped[str] = mapped_column(sa.String(255))
    gpu_capability: Mapped[str] = mapped_column(sa.String(16))
    driver: Mapped[str] = mapped_column(sa.String(64))
    toolkit: Mapped[str] = mapped_column(sa.String(64))
    torch: Mapped[str] = mapped_column(sa.String(64))
    policy: Mapped[str] = mapped_column(sa.String(255))
    limits: Mapped[str] = mapped_column(sa.String(32))
    """The empty string for the card's own limits: a NULL would switch the winners' foreign key off. Of an emulated one
    the card that was emulated."""
    kind: Mapped[str] = mapped_column(sa.String(16))
    median_ms: Mapped[float]
    low_ms: Mapped[float]
    high_ms: Mapped[float]
    samples: Mapped[int]
    clock_mhz: Mapped[float | None]
    created_at: Mapped[datetime]
    cycles: Mapped[float | None]
    """Of the main kernel on the longest SM; what emulated ones are ranked by."""
    default_ms: Mapped[float | None]
    """Of PyTorch's default backward in the same race."""
    default_kernel: Mapped[str | None] = mapped_column(sa.String(64))
    """Which kernel that was: `records.NO_FUSED_BACKWARD` where PyTorch has none, NULL where it was not determined."""
    search_id: Mapped[int | None] = mapped_column(sa.ForeignKey("searches.id"))
    """NULL in what was stored before searches were."""
    trusted: Mapped[bool] = mapped_column(server_default=sa.true())
    """False of what another database claims and was not verified here: it stands in for no measurement, and wins
    nothing."""


class ClaimRow(Base):
    """Something that a search is about to measure. Nothing refers to it: it goes when there is a result, or expires."""

    __tablename__ = "claims"
    __table_args__ = (sa.UniqueConstraint("scope", "subject", name="identity"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    scope: Mapped[str] = mapped_column(sa.String(64))
    """A hash of the study and the conditions: what a result depends on besides the subject."""
    subject: Mapped[str] = mapped_column(sa.String(500))
    """A configuration's `rows.config_name`, or another name that searches agree on."""
    holder: Mapped[str] = mapped_column(sa.String(32))
    """Unique to a search."""
    host: Mapped[str] = mapped_column(sa.String(255))
    process: Mapped[int] = mapped_column(sa.BigInteger)
    expires_at: Mapped[datetime]


def _best_of(kind: str) -> tuple[sa.schema.SchemaItem, ...]:
    """Constraints of a table of the best results."""
    return (
        sa.UniqueConstraint("problem_id", "gpu_name", "gpu_capability", "limits", name="key"),
        sa.ForeignKeyConstraint(
            ["verification_id", "problem_id", "variant_id", "verification_passed"],
            ["verifications.id", "verifications.problem_id", "verifications.variant_id", "verifications.passed"],
        ),
        sa.ForeignKeyConstraint(
            [
                "measurement_id",
                "problem_id",
                "variant_id",
                "gpu_name",
                "gpu_capability",
                "limits",
                "measurement_kind",
            ],
            [
                "measurements.id",
                "measurements.problem_id",
                "measurements.variant_id",
                "measurements.gpu_name",
                "measurements.gpu_capability",
                "measurements.limits",
                "measurements.kind",
            ],
        ),
        sa.CheckConstraint("verification_passed = true", name="verified"),
        sa.CheckConstraint(f"measurement_kind = '{kind}'", name=kind),
    )


class BestRow(Base):
    """The columns of such a table."""

    __abstract__ = True

    id: Mapped[int] = mapped_column(primary_key=True)
    problem_id: Mapped[int] = mapped_column(sa.ForeignKey("problems.id"))
    gpu_name: Mapped[str] = mapped_column(sa.String(255))
    gpu_capability: Mapped[str] = mapped_column(sa.String(16))
    limits: Mapped[str] = mapped_column(sa.String(32))
    variant_id: Mapped[int] = mapped_column(sa.ForeignKey("variants.id"))
    measurement_id: Mapped[int]
    measurement_kind: Mapped[str] = mapped_column(sa.String(16))
    verification_id: Mapped[int]
    verification_passed: Mapped[bool]
    partial: Mapped[bool]
    created_at: Mapped[datetime]


class WinnerRow(BestRow):
    __tablename__ = "winners"
    __table_args__ = _best_of("measured")


class EmulatedBestRow(BestRow):
    """Its `limits` are the card that was emulated, its GPU the one that stood for it."""

    __tablename__ = "emulated_bests"
    __table_args__ = _best_of("emulated")
