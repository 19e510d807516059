"""``tuner db export``: the database as JSON, to read, to compare, and to hand on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from ....gen.errors import BwdtuneError
from ....gen.problem import Problem
from ..options import DatabaseOption, for_shapes
from ..output import say


@for_shapes
def command(
    described: Callable[[str], Problem],
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            help="Only this problem, with the options that describe it: B_H_S_D, or B_HQ_HKV_S_D; may be repeated.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write. Default: standard output.")
    ] = None,
    database: DatabaseOption = None,
) -> None:
    """Write what is stored as JSON: searches, measured kernels, winners; all problems, or those of --shape.

    The same database gives the same text. docs/database.md has the format.
    """
    from ....db.blocks import read_blocks
    from ....db.exchange import write_export
    from ....db.store import Store

    problems = {Problem(**described(shape).to_stored()) for shape in shapes} if shapes else None
    with closing(Store.open(database, read_only=True)) as store:
        blocks = read_blocks(store, problems)
    absent = (problems or set()) - {block.problem for block in blocks}
    if absent:
        raise BwdtuneError(f"nothing is stored about {min(absent).label}: `tuner list` names what is")
    text = write_export(blocks)
    if output is None:
        sys.stdout.write(text)
        return
    draft = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(output)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise BwdtuneError(f"{output} cannot be written: {error.strerror}") from None
    kernels = sum(len(block.kernels) for block in blocks)
    say(f"{output}: {len(blocks)} problems, {kernels} kernels")
