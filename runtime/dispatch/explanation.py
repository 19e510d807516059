"""`explain`: which kernel computes a problem, why, and how fast it was beside PyTorch's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...db.records import NO_FUSED_BACKWARD
from ...gen.families import Config
from ...gen.problem import Problem
from .choices import dispatcher, prepare
from .records import Cause, Row
from .warming import ordinal

_PASSING = (Cause.READING, Cause.LOADING)


@dataclass(frozen=True)
class Explanation:
    """How the backward of a problem is computed here, now.

    Attributes:
        problem: The problem; None where the input is none that a kernel takes.
        kernel: The name of the kernel's library; None where PyTorch's backward computes it.
        reason: One line: whose winner it is, or why there is none.
        final: Whether it stays so; not while a kernel is being built.
        row: Where the kernel comes from, or would: the problem it was found for, its times.
        library: The kernel's file.
    """

    problem: Problem | None
    kernel: str | None
    reason: str
    final: bool = True
    row: Row | None = None
    library: Path | None = None

    @property
    def config(self) -> Config | None:
        """The kernel's configuration."""
        return self.row.config if self.row else None

    def __str__(self) -> str:
        lines = [f"{self.problem.label if self.problem else 'this input'}: {self.kernel or 'PyTorch'}"]
        lines.append(f"  why            {self.reason}")
        if not self.final:
            lines.append("  until then     PyTorch's backward")
        if self.row:
            lines.append(f"  configuration  {self.row.config.id}")
            lines.append(f"  measured       {_times(self.row)}")
        if self.library:
            lines.append(f"  library        {self.library}")
        return "\n".join(lines)


def explain(
    q: torch.Tensor | Problem, *arguments: Any, device: torch.device | int | None = None, **options: Any
) -> Explanation:
    """Which kernel computes the backward of a call of `attention`, and why. Computes nothing.

    Reads the database where that has not been done. A kernel that is missing is begun to be built, as by the call.

    Args:
        q: The first argument of `attention`; or a `gen.problem.Problem`, alone.
        *arguments: k, v, and more of its arguments.
        device: Of a problem: a CUDA device or its ordinal; the current one by default.
        **options: The others.

    Raises:
        ValueError: What `attention` would raise.
    """
    if isinstance(q, Problem):
        return _explained(q, ordinal(device))
    from ..attention import problem_of  # which imports this package

    problem = problem_of(q, *arguments, **options)
    if isinstance(problem, str):
        return Explanation(None, None, problem)
    return _explained(problem, q.device.index or 0)


def _explained(problem: Problem, device_index: int) -> Explanation:
    prepare()
    # What lies in the cache is there in a moment, and a search of it is no answer.
    choice = dispatcher.wait_until((problem, device_index), lambda found: found.cause not in _PASSING)
    kernel = choice.kernel
    return Explanation(
        problem,
        kernel.path.stem if kernel else None,
        choice.reason,
        choice.final,
        choice.row,
        kernel.path if kernel else None,
    )


def _times(row: Row) -> str:
    if row.ms is None:
        return "not on such a GPU: it was emulated"
    time = f"{row.ms:.4g} ms at {row.found_for.label}"
    if row.default_kernel == NO_FUSED_BACKWARD:
        return f"{time}; PyTorch has no fused backward of this kind"
    if row.default_ms is None:
        return f"{time}; PyTorch's default was not timed with it"
    kernel = f" ({row.default_kernel})" if row.default_kernel else ""
    return f"{time}, PyTorch's default{kernel} {row.default_ms:.4g} ms: {row.advantage:.2f} times as fast"
