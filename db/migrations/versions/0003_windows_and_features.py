"""Windows, alignment, softcap, packed sequences and determinism: of problems, and of the variants made for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op
from alembic.operations import BatchOperations

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_FLAGS = ("bottom_right", "softcap", "varlen", "deterministic")
_PROBLEM = ("dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim", "causal")
_KIND = ("configuration_id", "dtype", "head_dim", "causal")
_BUILD = ("source_hash", "arch", "toolchain")


def upgrade() -> None:
    limits: list[sa.Column[Any]] = [
        sa.Column(name, sa.Integer, nullable=False, server_default="-1") for name in ("window_left", "window_right")
    ]
    with op.batch_alter_table("problems") as table:
        _extend(table, "uq_problems_identity", _PROBLEM, [*limits, *map(_flag, _FLAGS)], ())
        table.create_check_constraint("ck_problems_window", "window_left >= -1 AND window_right >= -1")
    with op.batch_alter_table("variants") as table:
        _extend(table, "uq_variants_identity", _KIND, [_flag("windowed"), *map(_flag, _FLAGS)], _BUILD)


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean, nullable=False, server_default=sa.false())


def _extend(
    table: BatchOperations,
    identity: str,
    before: Sequence[str],
    added: Sequence[sa.Column[Any]],
    after: Sequence[str],
) -> None:
    """Adds columns, and makes them part of what tells one row from another."""
    table.drop_constraint(identity, type_="unique")
    for column in added:
        table.add_column(column)
    table.create_unique_constraint(identity, [*before, *(column.name for column in added), *after])
