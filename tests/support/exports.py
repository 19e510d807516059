"""An export of a database of this version's schema."""

from __future__ import annotations

import functools
from contextlib import closing
from pathlib import Path

from bwdtune.db.blocks import read_blocks
from bwdtune.db.exchange import write_export
from bwdtune.db.models import SCHEMA
from bwdtune.db.store import Store

DATABASE = Path(__file__).parents[1] / "db" / "fixtures" / f"schema_{int(SCHEMA)}.sqlite"


@functools.cache
def exported(most: int | None = None) -> str:
    """An export of all problems, or of the first few."""
    with closing(Store.open(DATABASE, read_only=True)) as store:
        return write_export(read_blocks(store)[:most])
