"""``tuner bench``: the write-up's table: named kernels, verified and then raced against each other in one run."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...db.records import EMULATED, Environment
from ...gen.build.jobs import Variant, build
from ...gen.device import Device
from ...gen.emulation import EMULATED_CARDS, emulation
from ...gen.errors import BwdtuneError, UsageError
from ...gen.families import FAMILIES, PRESETS, Config, parse_config, short_form
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.space import refusal
from ..lab.calls import CALLS
from ..lab.gate import verify_fully
from ..lab.laboratory import laboratory
from ..lab.peers import PEERS
from ..lab.protocol import Bench, CandidateError
from ..lab.timing import BENCH_POLICY
from ..search.options import refuse_unknown_cards
from ..search.rows import CYCLE_HEADINGS, Row, cell
from ..text_table import Column, TextTable, numeric
from .bench_calls import DEFAULT_CALLS, DIRECTIONS, bench_calls, check_calls
from .cards import gpu_here
from .kernels import BEST
from .options import CacheOption, DatabaseOption, EmulateOption, JsonOption, LimitsOption, for_problem
from .output import complain, print_result

if TYPE_CHECKING:
    from ...db.store import Store

DIRECTION = "backward"
DEFAULT_KERNELS = ("cudnn", "fa", "v1", "v2", "v3", BEST)
DEFAULT_EMULATED_KERNELS = (*PRESETS, BEST)
GROUPS = tuple(dict.fromkeys(group for family in FAMILIES.values() for group in (family.group, family.family)))
"""Names of which the fastest stored configuration is meant: a family, or families that stand for one together."""


@for_problem()
def command(
    problem: Problem,
    kernels: Annotated[
        list[str] | None,
        typer.Option(
            "--kernel",
            "--config",
            help=f"{', '.join((*PEERS, *PRESETS, BEST))}, a family ({', '.join(GROUPS)}), or an id; may be repeated.",
        ),
    ] = None,
    direction: Annotated[
        str,
        typer.Option(
            "--direction",
            help=f"{DIRECTION}: kernels alone; {' or '.join(DIRECTIONS)}: calls through autograd ({', '.join(CALLS)}).",
        ),
    ] = DIRECTION,
    limits: LimitsOption = None,
    emulate: EmulateOption = None,
    cycles: Annotated[bool, typer.Option("--cycles", help="Have our kernels count their cycles.")] = False,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Race kernels against each other on the GPU; each is verified first."""
    from ...db.store import Store
    from ...gen.build.toolchain import find_nvcc

    command_line = shlex.join(["tuner", *sys.argv[1:]])
    if direction in DIRECTIONS:
        return _command_calls(
            problem, kernels, direction, command_line, database, cache, as_json, limits, emulate, cycles
        )
    names = kernels or (DEFAULT_EMULATED_KERNELS if emulate else DEFAULT_KERNELS)
    check_kernels(names, direction, limits, emulate)
    device = gpu_here()
    with laboratory(device, find_nvcc().version, complain) as (worker, environment):
        assert environment
        report = bench(
            problem,
            names,
            device,
            environment=environment,
            worker=worker,
            open_store=lambda: closing(Store.open(database, read_only=True)),
            command_line=command_line,
            direction=direction,
            limits=limits,
            emulate=emulate,
            cycles=cycles,
            cache=cache,
        )
    print_result(report.to_dict(), [report.table()], as_json)
    return 0 if any(row.ms or row.cycles for row in report.rows) else 1


def _command_calls(
    problem: Problem,
    kernels: list[str] | None,
    direction: str,
    command_line: str,
    database: str | None,
    cache: Path | None,
    as_json: bool,
    *of_kernels: str | bool | None,
) -> int:
    from ...gen.build.toolchain import find_nvcc

    names = kernels or DEFAULT_CALLS
    check_calls(names, direction)
    if any(of_kernels):
        raise UsageError(f"--limits, --emulate and --cycles are for --direction {DIRECTION}")
    # The calls look for kernels by themselves, in a process that inherits this.
    os.environ.update(
        {name: str(value) for name, value in (("BWDTUNE_DB", database), ("BWDTUNE_CACHE", cache)) if value}
    )
    device = gpu_here()
    with laboratory(device, find_nvcc().version, complain) as (worker, environment):
        assert environment
        report = bench_calls(
            problem,
            names,
            device,
            environment=environment,
            worker=worker,
            command_line=command_line,
            direction=direction,
        )
    print_result(report.to_dict(), [report.table()], as_json)
    return 0 if report.timings else 1


@dataclass(frozen=True)
class BenchReport:
    """One race.

    Attributes:
        problem: What was computed.
        device: The card.
        environment: Where it ran.
        limits: ``sm_120`` where kernels were kept to that card's limits, else None.
        command: The command line.
        policy: How it was timed.
        date: When it ended, UTC.
        rows: One a kernel, in the order they were asked for.
        notices: What a person should know about the run.
        emulate: The card whose pace kernels were slowed to (``sm_120``), else None.
    """

    problem: Problem
    device: Device
    environment: Environment
    limits: str | None
    command: str
    policy: str
    date: datetime
    rows: tuple[Row, ...]
    notices: tuple[str, ...] = ()
    emulate: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``tuner bench --json``, and a file's under ``benchmarks/results``."""
        return {
            "gpu": self.environment.gpu.name,
            "driver": self.environment.driver,
            "torch": self.environment.torch,
            "nvcc": self.environment.toolkit,
            "arch": self.environment.arch,
            "command": self.command,
            "date": self.date.isoformat(timespec="seconds"),
            "policy": self.policy,
            "direction": DIRECTION,
            **self.problem.to_dict(),
            "limits": self.limits,
            "emulate": self.emulate,
            "rows": [row.to_dict(self.problem, self.device) for row in self.rows],
            "notices": list(self.notices),
        }

    def table(self) -> TextTable:
        """The write-up's table; a kernel that did not run has its reason for a configuration."""
        title = f"backward, {self.problem.label} on {self.environment.gpu.name}"
        if self.emulate:
            title += f", emulated: at the pace of {self.emulate}"
        elif self.limits:
            title += f", within the limits of {self.limits}"
        counted = any(row.counted for row in self.rows)
        figures: list[Column] = []
        if not self.emulate:
            figures += numeric("Latency")
            figures += numeric("10 % to 90 %", "Effective TFLOPS", "% of theoretical peak", optional=1)
        if counted:
            cycles, *others = CYCLE_HEADINGS
            figures += [*numeric(cycles), *numeric(*others, optional=2)]
        columns = [Column("Kernel"), *figures, *numeric("max error", optional=2), Column("configuration", folds=True)]
        table = TextTable(title, columns, caption="\n".join(self.notices))
        for row in self.rows:
            title = PEERS[row.kernel].title if row.kernel in PEERS else row.kernel
            name = f"{row.kernel} (emulated)" if row.emulate else title
            config = short_form(row.config) if row.config else ""
            if row.note:
                empty = [""] * len(figures)
                table.add_row(name, "n/a", *empty, f"{config}: {row.note}" if config else row.note)
                continue
            cells = []
            if row.timing:
                cells = [
                    f"{row.timing.median_ms:.4f} ms",
                    f"{row.timing.low_ms:.4f} to {row.timing.high_ms:.4f}",
                    cell(row.tflops(self.problem), "{:.2f}"),
                    cell(row.percent_of_peak(self.problem, self.device), "{:.2f}%"),
                ]
            cells += row.cycle_cells() if counted else []
            table.add_row(name, *cells, "" if row.max_error is None else f"{row.max_error:.5f}", config)
        return table


@dataclass
class _Entry:
    """A kernel on its way to a row.

    Attributes:
        name: As it was asked for.
        config: Its configuration; None for PyTorch's kernels, and where none is stored.
        emulate: The card that is emulated, or None.
        row: What is known of it; a note says why it will not be timed.
    """

    name: str
    config: Config | None = None
    emulate: str | None = None
    row: Row = field(init=False)

    def __post_init__(self) -> None:
        self.row = Row(kernel=self.name, config=self.config, emulate=self.emulate)

    def drop(self, reason: str) -> None:
        self.row = replace(self.row, note=reason)

    @property
    def alive(self) -> bool:
        return not self.row.note


def check_kernels(kernels: Sequence[str], direction: str, limits: str | None, emulate: str | None = None) -> None:
    """Refuses what `bench` cannot do, before anything is asked of the GPU.

    Raises:
        UsageError: An unknown kernel, direction or limit, or a card or a kernel that cannot be emulated.
    """
    if direction != DIRECTION:
        raise UsageError(f"unknown direction {direction!r}: use {DIRECTION}, {' or '.join(DIRECTIONS)}")
    refuse_unknown_cards(limits, emulate)
    for name in PEERS if emulate else ():
        if name in kernels:
            raise UsageError(f"{name} is PyTorch's: only kernels that are generated here can be emulated")
    if not kernels:
        raise UsageError(f"no kernel is named: use --kernel with {', '.join(DEFAULT_KERNELS)} or a configuration's id")
    for name in kernels:
        if name not in PEERS and name != BEST and name not in GROUPS:
            _named_config(name)


def bench(
    problem: Problem,
    kernels: Sequence[str],
    device: Device,
    *,
    environment: Environment,
    worker: Bench,
    open_store: Callable[[], AbstractContextManager[Store]],
    command_line: str,
    direction: str = DIRECTION,
    limits: str | None = None,
    emulate: str | None = None,
    cycles: bool = False,
    cache: Path | None = None,
) -> BenchReport:
    """Verifies kernels, races them interleaved, and says how long each takes.

    A kernel that is not stored, not valid, does not compile, is wrong or does not run gets a row with the reason.

    Args:
        problem: What is computed.
        kernels: ``cudnn``, ``fa``, a preset, a configuration's id, a family (its fastest stored configuration) or
            ``best`` (the stored winner).
        device: The card.
        environment: Where the worker measures.
        worker: Verifies and times.
        open_store: Opens the database; called only where a kernel is looked up in it.
        command_line: For the report.
        direction: ``backward``.
        limits: Keep to another card's limits: a key of `gen.emulation.EMULATED_CARDS`, or None.
        emulate: Slow the card to another one's pace, and keep to its limits: such a key, or
            None. Rows then have cycles and no times, and ``best`` is the best emulated configuration.
        cycles: Have our kernels count their cycles; emulated ones do.
        cache: Where builds are kept; None for the usual place.

    Raises:
        UsageError: An unknown kernel, direction or limit.
        BwdtuneError: No compiler, no place for builds, or the GPU cannot run the problem at all.
    """
    check_kernels(kernels, direction, limits, emulate)
    if emulate and EMULATED_CARDS[emulate].name == device.name:
        emulate = None  # it is that card
    if limits and EMULATED_CARDS[limits].arch == device.arch:
        limits = None  # its own
    if emulate:
        emulation(emulate, device)  # refuses a card that cannot
        limits = emulate
    entries = _resolve(problem, list(dict.fromkeys(kernels)), environment, limits, emulate, open_store)
    devices = [device, EMULATED_CARDS[limits]] if limits else [device]
    for entry in entries:
        reasons = [refusal(problem, entry.config, each) for each in devices] if entry.config else []
        for reason in filter(None, reasons):
            entry.drop(reason)
    if emulate:
        _refuse_spills(problem, entries, EMULATED_CARDS[emulate], cache)
    variants = _compile(problem, entries, device, emulate, cycles, cache)
    _verify(problem, entries, variants, worker)
    notices = _race(problem, entries, variants, device, worker)
    if cycles and not emulate:
        notices = (*notices, "our kernels were timed as builds that count their cycles")
    return BenchReport(
        problem=problem,
        device=device,
        environment=environment,
        limits=limits,
        command=command_line,
        policy=BENCH_POLICY.of(problem).id,
        date=datetime.now(timezone.utc),
        rows=tuple(entry.row for entry in entries),
        notices=notices,
        emulate=emulate,
    )


def _named_config(name: str) -> Config:
    try:
        return parse_config(name)
    except UsageError:
        known = ", ".join((*PEERS, *PRESETS, BEST, *GROUPS))
        raise UsageError(f"unknown kernel {name!r}: use {known} or an id such as {PRESETS['v2'].id}") from None


def _resolve(
    problem: Problem,
    names: Sequence[str],
    environment: Environment,
    limits: str | None,
    emulate: str | None,
    open_store: Callable[[], AbstractContextManager[Store]],
) -> list[_Entry]:
    stored = [name for name in names if name == BEST or name in GROUPS]
    found: Mapping[str, Config] = {}
    search = f"tuner search --emulate {emulate}" if emulate else "tuner search"
    emulated = f" at the pace of {emulate}" if emulate else ""
    missing = f"nothing is stored for {problem.label} on {environment.gpu.name}{emulated}: run {search} first"
    if stored:
        try:
            with open_store() as store:
                look_up = _stored_emulated if emulate else _stored
                found = look_up(problem, stored, environment, limits, store)
        except BwdtuneError as error:
            missing = str(error)
    entries = []
    for name in names:
        config = found.get(name) if name in stored else None if name in PEERS else _named_config(name)
        entry = _Entry(name, config, emulate)
        if name in stored and name not in found:
            entry.drop(missing)
        entries.append(entry)
    return entries


def _stored(
    problem: Problem, names: Sequence[str], environment: Environment, limits: str | None, store: Store
) -> dict[str, Config]:
    """The winner, and of each family the configuration with the best valid time on this kind of card."""
    found: dict[str, Config] = {}
    if BEST in names and (winner := store.winner(problem, environment.gpu, limits)):
        found[BEST] = winner.config
    if set(names) - {BEST}:
        for measurement in store.measurements(problem):  # fastest first
            record, config = measurement.record, measurement.variant.config
            if measurement.valid and record.environment.gpu == environment.gpu and record.limits == limits:
                for name in (config.family, config.group):
                    found.setdefault(name, config)
    return found


def _stored_emulated(
    problem: Problem, names: Sequence[str], environment: Environment, target: str | None, store: Store
) -> dict[str, Config]:
    """The best emulated configuration, and of each family the one with the fewest emulated cycles."""
    found: dict[str, Config] = {}
    if target is None:
        return found
    if BEST in names and (best := store.emulated_best(problem, environment.gpu, target)):
        found[BEST] = best.config
    counted: list[tuple[float, Config]] = []
    for measurement in store.measurements(problem):
        record = measurement.record
        here = record.environment.gpu == environment.gpu and record.limits == target
        if here and measurement.verified and record.kind == EMULATED and record.cycles is not None:
            counted.append((record.cycles, measurement.variant.config))
    for _, config in sorted(counted, key=lambda one: one[0]):
        for name in (config.family, config.group):
            found.setdefault(name, config)
    return found


def _refuse_spills(problem: Problem, entries: Sequence[_Entry], target: Device, cache: Path | None) -> None:
    """Drops what spills on the card that is emulated; presets are points of reference."""
    presets = set(PRESETS.values())
    configs = dict.fromkeys(entry.config for entry in entries if entry.alive and entry.config)
    candidates = [config for config in configs if config not in presets]
    built = build([render(problem, config) for config in candidates], target.arch, cache=cache) if candidates else []
    for config, variant in zip(candidates, built, strict=True):
        spills = variant.resources.spill_bytes if variant.resources else 0
        reason = f"{target.arch}: {variant.error}" if variant.status != "ok" else ""
        reason = reason or (f"{target.arch}: {spills:,} bytes of registers a thread are spilled" if spills else "")
        for entry in entries:
            if reason and entry.config == config:
                entry.drop(reason)


def _compile(
    problem: Problem,
    entries: Sequence[_Entry],
    device: Device,
    emulate: str | None,
    cycles: bool,
    cache: Path | None,
) -> dict[Config, Variant]:
    configs = list(dict.fromkeys(entry.config for entry in entries if entry.alive and entry.config))
    sources = [render(problem, config, emulate=emulate, card=device, cycles=cycles) for config in configs]
    built = build(sources, device.arch, cache=cache) if sources else []
    variants = dict(zip(configs, built, strict=True))
    for entry in entries:
        variant = variants.get(entry.config) if entry.config else None
        if variant is None:
            continue
        if variant.status != "ok":
            entry.drop(f"does not compile: {variant.error}")
        elif variant.resources:
            entry.row = replace(entry.row, **_resources(problem, variant, device))
    return variants


def _resources(problem: Problem, variant: Variant, device: Device) -> dict[str, Any]:
    assert variant.resources
    needs, compiled = variant.source.config.estimate(problem), variant.resources
    return {
        "threads": needs.threads,
        "registers": compiled.registers,
        "shared_memory_bytes": needs.shared_memory_bytes,
        "spill_bytes": compiled.spill_bytes,
        "occupancy": device.occupancy(**vars(needs.compiled(compiled.registers, compiled.shared_memory_bytes))),
    }


def _verify(problem: Problem, entries: Sequence[_Entry], variants: Mapping[Config, Variant], worker: Bench) -> None:
    """On small problems of the kind, and at the problem's own sizes. The error in the row is the largest of all."""
    errors: dict[Config, float] = {}
    failures: dict[Config, str] = {}
    for config in dict.fromkeys(entry.config for entry in entries if entry.alive and entry.config):
        try:
            verdicts = verify_fully(worker, problem, variants[config])
        except CandidateError as error:
            failures[config] = str(error)
            continue
        largest = max(verdict.max_error for verdict in verdicts)
        if math.isfinite(largest):
            errors[config] = largest
        wrong = next((verdict.reason for verdict in verdicts if not verdict.passed), None)
        if wrong is not None:
            failures[config] = f"wrong: {wrong}"
    for entry in entries:
        if entry.config in errors:
            entry.row = replace(entry.row, max_error=errors[entry.config])
        if entry.config in failures:
            entry.drop(failures[entry.config])


def _race(
    problem: Problem, entries: Sequence[_Entry], variants: Mapping[Config, Variant], device: Device, worker: Bench
) -> tuple[str, ...]:
    """Times all that is left, again without the one that crashed or hung. Returns what was noticed."""
    while True:
        configs = list(dict.fromkeys(entry.config for entry in entries if entry.alive and entry.config))
        peers = [entry.name for entry in entries if entry.alive and entry.name in PEERS]
        if not configs and not peers:
            return ()
        try:
            timings = worker.time(problem, [variants[config] for config in configs], peers, BENCH_POLICY.of(problem))
            break
        except CandidateError as error:
            culprits = [entry for entry in entries if entry.alive and _timed_as(entry) == error.candidate]
            for entry in culprits or entries:  # nobody knows whose fault it was: none of them has a time
                entry.drop(str(error))
    for entry in entries:
        if not entry.alive:
            continue
        timing, counted = timings.get(_timed_as(entry)), timings.cycles.get(_timed_as(entry))
        if counted:
            entry.row = entry.row.with_cycles(counted, problem, device)
        if timing and not entry.emulate:
            entry.row = replace(entry.row, timing=timing)
        if not (timing and (counted or not entry.emulate)):
            entry.drop(timings.unavailable.get(entry.name, "it was not timed"))
    return (timings.notice,) if timings.notice else ()


def _timed_as(entry: _Entry) -> str:
    """The name that the worker gives a kernel."""
    return entry.config.id if entry.config else entry.name
