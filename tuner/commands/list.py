"""``tuner list``: the stored winners, and what this version ships."""

from __future__ import annotations

from contextlib import closing

from ...db.errors import NoDatabase
from ...db.shipped import read_shipped
from ..text_table import TextTable
from .options import DatabaseOption, JsonOption
from .output import print_result
from .tables import best_to_dict, bests_table, shipped_table, shipped_to_dict, winner_to_dict, winners_table


def command(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List the stored winners, the best emulated configurations, and what this version ships."""
    from ...db.store import Store

    shipped = read_shipped()
    winners, bests = [], []
    try:
        with closing(Store.open(database, read_only=True)) as store:
            winners, bests = store.winners(), store.emulated_bests()
    except NoDatabase:
        if database or not shipped:
            raise
    shown: list[TextTable | str] = (
        [winners_table(winners)] if winners else ["no winner is stored yet: `tuner search` finds one"]
    )
    shown += [bests_table(bests)] if bests else []
    shown += [shipped_table(shipped)] if shipped else []
    data = [winner_to_dict(winner) for winner in winners]
    print_result([*data, *map(best_to_dict, bests), *map(shipped_to_dict, shipped)], shown, as_json)
