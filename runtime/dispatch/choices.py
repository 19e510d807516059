"""`choose`: what is known is looked up, what is not is found out in the background."""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable

from ...gen.errors import BwdtuneError, UsageError
from ...gen.problem import Problem
from .. import gpu
from ..kernel import Kernel
from . import notices
from .builds import Build
from .records import Cause, Choice, Row
from .rows import Rows, read_rows
from .selection import select
from .worker import Worker

ON_MISS_VARIABLE = "BWDTUNE_ON_MISS"
_WAIT = "wait"
_ON_MISS = ("pytorch", _WAIT)
_MOST_CHOICES = 4096  # problems that are remembered; more are decided again

Subscriber = Callable[[Problem | None, int | None, Choice | None], None]


def choose(problem: Problem, device_index: int, *, capturing: bool = False) -> Choice:
    """The kernel that computes a problem here, or why PyTorch's backward does.

    Rows are taken in the order of `selection.select`; a row whose kernel cannot be had (it no longer renders to what
    was verified, it does not compile, it refuses the sizes) gives way to the next one.

    It costs a dictionary's lookup for a problem that was seen, and well below a millisecond for a new one. What takes
    longer, reading the database, rendering, compiling and loading, is done in the background; until then the choice is
    PyTorch's and not final. With ``BWDTUNE_ON_MISS=wait`` the call waits for it. Safe between threads, and after a
    fork. Trouble of any kind is a reason, never an exception.

    Args:
        problem: What is to be computed.
        device_index: CUDA's ordinal of the GPU.
        capturing: Whether the current stream is being captured into a CUDA graph: only what is ready is used then,
            whatever the variable says.
    """
    return _dispatcher.choose(problem, device_index, capturing)


def prepare(*, wait: bool = True) -> None:
    """Reads the database, so that no step has to be computed without it.

    Args:
        wait: Whether to return when it is read; else it is read in the background.

    Raises:
        UsageError: ``BWDTUNE_ON_MISS`` has a value that means nothing.
    """
    _on_miss()
    _dispatcher.prepare(wait)


def subscribe(callback: Subscriber) -> None:
    """Has a function told of choices that have become final, for the life of the process.

    Args:
        callback: Called in the background thread with the problem, the device's index and the choice; with three times
            None when all choices are forgotten. It must not raise.
    """
    _dispatcher.subscribe(callback)


def discard(kernel: Kernel, reason: str) -> None:
    """Has a kernel not chosen any more in this process: its launch failed.

    Args:
        kernel: Of a choice.
        reason: One line.
    """
    _dispatcher.discard(kernel, reason)


def forget() -> None:
    """Has the database read again: winners that were stored meanwhile count from now on."""
    _dispatcher.forget()


class Dispatcher:
    """What one process knows: rows, kernels, and the choices made of them."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []
        self._kernels: dict[Build, Kernel | str | None] = {}  # a str: why there is none; None: it is being built
        self._rows: Rows | None = None
        self._reading = False
        self._generation = 0
        self._choices: dict[tuple[Problem, int], Choice] = {}
        self.after_fork()

    def after_fork(self) -> None:
        """In the child there is no thread that would go on with what was begun."""
        self._changed = threading.Condition(threading.RLock())
        self._worker = Worker()
        self._reading = False
        self._kernels = {build: kernel for build, kernel in self._kernels.items() if kernel is not None}
        self._choices = {key: choice for key, choice in self._choices.items() if choice.final}

    def choose(self, problem: Problem, device_index: int, capturing: bool) -> Choice:
        key = (problem, device_index)
        found = self._choices.get(key)
        if found is None:
            with self._changed:
                found = self._choices.get(key) or self._decide(key)
        if found.final or capturing or self._worker.is_current() or not _waits():
            return found
        with self._changed:
            while not found.final:
                self._changed.wait()
                found = self._choices.get(key) or self._decide(key)
        return found

    def prepare(self, wait: bool) -> None:
        with self._changed:
            if self._rows is None:
                self._read_in_background()
            while wait and self._reading and not self._worker.is_current():
                self._changed.wait()

    def subscribe(self, callback: Subscriber) -> None:
        with self._changed:
            self._subscribers.append(callback)

    def discard(self, kernel: Kernel, reason: str) -> None:
        with self._changed:
            for build, known in self._kernels.items():
                if known is kernel:
                    self._kernels[build] = reason
            stale = [key for key, choice in self._choices.items() if choice.kernel is kernel]
            changed = [(key, self._decide(key)) for key in stale]
        self._tell(changed)

    def forget(self) -> None:
        with self._changed:
            self._generation += 1
            self._choices.clear()
            self._kernels.clear()
            self._rows, self._reading = None, False
            notices.forget()
            self._changed.notify_all()
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            subscriber(None, None, None)

    def _decide(self, key: tuple[Problem, int]) -> Choice:
        """Decides and remembers; what is missing is begun. Under the lock."""
        try:
            choice = self._decided(*key)
        except RuntimeError as error:  # no thread to be had
            choice = Choice(None, f"nothing can be built: {error}", cause=Cause.UNUSABLE)
        if len(self._choices) >= _MOST_CHOICES:
            self._choices.clear()
        self._choices[key] = choice
        if choice.final and not choice.kernel:
            notices.warn_once((choice.cause, key[0].kind), f"attention has PyTorch's backward: {choice.reason}")
        return choice

    def _decided(self, problem: Problem, device_index: int) -> Choice:
        try:
            device = gpu.current_device(device_index)
        except BwdtuneError as error:
            return Choice(None, str(error), cause=Cause.NO_GPU)
        if self._rows is None:
            self._read_in_background()
            return Choice(None, "the stored winners are being read", final=False, cause=Cause.READING)
        selected = select(problem, device, self._rows)
        reason, cause = selected.reason, selected.cause
        for row in selected.rows:
            build = Build.of(row, problem, device.arch)
            if build not in self._kernels:
                self._build_in_background(build, problem, row)
            kernel = self._kernels[build]
            if kernel is None:
                return Choice(None, f"{row.name} is being built", final=False, cause=Cause.BUILDING, row=row)
            if isinstance(kernel, Kernel):
                objection = _size_objection(kernel, problem)
                if objection is None:
                    return Choice(kernel, row.name, row=row)
                kernel = objection
            reason = reason or f"{row.name} cannot be used: {kernel}"
            cause = cause if selected.cause == Cause.SLOWER else Cause.UNUSABLE
        return Choice(None, reason, cause=cause)

    # What happens in the background

    def _read_in_background(self) -> None:
        if not self._reading:
            generation = self._generation
            self._worker.submit(lambda: self._read(generation))
            self._reading = True

    def _read(self, generation: int) -> None:
        rows = read_rows()
        with self._changed:
            if generation != self._generation:
                return
            self._rows, self._reading = rows, False
            changed = self._decide_again()
        self._tell(changed)

    def _build_in_background(self, build: Build, problem: Problem, row: Row) -> None:
        generation = self._generation
        self._worker.submit(lambda: self._build(generation, build, problem, row))
        self._kernels[build] = None

    def _build(self, generation: int, build: Build, problem: Problem, row: Row) -> None:
        kernel = self._built(build, problem, row)
        with self._changed:
            if generation != self._generation:
                return
            self._kernels[build] = kernel
            changed = self._decide_again()
        self._tell(changed)

    @staticmethod
    def _built(build: Build, problem: Problem, row: Row) -> Kernel | str:
        try:
            kernel = build.find()
            if kernel:
                return kernel
            notices.warn_once(
                build,
                f"the kernel for {problem.label} ({build.config.id}, {row.name}) is being compiled in the background, "
                f"and PyTorch's backward serves until then: `{shlex.join(['tuner', 'prebuild', *problem.options])}` or "
                "bwdtune.warmup(...) beforehand avoids that",
            )
            started = time.monotonic()
            kernel = build.make()
            notices.info(f"the kernel for {problem.label} is ready, after {time.monotonic() - started:.1f} s")
            return kernel
        except (BwdtuneError, OSError) as error:
            return str(error)
        except Exception as error:  # a template that fails, for one: training goes on without this kernel
            return f"{type(error).__name__}: {error}"

    def _decide_again(self) -> list[tuple[tuple[Problem, int], Choice]]:
        """What was not final, with what is known now; under the lock."""
        open_ = [key for key, choice in self._choices.items() if not choice.final]
        decided = [(key, self._decide(key)) for key in open_]
        self._changed.notify_all()
        return [(key, choice) for key, choice in decided if choice.final]

    def _tell(self, changed: list[tuple[tuple[Problem, int], Choice]]) -> None:
        for (problem, device_index), choice in changed:
            for subscriber in tuple(self._subscribers):
                subscriber(problem, device_index, choice)


def _size_objection(kernel: Kernel, problem: Problem) -> str | None:
    """Why a kernel cannot count these sizes."""
    try:
        kernel.workspace_bytes(
            problem.batch, problem.heads_q, problem.heads_kv, problem.seqlen_q, problem.seqlen_kv, problem.positions
        )
    except BwdtuneError as error:
        return str(error)
    return None


def _on_miss() -> str:
    value = os.environ.get(ON_MISS_VARIABLE, "") or _ON_MISS[0]
    if value not in _ON_MISS:
        raise UsageError(f"{ON_MISS_VARIABLE} is {value!r}: set it to {' or '.join(_ON_MISS)}, or unset it")
    return value


def _waits() -> bool:
    try:
        return _on_miss() == _WAIT
    except UsageError as error:  # never an exception in a step
        notices.warn_once(ON_MISS_VARIABLE, str(error))
        return False


_dispatcher = Dispatcher()
os.register_at_fork(after_in_child=_dispatcher.after_fork)
