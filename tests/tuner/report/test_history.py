"""What is read of a database for a report, whoever wrote it and by whichever version."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from report_databases import OTHER_PROBLEM
from search_fakes import ENVIRONMENT, PROBLEM, FakeBench, FakeBuilder, cost_ms, parameter, run_search

from bwdtune.db.records import Winner
from bwdtune.db.store import Store
from bwdtune.gen.device import H200, RTX_5090
from bwdtune.gen.families import PRESETS
from bwdtune.tuner.cli import main
from bwdtune.tuner.report.history import History, Target, read_histories


def read(database: Path, problem=PROBLEM) -> list[History]:
    with closing(Store.open(database, read_only=True)) as store:
        return read_histories(store, [problem])


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "results.sqlite"


def test_what_was_handed_over_is_in_the_order_in_which_it_was_measured(searched: Path, tmp_path: Path) -> None:
    file, elsewhere = tmp_path / "handed_over.json", tmp_path / "elsewhere.sqlite"
    (here,) = read(searched, OTHER_PROBLEM)
    assert here.logged
    assert main(["db", "export", "--db", str(searched), "-o", str(file)]) == 0
    main(["db", "import", str(file), "--db", str(elsewhere)])
    (there,) = read(elsewhere, OTHER_PROBLEM)
    assert there.winner is None, "nothing has verified it there"
    measured = [entry.config for entry in here.entries if entry.number and entry.outcome.cost]
    assert [entry.config for entry in there.entries][: len(measured)] == measured
    assert len(there.searches) == len(here.searches) == 1


def test_each_target_is_apart_what_was_measured_first(searched: Path) -> None:
    found = read(searched)
    assert [history.target for history in found] == [
        Target(H200.name, "sm_90a"),
        Target(H200.name, "sm_90a", emulate="sm_120"),
        Target("", RTX_5090.arch),
    ]
    assert [history.device for history in found] == [H200, H200, RTX_5090]
    assert [len(history.searches) for history in found] == [1, 1, 1]
    (other,) = read(searched, OTHER_PROBLEM)
    assert other.problem == OTHER_PROBLEM


def test_candidates_are_those_of_the_search_in_its_order(database: Path) -> None:
    builder = FakeBuilder(spills=lambda config, arch: 400 if parameter(config, "stages") == 1 else 0)
    result = run_search(database, trials=14, builder=builder, sampler="random")
    (history,) = read(database)
    logged = [entry for entry in history.entries if entry.number]
    assert [entry.number for entry in logged] == list(range(1, 15))
    for entry, trial in zip(logged, result.trials, strict=True):
        assert entry.config == trial.row.config
        assert (entry.outcome.state, entry.outcome.kind) == (trial.outcome.state, trial.outcome.kind)
        assert entry.outcome.cost == trial.outcome.cost
        for name in (
            "timing",
            "registers",
            "spill_bytes",
            "shared_memory_bytes",
            "max_error",
            "kernel",
            "predicted_ms",
        ):
            assert getattr(entry.row, name) == getattr(trial.row, name), name
    assert history.winner
    assert history.winner.config == result.winner.config


def test_two_searches_follow_each_other_and_the_newest_race_counts(database: Path) -> None:
    first = run_search(database, trials=6, sampler="random", seed=1)
    second = run_search(database, trials=3, seed=2, bench=FakeBench(cost=lambda config: 0.9 * cost_ms(config)))
    (history,) = read(database)
    logged = [entry for entry in history.entries if entry.number]
    assert [entry.config for entry in logged] == [trial.row.config for trial in (*first.trials, *second.trials)]
    assert [search.record.seed for search in history.searches] == [1, 2]
    assert {entry.search_id for entry in logged} == {search.id for search in history.searches}
    race = history.race
    assert race
    timed = {row.config.id if row.config else row.kernel: row.timing for row in second.rows if row.timing}
    assert {lane.name: (lane.median, lane.low, lane.high) for lane in race.lanes} == {
        name: (timing.median_ms, timing.low_ms, timing.high_ms) for name, timing in timed.items()
    }
    assert [lane.median for lane in race.lanes] == sorted(lane.median for lane in race.lanes)
    assert (race.clock_mhz, race.default_kernel) == (1700.0, "cudnn")


def test_other_conditions_are_left_out_and_counted(searched: Path) -> None:
    run_search(searched, problem=OTHER_PROBLEM, trials=2, environment=replace(ENVIRONMENT, driver="999.1"))
    (history,) = read(searched, OTHER_PROBLEM)
    assert history.left_out == 6
    assert len([entry for entry in history.entries if entry.number]) == 2
    assert "driver 999.1" in history.conditions


def test_what_raced_and_was_no_candidate_is_listed_without_a_place(searched: Path) -> None:
    (history,) = read(searched, OTHER_PROBLEM)
    besides = [entry for entry in history.entries if entry.number is None]
    assert besides
    assert all(entry.config in PRESETS.values() and entry.row.timing for entry in besides)


def test_cycles_rank_what_is_emulated(searched: Path) -> None:
    emulated = next(history for history in read(searched) if history.emulated)
    assert emulated.winner
    assert emulated.race
    assert emulated.race.lanes[0].config == emulated.winner.config
    measured = [entry for entry in emulated.entries if entry.outcome.cost]
    assert all(entry.row.cycles == entry.outcome.cost and entry.row.timing is None for entry in measured)


def test_a_survey_lists_what_passed_and_what_did_not(database: Path) -> None:
    builder = FakeBuilder(spills=lambda config, arch: 400 if parameter(config, "stages") == 2 else 0)
    bench = FakeBench(wrong=lambda config: config == PRESETS["v1"])
    result = run_search(database, trials=12, device=RTX_5090, builder=builder, bench=bench, measured=False)
    (history,) = read(database)
    assert (history.winner, history.race) == (None, None)
    states = {entry.config: (entry.outcome.state, entry.outcome.kind) for entry in history.entries}
    assert states == {trial.row.config: (trial.outcome.state, trial.outcome.kind) for trial in result.trials}
    assert all(entry.row.predicted_ms for entry in history.entries)


def test_a_database_without_studies_is_read_by_its_measurements(searched: Path) -> None:
    """Handed over, or written by `tuner` before there was a log."""
    with closing(sqlite3.connect(searched)) as connection, connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (name,) in tables:
            if name.startswith(("trial", "stud", "version_info", "alembic")):
                connection.execute(f'DROP TABLE "{name}"')
    (history,) = read(searched, OTHER_PROBLEM)
    assert [entry.number for entry in history.entries] == list(range(1, len(history.entries) + 1))
    assert len(history.entries) >= 6
    assert not history.logged
    assert_race_of_the_winner(history)


def assert_race_of_the_winner(history: History) -> None:
    """What is known without a logged race."""
    assert history.race
    assert isinstance(history.winner, Winner)
    winner, default = history.winner, history.race.lane("default")
    assert default
    assert (len(history.race.lanes), default.median) == (2, winner.default_ms)
    lane = history.race.lane(winner.config.id)
    assert lane
    assert (lane.median, lane.low, lane.high) == (winner.median_ms, winner.low_ms, winner.high_ms)


def test_reasons_of_earlier_versions_have_a_kind(searched: Path) -> None:
    with closing(sqlite3.connect(searched)) as connection, connection:
        connection.execute("DELETE FROM trial_user_attributes WHERE key IN ('kind', 'search')")
    history, *_ = read(searched)
    assert {entry.outcome.kind for entry in history.entries} == {"", "spills", "gradients", "compiler", "crash"}


def test_a_race_that_is_none_is_passed_over(searched: Path) -> None:
    for races in (
        "no list",
        [None, 3, "race", []],
        [{"winner": "v1"}],
        [{"winner": "v9", "median_ms": {"v9": 1.0}}],
        [{"winner": "cudnn", "median_ms": {"cudnn": -1.0}}],
        [{"winner": "cudnn", "median_ms": {"cudnn": True}}],
        [{"winner": ["cudnn"], "median_ms": {"cudnn": 1.0}}],
    ):
        with closing(sqlite3.connect(searched)) as connection, connection:
            connection.execute("UPDATE study_user_attributes SET value_json = ?", (json.dumps(races),))
        (history,) = read(searched, OTHER_PROBLEM)
        assert_race_of_the_winner(history)
