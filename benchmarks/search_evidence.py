"""How reliably a search ends near the best, and what it costs: one problem, many seeds, on this machine's GPU.

    python benchmarks/search_evidence.py -o benchmarks/results/h200_search_4_16_2048_128_causal.json

First one search as a user has it, with head starts, an empty cache and an empty database: its time and its overhead.
Then one search a seed without head start, each with a database of its own; compiled kernels are shared. At last all
winners, the presets and what is shipped race in one process, interleaved: how much longer than the fastest of them each
seed's winner takes. Each search is written to the output as it ends: the same command goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bwdtune.db.records import Environment
from bwdtune.db.store import Store
from bwdtune.gen.build.jobs import build
from bwdtune.gen.build.toolchain import find_compiler
from bwdtune.gen.device import Device
from bwdtune.gen.families import Config, config_from_dict, short_form
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.gen.space import refusal
from bwdtune.runtime.gpu import current_device
from bwdtune.tuner.lab.gate import verify_fully
from bwdtune.tuner.lab.laboratory import laboratory
from bwdtune.tuner.lab.protocol import Bench, CandidateError
from bwdtune.tuner.lab.timing import BENCH_POLICY
from bwdtune.tuner.search.head_starts import head_starts
from bwdtune.tuner.search.options import SearchOptions
from bwdtune.tuner.search.progress import PlainProgress
from bwdtune.tuner.search.result import SearchResult
from bwdtune.tuner.search.search import search
from bwdtune.tuner.tune import tune

TARGET_GAP, TARGET_SECONDS, TARGET_OVERHEAD = 0.015, 45.0, 0.08


@dataclass(frozen=True)
class Lab:
    """What the searches and the race share."""

    problem: Problem
    device: Device
    bench: Bench
    environment: Environment
    cache: Path


def main() -> int:
    options = _arguments()
    start = time.monotonic()
    problem = Problem.parse(options.shape, dtype=options.dtype, causal=options.causal)
    device, notices = current_device(), Console(stderr=True)
    toolkit = find_compiler(device.arch).version
    found = json.loads(options.output.read_text()) if options.output.exists() else {"searches": {}}
    options.cache.mkdir(parents=True, exist_ok=True)

    def keep(**what: Any) -> None:
        found.update(what)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1) + "\n")

    if "with_head_start" not in found:
        keep(with_head_start=_as_a_user(problem, options.trials, PlainProgress(notices)))
    with laboratory(device, toolkit, notices.print) as (bench, environment):
        assert environment
        lab = Lab(problem, device, bench, environment, options.cache)
        keep(
            command=shlex.join(["python", *sys.argv]),
            problem=problem.to_dict(),
            trials=options.trials,
            environment=asdict(environment),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        for seed in options.seeds:
            if str(seed) in found["searches"]:
                continue
            if time.monotonic() - start > options.seconds:
                print("the time is up: the same command goes on here")
                return 1
            result = _alone(lab, seed, options.trials, PlainProgress(notices))
            keep(searches={**found["searches"], str(seed): _kept(result)})
            if result.interrupted:
                return 130
        keep(race=_race(lab, found))
    print_tables(found)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4_16_2048_128", help="B_H_S_D, one that is not shipped")
    parser.add_argument("--full", dest="causal", action="store_false", help="no causal mask")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--trials", type=int, default=60, help="candidates a search decides")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no search later than this")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "bwdtune-search-evidence")
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser.parse_args()


def _as_a_user(problem: Problem, trials: int, progress: PlainProgress) -> dict[str, Any]:
    """One search with nothing compiled or stored before, to the last trial."""
    with tempfile.TemporaryDirectory(prefix="bwdtune-") as folder:
        begun = time.monotonic()
        result = tune(
            problem,
            trials=trials,
            seed=1,
            min_gain=0,
            database=Path(folder) / "results.sqlite",
            cache=Path(folder) / "cache",
            progress=progress,
        )
        return {**_kept(result), "wall_seconds": time.monotonic() - begun}


def _alone(lab: Lab, seed: int, trials: int, progress: PlainProgress) -> SearchResult:
    """A search of one seed, without head start, to the last trial."""
    with (
        tempfile.TemporaryDirectory(prefix="bwdtune-") as folder,
        closing(Store.open(Path(folder) / "results.sqlite")) as store,
    ):
        return search(
            lab.problem,
            lab.device,
            store,
            SearchOptions(seed=seed, trials=trials, min_gain=0, without_head_start=True),
            builder=lambda source, target: build([source], target, cache=lab.cache, jobs=1)[0],
            progress=progress,
            benches={"the GPU": lab.bench},
            environment=lab.environment,
        )


def _kept(result: SearchResult) -> dict[str, Any]:
    """Of a search what the race and the tables need, and its trials."""
    data = result.to_dict()
    winner = result.winner.config if result.winner else None
    return {
        **{name: data[name] for name in ("status", "seed", "counts", "expected_gain", "seconds", "notes", "trials")},
        "winner": winner.to_stored() if winner else None,
        "winner_ms": result.winner.ms if result.winner else None,
    }


def _race(lab: Lab, found: dict[str, Any]) -> dict[str, Any]:
    """All winners, the presets and what is shipped, interleaved."""
    searches = [found["with_head_start"], *found["searches"].values()]
    won = {config_from_dict(one["winner"]): None for one in searches if one["winner"]}
    known = [config for config in head_starts() if refusal(lab.problem, config, lab.device) is None]
    racers, left_out = [], {}
    sources = [render(lab.problem, config) for config in dict.fromkeys([*won, *known])]
    for variant in build(sources, lab.device.arch, cache=lab.cache):
        config = variant.source.config
        try:
            if config not in won and not (verdict := verify_fully(lab.bench, lab.problem, variant)[-1]).passed:
                raise CandidateError(verdict.reason)
            racers.append(variant)
        except CandidateError as error:
            left_out[config.id] = str(error)
    timings = lab.bench.time(lab.problem, racers, ("default",), BENCH_POLICY)
    ours = [variant.source.config for variant in racers]
    best = min(ours, key=lambda config: timings[config.id].median_ms)
    return {
        "policy": BENCH_POLICY.id,
        "gpu": asdict(timings.state),
        "default_kernel": timings.default_kernel,
        "notice": timings.notice,
        "best": best.to_stored(),
        "left_out": left_out,
        "ms": {name: timings[name].median_ms for name in timings},
        "ratio_to_best": {name: timings.ratio(name, best.id).to_dict() for name in timings},
    }


def print_tables(found: dict[str, Any]) -> None:
    """What was found, for people."""
    race = found["race"]
    table = Table("seed", "winner", "ms in the race", "longer than the best", "decided", "refused", "s", "overhead")
    gaps = []
    for seed, one in found["searches"].items():
        seconds, counts = one["seconds"], one["counts"]
        config = config_from_dict(one["winner"]) if one["winner"] else None
        gap = race["ratio_to_best"][config.id]["median"] - 1 if config else float("inf")
        gaps.append(gap)
        table.add_row(
            seed,
            _name(config),
            f"{race['ms'][config.id]:.4f}" if config else "-",
            f"{gap:.2%}",
            str(counts["decided"]),
            str(counts["refused"]),
            f"{seconds['total']:.1f}",
            f"{seconds['overhead'] / seconds['total']:.1%}",
        )
    console = Console(width=160)
    console.print(table)
    best = config_from_dict(race["best"])
    console.print(
        f"best known: {_name(best)}, {race['ms'][best.id]:.4f} ms; PyTorch's default, {race['default_kernel']}, "
        f"{race['ms'].get('default', float('nan')):.4f} ms"
    )
    print(f"all winners within {max(gaps):.2%} of the best ({TARGET_GAP:.1%} wanted)")
    user = found["with_head_start"]
    seconds = user["seconds"]
    shares = (
        f"beginning {seconds['begin']:.1f} s and proposing {seconds['propose']:.1f} s, most of it beside the others"
    )
    print(
        f"with head starts, nothing compiled before: {user['counts']['decided']} candidates in "
        f"{seconds['total']:.1f} s, {user['wall_seconds']:.1f} s with what comes before and after "
        f"({TARGET_SECONDS:.0f} s wanted); "
        f"overhead {seconds['overhead'] / seconds['total']:.1%} ({TARGET_OVERHEAD:.0%} wanted); {shares}"
    )


def _name(config: Config | None) -> str:
    return short_form(config) if config else "none"


if __name__ == "__main__":
    sys.exit(main())
