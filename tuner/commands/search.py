"""``tuner search``: finds the fastest configuration for a problem and stores it."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from ...gen.errors import UsageError
from ...gen.problem import Problem
from ..lab.timing import TimingStyle
from ..search.options import DEFAULT_TRIALS, SAMPLERS, SearchOptions
from .options import (
    ArchOption,
    CacheOption,
    DatabaseOption,
    EmulateOption,
    JsonOption,
    LimitsOption,
    MinGainOption,
    TimingOption,
    for_problem,
)
from .output import complain, console, print_result

INTERRUPTED = 130


@for_problem()
def command(
    problem: Problem,
    trials: Annotated[int, typer.Option("--trials", help="How many candidates to decide.")] = DEFAULT_TRIALS,
    time: Annotated[
        str | None,
        typer.Option(
            "--time",
            metavar="DURATION",
            help="Begin no candidate after this long: 90s, 5m, 1h, or a number of seconds.",
        ),
    ] = None,
    sampler: Annotated[str, typer.Option("--sampler", help=f"{', '.join(SAMPLERS)}.")] = SearchOptions.sampler,
    seed: Annotated[int | None, typer.Option("--seed", help="Makes the sampler's choices repeatable.")] = None,
    min_gain: MinGainOption = SearchOptions.min_gain,
    without_head_start: Annotated[
        bool,
        typer.Option("--without-head-start", help="Withhold presets, shipped configurations and what won before."),
    ] = False,
    timing: TimingOption = "",
    limits: LimitsOption = None,
    emulate: EmulateOption = None,
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", help="Measure on several GPUs at once: all of this machine, or numbers, such as 0,1,3."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="ADDRESS", help="Measure and compile on the nodes of a Ray cluster: auto, HOST:6379."
        ),
    ] = None,
    arch: ArchOption = None,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Search for the fastest correct kernel for a shape, and store it as the winner.

    Without a GPU, or for another card's --arch, nothing is timed: candidates are compiled, checked on the CPU,
    and listed by predicted time.
    With --emulate the best candidate is stored as the best emulated one; it never becomes a winner.
    """
    options = SearchOptions(
        sampler=sampler,
        seed=seed,
        trials=trials,
        time_s=_seconds(time),
        timing=TimingStyle.parse(timing),
        limits=limits,
        emulate=emulate,
        without_head_start=without_head_start,
        min_gain=min_gain,
    )
    from ..search.progress import progress_for
    from ..tune import run_search

    shown = console(stderr=True)
    result = run_search(
        problem,
        options,
        gpus=gpus,
        ray=ray,
        arch=arch,
        database=database,
        cache=cache,
        progress=progress_for(shown),
        notice=lambda text: shown.print(text, markup=False, highlight=False, soft_wrap=True),
    )
    print_result(result.to_dict(), [result.table(), *result.summary()], as_json)
    if result.error:
        complain(result.error)
        return 1
    if result.interrupted:
        return INTERRUPTED
    found = result.winner if result.environment else result.rows  # of a survey, what is worth being measured
    return 0 if found else 1


def _seconds(duration: str | None) -> float | None:
    if duration is None:
        return None
    parts = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)", duration.strip(), re.ASCII)
    if not parts or not float(parts[1]):
        raise UsageError(f"time is {duration}: write a positive duration, such as 90s, 5m or 1h")
    return float(parts[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[parts[2]]
