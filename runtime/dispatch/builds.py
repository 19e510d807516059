"""The kernel of a row: found in the cache, or compiled into it, and loaded."""

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
from .identity import Identity
from .records import Row


@dataclass(frozen=True)
class Build:
    """What a kernel is built from; the same for all problems of a kind.

    Attributes:
        problem: One problem of the kind.
        config: The configuration.
        identity: What tells the kernel that was verified and timed from others.
        arch: The compile target.
    """

    problem: Problem
    config: Config
    identity: Identity
    arch: str

    @classmethod
    def of(cls, row: Row, problem: Problem, arch: str) -> Build:
        """A row's kernel for a problem of its kind."""
        return cls(_any_size(problem), row.config, row.identity, arch)


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
    """The kernel where its library is in the cache, or why it cannot be used; None where it has to be compiled, or
    verified.

    Starts no process, and raises nothing.
    """
    source = _source(wanted)
    if isinstance(source, str):
        return source
    try:
        for variant in find_built(source, wanted.arch, cache=cache):
            if wanted.identity.known_objection(variant) == "":
                return _loaded(variant)
    except Exception as error:
        return _described(error)
    return None  # the compiler that is here may yet make the kernel


def make(builds: Sequence[Build], *, cache: Path | None = None, jobs: int | None = None) -> dict[Build, Made]:
    """Finds or compiles kernels for one target, several at once, and loads them. Raises nothing.

    What another compiler made than the one that the kernel was timed with is verified first, on a GPU that is here, in
    a process of its own.

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
        made[wanted] = Made(_admitted(wanted, variant), None if variant.cached else variant.seconds)
    return made


def _source(wanted: Build) -> Source | str:
    """The source, or why it cannot be had, or cannot be the kernel."""
    try:
        source = render(wanted.problem, wanted.config)
    except Exception as error:  # whatever a template says of a row of long ago
        return f"it does not render: {_described(error)}"
    identity = wanted.identity
    if source.hash != identity.source_hash and identity.machine_code is None and not identity.stands_in:
        return "its text has changed since it was verified, and its machine code is not known: search again"
    return source


def _admitted(wanted: Build, variant: Variant) -> Kernel | str:
    """The kernel of a library that may be used, or why it may not."""
    try:
        objection = wanted.identity.objection(variant, wanted.problem) if variant.library else ""
    except Exception as error:
        return _described(error)
    return objection or _loaded(variant)


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
