"""The table of shipped configurations: written and read, and what makes no sense passed over."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bwdtune.db import shipped
from bwdtune.db.records import Environment, GpuKey
from bwdtune.db.shipped import Shipped, read_shipped, write_shipped
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render

H200 = Environment(GpuKey("NVIDIA H200", "9.0"), "sm_90a", "580.65.06", "13.0.88", "2.13.0")
MEASURED = Shipped(
    problem=Problem.parse("8_16_4096_128", causal=True),
    config=PRESETS["v2"],
    gpu=H200.gpu,
    kind="measured",
    environment=H200,
    policy="race-1",
    date="2026-01-01T00:00:00+00:00",
    command="tuner search --shape 8_16_4096_128 --causal",
    ms=7.0,
    cycles=None,
    max_error=2e-3,
    source_hash="0123456789abcdef",
    template_hash="fedcba9876543210",
)
EMULATED = replace(MEASURED, kind="emulated", gpu=GpuKey("NVIDIA GeForce RTX 5090", "12.0"), ms=None, cycles=21e6)


def test_rows_come_back(tmp_path: Path) -> None:
    path = write_shipped([MEASURED, EMULATED], tmp_path / "table.json")
    assert read_shipped(path) == (MEASURED, EMULATED)
    assert MEASURED.origin == "measured on NVIDIA H200"
    assert EMULATED.origin == "emulated on NVIDIA H200, not measured"


def test_the_packages_own_table_makes_sense(caplog: pytest.LogCaptureFixture) -> None:
    table = Path(shipped.__file__).with_name("shipped.json")
    assert len(read_shipped(table)) == len(json.loads(table.read_text())["rows"])
    assert not caplog.records


@pytest.mark.parametrize("row", read_shipped(), ids=lambda row: f"{row.problem.label}, {row.kind}")
def test_the_packages_own_table_is_of_the_templates_as_they_are(row: Shipped) -> None:
    """Dispatch uses no row of another kernel than was measured."""
    assert render(row.problem, row.config).hash == row.source_hash


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"family": "mma", "block_q": 48}},
        {"config": None},
        {"problem": {"dtype": "bf16"}},
        {"kind": "guessed"},
        {"kind": "emulated"},
        {"ms": None},
        {"gpu": "NVIDIA H200"},
        {"environment": {}},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_row_that_makes_no_sense_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    path = write_shipped([MEASURED, EMULATED], tmp_path / "table.json")
    table = json.loads(path.read_text())
    table["rows"][0].update(changes)
    path.write_text(json.dumps(table))
    with caplog.at_level(logging.WARNING):
        assert read_shipped(path) == (EMULATED,)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', "\x00", '{"format": 1, "rows": 3}'])
def test_a_table_that_makes_no_sense_is_an_empty_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    assert read_shipped(path) == ()
    assert read_shipped(tmp_path / "missing.json") == ()


def test_a_later_format_is_left_alone(tmp_path: Path) -> None:
    path = write_shipped([MEASURED], tmp_path / "table.json")
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    assert read_shipped(path) == ()
