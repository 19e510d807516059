"""Verdicts on libraries: what was verified on this kind of GPU is remembered beside the library, in the cache.

There, and not in the database: a verdict is about one library, ends with it, and needs neither SQLAlchemy nor a
database that can be written. Where the cache cannot be written, it is remembered for the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock

from ...gen.device import HOST_ARCH, Device
from ...gen.errors import BwdtuneError
from ...gen.problem import Problem
from .. import gpu

_TIMEOUT_S = 180  # of a process that loads PyTorch and compares a few small problems
_remembered: dict[Path, Verdict] = {}


class UnverifiedError(BwdtuneError):
    """A library could not be verified, which says nothing of it."""


@dataclass(frozen=True)
class Verdict:
    """What the small problems said of a library.

    Attributes:
        passed: Whether all of its gradients were near enough to the fp64 reference.
        reason: One line that says why it did not pass.
    """

    passed: bool
    reason: str = ""


def known(library: Path, device: Device) -> Verdict | None:
    """The verdict on a library on this kind of GPU and driver, if there is one.

    Args:
        library: In its entry of the cache.
        device: The GPU.
    """
    path = _place(library, device)
    if path in _remembered:
        return _remembered[path]
    try:
        return Verdict(**json.loads(path.read_text(encoding="utf-8"))["verdict"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify(library: Path, problem: Problem, device: Device, index: int) -> Verdict:
    """Verifies a library on a GPU, on small problems of the kind, unless that has been done.

    It takes seconds, and happens in a process of its own: a kernel that is wrong may leave the CUDA context of its
    process unusable. Several processes that ask at once verify it once.

    Args:
        library: In its entry of the cache.
        problem: Its kind of problem; the sizes do not matter.
        device: The GPU.
        index: CUDA's ordinal of it.

    Raises:
        UnverifiedError: The GPU has no memory to spare, or whatever else is no fault of the library.
    """
    path = _place(library, device)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, filelock.Timeout):  # a cache that cannot be written: each for itself
            stack.enter_context(filelock.FileLock(path.with_suffix(".lock"), timeout=2 * _TIMEOUT_S))
        verdict = known(library, device)
        if verdict is None:
            verdict = _in_a_process(library, problem, "cpu" if device.arch == HOST_ARCH else str(index))
            _remember(path, verdict, device)
    return verdict


def _place(library: Path, device: Device) -> Path:
    """A file in the library's entry: of this library, this model of GPU and this driver."""
    stamp = library.stat()
    about = "\0".join((device.name, device.arch, gpu.driver_version(), str(stamp.st_size), str(stamp.st_mtime_ns)))
    return library.with_name(f"verdict-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json")


def _in_a_process(library: Path, problem: Problem, device: str) -> Verdict:
    command = [sys.executable, "-m", f"{__package__}", str(library), json.dumps(asdict(problem)), device]
    try:
        answer = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UnverifiedError(f"verifying {library.name} took more than {_TIMEOUT_S} s") from None
    except OSError as error:
        raise UnverifiedError(f"no process to verify {library.name} in: {error}") from None
    lines = answer.stdout.splitlines()
    try:
        said = json.loads(lines[-1])
        return Verdict(said["passed"], said["reason"])
    except (IndexError, ValueError, KeyError, TypeError):
        pass
    if answer.returncode < 0:
        return Verdict(False, f"it ended its process by signal {-answer.returncode}")
    why = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise UnverifiedError(f"{library.name} could not be verified: {why}")


def _remember(path: Path, verdict: Verdict, device: Device) -> None:
    _remembered[path] = verdict
    content = {"gpu": device.name, "driver": gpu.driver_version(), "verdict": asdict(verdict)}
    with contextlib.suppress(OSError):
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.chmod(draft, 0o644)
        os.replace(draft, path)
