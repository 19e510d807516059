"""Where the wall time of a search goes: to its GPUs, to its compilers, or to the process that feeds both."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAITED = ("compile", "verify", "time")


class SearchClock:
    """Splits wall time by what is at work, which compilers and GPUs tell from their threads.

    While a GPU is at work, time counts as ``verify`` or ``time``; while none is and compilers are, as ``compile``. What
    this process does beside them costs nothing. Time is overhead where it has the others wait: a GPU is idle although a
    candidate is compiled, or neither GPUs nor compilers are at work.

    Args:
        gpus: How many there are; 0 where nothing is timed.
        now: Seconds; None for the system's.
    """

    def __init__(self, gpus: int, now: Callable[[], float] | None = None) -> None:
        self._now, self._gpus = now or time.perf_counter, gpus
        self._lock = threading.Lock()
        self._at_work: Counter[str] = Counter()
        self._ready = 0
        self._start = self._last = self._now()
        self._seconds = dict.fromkeys((*WAITED, "begin", "propose"), 0.0)

    @contextmanager
    def at_work(self, kind: str) -> Iterator[None]:
        """Around the work of a GPU, or a wait that is as good: ``verify`` or ``time``."""
        self._change(kind, 1)
        try:
            yield
        finally:
            self._change(kind, -1)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around the work of a compiler; then one more candidate is ready."""
        self._change("compile", 1)
        try:
            yield
        finally:
            self._change("compile", -1, ready=1)

    def is_ready(self) -> None:
        """One more candidate could run."""
        self._change("compile", 0, ready=1)

    def is_taken(self) -> None:
        """One candidate less waits: it runs, or is refused."""
        self._change("compile", 0, ready=-1)

    def none_is_ready(self) -> None:
        """Whatever waits is not going to run."""
        self._change("compile", 0, ready=-self._ready)

    def loses_gpu(self) -> None:
        """There is one less."""
        self._change("compile", 0, gpus=-1)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts what this process takes for a phase, whether anything waits for that or not."""
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] += self._now() - start

    def move(self, kind: str, other: str, seconds: float) -> None:
        """Counts a part of what was one kind of work, if there is so much of it, as another."""
        with self._lock:
            seconds = min(seconds, self._seconds[kind])
            self._seconds[kind] -= seconds
            self._seconds[other] += seconds

    def elapsed_s(self) -> float:
        """Since the search has begun."""
        return self._now() - self._start

    def seconds(self) -> dict[str, float]:
        """By kind, with ``overhead`` and ``total``; and what this process took for ``begin`` and ``propose``."""
        self._change("compile", 0)
        with self._lock:
            total = self._last - self._start
            return {**self._seconds, "overhead": total - sum(self._seconds[kind] for kind in WAITED), "total": total}

    def _change(self, kind: str, by: int, *, ready: int = 0, gpus: int = 0) -> None:
        with self._lock:
            now = self._now()
            if (was := self._what_is_at_work()) is not None:
                self._seconds[was] += now - self._last
            self._last = now
            self._at_work[kind] += by
            self._ready = max(0, self._ready + ready)
            self._gpus += gpus

    def _what_is_at_work(self) -> str | None:
        busy = self._at_work["verify"] + self._at_work["time"]
        if self._ready and busy < self._gpus:
            return None
        if busy:
            return "time" if self._at_work["time"] else "verify"
        return "compile" if self._at_work["compile"] else None
