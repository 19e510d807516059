from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bwdtune.gen.errors import UsageError
from bwdtune.gen.families import (
    FAMILIES,
    PRESETS,
    Config,
    MmaConfig,
    config_from_dict,
    parse_config,
    preset_name,
    short_form,
)

configs = st.one_of(
    st.builds(family, **{name: st.sampled_from(choices) for name, choices in family.choices.items()})  # type: ignore[arg-type]
    for family in FAMILIES.values()
)


@given(configs)
def test_an_id_names_one_configuration(config: Config) -> None:
    assert parse_config(config.id) == config


@given(configs)
def test_what_is_stored_is_what_is_read(config: Config) -> None:
    assert config_from_dict(config.to_stored()) == config
    assert config_from_dict(config.to_dict()) == config


@given(configs)
def test_what_is_shown_is_taken_back(config: Config) -> None:
    shown = short_form(config)
    assert parse_config(shown) == config
    assert parse_config(shown.replace(" ", ",")) == config
    assert shown.split()[0] in PRESETS


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("v2", "v2"),
        ("w64conv skip_masked", "w64conv skip_masked=1"),
        ("w64conv,skip_masked=true,l2_head_group=16", "w64conv skip_masked=1 l2_head_group=16"),
        ("w64 lag_dq=1", "w64 dq_delayed=1"),  # an old name
        ("w64 dq_delayed=1 dq_delayed=0", "w64"),
        ("v1 block_q=32 stages=2", "v3"),
        (PRESETS["t64"].id + " q_stages=3", "t64 q_stages=3"),
    ],
)
def test_a_configuration_is_a_preset_and_what_differs(text: str, shown: str) -> None:
    assert short_form(parse_config(text)) == shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v2 stage=2", "the mma kernels have no parameter 'stage': use block_q, block_kv"),
        ("v2 stages", "'stages' gives stages no value: write stages=3"),
        ("v2 stages=two", "gives stages no value"),
        ("v2 stages=-1", "gives stages no value"),
        ("v2 stages=4", "stages is 4: it must be one of 1, 2, 3"),
        ("w64 skip_masked=2", "skip_masked is 2: it must be one of False, True"),
        ("w65 skip_masked=0", "unknown configuration 'w65'"),
    ],
)
def test_what_differs_must_be_a_value_of_a_parameter(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_config(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_name_is_taken_twice(family: str) -> None:
    parameters = FAMILIES[family].parameters
    names = [name for one in parameters.values() for name in {one.name, one.stored}]
    assert len(names) == len(set(names))
    assert len({one.short for one in parameters.values()}) == len(parameters)


def test_a_name_of_before_is_still_read_and_still_written() -> None:
    """Rows that were stored before a parameter got its name stay the same configurations, in both directions."""
    stored = {**PRESETS["w64lag"].to_dict(), "lag_dq": True, "copies": 1}
    del stored["dq_delayed"], stored["code_copies"]
    assert config_from_dict(stored) == PRESETS["w64lag"]
    assert {"lag_dq", "fold_statistics", "head_group"} <= PRESETS["w64lag"].to_stored().keys()
    with pytest.raises(UsageError, match="lag_dq"):
        config_from_dict({**stored, "dq_delayed": True})


def test_presets_are_the_write_ups_kernels() -> None:
    write_up = [PRESETS[name] for name in ("v1", "v2", "v3")]
    assert [(c.block_q, c.block_kv, c.warps_per_row_group, c.stages, c.num_warps) for c in write_up] == [
        (64, 64, 4, 1, 16),
        (64, 64, 2, 1, 8),
        (32, 64, 4, 2, 8),
    ]


def test_a_preset_has_its_name() -> None:
    for name, config in PRESETS.items():
        assert parse_config(name) == config
        assert preset_name(config) == name
    assert preset_name(MmaConfig(16, 32, 1)) is None


def test_a_row_of_before_a_parameter_existed_means_what_kernels_did_then() -> None:
    stored = PRESETS["v3"].to_dict()
    del stored["unroll_dq"]
    assert config_from_dict(stored) == PRESETS["v3"]
    assert parse_config("mma_q32_kv64_w4_s2_sw128_k1_v1_b1_r2") == PRESETS["v3"]


@pytest.mark.parametrize(
    ("preset", "stored"),
    [
        ("v1", "mma_q64_kv64_w4_s1_sw128_k1_v1_b1_r2_u1"),
        ("v2", "mma_q64_kv64_w2_s1_sw128_k1_v1_b1_r2_u0"),
        ("v3", "mma_q32_kv64_w4_s2_sw128_k1_v1_b1_r2_u1"),
    ],
)
def test_the_presets_keep_the_ids_that_their_measurements_have(preset: str, stored: str) -> None:
    assert PRESETS[preset].id == stored
    assert parse_config(stored) == PRESETS[preset]


@given(configs)
def test_a_later_parameter_is_stated_only_where_it_is_not_at_its_default(config: Config) -> None:
    for name, parameter in config.parameters.items():
        if not parameter.later:
            continue
        before = dataclasses.replace(config, **{name: parameter.default})
        assert parameter.stored not in before.to_stored()
        assert (config.id == before.id) == (config == before)


RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


def test_ids_in_results_are_ids_of_today() -> None:
    rows = [row for path in RESULTS.glob("*.json") for row in json.loads(path.read_text()).get("rows", ())]
    ids = {row["config"] for row in rows if row.get("config")}  # training steps have none
    assert ids
    assert {parse_config(name).id for name in ids} == ids


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"family": "cutlass"}, "unknown kernel family"),
        ({"family": None}, "unknown kernel family"),
        ({"block_q": 48}, "block_q is 48"),
        ({"block_q": "64"}, "block_q is '64'"),
        ({"block_q": "64; system()"}, "block_q is"),
        ({"block_q": True}, "block_q is True"),
        ({"k_in_registers": 1}, "k_in_registers is 1"),
        ({"block_q": None}, "block_q is None"),
        ({"surprise": 1}, "unknown or missing parameters: surprise"),
    ],
)
def test_nothing_stored_is_trusted(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        config_from_dict(PRESETS["v1"].to_dict() | change)


def test_a_needed_parameter_must_be_there() -> None:
    stored = PRESETS["v1"].to_dict()
    del stored["block_kv"]
    with pytest.raises(UsageError, match="unknown or missing parameters: block_kv"):
        config_from_dict(stored)


@pytest.mark.parametrize(
    "text",
    [
        "v4",
        "",
        "mma",
        "mma_q64",
        "wgmma_q64_kv64",
        PRESETS["v1"].id + "_x1",
        PRESETS["v1"].id.replace("q64", "q65"),
        PRESETS["v1"].id.replace("_q64", ""),
        PRESETS["v1"].id.replace("_q64", "_q64_q64"),
        PRESETS["v1"].id.replace("_k1", "_k7"),
        PRESETS["v1"].id.replace("_k1", "_"),
        PRESETS["v1"].id + "_g1_g1",
        PRESETS["v1"].id.replace("mma_", "mmat_"),
        PRESETS["t64"].id.replace("_h4", "_h3"),
        PRESETS["v1"].id.replace("q64_kv64", "kv64_q64"),
    ],
)
def test_an_unknown_name_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_config(text)
    assert "\n" not in str(refused.value)
