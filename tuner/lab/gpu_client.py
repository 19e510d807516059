"""The parent of the process that owns the GPU. A crash, a sticky CUDA error or a hang costs one candidate only."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from ...db.records import VerificationRecord
from ...gen.build.jobs import Variant
from ...gen.problem import Problem
from .protocol import Answer, CandidateError, Fault, Request, WorkerError
from .timing import Policy, Timings

START_LIMIT_S = 300.0
REQUEST_LIMIT_S = 120.0
CPU_REQUEST_LIMIT_S = 600.0  # where large groups of heads and a busy machine take their time
_END_LIMIT_S = 10.0
_LOG_CHARACTERS = 2000

# Of a race's limit.
_PREPARATION_LIMIT_S = 30.0  # inputs, PyTorch's forward, loading
_RUNS_BESIDES = 4  # of each kernel, that are not samples
_PASSES_OF_A_CALL = 2  # forward and backward: as long as two kernels
_SLOWEST_FLOPS = 2e12  # operations a second of a kernel that is worth waiting for
_SLOWEST_LAUNCH_S = 0.01


def _run(connection: Connection, device: str, gpu: str | None, log: str) -> None:
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before anything asks the driver
    from .gpu_worker import main  # loads PyTorch, which the parent does not need

    main(connection, device, log)


class Worker:
    """Verifies and times variants in a child process: started when it is needed, replaced when it is broken.

    One thread asks at a time. Close it, or use it as a context manager; any thread may close it.

    Attributes:
        main: What the child runs: takes the connection, the device, the GPU and the name of a log file.
    """

    main = staticmethod(_run)

    def __init__(self, device: str = "cuda:0", *, gpu: str | None = None, limit_s: float | None = None) -> None:
        """Args:
        device: ``cuda:0`` and so on, or ``cpu`` for variants of the arch ``host``.
        gpu: The only GPU that the child sees, by its UUID; None for all that this process sees.
        limit_s: A request that takes longer is ended, and its candidate has failed; None for what suits the device.
        """
        self._device, self._gpu = device, gpu
        self._limit_s = limit_s
        self._child: _Child | None = None
        self._closed = False
        self._asking = threading.RLock()  # again by an interrupt in the thread that asks

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the child for good. A thread that waits for its answer is told so by a `WorkerError`."""
        self._closed = True
        child = self._child
        if child:
            child.kill()  # which ends the waiting of another thread
        with self._asking:
            self._end()

    def _end(self) -> None:
        if self._child:
            child, self._child = self._child, None
            child.end()

    def verify(self, problem: Problem, variant: Variant) -> VerificationRecord:
        """Checks a variant's numbers on small problems of the same kind. See `verify.Verifier`.

        Raises:
            CandidateError: It crashed or hung.
            WorkerError: Nothing can be verified.
        """
        result: VerificationRecord = self._ask("verify", self._verify_limit_s(), problem, [variant])
        return result

    def verify_at(self, problem: Problem, variant: Variant) -> VerificationRecord:
        """Checks a variant's numbers at the problem's own sizes.

        Raises:
            CandidateError: It crashed or hung.
            WorkerError: Nothing can be verified.
        """
        result: VerificationRecord = self._ask("verify_at", self._verify_limit_s(), problem, [variant])
        return result

    def time(self, problem: Problem, variants: Sequence[Variant], peers: Sequence[str], policy: Policy) -> Timings:
        """Times variants and PyTorch's own kernels against each other.

        Args:
            problem: The sizes.
            variants: Known in the result by their configuration's id.
            peers: Of `peers.PEERS`; one that does not run is in the result's ``unavailable``.
            policy: How.

        Raises:
            CandidateError: One of the variants crashed, hung or left its outputs unwritten.
            WorkerError: Nothing can be timed.
        """
        unavailable: dict[str, str] = {}
        while True:
            remaining = tuple(name for name in peers if name not in unavailable)
            try:
                limit_s = self._time_limit_s(problem, len(variants) + len(remaining), policy)
                timings: Timings = self._ask("time", limit_s, problem, variants, remaining, policy)
            except CandidateError as error:
                if error.candidate not in remaining:
                    raise
                unavailable[error.candidate] = str(error)
            else:
                return replace(timings, unavailable={**unavailable, **timings.unavailable})

    def time_calls(self, problem: Problem, calls: Sequence[str], direction: str, policy: Policy) -> tuple[Timings, str]:
        """Times whole calls of attention against each other.

        Args:
            problem: The sizes.
            calls: Of `calls.CALLS`; one that does not run is in the result's ``unavailable``.
            direction: ``forward`` or ``both``.
            policy: How.

        Returns:
            The timings, and the id of the configuration that ``best`` ran; empty where it did not.

        Raises:
            CandidateError: One of them crashed or hung.
            WorkerError: Nothing can be timed.
        """
        limit_s = self._time_limit_s(problem, _PASSES_OF_A_CALL * len(calls), policy)
        result: tuple[Timings, str] = self._ask("time_calls", limit_s, problem, [], calls, direction, policy)
        return result

    def _verify_limit_s(self) -> float:
        return CPU_REQUEST_LIMIT_S if self._device == "cpu" else REQUEST_LIMIT_S

    def _time_limit_s(self, problem: Problem, kernels: int, policy: Policy) -> float:
        """What a race may take in which every kernel is as slow as one can be that is not stuck."""
        if self._device == "cpu":
            return CPU_REQUEST_LIMIT_S
        runs = kernels * (policy.min_samples + _RUNS_BESIDES)
        slowest_s = problem.flops / _SLOWEST_FLOPS + _SLOWEST_LAUNCH_S
        return _PREPARATION_LIMIT_S + 3 * (policy.warmup_ms + kernels * policy.budget_ms) / 1e3 + runs * slowest_s

    def _ask(self, method: str, limit_s: float, problem: Problem, variants: Sequence[Variant], *arguments: Any) -> Any:
        libraries = {}
        for variant in variants:
            if not variant.library:
                raise CandidateError(f"it was not compiled: {variant.error}", variant.source.config.id)
            libraries[variant.source.config.id] = variant.library
        with self._asking:
            answer = self._answer(Request(method, (problem, libraries, *arguments)), self._limit_s or limit_s)
        if answer.fatal:
            raise WorkerError(answer.fatal)
        if answer.failure:
            raise CandidateError(answer.failure, answer.candidate)
        return answer.result

    def _answer(self, request: Request, limit_s: float) -> Answer:
        ended = WorkerError("the process that runs kernels was ended")
        if self._closed:
            raise ended
        try:
            if not self._child:
                self._child = _Child(self.main, self._device, self._gpu)
            if self._closed:  # meanwhile, when there was no child to be ended
                raise ended
            answer = self._child.ask(request, limit_s)
        except BaseException as error:  # an interrupt too: the answer would be taken for that to the next request
            self._end()
            if self._closed and isinstance(error, CandidateError):
                raise ended from None
            raise
        if answer.sick:
            self._end()
        return answer


class _Child:
    """One child process."""

    def __init__(self, main: Callable[..., None], device: str, gpu: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._log = tempfile.NamedTemporaryFile(prefix="bwdtune-gpu-", suffix=".log")  # noqa: SIM115
        arguments = (theirs, device, gpu, self._log.name)
        self._process = context.Process(target=main, args=arguments, name="bwdtune-gpu", daemon=True)
        with _interrupts_blocked():  # inherited by the child, which Ctrl-C reaches too, maybe before it can ignore it
            self._process.start()
        theirs.close()
        self._started = False

    def ask(self, request: Request, limit_s: float) -> Answer:
        """Sends a request and waits for its answer.

        Raises:
            CandidateError: The child died or took too long. It cannot be asked again.
            WorkerError: It did not start.
        """
        if not self._started:
            try:
                answer = self._receive(START_LIMIT_S)
            except CandidateError as error:
                raise WorkerError(f"the process that runs kernels does not start: {error}") from None
            if answer.fatal:
                return answer
            self._started = True
        self._connection.send(request)
        return self._receive(limit_s)

    def kill(self) -> None:
        """Has the process die; `end` waits for that."""
        with suppress(ValueError):  # it has ended, and was put away
            self._process.kill()

    def end(self) -> None:
        """Ends the process, whatever it is doing.

        Raises:
            WorkerError: It cannot be ended, because the driver holds it.
        """
        self._process.kill()
        self._process.join(_END_LIMIT_S)
        if self._process.is_alive():
            raise WorkerError(f"process {self._process.pid} cannot be ended: the GPU hangs and must be reset")
        self._process.close()
        self._connection.close()
        self._log.close()

    def _receive(self, limit_s: float) -> Answer:
        deadline = time.monotonic() + limit_s
        running: str | None = None
        while True:
            ready = wait([self._connection, self._process.sentinel], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise CandidateError(
                    f"it hung: no answer in {limit_s:g} s", running, Fault("hang", log=self._last_lines())
                )
            try:
                message = self._connection.recv()
            except (EOFError, ConnectionError):
                self._process.join(_END_LIMIT_S)
                ending = _ending(self._process.exitcode)
                raise CandidateError(f"its process {ending}", running, self._fault(self._process.exitcode)) from None
            if isinstance(message, Answer):
                return replace(message, candidate=running)
            running = message.name

    def _fault(self, exit_code: int | None) -> Fault:
        name = _signal_name(exit_code)
        return Fault("killed" if name == "SIGKILL" else "crash", name, self._last_lines())

    def _last_lines(self) -> str:
        with open(self._log.name, encoding="utf-8", errors="replace") as log:
            return log.read()[-_LOG_CHARACTERS:].strip()


def _signal_name(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return ""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def _ending(exit_code: int | None) -> str:
    name = _signal_name(exit_code)
    return f"died of {name}" if name else f"ended with status {exit_code}"


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
