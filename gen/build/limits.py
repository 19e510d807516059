"""How many compiles run at once on this machine: by the cores and the memory that this process may use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import UsageError

JOBS_VARIABLE = "MAX_JOBS"
JOB_MEMORY_BYTES = 2 << 30  # nvcc at its largest on a kernel of this project, with room to spare


def job_limit(environ: Mapping[str, str], *, root: Path = Path("/")) -> int:
    """The number of compiles to run at once: ``MAX_JOBS`` where it is set, else what cores and free memory allow.

    Args:
        environ: The environment variables.
        root: Where ``proc`` and ``sys`` are found.

    Raises:
        UsageError: ``MAX_JOBS`` is not a positive number.
    """
    value = environ.get(JOBS_VARIABLE, "").strip()
    if value:
        if not re.fullmatch(r"0*[1-9][0-9]{0,8}", value):
            raise UsageError(
                f"{JOBS_VARIABLE} is {value!r}: set it to the number of compiles at once (1 or more), or unset it"
            )
        return int(value)
    return max(1, min(_cores(root), _free_memory_bytes(root) // JOB_MEMORY_BYTES))


def _cores(root: Path) -> int:
    """Cores that this process may run on, and that its control group grants time on."""
    cores = len(os.sched_getaffinity(0))
    for group in _control_groups(root, "cpu"):
        quota, period = _words(group / "cpu.max"), []
        if not quota:  # version 1
            quota, period = _words(group / "cpu.cfs_quota_us"), _words(group / "cpu.cfs_period_us")
        numbers = [int(word) for word in [*quota, *period] if word.isdecimal()]  # "max" and "-1" are no limit
        if len(numbers) == 2 and numbers[1]:
            cores = min(cores, max(1, numbers[0] // numbers[1]))
    return cores


def _free_memory_bytes(root: Path) -> int:
    """Memory that can be had without swapping: the machine's, or less where a control group allows less."""
    free = _field(root / "proc/meminfo", "MemAvailable:") * 1024
    for group in _control_groups(root, "memory"):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        if limit and used and limit[0].isdecimal():
            # The files that it read count as used, but give way.
            statistics = group / "memory.stat"
            cached = _field(statistics, "total_inactive_file") or _field(statistics, "inactive_file")
            free = min(free, int(limit[0]) - int(used[0]) + cached)
    return max(0, free)


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """The control group of this process and those around it, each of which may set a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = Path(path.lstrip("/"))
        # In a container the path may be the host's, which is not to be seen: the mount itself is then the group.
        yield from (mount / part for part in (group, *group.parents))


def _field(path: Path, name: str) -> int:
    """A number in a file of lines "name number"; 0 where it is not there."""
    rows = (line.split() for line in _text(path).splitlines())
    return next((int(row[1]) for row in rows if len(row) > 1 and row[0] == name), 0)


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
