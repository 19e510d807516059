"""Which kernels a race tells apart, from times under a clock that falls."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bwdtune.tuner.lab.paired import Ratio, paired_ratio
from bwdtune.tuner.lab.timing import Timing, Timings


def rounds(slower: float, *, seed: int, noise: float = 0.01, count: int = 40) -> tuple[list[float], list[float]]:
    """Times of a kernel and of another one, at a clock that falls by half in the course of the race."""
    random = np.random.default_rng(seed)
    clock = np.linspace(1.0, 2.0, count)
    mine, others = (clock * factor * random.normal(1.0, noise, count) for factor in (slower, 1.0))
    return list(mine), list(others)


def test_a_falling_clock_does_not_hide_what_is_slower() -> None:
    for seed in range(20):
        ratio = paired_ratio(*rounds(1.02, seed=seed))
        assert ratio.told_apart
        assert ratio.low <= 1.02 * 1.01
        assert ratio.median == pytest.approx(1.02, abs=0.01)


def test_equal_kernels_are_rarely_told_apart() -> None:
    assert sum(paired_ratio(*rounds(1.0, seed=seed)).told_apart for seed in range(200)) <= 6


def test_the_interval_holds_the_true_ratio() -> None:
    held = [ratio.low <= 1.05 <= ratio.high for ratio in (paired_ratio(*rounds(1.05, seed=n)) for n in range(200))]
    assert sum(held) >= 194


@pytest.mark.parametrize(("count", "told_apart"), [(1, False), (7, False), (8, True)])
def test_few_rounds_tell_nothing(count: int, told_apart: bool) -> None:
    ratio = paired_ratio([2.0] * count, [1.0] * count)
    assert ratio.told_apart == told_apart
    assert ratio == (Ratio(2.0, 2.0, 2.0) if told_apart else Ratio(2.0, 0.0, math.inf))


def test_rounds_must_be_the_same() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio([1.0, 2.0], [1.0])


def test_timings_compare_round_by_round_and_else_by_medians() -> None:
    by_name = {"a": Timing(3.0, 3.0, 3.0, 10), "b": Timing(2.0, 2.0, 2.0, 10)}
    assert Timings(by_name).ratio("a", "b") == Ratio(1.5, 1.5, 1.5)
    paired = Timings(by_name, rounds_ms={"a": (1.1, 2.2) * 5, "b": (1.0, 2.0) * 5})
    assert paired.ratio("a", "b").median == pytest.approx(1.1)
    assert not Timings(by_name).ratio("a", "a").told_apart
