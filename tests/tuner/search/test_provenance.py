"""Each search is a row of the database, and what it measured and tried says which search that was."""

from __future__ import annotations

import platform
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from search_fakes import ENVIRONMENT, PROBLEM, FakeBench, Told, run_search

from bwdtune import __version__
from bwdtune.db.errors import DatabaseUnavailable
from bwdtune.db.records import StoredMeasurement, StoredSearch, VerificationRecord
from bwdtune.db.store import Store
from bwdtune.gen.build.jobs import Variant
from bwdtune.gen.device import H200, RTX_5090
from bwdtune.gen.problem import Problem
from bwdtune.tuner.search.progress import Status


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "results.sqlite"


def stored(database: Path) -> tuple[list[StoredSearch], list[StoredMeasurement], list[optuna.trial.FrozenTrial]]:
    """Searches, measurements in the order in which they were taken, and the trials of the first search's study."""
    with closing(Store.open(database)) as store:
        searches = store.searches(PROBLEM)
        assert store.searches() == list(store.show(PROBLEM).searches) == searches
        trials = []
        if searches[0].record.study:
            trials = optuna.load_study(study_name=searches[0].record.study, storage=store.optuna_storage()).trials
        return searches, sorted(store.measurements(PROBLEM), key=lambda one: one.id), trials


class Interrupting(FakeBench):
    """Ctrl-C comes with the third candidate."""

    def verify(self, problem: Problem, variant: Variant) -> VerificationRecord:
        if len(self.verified) == 2:
            raise KeyboardInterrupt
        return super().verify(problem, variant)


def test_a_search_is_stored_with_what_it_measured(database: Path) -> None:
    first = run_search(database, trials=3, seed=7)
    run_search(database, trials=2, bench=Interrupting())
    searches, measurements, trials = stored(database)
    assert [(one.status, one.decided, one.error) for one in searches] == [("complete", 3, ""), ("partial", 2, "")]
    record = searches[0].record
    assert (record.sampler, record.seed, record.arch) == ("tpe", 7, H200.arch)
    assert (record.options["trials"], record.options["emulate"], record.options["timing"]["l2"]) == (3, None, "cold")
    assert record.gpu is not None
    assert (record.gpu.name, record.driver, record.torch) == (H200.name, ENVIRONMENT.driver, ENVIRONMENT.torch)
    assert (record.host, record.bwdtune, record.optuna) == (platform.node(), __version__, optuna.__version__)
    assert searches[0].ended_at is not None
    assert searches[0].started_at <= searches[0].ended_at <= searches[1].started_at
    assert first.counts.measured == 3
    by_search = [measurement.search_id for measurement in measurements]
    assert by_search == sorted(by_search, key=lambda one: one or 0)
    assert set(by_search) == {searches[0].id, searches[1].id}
    assert [trial.user_attrs["search"] for trial in trials] == 3 * [searches[0].id] + 2 * [searches[1].id]


def test_a_survey_is_stored_without_a_gpu(database: Path) -> None:
    run_search(database, trials=3, measured=False, device=RTX_5090, limits="sm_120")
    ((search,), measurements, _) = stored(database)
    assert (search.status, search.decided) == ("predicted", 3)
    assert (search.record.study, search.record.gpu, search.record.driver) == ("", None, None)
    assert search.record.arch == RTX_5090.arch
    assert search.record.options["limits"] == "sm_120"
    assert measurements == []


class Broken(FakeBench):
    def verify(self, problem: Problem, variant: Variant) -> VerificationRecord:
        raise RuntimeError("nobody has thought of this")


def test_one_that_ends_by_a_fault_says_which(database: Path) -> None:
    with pytest.raises(RuntimeError):
        run_search(database, bench=Broken(), trials=1)
    ((search,), _, _) = stored(database)
    assert (search.status, search.error) == ("failed", "nobody has thought of this")


class Killed(BaseException):
    """What no search may survive; here nothing is written after it either."""


def test_one_that_is_killed_says_how_far_it_came(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killing(Told):
        def update(self, status: Status) -> None:
            if status.counts.decided == 2:
                raise Killed

    def gone(*unused: object, **also_unused: object) -> None:
        raise DatabaseUnavailable("results.sqlite", "it has gone")

    monkeypatch.setattr(Store, "end_search", gone)
    with pytest.raises(Killed):
        run_search(database, trials=4, progress=Killing())
    ((search,), _, _) = stored(database)
    assert (search.status, search.ended_at, search.decided) == ("running", None, 2)
