"""Counts of what ran through the functions in Python, for `statistics.stats`. The C++ operator has its own counts."""

from __future__ import annotations

import threading
from collections import Counter

_MOST_NAMES = 256
_OTHERS = "others"
_lock = threading.Lock()
_launches: Counter[str] = Counter()
_fallbacks: Counter[str] = Counter()


def launched(kernel: str) -> None:
    """Counts a launch.

    Args:
        kernel: Its library's name.
    """
    _count(_launches, kernel)


def fell_back(cause: str) -> None:
    """Counts a backward that is PyTorch's.

    Args:
        cause: Why, without sizes: `Cause` has some.
    """
    _count(_fallbacks, cause)


def counted() -> tuple[Counter[str], Counter[str]]:
    """Launches by kernel, and fallbacks by cause, since the process began."""
    with _lock:
        return _launches.copy(), _fallbacks.copy()


def _count(counts: Counter[str], name: str) -> None:
    with _lock:
        counts[name if name in counts or len(counts) < _MOST_NAMES else _OTHERS] += 1
