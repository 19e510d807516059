"""What can be wrong with a database, one class a cause. Each is one line: the database, what is wrong, what to do."""

from __future__ import annotations

from typing import ClassVar

from ..gen.errors import BwdtuneError


class DatabaseError(BwdtuneError):
    """A database cannot be used. Catch this one to go on without a database.

    Args:
        database: The file's path, or the URL without its password.
        detail: What was found, for the brackets of the message.
    """

    text: ClassVar[str] = "cannot use the database {database}: {detail}"

    def __init__(self, database: str, detail: str) -> None:
        super().__init__(database, " ".join(detail.split()))  # the arguments, so that it can be pickled

    def __str__(self) -> str:
        database, detail = self.args
        return self.text.format(database=database, detail=detail)


class BadDatabaseName(DatabaseError):
    """What was given names no database that this program can keep results in."""

    exit_status = 2
    text = "cannot keep results in {database!r}: {detail}"


class NoDatabase(DatabaseError):
    """Opened for reading only, and there is none yet."""

    text = "there is no database at {database} ({detail}): `tuner search` makes one"


class DatabaseUnavailable(DatabaseError):
    """The system or the server refuses: permissions, a full disk, a missing driver, no connection."""


class NotADatabase(DatabaseError):
    """The path is a directory, a text file, or anything else but an SQLite file."""

    text = "{database} is not a database ({detail}) and was left as it is: name another file with --db or BWDTUNE_DB"


class CorruptDatabase(DatabaseError):
    """An SQLite file with damaged pages or missing tables."""

    text = "{database} is damaged ({detail}) and was left as it is: restore a copy of it, or move it away to start anew"


class ForeignDatabase(DatabaseError):
    """A database of another program."""

    text = (
        "{database} belongs to another program ({detail}) and was left as it is: "
        "name another file with --db or BWDTUNE_DB"
    )


class OlderDatabase(DatabaseError):
    """Written by an older version, and opened in a way that may not upgrade it."""

    text = "{database} has an older schema ({detail}): `tuner search` upgrades it, and keeps a copy"


class NewerDatabase(DatabaseError):
    """Written by a newer version of this program."""

    text = (
        "{database} was written by a newer bwdtune ({detail}) and was left as it is: "
        "upgrade bwdtune, or name another file with --db or BWDTUNE_DB"
    )


class DatabaseLocked(DatabaseError):
    """Another process held its lock for longer than every retry together."""

    text = "{database} is locked by another process ({detail}): try again when that has ended"


class ReadOnlyDatabase(DatabaseError):
    """A write to a database that may only be read."""

    text = "{database} cannot be written ({detail}): make it writable, or name another file with --db or BWDTUNE_DB"


class InvalidRecord(BwdtuneError):
    """A result that must not be stored: an impossible time, or figures that contradict each other."""


class NotAWinner(BwdtuneError):
    """A measurement that must not win: not verified, not measured, or of another problem, card or limit."""
