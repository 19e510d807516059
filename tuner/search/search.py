"""The search for the configuration that computes a problem correctly and fastest.

A candidate passes three gates (arithmetic, compiler, numbers), is timed, and is stored when it is decided. At the end
the best few are raced again, side by side with the presets and PyTorch's own kernels. The fastest of ours wins.

Without a card to measure on, a search is a survey: gradients are checked on the CPU, a model predicts the times, and
nothing wins.

An emulated search slows the card to another one's pace. Cycles rank instead of times, PyTorch's kernels do not run, and
the best is stored as the best emulated configuration, which never wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...db.records import Environment
from ...gen.device import Device
from ...gen.problem import Problem
from ..lab.protocol import Bench
from .candidates import Builder
from .head_starts import head_starts
from .options import SearchOptions
from .progress import Progress
from .provenance import Machine
from .result import SearchResult
from .survey import Survey
from .tuning import Tuning

if TYPE_CHECKING:
    from ...db.store import Store


def search(
    problem: Problem,
    device: Device,
    store: Store,
    options: SearchOptions,
    *,
    builder: Builder,
    progress: Progress,
    benches: Mapping[str, Bench] | None = None,
    environment: Environment | None = None,
    machine: Machine | None = None,
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
        benches: Verify and time, each by its name: a GPU each, all of one kind. Without one arithmetic and compiler
            alone judge.
        environment: Where the benches measure. Without one there is a single bench, the CPU's, which verifies and does
            not time: times are predicted, and there is no winner.
        machine: Where it runs, to be stored with the search; None where only the machine's name is to be.

    Raises:
        UsageError: No configuration is valid for the problem.
        BwdtuneError: The compiler, the cache, the database or the GPU cannot be used at all. A database that is lost on
            the way is an `error` of the result.
    """
    machine = machine or Machine()
    withheld = head_starts(store) if options.without_head_start else ()
    about = (problem, device, store, options, builder, progress, machine, withheld)
    if not benches or environment is None:
        result = Survey(*about, next(iter(benches.values()), None) if benches else None).run()
    else:
        result = Tuning(*about, benches, environment).run()
    if not result.error and (gone := _removed_file(store)):
        return replace(result, status="failed", error=f"{gone} was removed during the search: nothing of it is stored")
    return result


def _removed_file(store: Store) -> str:
    """The database's file, if that has been removed: what is written to it then goes nowhere."""
    path = store.url.database if store.url.get_backend_name() == "sqlite" else None
    return path if path and not Path(path).exists() else ""
