"""A candidate's way: proposed, compiled ahead, checked by the compiler gate, decided, and reported to the sampler."""

from __future__ import annotations

import os
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ...db.records import Environment, SearchRecord
from ...gen.build.jobs import CompiledResources, Variant, job_limit
from ...gen.device import Device
from ...gen.emulation import EMULATED_CARDS, emulation
from ...gen.errors import UsageError
from ...gen.families import Config, preset_name
from ...gen.problem import Problem
from ...gen.render import Source, render
from ...gen.space import refusal, refusals, valid_configs
from ..interrupts import Interrupts
from ..lab.pool import Answered, Lost, Pool, Results, Work
from ..lab.protocol import Bench
from .clock import SearchClock
from .compilers import Compilers
from .cost_model import predict
from .gates import EMULATED_SPILL_BOUND_BYTES, SPILL_BOUND_BYTES
from .options import SearchOptions
from .patience import Patience
from .progress import Pace, Progress, Status
from .proposals import Outcome, Proposal, Proposals
from .provenance import Machine, search_record
from .result import Counts, SearchResult, kinds_of_refusal
from .rows import Row
from .search_store import VariantStore
from .trials import Trial
from .worth import Worth

if TYPE_CHECKING:
    from ...db.store import Store

LOOK_AHEAD = 12
"""Candidates that are proposed and not yet decided, for each GPU: what is chosen later is chosen knowing more. So many
compile at once: with eight, an H200 waited for compilers for a third of a search on 16 cores. Replayed searches of 30
candidates end as near to the best with twelve, but not with sixteen. A constant, as what a sampler proposes depends on
it: one seed is to be one search, on any number of cores."""

_T = TypeVar("_T")

Builder = Callable[[Source, str], Variant]
"""Compiles a source for a target. Several threads call it at once."""


@dataclass
class Candidate:
    """A configuration on its way.

    Attributes:
        config: The configuration.
        source: Its source.
        proposal: The trial that waits for it; None for one that is compiled for the final race.
        outcome: What became of it, once that is known.
    """

    config: Config
    source: Source
    proposal: Proposal | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Compiled:
    """What the compilers made of a candidate.

    Attributes:
        variant: For the card; None where the target of the limits refused it already.
        limits_variant: For the target of the limits; None where there are none.
        refused: That it was refused or did not compile; None where it passed the gate.
        host_variant: For the CPU; None where nothing is verified there.
    """

    variant: Variant | None
    limits_variant: Variant | None
    refused: Outcome | None
    host_variant: Variant | None = None


class CandidateSearch(ABC):
    """What every search shares. Its subclasses say what is known of a candidate, and what decides it.

    Args:
        problem: What is to be computed.
        device: The card, or the one that stands for a compile target.
        options: See `SearchOptions`.
        builder: Compiles.
        progress: Is told how it goes.
        machine: Where it runs.
        withheld: Configurations that are no part of the space, and do not race.
        benches: Examine candidates, each by its name; none where nothing is timed.

    Attributes:
        study: The name of the study that has its trials; empty where there is none.

    Raises:
        UsageError: No configuration is valid for the problem.
    """

    _store: VariantStore
    _environment: Environment | None = None
    study = ""

    def __init__(
        self,
        problem: Problem,
        device: Device,
        options: SearchOptions,
        builder: Builder,
        progress: Progress,
        machine: Machine,
        withheld: Collection[Config],
        benches: Mapping[str, Bench],
    ) -> None:
        self.clock = SearchClock(len(benches))
        self._machine = machine
        self.problem, self.device, self.options = problem, device, options
        self.space_device = EMULATED_CARDS[options.within] if options.within else device
        if options.emulate:
            emulation(options.emulate, device)  # refuses a card that cannot
        self.withheld = frozenset(withheld)
        with self.clock.phase("begin"):
            valid, refused = valid_configs(problem, self.space_device), refusals(problem, self.space_device)
            self.configs = tuple(config for config in valid if config not in self.withheld)
        if not self.configs:
            raise UsageError(f"all that fits {problem.label} on {self.space_device.name} is withheld as a head start")
        self.counts = Counts(valid=len(self.configs), refused_by_arithmetic=refused.total())
        self.seed = secrets.randbelow(2**32) if options.seed is None else options.seed
        self.notes: list[str] = []
        self.best: tuple[Config, float] | None = None
        self.expected_gain: float | None = None
        self._worth = Worth(options.min_gain, LOOK_AHEAD)
        self._refusals = kinds_of_refusal(refused, self.space_device)
        self._trials: list[Trial] = []
        self._unwritten: deque[tuple[Config, Outcome, Counts]] = deque()  # decided, and not stored yet
        self._pace = Pace()
        self.builder, self._progress = builder, progress
        self._interrupts = Interrupts()
        self._total = 0
        self._results = Results()
        self._benches = benches
        self._look_ahead = LOOK_AHEAD * max(1, len(benches))

    def patience(self, store: Store) -> Patience:
        """For the calls of a search to its database; an interrupt ends the waiting."""

        def sleep(seconds: float) -> None:
            with self.interruptible():
                time.sleep(seconds)

        return Patience(store.url.get_backend_name() != "sqlite", self.notice, sleep)

    def run(self) -> SearchResult:
        """Does the search, and puts everything away. See `search.search`."""
        # Of more threads than candidates are compiled ahead, some would never have anything to do.
        threads = min(self._machine.compilers or job_limit(os.environ), self._look_ahead)
        self._compilers: Compilers[Candidate, Compiled] = Compilers(self._compile, threads, self._results)
        self.pool = Pool(self._benches, self._results)
        with self._interrupts, self._progress:
            try:
                self._store.begin(self._record())
                result = self.find()
            except BaseException as error:
                self._store.end("failed", self.counts.decided, str(error))
                raise
            finally:
                self._compilers.close()
                self.pool.close()
            self._store.end(result.status, self.counts.decided, result.error)
            return result

    def _record(self) -> SearchRecord:
        return search_record(
            self.problem,
            self.options,
            self._machine,
            self._environment,
            arch=self.device.arch,
            seed=self.seed,
            study=self.study,
        )

    @abstractmethod
    def find(self) -> SearchResult:
        """Does the work; `try_candidates` and `wait` may raise KeyboardInterrupt."""

    @abstractmethod
    def learn_from_others(self, proposals: Proposals) -> None:
        """Takes in what other searches have found since the last time."""

    @abstractmethod
    def claim(self, config: Config, proposals: Proposals) -> bool:
        """Whether a configuration is this search's to try, and no other's."""

    @abstractmethod
    def known_outcome(self, candidate: Candidate) -> Outcome | None:
        """What is stored about a candidate that was just proposed; None has it compiled."""

    def compile(self, candidate: Candidate) -> Compiled:
        """The compiler gate. Runs in the compilers' threads."""
        exempt = preset_name(candidate.config) is not None  # presets are what the others are measured against
        limits_variant = None
        if self.options.within:
            plain = render(self.problem, candidate.config)
            limits_variant = self.builder(plain, EMULATED_CARDS[self.options.within].arch)
            refused = _refused(limits_variant, spill_bound_bytes=0) or self._too_much_shared_memory(limits_variant)
            if refused and not exempt:
                return Compiled(None, limits_variant, refused)
        variant = self.builder(candidate.source, self.device.arch)
        bound = EMULATED_SPILL_BOUND_BYTES if self.options.emulate else SPILL_BOUND_BYTES
        refused = _refused(variant, None if exempt else bound) or self._too_much_shared_memory(variant)
        if limits_variant and self.options.emulate and not exempt:
            refused = refused or self._fewer_blocks(variant, limits_variant)
        return Compiled(variant, limits_variant, refused)

    def _compile(self, candidate: Candidate) -> Compiled:
        with self.clock.compiling():
            return self.compile(candidate)

    @abstractmethod
    def decide(self, candidate: Candidate, compiled: Compiled) -> Outcome | None:
        """What becomes of a candidate that the compilers have done with; None where a bench has to examine it."""

    @abstractmethod
    def dispatch(self) -> None:
        """Gives the benches what waits for them."""

    @abstractmethod
    def examined(self, work: Work, answer: Answered) -> tuple[Candidate, Outcome, Compiled] | None:
        """What became of a candidate that a bench was given; None where that is still open."""

    def figures(self, config: Config, compiled: Compiled | None) -> Row:
        """What is known of a candidate beside what became of it: what it needs and what is predicted.

        Args:
            config: The candidate's.
            compiled: What the compilers made of it; None where they were not asked.
        """
        variant = (compiled.variant or compiled.limits_variant) if compiled else None
        return self.predicted(config, variant.resources if variant else None)

    def predicted(self, config: Config, resources: CompiledResources | None) -> Row:
        """A row with what the cost model says."""
        found = predict(self.problem, config, self.device, resources, emulate=self.options.emulate)
        row = self.row(preset_name(config) or "candidate", config, resources)
        return replace(row, predicted_ms=None if self.options.emulate else found.ms, predicted_cycles=found.cycles)

    @abstractmethod
    def settled(self, candidate: Candidate, outcome: Outcome) -> None:
        """Takes note of a decision."""

    @abstractmethod
    def log(self, config: Config, outcome: Outcome) -> None:
        """Stores a decision."""

    def try_candidates(self, proposals: Proposals) -> None:
        """Decides candidates until the trials, the time or the space is used up.

        They are decided in the order in which they are compiled, but told to the sampler in the order in which they
        were proposed, and each proposal follows a fixed number of outcomes. So the proposals depend on the seed and
        the outcomes alone, and not on which compiler was quick.
        """
        try:
            self._try_candidates(proposals)
        except (Exception, KeyboardInterrupt):
            self._write_all()
            raise
        self._write_all()

    def _try_candidates(self, proposals: Proposals) -> None:
        self._total = min(self.options.trials, proposals.remaining)
        self._pace = Pace()  # what was done until now has another one
        waiting: deque[Candidate] = deque()
        proposed = 0
        self.tell("searching")
        while not self._time_is_up():
            self._take_what_is_done()  # first, so that no bench waits for a proposal
            if len(waiting) < self._look_ahead and proposed < self._total:
                self.learn_from_others(proposals)
                candidate = None
                if self._is_worth_it(proposals, self._total - proposed):
                    candidate = self._propose(proposals)
                if candidate is None:
                    self._total = proposed
                    continue
                waiting.append(candidate)
                proposed += 1
                self._write_down()  # a decision makes room for a proposal, so there are few to be written
            elif not waiting:
                return
            elif waiting[0].outcome:
                # One, and then the next proposal: how many are decided by now depends on the compilers.
                _tell(proposals, waiting.popleft())
            else:
                with self.clock.phase("propose"):
                    proposals.prepare()  # while the compilers are at the first few
                if not self._write_down():
                    self._take(*self._next(self._time_left_s()))
        self.clock.none_is_ready()  # that is going to be measured
        while self.pool.busy:  # what was begun counts
            self._take(*self._next())
        self.notes.append(f"the time is up: {self._total - self.counts.decided} trials are left for the next search")

    def compile_all(self, configs: Iterable[Config]) -> dict[Config, Compiled]:
        """Compiles configurations outside of the trials; in the order of `configs`."""
        wanted = dict.fromkeys(configs)
        self._compilers.forget_waiting()
        for config in wanted:
            self._compilers.submit(Candidate(config, self.source(config)))
        compiled: dict[Config, Compiled] = {}
        while len(compiled) < len(wanted):
            task, result = self._next()
            if isinstance(task, Candidate):
                self.clock.is_taken()
            if isinstance(task, Candidate) and not task.proposal:  # else a trial that was begun before the time was up
                compiled[task.config] = result
            elif isinstance(task, Lost):
                self.notice(str(task))
        return {config: compiled[config] for config in wanted}

    def on_benches(self, phase: str, *pieces: Callable[[Bench], Any]) -> list[Answered]:
        """Has work done outside of the trials, each piece on any bench, and waits for it.

        Args:
            phase: What the time is counted to.
            pieces: The work.

        Returns:
            What came of each.

        Raises:
            WorkerError: No bench can do anything any more.
        """
        works = [Work(self.counted(phase, do), label=phase) for do in pieces]
        for work in works:
            self.pool.submit(work)
        done: dict[int, Answered] = {}
        while len(done) < len(works):
            task, result = self._next()
            if isinstance(task, Work):
                done[id(task)] = result
            elif isinstance(task, Lost):
                self.notice(str(task))
        return [done[id(work)] for work in works]

    def source(self, config: Config) -> Source:
        """What runs on the card for a configuration; slowed where another card is emulated."""
        return render(self.problem, config, emulate=self.options.emulate, card=self.device)

    def interruptible(self) -> AbstractContextManager[None]:
        """Around work of seconds that leaves nothing behind: an interrupt may strike in it.

        Raises:
            KeyboardInterrupt: One came, now or before.
        """
        return self._interrupts.striking()

    @contextmanager
    def wait(self, phase: str) -> Iterator[None]:
        """Around a wait for something that is at work: it is counted to the phase, and an interrupt may strike.

        Raises:
            KeyboardInterrupt: One came, now or before.
        """
        with self.clock.at_work(phase), self._interrupts.striking():
            yield

    def counted(self, phase: str, do: Callable[[Bench], _T]) -> Callable[[Bench], _T]:
        """The same work for a bench, whose time is counted to a phase."""

        def work(bench: Bench) -> _T:
            with self.clock.at_work(phase):
                return do(bench)

        return work

    def tell(self, phase: str, last: tuple[Config, str] | None = None, counts: Counts | None = None) -> None:
        """Tells people where it stands, or stood when it had these counts."""
        counts = counts or self.counts
        preset, default_cost = self.references()
        left_s = [self._pace.left_s(self._total - counts.decided), self._time_left_s()]
        self._progress.update(
            Status(
                phase,
                replace(counts),
                self._total,
                self.best,
                last,
                bool(self.options.emulate),
                preset=preset,
                default_cost=default_cost,
                per_second=self._pace.per_second,
                left_s=min((seconds for seconds in left_s if seconds is not None), default=None),
                workers=tuple(self.pool.doing.items()),
                expected_gain=self.expected_gain,
            )
        )

    def references(self) -> tuple[tuple[str, float] | None, float | None]:
        """What the best is told beside, where it is known: the best preset and its cost, and PyTorch's default's."""
        return None, None

    def notice(self, text: str) -> None:
        """A note that is shown now and listed at the end."""
        self.notes.append(text)
        self._progress.notice(text)

    def unfit(self, config: Config) -> str | None:
        """Why a configuration is no part of this search's space; None where it is."""
        if config in self.withheld:
            return "withheld"
        return refusal(self.problem, config, self.space_device)

    def row(self, kernel: str, config: Config, compiled: CompiledResources | None = None, note: str = "") -> Row:
        """A row with a configuration's resources and no time."""
        needs = config.estimate(self.problem)
        row = Row(
            kernel=kernel,
            config=config,
            shared_memory_bytes=needs.shared_memory_bytes,
            threads=needs.threads,
            note=note,
            emulate=self.options.emulate,
        )
        if compiled is None:
            return row
        used = needs.compiled(compiled.registers, compiled.shared_memory_bytes)
        part = self.space_device.occupancy(**vars(used))
        return replace(row, registers=compiled.registers, spill_bytes=compiled.spill_bytes, occupancy=part)

    def result(
        self,
        status: str,
        rows: Sequence[Row],
        proposals: Proposals | None,
        winner: Row | None = None,
        environment: Environment | None = None,
        error: str = "",
    ) -> SearchResult:
        """What was found, with all that was counted."""
        return SearchResult(
            problem=self.problem,
            device=self.device,
            limits=self.options.within,
            sampler=self.options.sampler,
            seed=self.seed,
            environment=environment,
            status=status,
            exhausted=proposals is not None and proposals.remaining == 0 and self.counts.decided == self._total,
            winner=winner,
            rows=tuple(rows),
            counts=self.counts,
            arithmetic_refusals=self._refusals,
            trials=tuple(self._trials),
            seconds=self.clock.seconds(),
            expected_gain=self.expected_gain,
            notes=tuple(self.notes),
            emulate=self.options.emulate,
            error=error,
        )

    def _is_worth_it(self, proposals: Proposals, left: int) -> bool:
        """Whether the trials that are left can be expected to gain something."""
        with self.clock.phase("propose"):
            self.expected_gain = proposals.expected_gain(left)
        if self._worth.go_on(self.expected_gain):
            return True
        self.notice(
            f"the {left} trials that are left are expected to gain {self.expected_gain:.2%}, less than "
            f"{self.options.min_gain:.2%}: the search ends here (--min-gain 0 goes on)"
        )
        return False

    def _propose(self, proposals: Proposals) -> Candidate | None:
        """The next candidate; None where all that is left is known to, or claimed by, other searches."""
        while True:
            with self.clock.phase("propose"):
                proposal = proposals.next()
            if proposal is None:
                return None
            if self.claim(proposal.config, proposals):
                break
            proposals.postpone(proposal)
        candidate = Candidate(proposal.config, self.source(proposal.config), proposal)
        known = self.known_outcome(candidate)
        if known:
            self.counts.stored += 1
            self._settle(candidate, known, stored=True)
        else:
            self._compilers.submit(candidate)
        return candidate

    def _write_all(self) -> None:
        while self._write_down():
            pass

    def _write_down(self) -> bool:
        """Stores a decision, and tells it; returns whether there was one.

        That takes a while, and is done after what GPUs and compilers wait for.
        """
        if not self._unwritten:
            return False
        config, outcome, counts = self._unwritten.popleft()
        self.log(config, outcome)
        self._store.decided(counts.decided)
        self.tell("searching", (config, outcome.reason), counts)
        return True

    def _next(self, timeout_s: float | None = None) -> tuple[Any, Any]:
        """Waits for the compilers and the benches: a task and its result; twice None where the time is over."""
        with self._interrupts.striking():
            task, result = self._results.next(timeout_s)
        if isinstance(task, Work):
            self.pool.release(task)
        elif isinstance(task, Lost):
            self.clock.loses_gpu()
        return task, result

    def _take_what_is_done(self) -> None:
        """Goes on with all that compilers and benches have done by now."""
        self.dispatch()
        while (done := self._next(0))[0] is not None:
            self._take(*done)
            self.dispatch()

    def _take(self, task: Any, result: Any) -> None:
        """Goes on with what was done."""
        if isinstance(task, Lost):
            self.notice(str(task))
        elif isinstance(task, Candidate):
            if outcome := self.decide(task, result):
                self.clock.is_taken()
                self._settle(task, outcome, result)
        elif isinstance(task, Work) and (found := self.examined(task, result)):
            self._settle(*found)

    def _settle(
        self, candidate: Candidate, outcome: Outcome, compiled: Compiled | None = None, *, stored: bool = False
    ) -> None:
        candidate.outcome = outcome
        self.counts.decided += 1
        if outcome.state == "refused":
            self.counts.refused += 1
        elif outcome.state == "failed":
            self.counts.failed += 1
        self._pace.decided()
        row = self.figures(candidate.config, compiled)
        self._trials.append(Trial(self.counts.decided, row, outcome, stored, self.clock.elapsed_s()))
        self.settled(candidate, outcome)
        self._unwritten.append((candidate.config, outcome, replace(self.counts)))

    def _too_much_shared_memory(self, variant: Variant) -> Outcome | None:
        """That a block's static shared memory, of which arithmetic knows nothing, leaves too little for the dynamic."""
        if not variant.resources:
            return None
        dynamic = variant.source.config.estimate(self.problem).shared_memory_bytes
        static, most = variant.resources.shared_memory_bytes, self.space_device.shared_memory_per_block_bytes
        if dynamic + static <= most:
            return None
        return Outcome(
            "refused",
            reason=f"{variant.arch}: {dynamic:,} bytes of shared memory and {static:,} static ones: a block of "
            f"{self.space_device.name} has at most {most:,}",
            kind="shared memory",
        )

    def _fewer_blocks(self, emulated: Variant, real: Variant) -> Outcome | None:
        """That an emulated build has too many registers for as many blocks an SM as the kernel itself has on its
        card.
        """
        if not (emulated.resources and real.resources):
            return None
        needs = real.source.config.estimate(self.problem)
        emulated_blocks, real_blocks = (
            self.space_device.blocks_per_sm(**vars(needs.compiled(compiled.registers, compiled.shared_memory_bytes)))
            for compiled in (emulated.resources, real.resources)
        )
        if emulated_blocks >= real_blocks:
            return None
        return Outcome(
            "refused",
            reason=f"{emulated.resources.registers} registers with dummy mma leave {emulated_blocks} blocks an SM, and "
            f"{real.resources.registers} without {real_blocks}: it would be another kernel's pace",
            kind="occupancy",
        )

    def _time_left_s(self) -> float | None:
        limit = self.options.time_s
        return None if limit is None else max(0.0, limit - self.clock.elapsed_s())

    def _time_is_up(self) -> bool:
        return self._time_left_s() == 0.0


def _tell(proposals: Proposals, candidate: Candidate) -> None:
    assert candidate.proposal
    assert candidate.outcome
    proposals.tell(candidate.proposal, candidate.outcome)


def _refused(variant: Variant, spill_bound_bytes: int | None) -> Outcome | None:
    """Why the compiler gate does not let a variant pass; with no bound, spills do not matter."""
    if variant.status != "ok":
        reason = f"{variant.arch}: {variant.error or variant.status}"
        return Outcome("failed", reason=reason, lasting=variant.lasting, kind="compiler")
    spills = variant.resources.spill_bytes if variant.resources else 0
    if spill_bound_bytes is None or spills <= spill_bound_bytes:
        return None
    passing = f"at most {spill_bound_bytes} pass" if spill_bound_bytes else "none may"
    reason = f"{variant.arch}: {spills:,} bytes of registers a thread are spilled, {passing}"
    return Outcome("refused", reason=reason, kind="spills")
