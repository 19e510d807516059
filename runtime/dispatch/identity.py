"""Whether a library is the kernel that was verified and timed: by its machine code, or else by a verification here."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ...gen.build.jobs import Variant
from ...gen.device import HOST, HOST_ARCH, Device
from ...gen.problem import Problem
from .. import gpu
from ..verification import verdicts


class Standing(enum.Enum):
    """What a library is to a row."""

    SAME = "the kernel that was verified and timed"
    OTHER = "another kernel"
    UNPROVEN = "the kernel's text by another compiler or for another target, or the kernel with more before it"


class Unproven(str):
    """Why a library cannot be used yet: it has to be verified, and there is no GPU here to do that on."""

    __slots__ = ()


@dataclass(frozen=True)
class Identity:
    """What tells the kernel that was verified and timed from others.

    Attributes:
        source_hash: Hash of its text.
        machine_code: Hash of its machine code; None where it was stored before there was such a hash.
        toolkit: The nvcc that compiled it.
        arch: The target that it was compiled for.
        stands_in: Whether what is built has the same main kernel and more before it: `records.Row.stands_in`.
    """

    source_hash: str
    machine_code: str | None
    toolkit: str
    arch: str
    stands_in: bool = False

    def standing(self, variant: Variant) -> Standing:
        """What a library of today's text is.

        By machine code, whatever the text. Other machine code by the same compiler for the same target is another
        kernel, which nobody has timed; by another compiler, or for another target, it is unproven. Where one of the two
        hashes is missing the text tells: it always does in a build for the CPU, which has no machine code of a GPU.
        What stands in for another is never the same.
        """
        if self.stands_in:
            return Standing.UNPROVEN
        same_compiler = (variant.toolchain, variant.arch) == (self.toolkit, self.arch) or variant.arch == HOST_ARCH
        if self.machine_code and variant.machine_code:
            if self.machine_code == variant.machine_code:
                return Standing.SAME
        elif variant.source.hash != self.source_hash:
            return Standing.OTHER
        elif same_compiler:
            return Standing.SAME
        return Standing.OTHER if same_compiler else Standing.UNPROVEN

    def known_objection(self, variant: Variant) -> str | None:
        """Why a library cannot be used: empty where it can, None where it has to be verified first. Costs no time.

        Raises:
            BwdtuneError: The library cannot be read.
        """
        standing = self.standing(variant)
        if standing is Standing.SAME:
            return ""
        if standing is Standing.OTHER:
            return "it compiles to another kernel than the one that was timed: search again"
        found = _gpu_of(variant.arch)
        assert variant.library, "a standing is of a library"
        verdict = found and verdicts.known(variant.library, found[1])
        return self._objection(variant, verdict) if verdict else None

    def objection(self, variant: Variant, problem: Problem) -> str:
        """The same, with a verification where none is known: seconds, in a process of its own.

        Args:
            variant: The library.
            problem: Its kind of problem.

        Raises:
            BwdtuneError: The library cannot be read or verified.
        """
        known = self.known_objection(variant)
        if known is not None:
            return known
        found = _gpu_of(variant.arch)
        if found is None:
            return Unproven(f"{self._origin(variant)}: it is verified once, on a GPU, before it is used")
        assert variant.library, "a standing is of a library"
        return self._objection(variant, verdicts.verify(variant.library, problem, found[1], found[0]))

    def _objection(self, variant: Variant, verdict: verdicts.Verdict) -> str:
        return "" if verdict.passed else f"{self._origin(variant)}, and is wrong: {verdict.reason}"

    def _origin(self, variant: Variant) -> str:
        if self.stands_in:
            return "it was timed without the gradient of the log-sum-exp or the sinks"
        if variant.arch != self.arch:
            return f"compiled for {variant.arch} it is other code than for {self.arch}, for which it was timed"
        return f"nvcc {variant.toolchain} compiles it to other code than nvcc {self.toolkit}, with which it was timed"


def _gpu_of(arch: str) -> tuple[int, Device] | None:
    """The first GPU of a target, and CUDA's ordinal of it; None where there is none."""
    if arch == HOST_ARCH:
        return 0, HOST
    return next(((index, device) for index, device in gpu.usable_gpus() if device.arch == arch), None)
