"""A search on a card: all gates, the times, and the final race."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...db.errors import DatabaseError, InvalidRecord
from ...db.records import Environment, StoredMeasurement
from ...gen.build.jobs import Variant
from ...gen.device import Device
from ...gen.errors import BwdtuneError
from ...gen.families import PRESETS, Config, preset_name, short_form
from ...gen.problem import Problem
from ...gen.space import space_hash
from ..lab.examination import Examination, Report
from ..lab.peers import DEFAULT
from ..lab.pool import Answered, Work
from ..lab.protocol import Bench, CandidateError
from ..lab.timing import SEARCH_POLICY, Cycles, Timing, Timings
from .candidates import Builder, Candidate, CandidateSearch, Compiled
from .claims import Claims
from .history import History
from .learner import Learner, Prospects
from .options import SearchOptions
from .progress import Progress
from .proposals import Outcome, Proposals, StudyLog, conditions
from .provenance import Machine
from .race import FINALISTS, FinalRace
from .result import SearchResult
from .rows import Row
from .search_store import SearchStore

if TYPE_CHECKING:
    from ...db.store import Store

HEAD_STARTS = 4
"""What has won elsewhere on such a card and is tried before what a sampler proposes: few, since much of it is alike."""

_POLL_S = 0.5
_SLOWED = 1.1  # the reference takes so much longer than before: the card is not what it was


@dataclass(frozen=True)
class _Ready:
    """A candidate that waits for a bench, or is examined by one.

    Attributes:
        candidate: The candidate.
        compiled: What the compilers made of it.
        variant: What of that runs.
        reference: What it is timed beside, and the cost of that.
        alone: It is tried once more, with nothing beside it at first.
        avoid: The bench on which it failed.
    """

    candidate: Candidate
    compiled: Compiled
    variant: Variant
    reference: tuple[Config, float] | None = None
    alone: bool = False
    avoid: str | None = None


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
        benches: Mapping[str, Bench],
        environment: Environment,
    ) -> None:
        super().__init__(problem, device, options, builder, progress, machine, withheld, benches)
        self._environment = environment
        self._policy = options.timing.applied_to(SEARCH_POLICY).of(problem)
        self._patience = self.patience(store)
        self._store: SearchStore = SearchStore(store, problem, options, environment, self._patience)
        self._costs: dict[Config, float] = {}
        self._timings: dict[Config, Timing] = {}  # of this search
        self._cycles: dict[Config, Cycles] = {}
        self._max_errors: dict[Config, float] = {}
        self._answers: dict[Config, StoredMeasurement] = {}  # stored results in place of a measurement
        self._default_cost: float | None = None
        self._unfit: dict[Config, str] = {}
        self._compiled: deque[_Ready] = deque()
        self._variant_ids: dict[Config, int] = {}
        self._references: dict[Config, Variant] = {}
        self._paces: dict[str, float] = {}  # how much longer than its cost says a reference took at first, by bench
        self._noisy = 0
        self.study = store.study_name(problem, device, options.limits, space_hash(), emulate=options.emulate)
        self._log = StudyLog(
            store.optuna_storage(),
            self.study,
            space_hash=space_hash(),
            conditions=conditions(environment, self._policy.id),
        )
        self._logged: dict[Config, Outcome] = {}
        self._claims = Claims(store, self.study, conditions(environment, self._policy.id), self._patience)
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
            self.learn_from_others(proposals)
            self._agree_on_scale(proposals)
            if self.best and proposals.remaining and not self.options.emulate:
                variant = self.compile_all([self.best[0]])[self.best[0]].variant
                if variant and variant.library:
                    self._references[self.best[0]] = variant
            self.try_candidates(proposals)
            self.learn_from_others(proposals)
            race = FinalRace(self, self._store, self._costs, self._unfit)
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
        finally:
            self._claims.give_up()
        if self._noisy:
            self.notes.append(f"{self._noisy} timings were noisy: see above, and search again on an idle GPU")
        return self.result(status, rows, proposals, winner, self._environment, error)

    def _proposals(self, first: Sequence[Config]) -> Proposals:
        options, learner = self.options, None
        if options.sampler == "learned":
            history = History(
                self.problem,
                self.device,
                [one.without(self.withheld) for one in self._store.outcomes_elsewhere(self.device)],
                limits=options.within,
                emulate=options.emulate,
            )
            prospects = Prospects(self.problem, self.configs, self.device, emulate=options.emulate, history=history)
            learner = Learner(prospects, seed=self.seed)
        return Proposals(self.configs, sampler=options.sampler, seed=self.seed, first=first, learner=learner)

    def _head_starts(self) -> list[Config]:
        """What won the problems nearest to this one on such a card: of those in the database and those shipped."""
        presets = set(PRESETS.values())
        fitting = (
            config for config in self._store.won_nearby() if config not in presets and self.unfit(config) is None
        )
        return list(itertools.islice(fitting, HEAD_STARTS))

    def learn_from_others(self, proposals: Proposals) -> None:
        for config, outcome in self._patience(lambda: list(self._log.news())):
            if proposals.learn(config, outcome):
                self.counts.earlier += 1
                self._note(config, outcome)
            self._logged[config] = outcome

    def claim(self, config: Config, proposals: Proposals) -> bool:
        if not self._claims.take(config):
            return False
        self.learn_from_others(proposals)  # who had it until now has logged what came of it
        return True

    def _agree_on_scale(self, proposals: Proposals) -> None:
        """Costs are times on the card of the first candidate: of searches that begin at once, one of them times it."""
        told = False
        while not (self.best or self.options.emulate or self._time_is_up() or self._claims.take_scale()):
            if not told:
                told = True
                self.notice("another search of this problem has begun: waiting for its first time, to compare with")
            with self.wait("time"):
                time.sleep(_POLL_S)
            self.learn_from_others(proposals)

    def known_outcome(self, candidate: Candidate) -> Outcome | None:
        return self._logged.get(candidate.config) or self._measured(candidate)

    def _measured(self, candidate: Candidate, machine_code: str | None = None) -> Outcome | None:
        stored = self._store.measurement_of(candidate.config, candidate.source, machine_code)
        if stored is None:
            return None
        self._answers[candidate.config] = stored
        return self._outcome(stored.record.cycles if self.options.emulate else stored.record.median_ms)

    def decide(self, candidate: Candidate, compiled: Compiled) -> Outcome | None:
        outcome = compiled.refused
        if outcome is None and compiled.variant is None:
            outcome = Outcome("failed", reason="it was not compiled", kind="compiler")
        if outcome is None and compiled.variant:
            outcome = self._measured(candidate, compiled.variant.machine_code)
            if outcome:
                self.counts.stored += 1  # other text of the same kernel
            else:
                self._compiled.append(_Ready(candidate, compiled, compiled.variant))
                self.dispatch()  # before anything is written: the bench need not wait for that
        if compiled.limits_variant:
            self._store.record_variant(compiled.limits_variant)
        if compiled.variant:
            self._variant_ids[candidate.config] = self._store.record_variant(compiled.variant)
        return outcome

    def dispatch(self) -> None:
        while not self._time_is_up():
            ready = next((one for one in self._compiled if self.pool.takes(one.avoid)), None)
            if ready is None:
                return
            reference = self._reference()
            if reference is None and self.pool.busy and not self.options.emulate:
                return  # the first that is timed is what others are compared with, on whatever card
            # PyTorch's default runs beside the first alone: people are told what is gained over it.
            first = not (self._timings or self.pool.busy or self.options.emulate)
            self._compiled.remove(ready)
            self.clock.is_taken()
            ready = replace(ready, reference=reference)
            examination = Examination(
                self.problem,
                ready.variant,
                self._references[reference[0]] if reference else None,
                self._policy,
                (DEFAULT,) if first else (),
                ready.alone,
            )
            label = short_form(ready.candidate.config)
            self.pool.submit(Work(self.counted("time", examination), ready, ready.avoid, label))

    def _reference(self) -> tuple[Config, float] | None:
        """What candidates are timed beside, and its cost: the best so far that there is a kernel of."""
        best = min(self._references, key=self._costs.__getitem__, default=None)
        # Cycles do not depend on the clock: nothing has to run beside an emulated one.
        return None if best is None or self.options.emulate else (best, self._costs[best])

    def examined(self, work: Work, answer: Answered) -> tuple[Candidate, Outcome, Compiled] | None:
        ready: _Ready = work.subject
        config = ready.candidate.config
        report = Report(error=answer.value) if isinstance(answer.value, CandidateError) else answer.value
        # The benches work at once, and are waited for together.
        self.clock.move("time", "verify", report.verify_s / len(self._benches))
        if report.error and report.error.fault.maybe_from_outside and not ready.alone:
            self.notice(f"{short_form(config)}: {report.error}; it is tried once more, alone")
            self._compiled.appendleft(replace(ready, alone=True, avoid=work.bench))
            self.clock.is_ready()
            return None
        if report.reference_fell and ready.reference:
            self._references.pop(ready.reference[0], None)
        outcome = self._judged(ready, report, work.bench)
        if report.timings and outcome.cost is not None:
            self._costs[config], self._timings[config] = outcome.cost, report.timings[config.id]
            self._references[config] = ready.variant
        self.dispatch()  # before anything is written: the bench need not wait for that
        try:
            self._keep(ready, report, outcome)
        except InvalidRecord as error:
            del self._costs[config], self._timings[config], self._references[config]
            outcome = Outcome("failed", reason=str(error), kind="timing")
        return ready.candidate, outcome, ready.compiled

    def _judged(self, ready: _Ready, report: Report, bench: str) -> Outcome:
        """What an examination says of a candidate."""
        if report.error:
            twice = " (twice)" if report.error.fault.maybe_from_outside else ""
            fault = report.error.fault
            return Outcome("failed", reason=f"{report.error}{twice}", fault=fault, kind=fault.kind)
        if report.timings is None:
            reason = report.verification.reason if report.verification else ""
            return Outcome("failed", reason=f"wrong: {reason}", kind="gradients")
        self._watch(ready, report.timings, bench)
        return self._outcome(self._cost(ready, report.timings, bench))

    def _keep(self, ready: _Ready, report: Report, outcome: Outcome) -> None:
        """Stores what came of an examination.

        Raises:
            InvalidRecord: Its time is none.
        """
        config = ready.candidate.config
        if report.verification:
            self._store.record_verification(self._variant_ids[config], report.verification)
            self._max_errors[config] = report.verification.max_error
        if report.timings is None or outcome.cost is None:
            return
        self._store.record_timing(self._variant_ids[config], config, report.timings, self._policy)
        if config.id in report.timings.cycles:
            self._cycles[config] = report.timings.cycles[config.id]
        self.counts.measured += 1

    def _cost(self, ready: _Ready, timings: Timings, bench: str) -> float:
        """What ranks a candidate: the reference's cost, times how much longer the candidate took beside it.

        The clock falls in the course of a search, and with it every time alone, and cards of one name differ: costs are
        times on the card, and at the clock, that the first candidate met.
        """
        config = ready.candidate.config
        if ready.reference and ready.reference[0].id in timings:
            reference, known = ready.reference
            cost = known * timings.ratio(config.id, reference.id).median
        else:
            cost = timings.cost(config.id, by_cycles=self.options.emulate is not None) / self._paces.get(bench, 1.0)
        if DEFAULT in timings:
            self._default_cost = cost * timings.ratio(DEFAULT, config.id).median
        return cost

    def references(self) -> tuple[tuple[str, float] | None, float | None]:
        presets = {name: self._costs[config] for name, config in PRESETS.items() if config in self._costs}
        return min(presets.items(), key=lambda one: one[1], default=None), self._default_cost

    def _outcome(self, cost: float | None) -> Outcome:
        return Outcome.timed(math.nan if cost is None else cost, "cycles" if self.options.emulate else "ms")

    def _watch(self, ready: _Ready, timings: Timings, bench: str) -> None:
        """Tells whether the times are noisy, and whether the card is what it was."""
        slowed = ""
        if ready.reference is None:
            self._paces.setdefault(bench, 1.0)  # costs are times on this card
        elif ready.reference[0].id in timings and not timings.notice:
            pace = timings[ready.reference[0].id].median_ms / ready.reference[1]
            # Another card than the one on which the first was timed has a pace of its own.
            usual = self._paces.setdefault(bench, pace if self._paces else 1.0)
            if pace / usual > _SLOWED:
                slowed = f"the best so far takes {pace / usual - 1:.0%} longer than before: is the GPU busy, or hot?"
        if timings.notice or slowed:
            self._noisy += 1
            if self._noisy == 1:
                self.notice(timings.notice or slowed)

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
        self._note(candidate.config, outcome)

    def log(self, config: Config, outcome: Outcome) -> None:
        self._patience(lambda: self._log.add(config, outcome, self._store.search_id))

    def _note(self, config: Config, outcome: Outcome) -> None:
        if outcome.reason:
            self._unfit[config] = outcome.reason
        if outcome.cost is not None:
            self._costs[config] = outcome.cost
            if self.best is None or outcome.cost < self.best[1]:
                self.best = (config, outcome.cost)

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
