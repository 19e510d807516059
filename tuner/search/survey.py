"""A search without a card to measure on: every gate, and predicted times."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from ...db.errors import DatabaseError
from ...db.records import VerificationRecord
from ...gen.build.jobs import Variant
from ...gen.build.toolchain import ToolchainError
from ...gen.device import HOST_ARCH, Device
from ...gen.emulation import EMULATED_CARDS
from ...gen.families import PRESETS, Config
from ...gen.problem import Problem
from ...gen.render import render
from ..lab.pool import Answered, Work
from ..lab.protocol import Bench, CandidateError, WorkerError
from .candidates import Builder, Candidate, CandidateSearch, Compiled
from .cost_model import ranked
from .options import SearchOptions
from .progress import Progress
from .proposals import Outcome, Proposals
from .provenance import Machine
from .result import SearchResult
from .rows import Row
from .search_store import VariantStore

if TYPE_CHECKING:
    from ...db.store import Store


class Survey(CandidateSearch):
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
        machine: Machine,
        withheld: Collection[Config],
        bench: Bench | None,
    ) -> None:
        super().__init__(problem, device, options, builder, progress, machine, withheld, {})
        self._bench, self._store = bench, VariantStore(store, problem, self.patience(store))
        self._survivors: list[Row] = []
        self._max_errors: dict[Config, float] = {}
        self._unable = ""  # why this machine can verify nothing

    def find(self) -> SearchResult:
        status, proposals, error = "predicted", None, ""
        try:
            with self.clock.phase("begin"), self.interruptible():
                proposals = self._proposals()
                self._go_on(proposals)
            self.try_candidates(proposals)
        except KeyboardInterrupt:
            status = "partial"
        except DatabaseError as lost:
            status, error = "failed", str(lost)
        self._survivors.sort(key=_survey_order)
        if self._unable:
            self.notes.append(f"gradients could not be verified on the CPU: {self._unable}")
        self.notes.append(f"nothing was timed, and no winner is stored: {self._what_passed()}")
        return self.result(status, self._survivors, proposals, error=error)

    def _proposals(self) -> Proposals:
        presets, sampler = tuple(PRESETS.values()), self.options.sampler
        if sampler not in ("learned", "tpe"):
            return Proposals(self.configs, sampler=sampler, seed=self.seed, first=presets)
        # There are no times to learn from: the model's are what is known.
        first = (*presets, *ranked(self.problem, self.configs, self.device, emulate=self.options.emulate))
        led = "" if self.withheld else ", presets first"
        self.notes.append(f"candidates were proposed in the order of their predicted times{led}")
        return Proposals(self.configs, sampler="exhaustive", seed=self.seed, first=first)

    def _go_on(self, proposals: Proposals) -> None:
        """Lists what earlier surveys let pass, and has nothing that they decided proposed again."""
        if self.options.emulate:
            return  # whether dummy mma cost it blocks of an SM is not stored
        limits_arch = EMULATED_CARDS[self.options.limits].arch if self.options.limits else None
        verified = self._bench is not None
        for one in self._store.surveyed(self.device.arch, limits_arch=limits_arch, verified=verified):
            if not proposals.learn(one.config, Outcome("unmeasured" if one.passed else "refused")):
                continue
            self.counts.earlier += 1
            if one.passed:
                self._survivors.append(replace(self.predicted(one.config, one.compiled), max_error=one.max_error))

    def _what_passed(self) -> str:
        counts = self.counts
        if not counts.decided:
            return "no candidate was decided"
        if not counts.passed:
            return f"none of the {counts.decided} candidates passed"
        gates = "every gate, the last on the CPU" if counts.verified == counts.passed else "the compiler gate"
        return f"these candidates passed {gates}; their times are predicted, and no card has confirmed them"

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
            self._store.record_variant(variant)
        if compiled.refused:
            return compiled.refused
        row = self.predicted(candidate.config, compiled.variant.resources if compiled.variant else None)
        host_variant = compiled.host_variant
        if host_variant and not host_variant.library:
            row, host_variant = replace(row, note=f"not verified: {HOST_ARCH}: {host_variant.error}"), None
        try:
            verification = self._verify(host_variant)
        except CandidateError as error:
            return Outcome("failed", reason=f"on the CPU: {error}", kind=error.fault.kind, fault=error.fault)
        if verification and not verification.passed:
            return Outcome("failed", reason=f"wrong: {verification.reason}", kind="gradients")
        if verification:
            self.counts.verified += 1
            row = replace(row, max_error=verification.max_error)
        self.counts.passed += 1
        self._survivors.append(row)
        return Outcome("unmeasured")

    def learn_from_others(self, proposals: Proposals) -> None:
        pass  # what two surveys compile is in the cache of builds

    def claim(self, config: Config, proposals: Proposals) -> bool:
        return True

    def dispatch(self) -> None:
        pass  # there is nothing to measure on

    def examined(self, work: Work, answer: Answered) -> tuple[Candidate, Outcome, Compiled] | None:
        raise AssertionError("nothing was given to a bench")

    def figures(self, config: Config, compiled: Compiled | None) -> Row:
        return replace(super().figures(config, compiled), max_error=self._max_errors.get(config))

    def settled(self, candidate: Candidate, outcome: Outcome) -> None:
        pass

    def log(self, config: Config, outcome: Outcome) -> None:
        pass  # the study is of times, and there is none

    def _verify(self, host_variant: Variant | None) -> VerificationRecord | None:
        """The third gate, on the CPU; None where the machine cannot, which is no candidate's fault.

        Raises:
            CandidateError: The variant crashed or hung.
        """
        if self._bench is None or self._unable or host_variant is None:
            return None
        variant_id = self._store.record_variant(host_variant)
        try:
            with self.wait("verify"):
                verification = self._bench.verify(self.problem, host_variant)
        except WorkerError as error:
            self._unable = str(error)
            return None
        self._store.record_verification(variant_id, verification)
        self._max_errors[host_variant.source.config] = verification.max_error
        return verification


def _survey_order(row: Row) -> tuple[float, int, int, str]:
    """By what is predicted (of an emulated one, cycles); equals by name, and not by which compiler was quick."""
    name = row.config.id if row.config else ""
    predicted = row.predicted_cycles if row.predicted_ms is None else row.predicted_ms
    return predicted or 0.0, row.spill_bytes or 0, row.registers or 0, name
