"""What other problems and cards have shown teaches a search, and what misleads it is dropped."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from search_fakes import ENVIRONMENT, PROBLEM, FakeBench, FakeBuilder, parameter, run_search

from bwdtune.db.records import MeasurementRecord, VariantRecord
from bwdtune.db.store import Store
from bwdtune.gen.device import H200, RTX_5090
from bwdtune.gen.families import FAMILIES, PRESETS, Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.space import refusal, representatives, valid_configs
from bwdtune.tuner.search.cost_model import predict
from bwdtune.tuner.search.history import MOST, History, Outcomes, apart
from bwdtune.tuner.search.options import SearchOptions
from bwdtune.tuner.search.patience import Patience
from bwdtune.tuner.search.replay import replay
from bwdtune.tuner.search.search_store import SearchStore
from bwdtune.tuner.search.sweep import Sweep, SweepRow, stratified

OTHER = Problem.parse("16_16_2048_128", causal=True)
KIN = Problem.parse("8_16_2048_128", causal=True)


def landscape(problem: Problem, configs: list[Config], sign: float = 1.0) -> Sweep:
    """A sweep in which each choice of a parameter is some percent off the predicted times, of all problems alike."""
    random = np.random.default_rng(5)
    effects: dict[tuple[str, str, object], float] = {}
    rows = []
    for config in configs:
        effect = sum(
            effects.setdefault((config.family, name, getattr(config, name)), random.normal(0, 0.07))
            for name in config.choices
        )
        ms = predict(problem, config, RTX_5090).ms * math.exp(sign * effect)
        rows.append(SweepRow(config, 200, 0, ms, 1.0))
    return Sweep(problem, RTX_5090, tuple(rows))


@pytest.fixture(scope="module")
def configs() -> list[Config]:
    return stratified(PROBLEM, valid_configs(PROBLEM, RTX_5090), RTX_5090, 160, seed=2)


def test_what_others_have_shown_brings_a_search_nearer_to_the_best(configs: list[Config]) -> None:
    sweep, other = landscape(PROBLEM, configs), landscape(OTHER, configs[::2])
    alone = replay(sweep, "learned", candidates=6, seeds=[1])
    taught = replay(sweep, "learned", candidates=6, seeds=[1], history=[other])
    assert taught.median_gap < alone.median_gap / 3


def test_what_misleads_is_dropped(configs: list[Config]) -> None:
    sweep = landscape(PROBLEM, configs)
    misled = replay(sweep, "learned", candidates=40, seeds=[1], history=[landscape(OTHER, configs, sign=-1)])
    random = replay(sweep, "random", candidates=40, seeds=range(20))
    assert misled.median_gap <= random.median_gap


def test_what_is_withheld_teaches_nothing(configs: list[Config]) -> None:
    sweep, other = landscape(PROBLEM, configs[::2]), landscape(OTHER, configs[1::2])
    hidden = [row.config for row in other.rows]
    alone = replay(sweep, "learned", candidates=8, seeds=[3], withheld=hidden)
    assert replay(sweep, "learned", candidates=8, seeds=[3], withheld=hidden, history=[other]) == alone


def test_only_differences_within_a_problem_carry_over(configs: list[Config]) -> None:
    quick, slow = (
        History(PROBLEM, RTX_5090, [Outcomes(OTHER, RTX_5090, dict.fromkeys(configs, pace * 2.0))])
        for pace in (1.0, 3.0)
    )
    for family in FAMILIES:
        np.testing.assert_allclose(quick.residuals(family).residuals, slow.residuals(family).residuals)


def test_the_number_of_outcomes_is_bounded_and_the_nearest_come_first(configs: list[Config]) -> None:
    def outcomes(problem: Problem) -> Outcomes:
        return Outcomes(problem, RTX_5090, {config: 1.0 + number for number, config in enumerate(many)})

    many = [config for config in valid_configs(PROBLEM, RTX_5090) if config.family == "mma"][: 3 * MOST]
    far = Problem.parse("1_1_65536_128", causal=True)
    found = History(PROBLEM, RTX_5090, [outcomes(far), outcomes(OTHER)]).residuals("mma")
    nearest, furthest = np.bincount(found.problems)[1:]
    assert len(found.rows) == len(found.residuals) == MOST
    assert nearest >= furthest > 0


@pytest.mark.parametrize(
    ("nearer", "further"),
    [
        ((OTHER, H200), (Problem.parse("16_16_512_128", causal=True), H200)),
        ((PROBLEM, H200), (replace(PROBLEM, dtype="fp16"), H200)),
        ((PROBLEM, H200), (replace(PROBLEM, causal=False), H200)),
        ((PROBLEM, H200), (replace(PROBLEM, softcap=True), H200)),
        ((replace(PROBLEM, dtype="fp16"), H200), (replace(PROBLEM, head_dim=64), H200)),
        ((PROBLEM, replace(H200, name="NVIDIA H100")), (PROBLEM, RTX_5090)),
    ],
)
def test_the_more_differs_the_further_it_is(nearer: tuple, further: tuple) -> None:
    mine = (PROBLEM, H200)
    assert apart(mine, mine) == 0
    assert apart(mine, nearer) < apart(mine, further)
    assert apart(mine, further) == apart(further, mine)


@pytest.mark.parametrize(
    ("other", "counts"),
    [
        (Outcomes(OTHER, RTX_5090), True),
        (Outcomes(replace(OTHER, causal=False), RTX_5090), False),
        (Outcomes(OTHER, H200), False),
        (Outcomes(OTHER, RTX_5090, limits="sm_120"), False),
    ],
)
def test_compilers_refuse_the_same_for_one_kind_and_target(other: Outcomes, counts: bool) -> None:
    compiled = {PRESETS["v2"]: True, PRESETS["v3"]: False}
    found = History(PROBLEM, RTX_5090, [replace(other, compiled=compiled)])
    assert (found.passed, found.refused) == (((PRESETS["v2"],), (PRESETS["v3"],)) if counts else ((), ()))


# From the database


def slow(config: Config) -> bool:
    """What the cost model takes for quick, and is not."""
    return parameter(config, "v_fragments") == 0


def tried(database: Path, problem: Problem, trials: int, builder: FakeBuilder | None = None) -> list[Config]:
    bench = FakeBench(cost=lambda config: predict(PROBLEM, config, H200).ms * (1.3 if slow(config) else 1.0))
    options = {"sampler": "learned", "min_gain": 0, "without_head_start": True}
    result = run_search(database, problem=problem, trials=trials, bench=bench, builder=builder, **options)
    return [trial.row.config for trial in result.trials if trial.row.config]


def test_a_search_begins_with_what_was_measured_for_another_problem(tmp_path: Path) -> None:
    tried(tmp_path / "kin.sqlite", KIN, 12)
    taught, alone = (tried(tmp_path / name, PROBLEM, 8) for name in ("kin.sqlite", "empty.sqlite"))
    assert sum(map(slow, taught)) <= 1 < sum(map(slow, alone))


def test_a_search_begins_with_what_did_not_compile_for_another_problem(tmp_path: Path) -> None:
    builder = FakeBuilder(broken=slow)
    tried(tmp_path / "kin.sqlite", KIN, 12, builder)
    taught, alone = (tried(tmp_path / name, PROBLEM, 8, builder) for name in ("kin.sqlite", "empty.sqlite"))
    assert sum(map(slow, taught)) <= 1 < sum(map(slow, alone))


def test_what_no_search_has_stored_is_passed_over(tmp_path: Path) -> None:
    """A database is handed round: what its rows say need not be possible."""
    odd = next(config for config in representatives() if refusal(KIN, config, H200))
    with closing(Store.open(tmp_path / "results.sqlite")) as store:
        record = VariantRecord(odd, "0" * 16, "0" * 16, "sm_90a", "13.0.88", spill_bytes=0)
        measurement = MeasurementRecord(ENVIRONMENT, "search-1", 1.0, 0.9, 1.1, 20)
        store.record_measurement(KIN, store.record_variant(KIN, record), measurement)
        options = SearchOptions()
        found = SearchStore(store, PROBLEM, options, ENVIRONMENT, Patience(False, print)).outcomes_elsewhere(H200)
    assert not any(outcomes.costs or outcomes.compiled for outcomes in found)
