"""Distributes work over benches: one process proposes and learns, each bench does one piece of work at a time.

A search knows its GPUs only through this pool. One GPU is a pool of one bench; several GPUs of a host or a cluster are
more of them. If a bench is lost, another one repeats its piece of work.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .protocol import Bench, CandidateError, Fault, WorkerError

_LOST_AT_MOST = 2  # benches under one piece of work: it is then taken for what they are lost by


@dataclass(eq=False)
class Work:
    """Something to be done on a bench.

    Attributes:
        do: What. It runs in a thread of the bench.
        subject: What it is about, for the one who asked.
        avoid: The bench that should not do it, where there is another: see `Pool.takes`.
        label: What it is about, for people.
        bench: The name of the one that did it, or is at it.
    """

    do: Callable[[Bench], Any]
    subject: Any = None
    avoid: str | None = None
    label: str = ""
    bench: str = ""
    lost: int = field(default=0, init=False)


@dataclass(frozen=True)
class Lost:
    """A bench that can do nothing any more, while others go on.

    Attributes:
        bench: Its name.
        reason: Why, in one line.
        left: How many go on.
    """

    bench: str
    reason: str
    left: int

    def __str__(self) -> str:
        return f"{self.bench} is lost: {self.reason}; {self.left} left, and what it was doing is done again"


class Results:
    """What threads have done, in the order in which it is done. They put it, one waits for it."""

    def __init__(self) -> None:
        self._done: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()

    def put(self, task: Any, result: Any) -> None:
        """Takes a task that is done. A result that is an exception is raised by `next`."""
        self._done.put((task, result))

    def next(self, timeout_s: float | None = None) -> tuple[Any, Any]:
        """The next task that is done, with its result; twice None where none is within the time. None waits for ever.

        Raises:
            BaseException: What the task raised.
        """
        try:
            task, result = self._done.get(timeout=timeout_s)
        except queue.Empty:
            return None, None
        if isinstance(result, BaseException):
            raise result
        return task, result


class Pool:
    """Benches, a thread each.

    Args:
        benches: By a name for people; one at least. They are not closed here.
        results: Is given each `Work` with what it returned, or with the `CandidateError` that it raised, in an
            `Answered`, to be taken note of and released; and a `Lost` for each bench that goes. When the last one goes,
            its error.
    """

    def __init__(self, benches: Mapping[str, Bench], results: Results) -> None:
        self._results = results
        self._lock = threading.Lock()
        self._closed = False
        self._open = 0  # pieces of work that were not released yet
        self._waiting: deque[Work] = deque()
        self._idle = list(benches)
        self._doing: dict[str, Work] = {}
        self._inboxes: dict[str, queue.SimpleQueue[Work | None]] = {name: queue.SimpleQueue() for name in benches}
        # Daemons: whoever ends a search does not wait for a GPU that may hang. Closing the benches ends their work.
        for name, bench in benches.items():
            threading.Thread(target=self._serve, args=(name, bench), name=f"bench {name}", daemon=True).start()

    @property
    def size(self) -> int:
        """Benches that are left."""
        with self._lock:
            return len(self._inboxes)

    @property
    def doing(self) -> dict[str, str | None]:
        """What each bench is at, for people; None of one that has nothing to do."""
        with self._lock:
            return {name: self._doing[name].label if name in self._doing else None for name in self._inboxes}

    def takes(self, avoid: str | None = None) -> bool:
        """Whether a bench has nothing to do: another than the one to avoid, where there is another."""
        with self._lock:
            return any(name != avoid or len(self._inboxes) == 1 for name in self._idle)

    @property
    def busy(self) -> bool:
        """Whether any work is not done and released yet."""
        with self._lock:
            return self._open > 0

    def submit(self, work: Work) -> None:
        """Has a bench do it: one that is idle, or the next one that will be."""
        with self._lock:
            self._open += 1
            self._give(work)

    def release(self, work: Work) -> None:
        """Lets the bench of work that is done do something else: what it found is known now."""
        with self._lock:
            self._open -= 1
            self._doing.pop(work.bench, None)
            if work.bench not in self._inboxes:
                return
            self._idle.append(work.bench)
            if self._waiting:
                self._give(self._waiting.popleft())

    def close(self) -> None:
        """Begins nothing more. What is being done ends by itself, or when its bench is closed; nobody is told."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            for inbox in self._inboxes.values():
                inbox.put(None)

    def _give(self, work: Work) -> None:
        if not self._idle:
            self._waiting.append(work)
            return
        name = next((name for name in self._idle if name != work.avoid), self._idle[0])
        self._idle.remove(name)
        work.bench = name
        self._doing[name] = work
        self._inboxes[name].put(work)

    def _serve(self, name: str, bench: Bench) -> None:
        while (work := self._inboxes[name].get()) is not None:
            try:
                result: Any = Answered(work.do(bench))
            except CandidateError as error:
                result = Answered(error)
            except WorkerError as error:
                self._lose(name, work, error)
                return
            except BaseException as error:  # not swallowed: it is raised in the thread that waits
                result = error
            if self._closed:
                return
            self._results.put(work, result)

    def _lose(self, name: str, work: Work, error: WorkerError) -> None:
        with self._lock:
            if self._closed:
                return
            del self._inboxes[name]
            self._doing.pop(name, None)
            left = len(self._inboxes)
            work.lost += 1
            poisonous = left and work.lost >= _LOST_AT_MOST
            if left and not poisonous:
                self._give(work)
        if not left:
            self._results.put(work, error)
            return
        self._results.put(Lost(name, str(error), left), None)
        if poisonous:
            reason = f"{work.lost} GPUs were lost while they ran it: {error}"
            self._results.put(work, Answered(CandidateError(reason, fault=Fault("lost"))))


@dataclass(frozen=True)
class Answered:
    """What came of a `Work`: a value, or the fault of a candidate, which is no reason to stop."""

    value: Any

    def get(self) -> Any:
        """The value.

        Raises:
            CandidateError: The candidate's fault.
        """
        if isinstance(self.value, CandidateError):
            raise self.value
        return self.value
