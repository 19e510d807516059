"""`choose`: looks up what is known, and has the rest prepared in the background."""

from __future__ import annotations

import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping

from ...gen.errors import BwdtuneError, UsageError
from ...gen.problem import Problem
from .. import gpu
from ..kernel import Kernel
from . import builds, notices
from .builds import Build
from .records import Cause, Choice, Row
from .resolution import Progress, State, resolve
from .rows import Rows, read_rows
from .worker import Worker

_log = logging.getLogger(__name__)

ON_MISS_VARIABLE = "BWDTUNE_ON_MISS"
_WAIT = "wait"
_ON_MISS = ("pytorch", _WAIT)
_MOST_CHOICES = 4096  # problems that are remembered: of more, those that are settled are decided again

Subscriber = Callable[[Problem | None, int | None, Choice | None], None]
_Key = tuple[Problem, int]


def choose(problem: Problem, device_index: int, *, capturing: bool = False) -> Choice:
    """The kernel that computes a problem here, or why PyTorch's backward does.

    Rows are taken in the order of `selection.candidates`; one whose kernel cannot be had (it no longer renders to what
    was verified, it does not compile, it refuses the sizes) gives way to the next.

    It costs a dictionary's lookup for a problem that was seen, and about a millisecond for a new one. What takes
    longer, reading the database, rendering, compiling and loading, is done in the background; until then the choice is
    PyTorch's and not final. With ``BWDTUNE_ON_MISS=wait`` the call waits for it. Safe between threads, and after a
    fork. Trouble of any kind is a reason, never an exception.

    Args:
        problem: What is to be computed.
        device_index: CUDA's ordinal of the GPU.
        capturing: Whether the current stream is being captured into a CUDA graph: only what is ready is used then,
            whatever the variable says.
    """
    return dispatcher.choose(problem, device_index, wait=not capturing and waits())


def prepare(*, wait: bool = True) -> None:
    """Reads the database, so that no step has to be computed without it.

    Args:
        wait: Whether to return when it is read; else it is read in the background.

    Raises:
        UsageError: ``BWDTUNE_ON_MISS`` has a value that means nothing.
    """
    on_miss()
    dispatcher.prepare(wait)


def subscribe(callback: Subscriber) -> None:
    """Has a function told of choices that were not final, or have changed, for the life of the process.

    Args:
        callback: Called with the problem, the device's index and the choice, which is final; with three times None
            when all choices are forgotten. In the thread that found out, mostly a background one.
    """
    dispatcher.subscribe(callback)


def discard(kernel: Kernel, reason: str) -> None:
    """Has a kernel not chosen any more in this process: its launch failed.

    Args:
        kernel: Of a choice.
        reason: One line.
    """
    dispatcher.discard(kernel, reason)


def forget() -> None:
    """Has the database read again: winners that were stored meanwhile count from now on."""
    dispatcher.forget()


class Dispatcher:
    """What one process knows: rows, kernels, and the choices made of them."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []
        self._states: dict[Build, State] = {}
        self._rows: Rows | None = None
        self._choices: dict[_Key, Choice] = {}
        self._generation = 0
        self.after_fork()

    def after_fork(self) -> None:
        """In the child there is no thread that would go on with what was begun, and a lock may be another thread's."""
        self._changed = threading.Condition(threading.RLock())
        # Two, so that what only has to be looked up does not wait for a compile.
        self._finder, self._builder = Worker("bwdtune-finder"), Worker("bwdtune-builder")
        self._reading = False
        self._states = {build: state for build, state in self._states.items() if not isinstance(state, Progress)}
        self._choices = {key: choice for key, choice in self._choices.items() if choice.final}

    def choose(self, problem: Problem, device_index: int, *, wait: bool) -> Choice:
        """See the function."""
        key = (problem, device_index)
        found = self._choices.get(key)
        if found is None:
            with self._changed:
                found = self._choices.get(key) or self._decide(key)
        if wait and not found.final:
            return self.wait_until(key, lambda choice: choice.final)
        return found

    def wait_until(self, key: _Key, enough: Callable[[Choice], bool]) -> Choice:
        """Waits for what goes on in the background, until the choice is good enough."""
        with self._changed:
            while True:
                found = self._choices.get(key) or self._decide(key)
                if enough(found) or self._in_background():
                    return found
                self._changed.wait()

    def prepare(self, wait: bool) -> Rows | None:
        """The rows; None where they are still being read."""
        with self._changed:
            if self._rows is None:
                self._read_in_background()
            while wait and self._reading and not self._in_background():
                self._changed.wait()
            return self._rows

    def subscribe(self, callback: Subscriber) -> None:
        """See the function."""
        with self._changed:
            self._subscribers.append(callback)

    def adopt(self, states: Mapping[Build, Kernel | str]) -> None:
        """Takes over what was built elsewhere."""
        with self._changed:
            self._states.update(states)
            changed = self._decide_again()
        self._tell(changed)

    def discard(self, kernel: Kernel, reason: str) -> None:
        """See the function."""
        with self._changed:
            for build, state in self._states.items():
                if state is kernel:
                    self._states[build] = reason
            notices.warn_once(kernel.path, f"{kernel.path.stem} is not used any more: {reason}")
            stale = [key for key, choice in self._choices.items() if choice.kernel is kernel]
            decided = [(key, self._decide(key)) for key in stale]
        self._tell([(key, choice) for key, choice in decided if choice.final])

    def forget(self) -> None:
        """See the function."""
        with self._changed:
            self._generation += 1
            self._choices.clear()
            self._states.clear()
            self._rows, self._reading = None, False
            notices.forget()
            self._changed.notify_all()
        self._call_subscribers(None, None, None)

    def counts(self) -> tuple[int, tuple[str, ...]]:
        """How many kernels are being made, and why others cannot be had."""
        with self._changed:
            states = tuple(self._states.values())
        return sum(isinstance(state, Progress) for state in states), tuple(s for s in states if isinstance(s, str))

    # Decisions, under the lock

    def _decide(self, key: _Key) -> Choice:
        """Decides and remembers. What is missing is begun."""
        try:
            choice = self._decided(*key)
        except Exception as error:  # no thread to be had, since the interpreter is ending; never one in a step
            choice = Choice(None, f"no kernel can be chosen: {type(error).__name__}: {error}", cause=Cause.UNUSABLE)
        if len(self._choices) >= _MOST_CHOICES and key not in self._choices:
            self._choices = {one: choice for one, choice in self._choices.items() if not choice.final}
        self._choices[key] = choice
        if choice.final and not choice.kernel:
            notices.warn_once((choice.cause, key[0].kernel_spec), f"attention has PyTorch's backward: {choice.reason}")
        return choice

    def _decided(self, problem: Problem, device_index: int) -> Choice:
        try:
            device = gpu.current_device(device_index)
        except BwdtuneError as error:
            return Choice(None, str(error), cause=Cause.NO_GPU)
        if self._rows is None:
            self._read_in_background()
            return Choice(None, "the stored winners are being read", final=False, cause=Cause.READING)

        def state_of(build: Build, row: Row) -> State:
            if build not in self._states:
                self._begin(self._finder, Progress.SOUGHT, build, problem, row)
            return self._states[build]

        return resolve(problem, device, self._rows, state_of)

    def _decide_again(self) -> list[tuple[_Key, Choice]]:
        """All that was not final, with what is known now; what has become final."""
        open_ = [key for key, choice in self._choices.items() if not choice.final]
        decided = [(key, self._decide(key)) for key in open_]
        self._changed.notify_all()
        return [(key, choice) for key, choice in decided if choice.final]

    def _begin(self, worker: Worker, progress: Progress, build: Build, problem: Problem, row: Row) -> None:
        generation = self._generation
        task = self._find if progress is Progress.SOUGHT else self._make
        worker.submit(lambda: task(generation, build, problem, row))
        self._states[build] = progress

    def _read_in_background(self) -> None:
        if not self._reading:
            generation = self._generation
            self._finder.submit(lambda: self._read(generation))
            self._reading = True

    # In the background

    def _in_background(self) -> bool:
        """Whether the caller is what others wait for."""
        return self._finder.is_current() or self._builder.is_current()

    def _read(self, generation: int) -> None:
        rows = read_rows()
        if rows.trouble:
            notices.warn_once("database", f"stored winners do not count: {rows.trouble}")
        with self._changed:
            if generation != self._generation:
                return
            self._rows, self._reading = rows, False
            changed = self._decide_again()
        self._tell(changed)

    def _find(self, generation: int, build: Build, problem: Problem, row: Row) -> None:
        found = builds.find(build)
        if found is not None:
            self._settle(generation, build, found)
            return
        with self._changed:
            if generation != self._generation:
                return
            try:
                self._begin(self._builder, Progress.BUILT, build, problem, row)
            except RuntimeError as error:
                self._states[build] = f"nothing can be built: {error}"
            changed = self._decide_again()
        self._tell(changed)

    def _make(self, generation: int, build: Build, problem: Problem, row: Row) -> None:
        if waits():
            notices.info(f"a kernel for {problem.label} is being compiled ({row.name}: {build.config.id})")
        else:
            command = shlex.join(["tuner", "prebuild", *problem.options])
            notices.warn_once(
                build,
                f"a kernel for {problem.label} is being compiled in the background ({row.name}: {build.config.id}); "
                f"PyTorch's backward serves until then, and `{command}` or bwdtune.warmup(...) beforehand avoids that",
            )
        started = time.monotonic()
        made = builds.make([build])[build].kernel
        if isinstance(made, Kernel):
            notices.info(f"the kernel for {problem.label} is ready after {time.monotonic() - started:.1f} s")
        self._settle(generation, build, made)

    def _settle(self, generation: int, build: Build, state: Kernel | str) -> None:
        with self._changed:
            if generation != self._generation:
                return
            self._states[build] = state
            changed = self._decide_again()
        self._tell(changed)

    def _tell(self, changed: list[tuple[_Key, Choice]]) -> None:
        for (problem, device_index), choice in changed:
            self._call_subscribers(problem, device_index, choice)

    def _call_subscribers(self, problem: Problem | None, device_index: int | None, choice: Choice | None) -> None:
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(problem, device_index, choice)
            except Exception:  # costs neither the others nor the background thread anything
                _log.exception("a subscriber of dispatch failed")


def on_miss() -> str:
    """What is done about a kernel that is missing: ``BWDTUNE_ON_MISS``, or the default.

    Raises:
        UsageError: The variable has a value that means nothing.
    """
    value = os.environ.get(ON_MISS_VARIABLE, "") or _ON_MISS[0]
    if value not in _ON_MISS:
        raise UsageError(f"{ON_MISS_VARIABLE} is {value!r}: set it to {' or '.join(_ON_MISS)}, or unset it")
    return value


def waits() -> bool:
    """Whether a call waits for what it misses (``BWDTUNE_ON_MISS=wait``), and PyTorch does not serve meanwhile."""
    try:
        return on_miss() == _WAIT
    except UsageError as error:  # never an exception in a step
        notices.warn_once(ON_MISS_VARIABLE, str(error))
        return False


dispatcher = Dispatcher()
"""The one of this process."""
os.register_at_fork(after_in_child=dispatcher.after_fork)
