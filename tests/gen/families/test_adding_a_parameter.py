"""What follows from the declaration of a parameter: all that docs/recipes.md does not name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import bwdtune
from bwdtune.gen.device import H200
from bwdtune.gen.errors import UsageError
from bwdtune.gen.families import FAMILIES, PRESETS, Config, MmaConfig, config_from_dict, parse_config, short_form
from bwdtune.gen.families.base import family, parameter
from bwdtune.gen.families.table import page
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.gen.space import refusal, space_hash, valid_configs

PROBLEM = Problem.parse("8_16_4096_128", causal=True)
DOCS = Path(bwdtune.__file__).parent / "docs"


@family
class Grown(MmaConfig):
    """The ``mma`` family with one more parameter."""

    prefetch_tiles: int = parameter(
        "p", (0, 1, 2), "Tiles of K and V that are prefetched into L2.", default=0, later=True, affects_validity=False
    )


@pytest.fixture
def grown(monkeypatch: pytest.MonkeyPatch) -> Config:
    """v3 in a version that has the parameter; where it is not mentioned it is at its default."""
    monkeypatch.setitem(FAMILIES, "mma", Grown)
    config = Grown(**vars(PRESETS["v3"]))
    monkeypatch.setitem(PRESETS, "v3", config)
    return config


def test_what_was_there_before_stays_the_same(grown: Config) -> None:
    before = MmaConfig(**{name: value for name, value in vars(grown).items() if name != "prefetch_tiles"})
    assert grown.id == before.id
    assert grown.to_stored() == before.to_stored()
    assert config_from_dict(before.to_stored()) == grown
    assert parse_config(before.id) == grown
    assert render(PROBLEM, grown).text == render(PROBLEM, before).text
    assert grown.estimate(PROBLEM) == before.estimate(PROBLEM)


def test_other_values_have_a_name_of_their_own(grown: Config) -> None:
    other = dataclasses.replace(grown, prefetch_tiles=2)
    assert other.id == grown.id + "_p2"
    assert short_form(other) == "v3 prefetch_tiles=2"
    assert parse_config("v3 prefetch_tiles=2") == parse_config(other.id) == config_from_dict(other.to_stored()) == other
    with pytest.raises(UsageError, match="prefetch_tiles is 3: it must be one of 0, 1, 2"):
        parse_config("v3 prefetch_tiles=3")


def test_they_are_searched(grown: Config) -> None:
    before = space_hash()
    card = dataclasses.replace(H200, name="judged anew")
    found = [config for config in valid_configs(PROBLEM, card) if config.id.startswith(grown.id)]
    assert {config.to_dict()["prefetch_tiles"] for config in found} == {0, 1, 2}
    assert all(refusal(PROBLEM, config, card) is None for config in found)
    FAMILIES["mma"] = MmaConfig
    assert space_hash() != before, "a study of another space cannot go on"


def test_they_are_documented(grown: Config) -> None:
    assert "| `prefetch_tiles` | p | 0, 1, 2 | 0 | Tiles of K and V that are prefetched into L2. |" in page()


def test_the_page_of_all_parameters_is_up_to_date() -> None:
    assert (DOCS / "parameters.md").read_text() == page(), "python -m bwdtune.gen.families > docs/parameters.md"
