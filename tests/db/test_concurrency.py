"""Several processes and threads at one database: nothing is lost, nobody is turned away, and the lookup never waits."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest

from bwdtune.db import connect, errors
from bwdtune.db.store import Store
from bwdtune.gen.families import PRESETS

# What the processes of a test share: a problem and a way to record a configuration with a time.
COMMON = """
import sys
from dataclasses import replace
from bwdtune.db.records import *
from bwdtune.db.store import Store
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render

problem = Problem.parse("8_16_4096_128", causal=True)
environment = Environment(GpuKey("NVIDIA H200", "9.0"), "sm_90a", "580.65.06", "13.0.88", "2.13.0")
store = Store.open(sys.argv[1])

def contender(config, time_ms):
    source = render(problem, config).hash
    variant = store.record_variant(problem, VariantRecord(config, source, "templates", "sm_90a", "13.0.88"))
    verification = store.record_verification(problem, variant, VerificationRecord(True, 2e-3))
    record = MeasurementRecord(environment, "search-1", time_ms, time_ms, time_ms, 20)
    return store.record_measurement(problem, variant, record), verification
"""


def start(code: str, *arguments: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMON + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors


@contextlib.contextmanager
def lock_of_another_process(path: str, kind: str = "IMMEDIATE", at_most_s: float = 600.0) -> Iterator[None]:
    """Another process has a transaction open, until the end of the body or of the time."""
    code = (
        "import select, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None);"
        "c.execute('BEGIN ' + sys.argv[2]); c.execute('UPDATE problems SET batch = batch');"
        "print('locked', flush=True); select.select([sys.stdin], [], [], float(sys.argv[3])); c.execute('COMMIT')"
    )
    arguments = [sys.executable, "-c", code, path, kind, str(at_most_s)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield
        finally:
            process.communicate()
    assert process.returncode == 0


@pytest.mark.slow
def test_processes_that_make_and_fill_a_database_at_once(database: Path) -> None:
    """The winner is known by its newest time, everything else is stored too, and Optuna's tables are made once.

    Each process measures configurations of its own, each of them several times: two that measure the same one at once
    may propose its times in another order than they stored them in.
    """
    code = """
import optuna
number = int(sys.argv[2])
study = optuna.create_study(storage=store.optuna_storage(), study_name="a study", load_if_exists=True)
for step in range(8):
    config = replace(PRESETS["v1"], stages=1 + step % 3, swizzle=(128, 64, 32, 0)[number])
    time_ms = 10 + (number * 7 + step * 5) % 23 + number / 100
    study.tell(study.ask(), time_ms)
    store.set_winner(problem, environment, None, *contender(config, time_ms))
"""
    finish([start(code, database, number) for number in range(4)])
    store = Store.open(database)
    (winner,) = store.winners()
    measurements = store.measurements()
    assert len(measurements) == 4 * 8
    newest = {}
    for one in sorted(measurements, key=lambda one: one.id):
        newest[one.variant.config] = one.record.median_ms
    assert winner.median_ms == newest[winner.config]
    study = optuna.load_study(storage=store.optuna_storage(), study_name="a study")
    assert len(study.trials) == 4 * 8
    with contextlib.closing(sqlite3.connect(database)) as connection:
        for table in ("bwdtune_schema_version", "alembic_version", "problems"):
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM configurations").fetchone() == (12,)


@pytest.mark.slow
def test_processes_that_propose_at_once_agree_on_the_best(database: Path) -> None:
    code = """
number = int(sys.argv[2])
for step in range(8):
    swizzle = (128, 64, 32, 0)[number]
    config = replace(PRESETS["v1"], dq_vector=(1, 2, 4)[step % 3], stages=1 + step // 3, swizzle=swizzle)
    store.set_winner(problem, environment, None, *contender(config, 10 + (step * 5 + number) % 8 + number / 10))
"""
    Store.open(database).close()
    finish([start(code, database, number) for number in range(4)])
    store = Store.open(database)
    (winner,) = store.winners()
    times = [one.record.median_ms for one in store.measurements()]
    assert winner.median_ms == min(times) == 10.0
    assert len(times) == 4 * 8


def test_a_write_waits_for_another_process(with_winner: Any) -> None:
    with lock_of_another_process(with_winner.store.url.database, at_most_s=6.0):  # SQLite's default is to wait for 5 s
        with_winner.propose(with_winner.contender(PRESETS["v1"], 1.0))
    assert with_winner.store.winners()[0].median_ms == 1.0


def test_opening_for_search_waits_for_another_process(with_winner: Any) -> None:
    with lock_of_another_process(with_winner.store.url.database, "EXCLUSIVE", at_most_s=1.0):
        assert len(Store.open(with_winner.store.url.database).winners()) == 1


@pytest.mark.parametrize("kind", ["IMMEDIATE", "EXCLUSIVE"])
def test_the_lookup_goes_on_while_another_process_writes(with_winner: Any, kind: str) -> None:
    path = with_winner.store.url.database
    with lock_of_another_process(path, kind):
        for store in (with_winner.store, Store.open(path, read_only=True)):
            assert store.winner(with_winner.problem, with_winner.gpu) is not None


class TestLockedForTooLong:
    """Another process never lets go."""

    @pytest.fixture
    def impatient(self, with_winner: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        with_winner.store.close()
        monkeypatch.setattr(connect, "BUSY_TIMEOUT_S", 0.05)
        return with_winner

    def test_a_write_says_so(self, impatient: Any) -> None:
        before = impatient.store.measurements()
        message = r"^[^\n]*bwdtune\.sqlite is locked by another process[^\n]*$"
        with (
            lock_of_another_process(impatient.store.url.database),
            pytest.raises(errors.DatabaseLocked, match=message),
        ):
            impatient.contender()
        assert impatient.store.measurements() == before

    @pytest.mark.parametrize("read_only", [True, False])
    def test_the_lookup_goes_on_without(
        self, impatient: Any, caplog: pytest.LogCaptureFixture, read_only: bool
    ) -> None:
        """In WAL mode nobody can keep a reader out; with a rollback journal an exclusive lock does."""
        path = impatient.store.url.database
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
        store = Store(impatient.store.url, read_only)
        with lock_of_another_process(path, "EXCLUSIVE"):
            assert store.winner(impatient.problem, impatient.gpu) is None
            with pytest.raises(errors.DatabaseLocked):
                Store.open(path, read_only=read_only)
        assert "locked" in caplog.text
        assert store.winner(impatient.problem, impatient.gpu) is not None


def test_many_threads_look_up(with_winner: Any) -> None:
    barrier = threading.Barrier(16)

    def look(_: int) -> list[Any]:
        barrier.wait()
        return [with_winner.store.winner(with_winner.problem, with_winner.gpu) for _ in range(5)]

    for read_only in (False, True):
        with_winner.store = Store(with_winner.store.url, read_only)
        with ThreadPoolExecutor(16) as pool:
            found = [winner for winners in pool.map(look, range(16)) for winner in winners]
        assert len(found) == 16 * 5
        assert set(map(repr, found)) == {repr(with_winner.store.winners()[0])}


def test_many_threads_write(examples: Any) -> None:
    def write(number: int) -> bool:
        return examples.propose(examples.contender(PRESETS["v1"], 10.0 + number))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(16)))
    assert len(examples.store.measurements()) == 16
    assert len(examples.store.winners()) == 1


def test_closing_does_not_wait_for_who_writes(examples: Any) -> None:
    path = Path(examples.store.url.database)
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert examples.store.winners() == []
        start = time.monotonic()
        examples.store.close()
        assert time.monotonic() - start < connect.BUSY_TIMEOUT_S / 2


class TestFork:
    """A store that was used in the parent is used in its children."""

    @pytest.fixture(params=[False, True])
    def store(self, request: pytest.FixtureRequest, with_winner: Any) -> Store:
        store = Store(with_winner.store.url, request.param)
        assert len(store.winners()) == 1
        return store

    def test_children_look_up(self, store: Store, with_winner: Any) -> None:
        with ThreadPoolExecutor(4) as pool:  # so that there are connections of several threads
            list(pool.map(lambda _: store.winners(), range(8)))
        children = []
        for _ in range(8):
            child = os.fork()
            if child == 0:
                status = 1
                with contextlib.suppress(BaseException):
                    status = 0 if store.winner(with_winner.problem, with_winner.gpu) else 2
                os._exit(status)
            children.append(child)
            assert store.winner(with_winner.problem, with_winner.gpu)
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 8
        assert len(store.winners()) == 1

    def test_a_child_has_connections_of_its_own(self, store: Store) -> None:
        def connections() -> int:
            places = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
            return sum(place == os.path.realpath(str(store.url.database)) for place in places)

        child = os.fork()
        if child == 0:
            status = 1
            with contextlib.suppress(BaseException):
                inherited = connections()
                status = 0 if inherited and store.winners() and connections() > inherited else 2
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def test_a_child_that_ends_does_not_disturb_the_parent(self, store: Store, with_winner: Any) -> None:
        """It lets go of what it inherited: connections in the middle of the parent's transaction."""
        path = Path(with_winner.store.url.database)
        with with_winner.store._engine().connect() as connection:
            connection.exec_driver_sql("UPDATE problems SET batch = 99")
            context = multiprocessing.get_context("fork")
            child = context.Process(target=lambda: (store.winners(), store.close()))
            child.start()
            child.join()
            assert child.exitcode == 0
            with (
                contextlib.closing(sqlite3.connect(path, timeout=0.05)) as other,
                pytest.raises(sqlite3.OperationalError),
            ):
                other.execute("BEGIN IMMEDIATE")  # the parent still holds its lock
            connection.commit()
        assert store.winners()[0].problem.batch == 99

    def test_a_spawned_child_gets_it_by_pickle(self, store: Store) -> None:
        code = (
            "import pickle, sys; store = pickle.loads(sys.stdin.buffer.read());"
            "print(len(store.winners()), store.read_only)"
        )
        done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(store), capture_output=True, check=True)
        assert done.stdout.decode().split() == ["1", str(store.read_only)]


def test_what_was_stored_survives_a_kill(database: Path) -> None:
    code = """
import os
for step, config in enumerate(PRESETS.values()):
    store.set_winner(problem, environment, None, *contender(config, 100.0 - step))
os.kill(os.getpid(), 9)
"""
    process = start(code, database)
    process.communicate()
    assert process.returncode == -9
    store = Store.open(database)
    assert len(store.measurements()) == len(PRESETS)
    assert store.winners()[0].median_ms == 100.0 - (len(PRESETS) - 1)


def test_importing_loads_no_database_library() -> None:
    code = (
        "import sys, bwdtune.db, bwdtune.db.records, bwdtune.db.errors\n"
        "print([name for name in ('sqlalchemy', 'alembic', 'optuna', 'sqlite3') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_opening_what_is_there_loads_neither_alembic_nor_optuna(with_winner: Any) -> None:
    code = (
        "import sys\nfrom bwdtune.db.store import Store\n"
        "for read_only in (True, False): assert len(Store.open(sys.argv[1], read_only=read_only).winners()) == 1\n"
        "print([name for name in ('alembic', 'optuna') if name in sys.modules])"
    )
    path = with_winner.store.url.database
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_copy_of_the_file_alone_has_what_a_closed_store_wrote(database: Path, tmp_path: Path) -> None:
    """Also where another search has it open: none of two that end together is the last one for SQLite."""
    with contextlib.closing(Store.open(database)) as other:
        assert other.winners() == []  # a connection that stays open
        processes = [
            start(
                "store.set_winner(problem, environment, None, *contender(PRESETS['v1'], 4.0)); store.close()", database
            )
        ]
        finish(processes)
        copy = tmp_path / "copy.sqlite"
        copy.write_bytes(database.read_bytes())
        with contextlib.closing(Store.open(copy, read_only=True)) as found:
            assert [winner.median_ms for winner in found.winners()] == [4.0]
        assert not database.with_name(f"{database.name}-wal").stat().st_size
