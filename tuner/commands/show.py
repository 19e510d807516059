"""``tuner show``: all that is stored about a problem."""

from __future__ import annotations

from contextlib import closing

from ...gen.problem import Problem
from .options import DatabaseOption, JsonOption, for_problem
from .output import print_result
from .tables import history_tables, history_to_dict


@for_problem()
def command(problem: Problem, database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """Show all that is stored about a problem: winners, searches, measurements, what failed and why."""
    from ...db.store import Store

    with closing(Store.open(database, read_only=True)) as store:
        history = store.show(problem)
    nothing = f"nothing is stored about {problem.label} yet: run `tuner search`"
    print_result(history_to_dict(history), history_tables(history) or [nothing], as_json)
