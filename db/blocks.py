"""What a database has to hand on of a problem, free of its ids: the same in every database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from ..gen.problem import Problem
from .records import EmulatedBest, MeasurementRecord, StoredSearch, VariantRecord, VerificationRecord, Winner

if TYPE_CHECKING:
    from .store import Store


@dataclass(frozen=True)
class Timed:
    """A measurement.

    Attributes:
        record: The times, and where and how they were taken.
        created_at: UTC.
        search: The uid of the search that took it, where there is one.
        wins: Whether its kernel is the winner by it, or the best emulated one: after a ``whole`` search, or a
            ``partial`` one, which was interrupted; None where it does not win.
    """

    record: MeasurementRecord
    created_at: datetime
    search: str | None
    wins: Literal["whole", "partial"] | None


@dataclass(frozen=True)
class Kernel:
    """A kernel, and what was measured of it at one problem.

    Attributes:
        variant: The kernel.
        verification: The newest verdict on it at the problem, where that is a pass.
        timed: Oldest first.
    """

    variant: VariantRecord
    verification: VerificationRecord | None
    timed: tuple[Timed, ...]


@dataclass(frozen=True)
class Block:
    """All that is handed on about a problem.

    Attributes:
        problem: The problem.
        searches: Oldest first; without their ids and studies, which stay where they are.
        kernels: By configuration, target, compiler and source.
    """

    problem: Problem
    searches: tuple[StoredSearch, ...]
    kernels: tuple[Kernel, ...]


def read_blocks(store: Store, problems: Collection[Problem] | None = None) -> list[Block]:
    """What a database has to hand on, by problem, in an order that does not depend on the database's.

    Measurements that it was handed itself, and whose kernel nobody has verified here, are no part of it. Neither is
    what did not compile or was wrong, which another machine finds out for itself.

    Args:
        store: The database.
        problems: Those that are wanted; None for all.
    """
    bests: dict[int | None, Winner | EmulatedBest] = {}
    bests.update((one.measurement_id, one) for one in store.winners())
    bests.update((one.measurement_id, one) for one in store.emulated_bests())
    searches, uids = defaultdict(list), {}
    for search in store.searches():
        kept = replace(search, id=0, record=replace(search.record, study=""))
        searches[search.record.problem].append(kept)
        uids[search.id] = search.uid
    kernels: dict[Problem, dict[int, list[Timed]]] = defaultdict(lambda: defaultdict(list))
    variants: dict[tuple[Problem, int], tuple[VariantRecord, VerificationRecord | None]] = {}
    for one in store.measurements():
        if not one.trusted:
            continue
        won = bests.get(one.id)
        wins: Literal["whole", "partial"] | None = ("partial" if won.partial else "whole") if won else None
        search_uid = uids.get(one.search_id) if one.search_id is not None else None
        kernels[one.problem][one.variant_id].append(Timed(one.record, one.created_at, search_uid, wins))
        variants[one.problem, one.variant_id] = (one.variant, one.verification if one.verified else None)
    blocks = []
    for problem in sorted(searches.keys() | kernels.keys()):
        if problems is not None and problem not in problems:
            continue
        found = [
            Kernel(*variants[problem, variant_id], tuple(sorted(timed, key=_timed_order)))
            for variant_id, timed in kernels[problem].items()
        ]
        blocks.append(
            Block(
                problem,
                tuple(sorted(searches[problem], key=lambda search: (search.started_at, search.uid))),
                tuple(sorted(found, key=lambda kernel: _kernel_order(kernel.variant))),
            )
        )
    return blocks


def _kernel_order(variant: VariantRecord) -> tuple[str, ...]:
    return variant.config.id, variant.arch, variant.toolchain, variant.source_hash


def _timed_order(timed: Timed) -> tuple[object, ...]:
    record = timed.record
    return timed.created_at, record.environment.gpu.name, record.policy, record.limits or "", record.median_ms
