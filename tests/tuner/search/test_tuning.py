"""The search, with stand-ins for compiler and GPU: what is proposed, what is kept, and who may win."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
import search_fakes
from covering import valid_presets
from rich.console import Console
from search_fakes import (
    ENVIRONMENT,
    PEER_MS,
    PROBLEM,
    TINY,
    TINY_PROBLEM,
    FakeBench,
    FakeBuilder,
    Told,
    cost_ms,
    parameter,
    run_search,
    space,
)

from bwdtune.db import shipped
from bwdtune.db.records import MEASURED, NO_FUSED_BACKWARD, Environment, GpuKey, VerificationRecord, Winner
from bwdtune.db.shipped import Shipped
from bwdtune.db.store import Store
from bwdtune.gen.build.jobs import Variant, build
from bwdtune.gen.build.toolchain import ToolchainError, find_compiler
from bwdtune.gen.device import H200, HOST, RTX_5090
from bwdtune.gen.errors import UsageError
from bwdtune.gen.families import PRESETS, Config, parse_config, short_form
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source
from bwdtune.gen.space import refusal
from bwdtune.tuner.lab.gpu_client import Worker
from bwdtune.tuner.lab.peers import DEFAULT, PEERS
from bwdtune.tuner.lab.pool import Results
from bwdtune.tuner.lab.protocol import CandidateError, Fault, WorkerError
from bwdtune.tuner.lab.timing import SEARCH_POLICY, Timing, Timings, TimingStyle
from bwdtune.tuner.search import candidates, progress, proposals
from bwdtune.tuner.search import clock as search_clock
from bwdtune.tuner.search.candidates import LOOK_AHEAD
from bwdtune.tuner.search.cost_model import predict, ranked
from bwdtune.tuner.search.gates import EMULATED_SPILL_BOUND_BYTES, SPILL_BOUND_BYTES
from bwdtune.tuner.search.options import SAMPLERS, SearchOptions
from bwdtune.tuner.search.progress import progress_for
from bwdtune.tuner.search.proposals import Proposal, Proposals
from bwdtune.tuner.search.result import SearchResult
from bwdtune.tuner.search.search import search
from bwdtune.tuner.search.tuning import HEAD_STARTS

V1, V2, V3 = (PRESETS[name] for name in ("v1", "v2", "v3"))


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "results.sqlite"


def stored_winner(database: Path, problem: Problem = PROBLEM, limits: str | None = None) -> Winner | None:
    with closing(Store.open(database)) as store:
        return store.winner(problem, ENVIRONMENT.gpu, limits)


def trials(database: Path) -> list[optuna.trial.FrozenTrial]:
    with closing(Store.open(database)) as store:
        storage = store.optuna_storage()
        return [
            trial
            for summary in optuna.get_all_study_summaries(storage)
            for trial in optuna.load_study(study_name=summary.study_name, storage=storage).get_trials()
        ]


# What is proposed


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_only_valid_configurations_and_each_once(database: Path, sampler: str) -> None:
    bench = FakeBench()
    result = run_search(database, bench=bench, trials=40, sampler=sampler, min_gain=0)
    assert len(bench.verified) == len(set(bench.verified)) == 40
    assert all(refusal(PROBLEM, config, H200) is None for config in bench.verified)
    assert result.counts.decided == result.counts.measured == 40


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_presets_are_tried_first(database: Path, sampler: str) -> None:
    presets = valid_presets(PROBLEM, H200)
    builder = FakeBuilder()
    run_search(database, builder=builder, trials=len(presets), sampler=sampler)
    assert {config for config, _ in builder.compiled} == set(presets.values())


def presets_and(trials: int) -> int:
    """So many trials, and one for each preset."""
    return len(valid_presets(PROBLEM, H200)) + trials


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_won_another_size_is_tried_next(database: Path, sampler: str) -> None:
    slow = set(PRESETS.values())
    bench = FakeBench(cost=lambda config: 50.0 + cost_ms(config) if config in slow else cost_ms(config))
    longer = replace(PROBLEM, seqlen_q=8192, seqlen_kv=8192)
    winner = run_search(database, problem=longer, bench=bench, trials=presets_and(6), sampler="random").winner
    assert winner
    bench = FakeBench()
    run_search(database, bench=bench, trials=presets_and(1), sampler=sampler)
    assert set(bench.verified) == {*valid_presets(PROBLEM, H200).values(), winner.config}
    bench = FakeBench()
    other_card = replace(H200, name="another card")
    run_search(database, bench=bench, trials=presets_and(1), sampler="exhaustive", device=other_card)
    assert winner.config not in bench.verified


def test_what_is_shipped_for_such_a_card_is_tried_next(database: Path) -> None:
    """The nearest first, and only a few of them."""
    configs = [config for config in space(PROBLEM, H200) if config not in PRESETS.values()][: HEAD_STARTS + 2]
    sizes = [4096 // 2**n for n in range(len(configs))]
    rows = [shipped_for(replace(PROBLEM, seqlen_q=s, seqlen_kv=s), c) for s, c in zip(sizes, configs, strict=True)]
    shipped.write_shipped(rows[::-1])
    bench = FakeBench()
    run_search(database, bench=bench, trials=presets_and(HEAD_STARTS + 1), sampler="random")
    assert set(configs[:HEAD_STARTS]) < set(bench.verified)
    assert not set(configs[HEAD_STARTS:]) & set(bench.verified)


@pytest.mark.parametrize("sampler", ["learned", "exhaustive"])
def test_without_a_head_start_nothing_that_won_before_is_tried_or_raced(database: Path, sampler: str) -> None:
    """Neither presets, nor what is shipped, nor what won another problem: and none of it can win."""
    configs = [config for config in space(PROBLEM, H200) if config not in PRESETS.values()]
    known = {config: rank for rank, config in enumerate(configs[:3])}
    bench = FakeBench(cost=lambda config: 1.0 + known.get(config, 5))
    longer = replace(PROBLEM, seqlen_q=8192, seqlen_kv=8192)
    shipped.write_shipped([shipped_for(longer, configs[0]), shipped_for(replace(PROBLEM, dtype="fp16"), configs[1])])
    fastest = FakeBench(cost=lambda config: 1.0 if config == configs[2] else 2.0)
    run_search(database, problem=longer, bench=fastest, trials=presets_and(3), sampler="exhaustive")
    won = stored_winner(database, longer)
    assert won
    assert won.config == configs[2], "the test needs a stored winner"
    result = run_search(database, bench=bench, trials=6, sampler=sampler, min_gain=0, without_head_start=True)
    names = {config.id for config in (*PRESETS.values(), *known)}
    assert len(bench.tried) == result.counts.decided == 6
    assert not names & {name for names in bench.timed for name in names}
    assert not names & {row.config.id for row in result.rows if row.config}
    assert result.winner


def test_all_withheld_is_a_usage_error(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("search_fakes.space", lambda problem, device: tuple(PRESETS.values()))
    with pytest.raises(UsageError, match="withheld"):
        run_search(database, without_head_start=True)


def test_a_search_ends_when_little_can_be_gained(database: Path) -> None:
    """Times are as predicted, so that after some outcomes nothing is expected of the others."""
    cost = {config: predict(PROBLEM, config, H200).cycles for config in space(PROBLEM, H200)}
    told = Told()
    options = {"sampler": "learned", "trials": 100, "bench": FakeBench(cost=lambda config: cost[config] / 1e6)}
    result = run_search(database, progress=told, **options)
    assert result.counts.decided < 100
    assert result.expected_gain is not None
    assert 0 <= result.expected_gain < SearchOptions.min_gain
    assert sum("are expected to gain" in note for note in told.notices) == 1
    assert any("are expected to gain" in note for note in result.notes)
    gains = [status.expected_gain for status in told.statuses]
    assert gains[0] is None, "what is tried first is tried whatever it gains"
    assert max(filter(None, gains)) > gains[-1] == result.expected_gain
    assert told.statuses[-1].total == result.counts.decided
    assert result.to_dict()["expected_gain"] == result.expected_gain


def shipped_for(problem: Problem, config: Config) -> Shipped:
    return Shipped(
        problem=problem,
        config=config,
        gpu=ENVIRONMENT.gpu,
        kind=MEASURED,
        environment=ENVIRONMENT,
        policy=SEARCH_POLICY.id,
        date="2026-01-01T00:00:00+00:00",
        command="tuner search",
        ms=1.0,
        cycles=None,
        max_error=2e-3,
        source_hash="0123456789abcdef",
        template_hash="fedcba9876543210",
    )


class FirstIsLast(FakeBuilder):
    """The first that is proposed is compiled last of those that are compiled ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.others_are_compiled = threading.Event()

    def __call__(self, source: Source, arch: str) -> Variant:
        if source.config == V1:
            assert self.others_are_compiled.wait(30)
        variant = super().__call__(source, arch)
        if len(self.compiled) == LOOK_AHEAD - 1:
            self.others_are_compiled.set()
        return variant


def test_a_seed_repeats_a_search_however_the_compilers_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    for jobs, builder in (("1", FakeBuilder()), ("2", FirstIsLast())):  # one compiler keeps the order
        monkeypatch.setenv("MAX_JOBS", jobs)
        bench = FakeBench()
        run_search(tmp_path / f"{jobs}.sqlite", bench=bench, builder=builder, trials=45, seed=5)
        tried.append(bench.tried)
    assert tried[0][0] == V1.id != tried[1][0], "the test needs compilers that race"
    assert set(tried[0]) == set(tried[1])


def test_a_seed_is_drawn_and_told_where_none_is_given(database: Path) -> None:
    assert isinstance(run_search(database, seed=None, trials=1).seed, int)


def test_searching_again_goes_on(database: Path) -> None:
    first, second = FakeBench(), FakeBench()
    run_search(database, bench=first, trials=12)
    result = run_search(database, bench=second, trials=12)
    assert not set(first.verified) & set(second.verified)
    assert (result.counts.earlier, result.counts.decided) == (12, 12)


def test_the_space_is_exhausted_and_no_more(database: Path) -> None:
    valid = space(TINY_PROBLEM, TINY)
    assert 1 < len(valid) < 60, "the test needs a small space"
    bench = FakeBench()
    result = run_search(database, problem=TINY_PROBLEM, device=TINY, bench=bench, trials=1000)
    assert result.exhausted
    assert sorted(bench.verified) == sorted(valid)
    assert any("space exhausted" in line for line in result.summary())
    again = FakeBench()
    result = run_search(database, problem=TINY_PROBLEM, device=TINY, bench=again, trials=1000)
    assert again.verified == [], "all of it is stored"
    assert result.winner, "but it is raced and told again"


def test_a_stored_time_answers_for_a_candidate(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new study (here: of a changed space) what is stored under the same conditions is not measured again."""
    first, second = FakeBench(), FakeBench()
    run_search(database, bench=first, trials=12, sampler="exhaustive")
    monkeypatch.setattr("bwdtune.tuner.search.tuning.space_hash", lambda: "another")
    result = run_search(database, bench=second, trials=12, sampler="exhaustive")
    assert second.verified == []
    assert result.counts.stored == result.counts.decided == 12
    assert sum("the search space is not that" in note for note in result.notes) == 1
    assert len(trials(database)) == 24, "the old rows are kept"


def test_other_text_of_the_same_machine_code_is_not_measured_again(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comment has changed in the templates: the kernels are compiled, and are known by what that makes."""
    same = FakeBuilder(machine_code=lambda source: source.config.id)
    first, second = FakeBench(), FakeBench()
    run_search(database, bench=first, builder=same, trials=6, sampler="exhaustive")
    render = candidates.render

    def commented(*arguments: Any, **options: Any) -> Source:
        source = render(*arguments, **options)
        return replace(source, text="// a comment\n" + source.text)

    monkeypatch.setattr(candidates, "render", commented)
    monkeypatch.setattr(proposals, "template_hash", lambda family: "commented")
    result = run_search(database, bench=second, builder=same, trials=6, sampler="exhaustive")
    assert set(first.tried).isdisjoint(second.tried)
    assert result.counts.stored == result.counts.decided - len(second.tried) > 0
    assert result.winner
    with closing(Store.open(database, read_only=True)) as store:
        (winner,) = store.winners()
    assert winner.machine_code == winner.config.id


@pytest.mark.parametrize(
    ("default_ms", "kernel", "said"),
    [
        (12.0, "cudnn", "times as fast as PyTorch's default, cudnn"),
        (0.5, "flash", "the problem stays PyTorch's"),
        (None, NO_FUSED_BACKWARD, "PyTorch has no fused backward of this problem"),
        (None, None, "PyTorch's default backward was not timed"),
    ],
)
def test_the_winner_is_stored_beside_pytorchs_default(
    database: Path, default_ms: float | None, kernel: str | None, said: str
) -> None:
    class Default(FakeBench):
        def time(self, *arguments: Any) -> Timings:
            timings = super().time(*arguments)
            if "default" not in timings:
                return timings
            by_name = {name: timing for name, timing in timings.items() if name != "default"}
            if default_ms:
                by_name["default"] = Timing(default_ms, default_ms, default_ms, 20)
            return replace(timings, by_name=by_name, default_kernel=kernel)

    result = run_search(database, bench=Default(), trials=6)
    assert any(said in note for note in result.notes)
    winner = stored_winner(database)
    assert (winner.default_ms, winner.default_kernel) == (default_ms, kernel)
    assert winner.beats_default == (None if default_ms is None else default_ms > winner.median_ms)


def test_another_driver_is_measured_anew(database: Path) -> None:
    first, second = FakeBench(), FakeBench()
    run_search(database, bench=first, trials=5)
    run_search(database, bench=second, trials=5, environment=replace(ENVIRONMENT, driver="590.00"))
    assert set(second.verified) >= {V1, V2, V3}


def test_presets_that_are_not_valid_here_are_listed_with_the_reason(database: Path) -> None:
    result = run_search(database, problem=TINY_PROBLEM, device=TINY, trials=3)
    notes = {row.kernel: row.note for row in result.rows}
    assert all("not valid here" in notes[name] for name in PRESETS)
    assert "shared memory" in notes["v1"]


# What is kept, and who may win


def test_the_winner_is_the_fastest_of_the_race_and_stored(database: Path) -> None:
    result = run_search(database, trials=30)
    winner = stored_winner(database)
    assert winner
    assert result.winner
    assert result.winner.config == winner.config
    measured = [row for row in result.rows if row.ms and row.config]
    assert winner.median_ms == min(row.ms for row in measured if row.ms)
    assert not winner.partial
    assert {row.kernel for row in result.rows} >= {*PRESETS, *PEERS}
    times = [row.ms for row in result.rows if row.ms]
    assert times == sorted(times)
    last = {row.kernel for row in result.rows[len(times) :]}
    assert last == set(PRESETS) - set(valid_presets(PROBLEM, H200)), "what is not valid here has no time"


def test_every_trial_is_ended_and_names_its_configuration(database: Path) -> None:
    run_search(database, trials=10, builder=FakeBuilder(broken=lambda config: parameter(config, "stages") == 1))
    kept = trials(database)
    assert len(kept) == 10
    assert all(trial.state.is_finished() for trial in kept)
    for trial in kept:
        failed = trial.state is optuna.trial.TrialState.FAIL
        assert failed == (parameter(parse_config(trial.user_attrs["config"]), "stages") == 1)
        assert bool(trial.user_attrs["reason"]) == failed
        assert (trial.values is None) == failed


@pytest.mark.parametrize("emulate", [None, "sm_120"])
def test_the_learned_sampler_finds_more_than_the_presets(database: Path, emulate: str | None) -> None:
    """Times that follow the cost model but for one parameter, which no preset of the fastest family has at its best."""

    def bonus(config: Config) -> float:
        return 0.8 if config.family == "wgmma" and config.l2_head_group == 4 else 1.0

    bench = FakeBench(cost=lambda config: predict(PROBLEM, config, H200).ms * bonus(config))
    result = run_search(database, sampler="learned", trials=40, bench=bench, emulate=emulate, min_gain=0)
    assert result.counts.decided == 40
    assert result.sampler == "learned"
    if emulate is None:
        assert result.winner
        assert result.winner.config not in PRESETS.values()


def test_a_wrong_but_fast_candidate_never_wins(database: Path) -> None:
    def wrong(config: Config) -> bool:
        return config.block_kv == 32

    result = run_search(
        database, trials=40, bench=FakeBench(wrong=wrong, cost=lambda config: 0.1 if wrong(config) else cost_ms(config))
    )
    winner = stored_winner(database)
    assert winner
    assert not wrong(winner.config)
    assert result.counts.failed > 0
    assert any("wrong: dq is off" in reason for _, reason in result.failures)


def test_a_candidate_that_is_wrong_at_full_size_never_wins(database: Path) -> None:
    best = min(space(PROBLEM, H200), key=cost_ms)
    bench = FakeBench(wrong_at_size=lambda config: cost_ms(config) < cost_ms(V2))
    result = run_search(database, trials=60, bench=bench)
    winner = stored_winner(database)
    assert winner
    assert cost_ms(winner.config) >= cost_ms(V2)
    assert best != winner.config
    assert any("wrong" in row.note for row in result.rows)


@pytest.mark.parametrize("time_ms", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_that_is_none_fails_its_candidate(database: Path, time_ms: float) -> None:
    bench = FakeBench(
        cost=lambda config: time_ms if config.block_kv == 64 and config not in (V1, V3) else cost_ms(config)
    )
    result = run_search(database, trials=20, bench=bench)
    winner = stored_winner(database)
    assert winner
    assert math.isfinite(winner.median_ms)
    assert result.counts.failed > 0
    assert result.counts.failed + result.counts.measured == 20


def test_every_candidate_fails(database: Path) -> None:
    result = run_search(database, trials=8, bench=FakeBench(wrong=lambda config: True))
    assert result.winner is None
    assert stored_winner(database) is None
    assert result.counts.failed == 8
    assert any("there is no winner" in note for note in result.notes)


def test_nothing_compiles(database: Path) -> None:
    bench = FakeBench()
    result = run_search(database, trials=8, bench=bench, builder=FakeBuilder(broken=lambda config: True))
    assert result.winner is None
    assert bench.verified == []
    assert len(result.failures) == 8
    assert all("expected a ';'" in reason for _, reason in result.failures)
    with closing(Store.open(database)) as store:
        assert {variant.error for variant in store.show(PROBLEM).failures} == {"error: expected a ';'"}


def test_what_the_machine_failed_is_tried_again(database: Path) -> None:
    full_disk = FakeBuilder(broken=lambda config: True, lasting=False)
    assert run_search(database, trials=5, builder=full_disk).counts.failed == 5
    result = run_search(database, trials=5)
    assert (result.counts.earlier, result.counts.measured) == (0, 5)
    assert result.winner


def test_a_crash_costs_one_candidate(database: Path) -> None:
    result = run_search(database, trials=12, bench=FakeBench(crashing=lambda config: parameter(config, "swizzle") == 0))
    assert result.winner
    assert result.counts.measured + result.counts.failed == 12
    assert all("SIGSEGV" in reason for _, reason in result.failures)


def test_a_crash_in_the_race_costs_one_racer(database: Path) -> None:
    class Late(FakeBench):
        def time(self, problem, variants, peers, policy):
            self.crashing = lambda config: bool(peers) and config == V3
            return super().time(problem, variants, peers, policy)

    result = run_search(database, trials=6, bench=Late())
    assert result.winner
    assert result.winner.config != V3
    assert next(row for row in result.rows if row.config == V3).note == "its process died of SIGSEGV"


def test_spills_over_the_bound_are_refused_but_not_of_presets(database: Path) -> None:
    def spills(config: Config, arch: str) -> int:
        return {3: 400, 2: SPILL_BOUND_BYTES + 4}.get(parameter(config, "min_blocks_per_sm"), SPILL_BOUND_BYTES)

    bench = FakeBench()
    result = run_search(
        database,
        trials=60,
        bench=bench,
        builder=FakeBuilder(spills=lambda config, arch: 60 if config == V1 else spills(config, arch)),
    )
    assert V1 in bench.verified
    assert not {2, 3} & {parameter(config, "min_blocks_per_sm") for config in bench.verified}
    assert result.counts.refused > 0
    assert any("bytes of registers a thread are spilled" in reason for _, reason in result.failures)


def test_the_incumbent_is_timed_beside_each_candidate(database: Path) -> None:
    bench = FakeBench()
    run_search(database, trials=10, bench=bench)
    searched = [names for names in bench.timed if not set(PEERS) <= set(names)]
    assert searched[0][1:] == [DEFAULT], "PyTorch's default runs once, beside the first"
    for earlier, names in enumerate(searched[1:], start=1):
        fastest = min(searched[:earlier], key=lambda tried: cost_ms(by_id(tried[0])))[0]
        assert names[1:] == [fastest]

    again = FakeBench()
    run_search(database, trials=1, bench=again)
    fastest = min(searched, key=lambda tried: cost_ms(by_id(tried[0])))[0]
    assert again.timed[0][1:] == [fastest, DEFAULT], "also one that an earlier search has found"


def by_id(name: str) -> Config:
    return next(config for config in space(PROBLEM, H200) if config.id == name)


def test_a_card_that_slows_down_is_told(database: Path) -> None:
    class Heating(FakeBench):
        def time(self, problem, variants, peers, policy):
            self.cost = lambda config: cost_ms(config) * (1.0 + 0.2 * len(self.timed))
            return super().time(problem, variants, peers, policy)

    told = Told()
    result = run_search(database, trials=5, bench=Heating(), progress=told)
    assert any("longer than before" in notice for notice in told.notices)
    assert any("noisy" in note for note in result.notes)


class Falling(FakeBench):
    """A card whose clock falls: each timing finds all kernels slower than the one before."""

    def time(self, problem, variants, peers, policy):
        self.cost = lambda config: cost_ms(config) * (1.0 + 0.02 * len(self.timed))
        return super().time(problem, variants, peers, policy)


def test_costs_do_not_depend_on_a_falling_clock(database: Path) -> None:
    run_search(database, trials=12, bench=Falling())
    costs = {trial.user_attrs["config"]: trial.value for trial in trials(database)}
    first = costs[V1.id]
    for name, cost in costs.items():
        assert cost / first == pytest.approx(cost_ms(by_id(name)) / cost_ms(V1)), name


def test_a_noisy_timing_is_repeated_before_it_counts(database: Path) -> None:
    class Noisy(FakeBench):
        def time(self, problem, variants, peers, policy):
            timings = super().time(problem, variants, peers, policy)
            first = [names[0] for names in self.timed].count(variants[0].source.config.id) == 1
            if set(PEERS) <= set(peers) or not first:
                return timings
            slow = {name: replace(timing, median_ms=99.0, high_ms=99.0) for name, timing in timings.items()}
            return replace(timings, by_name=slow, notice="the times spread by 80%")

    bench = Noisy()
    result = run_search(database, trials=3, bench=bench)
    assert all(bench.tried.count(name) >= 2 for name in bench.tried)
    assert all(trial.value < 99 for trial in trials(database))
    assert not any("noisy" in note for note in result.notes)


class Near(FakeBench):
    """In the final race all of ours take the same time, but for noise."""

    def time(self, problem, variants, peers, policy):
        timings = super().time(problem, variants, peers, policy)
        if set(PEERS) > set(peers):
            return timings
        configs = [variant.source.config for variant in variants]
        random = np.random.default_rng(3)
        clock = np.linspace(5.0, 7.0, 40)
        rounds = {config.id: tuple(map(float, clock * random.normal(1.0, 0.01, 40))) for config in configs}
        rounds |= {name: tuple(map(float, clock * 2)) for name in peers}
        by_name = {name: Timing.of(list(times)) for name, times in rounds.items()}
        return replace(timings, by_name=by_name, rounds_ms=rounds)


def test_of_what_cannot_be_told_apart_a_preset_wins(database: Path) -> None:
    result = run_search(database, trials=30, bench=Near())
    winner = stored_winner(database)
    assert winner
    assert winner.config in PRESETS.values()
    assert any("cannot tell these apart" in note for note in result.notes)
    shown = {row["kernel"]: row["ratio_to_winner"] for row in result.to_dict()["rows"] if row["ms"]}
    assert shown["fa"]["told_apart"]
    assert shown["fa"]["median"] == pytest.approx(2.0, rel=0.02)
    assert "not told apart" in text_of(result)


def test_a_race_is_logged_with_the_cards_state(database: Path) -> None:
    result = run_search(database, trials=5)
    with closing(Store.open(database)) as store:
        (summary,) = optuna.get_all_study_summaries(store.optuna_storage())
    (race,) = summary.user_attrs["races"]
    assert race["winner"] == result.winner.config.id
    assert race["gpu"]["clock_mhz"] == 1700.0
    assert race["ratio_to_winner"]["fa"]["told_apart"]
    assert race["interval_ms"]["fa"] == pytest.approx([5.445, 5.555])
    assert race["default_kernel"] == "cudnn"


@pytest.mark.parametrize("kind", ["killed", "hang"])
def test_one_fault_from_outside_bans_no_candidate(database: Path, kind: str) -> None:
    class Struck(FakeBench):
        struck = False

        def verify(self, problem, variant):
            if variant.source.config == V2 and not self.struck:
                self.struck = True
                raise CandidateError("its process died of SIGKILL", V2.id, Fault(kind, "SIGKILL"))
            return super().verify(problem, variant)

    told = Told()
    result = run_search(database, trials=6, bench=Struck(), progress=told)
    assert result.counts.failed == 0
    assert V2 in {row.config for row in result.rows if row.ms}
    assert any("tried once more, alone" in notice for notice in told.notices)


def test_a_fault_that_comes_again_is_stored_as_data(database: Path) -> None:
    class Struck(FakeBench):
        asked = 0

        def verify(self, problem, variant):
            if variant.source.config == V2:
                self.asked += 1
                raise CandidateError("it hung: no answer in 120 s", V2.id, Fault("hang", log="device-side assert"))
            return super().verify(problem, variant)

    bench = Struck()
    result = run_search(database, trials=6, bench=bench)
    assert bench.asked == 2
    assert (V2, "it hung: no answer in 120 s (twice)") in result.failures
    (trial,) = [trial for trial in trials(database) if trial.user_attrs["config"] == V2.id]
    assert trial.user_attrs["fault"] == {"kind": "hang", "signal": "", "log": "device-side assert"}


def test_a_crash_is_the_candidates_own(database: Path) -> None:
    bench = FakeBench(crashing=lambda config: config == V2)
    run_search(database, trials=6, bench=bench)
    assert bench.tried.count(V2.id) == 1


@pytest.mark.parametrize("measured", [True, False], ids=["tuning", "survey"])
def test_a_database_that_is_removed_costs_no_results(database: Path, measured: bool) -> None:
    class Removing(FakeBench):
        def verify(self, problem, variant):
            if len(self.verified) == 4:
                for path in database.parent.glob(f"{database.name}*"):
                    path.unlink()
            return super().verify(problem, variant)

    device = H200 if measured else RTX_5090
    result = run_search(database, device=device, trials=10, bench=Removing(), measured=measured)
    assert result.status == "failed"
    assert str(database) in result.error
    assert result.rows
    assert any(row.ms if measured else row.predicted_ms for row in result.rows)
    assert result.to_dict()["error"] == result.error


def test_a_timing_style_is_another_policy(database: Path) -> None:
    run_search(database, trials=3)
    result = run_search(database, trials=3, timing=TimingStyle.parse("warm,graph"))
    assert result.counts.earlier == result.counts.stored == 0
    with closing(Store.open(database)) as store:
        policies = {measurement.record.policy for measurement in store.measurements()}
    assert any(policy.startswith("events1_warm-l2_graph_") for policy in policies)
    assert any(policy.startswith("events1_cold-l2_w") for policy in policies)


def test_a_worse_search_leaves_a_better_winner(database: Path) -> None:
    run_search(database, trials=30, seed=1)
    before = stored_winner(database)
    run_search(database, trials=3, seed=2)
    after = stored_winner(database)
    assert before
    assert after
    assert cost_ms(after.config) <= cost_ms(before.config)


# Limits


def test_limits_keep_to_the_other_card(database: Path) -> None:
    def spills(config: Config, arch: str) -> int:
        return 60 if arch == "sm_120a" and (config == V3 or parameter(config, "stages") == 3) else 0

    builder, bench = FakeBuilder(spills=spills), FakeBench(cost=lambda config: 1.0 if config == V3 else cost_ms(config))
    result = run_search(database, builder=builder, bench=bench, trials=30, limits="sm_120")
    assert all(refusal(PROBLEM, config, RTX_5090) is None for config in bench.verified)
    assert all(parameter(config, "stages") != 3 for config in bench.verified)
    assert V3 in bench.verified, "a preset is a point of reference"
    winner = stored_winner(database, limits="sm_120")
    assert winner
    assert winner.config != V3, "which spills there, and so does not win"
    assert stored_winner(database) is None, "a winner within limits is none without"
    assert result.to_dict()["limits"] == "sm_120"
    assert {arch for _, arch in builder.compiled} == {"sm_90a", "sm_120a"}
    refused = {config for config, arch in builder.compiled if arch == "sm_120a" and spills(config, arch)} - {V3}
    assert not refused & {config for config, arch in builder.compiled if arch == "sm_90a"}, "no compile is wasted"


# Another card's pace


def test_an_emulated_search_ranks_by_cycles(database: Path) -> None:
    """The slower a fake is by time, the fewer cycles it has."""
    builder, bench = FakeBuilder(), FakeBench(cycles=lambda config: 4e9 / cost_ms(config))
    result = run_search(database, builder=builder, bench=bench, trials=20, emulate="sm_120")
    shown = result.to_dict()
    assert (shown["emulate"], shown["limits"], shown["winner"]) == ("sm_120", "sm_120", None)
    ranked = [row for row in result.rows if row.cycles]
    assert [row.cycles for row in ranked] == sorted(row.cycles for row in ranked if row.cycles)
    assert shown["emulated_best"]["config"] == ranked[0].config.id
    assert all((row.emulate, row.ms) == ("sm_120", None) for row in result.rows)
    assert all(0 < row.tensor_activity < 1 for row in ranked)
    assert not any(set(names) & set(PEERS) for names in bench.timed), "PyTorch's kernels cannot be emulated"
    assert all(refusal(PROBLEM, config, RTX_5090) is None for config in bench.verified)
    for source, arch in builder.sources:
        assert (source.emulate, arch) in (("sm_120", "sm_90a"), (None, "sm_120a")), (
            "what spills there is the kernel itself"
        )


def test_the_best_emulated_one_is_kept_apart(database: Path) -> None:
    first = run_search(database, trials=10, emulate="sm_120")
    with closing(Store.open(database)) as store:
        assert store.winners() == []
        best = store.emulated_best(PROBLEM, ENVIRONMENT.gpu, "sm_120")
        assert {one.record.kind for one in store.measurements(PROBLEM)} == {"emulated"}
    assert best
    assert first.winner
    assert (best.config, best.cycles) == (first.winner.config, first.winner.cycles)
    measured = run_search(database, trials=10, limits="sm_120")
    assert measured.counts.measured == 10, "an emulated result answers for no measurement"
    again = run_search(database, trials=5, emulate="sm_120")
    assert again.counts.earlier == 10, "a study of its own goes on"


def test_presets_that_spill_there_are_emulated_but_not_the_best(database: Path) -> None:
    def spills(config: Config, arch: str) -> int:
        return 60 if arch == "sm_120a" and config == V3 else 100 if config == V2 else 0

    bench = FakeBench(cycles=lambda config: 1e6 if config == V3 else 1e7)
    result = run_search(database, builder=FakeBuilder(spills=spills), bench=bench, trials=5, emulate="sm_120")
    assert {row.kernel for row in result.rows if row.cycles} >= {"v2", "v3"}
    with closing(Store.open(database)) as store:
        best = store.emulated_best(PROBLEM, ENVIRONMENT.gpu, "sm_120")
    assert best
    assert best.config not in (V2, V3), "both spill on a 5090"


def test_spare_accumulators_may_spill_a_little(database: Path) -> None:
    def spills(config: Config, arch: str) -> int:
        return 0 if arch == "sm_120a" else EMULATED_SPILL_BOUND_BYTES + (config.family != "mma")

    result = run_search(database, builder=FakeBuilder(spills=spills), trials=30, emulate="sm_120")
    assert result.counts.measured
    assert {config.family for config, reason in result.failures} == {"mmat"}


def test_static_shared_memory_counts_beside_the_dynamic(database: Path) -> None:
    """Of which arithmetic knows nothing: what fits without it may not with it, and fewer blocks share an SM."""

    def static(source: Source) -> int:
        needs = source.config.estimate(PROBLEM)
        return H200.shared_memory_per_block_bytes - needs.shared_memory_bytes + (source.config not in (V1, V2))

    result = run_search(database, builder=FakeBuilder(static_bytes=static), trials=8)
    refused = dict(result.failures)
    assert len(refused) == 6
    assert not refused.keys() & {V1, V2}
    assert all("static ones: a block of NVIDIA H200 has at most 232,448" in reason for reason in refused.values())
    (v2,) = (row for row in result.rows if row.kernel == "v2")
    assert v2.occupancy == V2.threads / 2048, "one block takes all of the shared memory"


def test_an_emulated_build_with_fewer_blocks_an_sm_is_refused(database: Path) -> None:
    """Where shared memory leaves room for two blocks or more of a 5090's SM, registers that only one can have change
    the pace.
    """

    def registers(source: Source, arch: str) -> int:
        return min(65_536 // source.config.threads, 255) if source.emulate else 64

    problem = Problem.parse("8_16_4096_64")
    builder = FakeBuilder(registers=registers)
    result = run_search(database, problem=problem, builder=builder, trials=20, sampler="random", emulate="sm_120")
    refused = [config for config, reason in result.failures if "another kernel's pace" in reason]
    room = RTX_5090.shared_memory_per_sm_bytes // 2 - RTX_5090.reserved_shared_memory_per_block_bytes
    assert refused
    assert all(config.estimate(problem).shared_memory_bytes <= room for config in refused)
    assert result.counts.measured


def test_an_interrupted_emulated_search_keeps_its_best(database: Path) -> None:
    class Interrupting(FakeBench):
        def time(self, *arguments):
            if len(self.timed) == 4:
                raise KeyboardInterrupt
            return super().time(*arguments)

    result = run_search(database, bench=Interrupting(), trials=10, emulate="sm_120")
    assert result.interrupted
    with closing(Store.open(database)) as store:
        best = store.emulated_best(PROBLEM, ENVIRONMENT.gpu, "sm_120")
        assert store.winners() == []
    assert best
    assert best.partial
    assert result.winner
    assert result.winner.cycles == best.cycles


def test_an_emulated_candidate_without_cycles_fails(database: Path) -> None:
    result = run_search(database, bench=FakeBench(cycles=lambda config: float("nan")), trials=3, emulate="sm_120")
    assert result.winner is None
    assert all("nan cycles" in reason for _, reason in result.failures)


def test_the_emulated_table_says_so(database: Path) -> None:
    told = Told()
    result = run_search(database, trials=5, emulate="sm_120", progress=told)
    console = Console(width=400)
    with console.capture() as capture:
        console.print(result.table())
    assert "emulated: at the pace of sm_120" in capture.get()
    assert "best (emulated)" in capture.get() or "v2 (emulated)" in capture.get()
    assert any("Mcycles, emulated" in status.text() for status in told.statuses)


# Time and interrupts


def test_the_time_limit_ends_a_search_with_a_race(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = FakeBench()
    # Each timing takes a second.
    clock = SimpleNamespace(perf_counter=lambda: float(len(bench.timed)), monotonic=lambda: 0.0)
    monkeypatch.setattr(search_clock, "time", clock)
    result = run_search(database, trials=1000, time_s=6, bench=bench)
    assert result.status == "complete"
    assert result.counts.decided == 6
    assert result.winner
    assert any("the time is up" in note for note in result.notes)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured(database: Path, number: signal.Signals) -> None:
    process = start_slow_search(database)
    wait_until_decided(process, 4)
    process.send_signal(number)
    output, errors = process.communicate()
    assert process.returncode == 130, errors
    assert errors.count("stopping, and keeping what was found") == 1
    assert "Traceback" not in errors
    winner = stored_winner(database)
    assert winner
    assert winner.partial
    assert output.split()[-2:] == ["partial", winner.config.id]
    kept = trials(database)
    assert len(kept) >= 4
    assert all(trial.state.is_finished() for trial in kept)
    assert winner.median_ms == min(trial.value for trial in kept if trial.value)

    result = run_search(database, trials=4)
    assert result.counts.earlier == len(kept)
    winner = stored_winner(database)
    assert winner
    assert not winner.partial


@pytest.mark.slow
def test_a_kill_loses_the_running_trial_at_most(database: Path) -> None:
    process = start_slow_search(database)
    decided = wait_until_decided(process, 4)
    process.kill()
    process.communicate()
    kept = trials(database)
    assert len(kept) >= decided
    assert all(trial.state.is_finished() for trial in kept)
    bench = FakeBench()
    result = run_search(database, trials=4, bench=bench)
    assert result.counts.earlier == len(kept)
    assert result.winner
    presets = list(valid_presets(PROBLEM, H200).values())
    assert set(bench.verified) >= set(presets[len(kept) : len(kept) + 4]), "what it had claimed is free again"


def start_slow_search(database: Path) -> subprocess.Popen[str]:
    command = [sys.executable, search_fakes.__file__, str(database), "20", "0.2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}, **pipes)


def wait_until_decided(process: subprocess.Popen[str], count: int) -> int:
    assert process.stdout
    for line in process.stdout:
        if line.startswith("decided") and int(line.split()[1]) >= count:
            return int(line.split()[1])
    raise AssertionError(process.stderr.read() if process.stderr else "")


# Failures of all


def test_a_broken_gpu_ends_the_search_and_keeps_what_there_is(database: Path) -> None:
    class Breaking(FakeBench):
        def verify(self, problem, variant):
            if len(self.verified) == 3:
                raise WorkerError("the GPU hangs")
            return super().verify(problem, variant)

    with pytest.raises(WorkerError):
        run_search(database, bench=Breaking())
    assert len(trials(database)) == 3
    winner = stored_winner(database)
    assert winner
    assert winner.partial


def test_progress_that_nobody_reads_any_more_keeps_what_there_is(database: Path) -> None:
    class Read(Told):
        def update(self, status):
            super().update(status)
            if status.counts.measured == 3:
                raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_search(database, progress=Read())
    winner = stored_winner(database)
    assert winner
    assert winner.partial


def test_more_jobs_than_candidates_are_no_more_threads(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "999999999")
    assert run_search(database, trials=5).winner


def test_an_unusable_compiler_ends_the_search(database: Path) -> None:
    def builder(source, arch):
        raise UsageError("no compiler")

    with pytest.raises(UsageError):
        run_search(database, builder=builder)


@pytest.mark.parametrize(
    "options",
    [
        {"emulate": "sm_121"},
        {"sampler": "grid"},
        {"limits": "sm_100"},
        {"trials": 0},
        {"trials": -3},
        {"time_s": 0.0},
        {"time_s": math.nan},
        {"time_s": math.inf},
        {"time_s": 1e300},
        {"seed": -1},
        {"min_gain": -0.1},
        {"min_gain": 1.0},
        {"seed": 2**40},
    ],
)
def test_impossible_options(options) -> None:
    with pytest.raises(UsageError):
        SearchOptions(**options)


def test_a_head_dim_that_no_kernel_takes(database: Path) -> None:
    with pytest.raises(UsageError, match="head_dim 100"):
        run_search(database, problem=Problem.parse("1_1_64_100"))


# With the real process, which can run kernels for the CPU


def test_the_real_worker_and_builder(database: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("no host compiler")
    problem = Problem.parse("1_1_64_16", causal=True)
    environment = Environment(GpuKey(HOST.name, "0.0"), HOST.arch, "none", find_compiler(HOST.arch).version, "2.11.0")
    with closing(Store.open(database)) as store, Worker("cpu") as worker:
        result = search(
            problem,
            HOST,
            store,
            SearchOptions(trials=3, seed=0),
            builder=lambda source, arch: build([source], arch, jobs=1)[0],
            progress=Told(),
            benches={"CPU": worker},
            environment=environment,
        )
        assert result.counts.measured == 3, result.failures
        winner = store.winner(problem, environment.gpu)
    assert winner
    assert result.winner
    assert result.winner.config == winner.config
    assert {row.note for row in result.rows if row.kernel in PEERS} == {"it runs on a GPU only"}


# Without a GPU


def test_a_survey_measures_nothing_and_stores_no_winner(database: Path) -> None:
    def spills(config: Config, arch: str) -> int:
        return 100 if config.block_q == 128 and arch != HOST.arch else 0

    builder = FakeBuilder(spills=spills, broken=lambda config: parameter(config, "swizzle") == 32)
    bench = FakeBench(wrong=lambda config: parameter(config, "swizzle") == 64)
    result = run_search(
        database, device=RTX_5090, builder=builder, bench=bench, measured=False, trials=60, sampler="random"
    )
    counts = result.counts
    assert result.status == "predicted"
    assert result.winner is None
    assert all(row.ms is None and row.predicted_ms and row.config for row in result.rows)
    assert len(result.rows) == counts.passed == counts.verified
    assert counts.passed + counts.refused + counts.failed == 60
    assert {row.kernel for row in result.rows} >= set(valid_presets(PROBLEM, RTX_5090))
    predicted = [row.predicted_ms for row in result.rows]
    assert predicted == sorted(predicted)
    assert any("nothing was timed, and no winner is stored" in line for line in result.summary())
    assert bench.timed == []
    with closing(Store.open(database)) as store:
        assert store.winners() == []
        assert store.measurements() == []
        shown = store.show(PROBLEM)
        assert len(shown.failures) + len(shown.rejected) == counts.failed > 0
        assert {variant.arch for variant, _ in shown.rejected} == {HOST.arch}
    assert trials(database) == []


@pytest.mark.parametrize("failing", ["compiler", "numbers"])
def test_a_survey_in_which_all_fail_says_so(database: Path, failing: str) -> None:
    builder = FakeBuilder(broken=lambda config: failing == "compiler")
    bench = FakeBench(wrong=lambda config: True)
    result = run_search(database, device=RTX_5090, builder=builder, bench=bench, measured=False, trials=3)
    text = "\n".join(result.summary())
    assert "none of the 3 candidates passed" in text
    assert "passed every gate" not in text


def test_a_survey_verifies_what_passed_the_compiler_on_the_cpu(database: Path) -> None:
    builder, bench = FakeBuilder(), FakeBench(wrong=lambda config: config == V2)
    result = run_search(database, device=RTX_5090, builder=builder, bench=bench, measured=False, trials=10)
    compiled = [config for config, arch in builder.compiled if arch == RTX_5090.arch]
    assert set(bench.verified) == {config for config, arch in builder.compiled if arch == HOST.arch} == set(compiled)
    assert (V2, "wrong: dq is off") in result.failures
    assert V2 not in {row.config for row in result.rows}
    assert (result.counts.verified, result.counts.failed) == (9, 1)
    assert all(row.max_error is not None for row in result.rows)


def test_a_survey_proposes_by_predicted_times(database: Path) -> None:
    result = run_search(database, device=RTX_5090, measured=False, trials=20)
    found = [row.config for row in result.rows if row.kernel == "candidate"]
    presets = set(valid_presets(PROBLEM, RTX_5090).values())
    expected = [config for config in ranked(PROBLEM, space(PROBLEM, RTX_5090), RTX_5090) if config not in presets]
    assert set(found) == set(expected[: len(found)])
    drawn = run_search(database, device=RTX_5090, measured=False, trials=20, sampler="random")
    assert {row.config for row in drawn.rows} != {row.config for row in result.rows}


@pytest.mark.parametrize("measured", [False, True], ids=["not verified", "verified"])
def test_a_survey_goes_on_where_the_last_one_ended(database: Path, measured: bool) -> None:
    builders, results = (FakeBuilder(), FakeBuilder()), []
    for builder in builders:
        bench = FakeBench() if measured else None
        options = {"device": RTX_5090, "measured": False, "trials": 10, "bench": bench, "builder": builder}
        results.append(run_search(database, **options))
    first, second = results
    assert (first.counts.earlier, second.counts.earlier, second.counts.decided) == (0, 10, 10)
    assert {row.config: row for row in first.rows}.items() <= {row.config: row for row in second.rows}.items()
    assert len(second.rows) == 20
    assert not {config for config, _ in builders[0].compiled} & {config for config, _ in builders[1].compiled}
    assert all((row.max_error is None) != measured for row in second.rows)


@pytest.mark.parametrize("limits", [None, "sm_120"])
def test_a_survey_tries_nothing_again_that_an_earlier_one_refused(database: Path, limits: str | None) -> None:
    def spills(config: Config, arch: str) -> int:
        refusing = RTX_5090.arch if limits else H200.arch
        return 100 if arch == refusing and parameter(config, "block_q") == 64 and config not in PRESETS.values() else 0

    def wrong(config: Config) -> bool:
        return parameter(config, "block_kv") == 64

    results = [
        run_search(
            database,
            measured=False,
            trials=trials,
            sampler="random",
            limits=limits,
            bench=FakeBench(wrong=wrong),
            builder=FakeBuilder(spills=spills),
        )
        for trials in (40, 1)
    ]
    first, second = results
    assert first.counts.refused
    assert first.counts.failed
    assert first.counts.passed
    assert second.counts.earlier == first.counts.decided
    assert {row.config for row in first.rows} <= {row.config for row in second.rows}
    assert len(second.rows) == first.counts.passed + second.counts.passed


def test_a_survey_does_not_take_an_emulated_build_for_the_kernel(database: Path) -> None:
    run_search(database, measured=False, trials=4, emulate="sm_120")
    assert run_search(database, measured=False, trials=4).counts.earlier == 0


def test_an_interrupted_survey_lists_what_has_passed(database: Path) -> None:
    class Interrupted(FakeBench):
        def verify(self, problem: Problem, variant: Variant) -> VerificationRecord:
            if len(self.verified) == 3:
                raise KeyboardInterrupt
            return super().verify(problem, variant)

    result = run_search(database, device=RTX_5090, bench=Interrupted(), measured=False)
    assert result.status == "partial"
    assert result.interrupted
    assert len(result.rows) == result.counts.verified == 3


class Unable(FakeBuilder):
    """A machine without a C++ compiler for the CPU."""

    def __call__(self, source: Source, arch: str) -> Variant:
        if arch == HOST.arch:
            raise ToolchainError("no C++ compiler")
        return super().__call__(source, arch)


class Unstartable(FakeBench):
    """A machine without PyTorch, say."""

    def verify(self, problem: Problem, variant: Variant) -> VerificationRecord:
        raise WorkerError("the process does not start")


@pytest.mark.parametrize(
    ("builder", "bench", "reason"),
    [
        (Unable(), FakeBench(), "no C++ compiler"),
        (FakeBuilder(), Unstartable(), "the process does not start"),
    ],
)
def test_a_machine_that_cannot_verify_fails_no_candidate(
    database: Path, builder: FakeBuilder, bench: FakeBench, reason: str
) -> None:
    result = run_search(database, device=RTX_5090, builder=builder, bench=bench, measured=False, trials=6)
    assert (result.counts.passed, result.counts.verified) == (6, 0)
    assert f"gradients could not be verified on the CPU: {reason}" in result.notes
    assert any("these candidates passed the compiler gate;" in note for note in result.notes)


def test_a_build_for_the_cpu_that_fails_is_told_in_its_row(database: Path) -> None:
    class Failing(FakeBuilder):
        def __call__(self, source: Source, arch: str) -> Variant:
            self.broken = lambda config: arch == HOST.arch and config == V1
            return super().__call__(source, arch)

    result = run_search(database, device=RTX_5090, builder=Failing(), bench=FakeBench(), measured=False, trials=1)
    (row,) = result.rows
    assert row.config == V1
    assert row.max_error is None
    assert row.note == "not verified: host: error: expected a ';'"


def test_an_emulated_survey_predicts_cycles_and_verifies_the_kernel_itself(database: Path) -> None:
    builder = FakeBuilder()
    result = run_search(database, builder=builder, bench=FakeBench(), measured=False, trials=6, emulate="sm_120")
    assert all(row.predicted_ms is None and row.predicted_cycles for row in result.rows)
    assert {source.probed for source, arch in builder.sources if arch == HOST.arch} == {False}
    assert "predicted Mcycles" in text_of(result)


def test_a_crash_on_the_cpu_costs_one_candidate(database: Path) -> None:
    """With the real process, and real builds for the CPU; v2 reads where nothing is."""

    def builder(source: Source, arch: str) -> Variant:
        if arch != HOST.arch:
            return FakeBuilder()(source, arch)
        if source.config == V2:
            line = "float delta = 0.0f;"
            assert line in source.text
            source = replace(source, text=source.text.replace(line, "float delta = *(volatile float*)8;"))
        return build([source], arch, jobs=1)[0]

    problem = Problem.parse("1_1_64_32")
    with Worker("cpu") as worker, closing(Store.open(database)) as store:
        options = SearchOptions(trials=2)
        result = search(problem, RTX_5090, store, options, builder=builder, progress=Told(), benches={"CPU": worker})
    assert (V2, "on the CPU: its process died of SIGSEGV") in result.failures
    assert result.counts.verified == 1


# What people and programs read


def test_json_has_stable_names(database: Path) -> None:
    data = run_search(database, trials=5).to_dict()
    assert {"gpu", "driver", "torch", "nvcc", "shape", "causal", "dtype", "limits", "winner", "rows", "status"} <= set(
        data
    )
    assert {"compile", "verify", "time", "begin", "propose", "overhead", "total"} == set(data["seconds"])
    names = {"kernel", "config", "family", "ms", "tflops", "percent_of_peak", "max_error", "registers", "spill_bytes"}
    assert all(names <= set(row) for row in data["rows"])
    best = data["winner"]
    assert best["tflops"] == pytest.approx(PROBLEM.flops / best["ms"] / 1e9)
    assert best["percent_of_peak"] == pytest.approx(100 * best["tflops"] / H200.peak_tflops)


def test_the_json_of_a_survey_has_stable_names(database: Path) -> None:
    data = run_search(database, device=RTX_5090, bench=FakeBench(), measured=False, trials=6).to_dict()
    assert (data["status"], data["winner"], data["counts"]["verified"]) == ("predicted", None, 6)
    for row in data["rows"]:
        assert row["predicted_ms"] > 0
        assert row["predicted_cycles"] > 0
        assert row["max_error"] == pytest.approx(0.002)
        assert (row["ms"], row["tflops"]) == (None, None)


def text_of(result: SearchResult) -> str:
    """The table as people see it."""
    console = Console(width=400)
    with console.capture() as capture:
        console.print(result.table())
    return capture.get()


def test_the_table_of_a_survey_says_predicted_and_what_was_verified(database: Path) -> None:
    verified = text_of(run_search(database, device=RTX_5090, bench=FakeBench(), measured=False, trials=6))
    assert "predicted ms" in verified
    assert "2.0e-03" in verified
    assert "not verified" in text_of(run_search(database, device=RTX_5090, measured=False, trials=6))


def test_the_table_names_winner_presets_and_peers(database: Path) -> None:
    console = Console(width=400)
    with console.capture() as capture:
        console.print(run_search(database, trials=20, bench=FakeBench(cost=lambda config: 2 + config.block_q)).table())
    text = capture.get()
    for name in ("best", "v1", "v2", "v3", "fa", "cudnn", "TFLOPS", "% of peak"):
        assert name in text


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_tells_the_best_so_far_and_what_fell(database: Path, terminal: bool) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=100)
    shown = progress_for(console)
    builder = FakeBuilder(broken=lambda config: parameter(config, "stages") == 1)
    result = run_search(database, trials=12, progress=shown, builder=builder)
    text = stream.getvalue()
    assert result.winner
    assert result.winner.config
    assert "12/12" in text
    assert f"best {result.winner.ms:.3f} ms" in text
    assert f"failed {result.counts.failed}" in text
    assert all(f"{short_form(config)}: {reason}" in text for config, reason in result.failures)
    assert ("\x1b[" in text) == terminal


def test_progress_tells_what_is_gained_and_how_it_goes(database: Path) -> None:
    told = Told()
    builder = FakeBuilder(spills=lambda config, arch: 400 if parameter(config, "stages") == 1 else 0)
    result = run_search(database, trials=12, progress=told, builder=builder, bench=FakeBench(delay_s=0.01))
    last = told.statuses[-1]
    best = next(trial for trial in result.trials if last.best and trial.row.config == last.best[0])
    preset = min(trial.outcome.cost or math.inf for trial in result.trials if trial.row.kernel != "candidate")
    text = last.text()
    assert f"best {best.outcome.cost:.3f} ms ({PEER_MS[DEFAULT] / best.outcome.cost:.2f} × PyTorch's default" in text
    assert f", {preset / best.outcome.cost:.2f} × v" in text
    assert f"refused {result.counts.refused / 12:.0%}, failed 0" in text
    assert replace(last, expected_gain=0.0042).text().endswith(" | 0.42% expected of going on")
    on_the_way = [status.text() for status in told.statuses if 0 < status.counts.decided < 12]
    assert all(" a second | " in text and text.endswith(" s left") for text in on_the_way)


def test_progress_tells_what_each_of_several_gpus_is_at(database: Path) -> None:
    stream, told = io.StringIO(), Told()
    benches = {f"GPU {number}": FakeBench(delay_s=0.01) for number in range(2)}
    run_search(database, trials=12, progress=told, benches=benches)
    by_gpu = {name: {dict(status.workers)[name] for status in told.statuses} for name in benches}
    tried = {short_form(config) for config in benches["GPU 0"].verified}
    assert tried & by_gpu["GPU 0"]
    console = Console(file=stream, force_terminal=True, width=100)
    with progress_for(console) as shown:
        many = tuple((f"GPU {number}", None if number % 2 else "w64") for number in range(10))
        shown.update(replace(told.statuses[-1], workers=many))
    text = stream.getvalue()
    assert "5 of 10 GPUs busy" in replace(told.statuses[-1], workers=many).text()
    assert "GPU 0: w64" in text
    assert "GPU 7: idle" in text
    assert "… and 2 more" in text
    assert "GPU" not in replace(told.statuses[-1], workers=many[:1]).text()


def test_the_time_left_follows_the_pace_and_the_limit(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = FakeBench()
    clock = SimpleNamespace(perf_counter=lambda: 2.0 * len(bench.timed), monotonic=lambda: 0.0)  # 2 s a candidate
    for module in (progress, search_clock):
        monkeypatch.setattr(module, "time", clock)
    told = Told()
    run_search(database, trials=40, time_s=50, bench=bench, progress=told)
    left = {status.counts.decided: status.left_s for status in told.statuses if status.phase == "searching"}
    assert left[0] == 50, "nothing else is known"
    # The next candidate may be on the GPU already.
    assert left[10] == pytest.approx(30, abs=2), "the limit is nearer than the last trial"
    run_search(database.with_name("other.sqlite"), trials=15, bench=(bench := FakeBench()), progress=(told := Told()))
    left_s = next(status.left_s for status in told.statuses if status.counts.decided == 10)
    assert left_s == pytest.approx(10, abs=2)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text


def test_the_json_of_a_search_has_all_trials(database: Path) -> None:
    builder = FakeBuilder(
        broken=lambda config: parameter(config, "stages") == 3,
        spills=lambda config, arch: 400 if parameter(config, "stages") == 1 else 0,
    )
    bench = FakeBench(wrong=lambda config: config == V1, crashing=lambda config: parameter(config, "block_q") == 128)
    result = run_search(database, trials=40, builder=builder, bench=bench, sampler="random")
    found = json.loads(json.dumps(result.to_dict()))
    by_kind: dict[str | None, list[dict[str, Any]]] = {}
    for trial in found["trials"]:
        by_kind.setdefault(trial["kind"], []).append(trial)
    assert [trial["number"] for trial in found["trials"]] == list(range(1, 41))
    assert set(by_kind) == {None, "compiler", "spills", "gradients", "error"}
    assert all(parse_config(trial["config"]) == parse_config(trial["short"]) for trial in found["trials"])
    measured = by_kind[None]
    assert len(measured) == found["counts"]["measured"]
    for trial in measured:
        assert trial["outcome"] == "measured"
        assert trial["low_ms"] < trial["ms"] < trial["high_ms"]
        assert trial["predicted_ms"] > 0
        assert trial["registers"] == 168
        assert trial["spill_bytes"] == 0 or trial["kernel"] in PRESETS, "which may spill"
        assert trial["shared_memory_bytes"] > 0
        assert trial["max_error"] == 0.002
    assert {trial["spill_bytes"] for trial in by_kind["spills"]} == {400}
    assert all(trial["outcome"] == "refused" for trial in by_kind["spills"])
    assert {trial["max_error"] for trial in by_kind["gradients"]} == {0.5}
    fallen = [{"config": trial["config"], "reason": trial["reason"]} for trial in found["trials"] if trial["kind"]]
    assert found["failures"] == fallen
    assert not any(trial["stored"] for trial in found["trials"])


def test_stored_results_are_trials_with_their_figures(database: Path) -> None:
    first = run_search(database, trials=10, sampler="exhaustive")
    trials_of_first = [trial.row.timing for trial in first.trials]
    with closing(Store.open(database)) as store:
        for name in optuna.get_all_study_names(storage := store.optuna_storage()):
            optuna.delete_study(study_name=name, storage=storage)
    again = run_search(database, trials=10, sampler="exhaustive")
    assert all(trial.stored for trial in again.trials)
    assert [trial.row.timing for trial in again.trials] == trials_of_first
    assert {trial.row.registers for trial in again.trials} == {168}


def test_a_survey_lists_what_is_predicted(database: Path) -> None:
    found = run_search(database, device=RTX_5090, bench=FakeBench(), measured=False, trials=6).to_dict()
    assert [(trial["outcome"], trial["ms"]) for trial in found["trials"]] == [("passed", None)] * 6
    assert all(trial["predicted_ms"] > 0 and trial["max_error"] == 0.002 for trial in found["trials"])


def test_overhead_is_small(database: Path) -> None:
    """What a GPU or the compilers wait for this process: told, and little for each candidate."""
    start = time.process_time()  # a busy machine does not matter
    result = run_search(database, trials=60, bench=FakeBench(delay_s=0.005))
    assert (time.process_time() - start) / 60 < 0.15
    seconds = result.seconds
    waited = sum(seconds[phase] for phase in ("compile", "verify", "time"))
    assert seconds["total"] == pytest.approx(waited + seconds["overhead"])
    assert 0 < seconds["overhead"] < seconds["total"]
    assert seconds["begin"] + seconds["propose"] > 0
    (told,) = [line for line in result.summary() if "overhead" in line]
    assert f"proposing {seconds['propose']:.1f} s" in told


def test_a_gpu_does_not_wait_for_proposals(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled at one choice runs before the next is made."""
    compiled, begun, chosen = threading.Event(), threading.Event(), []
    put, choose = Results.put, Proposals.next

    def note(self: Results, task: Any, result: Any) -> None:
        put(self, task, result)
        compiled.set()

    def next_one(self: Proposals) -> Proposal | None:
        if chosen:
            assert compiled.wait(30)
        if len(chosen) > 1:
            assert begun.wait(30)
        chosen.append(choose(self))
        return chosen[-1]

    class Bench(FakeBench):
        def verify(self, problem: Problem, variant: Variant) -> VerificationRecord:
            begun.set()
            return super().verify(problem, variant)

    with monkeypatch.context() as patch:
        patch.setattr(Results, "put", note)
        patch.setattr(Proposals, "next", next_one)
        run_search(database, bench=Bench(), trials=LOOK_AHEAD)
    assert len(chosen) == LOOK_AHEAD


def test_the_winner_of_another_card_is_left_alone(database: Path) -> None:
    run_search(database, trials=4)
    other = replace(H200, name="NVIDIA H100 80GB HBM3")
    run_search(database, trials=4, device=other)
    with closing(Store.open(database)) as store:
        assert {winner.environment.gpu for winner in store.winners()} == {
            ENVIRONMENT.gpu,
            GpuKey("NVIDIA H100 80GB HBM3", "9.0"),
        }
        assert {measurement.record.policy for measurement in store.measurements()} >= {SEARCH_POLICY.id}
