"""A background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Worker:
    """Runs tasks one after another in a thread of its own, which is started with the first one.

    The thread is a daemon: a process that ends does not wait for a compile, and its compiler ends with it
    (`gen.build`). After a fork the child has no such thread, and makes a new `Worker`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], None]) -> None:
        """Has a task run; it must not raise. Callers hold a lock: two must not start the thread.

        Raises:
            RuntimeError: The system gives no thread, or the interpreter is ending.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._tasks.put(task)

    def is_current(self) -> bool:
        """Whether the caller is a task."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while True:
            self._tasks.get()()
