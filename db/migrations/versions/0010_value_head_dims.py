"""A head_dim of v's own: of problems and of the variants made for them. None had one before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_MASK = ("causal", "window_left", "window_right")
_FLAGS = ("bottom_right", "softcap", "varlen", "deterministic", "lse_grad", "sink")
_BIASES = ("alibi", "bias", "bias_dtype", "bias_grad")
_SIZES = ("dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim")
_KIND = ("configuration_id", "dtype", "head_dim", "causal", "windowed")
_BUILD = ("source_hash", "arch", "toolchain")
_ADDED = "value_head_dim"

_IDENTITIES = {
    "problems": (*_SIZES, *_MASK, *_FLAGS, *_BIASES, _ADDED),
    "variants": (*_KIND, *_FLAGS, *_BIASES, _ADDED, *_BUILD),
}


def upgrade() -> None:
    for name, identity in _IDENTITIES.items():
        with op.batch_alter_table(name) as table:
            table.drop_constraint(f"uq_{name}_identity", type_="unique")
            table.add_column(sa.Column(_ADDED, sa.Integer, nullable=False, server_default="0"))
            table.create_unique_constraint(f"uq_{name}_identity", list(identity))
