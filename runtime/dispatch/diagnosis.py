"""`diagnose`: why a problem has no kernel: the rows nearest to it, and what excludes each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...gen.build.jobs import find_built
from ...gen.build.toolchain import ToolchainError, find_compiler
from ...gen.device import Device
from ...gen.errors import BwdtuneError
from ...gen.problem import VALUE_HEAD_DIM, WINDOW, Problem, distance
from ...gen.render import render
from ..gpu import gpu_key
from . import builds
from .builds import Build
from .records import Choice, Row
from .resolution import Progress, State, resolve
from .rows import Rows
from .selection import for_such_a_gpu, objection

NEARBY = 5

_SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv")
_MASK = ("causal", "window_left", "window_right")
_HEAD_DIMS = ("head_dim", VALUE_HEAD_DIM)
_KIND_FIELDS = ("mask", *(name for name in Problem.stored_names() if name not in (*_SIZES, *_MASK, *_HEAD_DIMS)))
"""What a kernel is generated for; sizes, and the limits of a window, are arguments."""


@dataclass(frozen=True)
class Difference:
    """Something that a row has otherwise than a problem, or than this machine.

    Attributes:
        name: Of what: a field of the problem, ``GPU``, ``nvcc``, ``source`` or ``machine code``.
        stored: The row's.
        here: The problem's, or this machine's.
        excludes: Whether the row's kernel can therefore not be used; else it is a matter of degree.
    """

    name: str
    stored: str
    here: str
    excludes: bool


@dataclass(frozen=True)
class Nearby:
    """A row near a problem.

    Attributes:
        row: The row.
        differences: What it has otherwise; what excludes it first.
        obstacle: Where none of them excludes it: why it may not be used all the same; empty where it may.
    """

    row: Row
    differences: tuple[Difference, ...]
    obstacle: str


@dataclass(frozen=True)
class Diagnosis:
    """How a problem's backward would be computed on a card, and what it misses.

    Attributes:
        problem: The problem.
        device: The card.
        choice: What dispatch would choose; not final where the kernel has to be compiled, or verified, first.
        nearby: The nearest rows.
    """

    problem: Problem
    device: Device
    choice: Choice
    nearby: tuple[Nearby, ...]


def diagnose(problem: Problem, device: Device, known: Rows, *, cache: Path | None = None) -> Diagnosis:
    """Looks up a problem as dispatch does, compiles and verifies nothing, and says what the nearest rows lack.

    Args:
        problem: The problem.
        device: The card, which need not be here.
        known: The rows.
        cache: The cache directory; see `gen.paths.cache_dir`.
    """

    def state_of(build: Build, row: Row) -> State:
        return builds.find(build, cache=cache) or Progress.BUILT

    choice = resolve(problem, device, known, state_of)
    found = sorted(known.rows, key=lambda row: _order(row, problem, device))
    return Diagnosis(problem, device, choice, tuple(_nearby(row, problem, device, cache) for row in found[:NEARBY]))


def _order(row: Row, problem: Problem, device: Device) -> tuple[object, ...]:
    different = sum(one.excludes for one in _differences(row, problem, device))
    return different, distance(row.problem, problem), row.shipped, row.limits or "", row.problem, row.config.id


def _nearby(row: Row, problem: Problem, device: Device, cache: Path | None) -> Nearby:
    differences = _differences(row, problem, device)
    obstacle = ""
    if not any(one.excludes for one in differences):
        refused = objection(row, problem, device)
        obstacle = refused.reason if refused else ""
        differences += _of_the_kernel(row, problem, device, cache)
    return Nearby(row, tuple(sorted(differences, key=lambda one: not one.excludes)), obstacle)


def _differences(row: Row, problem: Problem, device: Device) -> list[Difference]:
    """What of the key differs. Fields that a kernel is generated for exclude, and so does another kind of GPU."""
    found: list[Difference] = []

    def add(name: str, stored: object, here: object, excludes: bool) -> None:
        if stored != here:
            found.append(Difference(name, str(stored), str(here), excludes))

    if not for_such_a_gpu(row, device):
        gpu = gpu_key(device)
        add("GPU", f"{row.gpu.name} ({row.gpu.capability})", f"{gpu.name} ({gpu.capability})", True)
    theirs = row.problem
    add("head_dim", theirs.head_dims, problem.head_dims, True)
    for name in _KIND_FIELDS:
        add(name, getattr(theirs, name), getattr(problem, name), True)
    for name in _SIZES:
        add(name, getattr(theirs, name), getattr(problem, name), False)
    if theirs.mask == problem.mask == WINDOW:
        stored, here = (f"{one.window_left},{one.right}" for one in (theirs, problem))
        add("window", stored, here, False)
    return found


def _of_the_kernel(row: Row, problem: Problem, device: Device, cache: Path | None) -> list[Difference]:
    """What today's text and this machine's compiler make of a row's kernel, as far as the cache knows."""
    found = []
    try:
        source = render(problem, row.config)
    except BwdtuneError as error:
        return [Difference("source", "rendered", f"does not render: {error}", True)]
    if source.hash != row.source_hash:
        # Without its machine code a kernel is known by its text alone.
        found.append(Difference("source", row.source_hash, source.hash, row.machine_code is None))
    try:
        here = find_compiler(device.arch).version
    except ToolchainError:
        here = "none"
    if row.toolkit and row.toolkit != here:
        found.append(Difference("nvcc", row.toolkit, here, False))
    made = [variant for variant in find_built(source, device.arch, cache=cache) if variant.toolchain == here]
    code = made[0].machine_code if made else None
    if row.machine_code and code and code != row.machine_code:
        excludes = (row.toolkit, row.gpu.arch) == (here, device.arch)
        found.append(Difference("machine code", row.machine_code, code, excludes))
    return found
