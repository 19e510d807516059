"""Which kernel computes a problem here: asks the database for the winner and compiles it on first use.

Where nothing stored can be used, this version's own table of configurations is asked (`db.shipped`).
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..db.shipped import Shipped, read_shipped
from ..gen.build.jobs import build_one
from ..gen.config import Config
from ..gen.device import Device
from ..gen.errors import BwdtuneError
from ..gen.problem import UNLIMITED, WINDOW, Problem, distance
from ..gen.render import render
from ..gen.space import refusal
from .gpu import current_device, gpu_key
from .kernel import Kernel

if TYPE_CHECKING:
    from ..db.records import Winner

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """What computes a problem.

    Attributes:
        kernel: Ready to be launched; None where PyTorch's backward has to do.
        reason: One line: whose winner it is, or that it is shipped and where it comes from, or why there is none.
    """

    kernel: Kernel | None
    reason: str


def choose(problem: Problem, device_index: int) -> Choice:
    """The kernel of the stored winner, compiled into the cache on first use.

    The problem's own winner on this kind of GPU comes first. Where there is none, or it cannot be used, winners of the
    same kind (dtype, head_dim, mask and what else kernels are generated for) follow, the nearest first: the distance is
    the sum of ``|log2(ratio)|`` of Sq, of Skv, of B * Hq, of Hq / Hkv, and of a query's keys in a window. A winner can
    be used if its configuration is valid for this problem's sizes, and its source is, letter for letter, the one that
    was verified.

    After all of these come the shipped configurations for this kind of GPU (its compute capability; the same model
    first), by the same rules: what a user has found comes first.

    The database is read once in a process, and a problem decided once; later calls cost a dictionary's lookup. Safe
    between threads, and after a fork. Trouble with the database, the compiler or the cache is a reason, never an
    exception.

    Args:
        problem: What is to be computed.
        device_index: CUDA's ordinal of the GPU.
    """
    key = (problem, device_index)
    found = _choices.get(key)
    if found is None:
        with _State.lock:
            found = _choices.get(key)
            if found is None:
                found = _choices[key] = _choose(problem, device_index)
    return found


def forget() -> None:
    """Has the database read again: winners that were stored meanwhile count from now on."""
    with _State.lock:
        _choices.clear()
        _winners.cache_clear()
        _shipped.cache_clear()
        _compiled.cache_clear()


class _State:
    """The lock, where a fork can replace it: one that another thread holds is never released in the child."""

    lock = threading.Lock()


def _after_fork() -> None:
    _State.lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
_choices: dict[tuple[Problem, int], Choice] = {}


def _choose(problem: Problem, device_index: int) -> Choice:
    try:
        device = current_device(device_index)
    except BwdtuneError as error:
        return Choice(None, str(error))
    stored, reason = _winners()
    for winner in _nearest(problem, device, stored):
        name = f"the winner of {winner.problem.label}"
        kernel = _usable(problem, device, winner.config, winner.source_hash)
        if isinstance(kernel, Kernel):
            return Choice(kernel, name)
        reason = reason or f"{name} cannot be used: {kernel}"
    for row in _nearest_shipped(problem, device):
        name = f"the configuration that is shipped for {row.problem.label} on {row.gpu.name} ({row.origin})"
        kernel = _usable(problem, device, row.config, row.source_hash)
        if isinstance(kernel, Kernel):
            _log.info("%s is computed by %s%s", problem.label, name, f": {reason}" if reason else "")
            return Choice(kernel, name)
        reason = reason or f"{name} cannot be used: {kernel}"
    return Choice(
        None,
        reason or f"no winner is stored for {problem.label} or one like it on {device.name}: run `tuner search`",
    )


@functools.cache
def _winners() -> tuple[tuple[Winner, ...], str]:
    """All that are stored, and where they cannot be read the reason."""
    from ..db.errors import NoDatabase
    from ..db.store import Store  # SQLAlchemy is loaded by those who need it

    try:
        store = Store.open(read_only=True)
        try:
            return tuple(store.winners()), ""
        finally:
            store.close()
    except NoDatabase:  # as good as an empty one
        return (), ""
    except (BwdtuneError, OSError) as error:
        return (), str(error)


def _nearest(problem: Problem, device: Device, stored: tuple[Winner, ...]) -> list[Winner]:
    """The winners of this kind of problem on this kind of GPU, the problem's own first."""
    gpu = gpu_key(device)
    return sorted(
        (winner for winner in stored if winner.environment.gpu == gpu and winner.problem.kind == problem.kind),
        # Of two for the same problem the one that was found without another card's limits.
        key=lambda winner: (winner.problem != problem, distance(winner.problem, problem), winner.limits is not None),
    )


@functools.cache
def _shipped() -> tuple[Shipped, ...]:
    return read_shipped()


def _nearest_shipped(problem: Problem, device: Device) -> list[Shipped]:
    """The shipped rows of this kind of problem and of GPU, those for the same model and the problem's own first."""
    gpu = gpu_key(device)
    return sorted(
        (row for row in _shipped() if row.gpu.capability == gpu.capability and row.problem.kind == problem.kind),
        key=lambda row: (row.gpu != gpu, row.problem != problem, distance(row.problem, problem)),
    )


def _usable(problem: Problem, device: Device, config: Config, source_hash: str) -> Kernel | str:
    """The kernel of a configuration that was verified as this source, or why this problem cannot have it."""
    reason = refusal(problem, config, device)
    if reason:
        return reason
    kernel = _compiled(_any_size(problem), config, source_hash, device.arch)
    if isinstance(kernel, Kernel):
        try:  # it refuses sizes that it cannot count
            kernel.workspace_bytes(
                problem.batch, problem.heads_q, problem.heads_kv, problem.seqlen_q, problem.seqlen_kv, problem.positions
            )
        except BwdtuneError as error:
            return str(error)
    return kernel


@functools.cache
def _compiled(problem: Problem, config: Config, source_hash: str, arch: str) -> Kernel | str:
    """A kernel that was verified, compiled and loaded; or why there is none."""
    source = render(problem, config)
    if source.hash != source_hash:
        return "its templates have changed since it was verified; search again"
    _log.info("compiling %s for %s, if the cache does not have it", source.name, arch)
    try:
        variant = build_one(source, arch)
        assert variant.library, "build_one raises where there is none"
        return Kernel.load(variant.library)
    except (BwdtuneError, OSError) as error:
        return str(error)


def _any_size(problem: Problem) -> Problem:
    """One problem for all of a kind."""
    one = problem.resized(batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_kv=1)
    return replace(one, causal=False, window_left=1, window_right=UNLIMITED) if one.mask == WINDOW else one
