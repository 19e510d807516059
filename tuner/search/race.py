"""The race that ends a search: finalists, presets and PyTorch's own kernels, timed side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

from ...db.errors import InvalidRecord
from ...db.records import NO_FUSED_BACKWARD, VerificationRecord
from ...gen.build.jobs import CompiledResources, Variant
from ...gen.families import PRESETS, Config, short_form
from ..lab.gate import verify_fully
from ..lab.paired import Ratio
from ..lab.peers import DEFAULT, PEERS
from ..lab.pool import Answered
from ..lab.protocol import Bench, CandidateError
from ..lab.timing import RACE_POLICY, Policy, Timings
from .candidates import CandidateSearch, Compiled
from .rows import Row
from .search_store import SearchStore

FINALISTS = 4


@dataclass(frozen=True)
class _Racer:
    """A variant in the final race, verified at the problem's own sizes.

    Attributes:
        row: Its line in the table, without a time.
        variant: What runs.
        variant_id: Its id in the store.
        verification_id: That of its verification.
        may_win: Whether it is more than a point of reference.
    """

    row: Row
    variant: Variant
    variant_id: int
    verification_id: int
    may_win: bool

    @property
    def config(self) -> Config:
        return self.variant.source.config


class FinalRace:
    """Times the best few of a search again, and stores the fastest of ours as the winner.

    Args:
        search: Compiles, waits, tells of the race, and has the benches: all run on one card.
        store: Where times and the winner go.
        costs: What the search measured, or knows from earlier ones: each configuration's time or cycles.
        unfit: What it found wrong or refused, with the reason.

    Attributes:
        record: What is kept of the race beside its times; empty until it was run.
    """

    def __init__(
        self,
        search: CandidateSearch,
        store: SearchStore,
        costs: Mapping[Config, float],
        unfit: Mapping[Config, str],
    ) -> None:
        self._search, self._store = search, store
        self._costs, self._unfit = costs, unfit
        self._policy = search.options.timing.applied_to(RACE_POLICY).of(search.problem)
        self.record: dict[str, Any] = {}

    def run(self) -> tuple[list[Row], Row | None]:
        """Returns a row for each that ran, should have run, or is PyTorch's, fastest first; and the winner's."""
        search = self._search
        racers, rows = self._racers()
        peers = () if search.options.emulate else tuple(PEERS)
        timings: Timings | None = None
        excused = False
        while racers and timings is None:
            search.tell(f"racing {len(racers)} finalists and presets")
            try:
                (answer,) = search.on_benches("time", self._heat(racers, peers))
                timings = answer.get()
            except CandidateError as error:
                if error.fault.maybe_from_outside and not excused:
                    excused = True
                    search.notice(f"{error} in the race: all run once more")
                    continue
                fallen = [racer for racer in racers if racer.config.id == error.candidate] or racers
                rows += [replace(racer.row, note=str(error)) for racer in fallen]
                racers = [racer for racer in racers if racer not in fallen]
        if timings is None:
            search.notes.append("no candidate passed every gate and could be timed: there is no winner")
            return rows, None
        if timings.notice:
            search.notice(timings.notice)
        rows += [_peer_row(name, timings) for name in peers]
        ranked, winner = self._rank(racers, timings)
        if winner and not search.options.emulate:
            search.notes.append(_beside_default(winner, timings))
        rows = [*rows, *ranked]
        if winner and winner.config:
            by_name = {row.config.id if row.config else row.kernel: row for row in rows if row.timing}
            ratios = {name: timings.ratio(name, winner.config.id) for name in by_name}
            beside = {id(row): replace(row, ratio=ratios[name]) for name, row in by_name.items()}
            rows, winner = [beside.get(id(row), row) for row in rows], beside.get(id(winner), winner)
            self.record = _race_record(winner, ratios, timings, self._policy)
        return sorted(rows, key=lambda row: row.ms or row.cycles or math.inf), winner

    def _heat(self, racers: list[_Racer], peers: Sequence[str]) -> Callable[[Bench], Timings]:
        problem, variants = self._search.problem, [racer.variant for racer in racers]
        return lambda bench: bench.time(problem, variants, peers, self._policy)

    def _rank(self, racers: list[_Racer], timings: Timings) -> tuple[list[Row], Row | None]:
        """Stores the times and the winner; returns the racers' rows, and the winner's."""
        search, emulated = self._search, self._search.options.emulate is not None
        rows: dict[Config, Row] = {}
        stored: dict[Config, int] = {}
        for racer in sorted(racers, key=lambda racer: timings.cost(racer.config.id, by_cycles=emulated)):
            try:
                stored[racer.config] = self._store.record_timing(racer.variant_id, racer.config, timings, self._policy)
            except InvalidRecord as error:
                rows[racer.config] = replace(racer.row, note=str(error))
                continue
            if emulated:
                counted = timings.cycles[racer.config.id]
                rows[racer.config] = racer.row.with_cycles(counted, search.problem, search.device)
            else:
                rows[racer.config] = replace(racer.row, timing=timings[racer.config.id])
        eligible = [racer for racer in racers if racer.may_win and racer.config in stored]
        if not eligible:
            return list(rows.values()), None
        chosen = self._chosen(eligible, timings)
        row = rows[chosen.config]
        winner = rows[chosen.config] = replace(row, kernel="best" if row.kernel == "finalist" else row.kernel)
        if not self._store.set_best(stored[chosen.config], chosen.verification_id, partial=False):
            search.notes.append("the stored winner is no slower, and stays")
        return list(rows.values()), winner

    def _chosen(self, eligible: list[_Racer], timings: Timings) -> _Racer:
        """The fastest; of those that the race cannot tell apart from it a preset, or the simplest."""
        emulated = self._search.options.emulate is not None
        fastest = min(eligible, key=lambda racer: timings.cost(racer.config.id, by_cycles=emulated))
        if emulated:  # cycles of different launches, which nothing pairs
            return fastest
        alike = [racer for racer in eligible if not timings.ratio(racer.config.id, fastest.config.id).told_apart] or [
            fastest
        ]
        chosen = min(alike, key=lambda racer: (_complexity(racer.config), timings[racer.config.id].median_ms))
        if len(alike) > 1:
            names = ", ".join(short_form(racer.config) for racer in alike)
            self._search.notes.append(
                f"the race cannot tell these apart: {names}; {short_form(chosen.config)} is taken, the simplest of them"
            )
        return chosen

    def _racers(self) -> tuple[list[_Racer], list[Row]]:
        """Who runs, and for each that should and cannot a row with the reason."""
        search = self._search
        raced = {name: config for name, config in PRESETS.items() if config not in search.withheld}
        unfit = {config: search.unfit(config) for config in raced.values()}
        names = {config: name for name, config in raced.items() if unfit[config] is None}
        for config in sorted(self._costs, key=self._costs.__getitem__)[:FINALISTS]:
            names.setdefault(config, "finalist")
        present = self._store.best()
        if present and search.unfit(present) is None:
            names.setdefault(present, "finalist")
        search.tell(f"compiling {len(names)} finalists and presets")
        racers = []
        rows = [
            search.row(name, config, note=f"not valid here: {unfit[config]}")
            for name, config in raced.items()
            if config not in names
        ]
        compiled = search.compile_all(names)
        search.tell(f"checking {len(names)} finalists and presets at full size")
        entered: dict[Config, tuple[int, Variant]] = {}
        reasons: dict[Config, str] = {}
        for config in names:
            try:
                entered[config] = self._enter(config, compiled[config])
            except CandidateError as error:
                reasons[config] = str(error)
        verdicts = search.on_benches("verify", *(self._check(variant) for _, variant in entered.values()))
        for config, answer in zip(entered, verdicts, strict=True):
            try:
                racers.append(self._admit(names[config], *entered[config], answer, compiled[config].limits_variant))
            except CandidateError as error:
                reasons[config] = str(error)
        rows += [
            search.row(names[config], config, _resources(compiled[config].variant), reason)
            for config, reason in reasons.items()
        ]
        return racers, rows

    def _enter(self, config: Config, compiled: Compiled) -> tuple[int, Variant]:
        """What is to be verified at the problem's own sizes, and its id in the store.

        Raises:
            CandidateError: It does not belong into the race: with the reason.
        """
        if config in self._unfit:
            raise CandidateError(self._unfit[config])
        variant_id = None
        for variant in filter(None, (compiled.limits_variant, compiled.variant)):
            variant_id = self._store.record_variant(variant)
        if compiled.refused or compiled.variant is None or variant_id is None:
            raise CandidateError(compiled.refused.reason if compiled.refused else "it was not compiled")
        return variant_id, compiled.variant

    def _check(self, variant: Variant) -> Callable[[Bench], tuple[VerificationRecord, ...]]:
        problem = self._search.problem
        # As a candidate of this search, or of one before under these conditions.
        known = variant.source.config in self._costs
        return lambda bench: verify_fully(bench, problem, variant, small=not known)

    def _admit(
        self, name: str, variant_id: int, variant: Variant, answer: Answered, limits_variant: Variant | None
    ) -> _Racer:
        """Admits a variant to the race.

        Raises:
            CandidateError: It is wrong, crashed or hung.
        """
        verdicts = answer.get()
        for verdict in verdicts:
            verification_id = self._store.record_verification(variant_id, verdict)
        if not verdicts[-1].passed:
            raise CandidateError(f"wrong: {verdicts[-1].reason}")
        row = self._search.row(name, variant.source.config, variant.resources)
        row = replace(row, max_error=verdicts[-1].max_error)
        return _Racer(row, variant, variant_id, verification_id, self._may_win(limits_variant))

    def _may_win(self, limits_variant: Variant | None) -> bool:
        """Whether a variant keeps to the limits: a preset that does not still runs, to be compared with."""
        if not self._search.options.within:
            return True
        compiled = limits_variant.resources if limits_variant else None
        return compiled is not None and compiled.spill_bytes == 0


def _peer_row(name: str, timings: Timings) -> Row:
    if name in timings:
        which = f"which is {timings.default_kernel}" if name == DEFAULT else ""
        return Row(name, timing=timings[name], note=which)
    return Row(name, note=timings.unavailable.get(name, "it was not timed"))


def _beside_default(winner: Row, timings: Timings) -> str:
    """What a user has of the winner: how it did beside what PyTorch takes by itself."""
    if timings.default_kernel == NO_FUSED_BACKWARD:
        return "PyTorch has no fused backward of this problem: the winner is used wherever it is valid"
    default = timings.get(DEFAULT)
    if default is None or winner.timing is None:
        return "PyTorch's default backward was not timed: whether the winner is faster is not known"
    ratio = default.median_ms / winner.timing.median_ms
    name = f"PyTorch's default, {timings.default_kernel}"
    if ratio > 1:
        return f"the winner is {ratio:.2f} times as fast as {name}"
    return f"{name}, is {1 / ratio:.2f} times as fast as the winner: the problem stays PyTorch's"


def _resources(variant: Variant | None) -> CompiledResources | None:
    return variant.resources if variant else None


def _complexity(config: Config) -> int:
    """How much a configuration differs from a preset: how many words it takes to say it."""
    return len(short_form(config).split())


def _race_record(winner: Row, ratios: Mapping[str, Ratio], timings: Timings, policy: Policy) -> dict[str, Any]:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "policy": policy.id,
        "winner": winner.config.id if winner.config else winner.kernel,
        "median_ms": {name: timing.median_ms for name, timing in timings.items()},
        "interval_ms": {name: [timing.low_ms, timing.high_ms] for name, timing in timings.items()},
        "default_kernel": timings.default_kernel,
        "ratio_to_winner": {name: ratio.to_dict() for name, ratio in ratios.items()},
        "gpu": asdict(timings.state),
    }
