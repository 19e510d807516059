"""A lock for each GPU: one process at a time measures on it; a second one waits, and names the process it waits for."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

_POLL_S = 0.5


@contextmanager
def gpu_lock(uuid: str, notice: Callable[[str], None], directory: Path | None = None) -> Iterator[None]:
    """Holds a GPU for measurements, against other processes of this machine; waits while another one holds it.

    The lock is the operating system's: it ends with its holder, however that ends.

    Args:
        uuid: The GPU's, as `runtime.gpu.gpu_uuid` has it.
        notice: Is told once who holds the GPU.
        directory: Where locks lie; None for the machine's temporary files, which all users share.
    """
    path = (directory or Path(tempfile.gettempdir())) / f"bwdtune-{uuid}.lock"
    holder = path.with_suffix(".holder")
    lock = filelock.FileLock(path, mode=0o666)
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        notice(f"{uuid} is being measured on by {_holder(holder)}: waiting until that has ended")
        lock.acquire(poll_interval=_POLL_S)
    try:
        with suppress(OSError):  # another user's, which only they may write: it is for people
            holder.write_text(f"process {os.getpid()} of {_user()}")
        yield
    finally:
        with suppress(OSError):
            holder.unlink()
        lock.release()


def _holder(path: Path) -> str:
    try:
        return path.read_text().strip() or "another process"
    except OSError:
        return "another process"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # of an id without a name
        return f"user {os.getuid()}"
