"""The race that ends a search: finalists, presets and PyTorch's own kernels, timed side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...db.errors import InvalidRecord
from ...db.records import NO_FUSED_BACKWARD
from ...gen.build.jobs import Variant
from ...gen.families import PRESETS, Config
from ...gen.space import refusal
from ..lab.gate import verify_fully
from ..lab.peers import DEFAULT, PEERS
from ..lab.protocol import Bench, CandidateError
from ..lab.timing import RACE_POLICY, Timings
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
        search: Compiles, waits, and tells of the race.
        store: Where times and the winner go.
        bench: Verifies and times.
        costs: What the search measured, or knows from earlier ones: each configuration's time or cycles.
        unfit: What it found wrong or refused, with the reason.
    """

    def __init__(
        self,
        search: CandidateSearch,
        store: SearchStore,
        bench: Bench,
        costs: Mapping[Config, float],
        unfit: Mapping[Config, str],
    ) -> None:
        self._search, self._store, self._bench = search, store, bench
        self._costs, self._unfit = costs, unfit

    def run(self) -> tuple[list[Row], Row | None]:
        """Returns a row for each that ran, should have run, or is PyTorch's, fastest first; and the winner's."""
        search = self._search
        racers, rows = self._racers()
        peers = () if search.options.emulate else tuple(PEERS)
        timings: Timings | None = None
        while racers and timings is None:
            search.tell(f"racing {len(racers)} finalists and presets")
            try:
                with search.wait("time"):
                    timings = self._bench.time(search.problem, [racer.variant for racer in racers], peers, RACE_POLICY)
            except CandidateError as error:
                fallen = [racer for racer in racers if racer.config.id == error.candidate] or racers
                rows += [replace(racer.row, note=str(error)) for racer in fallen]
                racers = [racer for racer in racers if racer not in fallen]
        if timings is None:
            search.notes.append("no candidate is right and fast enough to be timed: there is no winner")
            return rows, None
        if timings.notice:
            search.notice(timings.notice)
        rows += [_peer_row(name, timings) for name in peers]
        ranked, winner = self._rank(racers, timings)
        if winner and not search.options.emulate:
            search.notes.append(_beside_default(winner, timings))
        return sorted([*rows, *ranked], key=lambda row: row.ms or row.cycles or math.inf), winner

    def _rank(self, racers: list[_Racer], timings: Timings) -> tuple[list[Row], Row | None]:
        """Stores the times and the winner; returns the racers' rows, and the winner's."""
        search, emulated = self._search, self._search.options.emulate is not None
        rows: list[Row] = []
        winner: Row | None = None
        for racer in sorted(racers, key=lambda racer: timings.cost(racer.config.id, by_cycles=emulated)):
            try:
                measurement_id = self._store.record_timing(racer.variant_id, racer.config, timings, RACE_POLICY)
            except InvalidRecord as error:
                rows.append(replace(racer.row, note=str(error)))
                continue
            if emulated:
                row = racer.row.with_cycles(timings.cycles[racer.config.id], search.problem, search.device)
            else:
                row = replace(racer.row, timing=timings[racer.config.id])
            if winner is None and racer.may_win:
                row = winner = replace(row, kernel="best" if row.kernel == "finalist" else row.kernel)
                chosen = (measurement_id, racer.verification_id)
            rows.append(row)
        if winner and not self._store.set_best(*chosen, partial=False):
            search.notes.append("another search has stored a faster winner meanwhile, which stays")
        return rows, winner

    def _racers(self) -> tuple[list[_Racer], list[Row]]:
        """Who runs, and for each that should and cannot a row with the reason."""
        search = self._search
        names = {config: name for name, config in PRESETS.items() if config in search.configs}
        for config in sorted(self._costs, key=self._costs.__getitem__)[:FINALISTS]:
            names.setdefault(config, "finalist")
        present = self._store.best()
        if present in search.configs:
            names.setdefault(present, "finalist")
        search.tell(f"compiling {len(names)} finalists and presets")
        racers = []
        rows = [
            search.row(name, config, note=f"not valid here: {refusal(search.problem, config, search.space_device)}")
            for name, config in PRESETS.items()
            if config not in names
        ]
        for config, compiled in search.compile_all(names).items():
            search.tell(f"checking {len(names)} finalists and presets at full size")
            try:
                racers.append(self._enter(names[config], config, compiled))
            except CandidateError as error:
                rows.append(search.row(names[config], config, compiled.variant, str(error)))
        return racers, rows

    def _enter(self, name: str, config: Config, compiled: Compiled) -> _Racer:
        """Admits a variant to the race.

        Raises:
            CandidateError: It does not belong there: with the reason.
        """
        if config in self._unfit:
            raise CandidateError(self._unfit[config])
        variant_id = None
        for variant in filter(None, (compiled.limits_variant, compiled.variant)):
            variant_id = self._store.record_variant(variant)
        if compiled.refused or compiled.variant is None or variant_id is None:
            raise CandidateError(compiled.refused.reason if compiled.refused else "it was not compiled")
        known = config in self._costs  # as a candidate of this search, or of one before under these conditions
        with self._search.wait("verify"):
            verdicts = verify_fully(self._bench, self._search.problem, compiled.variant, small=not known)
        for verdict in verdicts:
            verification_id = self._store.record_verification(variant_id, verdict)
        if not verdicts[-1].passed:
            raise CandidateError(f"wrong: {verdicts[-1].reason}")
        row = replace(self._search.row(name, config, compiled.variant), max_error=verdicts[-1].max_error)
        return _Racer(row, compiled.variant, variant_id, verification_id, self._may_win(compiled.limits_variant))

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
