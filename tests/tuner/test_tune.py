"""A search in Python in one call: the same search as the command's, with what it needs found by itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import bwdtune
from bwdtune.gen.device import RTX_5090
from bwdtune.gen.errors import UsageError
from bwdtune.gen.problem import Problem
from bwdtune.tuner import tune as module
from bwdtune.tuner.search.options import SearchOptions

PROBLEM = Problem.parse("1_1_128_64", causal=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What the search was asked for, which does not run."""
    found: dict[str, object] = {}

    def search(problem, device, store, options, **rest):
        found.update(problem=problem, device=device, database=store.url.database, options=options, **rest)
        return "result"

    monkeypatch.setattr(module, "search", search)
    monkeypatch.setattr(module, "find_compiler", lambda arch: SimpleNamespace(version="13.0.88"))
    return found


def test_one_call_searches(asked: dict[str, object], tmp_path: Path) -> None:
    database = tmp_path / "results.sqlite"
    options = {"trials": 7, "seed": 3, "timing": "warm"}
    result = bwdtune.tune("1_1_128_64", causal=True, arch="sm_120a", database=database, **options)
    assert result == "result"
    assert (asked["problem"], asked["device"], asked["database"]) == (PROBLEM, RTX_5090, str(database))
    assert isinstance(asked["options"], SearchOptions)
    assert (asked["options"].trials, asked["options"].seed, asked["options"].timing.l2) == (7, 3, "warm")
    assert asked["environment"] is None, "there is no such GPU here: a survey"


def test_a_problem_is_taken_too(asked: dict[str, object]) -> None:
    bwdtune.tune(PROBLEM, arch="sm_120a")
    assert asked["problem"] == PROBLEM


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"limits": "sm_120"}, (None, None)),
        ({"limits": "rtx_pro_6000"}, (None, None)),
        ({"emulate": "sm_120"}, (None, None)),
        ({"emulate": "rtx_pro_6000"}, (None, "rtx_pro_6000")),
    ],
)
def test_a_card_keeps_to_its_own_limits_and_does_not_emulate_itself(
    asked: dict[str, object], options: dict[str, str], left: tuple[str | None, str | None]
) -> None:
    """The faster card of the same target is another one: whether this card can emulate it is the search's to say."""
    bwdtune.tune(PROBLEM, arch="sm_120a", **options)
    assert isinstance(asked["options"], SearchOptions)
    assert (asked["options"].limits, asked["options"].emulate) == left


@pytest.mark.parametrize(
    ("arguments", "options", "names"),
    [
        (("1_1_128",), {}, "1_1_128"),
        ((PROBLEM,), {"causal": True}, "causal"),
        ((PROBLEM,), {"arch": "host"}, "host"),
        ((PROBLEM,), {"trials": 0}, "trials is 0"),
        ((PROBLEM,), {"timing": "hot"}, "hot"),
        ((PROBLEM,), {"gpus": "some"}, "write all, or their numbers"),
        ((PROBLEM,), {"gpus": "0,1", "ray": "auto"}, "leave one out"),
    ],
)
def test_wrong_use_is_a_usage_error(asked: dict[str, object], arguments: tuple, options: dict, names: str) -> None:
    with pytest.raises(UsageError, match=names):
        bwdtune.tune(*arguments, **options)
    assert asked == {}
