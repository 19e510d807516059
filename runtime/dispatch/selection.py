"""The rule of choice: which rows may compute a problem, in which order. Arithmetic on rows and sizes, nothing else.

The answer depends on the rows, the problem and the GPU, not on what is built already: processes that see the same
database choose the same kernel. docs/dispatch.md has the measurements that the constants come from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...gen.device import Device, alike
from ...gen.families import Config
from ...gen.problem import WINDOW, Problem, distance
from ...gen.space import refusal
from ..gpu import gpu_key
from .records import Cause, Row
from .rows import Rows

ASSUMED_ADVANTAGE = 1.18
"""Over PyTorch's default, of a row whose race did not time that: the least that the README's plain rows have."""

LARGEST_RATIO = 4.0
"""Between a problem's lengths, group and window and those of a row."""

ADVANTAGE_PER_HALVING = 0.887
"""What halving the lengths leaves of the advantage: measured from 1,024 to 512, 1.33 to 1.18."""

_MOST_CACHED = 4096


@dataclass(frozen=True)
class Refusal:
    """Why a row may not compute a problem, or none does.

    Attributes:
        reason: One line.
        cause: Its kind, one of `Cause`.
    """

    reason: str
    cause: str


def candidates(problem: Problem, device: Device, known: Rows) -> Iterator[Row | Refusal]:
    """The rows that may compute a problem, the best first, and among them why others may not.

    Rows for this very problem come first, then the nearest (`gen.problem.distance`). Among equals those of this model
    of GPU come before others of its compute capability or of one with the same SM (`gen.device.alike`), stored winners
    before shipped rows, and those found without another card's limits first. Left out are rows that are invalid for
    these sizes (`gen.space.refusal`), and those whose advantage over PyTorch's default, carried over to this problem,
    is lost (`expected_advantage`). The first row that PyTorch's default was measured to beat ends the list: nearer
    evidence counts.
    """
    gpu = gpu_key(device)
    found = [row for row in known.of_kind(problem) if for_such_a_gpu(row, device)]
    found.sort(key=lambda row: (row.problem != problem, row.gpu != gpu, distance(row.problem, problem)))
    if not found:
        reason = f"no winner is stored for {problem.label} or one like it on {device.name}: run `tuner search`"
        yield Refusal(reason, Cause.NOTHING_STORED)
    too_far = False
    for row in found:
        refused = objection(row, problem, device)
        if refused is None:
            yield row
        elif refused.cause != Cause.OUT_OF_REACH or not too_far:  # of these the nearest is enough to say
            yield refused
        if refused and refused.cause == Cause.SLOWER:
            return
        too_far = too_far or (refused is not None and refused.cause == Cause.OUT_OF_REACH)


def objection(row: Row, problem: Problem, device: Device) -> Refusal | None:
    """Why a row of the same kind and GPU may not compute a problem; None where it may."""
    near = in_reach(row.problem, problem)
    if near and row.advantage is not None and row.advantage <= 1:
        times = f"{row.default_ms:.4g} ms for {row.ms:.4g}"
        return Refusal(f"PyTorch's own was faster at {row.found_for.label}: {times}", Cause.SLOWER)
    if not near or expected_advantage(row, problem, device) <= 1:
        reason = (
            f"the nearest problem with a kernel, {row.found_for.label}, is too far from {problem.label} for "
            "that kernel to be expected to be faster than PyTorch's: run `tuner search`"
        )
        return Refusal(reason, Cause.OUT_OF_REACH)
    if invalid := refusal(problem, row.config, device):
        return Refusal(f"{row.name} cannot be used: {invalid}", Cause.UNUSABLE)
    return None


def for_such_a_gpu(row: Row, device: Device) -> bool:
    """Whether a row is for a GPU: a stored winner for this model, a shipped row for its compute capability."""
    gpu = gpu_key(device)
    return row.gpu == gpu or (row.shipped and row.gpu.capability in alike(gpu.capability))


def in_reach(found_for: Problem, problem: Problem) -> bool:
    """Whether lengths, group and window are within `LARGEST_RATIO` of those that a row was found for."""
    pairs = zip(_extents(found_for), _extents(problem), strict=True)
    return all(1 / LARGEST_RATIO <= a / b <= LARGEST_RATIO for a, b in pairs)


def expected_advantage(row: Row, problem: Problem, device: Device) -> float:
    """How many times as fast as PyTorch's default a row's kernel is expected to be at a problem.

    Its measured advantage, less what two things take of it: shorter lengths (fewer pairs of a query and a key for each
    row that is loaded), and a GPU with less to do than it has SMs. What would make it larger does not count.
    """
    measured = ASSUMED_ADVANTAGE if row.advantage is None else row.advantage
    if row.problem == problem:
        return measured
    halvings = max(0.0, math.log2(_pairs_per_row(row.problem) / _pairs_per_row(problem)))
    busy = busy_share(problem, row.config, device) / busy_share(row.problem, row.config, device)
    return measured * ADVANTAGE_PER_HALVING**halvings * min(1.0, busy)


@functools.lru_cache(_MOST_CACHED)
def busy_share(problem: Problem, config: Config, device: Device) -> float:
    """The part of the SMs that can be kept busy, 0 to 1.

    A block computes a tile of keys of one key head with all queries that see it. So the kernel takes no less than its
    longest item, however many SMs there are: all items together fill at most ``work / longest item`` of them.
    """
    heads = 1 if getattr(config, "split_gqa_heads", False) else problem.heads_q // problem.heads_kv
    longest = min(config.block_kv, problem.seqlen_kv) * _longest_column(problem) * heads
    return min(1.0, problem.heads_q * max(problem.query_key_pairs, 1) / longest / device.sm_count)


def _longest_column(problem: Problem) -> int:
    """Queries that see one key, at most."""
    if problem.mask != WINDOW:
        return problem.seqlen_q
    sides = (problem.window_left, problem.right)
    return problem.seqlen_q if min(sides) < 0 else min(problem.seqlen_q, sum(sides) + 1)


@functools.lru_cache(_MOST_CACHED)
def _pairs_per_row(problem: Problem) -> float:
    return max(problem.query_key_pairs, 1) / max(problem.query_positions, problem.key_positions)


def _extents(problem: Problem) -> tuple[float, ...]:
    seen = _pairs_per_row(problem) if problem.mask == WINDOW else 1
    return problem.seqlen_q, problem.seqlen_kv, problem.heads_q / problem.heads_kv, seen
