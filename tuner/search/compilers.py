"""Compiles candidates in the background, so that the GPU finds the next one ready."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..lab.pool import Results

Task = TypeVar("Task")
Result = TypeVar("Result")


class Compilers(Generic[Task, Result]):
    """A few threads that take tasks in the order in which they came, and put the results as they are ready.

    Each task is a build of its own rather than a part of a batch, which would hold its quick members back for its
    slowest.

    Args:
        work: What is done with a task, in one of the threads.
        threads: Tasks that run at the same time.
        results: Is given each task with its result.
    """

    def __init__(self, work: Callable[[Task], Result], threads: int, results: Results) -> None:
        self._work, self._results = work, results
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # Daemons: whoever ends the search does not wait for a compiler that may take minutes. It ends with this
        # process.
        self._threads = [
            threading.Thread(target=self._serve, name=f"compiler-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        self._tasks.put(task)

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
                self._results.put(task, self._work(task))
            except BaseException as error:  # not swallowed: it is raised in the thread that waits
                self._results.put(task, error)
