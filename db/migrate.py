"""Whose a database is, and bringing it to this version's schema.

Nothing is written before it is known to be ours, or empty.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
import stat
from pathlib import Path

import sqlalchemy as sa

from . import connect, models
from .errors import (
    CorruptDatabase,
    DatabaseUnavailable,
    ForeignDatabase,
    NewerDatabase,
    NoDatabase,
    NotADatabase,
    OlderDatabase,
    ReadOnlyDatabase,
)

MIGRATIONS = Path(__file__).parent / "migrations"
_OUR_TABLES = frozenset(models.Base.metadata.tables)


def prepare(url: sa.URL, *, read_only: bool) -> None:
    """Sees to it that a database is there, is ours, is whole and has this version's schema.

    Args:
        url: As `connect.database_url` gives it.
        read_only: Only look: neither make it nor upgrade it.

    Raises:
        DatabaseError: One subclass for each cause. The database is as it was.
    """
    with connect.errors_of(url):
        path = connect.sqlite_path(url)
        if path is None:
            found = _schema_of_server(url)
        elif _is_there(url, path, read_only=read_only):
            found = _schema_of_file(url, path, read_only=read_only)
        else:
            found = None
        if path and not read_only:
            connect.choose_journal(path)
        if found == models.SCHEMA:
            return
        if read_only and found is None:
            raise NoDatabase(connect.describe(url), "it is empty")
        if read_only:
            raise OlderDatabase(connect.describe(url), f"{found}; this version has {models.SCHEMA}")
        _upgrade(url)


def _is_there(url: sa.URL, path: Path, *, read_only: bool) -> bool:
    """Whether there is a file with something in it. Makes the directory for a new one."""
    database = connect.describe(url)
    try:
        status = path.stat() if path.exists() else None
    except OSError as error:
        raise DatabaseUnavailable(database, error.strerror or str(error)) from None
    if status is None:
        if read_only:
            raise NoDatabase(database, "no such file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            kind = ReadOnlyDatabase if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else DatabaseUnavailable
            raise kind(database, f"cannot make the directory {path.parent}: {error.strerror}") from None
    elif stat.S_ISDIR(status.st_mode):
        raise NotADatabase(database, "it is a directory")
    elif not stat.S_ISREG(status.st_mode):
        raise NotADatabase(database, "it is not a regular file")
    elif status.st_size == 1:  # which SQLite takes for an empty file
        raise NotADatabase(database, "it is one byte long")
    if not read_only:
        if status and not os.access(path, os.W_OK):
            raise ReadOnlyDatabase(database, "the file is read-only")
        if not os.access(path.parent, os.W_OK):
            raise ReadOnlyDatabase(database, "its directory is read-only, and SQLite keeps a journal beside it")
    return status is not None and status.st_size > 0


def _schema_of_file(url: sa.URL, path: Path, *, read_only: bool) -> str | None:
    # Reading a file in WAL mode leaves a -wal and a -shm beside it, unless the reader may write: then it tidies up. But
    # that would also fold a log that another program left into its file. So: whatever leaves things as they were.
    tidy = not read_only and not path.with_name(path.name + "-wal").exists()
    engine = connect.make_engine(url, "rw" if tidy else "ro")
    try:
        with engine.connect() as connection:
            found = _schema_of(connection, url)
            if found and not read_only:  # reading all of it is too slow for the lookup at run time
                # CHECKs and NOT NULLs concern single rows, which are checked when they are read.
                faults = [
                    str(fault)
                    for fault in connection.exec_driver_sql("PRAGMA quick_check").scalars()
                    if not re.match(r"ok$|CHECK constraint failed|NULL value in", str(fault))
                ]
                if faults:
                    raise CorruptDatabase(str(path), faults[0])
    finally:
        engine.dispose()
    return found


def _schema_of_server(url: sa.URL) -> str | None:
    engine = connect.make_engine(url)
    try:
        with engine.connect() as connection:
            return _schema_of(connection, url)
    finally:
        engine.dispose()


def _schema_of(connection: sa.Connection, url: sa.URL) -> str | None:
    """The schema's version, or None where none of our tables is there.

    A file that holds anything else is refused, a file of Optuna's alone too: our own files have our tables from the
    start, so it is somebody's study. A server's database is there to be shared, as long as no table has our names.

    Raises:
        ForeignDatabase: Tables of another program.
        NewerDatabase: A later schema.
        CorruptDatabase: Our version table, but not our tables.
    """
    database = connect.describe(url)
    inspector = sa.inspect(connection)
    views = {*inspector.get_view_names()}
    tables = {*inspector.get_table_names(), *views}
    if models.VERSION_TABLE not in tables:
        others = tables if connection.dialect.name == "sqlite" else tables & _OUR_TABLES
        if others:
            raise ForeignDatabase(database, f"its tables are {_some(others)}")
        return None
    if ours := views & {*_OUR_TABLES, models.VERSION_TABLE}:
        raise ForeignDatabase(database, f"{_some(ours)} is a view")
    versions = connection.execute(sa.text(f"SELECT version_num FROM {models.VERSION_TABLE}")).scalars().all()
    if len(versions) != 1 or not re.fullmatch(r"\d{4}", str(versions[0])):
        raise CorruptDatabase(database, f"its schema version is {', '.join(map(repr, versions)) or 'missing'}")
    version = str(versions[0])
    if version > models.SCHEMA:
        raise NewerDatabase(database, f"schema {version}; this version knows {models.SCHEMA}")
    if version == models.SCHEMA:
        columns = inspector.get_multi_columns(filter_names=list(_OUR_TABLES))
        there = {(table, column["name"]) for (_, table), found in columns.items() for column in found}
        missing = {
            f"{table.name}.{column.name}"
            for table in models.Base.metadata.sorted_tables
            for column in table.columns
            if (table.name, column.name) not in there
        }
        if missing:
            raise CorruptDatabase(database, f"it lacks {_some(missing)}")
    return version


def _some(names: set[str], most: int = 4) -> str:
    return ", ".join(sorted(names)[:most]) + (", ..." if len(names) > most else "")


def _upgrade(url: sa.URL) -> None:
    """Makes the tables, or upgrades them, in one transaction (MySQL has none for that)."""
    path = connect.sqlite_path(url)
    # SQLite changes a table by making another and dropping the first, which foreign keys would not let pass.
    engine = connect.make_engine(url, "rwc", foreign_keys=False).execution_options(sqlite_begin="BEGIN IMMEDIATE")
    try:
        with engine.begin() as connection:
            found = _schema_of(connection, url)  # again, now under the lock: another process may have migrated it
            if found == models.SCHEMA:
                return
            if path and found:
                _back_up(path, found)
            if found:
                _migrate(connection)
                _schema_of(connection, url)  # an older schema is not looked at closely before
            else:  # the tables as all migrations leave them, in a tenth of the time
                models.Base.metadata.create_all(connection)
                _stamp(connection)
            if path and (broken := connection.exec_driver_sql("PRAGMA foreign_key_check").first()):
                raise CorruptDatabase(str(path), f"a row of {broken[0]} refers to a missing row of {broken[2]}")
    except (sa.exc.IntegrityError, sa.exc.ProgrammingError) as error:
        # On a server, two that make the same tables at once: the second fails, and then finds them made.
        with engine.connect() as connection:
            if _schema_of(connection, url) != models.SCHEMA:
                raise DatabaseUnavailable(connect.describe(url), str(error.orig)) from error
    finally:
        engine.dispose()


def _migrate(connection: sa.Connection) -> None:
    from alembic import command  # only here: a new database does without
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes.update(connection=connection, version_table=models.VERSION_TABLE)
    command.upgrade(config, "head")


def _stamp(connection: sa.Connection) -> None:
    """Makes Alembic's version table as Alembic does, and says that all migrations were run."""
    version = sa.Column("version_num", sa.String(32), nullable=False)
    key = sa.PrimaryKeyConstraint("version_num", name=f"{models.VERSION_TABLE}_pkc")
    table = sa.Table(models.VERSION_TABLE, sa.MetaData(), version, key)
    table.create(connection)
    connection.execute(table.insert().values(version_num=models.SCHEMA))


def _back_up(path: Path, schema: str) -> Path:
    """Copies the database beside itself, under a name that says its schema; never over an older copy."""
    names = (f"{path.name}.schema-{schema}{suffix}.backup" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    target = next(candidate for name in names if not (candidate := path.with_name(name)).exists())
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        with (
            contextlib.closing(connect.connect_sqlite(path, "rw")) as source,
            contextlib.closing(connect.connect_sqlite(draft, "rwc")) as copy,
        ):
            source.backup(copy)
        draft.replace(target)
    except (OSError, sqlite3.Error) as error:
        draft.unlink(missing_ok=True)
        raise DatabaseUnavailable(
            str(path), f"it needs an upgrade, and no copy could be made at {target}: {error}"
        ) from None
    return target
