"""What a database knows of a problem on a card: its candidates in the order in which they were decided, and the races.

Whatever is read was checked by `db` or is checked here: the database may be anybody's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...db.records import (
    EMULATED,
    MEASURED,
    EmulatedBest,
    ProblemHistory,
    StoredMeasurement,
    StoredSearch,
    VariantRecord,
    VerificationRecord,
    Winner,
)
from ...gen.build.jobs import CompiledResources
from ...gen.device import HOST_ARCH, KNOWN_DEVICES, Device, device_for_arch
from ...gen.errors import BwdtuneError, UsageError
from ...gen.families import Config, parse_config, preset_name
from ...gen.problem import Problem
from ...gen.space import refusal
from ..lab.paired import Ratio
from ..lab.peers import PEERS
from ..lab.timing import Cycles, Timing
from ..search.cost_model import predict
from ..search.gates import SPILL_BOUND_BYTES
from ..search.proposals import LoggedTrial, Outcome, conditions, read_log
from ..search.rows import Row

if TYPE_CHECKING:
    from ...db.store import Store

_STUDY = re.compile(r"(?P<gpu>.+) \((?P<arch>\w+)\)(?: limits (?P<limits>\w+)| emulating (?P<emulate>\w+))? space \w+")


@dataclass(frozen=True, order=True)
class Target:
    """What results are comparable within, for one problem.

    Attributes:
        gpu: The card that measured; empty where none did.
        arch: The compile target.
        limits: The card whose limits candidates kept to, or the empty string.
        emulate: The card whose pace they were slowed to, or the empty string; cycles rank then.
    """

    gpu: str
    arch: str
    limits: str = ""
    emulate: str = ""

    @property
    def label(self) -> str:
        """For people."""
        where = self.gpu or f"{self.arch}, without a GPU"
        kept_to = f", emulating {self.emulate}" if self.emulate else f", within the limits of {self.limits}"
        return where + (kept_to if self.emulate or self.limits else "")


@dataclass(frozen=True)
class Entry:
    """A candidate.

    Attributes:
        number: Its place in the order of decisions, from 1; None of what was measured and is no candidate of a logged
            search, such as a preset that raced.
        row: Its configuration and figures.
        outcome: What became of it.
        search_id: The search that it belongs to, where that is known.
    """

    number: int | None
    row: Row
    outcome: Outcome
    search_id: int | None

    @property
    def config(self) -> Config:
        assert self.row.config
        return self.row.config


@dataclass(frozen=True)
class Lane:
    """A kernel of a race.

    Attributes:
        name: A configuration's id, or one of PyTorch's kernels.
        config: The configuration; None for PyTorch's.
        median: Of its times in ms, or of its cycles.
        low: Lower end of the interval, where that is known.
        high: Upper end.
        ratio: How many times as long as the winner it took, round by round; None where that is not known.
    """

    name: str
    config: Config | None
    median: float
    low: float | None = None
    high: float | None = None
    ratio: Ratio | None = None


@dataclass(frozen=True)
class Race:
    """Kernels that were timed side by side.

    Attributes:
        date: When; empty where it is not known.
        policy: How they were timed.
        clock_mhz: The card's clock under this load, where it is known.
        default_kernel: Which kernel PyTorch's default was; empty where that is not known.
        lanes: Fastest first.
    """

    date: str
    policy: str
    clock_mhz: float | None
    default_kernel: str
    lanes: tuple[Lane, ...]

    def lane(self, name: str) -> Lane | None:
        """That of a kernel."""
        return next((lane for lane in self.lanes if lane.name == name), None)


@dataclass(frozen=True)
class History:
    """What is known of a problem on a target.

    Attributes:
        problem: The problem.
        target: The target.
        device: The card, or what stands for it: see `stand_in`.
        conditions: What the times depend on besides the configuration; empty where nothing was timed.
        entries: Those of the newest conditions, in the order of decisions.
        logged: Whether a study has the candidates; else they are what was measured, in the order of that.
        left_out: How many candidates were decided under earlier conditions.
        winner: The stored winner, or the best emulated configuration.
        race: The newest one.
        searches: Oldest first.
    """

    problem: Problem
    target: Target
    device: Device
    conditions: str
    entries: tuple[Entry, ...]
    logged: bool
    left_out: int
    winner: Winner | EmulatedBest | None
    race: Race | None
    searches: tuple[StoredSearch, ...]

    @property
    def stand_in(self) -> bool:
        """Whether the card's own peaks are not known, and those of another of its architecture serve."""
        return bool(self.target.gpu) and self.device.name != self.target.gpu

    @property
    def emulated(self) -> bool:
        """Whether cycles rank, and not times."""
        return bool(self.target.emulate)


def read_histories(store: Store, problems: Sequence[Problem]) -> list[History]:
    """What a database knows of problems, one for each problem and target; of what is unknown there is none.

    Args:
        store: The database.
        problems: Which.

    Raises:
        DatabaseError: It cannot be read.
    """
    storage = store.recorded_studies()
    names = [study.study_name for study in storage.get_all_studies()] if storage else []
    bests = store.emulated_bests()
    found: list[History] = []
    for problem in problems:
        history = store.show(problem)
        studies = _studies(problem, names)
        targets = {
            *studies,
            *(_target_of_measurement(one) for one in history.measurements),
            *(_target_of_survey(search) for search in history.searches if search.record.gpu is None),
        }
        for target in sorted(targets, key=lambda target: (not target.gpu, bool(target.emulate), target)):
            try:
                device = _device(target)
            except UsageError:  # no target of this version
                continue
            trials, races = read_log(storage, studies.get(target, ())) if storage else ([], [])
            best = next((best for best in bests if best.problem == problem and _is_for(best, target)), None)
            reader = _Reader(store, problem, target, device, history)
            found.append(reader.read(trials, races, best))
    return found


def _studies(problem: Problem, names: Sequence[str]) -> dict[Target, list[str]]:
    """The names of a problem's studies; see `Store.study_name`."""
    found: dict[Target, list[str]] = {}
    prefix = f"{problem.label} on "
    for name in names:
        if name.startswith(prefix) and (parts := _STUDY.fullmatch(name.removeprefix(prefix))):
            target = Target(parts["gpu"], parts["arch"], parts["limits"] or "", parts["emulate"] or "")
            found.setdefault(target, []).append(name)
    return found


def _target_of_measurement(one: StoredMeasurement) -> Target:
    gpu, arch, limits = one.record.environment.gpu.name, one.record.environment.arch, one.record.limits or ""
    return Target(gpu, arch, emulate=limits) if one.record.kind == EMULATED else Target(gpu, arch, limits)


def _target_of_survey(search: StoredSearch) -> Target:
    options = search.record.options
    return Target("", search.record.arch, str(options.get("limits") or ""), str(options.get("emulate") or ""))


def _is_for(best: EmulatedBest, target: Target) -> bool:
    return (best.environment.gpu.name, best.target) == (target.gpu, target.emulate)


def _device(target: Target) -> Device:
    """The card by its name, else what stands for the architecture.

    Raises:
        UsageError: No kernel of this version is made for it.
    """
    stands = device_for_arch(target.arch)
    return next((device for device in KNOWN_DEVICES if device.name == target.gpu), stands)


class _Reader:
    """Puts together what is stored of a problem on a target."""

    def __init__(self, store: Store, problem: Problem, target: Target, device: Device, history: ProblemHistory) -> None:
        self._problem, self._target, self._device, self._history = problem, target, device, history
        self._variants = {variant.config: variant for variant in store.variants(problem, target.arch)}
        self._rejected: dict[Config, VerificationRecord] = {}
        for variant, verdict in history.rejected:
            if variant.arch in (target.arch, HOST_ARCH):
                self._rejected[variant.config] = verdict
        self._measured = [one for one in history.measurements if _target_of_measurement(one) == target]
        self._verdicts = (
            {} if target.gpu else {variant.config: verdict for variant, verdict in store.verdicts(problem, HOST_ARCH)}
        )

    def read(
        self, trials: Sequence[LoggedTrial], races: Sequence[Mapping[str, Any]], best: EmulatedBest | None
    ) -> History:
        made_under = trials[-1].made_under if trials else self._newest_conditions()
        present = [trial for trial in trials if trial.made_under == made_under]
        entries = list(self._candidates(present, made_under))
        known = {entry.config for entry in entries}
        entries += self._besides(known, made_under, numbered=not entries)
        winner = best if self._target.emulate else self._winner()
        return History(
            problem=self._problem,
            target=self._target,
            device=self._device,
            conditions=made_under,
            entries=tuple(entries),
            logged=bool(trials),
            left_out=len(trials) - len(present),
            winner=winner,
            race=self._race(races, winner, entries),
            searches=tuple(search for search in self._history.searches if self._is_of_target(search)),
        )

    def _newest_conditions(self) -> str:
        newest = max(self._measured, key=lambda one: one.id, default=None)
        return conditions(newest.record.environment, newest.record.policy) if newest else ""

    def _candidates(self, trials: Sequence[LoggedTrial], made_under: str) -> Iterator[Entry]:
        times: dict[tuple[Config, int | None], StoredMeasurement] = {}
        for one in sorted(self._measured, key=lambda one: one.id):
            if conditions(one.record.environment, one.record.policy) == made_under:
                times[one.variant.config, one.search_id] = times[one.variant.config, None] = one
        for number, trial in enumerate(trials, start=1):
            config = trial.config
            one_timed = times.get((config, trial.search_id)) or times.get((config, None))
            timed = one_timed if trial.outcome.state == "measured" else None
            yield Entry(number, self._row(config, timed), trial.outcome, trial.search_id)

    def _besides(self, known: set[Config], made_under: str, *, numbered: bool) -> Iterator[Entry]:
        """What was decided and is in no log: measured of old or in a race alone, or by a survey."""
        if not self._target.gpu:
            yield from self._surveyed()
            return
        environment = made_under.rpartition(" ")[0]
        first: dict[Config, StoredMeasurement] = {}
        for one in sorted(self._measured, key=lambda one: (one.created_at, one.id)):
            if conditions(one.record.environment, one.record.policy).rpartition(" ")[0] == environment:
                first.setdefault(one.variant.config, one)
        for number, (config, one) in enumerate(first.items(), start=1):
            if config not in known:
                cost = one.record.cycles if self._target.emulate else one.record.median_ms
                outcome = Outcome.timed(math.nan if cost is None else cost)
                yield Entry(number if numbered else None, self._row(config, one), outcome, one.search_id)

    def _surveyed(self) -> Iterator[Entry]:
        """What the compiler and the CPU said of candidates that nothing timed."""
        for config, variant in self._variants.items():
            verdict, spills = self._verdicts.get(config), _count(variant.spill_bytes) or 0
            if variant.status != "ok":
                outcome = Outcome("failed", reason=variant.error or variant.status, kind="compiler")
            elif verdict and not verdict.passed:
                outcome = Outcome("failed", reason=f"wrong: {verdict.reason}", kind="gradients")
            elif spills > SPILL_BOUND_BYTES and preset_name(config) is None:
                outcome = Outcome("refused", reason=f"{spills:,} bytes are spilled", kind="spills")
            elif verdict:
                outcome = Outcome("unmeasured")
            else:
                continue  # of another problem of this kind, perhaps
            row = self._row(config, None)
            yield Entry(None, replace(row, max_error=_error(verdict)), outcome, None)

    def _row(self, config: Config, timed: StoredMeasurement | None) -> Row:
        variant = timed.variant if timed else self._variants.get(config)
        verdict = timed.verification if timed else self._rejected.get(config)
        row = _with_compiled(Row(preset_name(config) or "candidate", config), variant)
        row = replace(row, max_error=_error(verdict), emulate=self._target.emulate or None)
        if timed:
            row = _with_times(row, timed, self._problem, self._device)
        if refusal(self._problem, config, self._device):  # by this version's arithmetic
            return row
        compiled = None
        if row.registers is not None:
            compiled = CompiledResources(row.registers, row.spill_bytes or 0, 0, 0, 0)
        found = predict(self._problem, config, self._device, compiled, emulate=self._target.emulate or None)
        return replace(row, predicted_ms=None if self._target.emulate else found.ms, predicted_cycles=found.cycles)

    def _winner(self) -> Winner | None:
        mine = (self._target.gpu, self._target.limits)
        winners = (one for one in self._history.winners if (one.environment.gpu.name, one.limits or "") == mine)
        return next(winners, None)

    def _is_of_target(self, search: StoredSearch) -> bool:
        gpu = search.record.gpu.name if search.record.gpu else ""
        return replace(_target_of_survey(search), gpu=gpu) == self._target

    def _race(
        self, races: Sequence[Mapping[str, Any]], winner: Winner | EmulatedBest | None, entries: Sequence[Entry]
    ) -> Race | None:
        """The newest that was logged; else the winner beside PyTorch's default, as they are stored."""
        if isinstance(winner, EmulatedBest):
            return _race_of_cycles(winner, entries)
        read = [race for race in map(_logged_race, races) if race]
        newest = max(reversed(read), key=lambda race: race.date, default=None)  # of one second, what was logged last
        if newest or winner is None:
            return newest
        lanes = [Lane(winner.config.id, winner.config, winner.median_ms, winner.low_ms, winner.high_ms)]
        if winner.default_ms:
            lanes.append(Lane("default", None, winner.default_ms))
        return Race(
            f"{winner.created_at:%Y-%m-%d %H:%M}",
            winner.policy,
            None,
            winner.default_kernel or "",
            tuple(sorted(lanes, key=lambda lane: lane.median)),
        )


def _with_compiled(row: Row, variant: VariantRecord | None) -> Row:
    if variant is None:
        return row
    return replace(
        row,
        registers=_count(variant.registers),
        spill_bytes=_count(variant.spill_bytes),
        shared_memory_bytes=_count(variant.shared_memory_bytes),
        threads=_count(variant.threads),
    )


def _with_times(row: Row, one: StoredMeasurement, problem: Problem, device: Device) -> Row:
    record = one.record
    if record.kind == MEASURED:
        return replace(row, timing=Timing(record.median_ms, record.low_ms, record.high_ms, record.samples))
    if record.cycles is None:
        return row
    return row.with_cycles(Cycles(record.cycles, record.cycles, record.cycles, record.samples), problem, device)


def _race_of_cycles(best: EmulatedBest, entries: Sequence[Entry]) -> Race:
    """The best emulated configuration beside the presets, by what each counted in the search."""
    counted = {best.config: best.cycles}
    for entry in entries:
        if preset_name(entry.config) and entry.row.cycles:
            counted.setdefault(entry.config, entry.row.cycles)
    lanes = [Lane(config.id, config, cycles) for config, cycles in counted.items()]
    date = f"{best.created_at:%Y-%m-%d %H:%M}"
    return Race(date, best.policy, None, "", tuple(sorted(lanes, key=lambda lane: lane.median)))


def _logged_race(data: Mapping[str, Any]) -> Race | None:
    """A race from a study's attribute; what is no time of it is left out, and without the winner's there is none."""
    medians, intervals, ratios = (_mapping(data, name) for name in ("median_ms", "interval_ms", "ratio_to_winner"))
    lanes = []
    for name, median in medians.items():
        if not _is_time(median):
            continue
        try:
            config = None if name in PEERS else parse_config(name)
        except BwdtuneError:
            continue
        interval = intervals.get(name)
        low, high = (None, None)
        if isinstance(interval, list) and len(interval) == 2 and all(map(_is_time, interval)):
            low, high = interval
        lanes.append(Lane(name, config, median, low, high, _ratio(ratios.get(name))))
    if data.get("winner") not in [lane.name for lane in lanes]:
        return None
    clock = _mapping(data, "gpu").get("clock_mhz")
    return Race(
        str(data.get("date", "")).removesuffix("+00:00").replace("T", " "),
        str(data.get("policy", "")),
        clock if _is_time(clock) else None,
        str(data.get("default_kernel") or ""),
        tuple(sorted(lanes, key=lambda lane: lane.median)),
    )


def _ratio(data: object) -> Ratio | None:
    if not isinstance(data, dict):
        return None
    ends = [data.get(name) for name in ("median", "low", "high")]
    if not all(isinstance(end, (int, float)) and not isinstance(end, bool) and end >= 0 for end in ends):
        return None
    return Ratio(*map(float, ends))  # type: ignore[arg-type]


def _mapping(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def _error(verdict: VerificationRecord | None) -> float | None:
    """The largest error of a verdict, where it is a finite number."""
    found = verdict.max_error if verdict else None
    return found if isinstance(found, float) and math.isfinite(found) else None


def _count(value: object) -> int | None:
    """A number of something; None of anything else, which SQLite may hold in any column."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
