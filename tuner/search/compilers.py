"""Compiles candidates in the background, so that the GPU finds the next one ready."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


class Compilers(Generic[Job, Result]):
    """A few threads that take jobs in the order in which they came, and hand the results out as they are ready.

    Each job is a build of its own rather than a part of a batch, which would hold its quick members back for its
    slowest.

    Args:
        work: What is done with a job, in one of the threads.
        threads: Jobs that run at the same time.
    """

    def __init__(self, work: Callable[[Job], Result], threads: int) -> None:
        self._work = work
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Job, Result | BaseException]] = queue.SimpleQueue()
        # Daemons: whoever ends the search does not wait for a compiler that may take minutes. It ends with this
        # process.
        self._threads = [
            threading.Thread(target=self._serve, name=f"compiler-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def next(self, timeout_s: float | None = None) -> tuple[Job, Result] | None:
        """The next job that is done, with its result; None where none is within the time. None waits for ever.

        Raises:
            BaseException: What the job raised.
        """
        try:
            job, result = self._results.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(result, BaseException):
            raise result
        return job, result

    def forget_waiting(self) -> None:
        """Takes back the jobs that were not begun."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()

    def close(self) -> None:
        """Begins no further job."""
        self.forget_waiting()
        for _ in self._threads:
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._results.put((job, self._work(job)))
            except BaseException as error:  # not swallowed: `next` raises it in the thread that waits
                self._results.put((job, error))
