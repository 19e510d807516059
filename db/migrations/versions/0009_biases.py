"""ALiBi, and a bias with or without a gradient: of problems and of the variants made for them. None had any before."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_MASK = ("causal", "window_left", "window_right")
_FLAGS = ("bottom_right", "softcap", "varlen", "deterministic", "lse_grad", "sink")
_SIZES = ("dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim")
_KIND = ("configuration_id", "dtype", "head_dim", "causal", "windowed")
_BUILD = ("source_hash", "arch", "toolchain")
_ADDED = ("alibi", "bias", "bias_dtype", "bias_grad")
_NAMES = ("bias", "bias_dtype")

_IDENTITIES = {
    "problems": (*_SIZES, *_MASK, *_FLAGS, *_ADDED),
    "variants": (*_KIND, *_FLAGS, *_ADDED, *_BUILD),
}


def upgrade() -> None:
    for name, identity in _IDENTITIES.items():
        with op.batch_alter_table(name) as table:
            table.drop_constraint(f"uq_{name}_identity", type_="unique")
            for added in _ADDED:
                table.add_column(
                    sa.Column(added, sa.String(16), nullable=False, server_default="")
                    if added in _NAMES
                    else sa.Column(added, sa.Boolean, nullable=False, server_default=sa.false())
                )
            table.create_unique_constraint(f"uq_{name}_identity", list(identity))
