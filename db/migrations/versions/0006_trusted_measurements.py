"""Whether a measurement counts: what another database claims does not, until its kernel is verified here.

What was stored before was measured by whoever stored it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("measurements") as table:
        table.add_column(sa.Column("trusted", sa.Boolean, nullable=False, server_default=sa.true()))
