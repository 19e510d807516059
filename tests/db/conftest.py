"""Results to store, and stores to put them into."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bwdtune.db.records import EMULATED, Environment, GpuKey, MeasurementRecord, VariantRecord, VerificationRecord
from bwdtune.db.store import Store
from bwdtune.gen.families import PRESETS, Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render

PROBLEM = Problem.parse("8_16_4096_128", causal=True)
H200 = Environment(GpuKey("NVIDIA H200", "9.0"), "sm_90a", "580.65.06", "13.0.88", "2.13.0")


@dataclass
class Examples:
    """A store with shorthands: every argument that a test does not care about has a default."""

    store: Store
    problem = PROBLEM
    environment = H200
    gpu = H200.gpu

    def variant(
        self, config: Config = PRESETS["v2"], problem: Problem = PROBLEM, emulate: str | None = None, **changes: Any
    ) -> int:
        record = VariantRecord(
            config=config,
            source_hash=render(problem, config, emulate=emulate).hash,
            template_hash="fedcba9876543210",
            arch="sm_90a",
            toolchain="13.0.88",
            registers=168,
            spill_bytes=0,
            stack_bytes=0,
            shared_memory_bytes=81_920,
            threads=256,
            compile_seconds=12.5,
            machine_code="0011223344556677",
        )
        return self.store.record_variant(problem, replace(record, **changes))

    def verification(self, variant: int, problem: Problem = PROBLEM, **changes: Any) -> int:
        record = VerificationRecord(True, 2e-3, {"normal": {"dq": 2e-3, "torch_dq": 1.5e-3}})
        return self.store.record_verification(problem, variant, replace(record, **changes))

    def measurement(self, variant: int, median_ms: float = 5.0, problem: Problem = PROBLEM, **changes: Any) -> int:
        record = MeasurementRecord(H200, "search-1", median_ms, median_ms * 0.99, median_ms * 1.01, 20, 1755.0)
        return self.store.record_measurement(problem, variant, replace(record, **changes))

    def contender(
        self, config: Config = PRESETS["v2"], median_ms: float = 5.0, problem: Problem = PROBLEM, **changes: Any
    ) -> tuple[int, int]:
        """The ids of the measurement and the verification of a variant that may win."""
        variant = self.variant(config, problem, changes["limits"] if changes.get("kind") == EMULATED else None)
        verification = self.verification(variant, problem)
        return self.measurement(variant, median_ms, problem, **changes), verification

    def propose(
        self,
        contender: tuple[int, int],
        problem: Problem = PROBLEM,
        environment: Environment = H200,
        limits: str | None = None,
        partial: bool = False,
    ) -> bool:
        return self.store.set_winner(problem, environment, limits, *contender, partial)


def _server(url: str) -> sa.URL:
    """The URL of an empty database: what is in there is dropped."""
    engine = sa.create_engine(url)
    metadata = sa.MetaData()
    metadata.reflect(engine)
    metadata.drop_all(engine)
    engine.dispose()
    return sa.make_url(url)


@pytest.fixture(scope="session")
def empty_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new database, to be copied: making one takes a while."""
    path = tmp_path_factory.mktemp("empty") / "bwdtune.sqlite"
    Store.open(path).close()
    return path


@pytest.fixture(params=["sqlite", "server"])
def any_store(request: pytest.FixtureRequest, database: Path, empty_file: Path) -> Iterator[Store]:
    """The contract's backends: an SQLite file, and the server that BWDTUNE_TEST_SERVER names."""
    if request.param == "server":
        url = os.environ.get("BWDTUNE_TEST_SERVER")
        if not url:
            pytest.skip("set BWDTUNE_TEST_SERVER to the URL of a database that may be emptied")
        store = Store.open(_server(url).render_as_string(hide_password=False))
    else:
        shutil.copy(empty_file, database)
        store = Store.open(database)
    yield store
    store.close()


@pytest.fixture
def any_examples(any_store: Store) -> Examples:
    return Examples(any_store)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A path of a database that does not exist yet."""
    return tmp_path / "bwdtune.sqlite"


@pytest.fixture
def examples(database: Path, empty_file: Path) -> Iterator[Examples]:
    shutil.copy(empty_file, database)
    store = Store.open(database)
    yield Examples(store)
    store.close()


@pytest.fixture
def with_winner(examples: Examples) -> Examples:
    examples.propose(examples.contender())
    return examples


@pytest.fixture
def as_ordinary_user() -> Callable[[Callable[[], None]], None]:
    """Runs a function in a child process for which permissions count: root's do not."""

    def run(test: Callable[[], None]) -> None:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if os.geteuid() == 0:
                    os.setgroups([])
                    os.setgid(65534)
                    os.setuid(65534)
                test()
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "see the child's traceback"

    return run
