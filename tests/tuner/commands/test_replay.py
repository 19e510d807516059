"""`tuner replay`, of the recorded sweeps and of a database."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bwdtune.tuner.cli import main
from bwdtune.tuner.search.sweep import Sweep

SWEEP = next((Path(__file__).resolve().parents[3] / "benchmarks" / "sweeps").glob("h200_limits*.json"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first configurations of a recorded sweep, of which a replay takes no time."""
    recorded = Sweep.read(SWEEP)
    path = tmp_path_factory.mktemp("sweeps") / "small.json"
    Sweep(recorded.problem, recorded.device, recorded.rows[:60], recorded.provenance).write(path)
    return path


def test_json_has_the_sampler_and_random_ones(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", "--sweep", str(small), "--sampler", "exhaustive", "--candidates", "60", "--seeds", "2"]
    assert main([*arguments, "--without-head-start", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["sampler"], row["median_gap"], row["share_within_1_percent"]) == ("exhaustive", 0.0, 1.0)
    assert row["random"]["sampler"] == "random"
    correlations = {"rank_correlation", "top_decile_rank_correlation"}
    learned = {f"learned_{name}" for name in correlations}
    assert set(row["model"]) == correlations | learned | {"top_decile_ceiling", "spill_auc"}
    assert row["without_head_start"]


def test_a_table_for_people(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--sweep", str(small), "--sampler", "random", "--candidates", "5", "--seeds", "2"]) == 0
    assert "random" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name either"),
        (["--sweep", "missing.json"], "missing.json is no sweep"),
        (["--sweep", str(SWEEP), "--sampler", "magic"], "unknown sampler"),
        (["--sweep", str(SWEEP), "--seeds", "0"], "at least 1"),
        (["--sweep", str(SWEEP), "--shape", "1_1_64_64"], "name either"),
    ],
)
def test_wrong_use(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *arguments]) == 2
    assert message in capsys.readouterr().err
