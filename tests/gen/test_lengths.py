"""Lengths of packed sequences that are timed."""

from __future__ import annotations

import statistics

import pytest

from bwdtune.gen.errors import UsageError
from bwdtune.gen.lengths import lengths
from bwdtune.gen.problem import Problem


def test_they_are_what_is_asked_for() -> None:
    assert lengths("", 4, 100) == (25, 50, 75, 100)
    assert lengths("equal", 3, 100) == (100, 100, 100)
    assert lengths("7,100,0", 3, 100) == (7, 100, 0)


def test_drawn_ones_are_the_same_everywhere() -> None:
    assert lengths("lognormal:600", 8, 16384) == (1539, 148, 304, 869, 217, 558, 718, 261)
    assert lengths("lognormal:600", 8, 16384) == lengths("lognormal:600:1:0", 8, 16384)
    assert lengths("lognormal:600:1:1", 8, 16384) != lengths("lognormal:600", 8, 16384)


def test_drawn_ones_have_the_median_that_is_asked_for_and_a_bound() -> None:
    many = lengths("lognormal:600:0.5", 10_001, 2000)
    assert 580 < statistics.median(many) < 620
    assert max(many) == 2000
    assert lengths("lognormal:0.001", 5, 9) == (1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("normal:3", "unknown lengths 'normal:3': use equal, lognormal"),
        ("lognormal:0", "median must be positive"),
        ("1,2", "2 lengths up to 2: the shape says 3 up to 50"),
        ("1,2,51", "3 lengths up to 51"),
        ("0,0,0", "nothing to compute"),
    ],
)
def test_others_are_refused(how: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        lengths(how, 3, 50)


def test_a_problem_counts_them() -> None:
    problem = Problem.parse("3_2_100x200_64", varlen=True, lengths_as="7,100,0")
    assert problem.lengths == ((7, 14), (100, 200), (0, 0))
    assert problem.flops == 5 * 2 * 2 * 64 * (7 * 14 + 100 * 200)
    assert problem.to_dict()["lengths"] == "7,100,0"
    assert problem.options[-4:-2] == ("--lengths", "7,100,0")
    assert "lengths_as" not in problem.to_stored()
    with pytest.raises(UsageError, match="ask for varlen"):
        Problem.parse("3_2_100_64", lengths_as="equal")
