"""Prepares kernels ahead of time: `warmup` in a process, `build_for` for `tuner prebuild`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...gen.build.limits import job_limit
from ...gen.device import Device
from ...gen.errors import BwdtuneError
from ...gen.problem import Problem
from .. import gpu, operator
from ..kernel import Kernel
from .builds import Build, Made, make
from .choices import dispatcher, prepare
from .records import Choice, Row
from .resolution import Progress, State, resolve
from .rows import Rows


@dataclass(frozen=True)
class Warmed:
    """What a problem has after all that was missing has been built.

    Attributes:
        problem: The problem.
        choice: The kernel, or why PyTorch's backward computes it.
        seconds: How long its kernel took to be compiled, just now; None where it was there, or there is none.
    """

    problem: Problem
    choice: Choice
    seconds: float | None = None

    @property
    def state(self) -> str:
        """In a word or two: ``built``, ``there``, ``being built`` or ``PyTorch``."""
        if self.choice.kernel:
            return "there" if self.seconds is None else f"built in {self.seconds:.0f} s"
        return "PyTorch" if self.choice.final else "being built"


@dataclass(frozen=True)
class Warmup:
    """What there is after all that was missing has been built. Prints as a table.

    Attributes:
        problems: One for each problem, in their order.
        operator: Why the C++ operator (`runtime.operator`) cannot be had; empty where it is there.
    """

    problems: tuple[Warmed, ...]
    operator: str = ""

    def __str__(self) -> str:
        width = max((len(one.problem.label) for one in self.problems), default=0)
        lines = [f"{one.problem.label:<{width}}  {one.state:<12}  {one.choice.reason}" for one in self.problems]
        return "\n".join([*lines, self.operator] if self.operator else lines)


def warmup(
    problems: Problem | str | Iterable[Problem | str],
    *,
    device: torch.device | int | None = None,
    wait: bool = True,
    **features: Any,
) -> Warmup:
    """Has the kernels of problems, and the C++ operator, built and loaded before the first step needs them.

    What is missing is compiled, several kernels at once (``MAX_JOBS``). Any later backward of one of these problems
    finds its kernel at once: the first one, and one under the capture of a CUDA graph.

    Args:
        problems: `gen.problem.Problem`, or shapes as the commands take them: ``B_H_S_D``, or ``B_HQ_HKV_S_D``.
        device: A CUDA device or its ordinal; the current one by default.
        wait: Whether to return when all is there; else the kernels are built in the background.
        **features: Of the shapes, as for `gen.problem.Problem`: ``causal``, ``dtype`` and so on.

    Returns:
        What each problem has, in their order.

    Raises:
        UsageError: A shape or a feature makes no sense, or a variable (``BWDTUNE_ON_MISS``, ``MAX_JOBS``).
        NoGpuError: There is no such GPU.
    """
    asked = [problems] if isinstance(problems, Problem | str) else list(problems)
    wanted = [Problem.parse(one, **features) if isinstance(one, str) else one for one in asked]
    index = ordinal(device)
    card = gpu.current_device(index)
    prepare(wait=wait)
    if not wait:
        return Warmup(tuple(Warmed(one, dispatcher.choose(one, index, wait=False)) for one in wanted))
    known = dispatcher.prepare(wait=True)
    assert known is not None, "it was waited for"
    warmed, kernels = build_for(wanted, card, known)
    dispatcher.adopt(kernels)
    settled = (replace(one, choice=dispatcher.choose(one.problem, index, wait=True)) for one in warmed)
    return Warmup(tuple(settled), _load_operator())


def _load_operator() -> str:
    """Why it cannot be had."""
    try:
        operator.load()
    except BwdtuneError as error:
        return str(error)
    return ""


def build_for(
    problems: Sequence[Problem], device: Device, known: Rows, *, cache: Path | None = None, jobs: int | None = None
) -> tuple[tuple[Warmed, ...], dict[Build, Kernel | str]]:
    """Builds and loads the kernels that dispatch chooses for problems.

    Args:
        problems: The problems.
        device: The GPU, which need not be here.
        known: The rows to choose from.
        cache: The cache directory; see `gen.paths.cache_dir`.
        jobs: Compiles at once; see `gen.build.limits.job_limit` for the default.

    Returns:
        What each problem has, and each kernel that was looked at, or why there is none.

    Raises:
        UsageError: ``MAX_JOBS`` is no positive number.
    """
    jobs = jobs or job_limit(os.environ)
    made: dict[Build, Made] = {}
    while True:
        missing: dict[Build, None] = {}

        def state_of(build: Build, row: Row, missing: dict[Build, None] = missing) -> State:
            if build in made:
                return made[build].kernel
            missing[build] = None
            return Progress.BUILT

        choices = [resolve(problem, device, known, state_of) for problem in problems]
        if not missing:
            break
        made.update(make(list(missing), cache=cache, jobs=jobs))
    seconds = {one.kernel: one.seconds for one in made.values()}
    warmed = tuple(
        Warmed(problem, choice, seconds[choice.kernel] if choice.kernel else None)
        for problem, choice in zip(problems, choices, strict=True)
    )
    return warmed, {build: one.kernel for build, one in made.items()}


def ordinal(device: torch.device | int | None) -> int:
    """CUDA's ordinal of a device; of the current one for None."""
    if isinstance(device, torch.device):
        device = device.index
    if device is not None:
        return device
    return torch.cuda.current_device() if torch.cuda.is_available() else 0
