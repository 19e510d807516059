"""Cycles of a measurement, and the best emulated results."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("measurements") as table:
        table.add_column(sa.Column("cycles", sa.Double))
        table.create_check_constraint("ck_measurements_cycles", "cycles IS NULL OR (cycles > 0 AND cycles < 1e30)")
        table.create_check_constraint(
            "ck_measurements_emulated", "kind = 'measured' OR (cycles IS NOT NULL AND limits <> '')"
        )
    op.create_table(
        "emulated_bests",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("problem_id", sa.Integer, nullable=False),
        sa.Column("gpu_name", sa.String(255), nullable=False),
        sa.Column("gpu_capability", sa.String(16), nullable=False),
        sa.Column("limits", sa.String(32), nullable=False),
        sa.Column("variant_id", sa.Integer, nullable=False),
        sa.Column("measurement_id", sa.Integer, nullable=False),
        sa.Column("measurement_kind", sa.String(16), nullable=False),
        sa.Column("verification_id", sa.Integer, nullable=False),
        sa.Column("verification_passed", sa.Boolean, nullable=False),
        sa.Column("partial", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_emulated_bests"),
        sa.UniqueConstraint("problem_id", "gpu_name", "gpu_capability", "limits", name="uq_emulated_bests_key"),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_emulated_bests_problem_id"),
        sa.ForeignKeyConstraint(["variant_id"], ["variants.id"], name="fk_emulated_bests_variant_id"),
        sa.ForeignKeyConstraint(
            ["verification_id", "problem_id", "variant_id", "verification_passed"],
            ["verifications.id", "verifications.problem_id", "verifications.variant_id", "verifications.passed"],
            name="fk_emulated_bests_verification_id",
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
            name="fk_emulated_bests_measurement_id",
        ),
        sa.CheckConstraint("verification_passed = true", name="ck_emulated_bests_verified"),
        sa.CheckConstraint("measurement_kind = 'emulated'", name="ck_emulated_bests_emulated"),
    )
