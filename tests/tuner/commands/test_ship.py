"""From a database to the table of shipped configurations."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from search_fakes import ENVIRONMENT, PROBLEM, FakeBench, run_search

from bwdtune.db.records import GpuKey
from bwdtune.db.shipped import read_shipped, write_shipped
from bwdtune.db.store import Store
from bwdtune.gen.device import RTX_5090
from bwdtune.gen.errors import BwdtuneError
from bwdtune.gen.families import Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source, render
from bwdtune.tuner.cli import main
from bwdtune.tuner.commands import ship as module
from bwdtune.tuner.commands.ship import ship


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a winner, one within limits, and a best emulated one."""
    path = tmp_path_factory.mktemp("searched") / "results.sqlite"
    for options in ({}, {"limits": "sm_120"}, {"emulate": "sm_120"}):
        run_search(path, trials=6, **options)
    return path


@pytest.mark.slow
def test_rows_of_other_problems_are_kept(searched: Path, tmp_path: Path) -> None:
    with closing(Store.open(searched, read_only=True)) as store:
        own = ship(store, tmp_path / "own.json").rows
        stale = replace(own[0], ms=own[0].ms * 2)
        other = replace(own[0], problem=Problem.parse("8_16_4096_64", causal=True))
        path = write_shipped([stale, other], tmp_path / "table.json")
        assert ship(store, path, add=True).rows == (other, *own) == read_shipped(path)
        assert ship(store, path).rows == own == read_shipped(path)


@pytest.mark.slow
def test_winners_and_emulated_bests_are_shipped(searched: Path, tmp_path: Path) -> None:
    with closing(Store.open(searched, read_only=True)) as store:
        table = ship(store, tmp_path / "table.json")
        winner = store.winner(PROBLEM, ENVIRONMENT.gpu)
        best = store.emulated_best(PROBLEM, ENVIRONMENT.gpu, "sm_120")
    assert winner
    assert best
    measured, emulated = table.rows
    assert read_shipped(table.path) == table.rows
    assert (measured.kind, measured.config, measured.gpu) == ("measured", winner.config, ENVIRONMENT.gpu)
    assert (measured.ms, measured.cycles) == (winner.median_ms, None)
    assert measured.command == "tuner search --shape 8_16_4096_128 --causal --dtype bf16"
    assert (emulated.kind, emulated.config) == ("emulated", best.config)
    assert (emulated.ms, emulated.cycles) == (None, best.cycles)
    assert emulated.gpu == GpuKey(RTX_5090.name, "12.0")
    assert emulated.command == "tuner search --shape 8_16_4096_128 --causal --dtype bf16 --emulate sm_120"
    for row in table.rows:
        assert row.environment == replace(ENVIRONMENT, gpu=row.environment.gpu)
        assert row.source_hash == render(PROBLEM, row.config).hash, "that of the kernel that will be used"
        assert row.max_error == 0.002
        assert row.date.startswith("20")
    (left_out,) = table.left_out
    assert left_out.endswith("it kept to the limits of sm_120")


@pytest.fixture
def other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates with one line more than those that were searched with."""

    def changed(problem: Problem, config: Config, **options: Any) -> Source:
        source = render(problem, config, **options)
        return replace(source, text=source.text + "\n")

    monkeypatch.setattr(module, "render", changed)


@pytest.mark.usefixtures("other_text")
def test_results_of_other_text_are_left_out(searched: Path, tmp_path: Path) -> None:
    with (
        closing(Store.open(searched, read_only=True)) as store,
        pytest.raises(BwdtuneError, match=r"nothing to ship.*its text has changed since.*its text has changed since"),
    ):
        ship(store, tmp_path / "table.json")


@pytest.mark.usefixtures("other_text")
@pytest.mark.parametrize(("machine_code", "shipped"), [("that of before", 1), ("another", 0)])
def test_other_text_of_the_same_machine_code_is_shipped(
    searched: Path, tmp_path: Path, machine_code: str, shipped: int
) -> None:
    path = tmp_path / "results.sqlite"
    shutil.copy(searched, path)
    with closing(Store.open(path)) as store:
        winner = store.winner(PROBLEM, ENVIRONMENT.gpu)
        assert winner
        identity = {"arch": winner.environment.arch, "toolchain": winner.environment.toolkit}
        before = store.find_variant(PROBLEM, winner.config, source_hash=winner.source_hash, **identity)
        today = module.render(PROBLEM, winner.config)
        store.record_variant(PROBLEM, replace(before, machine_code="that of before"))
        store.record_variant(PROBLEM, replace(before, source_hash=today.hash, machine_code=machine_code))
        if not shipped:
            with pytest.raises(BwdtuneError, match="nothing to ship"):
                ship(store, tmp_path / "table.json")
            return
        (row,) = ship(store, tmp_path / "table.json").rows
    assert (row.source_hash, row.machine_code) == (today.hash, "that of before")


def test_the_best_of_an_interrupted_search_is_left_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    class Interrupting(FakeBench):
        def time(self, *arguments):
            if len(self.timed) == 3:
                raise KeyboardInterrupt
            return super().time(*arguments)

    run_search(tmp_path / "results.sqlite", bench=Interrupting(), trials=6)
    with closing(Store.open(tmp_path / "results.sqlite", read_only=True)) as store:
        with pytest.raises(BwdtuneError, match="its search was interrupted"):
            ship(store, tmp_path / "table.json")
        asked_for = ship(store, tmp_path / "table.json", interrupted=True)
        winner = store.winner(PROBLEM, ENVIRONMENT.gpu)
    assert winner
    assert [row.config for row in asked_for.rows] == [winner.config]
    assert asked_for.left_out == ()


def test_a_database_without_a_winner_leaves_the_table_alone(
    searched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.json"
    assert main(["ship", "--db", str(searched), "-o", str(table)]) == 0
    before = table.read_bytes()
    empty = tmp_path / "empty.sqlite"
    Store.open(empty).close()
    capsys.readouterr()
    assert main(["ship", "--db", str(empty), "-o", str(table)]) == 1
    said = capsys.readouterr().err.strip()
    assert f"{table} is left as it was" in said
    assert "\n" not in said
    assert table.read_bytes() == before


def test_the_command_writes_and_list_shows(searched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ship", "--db", str(searched)]) == 0
    assert "emulated on NVIDIA H200, not measured" in capsys.readouterr().out
    assert main(["list"]) == 0, "without a database"
    listed = capsys.readouterr().out
    assert "shipped: used where nothing is stored" in listed
    assert "no winner is stored yet" in listed
    assert main(["list", "--db", str(searched)]) == 0
    listed = capsys.readouterr().out
    for part in ("winners", "best emulated configurations", "shipped"):
        assert part in listed
    assert main(["list", "--db", str(tmp_path / "nowhere.sqlite")]) == 1
