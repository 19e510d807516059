"""The rows among which dispatch chooses, and its answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...db.records import NO_FUSED_BACKWARD, GpuKey
from ...gen.families import Config
from ...gen.problem import Problem
from ..kernel import Kernel
from .identity import Identity


@dataclass(frozen=True)
class Row:
    """A configuration that was verified and timed for a problem: a stored winner, or one that is shipped.

    Attributes:
        problem: What it was found for.
        config: The configuration.
        source_hash: Hash of the source that was verified.
        gpu: The kind of GPU that it is for.
        ms: Its measured time; None where it was emulated.
        default_ms: The time of PyTorch's default backward in the same race; None where it was not taken.
        default_kernel: The kernel that PyTorch chose by default (`db.records.NO_FUSED_BACKWARD`: it has none).
        shipped: Whether this version ships it; else it is a stored winner.
        limits: The card whose limits its search kept to, if any.
        origin: Where it was measured, in a few words; empty for a stored winner.
        machine_code: Hash of the machine code that was verified and timed; None in what was stored before there was
            such a hash.
        toolkit: The nvcc that compiled it.
        stands_in: Whether it was found for the problem without what `gen.problem.OF_ROWS` names, whose main kernel is
            the same one; `problem` has what is asked for.
    """

    problem: Problem
    config: Config
    source_hash: str
    gpu: GpuKey
    ms: float | None
    default_ms: float | None = None
    default_kernel: str | None = None
    shipped: bool = False
    limits: str | None = None
    origin: str = ""
    machine_code: str | None = None
    toolkit: str = ""
    stands_in: bool = False

    @property
    def found_for(self) -> Problem:
        """The problem that it was verified and timed for."""
        return self.problem.without_row_features if self.stands_in else self.problem

    @property
    def identity(self) -> Identity:
        """What tells its kernel from others."""
        return Identity(self.source_hash, self.machine_code, self.toolkit, self.gpu.arch, self.stands_in)

    @property
    def name(self) -> str:
        """What it is, for people."""
        if not self.shipped:
            return f"the winner of {self.found_for.label}"
        return f"the configuration that is shipped for {self.found_for.label} on {self.gpu.name} ({self.origin})"

    @property
    def advantage(self) -> float | None:
        """How many times as fast as PyTorch's default it was: infinitely where PyTorch has no fused kernel for such a
        problem, None where nobody has measured it."""
        if self.default_kernel == NO_FUSED_BACKWARD:
            return math.inf
        return self.default_ms / self.ms if self.ms and self.default_ms else None


class Cause:
    """Why PyTorch's backward computes a problem: a few fixed phrases, to count by."""

    INPUT = "no kernel takes the input"
    NO_GPU = "no usable GPU"
    READING = "stored winners are being read"
    NOTHING_STORED = "nothing is stored or shipped"
    OUT_OF_REACH = "nothing near enough is stored"
    SLOWER = "PyTorch was measured to be faster"
    LOADING = "the kernel is being loaded"
    BUILDING = "the kernel is being built"
    UNPROVEN = "the kernel has to be verified on a GPU"
    UNUSABLE = "the kernel cannot be used"


@dataclass(frozen=True)
class Choice:
    """What computes a problem.

    Attributes:
        kernel: Ready to be launched; None where PyTorch's backward has to do.
        reason: One line: whose winner it is, or that it is shipped and where it comes from, or why there is none.
        final: Whether it stays so. Not while the stored winners are being read or the kernel is being built in the
            background: PyTorch's backward serves meanwhile. Subscribers are told when that ends (`subscribe`).
        cause: Where there is no kernel, the kind of reason, one of `Cause`.
        row: Where the kernel comes from, or would.
    """

    kernel: Kernel | None
    reason: str
    final: bool = True
    cause: str = ""
    row: Row | None = None
