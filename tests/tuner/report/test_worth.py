"""What parameters are worth: an effect that is there is found, and what cannot be told is not told."""

from __future__ import annotations

import functools
import random

import pytest
from search_fakes import PROBLEM, space

from bwdtune.gen.device import H200
from bwdtune.gen.families import Config
from bwdtune.tuner.report.worth import LEAST_TRIALS, FamilyWorth, worths

NOISE = random.Random(0)


@functools.cache
def mma_configs() -> tuple[Config, ...]:
    return tuple(config for config in space(PROBLEM, H200) if config.family == "mma")


def time_of(config: Config) -> float:
    """Twenty per cent for the narrow tile, ten for one stage, and one per cent of noise."""
    values = vars(config)
    slow = 1.2 if values["block_kv"] == 32 else 1.0
    return 5.0 * slow * (1.1 if values["stages"] == 1 else 1.0) * NOISE.gauss(1.0, 0.01)


def timed(count: int) -> list[tuple[Config, float]]:
    return [(config, time_of(config)) for config in random.Random(1).sample(mma_configs(), count)]


def worth_of(costs: list[tuple[Config, float]]) -> FamilyWorth:
    (found,) = worths(costs)
    return found


def test_the_parameters_that_matter_come_first_with_what_they_are_worth() -> None:
    found = worth_of(timed(120))
    assert [one.name for one in found.parameters[:2]] == ["block_kv", "stages"]
    effects = {one.name: {value.value: value for value in one.values} for one in found.parameters}
    assert effects["block_kv"][32].effect == pytest.approx(0.2, abs=0.02)
    assert effects["stages"][1].effect == pytest.approx(0.1, abs=0.02)
    assert effects["block_kv"][32].low <= effects["block_kv"][32].effect <= effects["block_kv"][32].high
    assert effects["block_kv"][64].effect < 0.02
    assert all(one.worth < 0.02 for one in found.parameters[2:])
    assert found.explained is not None
    assert found.explained > 0.9


def test_values_that_are_always_met_together_do_not_hide_another_effect() -> None:
    """A search times fast ones more often: the median of what has a value is not what the value is worth."""
    fast_with_one_stage = [
        config
        for config in mma_configs()
        if (vars(config)["block_kv"] == 32) != (vars(config)["stages"] == 1) or len(config.id) % 3
    ]
    found = worth_of([(config, time_of(config)) for config in fast_with_one_stage])
    effects = {one.name: {value.value: value for value in one.values} for one in found.parameters}
    assert effects["stages"][1].effect == pytest.approx(0.1, abs=0.03)


def test_each_value_counts_its_candidates() -> None:
    costs = timed(40)
    found = worth_of(costs)
    for parameter in found.parameters:
        assert sum(value.trials for value in parameter.values) == 40
        assert min(value.best for value in parameter.values) == min(cost for _, cost in costs)
        assert all(value.best <= value.median for value in parameter.values)
        assert min(value.effect for value in parameter.values) == 0


def test_chance_explains_nothing() -> None:
    noise = random.Random(2)
    found = worth_of([(config, noise.uniform(5, 6)) for config, _ in timed(60)])
    assert found.explained is not None
    assert found.explained < 0.15
    assert all(one.worth < 0.1 for one in found.parameters), "the penalty keeps effects small"


def test_too_few_tell_nothing() -> None:
    found = worth_of(timed(LEAST_TRIALS - 1))
    assert (found.trials, found.parameters, found.explained) == (LEAST_TRIALS - 1, (), None)
    same = worth_of([(mma_configs()[0], 5.0 + number / 100) for number in range(20)])
    assert same.parameters == ()
    assert len(same.same) == len(mma_configs()[0].parameters)


def test_families_are_apart() -> None:
    others = [(config, 3.0) for config in space(PROBLEM, H200) if config.family == "wgmma"]
    found = worths([*timed(20), *others])
    assert [(one.family, one.trials) for one in found] == [("mma", 20), ("wgmma", len(others))]


def test_the_same_trials_give_the_same_figures() -> None:
    costs = timed(30)
    assert worths(costs) == worths(costs)
