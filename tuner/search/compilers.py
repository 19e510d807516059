"""Compiles candidates in the background, so that the GPU finds the next one ready."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class Compilers(Generic[Task, Result]):
    """A few threads that take tasks in the order in which they came, and hand the results out as they are ready.

    Each task is a build of its own rather than a part of a batch, which would hold its quick members back for its
    slowest.

    Args:
        work: What is done with a task, in one of the threads.
        threads: Tasks that run at the same time.
    """

    def __init__(self, work: Callable[[Task], Result], threads: int) -> None:
        self._work = work
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Task, Result | BaseException]] = queue.SimpleQueue()
        # Daemons: whoever ends the search does not wait for a compiler that may take minutes. It ends with this
        # process.
        self._threads = [
            threading.Thread(target=self._serve, name=f"compiler-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        self._tasks.put(task)

    def next(self, timeout_s: float | None = None) -> tuple[Task, Result] | None:
        """The next task that is done, with its result; None where none is within the time. None waits for ever.

        Raises:
            BaseException: What the task raised.
        """
        try:
            task, result = self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(result, BaseException):
            raise result
        return task, result

    def forget_waiting(self) -> None:
        """Takes back the tasks that were not begun."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()

    def close(self) -> None:
        """Begins no further task."""
        self.forget_waiting()
        for _ in self._threads:
            self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._results.put((task, self._work(task)))
            except BaseException as error:  # not swallowed: `next` raises it in the thread that waits
                self._results.put((task, error))
