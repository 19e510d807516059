"""Searches of one problem at once, on cards that differ, at one database: of a file, and of a server that restarts."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import optuna
import pytest
import search_fakes
from landscape import cost_ms
from postgres import Server, server
from search_fakes import ENVIRONMENT, PROBLEM

from bwdtune.db.store import Store
from bwdtune.gen.families import parse_config
from bwdtune.tuner.lab.timing import SEARCH_POLICY

TRIALS = 12
PACES = (1.0, 1.06)


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install .[postgresql]")
    try:
        with server() as found:
            yield found
    except FileNotFoundError as error:
        pytest.skip(str(error))


def start(database: Path | str, pace: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", search_fakes.__file__, str(database), str(TRIALS), "0.05", str(pace)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Until it says so, which it must."""
    assert process.stdout
    assert any(text in line for line in process.stdout), process.stderr and process.stderr.read()


def finish(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors


def costs(database: Path | str) -> list[tuple[str, float]]:
    """Of all trials in the study."""
    with closing(Store.open(database)) as store:
        storage = store.optuna_storage()
        (summary,) = optuna.get_all_study_summaries(storage)
        trials = optuna.load_study(study_name=summary.study_name, storage=storage).get_trials()
    return [(trial.user_attrs["config"], trial.value) for trial in trials if trial.value]


def agree(database: Path | str) -> None:
    """What two searches have found at once: each configuration once, all on one scale, and one winner."""
    found = costs(database)
    assert len(found) == len(dict(found)) == TRIALS * len(PACES)
    scale = found[0][1] / cost_ms(parse_config(found[0][0]))
    assert any(scale == pytest.approx(pace) for pace in PACES)
    assert dict(found) == pytest.approx({name: scale * cost_ms(parse_config(name)) for name, _ in found})
    with closing(Store.open(database)) as store:
        winner = store.winner(PROBLEM, ENVIRONMENT.gpu)
        measured = Counter(
            one.variant.config for one in store.measurements(PROBLEM) if one.record.policy == SEARCH_POLICY.id
        )
    assert set(measured.values()) == {1}
    assert cost_ms(winner.config) == min(map(cost_ms, measured))


@pytest.mark.slow
def test_searches_at_once_measure_nothing_twice(tmp_path: Path) -> None:
    database = tmp_path / "results.sqlite"
    finish([start(database, pace) for pace in PACES])
    agree(database)


@pytest.mark.slow
@pytest.mark.postgresql
def test_a_server_restarts_under_two_searches(postgres: Server) -> None:
    processes = [start(postgres.url, pace) for pace in PACES]
    wait_for(processes[0], "decided 4")
    postgres.stop()
    wait_for(processes[0], "trying again for 60 s")
    postgres.start()
    finish(processes)
    agree(postgres.url)
