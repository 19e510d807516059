"""The process that owns the GPU: loads kernels, checks and times them when its client asks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from ...db.records import NO_FUSED_BACKWARD, VerificationRecord
from ...gen.errors import BwdtuneError
from ...gen.problem import Problem
from ...runtime import torch_attention
from ...runtime.forwards import FLASH, FLASH_WINDOW
from ...runtime.kernel import Kernel, KernelError
from ...runtime.verification.inputs import Inputs
from ...runtime.verification.verifier import Verifier
from .calls import BEST, chosen, prepared, wait_for_kernels
from .peers import DEFAULT, PEERS, SAME_KERNEL, pytorchs_default
from .protocol import Answer, Request, Running
from .stopwatch import Timed, time_kernels
from .timing import Policy, Timings


def main(connection: Connection, device: str, log: str) -> None:
    """Answers requests until the parent closes the connection or dies.

    Args:
        connection: To the parent.
        device: ``cuda:0`` and so on, or ``cpu``.
        log: The file that takes what kernels and the driver print.
    """
    _write_to(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle, which ends this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_die_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")  # PyTorch's would be written across the parent's progress bar
    torch.set_grad_enabled(False)
    try:
        bench = _GpuBench(torch.device(device), connection)
    except Exception as error:  # whatever it is, the parent can only pass it on
        connection.send(Answer(fatal=_one_line(error)))
        return
    connection.send(Answer())
    while True:
        try:
            request: Request = connection.recv()
        except EOFError:
            return
        connection.send(_answer(bench, request))


def _answer(bench: _GpuBench, request: Request) -> Answer:
    call = getattr(bench, request.method)
    try:
        try:
            return Answer(result=call(*request.arguments))
        except torch.OutOfMemoryError:
            bench.forget()
        return Answer(result=call(*request.arguments))
    except torch.OutOfMemoryError:
        bench.forget()
        return Answer(fatal="the GPU has too little free memory for this problem: choose a smaller one")
    except Exception as error:  # a fault of the candidate; what it left behind decides whether this process goes on
        return Answer(failure=_one_line(error), sick=not bench.healthy())


def _one_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return text if isinstance(error, BwdtuneError) else f"{type(error).__name__}: {text}"


def _write_to(log: str) -> None:
    """Sends both output streams to a file, those of C code too: the parent quotes it when this process has died."""
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.close(handle)


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


class _GpuBench:
    """Checks and times on one device."""

    def __init__(self, device: torch.device, connection: Connection) -> None:
        if device.type == "cuda":
            if not torch.cuda.is_available():
                built = "is built without CUDA" if torch.version.cuda is None else "sees no GPU"
                raise KernelError(f"PyTorch {torch.__version__} {built}: install one for this GPU and driver")
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
        self._device, self._connection = device, connection
        self._verifier = Verifier(device)
        self._kernels: dict[Path, Kernel] = {}

    def verify(self, problem: Problem, libraries: dict[str, Path]) -> VerificationRecord:
        (kernel,) = self._load(libraries).values()
        return self._verifier.verify(problem, kernel)

    def verify_at(self, problem: Problem, libraries: dict[str, Path]) -> VerificationRecord:
        (kernel,) = self._load(libraries).values()
        return self._verifier.verify_at(problem, kernel)

    def time(self, problem: Problem, libraries: dict[str, Path], peers: Sequence[str], policy: Policy) -> Timings:
        # A graph is captured from a stream of its own, on which all is then prepared.
        on_stream: AbstractContextManager[object] = contextlib.nullcontext()
        if policy.graph and self._device.type == "cuda":
            on_stream = torch.cuda.stream(torch.cuda.Stream(self._device))
        with on_stream:
            return self._time(problem, libraries, peers, policy)

    def _time(self, problem: Problem, libraries: dict[str, Path], peers: Sequence[str], policy: Policy) -> Timings:
        inputs = self._verifier.inputs_at(problem)
        arena = _Arena(problem, inputs)
        kernels = {}
        for name, kernel in self._load(libraries).items():
            self._say_running(name)
            kernels[name] = arena.timed(kernel)
        unavailable = {}
        default = self._default(problem, inputs) if DEFAULT in peers else None
        alias = SAME_KERNEL.get(default or "", "") if inputs.features.plain else ""
        for name in peers:
            if name == DEFAULT and alias in peers:
                continue
            self._say_running(name)
            try:
                kernels[name] = self._peer(name, problem, inputs, default)
            except Exception as error:  # whatever keeps PyTorch's kernel from this problem is the reason
                if not self.healthy():
                    raise
                unavailable[name] = _one_line(error)
        if not kernels:
            return Timings({}, unavailable=unavailable, default_kernel=default)
        timings = time_kernels(kernels, policy, self._device, self._say_running)
        for name in libraries:
            self._say_running(name)
            kernels[name].poison()
            kernels[name].run()
            if not arena.written():
                raise KernelError("at these sizes it leaves elements of its outputs unwritten, or not finite")
        if alias in timings:
            timings = replace(
                timings,
                by_name={**timings.by_name, DEFAULT: timings[alias]},
                rounds_ms={**timings.rounds_ms, DEFAULT: timings.rounds_ms[alias]},
            )
        elif alias in unavailable:
            unavailable[DEFAULT] = unavailable[alias]
        return replace(timings, unavailable=unavailable, default_kernel=default)

    def time_calls(
        self, problem: Problem, libraries: dict[str, Path], calls: Sequence[str], direction: str, policy: Policy
    ) -> tuple[Timings, str]:
        wait_for_kernels()
        inputs = self._verifier.inputs_at(problem)
        runs, unavailable, config = {}, {}, ""
        for name in calls:
            self._say_running(name)
            try:
                if name == BEST:
                    config = chosen(problem, self._device)
                run = prepared(name, problem, inputs, direction)
                run()
                self._wait()
                runs[name] = Timed(run)
            except Exception as error:  # whatever keeps one from this problem is its reason
                if not self.healthy():
                    raise
                unavailable[name] = _one_line(error)
        timings = time_kernels(runs, policy, self._device, self._say_running) if runs else Timings({})
        return replace(timings, unavailable=unavailable), config

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def healthy(self) -> bool:
        """Whether the device still takes work: after an illegal access or a trap it does not, in this process."""
        try:
            return bool(torch.ones(1, device=self._device).add(1).item() == 2)
        except RuntimeError:
            return False

    def forget(self) -> None:
        """Frees what was kept for the next request."""
        self._verifier = Verifier(self._device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _say_running(self, name: str | None) -> None:
        self._connection.send(Running(name))

    def _load(self, libraries: dict[str, Path]) -> dict[str, Kernel]:
        loaded = {}
        for name, library in libraries.items():
            self._say_running(name)
            if library not in self._kernels:
                self._kernels[library] = Kernel.load(library)
            loaded[name] = self._kernels[library]
        return loaded

    def _default(self, problem: Problem, inputs: Inputs) -> str | None:
        """Which kernel PyTorch's default is; None where PyTorch does not say."""
        try:
            with self._modes(problem):
                return pytorchs_default(problem, inputs)
        except RuntimeError:
            if not self.healthy():
                raise
            return None

    def _modes(self, problem: Problem) -> AbstractContextManager[None]:
        """PyTorch's as the problem asks for."""
        return torch_attention.deterministic_algorithms() if problem.deterministic else contextlib.nullcontext()

    def _peer(self, name: str, problem: Problem, inputs: Inputs, default: str | None) -> Timed:
        if self._device.type != "cuda":
            raise KernelError("it runs on a GPU only")
        if name == DEFAULT:
            if default is None or default == NO_FUSED_BACKWARD:
                raise KernelError(f"PyTorch has no fused backward of {problem.label}")
            tensors = inputs.q, inputs.k, inputs.v
            causal, scale = problem.causal, problem.softmax_scale
            forward = torch_attention.forward(
                *tensors,
                causal,
                scale,
                inputs.features,
                default,
                sink=inputs.sink,
                bias=inputs.bias,
                bias_grad=inputs.bias_grad,
            )
        elif name == "fa" and problem.value_head_dim:
            raise KernelError("PyTorch's Flash Attention takes v of the head_dim of q and k alone")
        elif inputs.features.plain and inputs.bias is None:
            forward = PEERS[name].forward(inputs.q, inputs.k, inputs.v, problem.causal, problem.softmax_scale)
        elif name == "fa" and (flash := self._default(problem, inputs)) in (FLASH, FLASH_WINDOW):
            tensors = inputs.q, inputs.k, inputs.v
            forward = torch_attention.forward(*tensors, problem.causal, problem.softmax_scale, inputs.features, flash)
        else:
            raise KernelError(f"PyTorch's {name} has no {problem.features_label}")

        def run() -> None:
            with self._modes(problem):
                inputs.gradients_of(forward)

        run()
        torch.cuda.synchronize(self._device)
        return Timed(run)


class _Arena:
    """One problem's inputs, and outputs and workspace that all timed kernels share: each is poisoned before it runs."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self._problem, self._inputs = problem, inputs
        self._outputs = inputs.outputs()
        self._workspace = torch.empty(0, dtype=torch.uint8, device=inputs.q.device)

    def timed(self, kernel: Kernel) -> Timed:
        problem, inputs = self._problem, self._inputs
        needed = kernel.workspace_bytes(
            problem.batch, problem.heads_q, problem.heads_kv, problem.seqlen_q, problem.seqlen_kv, problem.positions
        )
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(needed, dtype=torch.uint8, device=inputs.q.device)
        launch = kernel.prepare(
            **inputs.read(),
            **self._outputs,
            scale=problem.softmax_scale,
            features=inputs.features,
            workspace=self._workspace,
        )
        return Timed(launch, self.poison, launch.cycles if kernel.counts_cycles else None)

    def poison(self) -> None:
        for output in self._outputs.values():
            output.fill_(float("nan"))

    def written(self) -> bool:
        return all(bool(output.isfinite().all()) for output in self._outputs.values())
