"""A database server that restarts under a search."""

from __future__ import annotations

import pytest

from bwdtune.db.errors import DatabaseLocked, DatabaseUnavailable
from bwdtune.tuner.search.patience import PATIENCE_S, Patience


class Clock:
    """Time passes where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Restarting:
    """A server that refuses for so many seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def __call__(self) -> str:
        if self._clock.now < self._seconds:
            raise DatabaseUnavailable("postgresql://team", "connection refused")
        return "answer"


def patient(server: bool, clock: Clock, notices: list[str]) -> Patience:
    return Patience(server, notices.append, clock.sleep, lambda: clock.now)


def test_a_server_that_restarts_is_waited_for() -> None:
    clock, notices = Clock(), []
    assert patient(True, clock, notices)(Restarting(clock, 30)) == "answer"
    assert len(notices) == 1
    assert "connection refused" in notices[0]


def test_the_waiting_ends() -> None:
    clock, notices = Clock(), []
    with pytest.raises(DatabaseUnavailable):
        patient(True, clock, notices)(Restarting(clock, 1e9))
    assert PATIENCE_S <= clock.now <= PATIENCE_S + 2


def test_a_file_that_has_gone_does_not_come_back() -> None:
    clock, notices = Clock(), []
    with pytest.raises(DatabaseUnavailable):
        patient(False, clock, notices)(Restarting(clock, 1))
    assert (clock.now, notices) == (0.0, [])


def test_what_waiting_does_not_cure_is_raised() -> None:
    def locked() -> None:
        raise DatabaseLocked("file", "busy")

    with pytest.raises(DatabaseLocked):
        patient(True, Clock(), [])(locked)
