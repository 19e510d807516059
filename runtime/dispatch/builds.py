"""A row's kernel: found in the cache, or compiled into it, and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...gen.build.jobs import Variant, build, find_built
from ...gen.errors import BwdtuneError
from ...gen.families import Config
from ...gen.problem import UNLIMITED, WINDOW, Problem
from ...gen.render import Source, render
from ..kernel import Kernel
from .records import Row


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


@dataclass(frozen=True)
class Made:
    """What came of a `Build`.

    Attributes:
        kernel: The kernel, or one line that says why there is none.
        seconds: How long it took to compile; None where nothing was.
    """

    kernel: Kernel | str
    seconds: float | None = None


def find(wanted: Build, *, cache: Path | None = None) -> Kernel | str | None:
    """The kernel where its library is in the cache, or why it cannot be used; None where it has to be compiled.

    Starts no process, and raises nothing.
    """
    try:
        source = _source(wanted)
        variant = None if isinstance(source, str) else find_built(source, wanted.arch, cache=cache)
    except Exception as error:
        return _described(error)
    if isinstance(source, str):
        return source
    return _loaded(variant) if variant else None


def make(builds: Sequence[Build], *, cache: Path | None = None, jobs: int | None = None) -> dict[Build, Made]:
    """Finds or compiles kernels for one target, several at once, and loads them. Raises nothing.

    Args:
        builds: What is wanted.
        cache: The cache directory; see `gen.paths.cache_dir`.
        jobs: Compiles at once; see `gen.build.limits.job_limit` for the default.
    """
    made: dict[Build, Made] = {}
    absent: dict[Build, Source] = {}
    for wanted in builds:
        found = find(wanted, cache=cache)
        source = _source(wanted) if found is None else ""
        if isinstance(source, str):
            made[wanted] = Made(found or source)
        else:
            absent[wanted] = source
    if not absent:
        return made
    try:
        variants = build(list(absent.values()), builds[0].arch, cache=cache, jobs=jobs)
    except Exception as error:
        return made | {wanted: Made(_described(error)) for wanted in absent}
    for wanted, variant in zip(absent, variants, strict=True):
        made[wanted] = Made(_loaded(variant), None if variant.cached else variant.seconds)
    return made


def _source(wanted: Build) -> Source | str:
    """The source that was verified, or why it cannot be had."""
    try:
        source = render(wanted.problem, wanted.config)
    except Exception as error:  # whatever a template says of a row of long ago
        return f"it does not render: {_described(error)}"
    if source.hash != wanted.source_hash:
        return "its templates have changed since it was verified; search again"
    return source


def _loaded(variant: Variant) -> Kernel | str:
    if not variant.library:
        log = f" (log: {variant.log})" if variant.log else ""
        return f"{variant.source.name} was not compiled for {variant.arch}: {variant.error}{log}"
    try:
        return Kernel.load(variant.library)
    except Exception as error:
        return _described(error)


def _described(error: Exception) -> str:
    """One line. What is caught here is anything: a training step goes on without this kernel."""
    text = " ".join(str(error).split())
    return text if text and isinstance(error, BwdtuneError) else f"{type(error).__name__}: {text}"


def _any_size(problem: Problem) -> Problem:
    """One problem for all of a kind."""
    one = problem.resized(batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_kv=1)
    return replace(one, causal=False, window_left=1, window_right=UNLIMITED) if one.mask == WINDOW else one
