"""Opening: from a name to an engine, and from the library's errors to ours.

SQLite files are opened through `sqlite3` itself by a URI that is built here, never by pasting a path into a database
URL. The file is never opened any other way: closing a second descriptor of a file drops the locks that this process
holds on it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import sqlalchemy as sa

from .errors import (
    BadDatabaseName,
    CorruptDatabase,
    DatabaseError,
    DatabaseLocked,
    DatabaseUnavailable,
    NotADatabase,
    ReadOnlyDatabase,
)

BUSY_TIMEOUT_S = 30.0
"""How long SQLite waits for another process's lock; its own default of 5 s ends searches."""

Mode = Literal["ro", "rw", "rwc"]
"""SQLite's: read, read and write, read and write and create."""

_log = logging.getLogger(__name__)
_NETWORK_FILE_SYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "beegfs", "ceph", "glusterfs", "gpfs", "lustre")
)
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs"})

# SQLite's own texts, which have not changed in many years; error codes reach Python in 3.11 only.
_CAUSES: tuple[tuple[str, type[DatabaseError]], ...] = (
    ("is locked", DatabaseLocked),
    ("locking protocol", DatabaseLocked),
    ("not a database", NotADatabase),
    ("unsupported file format", NotADatabase),
    ("malformed", CorruptDatabase),
    ("Could not decode", CorruptDatabase),
    ("no such table", CorruptDatabase),
    ("no such column", CorruptDatabase),
    ("has no column", CorruptDatabase),
    ("readonly database", ReadOnlyDatabase),
)


def database_url(database: str | Path) -> sa.URL:
    """The URL of a database that was named as a path or as an SQLAlchemy URL.

    A path is taken as it is, but for a leading ``~``.

    Raises:
        BadDatabaseName: Neither of them, or a database in memory.
    """
    path = os.fspath(database)
    if isinstance(database, str) and re.match(r"[A-Za-z][A-Za-z0-9+_]*://", database):
        try:
            url = sa.make_url(database)
        except (sa.exc.ArgumentError, ValueError) as error:
            raise BadDatabaseName(database, str(error)) from None
        if url.get_backend_name() != "sqlite":
            return url
        if url.drivername not in ("sqlite", "sqlite+pysqlite") or url.query or url.host:
            raise BadDatabaseName(describe(url), "of an SQLite URL only sqlite:///PATH is taken")
        path = url.database or ""
    if path in ("", ":memory:"):
        raise BadDatabaseName(path, "it would be lost when the program ends: name a file")
    if "\0" in path:
        raise BadDatabaseName(path, "a path has no null characters")
    # Absolute, so that a later change of directory, or a child process, means the same file. Not normalised: behind a
    # symbolic link `..` is not what it seems.
    return sa.URL.create("sqlite", database=os.path.join(os.getcwd(), os.path.expanduser(path)))


def describe(url: sa.URL) -> str:
    """The database's name for people: a path, or a URL without its password."""
    path = sqlite_path(url)
    return url.render_as_string(hide_password=True) if path is None else str(path)


def sqlite_path(url: sa.URL) -> Path | None:
    """The file of an SQLite URL, or None for a server."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def connect_sqlite(
    path: Path, mode: Mode, foreign_keys: bool = True, isolation_level: Literal["IMMEDIATE"] | None = None
) -> sqlite3.Connection:
    """Opens a file.

    Args:
        path: Absolute.
        mode: What may be done to it. ``ro`` also reads a file and a directory that cannot be written.
        foreign_keys: Whether SQLite enforces them (only a migration turns that off).
        isolation_level: As in `sqlite3.connect`; None leaves transactions to the caller.
    """
    connection = _read_only(path) if mode == "ro" else _connect(path, f"mode={mode}", isolation_level)
    try:
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        connection.execute("PRAGMA trusted_schema = OFF")  # views and triggers of somebody else's file call nothing
        if mode != "ro" and connection.execute("PRAGMA journal_mode").fetchone() == ("wal",):
            # In WAL mode this is safe against crashes of the program, and saves an fsync for each of Optuna's commits.
            connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _read_only(path: Path) -> sqlite3.Connection:
    connection = _connect(path, "mode=ro")
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        connection.close()
        if _cause(error) is DatabaseLocked:
            raise
        logs = (path.with_name(path.name + suffix) for suffix in ("-wal", "-journal"))
        if any(log.exists() and log.stat().st_size for log in logs):
            # A crash left it, the file is not whole without it, and only who may write can put them together.
            connection = _connect(path, "mode=rw")
            connection.execute("PRAGMA query_only = ON")
        else:
            # A file in WAL mode wants a -shm file even for reading; where none can be made, nobody is writing either.
            connection = _connect(path, "mode=ro&immutable=1")
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path, parameters: str, isolation_level: Literal["IMMEDIATE"] | None = None) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file://{quote(os.fsencode(path))}?{parameters}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=isolation_level,
        check_same_thread=False,  # the pool gives a connection to one thread at a time
    )


def sqlite_options(path: Path, mode: Mode, *rest: Any) -> dict[str, Any]:
    """What `sqlalchemy.create_engine` needs for a file, beside a URL that names the dialect.

    Args:
        path: As all that follow, for `connect_sqlite`.
    """
    return {
        "creator": functools.partial(connect_sqlite, path, mode, *rest),
        "poolclass": sa.QueuePool,
        "max_overflow": -1,  # as many as there are threads
    }


def make_engine(url: sa.URL, mode: Mode = "rw", *, foreign_keys: bool = True) -> sa.Engine:
    """An engine that opens nothing yet. `mode` and `foreign_keys` concern SQLite only.

    On SQLite, a connection with the execution option ``sqlite_begin="BEGIN IMMEDIATE"`` takes the write lock first,
    when waiting for it is still possible: a transaction that has read and then wants to write fails at once where
    another one came between.

    Raises:
        BadDatabaseName: No such dialect, or an asynchronous driver.
        DatabaseUnavailable: Its driver is not installed.
    """
    path = sqlite_path(url)
    try:
        options = {"pool_pre_ping": True} if path is None else sqlite_options(path, mode, foreign_keys)
        engine = sa.create_engine(url, **options)
    except sa.exc.NoSuchModuleError as error:
        raise BadDatabaseName(describe(url), str(error)) from None
    except ImportError as error:
        raise DatabaseUnavailable(describe(url), f"{error}: install its driver") from None
    if engine.dialect.is_async:
        raise BadDatabaseName(describe(url), f"the driver {engine.dialect.driver} is asynchronous: use another")
    if path is not None:

        @sa.event.listens_for(engine, "begin")
        def begin(connection: sa.Connection) -> None:
            connection.exec_driver_sql(connection.get_execution_options().get("sqlite_begin", "BEGIN"))

    return engine


@contextmanager
def errors_of(url: sa.URL) -> Iterator[None]:
    """Turns what SQLAlchemy and `sqlite3` raise into a `DatabaseError` of one line.

    `sqlalchemy.exc.IntegrityError` and `DataError` pass: they are about what was to be written, not about the database.
    """
    try:
        yield
    except (sa.exc.IntegrityError, sa.exc.DataError):
        raise
    except (sa.exc.DBAPIError, sa.exc.TimeoutError, sqlite3.Error) as error:
        cause = error.orig if isinstance(error, sa.exc.DBAPIError) and error.orig else error
        kind = _cause(cause) if isinstance(cause, sqlite3.Error) else DatabaseUnavailable
        raise kind(describe(url), str(cause)) from error
    except UnicodeDecodeError as error:  # of names in a damaged schema
        raise CorruptDatabase(describe(url), str(error)) from error


def _cause(error: BaseException) -> type[DatabaseError]:
    text = str(error)
    return next((kind for part, kind in _CAUSES if part in text), DatabaseUnavailable)


def choose_journal(path: Path) -> None:
    """Lets readers go on while one writes (WAL), where the file system can do that; else keeps a rollback journal.

    The mode is a property of the file, which keeps it; and nothing worth failing for.
    """
    network = network_file_system(path)
    if network:
        _log.warning(
            "%s lies on a network file system (%s), where SQLite's locks may not work: "
            "keep to one process at a time, or use a database server",
            path,
            network,
        )
    try:
        connection = connect_sqlite(path, "rwc")
        try:
            connection.execute("PRAGMA busy_timeout = 1000")  # somebody works on it in the other mode: another day
            connection.execute(f"PRAGMA journal_mode = {'DELETE' if network else 'WAL'}")
        finally:
            connection.close()
    except sqlite3.OperationalError as error:
        _log.info("%s keeps its journal mode: %s", path, error)


def fold_log(path: Path) -> None:
    """Writes what a file's log holds (``-wal``) into the file, and empties the log.

    SQLite does so when the last connection closes; of two that close at once each may take the other for the last one.
    Nothing worth failing or waiting for: who comes next reads the log.
    """
    try:
        with contextlib.closing(connect_sqlite(path, "rw")) as connection:
            connection.execute("PRAGMA busy_timeout = 200")  # somebody writes, and folds it at the end
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        _log.info("%s keeps its log: %s", path, error)


def network_file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """The type of the network file system that a path lies on; None for a local one, or where nothing tells."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    directory = Path(os.path.realpath(path)).parent
    best, kind = "", ""
    for line in lines:
        fields = line.split()
        where = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])  # as mounts(5) writes blanks
        if len(where) >= len(best) and directory.is_relative_to(where):
            best, kind = where, fields[2]
    network = kind in _NETWORK_FILE_SYSTEMS or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)
    return kind if network else None
