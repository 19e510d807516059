"""A row's kernel: found in the cache, or compiled into it, and loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...gen.build.jobs import Variant, build_one, find_built
from ...gen.errors import BwdtuneError
from ...gen.families import Config
from ...gen.problem import UNLIMITED, WINDOW, Problem
from ...gen.render import Source, render
from ..kernel import Kernel
from .records import Row


class UnusableRow(BwdtuneError):
    """A row whose kernel is not, or no longer, what was verified."""


@dataclass(frozen=True)
class Build:
    """What a kernel is built from; the same for all problems of a kind.

    Attributes:
        problem: One problem of the kind.
        config: The configuration.
        source_hash: Hash of the source that was verified.
        arch: The compile target.
    """

    problem: Problem
    config: Config
    source_hash: str
    arch: str

    @classmethod
    def of(cls, row: Row, problem: Problem, arch: str) -> Build:
        """A row's kernel for a problem of its kind."""
        return cls(_any_size(problem), row.config, row.source_hash, arch)

    def source(self) -> Source:
        """The source, which is the one that was verified.

        Raises:
            UnusableRow: It is not.
        """
        source = render(self.problem, self.config)
        if source.hash != self.source_hash:
            raise UnusableRow("its templates have changed since it was verified; search again")
        return source

    def find(self) -> Kernel | None:
        """The kernel, where its library is in the cache. Starts no process.

        Raises:
            BwdtuneError: It cannot be used.
        """
        built = find_built(self.source(), self.arch)
        return _load(built) if built else None

    def make(self) -> Kernel:
        """The kernel, compiled if need be.

        Raises:
            BwdtuneError: It cannot be had.
        """
        return _load(build_one(self.source(), self.arch))


def _load(variant: Variant) -> Kernel:
    assert variant.library, "only what was compiled is loaded"
    return Kernel.load(variant.library)


def _any_size(problem: Problem) -> Problem:
    """One problem for all of a kind."""
    one = problem.resized(batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_kv=1)
    return replace(one, causal=False, window_left=1, window_right=UNLIMITED) if one.mask == WINDOW else one
