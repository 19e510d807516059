"""What a search learns: by how much times differ from predicted ones, what is refused, and when to end."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from landscape import cost_ms
from search_fakes import PROBLEM, parameter, space
from threadpoolctl import threadpool_info, threadpool_limits

from bwdtune.gen.device import H200
from bwdtune.gen.families import FAMILIES, PRESETS, Config
from bwdtune.tuner.search import refusals, residual
from bwdtune.tuner.search.candidates import LOOK_AHEAD
from bwdtune.tuner.search.encoding import Space, one_hot, places, sizes
from bwdtune.tuner.search.learner import Learner, Prospects
from bwdtune.tuner.search.refusals import Refusals
from bwdtune.tuner.search.residual import Residual
from bwdtune.tuner.search.worth import Worth

NONE = np.zeros((0, 7))


def rows(*choices: tuple[int, int]) -> np.ndarray:
    """Of a family with two parameters, of 3 and 4 choices."""
    found = np.zeros((len(choices), 7))
    for row, (first, second) in zip(found, choices, strict=True):
        row[[first, 3 + second]] = 1.0
    return found


ALL = [(first, second) for first in range(3) for second in range(4)]


def process(known: list[tuple[int, int]], residuals: list[float], **more: object) -> Residual:
    found = Residual([3, 4], more.pop("distances", None))  # type: ignore[arg-type]
    found.know(rows(*known), np.array(residuals), np.zeros(len(known)), learn=True, **more)  # type: ignore[arg-type]
    return found


# The residual


def test_nothing_is_expected_of_what_nothing_is_known_of() -> None:
    empty = Residual([3, 4])
    assert not empty.mean(rows(*ALL)).any()
    np.testing.assert_allclose(empty.deviations(rows(*ALL), NONE), empty.deviation)


def test_outcomes_are_expected_again_and_the_more_alike_the_surer() -> None:
    known = process([(0, 0)], [0.2])
    mean, deviation = known.mean(rows(*ALL)), known.deviations(rows(*ALL), NONE)
    assert mean[0] == pytest.approx(0.2, rel=0.05)
    assert mean[0] > mean[1] > mean[5] > 0  # one parameter differs, then both
    assert deviation[0] < deviation[1] < deviation[5] < known.deviation


def test_which_parameter_matters_is_learned() -> None:
    seen = [pair for pair in ALL if pair not in [(1, 1), (2, 2)]]
    known = process(seen, [0.1 * (first == 1) for first, _ in seen])
    np.testing.assert_allclose(known.mean(rows((1, 1), (2, 2))), [0.1, 0.0], atol=0.02)


def test_what_is_pending_is_less_of_a_surprise() -> None:
    known = process([(0, 0), (2, 3)], [0.1, -0.1])
    alone, beside = (known.deviations(rows((1, 1), (1, 2)), pending) for pending in (NONE, rows((1, 1))))
    assert beside[0] < 0.2 * alone[0]
    assert beside[1] < alone[1]
    covariance = known.covariance(rows((1, 1), (1, 2)), rows((1, 1)))
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), beside, rtol=1e-6)


def test_residuals_that_have_nothing_to_do_with_parameters_surprise() -> None:
    random = np.random.default_rng(0)
    smooth = process(ALL, [0.1 * first - 0.05 * second for first, second in ALL])
    assert smooth.surprise() < 1.5
    jumps = Residual([3, 4])
    jumps.know(rows(*ALL), random.choice([-0.5, 0.5], len(ALL)), np.zeros(len(ALL)), learn=False)
    assert jumps.surprise() > 2


def test_another_problem_shows_the_less_the_further_it_is() -> None:
    means = [
        process([(0, 0)], [0.2], problems=np.array([1]), distances=np.array([[0.0, far], [far, 0.0]])).mean(
            rows((0, 0))
        )
        for far in (0.0, 6.0, 60.0)
    ]
    assert means[0] == pytest.approx(0.2, rel=0.05)
    assert means[0] > means[1] > 2 * means[2] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_has_one_value_of_each_feature(family: str) -> None:
    mine = [config for config in space(PROBLEM, H200) if config.family == family]
    found = residual.features(PROBLEM, H200, mine, places(mine))
    starts = np.cumsum([0, *residual.feature_sizes(family)[:-1]])
    assert (np.add.reduceat(found, starts, axis=1) == 1).all()


# Refusals


def test_while_nothing_is_known_registers_decide() -> None:
    configs = space(PROBLEM, H200)
    chances = Refusals().chances(refusals.features(PROBLEM, H200, configs))
    left = [config.register_limit(H200) - config.estimate(PROBLEM).registers for config in configs]
    order = np.argsort(left, kind="stable")
    assert (np.diff(chances[order]) >= 0).all()
    assert (chances > 0).all()


def test_what_was_refused_is_told_from_what_passed() -> None:
    def wide(config: Config) -> bool:
        return parameter(config, "block_kv") == 128

    configs = [config for config in space(PROBLEM, H200) if config.family != "wgmma"]
    found, bad = refusals.features(PROBLEM, H200, configs), np.array([wide(config) for config in configs])
    known, asked = np.arange(len(configs)) % 2 == 0, np.arange(len(configs)) % 2 == 1
    model = Refusals()
    model.know(found[known & ~bad], found[known & bad])
    chances = model.chances(found)
    assert chances[asked & ~bad].min() > chances[asked & bad].max()


def test_a_choice_that_never_passes_is_soon_given_up() -> None:
    configs = [config for config in space(PROBLEM, H200) if config.family == "wgmma"]
    found = refusals.features(PROBLEM, H200, configs)
    bad = np.array([parameter(config, "v_fragments") == 4 for config in configs])
    chances = []
    for count in (1, 2, 4):
        model = Refusals()
        model.know(found[~bad][:20], found[bad][:count])
        chances.append(model.chances(found[bad][count:]).max())
    assert chances[0] > chances[1] > chances[2]
    assert chances[2] < 0.1


# Rows and spaces


def test_rows_and_spaces() -> None:
    configs = space(PROBLEM, H200)
    known = Space([*configs, configs[0]])
    assert known.configs == configs
    assert [known.index[config] for config in configs] == list(range(len(configs)))
    assert sorted(index for family in FAMILIES for index in known.members(family)) == list(range(len(configs)))
    for family in FAMILIES:
        mine = known.members(family)
        assert (one_hot(family, known.places[mine]).sum(axis=1) == len(sizes(family))).all()
        assert len(np.unique(known.places[mine], axis=0)) == len(mine)


def test_neighbours_differ_in_one_parameter() -> None:
    known = Space(space(PROBLEM, H200))
    preset = PRESETS["t128"]
    for index in np.flatnonzero(known.neighbours(known.places[known.index[preset]])):
        other = known.configs[index]
        assert other.family == preset.family
        assert sum(getattr(other, name) != getattr(preset, name) for name in preset.choices) == 1


# When to end


@pytest.mark.parametrize(
    ("gains", "ends_after"),
    [
        ([0.0005] * 3, 3),
        ([0.0005, 0.01, 0.0005, 0.0005, 0.0005], 5),
        ([0.0005, None, 0.0005, 0.0005], None),  # nothing is said of what is tried whatever it gains
        ([0.01] * 5, None),
    ],
)
def test_a_search_ends_after_as_many_low_gains_in_a_row(gains: list[float | None], ends_after: int | None) -> None:
    worth = Worth(0.001, patience=3)
    going_on = [worth.go_on(gain) for gain in gains]
    assert (going_on.index(False) + 1 if False in going_on else None) == ends_after


def test_with_no_least_gain_a_search_never_ends() -> None:
    worth = Worth(0.0, patience=1)
    assert all(worth.go_on(0.0) for _ in range(5))


# All of it together


def search(trials: int, bad: Callable[[Config], bool] = lambda config: False) -> list[Config]:
    """What a learner chooses, each with `LOOK_AHEAD` in flight."""
    prospects = Prospects(PROBLEM, space(PROBLEM, H200), H200)
    learner, configs = Learner(prospects, seed=0), prospects.space.configs
    untried = np.ones(len(configs), dtype=bool)
    measured: dict[int, float] = {}
    refused: list[int] = []
    pending: list[int] = []
    chosen: list[Config] = []
    for _ in range(trials):
        if len(pending) == LOOK_AHEAD:
            done = pending.pop(0)
            if bad(configs[done]):
                refused.append(done)
            else:
                measured[done] = cost_ms(configs[done])
        index = learner.choose(untried, measured, refused, pending).index
        untried[index] = False
        pending.append(index)
        chosen.append(configs[index])
    return chosen


@pytest.mark.parametrize(("name", "value"), [("v_fragments", 4), ("v_fragments", 0), ("resync", True)])
def test_what_every_compiler_refuses_is_learned_after_a_few(name: str, value: object) -> None:
    def bad(config: Config) -> bool:
        return parameter(config, name) == value

    chosen = search(40, bad)
    # Those that were in flight before the first outcome, and a few.
    first = next((number for number, config in enumerate(chosen) if bad(config)), 0)
    assert sum(map(bad, chosen[first + LOOK_AHEAD :])) <= 3


def test_the_best_of_a_landscape_that_the_cost_model_has_wrong_is_found() -> None:
    best = min(map(cost_ms, space(PROBLEM, H200)))
    assert min(map(cost_ms, search(60))) <= 1.03 * best


def test_a_choice_needs_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are the compilers': threads that wait for a core make it ten times as slow."""
    chances, threads = Refusals.chances, set()

    def watched(self: Refusals, asked: np.ndarray) -> np.ndarray:
        threads.update(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
        return chances(self, asked)

    monkeypatch.setattr(Refusals, "chances", watched)
    with threadpool_limits(limits=2, user_api="blas"):
        search(LOOK_AHEAD + 2)
    assert threads == {1}


def test_a_choice_takes_little_time() -> None:
    search(1)  # imports
    start = time.process_time()
    search(40)
    assert (time.process_time() - start) / 40 < 0.1
