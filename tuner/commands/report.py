"""``tuner report``: what the database knows of searches, as one HTML page."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from ...gen.errors import BwdtuneError
from ...gen.problem import Problem
from .options import DatabaseOption, for_shapes
from .output import print_result


@for_shapes
def command(
    problem_of: Callable[[str], Problem],
    shape: Annotated[
        str | None, typer.Option("--shape", help="Of this shape alone. Default: all that the database knows.")
    ] = None,
    database: DatabaseOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write a page about the searches for a shape, or about all in the database.

    The page is one file: it needs no network, and can be sent to others. Options of the problem, such as --causal,
    belong to --shape.
    """
    from ...db.store import Store
    from ..report.history import read_histories
    from ..report.page import render_page

    problem = None if shape is None else problem_of(shape)
    with closing(Store.open(database, read_only=True)) as store:
        histories = read_histories(store, store.problems() if problem is None else [problem])
        name = Path(store.url.database or "").name or store.url.render_as_string()
    if not histories:
        raise NothingStored(
            f"nothing is stored about {problem.label if problem else 'any problem'} yet: run `tuner search`"
        )
    page = render_page(histories, name)
    output.write_text(page, encoding="utf-8")
    sections = f"{len(histories)} {'search' if len(histories) == 1 else 'searches'}"
    print_result(None, [f"{output}: {sections}, {len(page.encode()) / 1000:,.0f} kB"], as_json=False)


class NothingStored(BwdtuneError):
    """There is nothing to report."""
