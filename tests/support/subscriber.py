"""A subscriber of dispatch's choices that can be waited for."""

from __future__ import annotations

import threading

from bwdtune.gen.problem import Problem
from bwdtune.runtime import dispatch
from bwdtune.runtime.dispatch import Choice


class Told:
    """What subscribers are told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Problem | None, int | None, Choice | None]] = []
        self._changed = threading.Condition()
        dispatch.subscribe(self._tell)

    def wait_for(self, count: int = 1) -> list[Choice | None]:
        """The choices of so many calls, when they have come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, timeout=60), self.calls
            return [choice for _, _, choice in self.calls]

    def _tell(self, problem: Problem | None, device_index: int | None, choice: Choice | None) -> None:
        with self._changed:
            self.calls.append((problem, device_index, choice))
            self._changed.notify_all()
