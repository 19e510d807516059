"""Configurations that are known to be fast before a search begins: presets, shipped ones, and earlier winners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...db.shipped import read_shipped
from ...gen.families import PRESETS, Config

if TYPE_CHECKING:
    from ...db.store import Store


def head_starts(store: Store | None = None) -> list[Config]:
    """Presets and shipped configurations of every problem and card, and all that won in a database.

    Searches and replays without a head start withhold them: they are no part of the space.

    Args:
        store: The database; None looks into none.

    Raises:
        DatabaseError: It cannot be read.
    """
    known = [*PRESETS.values(), *(row.config for row in read_shipped())]
    if store:
        known += [winner.config for winner in store.winners()]
        known += [best.config for best in store.emulated_bests()]
    return list(dict.fromkeys(known))
