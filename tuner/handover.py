"""What another database hands over comes into this one: its times as claims, its winners after a verification here.

``tuner db import`` and ``tuner db merge`` are this, from a file and from a database.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..db.adoption import Contender, adopt, trust_verdict
from ..db.blocks import Block
from ..db.evidence import Judgement, compare, same_kernel
from ..db.records import EMULATED, EmulatedBest, VerificationRecord, Winner
from ..gen.build.jobs import Variant, build
from ..gen.device import HOST, Device
from ..gen.errors import BwdtuneError
from ..gen.render import render
from ..runtime.dispatch.identity import Identity, Standing
from ..runtime.gpu import gpu_uuid, usable_gpus
from .lab.gate import verify_fully
from .lab.gpu_client import Worker
from .lab.gpu_lock import gpu_lock
from .lab.protocol import Bench
from .search.search_store import variant_record

if TYPE_CHECKING:
    from ..db.store import Store


class Fate(Enum):
    """What became of a winner of another database."""

    WINS = "wins here"
    KNOWN = "known"
    KEPT = "the present one stays"
    CONFLICT = "conflict"
    UNVERIFIED = "not verified"

    @property
    def settled(self) -> bool:
        """Whether nobody has to do anything about it."""
        return self in (Fate.WINS, Fate.KNOWN, Fate.KEPT)


@dataclass(frozen=True)
class Settled:
    """A winner of another database, and what became of it here.

    Attributes:
        contender: The winner.
        fate: What became of it.
        reason: Why, in one line.
    """

    contender: Contender
    fate: Fate
    reason: str


@dataclass
class Handover:
    """What came of it all.

    Attributes:
        searches: Searches that were not known.
        measurements: Measurements that were not known.
        settled: The winners.
        conflicts: What contradicts this database and was left out, a line each.
    """

    searches: int = 0
    measurements: int = 0
    settled: list[Settled] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Examination:
    """A kernel, examined here.

    Attributes:
        variant: What this machine's compiler makes of it.
        same: Whether that is the machine code that was timed.
        verdicts: On that; all passed but the last, perhaps.
    """

    variant: Variant
    same: bool
    verdicts: tuple[VerificationRecord, ...]


class Examiner(Protocol):
    """Verifies a kernel here."""

    def __call__(self, contender: Contender) -> Examination | str:
        """The examination, or why there can be none."""


def hand_over(store: Store, blocks: Iterable[Block], examine: Examiner | None) -> Handover:
    """Takes over what another database has to hand on. Once more, it changes nothing.

    Args:
        store: Takes it.
        blocks: What there is.
        examine: Verifies what would win; None trusts the verdicts and the times of the other database.
    """
    handover = Handover()
    for block in blocks:
        adopted = adopt(store, block, trusted=examine is None)
        handover.searches += adopted.searches
        handover.measurements += adopted.measurements
        handover.conflicts += adopted.conflicts
        handover.settled += [Settled(one, *_settle(store, one, examine)) for one in adopted.contenders]
    return handover


def _settle(store: Store, contender: Contender, examine: Examiner | None) -> tuple[Fate, str]:
    present = _present(store, contender)
    objection = _objection(store, contender, present) if present else None
    if objection:
        return objection
    verification_id, why_not = contender.verification_id, ""
    if examine:
        verification_id, why_not = _verified(store, contender, examine)
    if verification_id is None:
        return Fate.UNVERIFIED, why_not or "it comes without a passing verification"
    partial = contender.timed.wins == "partial"
    store.adopt_best(contender.problem, contender.timed.record, contender.measurement_id, verification_id, partial)
    trusted = "verified here" if examine else "trusted"
    return Fate.WINS, f"{trusted}; {f'in place of {present.config.id}' if present else 'there was none'}"


def _present(store: Store, contender: Contender) -> Winner | EmulatedBest | None:
    record, problem = contender.timed.record, contender.problem
    if record.kind == EMULATED:
        return store.emulated_best(problem, record.environment.gpu, record.limits or "")
    return store.winner(problem, record.environment.gpu, record.limits)


def _objection(store: Store, contender: Contender, present: Winner | EmulatedBest) -> tuple[Fate, str] | None:
    """Why the present winner stays; None where it gives way."""
    if present.measurement_id == contender.measurement_id:
        return Fate.KNOWN, "it is the winner here"
    measurements = {one.id: one for one in store.measurements(contender.problem)}
    mine, its = measurements[contender.measurement_id], measurements[present.measurement_id or 0]
    better_search = present.partial and contender.timed.wins == "whole"
    if same_kernel(mine) == same_kernel(its):
        return None if better_search else (Fate.KEPT, "the same kernel is the winner here")
    cards = {search.id: search.record.gpu_uuid for search in store.searches(contender.problem)}
    evidence = compare(mine, its, measurements.values(), cards)
    if evidence.judgement is Judgement.BETTER:
        return None
    if evidence.judgement is not Judgement.UNKNOWN:
        return Fate.KEPT, f"{its.variant.config.id} is no slower: {evidence.reason}"
    race = f"tuner bench {' '.join(contender.problem.options)} --kernel best --kernel {mine.variant.config.id}"
    return Fate.CONFLICT, f"{its.variant.config.id} stays: {evidence.reason}; `{race}` compares them"


def _verified(store: Store, contender: Contender, examine: Examiner) -> tuple[int | None, str]:
    """The id of a passing verification of a contender here, or why there is none."""
    found = examine(contender)
    if isinstance(found, str):
        return None, found
    problem, verification_id = contender.problem, None
    variant_id = contender.variant_id
    if not found.same:
        variant_id = store.record_variant(problem, variant_record(problem, found.variant))
    for verdict in found.verdicts:
        verification_id = store.record_verification(problem, variant_id, verdict)
        if not verdict.passed:
            return None, f"its gradients are wrong here: {verdict.reason}"
    if not found.same:
        # What was timed is another compiler's machine code: it won there, and what runs here is right (identity.md).
        if contender.verification_id is None and contender.kernel.verification is None:
            return None, "it comes without a passing verification of the machine code that was timed"
        verification_id = contender.verification_id or trust_verdict(store, contender)
    return verification_id, ""


class GpuExaminer:
    """Verifies kernels on the GPU that they are for, in a process of its own. Use it as a context manager.

    Args:
        notice: Is told what takes a while.
        cache: Where builds are kept; None for the usual place.
    """

    def __init__(self, notice: Callable[[str], None], *, cache: Path | None = None) -> None:
        self._notice, self._cache = notice, cache
        self._stack = contextlib.ExitStack()
        self._benches: dict[int, Bench] = {}

    def __enter__(self) -> GpuExaminer:
        return self

    def __exit__(self, *unused: object) -> None:
        self._stack.close()

    def __call__(self, contender: Contender) -> Examination | str:
        record, kernel = contender.timed.record, contender.kernel
        found = _card_of(record.environment.gpu.name, kernel.variant.arch)
        if found is None:
            return f"no {record.environment.gpu.name} is here to verify it on: take it over on one, or with --trust"
        index, device = found
        try:
            emulate = record.limits if record.kind == EMULATED else None
            source = render(contender.problem, kernel.variant.config, emulate=emulate, card=device)
            if kernel.variant.machine_code is None and kernel.variant.source_hash != source.hash:
                return "its text has changed since it was timed, and its machine code is not known: search again"
            self._notice(f"compiling and verifying {kernel.variant.config.id} for {contender.problem.label}")
            (variant,) = build([source], device.arch, cache=self._cache)
            if not variant.library:
                return f"it does not compile here: {variant.error}"
            stored = kernel.variant
            identity = Identity(stored.source_hash, stored.machine_code, stored.toolchain, stored.arch)
            standing = identity.standing(variant)
            if standing is Standing.OTHER:
                return (
                    "this version makes another kernel of its configuration than the one that was timed: search again"
                )
            full_size = device is not HOST  # for which a CPU is too slow
            verdicts = verify_fully(self._bench(index, device), contender.problem, variant, full_size=full_size)
        except BwdtuneError as error:
            return str(error)
        return Examination(variant, standing is Standing.SAME, verdicts)

    def _bench(self, index: int, device: Device) -> Bench:
        if index not in self._benches:
            self._benches[index] = self._stack.enter_context(self._opened(index, device))
        return self._benches[index]

    @contextmanager
    def _opened(self, index: int, device: Device) -> Iterator[Bench]:
        lock: AbstractContextManager[None] = contextlib.nullcontext()
        if device is not HOST:  # nothing is to run beside what somebody measures
            lock = gpu_lock(gpu_uuid(index), self._notice)
        with lock, Worker("cpu" if device is HOST else f"cuda:{index}") as worker:
            yield worker


def _card_of(name: str, arch: str) -> tuple[int, Device] | None:
    """The first GPU here of a model and a target, and CUDA's ordinal of it."""
    if (name, arch) == (HOST.name, HOST.arch):
        return -1, HOST
    fitting = ((index, device) for index, device in usable_gpus() if (device.name, device.arch) == (name, arch))
    return next(fitting, None)
