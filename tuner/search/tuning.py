"""The search: which configuration computes a problem right, and fastest.

A candidate passes three gates (arithmetic, compiler, numbers), is timed, and is stored when it is decided. The best few
are raced again at the end, side by side with the presets and PyTorch's own kernels: the fastest of ours is the winner.

Where there is no card to measure on, a search is a survey: the numbers are checked on the CPU, a model predicts the
times, and nothing wins.

An emulated search slows the card to another one's pace: cycles rank instead of times, PyTorch's kernels do not run, and
the best is stored as the best emulated one, which never wins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ...db.errors import InvalidRecord
from ...db.records import (
    EMULATED,
    MEASURED,
    EmulatedBest,
    Environment,
    MeasurementRecord,
    StoredMeasurement,
    VerificationRecord,
    Winner,
)
from ...db.shipped import Shipped, read_shipped
from ...gen.build.jobs import Variant
from ...gen.build.toolchain import ToolchainError
from ...gen.device import HOST_ARCH, Device
from ...gen.errors import BwdtuneError
from ...gen.families import PRESETS, Config, preset_name
from ...gen.problem import Problem, distance
from ...gen.render import Source, render
from ...gen.space import refusal, space_hash
from ..lab.gpu_client import CandidateError, WorkerError
from ..lab.timing import RACE_POLICY, SEARCH_POLICY, Cycles, Policy, Timing, Timings
from .candidates import Builder, Candidate, CandidateSearch, Compiled
from .cost_model import predict, ranked
from .learner import Learner
from .options import LIMITS, SearchOptions
from .proposals import Outcome, Proposals, StudyLog
from .report import Progress, Row, SearchResult

if TYPE_CHECKING:
    from ...db.store import Store

FINALISTS = 4

PEERS = ("fa", "cudnn")
"""PyTorch's own backward kernels, which run in the final race."""

HEAD_STARTS = 4
"""What has won elsewhere on such a card and is tried before what a sampler proposes: few, since much of it is alike."""

_SLOWED = 1.1  # the incumbent takes so much longer than before: the card is not what it was


class Bench(Protocol):
    """What a search needs of the process that runs kernels. `worker.Worker` is the real one, and documents these."""

    def verify(self, problem: Problem, variant: Variant) -> VerificationRecord: ...

    def verify_at(self, problem: Problem, variant: Variant) -> VerificationRecord: ...

    def time(self, problem: Problem, variants: Sequence[Variant], peers: Sequence[str], policy: Policy) -> Timings: ...


def search(
    problem: Problem,
    device: Device,
    store: Store,
    options: SearchOptions,
    *,
    builder: Builder,
    progress: Progress,
    bench: Bench | None = None,
    environment: Environment | None = None,
) -> SearchResult:
    """Searches the valid configurations of a problem.

    SIGINT, SIGTERM and SIGHUP end it early: what was measured is stored by then, and the best of it becomes the winner,
    marked as partial. Another search goes on where this one ended.

    Args:
        problem: What is to be computed.
        device: The card, or the one that stands for a compile target.
        store: Every result goes there as soon as there is one.
        options: See `SearchOptions`.
        builder: Compiles.
        progress: Is told how it goes.
        bench: Verifies and times. Without it arithmetic and compiler alone judge.
        environment: Where the bench measures. Without one the bench is the CPU's, which verifies and does not time:
            times are predicted, and there is no winner.

    Raises:
        UsageError: No configuration is valid for the problem.
        BwdtuneError: The compiler, the cache, the database or the GPU cannot be used at all.
    """
    if bench is None or environment is None:
        return _Survey(problem, device, store, options, builder, progress, bench).run()
    return _Tuning(problem, device, store, options, builder, progress, bench, environment).run()


class _Survey(CandidateSearch):
    """Every gate and no time: which configurations are worth being measured on the card.

    The gradients are checked on the CPU, by a build for the host target of the same text; nothing is where no bench is.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        store: Store,
        options: SearchOptions,
        builder: Builder,
        progress: Progress,
        bench: Bench | None,
    ) -> None:
        super().__init__(problem, device, store, options, builder, progress)
        self._bench = bench
        self._survivors: list[Row] = []
        self._unable = ""  # why this machine can verify nothing

    def find(self) -> SearchResult:
        presets, sampler = tuple(PRESETS.values()), self.options.sampler
        if sampler in ("learned", "tpe"):  # there are no times to learn from: the model's are what is known
            first = (*presets, *ranked(self.problem, self.configs, self.device, emulate=self.options.emulate))
            proposals = Proposals(self.configs, sampler="exhaustive", seed=self.seed, first=first)
            self.notes.append("candidates were proposed in the order of their predicted times, presets first")
        else:
            proposals = Proposals(self.configs, sampler=sampler, seed=self.seed, first=presets)
        status = "predicted"
        try:
            self.try_candidates(proposals)
        except KeyboardInterrupt:
            status = "partial"
        self._survivors.sort(key=_survey_order)
        if self._unable:
            self.notes.append(f"gradients could not be verified on the CPU: {self._unable}")
        gates = "every gate, the last on the CPU" if self.counts.verified == self.counts.passed else "the compiler gate"
        self.notes.append(
            f"nothing was timed, and no winner is stored: these candidates passed {gates}; their times are predicted, "
            "and no card has confirmed them"
        )
        return self.result(status, self._survivors, proposals)

    def known_outcome(self, candidate: Candidate) -> Outcome | None:
        return None  # survivors are listed each time; the cache of builds knows what does not compile

    def compile(self, candidate: Candidate) -> Compiled:
        """For the CPU too, where the compiler gate lets it pass: without dummy mma, which compute nothing."""
        compiled = super().compile(candidate)
        if compiled.refused or self._bench is None or self._unable:
            return compiled
        try:
            host_variant = self.builder(render(self.problem, candidate.config), HOST_ARCH)
        except ToolchainError as error:
            self._unable = str(error)
            return compiled
        return replace(compiled, host_variant=host_variant)

    def decide(self, candidate: Candidate, compiled: Compiled) -> Outcome:
        for variant in filter(None, (compiled.limits_variant, compiled.variant)):
            self.record(variant)
        if compiled.refused:
            return compiled.refused
        row = self._predicted(candidate.config, compiled.variant)
        host_variant = compiled.host_variant
        if host_variant and not host_variant.library:
            row, host_variant = replace(row, note=f"not verified: {HOST_ARCH}: {host_variant.error}"), None
        try:
            verification = self._verify(host_variant)
        except CandidateError as error:
            return Outcome("failed", reason=f"on the CPU: {error}")
        if verification and not verification.passed:
            return Outcome("failed", reason=f"wrong: {verification.reason}")
        if verification:
            self.counts.verified += 1
            row = replace(row, max_error=verification.max_error)
        self.counts.passed += 1
        self._survivors.append(row)
        return Outcome("unmeasured")

    def settled(self, candidate: Candidate, outcome: Outcome) -> None:
        pass  # the study is of times, and there is none

    def _verify(self, host_variant: Variant | None) -> VerificationRecord | None:
        """The third gate, on the CPU; None where the machine cannot, which is no candidate's fault.

        Raises:
            CandidateError: The variant crashed or hung.
        """
        if self._bench is None or self._unable or host_variant is None:
            return None
        variant_id = self.record(host_variant)
        try:
            with self.wait("verify"):
                verification = self._bench.verify(self.problem, host_variant)
        except WorkerError as error:
            self._unable = str(error)
            return None
        self.store.record_verification(self.problem, variant_id, verification)
        return verification

    def _predicted(self, config: Config, variant: Variant | None) -> Row:
        resources = variant.resources if variant else None
        found = predict(self.problem, config, self.device, resources, emulate=self.options.emulate)
        row = self.row(preset_name(config) or "candidate", config, variant)
        return replace(row, predicted_ms=None if self.options.emulate else found.ms, predicted_cycles=found.cycles)


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


class _Tuning(CandidateSearch):
    """All gates, the times, and the final race."""

    def __init__(
        self,
        problem: Problem,
        device: Device,
        store: Store,
        options: SearchOptions,
        builder: Builder,
        progress: Progress,
        bench: Bench,
        environment: Environment,
    ) -> None:
        super().__init__(problem, device, store, options, builder, progress)
        self._bench, self._environment = bench, environment
        self._costs: dict[Config, float] = {}
        self._unfit: dict[Config, str] = {}
        self._incumbent: Variant | None = None
        self._noisy = 0
        name = store.study_name(problem, device, options.limits, space_hash(), emulate=options.emulate)
        conditions = " ".join(
            (
                f"{environment.gpu.name} {environment.gpu.capability}",
                f"driver {environment.driver}",
                f"nvcc {environment.toolkit}",
                f"torch {environment.torch}",
                SEARCH_POLICY.id,
            )
        )
        self._log = StudyLog(store.optuna_storage(), name, space_hash=space_hash(), conditions=conditions)
        if self._log.replaces_older_space:
            self.notes.append(
                "the search space is not that of the last search: a new study begins, old results are kept"
            )

    def find(self) -> SearchResult:
        first = (*PRESETS.values(), *self._head_starts())
        learner = None
        if self.options.sampler == "learned":
            learner = Learner(
                self.problem, self.configs, self.space_device, seed=self.seed, emulate=self.options.emulate
            )
        proposals = Proposals(self.configs, sampler=self.options.sampler, seed=self.seed, first=first, learner=learner)
        for config, outcome in self._log.past():
            if proposals.learn(config, outcome):
                self.counts.earlier += 1
                self._note(config, outcome)
        try:
            if self.best and proposals.remaining and not self.options.emulate:
                self._incumbent = self.compile_all([self.best[0]])[self.best[0]].variant
            self.try_candidates(proposals)
            rows, winner = self._race()
            status = "complete"
        except KeyboardInterrupt:
            winner = self._keep_best()
            rows, status = [winner] if winner else [], "partial"
        except Exception:  # whatever it is, no candidate's fault and no reason to lose the best
            with suppress(BwdtuneError):
                self._keep_best()
            raise
        if self._noisy:
            self.notes.append(f"{self._noisy} timings were noisy: see above, and search again on an idle GPU")
        return self.result(status, rows, proposals, winner, self._environment)

    def _head_starts(self) -> list[Config]:
        """What won the problems nearest to this one on such a card: of those in the database and those shipped."""
        gpu, options = self._environment.gpu, self.options
        found: list[Winner | EmulatedBest | Shipped] = []
        if options.emulate:
            found += (best for best in self.store.emulated_bests() if best.target == options.emulate)
            found += (row for row in read_shipped() if row.kind == EMULATED)
        else:
            found += (one for one in self.store.winners() if (one.environment.gpu, one.limits) == (gpu, options.limits))
            found += (row for row in read_shipped() if row.kind == MEASURED and row.gpu.capability == gpu.capability)

        def far(other: Problem) -> tuple[bool, bool, float]:
            mine = self.problem
            return other.head_dim != mine.head_dim, other.mask != mine.mask, distance(other, mine)

        nearest = dict.fromkeys(one.config for one in sorted(found, key=lambda one: far(one.problem)))
        presets = set(PRESETS.values())
        fitting = (
            config
            for config in nearest
            if config not in presets and refusal(self.problem, config, self.space_device) is None
        )
        return list(itertools.islice(fitting, HEAD_STARTS))

    def known_outcome(self, candidate: Candidate) -> Outcome | None:
        stored = self._stored(candidate.config, candidate.source)
        if stored is None:
            return None
        return self._outcome(stored.record.cycles if self.options.emulate else stored.record.median_ms)

    def decide(self, candidate: Candidate, compiled: Compiled) -> Outcome:
        if compiled.limits_variant:
            self.record(compiled.limits_variant)
        variant_id = self.record(compiled.variant) if compiled.variant else None
        if compiled.refused or compiled.variant is None or variant_id is None:
            return compiled.refused or Outcome("failed", reason="it was not compiled")
        try:
            with self.wait("verify"):
                verification = self._bench.verify(self.problem, compiled.variant)
            self.store.record_verification(self.problem, variant_id, verification)
            if not verification.passed:
                return Outcome("failed", reason=f"wrong: {verification.reason}")
            timings = self._time_beside_incumbent(compiled.variant)
            outcome = self._outcome(self._cost(candidate.config, timings))
            if outcome.cost is not None:
                self._record_time(variant_id, candidate.config, timings, SEARCH_POLICY)
        except (CandidateError, InvalidRecord) as error:
            return Outcome("failed", reason=str(error))
        if outcome.cost is not None:
            self.counts.measured += 1
            # Cycles do not depend on the clock: nothing has to run beside an emulated one.
            if not self.options.emulate and (self.best is None or outcome.cost < self.best[1]):
                self._incumbent = compiled.variant
        return outcome

    def _cost(self, config: Config, timings: Timings) -> float:
        """What ranks a configuration: its median time in ms, or its median cycles."""
        if not self.options.emulate:
            return timings[config.id].median_ms
        counted = timings.cycles.get(config.id)
        return counted.median if counted else math.nan

    def _outcome(self, cost: float | None) -> Outcome:
        return Outcome.timed(math.nan if cost is None else cost, "cycles" if self.options.emulate else "ms")

    def settled(self, candidate: Candidate, outcome: Outcome) -> None:
        self._log.add(candidate.config, outcome)
        self._note(candidate.config, outcome)

    def _note(self, config: Config, outcome: Outcome) -> None:
        if outcome.reason:
            self._unfit[config] = outcome.reason
        if outcome.cost is not None:
            self._costs[config] = outcome.cost
            if self.best is None or outcome.cost < self.best[1]:
                self.best = (config, outcome.cost)

    def _time_beside_incumbent(self, variant: Variant) -> Timings:
        """Times a candidate in turns with the best one so far, whose time tells whether the card is what it was."""
        with self.wait("time"):
            beside = [variant, *filter(None, [self._incumbent])]
            try:
                timings = self._bench.time(self.problem, beside, (), SEARCH_POLICY)
            except CandidateError as error:
                if self._incumbent is None or error.candidate != self._incumbent.source.config.id:
                    raise
                self._incumbent = None  # it may have been struck by what this candidate left behind
                timings = self._bench.time(self.problem, [variant], (), SEARCH_POLICY)
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

    def _race(self) -> tuple[list[Row], Row | None]:
        """Times the best few again, with the presets and PyTorch's kernels; the fastest of ours is stored as winner."""
        racers, rows = self._racers()
        peers = () if self.options.emulate else PEERS
        timings: Timings | None = None
        while racers and timings is None:
            self.tell(f"racing {len(racers)} finalists and presets")
            try:
                with self.wait("time"):
                    timings = self._bench.time(self.problem, [racer.variant for racer in racers], peers, RACE_POLICY)
            except CandidateError as error:
                fallen = [racer for racer in racers if racer.variant.source.config.id == error.candidate] or racers
                rows += [replace(racer.row, note=str(error)) for racer in fallen]
                racers = [racer for racer in racers if racer not in fallen]
        if timings is None:
            self.notes.append("no candidate is right and fast enough to be timed: there is no winner")
            return rows, None
        if timings.notice:
            self.notice(timings.notice)
        rows += [_peer_row(name, timings) for name in peers]
        winner: Row | None = None
        raced = timings
        for racer in sorted(racers, key=lambda racer: self._cost(racer.variant.source.config, raced)):
            config = racer.variant.source.config
            try:
                measurement_id = self._record_time(racer.variant_id, config, timings, RACE_POLICY)
            except InvalidRecord as error:
                rows.append(replace(racer.row, note=str(error)))
                continue
            if self.options.emulate:
                row = racer.row.counted(timings.cycles[config.id], self.problem, self.device)
            else:
                row = _timed_row(racer.row, timings[config.id])
            if winner is None and racer.may_win:
                row = winner = replace(row, kernel="best" if row.kernel == "finalist" else row.kernel)
                chosen = (measurement_id, racer.verification_id)
            rows.append(row)
        if winner and not self._set_best(*chosen, partial=False):
            self.notes.append("another search has stored a faster winner meanwhile, which stays")
        return sorted(rows, key=lambda row: row.ms or row.cycles or math.inf), winner

    def _set_best(self, measurement_id: int, verification_id: int, *, partial: bool) -> bool:
        """Proposes the winner, or the best emulated one."""
        if self.options.emulate:
            return self.store.set_emulated_best(
                self.problem, self._environment, self.options.emulate, measurement_id, verification_id, partial
            )
        return self.store.set_winner(
            self.problem, self._environment, self.options.limits, measurement_id, verification_id, partial
        )

    def _present_best(self) -> Config | None:
        """What is stored as the winner, or as the best emulated one."""
        gpu = self._environment.gpu
        if self.options.emulate:
            best = self.store.emulated_best(self.problem, gpu, self.options.emulate)
            return best.config if best else None
        winner = self.store.winner(self.problem, gpu, self.options.limits)
        return winner.config if winner else None

    def _racers(self) -> tuple[list[_Racer], list[Row]]:
        """Who runs in the final race, and for each that should and cannot a row with the reason."""
        names = {config: name for name, config in PRESETS.items() if config in self.configs}
        for config in sorted(self._costs, key=self._costs.__getitem__)[:FINALISTS]:
            names.setdefault(config, "finalist")
        present = self._present_best()
        if present in self.configs:
            names.setdefault(present, "finalist")
        self.tell(f"compiling {len(names)} finalists and presets")
        racers = []
        rows = [
            self.row(name, config, note=f"not valid here: {refusal(self.problem, config, self.space_device)}")
            for name, config in PRESETS.items()
            if config not in names
        ]
        for config, compiled in self.compile_all(names).items():
            self.tell(f"checking {len(names)} finalists and presets at full size")
            try:
                racers.append(self._enter(names[config], config, compiled))
            except CandidateError as error:
                rows.append(self.row(names[config], config, compiled.variant, str(error)))
        return racers, rows

    def _enter(self, name: str, config: Config, compiled: Compiled) -> _Racer:
        """Admits a variant to the final race.

        Raises:
            CandidateError: It does not belong there: with the reason.
        """
        if config in self._unfit:
            raise CandidateError(self._unfit[config])
        variant_id = None
        for variant in filter(None, (compiled.limits_variant, compiled.variant)):
            variant_id = self.record(variant)
        if compiled.refused or compiled.variant is None or variant_id is None:
            raise CandidateError(compiled.refused.reason if compiled.refused else "it was not compiled")
        checks = [self._bench.verify_at]
        if config not in self._costs:  # no candidate of this search, nor of one before under these conditions
            checks.insert(0, self._bench.verify)
        for check in checks:
            with self.wait("verify"):
                verification = check(self.problem, compiled.variant)
            verification_id = self.store.record_verification(self.problem, variant_id, verification)
            if not verification.passed:
                raise CandidateError(f"wrong: {verification.reason}")
        row = replace(self.row(name, config, compiled.variant), max_error=verification.max_error)
        return _Racer(row, compiled.variant, variant_id, verification_id, self._may_win(compiled.limits_variant))

    def _may_win(self, limits_variant: Variant | None) -> bool:
        """Whether a variant keeps to the limits: a preset that does not still runs, to be compared with."""
        if not self.options.within:
            return True
        compiled = limits_variant.resources if limits_variant else None
        return compiled is not None and compiled.spill_bytes == 0

    def _keep_best(self) -> Row | None:
        """Makes the best that was measured so far the winner, marked as partial; returns its row."""
        for config in sorted(self._costs, key=self._costs.__getitem__):
            stored = self._stored(config, self.source(config))
            if stored is None or stored.verification_id is None or not self._kept_to_limits(config):
                continue
            self._set_best(stored.id, stored.verification_id, partial=True)
            record, variant = stored.record, stored.variant
            row = self.row(preset_name(config) or "best", config)
            if record.cycles is not None:
                samples = Cycles(record.cycles, record.cycles, record.cycles, record.samples)
                row = row.counted(samples, self.problem, self.device)
            else:
                row = replace(row, ms=record.median_ms, low_ms=record.low_ms, high_ms=record.high_ms)
            return replace(
                row,
                max_error=stored.verification.max_error if stored.verification else None,
                registers=variant.registers,
                spill_bytes=variant.spill_bytes,
            )
        return None

    def _kept_to_limits(self, config: Config) -> bool:
        """`_may_win`, from what is stored."""
        if not self.options.within:
            return True
        variant = self.store.find_variant(
            self.problem,
            config,
            source_hash=render(self.problem, config).hash,
            arch=LIMITS[self.options.within].arch,
            toolchain=self._environment.toolkit,
        )
        return variant is not None and variant.spill_bytes == 0

    def _stored(self, config: Config, source: Source) -> StoredMeasurement | None:
        """A valid time that was measured under the same conditions."""
        return self.store.measurement_for(
            self.problem,
            config,
            self._environment,
            self.options.within,
            policy=SEARCH_POLICY.id,
            source_hash=source.hash,
            kind=EMULATED if self.options.emulate else MEASURED,
        )

    def _record_time(self, variant_id: int, config: Config, timings: Timings, policy: Policy) -> int:
        """Stores a measurement.

        Raises:
            InvalidRecord: It is none.
        """
        timing, counted = timings[config.id], timings.cycles.get(config.id)
        return self.store.record_measurement(
            self.problem,
            variant_id,
            MeasurementRecord(
                environment=self._environment,
                policy=policy.id,
                median_ms=timing.median_ms,
                low_ms=timing.low_ms,
                high_ms=timing.high_ms,
                samples=timing.samples,
                clock_mhz=timings.clock_mhz,
                limits=self.options.within,
                kind=EMULATED if self.options.emulate else MEASURED,
                cycles=counted.median if counted else None,
            ),
        )


def _survey_order(row: Row) -> tuple[float, int, int, str]:
    """By the predicted cycles, which an emulated one has too; equals by name, and not by which compiler was quick."""
    name = row.config.id if row.config else ""
    return row.predicted_cycles or 0.0, row.spill_bytes or 0, row.registers or 0, name


def _timed_row(row: Row, timing: Timing) -> Row:
    return replace(row, ms=timing.median_ms, low_ms=timing.low_ms, high_ms=timing.high_ms)


def _peer_row(name: str, timings: Timings) -> Row:
    if name in timings:
        return _timed_row(Row(name), timings[name])
    return Row(name, note=timings.unavailable.get(name, "it was not timed"))
