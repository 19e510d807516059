"""Searches, and which one took a measurement. What was stored before names none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "searches",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("uid", sa.String(32), nullable=False),
        sa.Column("problem_id", sa.Integer, nullable=False),
        sa.Column("study", sa.String(512), nullable=False),
        sa.Column("arch", sa.String(32), nullable=False),
        sa.Column("sampler", sa.String(32), nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("options", sa.Text, nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("gpu_name", sa.String(255)),
        sa.Column("gpu_capability", sa.String(16)),
        sa.Column("gpu_uuid", sa.Text),
        sa.Column("driver", sa.String(64)),
        sa.Column("power_limit_w", sa.Double),
        sa.Column("bwdtune", sa.String(64), nullable=False),
        sa.Column("toolkit", sa.String(64), nullable=False),
        sa.Column("torch", sa.String(64), nullable=False),
        sa.Column("optuna", sa.String(64), nullable=False),
        sa.Column("started_at", sa.DateTime, nullable=False),
        sa.Column("ended_at", sa.DateTime),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("decided", sa.Integer, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.CheckConstraint(
            "status IN ('running', 'complete', 'partial', 'predicted', 'failed')", name="ck_searches_status"
        ),
        sa.CheckConstraint("seed >= 0 AND decided >= 0", name="ck_searches_counts"),
        sa.CheckConstraint("(status = 'running') = (ended_at IS NULL)", name="ck_searches_end"),
        sa.CheckConstraint(
            "power_limit_w IS NULL OR (power_limit_w > 0 AND power_limit_w < 1e30)",
            name="ck_searches_power_limit_w",
        ),
        sa.ForeignKeyConstraint(["problem_id"], ["problems.id"], name="fk_searches_problem_id"),
        sa.PrimaryKeyConstraint("id", name="pk_searches"),
        sa.UniqueConstraint("uid", name="uq_searches_uid"),
    )
    op.create_index("ix_searches_problem_id", "searches", ["problem_id"])
    with op.batch_alter_table("measurements") as table:
        table.add_column(sa.Column("search_id", sa.Integer))
        table.create_foreign_key("fk_measurements_search_id", "searches", ["search_id"], ["id"])
        table.create_index("ix_measurements_search_id", ["search_id"])
