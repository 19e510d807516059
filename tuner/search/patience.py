"""Repeats calls to a database server for a while, since it may restart during a search."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ...db.errors import DatabaseUnavailable

PATIENCE_S = 60.0
_PAUSE_S = 1.0
_T = TypeVar("_T")


class Patience:
    """Repeats what a server that cannot be reached has refused, for a minute.

    Args:
        server: Whether the database is a server: a file that has gone does not come back.
        notice: Is told once, when the waiting begins.
        sleep: Waits so many seconds.
        clock: Seconds.
    """

    def __init__(
        self,
        server: bool,
        notice: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._notice, self._sleep, self._clock = server, notice, sleep, clock

    def __call__(self, work: Callable[[], _T]) -> _T:
        """Does the work, which may be repeated.

        Raises:
            DatabaseError: The database cannot be used, or not again within a minute.
        """
        deadline: float | None = None
        while True:
            try:
                return work()
            except DatabaseUnavailable as error:
                if not self._server:
                    raise
                if deadline is None:
                    deadline = self._clock() + PATIENCE_S
                    self._notice(f"{error}: trying again for {PATIENCE_S:g} s")
                if self._clock() >= deadline:
                    raise
                self._sleep(_PAUSE_S)
