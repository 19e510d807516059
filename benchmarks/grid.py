"""Searches the problems of `grid.txt`, most used first, into a database for `tuner ship`.

    python benchmarks/grid.py --db grid.sqlite
    tuner ship --db grid.sqlite --add

A problem that the database has a winner of is passed over, so the same command goes on where it ended; with
`--unshipped`, so is one that this version ships a winner of for the card. While the GPU measures one problem, the next
ones' presets are compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import typer

from bwdtune.db.records import MEASURED
from bwdtune.db.shipped import read_shipped
from bwdtune.db.store import Store
from bwdtune.gen.build.jobs import build
from bwdtune.gen.build.limits import job_limit
from bwdtune.gen.build.toolchain import find_compiler
from bwdtune.gen.device import Device
from bwdtune.gen.errors import BwdtuneError
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source, render
from bwdtune.gen.space import refusal
from bwdtune.runtime.gpu import current_device, environment, gpu_key, gpu_uuid, power_limit_w
from bwdtune.tuner.commands.options import for_problem
from bwdtune.tuner.lab.gpu_client import Worker
from bwdtune.tuner.search.options import SearchOptions
from bwdtune.tuner.search.progress import progress_for
from bwdtune.tuner.search.provenance import Machine
from bwdtune.tuner.search.search import search

GRID = Path(__file__).with_name("grid.txt")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", required=True, help="database file or URL")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no search later than this")
    parser.add_argument("--trials", type=int, default=14, help="candidates a search decides")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--unshipped", action="store_true", help="pass over what is shipped for this card, too")
    parser.add_argument("--results", type=Path, help="append each search's result to this file, a JSON object a line")
    parser.add_argument("--list", action="store_true", help="print the problems and end")
    options = parser.parse_args()
    problems = [problem_of(line) for line in GRID.read_text().splitlines() if line.split("#")[0].strip()]
    if options.list:
        print("\n".join(problem.label for problem in problems))
        return 0
    start, device = time.monotonic(), current_device()
    environment_here = environment(device, find_compiler(device.arch).version)
    from rich.console import Console

    console = Console(stderr=True, width=160)
    with closing(Store.open(options.db)) as store, Worker() as worker:
        card = gpu_key(device)
        known = {winner.problem for winner in store.winners() if winner.environment.gpu == card}
        if options.unshipped:
            known |= {row.problem for row in read_shipped() if row.gpu == card and row.kind == MEASURED}
        left = [problem for problem in problems if problem not in known]
        _prefetch(left, device)
        for number, problem in enumerate(left, 1):
            if time.monotonic() - start > options.seconds:
                print(f"the time is up: {len(left) - number + 1} problems are left")
                break
            begun = time.monotonic()
            try:
                result = search(
                    problem,
                    device,
                    store,
                    SearchOptions(seed=options.seed, trials=options.trials),
                    builder=lambda source, target: build([source], target, jobs=1)[0],
                    progress=progress_for(console),
                    benches={"GPU 0": worker},
                    environment=environment_here,
                    machine=Machine(environment_here.toolkit, gpu_uuid(0), power_limit_w(0)),
                )
            except BwdtuneError as error:
                print(f"{problem.label}: {error}")
                continue
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(result.to_dict()) + "\n")
            times = {row.kernel: row.ms for row in result.rows if row.ms}
            best = result.winner
            name = best.config.id if best and best.config else "none"
            times_text = ", ".join(f"{kernel} {ms:.3f}" for kernel, ms in sorted(times.items(), key=lambda one: one[1]))
            print(f"{problem.label}: {name}; ms: {times_text}; {time.monotonic() - begun:.0f} s", flush=True)
            if result.interrupted:
                return 130
    return 0


def problem_of(line: str) -> Problem:
    """A line of the grid: a shape, and options as of `tuner search`."""
    app = typer.Typer()
    app.command()(for_problem()(lambda problem: problem))
    problem: Problem = typer.main.get_command(app).main(
        ["--shape", *shlex.split(line, comments=True)], standalone_mode=False
    )
    return problem


def _prefetch(problems: Sequence[Problem], device: Device) -> None:
    """Compiles the presets of all problems in the background, in the order in which they are needed."""
    sources: dict[str, Source] = {}
    for problem in problems:
        for config in PRESETS.values():
            if refusal(problem, config, device) is None:
                source = render(problem, config)
                sources.setdefault(source.hash, source)
    jobs = max(1, job_limit(os.environ) - 2)
    threading.Thread(
        target=build, args=(list(sources.values()), device.arch), kwargs={"jobs": jobs}, daemon=True
    ).start()


if __name__ == "__main__":
    sys.exit(main())
