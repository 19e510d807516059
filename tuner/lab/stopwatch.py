"""Times kernels by CUDA events: poisoned outputs, every kernel in each round, in another order each time."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...runtime.gpu import GpuState, compute_processes, gpu_state
from .timing import Cycles, Policy, Timing, Timings

if TYPE_CHECKING:
    import torch

_FLUSH_BYTES = 2**28  # more than the L2 of any card; writing it also gives the CPU time to enqueue the kernel
_ORDER_SEED = 7  # the same order at each call
_NOISY_SPREAD = 0.1
_NOISY_MS = 0.01  # what the clock itself may contribute


@dataclass(frozen=True)
class Timed:
    """A kernel with its arguments.

    Attributes:
        run: Enqueues it once.
        poison: Fills its outputs with what no kernel writes; outside of the time that counts.
        cycles: Waits for the last run and says what it counted; None where the kernel counts no cycles.
    """

    run: Callable[[], None]
    poison: Callable[[], None] = lambda: None
    cycles: Callable[[], int] | None = None


def time_kernels(
    kernels: Mapping[str, Timed],
    policy: Policy,
    device: torch.device,
    on_first_run: Callable[[str | None], None] = lambda name: None,
) -> Timings:
    """Times kernels against each other: in every round each runs once, in an order that is drawn anew.

    The order is shuffled rather than rotated: then nobody always runs after the same neighbour.

    Args:
        kernels: By name.
        policy: How often, on a cold or a warm L2, and whether by CUDA graphs.
        device: Where they run; on a CPU the wall clock counts, which only tests have a use for.
        on_first_run: Called before a kernel runs for the first time, which is waited for, so that a crash has a name;
            with None when all have run.
    """
    stopwatch = _CudaStopwatch(device, policy) if device.type == "cuda" else _HostStopwatch()
    for name, kernel in kernels.items():
        on_first_run(name)
        stopwatch.measure(kernel)
        stopwatch.read()
    on_first_run(None)
    begin = time.perf_counter()
    warmups = 0
    while not warmups or (time.perf_counter() - begin) * 1e3 < policy.warmup_ms:
        for kernel in kernels.values():
            stopwatch.measure(kernel)
        stopwatch.read()
        warmups += 1
    round_ms = (time.perf_counter() - begin) * 1e3 / warmups
    rounds = math.ceil(policy.budget_ms * len(kernels) / round_ms)
    rounds = min(max(rounds, policy.min_samples), policy.max_samples)

    names = list(kernels)
    times_ms: dict[str, list[float]] = {name: [] for name in names}
    state = GpuState()
    shuffled = random.Random(_ORDER_SEED)
    for index in range(rounds):
        order = shuffled.sample(names, len(names))
        for name in order:
            stopwatch.measure(kernels[name])
        if index == rounds // 2:
            state = stopwatch.state()  # before the wait: the card is at work
        for name, elapsed_ms in zip(order, stopwatch.read(), strict=True):
            times_ms[name].append(elapsed_ms)
    timings = {name: Timing.of(times) for name, times in times_ms.items()}
    notice = _notice(timings, stopwatch.processes())
    return Timings(
        timings,
        state=state,
        notice=notice,
        cycles=_count_cycles(kernels, policy, stopwatch),
        rounds_ms={name: tuple(times) for name, times in times_ms.items()},
    )


def _count_cycles(
    kernels: Mapping[str, Timed], policy: Policy, stopwatch: _CudaStopwatch | _HostStopwatch
) -> dict[str, Cycles]:
    """Runs the kernels that count their cycles, each alone: the count has to be read before the next run."""
    counted = {}
    for name, kernel in kernels.items():
        if kernel.cycles is None:
            continue
        counts = []
        for _ in range(policy.min_samples):
            stopwatch.measure(kernel)
            stopwatch.read()
            counts.append(kernel.cycles())
        counted[name] = Cycles.of(counts)
    return counted


def _notice(timings: Mapping[str, Timing], processes: int | None) -> str:
    """A busy GPU shows in the spread: time slices of other processes make some samples much longer."""
    spreads = {
        name: (timing.high_ms - timing.low_ms) / timing.median_ms
        for name, timing in timings.items()
        if timing.high_ms - timing.low_ms > _NOISY_MS
    }
    name = max(spreads, key=lambda name: spreads[name], default="")
    if not name or spreads[name] < _NOISY_SPREAD:
        return ""
    others = f" ({processes - 1} other processes use it)" if processes and processes > 1 else ""
    return f"the times of {name} spread by {spreads[name]:.0%}: is the GPU busy with something else{others}?"


class _CudaStopwatch:
    """CUDA events around each kernel; they are read together, so that the card never waits for the CPU in a round."""

    def __init__(self, device: torch.device, policy: Policy) -> None:
        import torch

        self._torch, self._device, self._policy = torch, device, policy
        self._flush = torch.empty(_FLUSH_BYTES if policy.cold_l2 else 0, dtype=torch.int8, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by the kernel's identity; whoever times keeps the kernel
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def measure(self, kernel: Timed) -> None:
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = self._torch.cuda.current_stream(self._device)
        run = self._graph_of(kernel).replay if self._policy.graph else kernel.run
        kernel.poison()
        self._flush.zero_()
        start.record(stream)
        run()
        end.record(stream)
        self._events.append((start, end))

    def read(self) -> list[float]:
        """Waits for what was measured since the last time; milliseconds."""
        self._torch.cuda.synchronize(self._device)
        events, self._events = self._events, []
        return [start.elapsed_time(end) for start, end in events]

    def _graph_of(self, kernel: Timed) -> torch.cuda.CUDAGraph:
        graph = self._graphs.get(id(kernel))
        if graph is None:
            kernel.run()  # loads the module, which cannot be captured
            self._torch.cuda.synchronize(self._device)
            graph = self._torch.cuda.CUDAGraph()
            with self._torch.cuda.graph(graph, stream=self._torch.cuda.current_stream(self._device)):
                kernel.run()
            self._graphs[id(kernel)] = graph
        return graph

    def state(self) -> GpuState:
        return gpu_state(self._device.index or 0)

    def processes(self) -> int | None:
        return compute_processes(self._device.index or 0)


class _HostStopwatch:
    """The wall clock around each kernel."""

    def __init__(self) -> None:
        self._times_ms: list[float] = []

    def measure(self, kernel: Timed) -> None:
        kernel.poison()
        start = time.perf_counter()
        kernel.run()
        self._times_ms.append((time.perf_counter() - start) * 1e3)

    def read(self) -> list[float]:
        times_ms, self._times_ms = self._times_ms, []
        return times_ms

    def state(self) -> GpuState:
        return GpuState()

    def processes(self) -> int | None:
        return None
