"""The table of shipped configurations: written and read, and what makes no sense passed over."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compiled_code import device_code

from bwdtune.db import shipped
from bwdtune.db.records import Environment, GpuKey
from bwdtune.db.shipped import Race, Shipped, read_shipped, write_shipped
from bwdtune.gen.build.toolchain import ToolchainError, find_compiler
from bwdtune.gen.device import device_for_arch
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
    machine_code="0011223344556677",
    race=Race(7.0, {"cudnn": 9.1, "flash": 14.0}, "cudnn", "benchmarks/results/some.json"),
)
EMULATED = replace(
    MEASURED, kind="emulated", gpu=GpuKey("NVIDIA GeForce RTX 5090", "12.0"), ms=None, cycles=21e6, race=None
)


def test_rows_come_back(tmp_path: Path) -> None:
    path = write_shipped([MEASURED, EMULATED], tmp_path / "table.json")
    assert read_shipped(path) == (MEASURED, EMULATED)
    assert MEASURED.origin == "measured on NVIDIA H200"
    assert EMULATED.origin == "emulated on NVIDIA H200, not measured"


def test_the_packages_own_table_makes_sense(caplog: pytest.LogCaptureFixture) -> None:
    table = Path(shipped.__file__).with_name("shipped.json")
    assert len(read_shipped(table)) == len(json.loads(table.read_text())["rows"])
    assert not caplog.records


COMPILED_AGAIN = {row.config.family: row for row in read_shipped()}.values()
each_row = pytest.mark.parametrize("row", read_shipped(), ids=lambda row: f"{row.problem.label}, {row.kind}")


@each_row
def test_the_packages_own_table_names_its_machine_code(row: Shipped) -> None:
    assert row.machine_code
    assert row.environment.toolkit
    assert row.race is None or row.race.default_ms is None or row.race.advantage > 1


@pytest.mark.slow
@pytest.mark.compiled
@each_row
def test_the_packages_own_table_is_of_the_kernels_as_they_are(row: Shipped) -> None:
    """Dispatch uses no row of another kernel than was measured.

    `tuner carry --shipped` has compiled a row's kernel when it wrote the hash of today's text. Of these, one of each
    family is compiled again.
    """
    if render(row.problem, row.config).hash == row.source_hash and row not in COMPILED_AGAIN:
        return
    arch = row.environment.arch if row.kind == "measured" else "sm_120a"
    try:
        if find_compiler(arch).version != row.environment.toolkit:
            pytest.skip(f"it was measured as nvcc {row.environment.toolkit} compiles it")
    except ToolchainError as error:
        pytest.skip(str(error))
    assert device_code(row.problem, row.config, device_for_arch(arch)).machine_code == row.machine_code


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
        {"race": {"ms": 7.0, "peers": {}, "default": "cudnn", "source": ""}},
        {"race": {"ms": 7.0, "peers": {"cudnn": -1}, "default": "cudnn", "source": ""}},
        {"race": {"ms": 7.0}},
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


def test_a_race_knows_how_much_faster_ours_was() -> None:
    assert MEASURED.race
    assert (MEASURED.race.default_ms, MEASURED.race.advantage) == (9.1, 1.3)
    unknown = replace(MEASURED.race, default="")
    assert (unknown.default_ms, unknown.advantage) == (None, None)


@pytest.mark.parametrize("when", ["written", "renamed"])
def test_a_write_that_fails_leaves_the_table_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    path = write_shipped([MEASURED], tmp_path / "table.json")
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync" if when == "written" else "os.replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_shipped([], path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["table.json"]


def test_a_table_keeps_its_mode_and_its_links(tmp_path: Path) -> None:
    path = write_shipped([MEASURED], tmp_path / "table.json")
    path.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    write_shipped([EMULATED], link)
    assert link.is_symlink()
    assert read_shipped(path) == (EMULATED,)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_later_format_is_left_alone(tmp_path: Path) -> None:
    path = write_shipped([MEASURED], tmp_path / "table.json")
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    assert read_shipped(path) == ()
