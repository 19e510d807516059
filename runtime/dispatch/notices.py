"""What dispatch writes to the log: each message once, and a limited number of them."""

from __future__ import annotations

import logging
from collections.abc import Hashable

_MOST = 64
_log = logging.getLogger("bwdtune")
_said: set[Hashable] = set()


def warn_once(about: Hashable, message: str) -> None:
    """A warning of the logger ``bwdtune``, unless one about the same has been given.

    Args:
        about: What it is about, without sizes: a new length is no news.
        message: One line.
    """
    if about in _said or len(_said) > _MOST:
        return
    _said.add(about)
    if len(_said) > _MOST:
        message = f"{_MOST} different warnings were given: there will be no more (see bwdtune.stats())"
    _log.warning("%s", message)


def info(message: str) -> None:
    """A line that is only informative."""
    _log.info("%s", message)


def forget() -> None:
    """Has everything be news again."""
    _said.clear()
