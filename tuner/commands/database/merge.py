"""``tuner db merge``: takes over what is stored in another database."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....db.errors import OlderDatabase
from ....gen.errors import BwdtuneError, UsageError
from ..options import CacheOption, DatabaseOption, JsonOption
from .taken import TrustOption, take_over

if TYPE_CHECKING:
    from ....db.store import Store


def command(
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="The other database: a file or a URL. It is only read.")
    ],
    trust: TrustOption = False,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Take over what another database has measured. Nothing of it wins here before it was verified here.

    Of two winners the better one stays, where they compare; where they do not, the present one, and that is said.
    The same database once more changes nothing.
    Exit status 1: some winners of the other one were not verified, or contradict what is stored.
    """
    from ....db.blocks import read_blocks
    from ....db.exchange import InvalidExport, read_export, write_export
    from ....db.store import Store

    with _opened(other) as theirs, closing(Store.open(database)) as store:
        if theirs.url == store.url:
            raise UsageError(f"{other} is the database itself: name another")
        try:
            # By way of the JSON, whose schema holds for what another program wrote into a database as well.
            blocks = read_export(write_export(read_blocks(theirs)))
        except (InvalidExport, ValueError) as error:
            raise BwdtuneError(f"{other} holds what this program does not store: {error}") from None
        return take_over(store, blocks, trust=trust, cache=cache, as_json=as_json)


@contextmanager
def _opened(database: str) -> Iterator[Store]:
    """Another database, to be read; a file of an older schema as an upgraded copy."""
    from ....db.connect import connect_sqlite, database_url, sqlite_path
    from ....db.store import Store

    path = sqlite_path(database_url(database))
    try:
        store = Store.open(database, read_only=True)
    except OlderDatabase:
        if path is None:
            raise
    else:
        with closing(store):
            yield store
        return
    with tempfile.TemporaryDirectory(prefix="bwdtune-merge-") as folder:
        copy = Path(folder) / "copy.sqlite"
        try:
            with closing(connect_sqlite(path, "ro")) as source, closing(connect_sqlite(copy, "rwc")) as target:
                source.backup(target)
        except sqlite3.Error as error:
            raise BwdtuneError(f"{database} cannot be copied, to be upgraded: {error}") from None
        with closing(Store.open(copy)) as store:
            yield store
