"""Whether a database is whole, and says what this version can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ..gen.device import device_for_arch
from ..gen.errors import BwdtuneError
from ..gen.families import Config
from ..gen.problem import Problem
from ..gen.render import render
from . import connect, rows
from .models import Base
from .records import EMULATED

if TYPE_CHECKING:
    from .store import Store

_READERS: tuple[tuple[str, Callable[..., sa.Executable], Callable[..., Any]], ...] = (
    ("a search", rows.select_searches, rows.stored_search),
    ("a kernel", rows.select_variants, rows.variant_record),
    ("a verdict", rows.select_verdicts, rows.judged_variant),
    ("a measurement", rows.select_measurements, rows.stored_measurement),
    ("a winner", rows.select_winners, rows.winner_record),
    ("a best emulated configuration", rows.select_emulated_bests, rows.emulated_best),
)


def faults(store: Store) -> Iterator[str]:
    """What is wrong with a database, a line each: damaged pages, references to nothing, rows that cannot be read, and
    measured kernels that this version does not render.

    Raises:
        DatabaseError: It cannot be read at all.
    """
    engine = connect.make_engine(store.url, "ro")
    try:
        with connect.errors_of(store.url), engine.connect() as connection:
            if connection.dialect.name == "sqlite":
                yield from _faults_of_file(connection)
            yield from _dangling(connection)
            reasons: set[str] = set()  # what is wrong with a configuration is wrong with all that refers to it
            for what, select, read in _READERS:
                for where, reason in _unreadable(connection, select(), read):
                    if reason not in reasons:
                        yield f"{what}{where} cannot be read: {reason}"
                    reasons.add(reason)
    finally:
        engine.dispose()
    yield from _not_rendered(store)


def _faults_of_file(connection: sa.Connection) -> Iterator[str]:
    for found in connection.exec_driver_sql("PRAGMA integrity_check").scalars():
        if found != "ok":
            yield f"the file is damaged: {found}"


def _dangling(connection: sa.Connection) -> Iterator[str]:
    """Rows that refer to rows that are not there, which only a program that switches foreign keys off can leave."""
    for table in Base.metadata.sorted_tables:
        for key in table.foreign_key_constraints:
            other = key.referred_table.alias()
            columns = [element.parent for element in key.elements]
            same = [one == other.c[element.column.name] for one, element in zip(columns, key.elements, strict=True)]
            there = sa.exists(sa.select(sa.literal(1)).select_from(other).where(*same).correlate(table))
            lost = sa.select(table.c.id).where(*(column.is_not(None) for column in columns), ~there)
            for row_id in connection.execute(lost).scalars():
                yield f"row {row_id} of {table.name} refers to a row of {key.referred_table.name} that is not there"


def _unreadable(
    connection: sa.Connection, statement: sa.Executable, read: Callable[..., Any]
) -> Iterator[tuple[str, str]]:
    """Rows that cannot be made a record: which, and why."""
    with Session(connection) as session:
        try:
            found = session.execute(statement).all()
        except (ValueError, TypeError) as error:  # in SQLite a column may hold anything
            yield "", _one_line(error)
            return
        for row in found:
            try:
                read(*row)
            except (BwdtuneError, TypeError, ValueError) as error:
                yield f" (row {row[0].id} of {row[0].__tablename__})", _one_line(error)


def _not_rendered(store: Store) -> Iterator[str]:
    """Measured kernels of which this version makes no source."""
    asked: dict[tuple[str, Config, str | None, str], Problem] = {}
    for one in store.measurements():
        emulate = one.record.limits if one.record.kind == EMULATED else None
        asked[one.problem.kernel_spec, one.variant.config, emulate, one.variant.arch] = one.problem
    for (_, config, emulate, arch), problem in asked.items():
        try:
            render(problem, config, emulate=emulate, card=device_for_arch(arch))
        except Exception as error:  # whatever a template says of a row of long ago
            yield f"{config.id} for {problem.label} does not render: {type(error).__name__}: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
