"""A search on a card: every gate, the times, and the race that ends it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ...db.errors import DatabaseError, InvalidRecord
from ...db.records import Environment, StoredMeasurement
from ...gen.build.jobs import Variant
from ...gen.device import Device
from ...gen.errors import BwdtuneError
from ...gen.families import PRESETS, Config, preset_name, short_form
from ...gen.problem import Problem
from ...gen.space import space_hash
from ..lab.peers import DEFAULT
from ..lab.protocol import Bench, CandidateError
from ..lab.timing import SEARCH_POLICY, Cycles, Timing, Timings
from .candidates import Builder, Candidate, CandidateSearch, Compiled
from .learner import Learner
from .options import SearchOptions
from .progress import Progress
from .proposals import Outcome, Proposals, StudyLog
from .provenance import Machine
from .race import FINALISTS, FinalRace
from .result import SearchResult
from .rows import Row
from .search_store import SearchStore

if TYPE_CHECKING:
    from ...db.store import Store

HEAD_STARTS = 4
"""What has won elsewhere on such a card and is tried before what a sampler proposes: few, since much of it is alike."""

_SLOWED = 1.1  # the incumbent takes so much longer than before: the card is not what it was


class Tuning(CandidateSearch):
    """All gates, the times, and the final race."""

    def __init__(
        self,
        problem: Problem,
        device: Device,
        store: Store,
        options: SearchOptions,
        builder: Builder,
        progress: Progress,
        machine: Machine,
        withheld: Collection[Config],
        bench: Bench,
        environment: Environment,
    ) -> None:
        super().__init__(problem, device, options, builder, progress, machine, withheld)
        self._bench, self._environment = bench, environment
        self._policy = options.timing.applied_to(SEARCH_POLICY)
        self._patience = self.patience(store)
        self._store: SearchStore = SearchStore(store, problem, options, environment, self._patience)
        self._costs: dict[Config, float] = {}
        self._timings: dict[Config, Timing] = {}  # of this search
        self._cycles: dict[Config, Cycles] = {}
        self._max_errors: dict[Config, float] = {}
        self._answers: dict[Config, StoredMeasurement] = {}  # stored results in place of a measurement
        self._default_cost: float | None = None
        self._unfit: dict[Config, str] = {}
        self._incumbent: Variant | None = None
        self._noisy = 0
        self.study = store.study_name(problem, device, options.limits, space_hash(), emulate=options.emulate)
        conditions = " ".join(
            (
                f"{environment.gpu.name} {environment.gpu.capability}",
                f"driver {environment.driver}",
                f"nvcc {environment.toolkit}",
                f"torch {environment.torch}",
                self._policy.id,
            )
        )
        self._log = StudyLog(store.optuna_storage(), self.study, space_hash=space_hash(), conditions=conditions)
        if self._log.replaces_older_space:
            self.notes.append(
                "the search space is not that of the last search: a new study begins, old results are kept"
            )

    def find(self) -> SearchResult:
        proposals: Proposals | None = None
        try:
            first = (*PRESETS.values(), *self._head_starts())
            with self.clock.phase("begin"), self.interruptible():
                proposals = self._proposals(first)
            for config, outcome in self._log.past():
                if proposals.learn(config, outcome):
                    self.counts.earlier += 1
                    self._note(config, outcome)
            if self.best and proposals.remaining and not self.options.emulate:
                self._incumbent = self.compile_all([self.best[0]])[self.best[0]].variant
            self.try_candidates(proposals)
            race = FinalRace(self, self._store, self._bench, self._costs, self._unfit)
            rows, winner = race.run()
            if race.record:
                self._patience(lambda: self._log.add_race(race.record))
            status, error = "complete", ""
        except KeyboardInterrupt:
            winner = self._keep_best()
            rows, status, error = [winner] if winner else [], "partial", ""
        except DatabaseError as lost:  # what was measured is told all the same
            winner, rows, status, error = None, self._measured_rows(), "failed", str(lost)
        except Exception:  # whatever it is, no candidate's fault and no reason to lose the best
            with suppress(BwdtuneError):
                self._keep_best()
            raise
        if self._noisy:
            self.notes.append(f"{self._noisy} timings were noisy: see above, and search again on an idle GPU")
        return self.result(status, rows, proposals, winner, self._environment, error)

    def _proposals(self, first: Sequence[Config]) -> Proposals:
        options, learner = self.options, None
        if options.sampler == "learned":
            learner = Learner(self.problem, self.configs, self.device, seed=self.seed, emulate=options.emulate)
        return Proposals(self.configs, sampler=options.sampler, seed=self.seed, first=first, learner=learner)

    def _head_starts(self) -> list[Config]:
        """What won the problems nearest to this one on such a card: of those in the database and those shipped."""
        presets = set(PRESETS.values())
        fitting = (
            config for config in self._store.won_nearby() if config not in presets and self.unfit(config) is None
        )
        return list(itertools.islice(fitting, HEAD_STARTS))

    def known_outcome(self, candidate: Candidate) -> Outcome | None:
        return self._measured(candidate)

    def _measured(self, candidate: Candidate, machine_code: str | None = None) -> Outcome | None:
        stored = self._store.measurement_of(candidate.config, candidate.source, machine_code)
        if stored is None:
            return None
        self._answers[candidate.config] = stored
        return self._outcome(stored.record.cycles if self.options.emulate else stored.record.median_ms)

    def decide(self, candidate: Candidate, compiled: Compiled) -> Outcome:
        if compiled.limits_variant:
            self._store.record_variant(compiled.limits_variant)
        variant_id = self._store.record_variant(compiled.variant) if compiled.variant else None
        if compiled.refused or compiled.variant is None or variant_id is None:
            return compiled.refused or Outcome("failed", reason="it was not compiled", kind="compiler")
        if known := self._measured(candidate, compiled.variant.machine_code):
            self.counts.stored += 1  # other text of the same kernel
            return known
        try:
            try:
                return self._judged(compiled.variant, variant_id)
            except CandidateError as error:
                if not error.fault.maybe_from_outside:
                    raise
                self.notice(f"{short_form(candidate.config)}: {error}; it is tried once more, alone")
                return self._judged(compiled.variant, variant_id, alone=True)
        except CandidateError as error:
            twice = " (twice)" if error.fault.maybe_from_outside else ""
            return Outcome("failed", reason=f"{error}{twice}", fault=error.fault, kind=error.fault.kind)
        except InvalidRecord as error:
            return Outcome("failed", reason=str(error), kind="timing")

    def _judged(self, variant: Variant, variant_id: int, *, alone: bool = False) -> Outcome:
        """The third gate and the time of a candidate.

        Args:
            variant: The candidate, compiled.
            variant_id: Its id in the store.
            alone: Nothing runs beside it that could be to blame.

        Raises:
            CandidateError: It crashed or hung.
            InvalidRecord: Its time is none.
        """
        config = variant.source.config
        with self.wait("verify"):
            verification = self._bench.verify(self.problem, variant)
        self._store.record_verification(variant_id, verification)
        self._max_errors[config] = verification.max_error
        if not verification.passed:
            return Outcome("failed", reason=f"wrong: {verification.reason}", kind="gradients")
        timings = self._time(variant) if alone else self._time_beside_incumbent(variant)
        outcome = self._outcome(self._cost(config, timings))
        if outcome.cost is None:
            return outcome
        self._store.record_timing(variant_id, config, timings, self._policy)
        self._timings[config] = timings[config.id]
        if config.id in timings.cycles:
            self._cycles[config] = timings.cycles[config.id]
        self.counts.measured += 1
        # Cycles do not depend on the clock: nothing has to run beside an emulated one.
        if not self.options.emulate and (self.best is None or outcome.cost < self.best[1]):
            self._incumbent = variant
        return outcome

    def _cost(self, config: Config, timings: Timings) -> float:
        """What ranks a candidate: the incumbent's cost, times how much longer the candidate took beside it.

        The clock falls in the course of a search, and with it every time alone: costs are times at the clock that the
        first candidate met.
        """
        incumbent = self._incumbent.source.config if self._incumbent else None
        if self.options.emulate or incumbent is None or incumbent.id not in timings or incumbent == config:
            cost = timings.cost(config.id, by_cycles=self.options.emulate is not None)
        else:
            cost = self._costs[incumbent] * timings.ratio(config.id, incumbent.id).median
        if DEFAULT in timings:
            self._default_cost = cost * timings.ratio(DEFAULT, config.id).median
        return cost

    def references(self) -> tuple[tuple[str, float] | None, float | None]:
        presets = {name: self._costs[config] for name, config in PRESETS.items() if config in self._costs}
        return min(presets.items(), key=lambda one: one[1], default=None), self._default_cost

    def _outcome(self, cost: float | None) -> Outcome:
        return Outcome.timed(math.nan if cost is None else cost, "cycles" if self.options.emulate else "ms")

    def figures(self, config: Config, compiled: Compiled | None) -> Row:
        row = super().figures(config, compiled)
        if stored := self._answers.get(config):
            return self._with_stored(row, stored)
        if counted := self._cycles.get(config):
            row = row.with_cycles(counted, self.problem, self.device)
        timing = None if self.options.emulate else self._timings.get(config)
        return replace(row, timing=timing, max_error=self._max_errors.get(config))

    def _with_stored(self, row: Row, stored: StoredMeasurement) -> Row:
        """A row with what was measured of it before."""
        record, variant = stored.record, stored.variant
        if record.cycles is not None:
            counted = Cycles(record.cycles, record.cycles, record.cycles, record.samples)
            row = row.with_cycles(counted, self.problem, self.device)
        else:
            row = replace(row, timing=Timing(record.median_ms, record.low_ms, record.high_ms, record.samples))
        return replace(
            row,
            max_error=stored.verification.max_error if stored.verification else None,
            registers=variant.registers,
            spill_bytes=variant.spill_bytes,
        )

    def settled(self, candidate: Candidate, outcome: Outcome) -> None:
        self._patience(lambda: self._log.add(candidate.config, outcome, self._store.search_id))
        self._note(candidate.config, outcome)

    def _note(self, config: Config, outcome: Outcome) -> None:
        if outcome.reason:
            self._unfit[config] = outcome.reason
        if outcome.cost is not None:
            self._costs[config] = outcome.cost
            if self.best is None or outcome.cost < self.best[1]:
                self.best = (config, outcome.cost)

    def _time_beside_incumbent(self, variant: Variant) -> Timings:
        """Times a candidate interleaved with the best one so far, which tells whether the card is what it was.

        A noisy timing is repeated before it counts.
        """
        beside = [variant, *filter(None, [self._incumbent])]
        try:
            timings = self._time(*beside, peers=self._reference())
            if timings.notice:
                timings = self._time(*beside, peers=self._reference())
        except CandidateError as error:
            if self._incumbent is None or error.candidate != self._incumbent.source.config.id:
                raise
            self._incumbent = None  # it may have been struck by what this candidate left behind
            timings = self._time(variant, peers=self._reference())
        slowed = ""
        if self._incumbent and not timings.notice:
            config = self._incumbent.source.config
            ratio = timings[config.id].median_ms / self._costs[config]
            if ratio > _SLOWED:
                slowed = f"the best so far takes {ratio - 1:.0%} longer than before: is the GPU busy, or hot?"
        if timings.notice or slowed:
            self._noisy += 1
            if self._noisy == 1:
                self.notice(timings.notice or slowed)
        return timings

    def _time(self, *variants: Variant, peers: Sequence[str] = ()) -> Timings:
        with self.wait("time"):
            return self._bench.time(self.problem, variants, peers, self._policy)

    def _reference(self) -> tuple[str, ...]:
        """PyTorch's default, beside the first candidate of a search alone: people are told what is gained over it."""
        return () if self._timings or self.options.emulate else (DEFAULT,)

    def _measured_rows(self) -> list[Row]:
        """The best few of this search, from what is in memory."""
        best = sorted(self._timings, key=self._costs.__getitem__)[:FINALISTS]
        return [
            replace(self.row(preset_name(config) or "candidate", config), timing=self._timings[config])
            for config in best
        ]

    def _keep_best(self) -> Row | None:
        """Makes the best that was measured so far the winner, marked as partial; returns its row."""
        for config in sorted(self._costs, key=self._costs.__getitem__):
            stored = self._store.measurement_of(config, self.source(config))
            if stored is None or stored.verification_id is None or not self._store.kept_to_limits(config):
                continue
            self._store.set_best(stored.id, stored.verification_id, partial=True)
            return self._with_stored(self.row(preset_name(config) or "best", config), stored)
        return None
