"""Errors for users: one line that says what is wrong and what to do."""

from __future__ import annotations


class BwdtuneError(Exception):
    """A failure that the user can read and act on. The command line ends with exit status 1."""

    exit_status = 1


class UsageError(BwdtuneError):
    """What was asked for is malformed or impossible. The command line ends with exit status 2."""

    exit_status = 2
