"""``tuner db import``: takes over what another database has exported."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....gen.errors import BwdtuneError, UsageError
from ..options import CacheOption, DatabaseOption, JsonOption
from .taken import TrustOption, take_over

if TYPE_CHECKING:
    from ....db.blocks import Block


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `tuner db export` wrote; - for standard input.")],
    trust: TrustOption = False,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Take over what another database has exported. Nothing of it wins here before it was verified here.

    A file is checked before anything of it is stored. The same file once more changes nothing.
    Exit status 1: some winners of the file were not verified, or contradict what is stored.
    """
    from ....db.store import Store

    blocks = read(file)
    with closing(Store.open(database)) as store:
        return take_over(store, blocks, trust=trust, cache=cache, as_json=as_json)


def read(file: Path) -> list[Block]:
    """The blocks of an export.

    Raises:
        UsageError: It is none, in one line that begins with its name.
        BwdtuneError: It cannot be read.
    """
    from ....db.exchange import LARGEST_FILE_BYTES, InvalidExport, read_export

    try:
        with sys.stdin.buffer if str(file) == "-" else file.open("rb") as stream:
            content = stream.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise BwdtuneError(f"{file} cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_FILE_BYTES:
        raise UsageError(f"{file} is larger than {LARGEST_FILE_BYTES:,} bytes, which no export is")
    try:
        return read_export(content)
    except InvalidExport as error:
        raise UsageError(f"{file}: {error}") from None
