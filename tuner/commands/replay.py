"""``tuner replay``: how near samplers come to the best of recorded sweeps, without a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...gen.errors import UsageError
from ...gen.problem import Problem
from ..search.options import SAMPLERS, SearchOptions
from .options import DatabaseOption, JsonOption, MinGainOption, for_shapes
from .output import print_result

if TYPE_CHECKING:
    from rich.table import Table

    from ..search.replay import ModelQuality, Replay
    from ..search.sweep import Sweep

    _Row = tuple[str, Sweep, list[Replay], ModelQuality]


@for_shapes
def command(
    problem_of: Callable[[str], Problem],
    sweeps: Annotated[list[Path] | None, typer.Option("--sweep", help="A recorded sweep; may be repeated.")] = None,
    database: DatabaseOption = None,
    shape: Annotated[
        str | None, typer.Option("--shape", help="In place of a sweep: what the database has measured of this shape.")
    ] = None,
    sampler: Annotated[str, typer.Option("--sampler", help=f"{', '.join(SAMPLERS)}.")] = SearchOptions.sampler,
    candidates: Annotated[int, typer.Option("--candidates", help="Candidates that each search decides.")] = 30,
    seeds: Annotated[int, typer.Option("--seeds", help="Searches to replay, each with its own seed.")] = 50,
    without_head_start: Annotated[
        bool, typer.Option("--without-head-start", help="Withhold presets and shipped configurations.")
    ] = False,
    history: Annotated[
        list[Path] | None,
        typer.Option("--history", help="A sweep whose outcomes the learned sampler begins with; may be repeated."),
    ] = None,
    min_gain: MinGainOption = SearchOptions.min_gain,
    as_json: JsonOption = False,
) -> None:
    """Replay a sampler against recorded sweeps, beside random choice.

    A sweep has the times of many configurations of one problem, and what the compiler refused. Each seed is one search
    over them, with timings that scatter by half a percent; its gap is how much longer the best of its finalists takes
    than the best of the sweep. A sweep is no history of its own replay. Options of the problem, such as --causal,
    belong to --shape.
    """
    from ..search.head_starts import head_starts
    from ..search.replay import model_quality, replay
    from ..search.sweep import Sweep

    if sampler not in SAMPLERS:
        raise UsageError(f"unknown sampler {sampler!r}: use one of {', '.join(SAMPLERS)}")
    if candidates < 1 or seeds < 1:
        raise UsageError("--candidates and --seeds must be at least 1")
    if bool(sweeps) == (shape is not None):
        raise UsageError("name either recorded sweeps (--sweep FILE) or a shape of the database (--shape)")
    named = {path.stem: Sweep.read(path) for path in sweeps or ()}
    if shape is not None:
        problem = problem_of(shape)
        named[problem.label] = _stored(problem, database)
    options: dict[str, Any] = {"withheld" if without_head_start else "first": head_starts()}
    before = {path.resolve(): Sweep.read(path) for path in history or ()}
    files = {path.stem: path.resolve() for path in sweeps or ()}
    rows = []
    for name, sweep in named.items():
        options["history"] = [other for path, other in before.items() if path != files.get(name)]
        found = [
            replay(sweep, each, candidates=candidates, seeds=range(seeds), min_gain=min_gain, **options)
            for each in dict.fromkeys((sampler, "random"))
        ]
        rows.append((name, sweep, found, model_quality(sweep)))
    data = [
        {
            "sweep": name,
            "configurations": len(sweep.rows),
            "timed": len(sweep.timed),
            "without_head_start": without_head_start,
            "history": [path.stem for path in before if path != files.get(name)],
            **found[0].to_dict(),
            "random": found[-1].to_dict(),
            "model": quality.to_dict(),
        }
        for name, sweep, found, quality in rows
    ]
    print_result(data, [_table(rows), _models(rows)], as_json)


def _stored(problem: Problem, database: str | None) -> Sweep:
    from ...db.store import Store
    from ..search.sweep import sweep_of

    with closing(Store.open(database, read_only=True)) as store:
        return sweep_of(store.show(problem))


def _table(rows: list[_Row]) -> Table:
    from rich.table import Table

    table = Table("sweep", "sampler", "decided", "median gap", "within 1 %")
    for name, _, found, _ in rows:
        for one in found:
            gaps = (f"{one.median_gap:.2%}", f"{one.share_within_1_percent:.0%}")
            table.add_row(name, one.sampler, f"{statistics.mean(one.decided):.1f}", *gaps)
    return table


def _models(rows: list[_Row]) -> Table:
    from rich.table import Table

    table = Table(
        "sweep", "rank correlation: cost model", "learned", "top tenth: cost model", "learned", "ceiling", "spill AUC"
    )
    for name, _, _, quality in rows:
        figures = (
            quality.rank_correlation,
            quality.learned_rank_correlation,
            quality.top_decile_rank_correlation,
            quality.learned_top_decile_rank_correlation,
            quality.top_decile_ceiling,
            quality.spill_auc,
        )
        table.add_row(name, *("-" if figure is None else f"{figure:.2f}" for figure in figures))
    return table
