"""The database as one search uses it: its problem, its conditions, and the kind of best that it stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from ...db.errors import DatabaseError
from ...db.records import (
    EMULATED,
    MEASURED,
    EmulatedBest,
    Environment,
    GpuKey,
    MeasurementRecord,
    SearchRecord,
    StoredMeasurement,
    VariantRecord,
    VerificationRecord,
    Winner,
)
from ...db.shipped import Shipped, read_shipped
from ...gen.build.jobs import CompiledResources, Variant
from ...gen.device import HOST_ARCH, Device, alike, device_for_arch
from ...gen.emulation import EMULATED_CARDS
from ...gen.errors import BwdtuneError
from ...gen.families import Config, preset_name
from ...gen.problem import Problem, distance
from ...gen.render import Source, render, template_hash
from ...gen.space import refusal
from ..lab.peers import DEFAULT
from ..lab.timing import SEARCH_POLICY, Policy, Timings
from .gates import SPILL_BOUND_BYTES
from .history import Outcomes, apart
from .options import SearchOptions
from .patience import Patience

if TYPE_CHECKING:
    from ...db.store import Store


_NEAREST, _OUTCOMES = 8, 600
"""Problems whose outcomes a search begins with, and how many: what is read before the first proposal."""


def variant_record(problem: Problem, variant: Variant) -> VariantRecord:
    """What is stored of a build."""
    compiled, needs = variant.resources, variant.source.config.estimate(problem)
    return VariantRecord(
        config=variant.source.config,
        source_hash=variant.source.hash,
        template_hash=template_hash(variant.source.config.family),
        arch=variant.arch,
        toolchain=variant.toolchain,
        status=variant.status,
        error=variant.error,
        registers=compiled.registers if compiled else None,
        spill_bytes=compiled.spill_bytes if compiled else None,
        stack_bytes=compiled.stack_bytes if compiled else None,
        shared_memory_bytes=needs.shared_memory_bytes,
        threads=needs.threads,
        compile_seconds=variant.seconds,
        machine_code=variant.machine_code,
    )


@dataclass(frozen=True)
class Surveyed:
    """What an earlier survey has decided.

    Attributes:
        config: The configuration.
        passed: Whether it passed every gate.
        compiled: What ptxas said of it.
        max_error: Its largest relative L2 error, where it was verified.
    """

    config: Config
    passed: bool
    compiled: CompiledResources
    max_error: float | None


class VariantStore:
    """Stores a search, and what was compiled and checked for its problem.

    Args:
        store: The database.
        problem: What the search is for.
        patience: Repeats what a server refuses while it restarts.

    Attributes:
        search_id: The search's own, from `begin` on.
    """

    def __init__(self, store: Store, problem: Problem, patience: Patience) -> None:
        self._store, self._problem, self._patience = store, problem, patience
        self.search_id: int | None = None

    def begin(self, search: SearchRecord) -> None:
        """Stores that the search begins."""
        self.search_id = self._patience(lambda: self._store.begin_search(search))

    def decided(self, count: int) -> None:
        """Stores how many candidates are decided."""
        if (search_id := self.search_id) is not None:
            self._patience(lambda: self._store.update_search(search_id, decided=count))

    def end(self, status: str, decided: int, error: str) -> None:
        """Stores how the search has ended; where the database was lost, that is told elsewhere."""
        if (search_id := self.search_id) is not None:
            with suppress(DatabaseError):
                self._store.end_search(search_id, status=status, decided=decided, error=error)

    def record_variant(self, variant: Variant) -> int:
        """Stores what the compiler made of a source; returns the variant's id."""
        return self._patience(lambda: self._store.record_variant(self._problem, variant_record(self._problem, variant)))

    def record_verification(self, variant_id: int, verification: VerificationRecord) -> int:
        """Stores the third gate's verdict; returns its id."""
        return self._patience(lambda: self._store.record_verification(self._problem, variant_id, verification))

    def surveyed(self, arch: str, *, limits_arch: str | None, verified: bool) -> Iterator[Surveyed]:
        """What an earlier survey has decided of this version's sources.

        What did not compile is left out: whether that lasts is known to the cache of builds alone.

        Args:
            arch: The target that it was compiled for.
            limits_arch: That of the card whose limits it had to keep to, without spills; None for no other card's.
            verified: Whether the CPU's verdict is one of the gates.
        """
        verdicts = {
            variant.config: verdict
            for variant, verdict in self._patience(lambda: self._store.verdicts(self._problem, HOST_ARCH))
            if self._is_todays(variant)
        }
        within = self._compiled_for(limits_arch) if limits_arch else None
        built = self._compiled_for(arch)
        for config in dict.fromkeys((*(within or ()), *built)):
            exempt = preset_name(config) is not None
            gates = [] if within is None else [(within.get(config), 0)]
            gates.append((built.get(config), SPILL_BOUND_BYTES))
            found, passed = None, True
            for found, bound in gates:
                passed = found is not None and (exempt or found.spill_bytes <= bound)
                if not passed:
                    break
            verdict = verdicts.get(config)
            if found is None or (passed and verified and verdict is None):
                continue
            passed = passed and (verdict is None or verdict.passed)
            yield Surveyed(config, passed, found, verdict.max_error if verdict else None)

    def _compiled_for(self, arch: str) -> dict[Config, CompiledResources]:
        """What ptxas said of today's sources."""
        return {
            # Of static shared memory nothing is stored: a kernel has little.
            variant.config: CompiledResources(variant.registers, variant.spill_bytes, variant.stack_bytes or 0, 0, 0)
            for variant in self._patience(lambda: self._store.variants(self._problem, arch))
            if variant.status == "ok"
            and variant.registers is not None
            and variant.spill_bytes is not None
            and self._is_todays(variant)
        }

    def _is_todays(self, variant: VariantRecord) -> bool:
        """Whether a variant is of the source that is rendered today, without dummy mma."""
        if variant.template_hash != template_hash(variant.config.family):
            return False  # much quicker than rendering
        try:
            return variant.source_hash == render(self._problem, variant.config).hash
        except BwdtuneError:  # somebody else's row
            return False


class SearchStore(VariantStore):
    """Stores times too, and the best of them: the winner, or in an emulated search the best emulated configuration.

    Args:
        store: The database.
        problem: What the search is for.
        options: Of the search: its limits, and whether it emulates.
        environment: Where it measures.
        patience: Repeats what a server refuses while it restarts.
    """

    def __init__(
        self, store: Store, problem: Problem, options: SearchOptions, environment: Environment, patience: Patience
    ) -> None:
        super().__init__(store, problem, patience)
        self._options, self._environment = options, environment
        self._kind = EMULATED if options.emulate else MEASURED

    def record_timing(self, variant_id: int, config: Config, timings: Timings, policy: Policy) -> int:
        """Stores a measurement; returns its id.

        Raises:
            InvalidRecord: It is none.
        """
        timing, counted = timings[config.id], timings.cycles.get(config.id)
        default = timings.get(DEFAULT)
        return self._patience(
            lambda: self._store.record_measurement(
                self._problem,
                variant_id,
                MeasurementRecord(
                    environment=self._environment,
                    policy=policy.id,
                    median_ms=timing.median_ms,
                    low_ms=timing.low_ms,
                    high_ms=timing.high_ms,
                    samples=timing.samples,
                    clock_mhz=timings.state.clock_mhz,
                    limits=self._options.within,
                    kind=self._kind,
                    cycles=counted.median if counted else None,
                    default_ms=default.median_ms if default else None,
                    default_kernel=timings.default_kernel,
                ),
                self.search_id,
            )
        )

    def measurement_of(
        self, config: Config, source: Source, machine_code: str | None = None
    ) -> StoredMeasurement | None:
        """A valid measurement that was made under the same conditions, of this source or of this machine code."""
        return self._patience(
            lambda: self._store.measurement_for(
                self._problem,
                config,
                self._environment,
                self._options.within,
                policy=self._options.timing.applied_to(SEARCH_POLICY).of(self._problem).id,
                source_hash=source.hash,
                machine_code=machine_code,
                kind=self._kind,
            )
        )

    def kept_to_limits(self, config: Config) -> bool:
        """Whether a configuration was compiled for the target of the limits, without spills."""
        within = self._options.within
        if not within:
            return True
        variant = self._patience(
            lambda: self._store.find_variant(
                self._problem,
                config,
                source_hash=render(self._problem, config).hash,
                arch=EMULATED_CARDS[within].arch,
                toolchain=self._environment.toolkit,
            )
        )
        return variant is not None and variant.spill_bytes == 0

    def best(self) -> Config | None:
        """What is stored as the best."""
        gpu, emulate = self._environment.gpu, self._options.emulate
        best: Winner | EmulatedBest | None
        if emulate:
            best = self._patience(lambda: self._store.emulated_best(self._problem, gpu, emulate))
        else:
            best = self._patience(lambda: self._store.winner(self._problem, gpu, self._options.limits))
        return best.config if best else None

    def set_best(self, measurement_id: int, verification_id: int, *, partial: bool) -> bool:
        """Proposes the best; returns whether it is that now."""
        emulate = self._options.emulate
        if emulate:
            return self._patience(
                lambda: self._store.set_emulated_best(
                    self._problem, self._environment, emulate, measurement_id, verification_id, partial
                )
            )
        return self._patience(
            lambda: self._store.set_winner(
                self._problem, self._environment, self._options.limits, measurement_id, verification_id, partial
            )
        )

    def outcomes_elsewhere(self, device: Device) -> list[Outcomes]:
        """What was found of the nearest problems, on this card and others, and of kernels of this kind.

        What this search's own study has is left out, and what is not valid: anybody may have written it.

        Args:
            device: The card of the search.
        """
        mine, emulate = self._environment, self._options.emulate

        def far(other: Problem) -> float:
            return apart((self._problem, device), (other, device))

        nearest = sorted(self._patience(self._store.problems), key=far)[:_NEAREST]
        costs: dict[tuple[Problem, GpuKey, str], dict[Config, list[float]]] = {}
        for one in self._patience(lambda: self._store.outcomes(nearest, newest=_OUTCOMES)):
            record = one.record
            within = record.limits if emulate else self._options.limits
            known = (one.problem, record.environment, record.limits) == (self._problem, mine, within)
            if record.kind != self._kind or known or (emulate and record.limits != emulate):
                continue
            cost = record.cycles if emulate else record.median_ms
            if cost is not None:
                key = (one.problem, record.environment.gpu, record.environment.arch)
                costs.setdefault(key, {}).setdefault(one.config, []).append(cost)
        found = [Outcomes(self._problem, device, compiled=self._came_through(device), limits=self._options.within)]
        for (problem, gpu, arch), times in costs.items():
            try:
                card = replace(device_for_arch(arch), name=gpu.name)
            except BwdtuneError:  # another version's target
                continue
            costs_there = {config: median(one) for config, one in times.items() if not refusal(problem, config, card)}
            found.append(Outcomes(problem, card, costs_there))
        return found

    def _came_through(self, device: Device) -> dict[Config, bool]:
        """Whether configurations were let pass by the compiler gate, for this kind of problem."""
        gates = {}
        if self._options.within:
            gates[EMULATED_CARDS[self._options.within].arch] = 0
        if not self._options.emulate:  # which builds had dummy mma in them the database does not say
            gates[device.arch] = SPILL_BOUND_BYTES
        found: dict[Config, bool] = {}
        for arch, bound in gates.items():
            for config, passed in self._passed(arch, bound).items():
                found[config] = passed and found.get(config, True)
        return {config: passed for config, passed in found.items() if not refusal(self._problem, config, device)}

    def _passed(self, arch: str, bound_bytes: int) -> dict[Config, bool]:
        """Whether what was compiled last for a target spilled no more than that."""
        return {
            one.config: one.status == "ok" and (one.spill_bytes or 0) <= bound_bytes
            for one in self._patience(lambda: self._store.variants(self._problem, arch, newest=_OUTCOMES))
            if one.status != "timeout"
        }

    def won_nearby(self) -> Iterator[Config]:
        """What won other problems on such a card, in the database and in the shipped table: the nearest first."""
        gpu, options = self._environment.gpu, self._options
        found: list[Winner | EmulatedBest | Shipped] = []
        if options.emulate:
            found += (one for one in self._patience(self._store.emulated_bests) if one.target == options.emulate)
            found += (row for row in read_shipped() if row.kind == EMULATED)
        else:
            found += (
                one
                for one in self._patience(self._store.winners)
                if (one.environment.gpu, one.limits) == (gpu, options.limits)
            )
            kin = alike(gpu.capability)
            found += (row for row in read_shipped() if row.kind == MEASURED and row.gpu.capability in kin)

        def far(other: Problem) -> tuple[bool, bool, float]:
            mine = self._problem
            return other.head_dims != mine.head_dims, other.mask != mine.mask, distance(other, mine)

        yield from dict.fromkeys(one.config for one in sorted(found, key=lambda one: far(one.problem)))
