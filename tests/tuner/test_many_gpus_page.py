"""What docs/many_gpus.md shows is understood as it stands: each search asks for what the page says."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bwdtune
from bwdtune.gen.problem import Problem
from bwdtune.tuner import tune
from bwdtune.tuner.cli import main

PAGE = (Path(bwdtune.__file__).resolve().parent / "docs" / "many_gpus.md").read_text("utf-8")
COMMANDS = re.findall(r"^    (tuner search .*)$", PAGE, re.M)
CALLS = re.findall(r"(bwdtune\.tune\(.*?\))(?=`| )", PAGE)
PROBLEM = Problem.parse("8_16_4096_128", causal=True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a search was asked for, which does not run."""
    found: dict[str, Any] = {}

    def run_search(problem: Problem, options: object, **rest: Any) -> SimpleNamespace:
        found.update(problem=problem, **rest)
        row = SimpleNamespace(error="", interrupted=False, winner=True, environment=True, rows=())
        row.to_dict, row.table, row.summary = dict, str, list
        return row

    monkeypatch.setattr(tune, "run_search", run_search)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, asked: dict[str, Any]) -> None:
    words = shlex.split(command.replace("$HEAD", "node1"), comments=True)[1:]
    assert main([*words, "--json"]) == 0
    assert asked["problem"] == PROBLEM
    named = dict(itertools.pairwise(words))
    expected = (named.get("--gpus"), named.get("--ray"), named.get("--db"))
    assert (asked["gpus"], asked["ray"], asked["database"]) == expected
    assert any(expected)


@pytest.mark.parametrize("call", CALLS)
def test_a_call(call: str, asked: dict[str, Any]) -> None:
    assert eval(call, {"bwdtune": bwdtune})
    assert asked["problem"] == PROBLEM
    assert {asked["gpus"], asked["ray"]} & {"all", "auto"}


def test_the_page_has_both() -> None:
    assert len(COMMANDS) >= 6
    assert len(CALLS) == 2
