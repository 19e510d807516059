"""The machine code of variants, and PyTorch's default backward beside measurements.

What was stored before has neither: it is known by its source alone, until `tuner carry` compiles it once more.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("variants") as table:
        table.add_column(sa.Column("machine_code", sa.String(64)))
    with op.batch_alter_table("measurements") as table:
        table.add_column(sa.Column("default_ms", sa.Double))
        table.add_column(sa.Column("default_kernel", sa.String(64)))
        table.create_check_constraint(
            "ck_measurements_default_ms", "default_ms IS NULL OR (default_ms > 0 AND default_ms < 1e30)"
        )
        table.create_check_constraint(
            "ck_measurements_default_kernel", "default_ms IS NULL OR default_kernel IS NOT NULL"
        )
