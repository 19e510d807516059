"""The command ``tuner``: reads what people type, calls the module that does it, and prints what comes back.

A command imports what it needs when it runs, so that help and complaints about input do not wait for PyTorch.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..gen.device import H200, HOST, HOST_ARCH, RTX_5090, Device, device_for_arch
from ..gen.emulation import EMULATED
from ..gen.errors import BwdtuneError, UsageError
from ..gen.families import parse_config, short_form
from ..gen.problem import BOTTOM_RIGHT, TOP_LEFT, UNLIMITED, Problem
from .search.options import DEFAULT_TRIALS, LIMITS, SearchOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..db.records import Environment, Winner
    from .lab.gpu_client import Worker

_R = TypeVar("_R")

INTERRUPTED = 130
_PLAIN_WIDTH = 240  # of tables that go to a file or a pipe, where nothing should be cut
_EXAMPLE_SHAPE = "8_16_4096_128"

# typer has used click, and holds a copy of it since: its public exceptions lead to the base class of either.
_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="tuner",
    help="Generates, checks, times and keeps CUDA attention-backward kernels.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

_CONFIG_HELP = "A preset (v3), a preset and what differs from it ('v3 stages=3'), or a configuration's id."

DatabaseOption = Annotated[
    str | None, typer.Option("--db", help="Database file or URL (default: BWDTUNE_DB, else in the user's data).")
]
CacheOption = Annotated[
    Path | None,
    typer.Option("--cache", help="Where compiled kernels are kept (default: BWDTUNE_CACHE, else ~/.cache)."),
]
LimitsOption = Annotated[
    str | None, typer.Option("--limits", help=f"Keep to another card's limits: {', '.join(LIMITS)}.")
]
EmulateOption = Annotated[
    str | None,
    typer.Option("--emulate", help=f"Slow the GPU to another card's pace, and rank by cycles: {', '.join(EMULATED)}."),
]
ArchOption = Annotated[str | None, typer.Option("--arch", help="Compile target, such as sm_120a (default: the GPU's).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _problem(
    shape: Annotated[
        str, typer.Option("--shape", help="B_H_S_D, or B_HQ_HKV_S_D for grouped queries; S may be SQxSKV.")
    ],
    causal: Annotated[bool, typer.Option("--causal", help="A query sees no key past its diagonal.")] = False,
    window: Annotated[
        str | None,
        typer.Option("--window", help="LEFT,RIGHT: keys before and past its diagonal that a query sees; -1: all."),
    ] = None,
    alignment: Annotated[
        str, typer.Option("--alignment", help="Of the diagonal where Sq and Skv differ: top-left or bottom-right.")
    ] = TOP_LEFT,
    softcap: Annotated[bool, typer.Option("--softcap", help="Scores are capped: c * tanh(score / c).")] = False,
    varlen: Annotated[
        bool, typer.Option("--varlen", help="Packed sequences of several lengths, B of them up to S.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Gradients are the same bits at each call.")
    ] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="bf16 or fp16.")] = "bf16",
) -> Problem:
    """The problem that these options describe."""
    left, right = UNLIMITED, UNLIMITED
    if window is not None:
        limits = re.fullmatch(r"(-1|\d+),(-1|\d+)", window, re.ASCII)
        if not limits:
            raise UsageError(f"malformed window {window!r}: write LEFT,RIGHT, such as 1024,0 or -1,128")
        left, right = int(limits[1]), int(limits[2])
    if alignment not in (TOP_LEFT, BOTTOM_RIGHT):
        raise UsageError(f"unknown alignment {alignment!r}: use {TOP_LEFT} or {BOTTOM_RIGHT}")
    return Problem.parse(
        shape,
        dtype=dtype,
        causal=causal,
        window_left=left,
        window_right=right,
        bottom_right=alignment == BOTTOM_RIGHT,
        softcap=softcap,
        varlen=varlen,
        deterministic=deterministic,
    )


def _of_a_problem(default_shape: str | None = None) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """Has a command take the options that describe a problem, in place of its first parameter, the `Problem`.

    Args:
        default_shape: Of a command that can do without a shape.
    """

    def decorate(command: Callable[..., _R]) -> Callable[..., _R]:
        described = inspect.signature(_problem, eval_str=True).parameters
        shape = described["shape"] if default_shape is None else described["shape"].replace(default=default_shape)
        _, *others = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [shape, *list(described.values())[1:], *others]

        def with_options(**given: Any) -> _R:
            return command(_problem(**{name: given.pop(name) for name in described}), **given)

        # All that typer looks at; only keywords may follow in any order, with defaults or without.
        with_options.__name__, with_options.__doc__ = command.__name__, command.__doc__
        with_options.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        return with_options

    return decorate


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 for a failure, 2 for wrong use, 130 for an interrupt."""
    warnings.showwarning = _show_warning
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the caller has closed it
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        status = app(args=given or ["--help"], standalone_mode=False)
    except BwdtuneError as error:
        return _complain(str(error), error.exit_status)
    except _ClickException as error:
        return _complain(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", INTERRUPTED)
    except BrokenPipeError:  # `tuner list | head`: whoever read has enough
        sys.stdout = None
        return 1
    except OSError as error:
        return _complain(str(error), 1)
    return status if isinstance(status, int) else 0


@app.command()
@_of_a_problem()
def search(
    problem: Problem,
    trials: Annotated[int, typer.Option("--trials", help="Candidates to decide.")] = DEFAULT_TRIALS,
    time: Annotated[float | None, typer.Option("--time", help="Begin no candidate after so many seconds.")] = None,
    sampler: Annotated[str, typer.Option("--sampler", help="learned, tpe, random or exhaustive.")] = "tpe",
    seed: Annotated[int | None, typer.Option("--seed", help="Makes the sampler's choices repeatable.")] = None,
    limits: LimitsOption = None,
    emulate: EmulateOption = None,
    arch: ArchOption = None,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Search the fastest right kernel for a shape, and store it as the winner.

    Without a GPU, or for another card's --arch, nothing is timed: candidates are compiled, checked on the CPU,
    and listed by predicted times.
    With --emulate the best candidate is stored as the best emulated one, and wins nothing.
    """
    options = SearchOptions(sampler=sampler, seed=seed, trials=trials, time_s=time, limits=limits, emulate=emulate)
    from ..db.store import Store
    from ..gen.build.jobs import build
    from ..gen.build.toolchain import find_compiler
    from ..gen.paths import writable_cache_dir
    from ..gen.space import valid_configs
    from ..runtime.gpu import NoGpuError, current_device
    from .search.report import progress_for

    gpu, why_not = None, ""
    try:
        gpu = current_device()
    except NoGpuError as error:
        why_not = str(error)
    device = _target(H200.arch if arch is None and emulate and gpu is None else arch, gpu)
    if device.arch == HOST_ARCH:
        raise UsageError(f"a search is for a GPU: use --arch {RTX_5090.arch}, and `tuner verify --arch {HOST_ARCH}`")
    if options.within and LIMITS[options.within].arch == device.arch:
        options = replace(options, limits=None, emulate=None)  # they are its own
    valid_configs(problem, LIMITS[options.within] if options.within else device)
    toolkit = find_compiler(device.arch).version
    if options.within:
        find_compiler(LIMITS[options.within].arch)
    writable_cache_dir(cache)

    console = _console(stderr=True)
    if device is not gpu and arch is None:
        console.print(f"compiling for {device.name}, since {why_not}", soft_wrap=True)
    with (
        closing(Store.open(database)) as store,
        _bench(device if device is gpu else None, toolkit) as (bench, environment),
    ):
        from .search.tuning import search as find_best

        result = find_best(
            problem,
            device,
            store,
            options,
            builder=lambda source, target: build([source], target, cache=cache, jobs=1)[0],
            progress=progress_for(console),
            bench=bench,
            environment=environment,
        )
    _print(result.to_dict(), [result.table(), *result.summary()], as_json)
    if result.interrupted:
        return INTERRUPTED
    found = result.winner if result.environment else result.rows  # of a survey, what is worth being measured
    return 0 if found else 1


@app.command()
@_of_a_problem()
def verify(
    problem: Problem,
    config: Annotated[str, typer.Option("--config", help=_CONFIG_HELP)],
    arch: Annotated[str | None, typer.Option("--arch", help="host runs it on the CPU (default: the GPU's).")] = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check one configuration's gradients against fp64, and print its errors beside PyTorch's."""
    from .commands.verify import check

    chosen = parse_config(config)
    target = None if arch is None else device_for_arch(arch)
    device = HOST if target is HOST else _gpu()
    if target and target.arch != device.arch:
        raise UsageError(f"the GPU here is {device.name} ({device.arch}): what is compiled for {arch} cannot run")
    checked = check(problem, chosen, device, cache=cache)
    verdict = f"{short_form(chosen)} {'passed' if checked.passed else f'FAILED: {checked.reason}'}"
    _print(checked.to_dict(), [checked.table(), verdict], as_json)
    return 0 if checked.passed else 1


@app.command("list")
def list_(database: DatabaseOption = None, as_json: JsonOption = False) -> None:
    """List the stored winners, the best emulated configurations, and what this version ships."""
    from ..db.errors import NoDatabase
    from ..db.shipped import read_shipped
    from ..db.store import Store
    from .commands.history import (
        best_to_dict,
        bests_table,
        shipped_table,
        shipped_to_dict,
        winner_to_dict,
        winners_table,
    )

    shipped = read_shipped()
    winners, bests = [], []
    try:
        with closing(Store.open(database, read_only=True)) as store:
            winners, bests = store.winners(), store.emulated_bests()
    except NoDatabase:
        if database or not shipped:
            raise
    shown: list[Table | str] = (
        [winners_table(winners)] if winners else ["no winner is stored yet: `tuner search` finds one"]
    )
    shown += [bests_table(bests)] if bests else []
    shown += [shipped_table(shipped)] if shipped else []
    data = [winner_to_dict(winner) for winner in winners]
    _print([*data, *map(best_to_dict, bests), *map(shipped_to_dict, shipped)], shown, as_json)


@app.command()
@_of_a_problem()
def show(
    problem: Problem,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show all that is stored about a problem: winners, measurements, what failed and why."""
    from ..db.store import Store
    from .commands.history import history_tables, history_to_dict

    with closing(Store.open(database, read_only=True)) as store:
        history = store.show(problem)
    nothing = f"nothing is stored of {problem.label}: `tuner search` finds something"
    _print(history_to_dict(history), history_tables(history) or [nothing], as_json)


@app.command()
@_of_a_problem()
def bench(
    problem: Problem,
    kernels: Annotated[
        list[str] | None,
        typer.Option("--kernel", help="cudnn, fa, v1, v2, v3, best, a family (mma), or an id; may be repeated."),
    ] = None,
    direction: Annotated[str, typer.Option("--direction", help="Only backward is timed.")] = "backward",
    limits: LimitsOption = None,
    emulate: EmulateOption = None,
    cycles: Annotated[bool, typer.Option("--cycles", help="Have our kernels count their cycles.")] = False,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Race kernels against each other on the GPU, each verified first."""
    from ..db.store import Store
    from ..gen.build.toolchain import find_nvcc
    from .commands.bench import DEFAULT_EMULATED_KERNELS, DEFAULT_KERNELS, check_kernels
    from .commands.bench import bench as race

    names = kernels or (DEFAULT_EMULATED_KERNELS if emulate else DEFAULT_KERNELS)
    check_kernels(names, direction, limits, emulate)
    device = _gpu()
    with _bench(device, find_nvcc().version) as (worker, environment):
        assert environment
        report = race(
            problem,
            names,
            device,
            environment=environment,
            worker=worker,
            open_store=lambda: closing(Store.open(database, read_only=True)),
            command=shlex.join(["tuner", *sys.argv[1:]]),
            direction=direction,
            limits=limits,
            emulate=emulate,
            cycles=cycles,
            cache=cache,
        )
    _print(report.to_dict(), [report.table()], as_json)
    return 0 if any(row.ms or row.cycles for row in report.rows) else 1


@app.command()
@_of_a_problem()
def roofline(
    problem: Problem,
    arch: ArchOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a shape costs at the card's peak rates: operations, bytes, and the least time of each."""
    from .commands.roofline import roofline as draw
    from .commands.roofline import target_device

    found = draw(problem, target_device(arch))
    _print(found.to_dict(), [found.table()], as_json)


@app.command("inspect")
@_of_a_problem(_EXAMPLE_SHAPE)
def inspect_(
    problem: Problem,
    config: Annotated[str, typer.Option("--config", help=_CONFIG_HELP)],
    arch: ArchOption = None,
    cache: CacheOption = None,
    source: Annotated[bool, typer.Option("--source", help="Print the generated source.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Print the machine code (needs cuobjdump).")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compile a configuration and say what the compiler made of it: registers, spills, shared memory, occupancy."""
    from .commands import inspect as inspection
    from .commands.roofline import target_device

    found = inspection.inspect(problem, parse_config(config), target_device(arch), cache=cache)
    if source:
        print(found.variant.source.text)
    elif sass:
        assert found.variant.library, "a variant that was inspected was compiled"
        print(inspection.sass(found.variant.library))
    else:
        _print(found.to_dict(), [found.table(), found.kernels_table()], as_json)


@app.command()
@_of_a_problem()
def profile(
    problem: Problem,
    kernel: Annotated[str, typer.Option("--kernel", help="v1, v2, v3, best, or a configuration's id.")],
    limits: LimitsOption = None,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Profile one kernel on the GPU with ncu."""
    from .commands.profile import profile as measure

    chosen = None if kernel == "best" else parse_config(kernel)
    device = _gpu()
    config = chosen or _stored_winner(problem, database, limits, device.arch).config
    found = measure(problem, config, device, kernel=kernel, cache=cache)
    _print(found.to_dict(), [found.table()], as_json)


@app.command()
@_of_a_problem(_EXAMPLE_SHAPE)
def export(
    problem: Problem,
    output: Annotated[Path, typer.Option("-o", "--output", help="The directory to write.")],
    config: Annotated[
        str | None, typer.Option("--config", help="Export this one (default: the stored winner).")
    ] = None,
    arch: ArchOption = None,
    limits: LimitsOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a kernel as plain CUDA: source, header, CMake file, example and README."""
    from .commands.export import export_config, export_winner

    if config is not None:
        from .commands.roofline import target_device

        written = export_config(problem, parse_config(config), target_device(arch).arch, output)
    else:
        written = export_winner(_stored_winner(problem, database, limits, arch), output)
    _print(written.to_dict(), [f"{written.config} for {written.arch}: {written.directory}", *written.files], as_json)


@app.command()
def ship(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write (default: the package's own table).")
    ] = None,
    interrupted: Annotated[
        bool, typer.Option("--interrupted", help="Ship the best of interrupted searches, too.")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Write the table of shipped configurations from a database: its winners, and its best emulated ones.

    For whoever makes a version of this program. Nothing is added to what the table held before: it is written anew.
    """
    from ..db.store import Store
    from .commands.history import shipped_table, shipped_to_dict
    from .commands.ship import ship as write

    with closing(Store.open(database, read_only=True)) as store:
        written = write(store, output, interrupted=interrupted)
    data = {
        "file": str(written.path),
        "rows": [shipped_to_dict(row) for row in written.rows],
        "left_out": list(written.left_out),
    }
    _print(data, [shipped_table(written.rows), *written.left_out, f"written to {written.path}"], as_json)
    return 0


def _gpu() -> Device:
    """The GPU that is here, for a command that can do nothing without one."""
    from ..runtime.gpu import NoGpuError, current_device

    try:
        return current_device()
    except NoGpuError as error:
        raise NoGpuError(
            f"{error}: without a GPU, `tuner verify --arch {HOST_ARCH}` checks a kernel on the CPU, and `tuner search` "
            "predicts times"
        ) from None


@contextmanager
def _bench(gpu: Device | None, toolkit: str) -> Iterator[tuple[Worker, Environment | None]]:
    """The process that owns the GPU, and where it measures; without one, a process that verifies on the CPU."""
    from .lab.gpu_client import Worker

    if gpu is None:
        with Worker("cpu") as worker:
            yield worker, None
        return
    from ..runtime.gpu import environment

    with Worker() as worker:
        yield worker, environment(gpu, toolkit)


def _target(arch: str | None, gpu: Device | None) -> Device:
    """What to search for: the GPU where it is meant, else the card that stands for the arch."""
    if gpu and arch in (None, gpu.arch):
        return gpu
    device = device_for_arch(RTX_5090.arch if arch is None else arch)
    return gpu if gpu and gpu.arch == device.arch else device


def _stored_winner(problem: Problem, database: str | None, limits: str | None, arch: str | None) -> Winner:
    """The winner for a problem: of the GPU that is here where it has one, else the only one there is.

    Args:
        problem: The problem.
        database: As the option.
        limits: The limits that it was searched under.
        arch: Of this compile target only; None for any.
    """
    from ..db.store import Store
    from ..runtime.gpu import NoGpuError, current_device, gpu_key

    target = None if arch is None else device_for_arch(arch).arch
    with closing(Store.open(database, read_only=True)) as store:
        found = [
            winner
            for winner in store.show(problem).winners
            if winner.limits == limits and target in (None, winner.environment.arch)
        ]
    try:
        here = gpu_key(current_device())
        found = [winner for winner in found if winner.environment.gpu == here] or found
    except NoGpuError:
        pass
    asked = f"{problem.label}{f' within the limits of {limits}' if limits else ''}{f' on {arch}' if arch else ''}"
    if not found:
        raise BwdtuneError(f"there is no winner for {asked}: run `tuner search` first, or choose one with --config")
    if len(found) > 1:
        cards = ", ".join(f"{winner.environment.gpu.name} ({winner.environment.arch})" for winner in found)
        raise UsageError(f"there are winners for {asked} on several cards, {cards}: choose with --arch")
    return found[0]


def _print(data: Any, parts: Sequence[Table | str], as_json: bool) -> None:
    """Prints JSON, or tables and lines for people."""
    if as_json:
        print(json.dumps(_without_infinities(data), indent=2, allow_nan=False))
        return
    console = _console()
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(part)


def _without_infinities(data: Any) -> Any:
    """The same with null for numbers that JSON does not have, such as the error of a gradient that is not finite."""
    if isinstance(data, dict):
        return {name: _without_infinities(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_infinities(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_PLAIN_WIDTH)


def _complain(message: str, status: int) -> int:
    print(f"tuner: {' '.join(message.split())}", file=sys.stderr)
    return status


def _show_warning(message: Warning | str, *unused: Any, **also_unused: Any) -> None:
    _complain(f"warning: {message}", 0)
