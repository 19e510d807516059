"""Ctrl-C, SIGTERM and a closed terminal never tear a half-written result: they strike only where a search waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ANNOUNCEMENT = b"\nstopping, and keeping what was found; Ctrl-C again ends it at once\n"
_STANDARD_ERROR = 2


class Interrupts:
    """Holds SIGINT, SIGTERM and SIGHUP back until the code waits in `striking`, where they raise KeyboardInterrupt.

    The first SIGINT or SIGTERM is answered on standard error at once. A second one strikes anywhere: whoever asks twice
    does not want to wait. SIGHUP stays ignored where it is, as under nohup. Outside the main thread, where Python
    delivers no signals, nothing is installed and nothing strikes.
    """

    def __init__(self) -> None:
        self.requested = False
        self._waiting = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
            self._previous = {number: signal.signal(number, self._handle) for number in (*_SIGNALS, *hangup)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def striking(self) -> Iterator[None]:
        """Around whatever may be given up half-way: waiting for a compiler, or for the process that owns the GPU.

        Raises:
            KeyboardInterrupt: A signal came, now or before.
        """
        self._waiting = True
        try:
            if self.requested:
                raise KeyboardInterrupt
            yield
        finally:
            self._waiting = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested and number != signal.SIGHUP:
            with suppress(OSError):  # not through Python's buffers, in the middle of whose work this may come
                os.write(_STANDARD_ERROR, _ANNOUNCEMENT)
        # A terminal that closes may tell both itself and through its shell: that is no impatience.
        if self._waiting or (self.requested and number != signal.SIGHUP):
            self.requested = True
            raise KeyboardInterrupt
        self.requested = True
