"""What the schema itself forbids, whoever writes, and that the migrations make it."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config as AlembicConfig
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from bwdtune.db import connect, migrate
from bwdtune.db.models import SCHEMA, VERSION_TABLE, Base
from bwdtune.db.store import Store
from bwdtune.gen.families import PRESETS, MmaConfig


@pytest.fixture
def raw(examples: Any) -> Any:
    """A plain connection to the database of `examples`, as another program would have."""
    with contextlib.closing(sqlite3.connect(examples.store.url.database)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        yield connection


def insert(connection: sqlite3.Connection, table: str, **values: Any) -> None:
    marks = ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", list(values.values()))


class TestWinners:
    """A winner without a passing verification of the same variant and problem cannot be written, not even by hand."""

    @pytest.fixture
    def row(self, examples: Any) -> dict[str, Any]:
        measurement, verification = examples.contender()
        return {
            "problem_id": 1,
            "gpu_name": "NVIDIA H200",
            "gpu_capability": "9.0",
            "limits": "",
            "variant_id": 1,
            "measurement_id": measurement,
            "measurement_kind": "measured",
            "verification_id": verification,
            "verification_passed": 1,
            "partial": 0,
            "created_at": "2026-01-01 00:00:00.000000",
        }

    def test_a_valid_one_is_taken_once(self, examples: Any, raw: Any, row: dict[str, Any]) -> None:
        insert(raw, "winners", **row)
        raw.commit()
        assert examples.store.winner(examples.problem, examples.gpu).config == PRESETS["v2"]
        with pytest.raises(sqlite3.IntegrityError):
            insert(raw, "winners", **row)

    @pytest.mark.parametrize("column", ["verification_id", "measurement_id", "variant_id", "problem_id"])
    @pytest.mark.parametrize("value", [None, 17])
    def test_nothing_may_be_missing(self, raw: Any, row: dict[str, Any], column: str, value: int | None) -> None:
        with pytest.raises(sqlite3.IntegrityError):
            insert(raw, "winners", **{**row, column: value})

    def test_a_failed_verification_does_not_do(self, examples: Any, raw: Any, row: dict[str, Any]) -> None:
        failed = examples.verification(examples.variant(), passed=False)
        for passed in (0, 1, None, 2):
            with pytest.raises(sqlite3.IntegrityError):
                insert(raw, "winners", **{**row, "verification_id": failed, "verification_passed": passed})

    def test_a_verdict_on_something_else_does_not_do(self, examples: Any, raw: Any, row: dict[str, Any]) -> None:
        of_another_variant = examples.contender(PRESETS["v1"])[1]
        of_another_problem = examples.verification(examples.variant(), problem=replace(examples.problem, batch=1))
        for verification in (of_another_variant, of_another_problem):
            with pytest.raises(sqlite3.IntegrityError):
                insert(raw, "winners", **{**row, "verification_id": verification})

    def test_a_measurement_of_something_else_does_not_do(self, examples: Any, raw: Any, row: dict[str, Any]) -> None:
        other = replace(examples.problem, batch=1)
        for measurement in (
            examples.contender(PRESETS["v1"])[0],
            examples.contender(problem=other)[0],
            examples.contender(limits="sm_120")[0],
            examples.contender(environment=replace(examples.environment, gpu=replace(examples.gpu, name="other")))[0],
        ):
            with pytest.raises(sqlite3.IntegrityError):
                insert(raw, "winners", **{**row, "measurement_id": measurement})

    @pytest.mark.parametrize("kind", ["measured", "emulated"])
    def test_an_emulated_time_does_not_do(self, examples: Any, raw: Any, row: dict[str, Any], kind: str) -> None:
        emulated = examples.contender(kind="emulated", limits="sm_120", cycles=2e7)[0]
        with pytest.raises(sqlite3.IntegrityError):
            insert(raw, "winners", **{**row, "limits": "sm_120", "measurement_id": emulated, "measurement_kind": kind})

    def test_a_verdict_cannot_be_taken_back_behind_a_winner(self, raw: Any, row: dict[str, Any]) -> None:
        insert(raw, "winners", **row)
        for statement in (
            "UPDATE verifications SET passed = 0",
            "DELETE FROM verifications",
            "DELETE FROM measurements",
        ):
            with pytest.raises(sqlite3.IntegrityError):
                raw.execute(statement)


@pytest.mark.parametrize("column", ["median_ms", "low_ms", "high_ms"])
@pytest.mark.parametrize("time", [float("nan"), float("inf"), float("-inf"), 0.0, -1.0, None, "fast"])
def test_what_is_no_time_cannot_be_written(examples: Any, raw: Any, column: str, time: Any) -> None:
    examples.contender()
    with pytest.raises(sqlite3.IntegrityError):
        raw.execute(f"UPDATE measurements SET {column} = ?", [time])


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("measurements", "low_ms", 5.5),
        ("measurements", "high_ms", 4.5),
        ("measurements", "samples", 0),
        ("measurements", "kind", "guessed"),
        ("measurements", "kind", "emulated"),  # without cycles
        ("measurements", "cycles", float("inf")),
        ("measurements", "limits", None),
        ("measurements", "default_ms", 4.0),  # of which kernel?
        ("variants", "status", "maybe"),
        ("verifications", "max_error", None),
        ("verifications", "max_error", float("inf")),
        ("problems", "batch", 0),
    ],
)
def test_what_makes_no_sense_cannot_be_written(examples: Any, raw: Any, table: str, column: str, value: Any) -> None:
    examples.contender()
    with pytest.raises(sqlite3.IntegrityError):
        raw.execute(f"UPDATE {table} SET {column} = ?", [value])


V2 = PRESETS["v2"].to_dict()


class TestUnvalidated:
    """What somebody else has written is checked when it is read."""

    @pytest.mark.parametrize(
        "parameters",
        [
            "",
            "{",
            "[]",
            "null",
            '"v2"',
            json.dumps({**V2, "block_q": "64; asm"}),
            json.dumps({**V2, "block_q": 63}),
            json.dumps({**V2, "family": "../../etc"}),
            json.dumps({**V2, "unknown": 1}),
            json.dumps({name: value for name, value in V2.items() if name != "block_q"}),
            json.dumps(PRESETS["v1"].to_dict()),
            b"\xff\xfe",
        ],
    )
    def test_a_configuration(
        self, with_winner: Any, raw: Any, caplog: pytest.LogCaptureFixture, parameters: str | bytes
    ) -> None:
        raw.execute("UPDATE configurations SET parameters = ?", [parameters])
        raw.commit()
        store, problem = with_winner.store, with_winner.problem
        assert store.winner(problem, with_winner.gpu) is None
        assert "passed over" in caplog.text
        assert store.winners() == store.measurements() == []

        # A worse one is better than one that cannot be used, and finding the configuration once more mends its row.
        assert with_winner.propose(with_winner.contender(PRESETS["v1"], 50.0))
        assert store.winner(problem, with_winner.gpu).config == PRESETS["v1"]
        with_winner.propose(with_winner.contender(median_ms=5.0))
        assert store.winner(problem, with_winner.gpu).config == PRESETS["v2"]

    def test_a_configuration_of_before_a_parameter_was_added(self, examples: Any, raw: Any) -> None:
        sizes = {"block_q": 64, "block_kv": 64, "warps_per_row_group": 2}
        config = MmaConfig(**sizes)
        examples.propose(examples.contender(config))
        raw.execute("UPDATE configurations SET parameters = ?", [json.dumps({"family": "mma", **sizes})])
        raw.commit()
        assert examples.store.winner(examples.problem, examples.gpu).config == config
        assert examples.variant(config) == 1, "the new one is the same"

    @pytest.mark.parametrize(
        ("table", "column", "value"),
        [
            ("measurements", "median_ms", "fast"),
            ("measurements", "median_ms", float("inf")),
            ("measurements", "samples", -1),
            ("verifications", "errors", "{"),
            ("verifications", "max_error", None),
            ("variants", "status", "maybe"),
        ],
    )
    def test_a_row(
        self, with_winner: Any, raw: Any, caplog: pytest.LogCaptureFixture, table: str, column: str, value: Any
    ) -> None:
        raw.execute("PRAGMA ignore_check_constraints = ON")
        raw.execute(f"UPDATE {table} SET {column} = ?", [value])
        raw.commit()
        assert with_winner.store.winner(with_winner.problem, with_winner.gpu) is None
        assert "passed over" in caplog.text

    def test_only_the_bad_row_is_passed_over(
        self, with_winner: Any, raw: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.CRITICAL)
        raw.execute("UPDATE configurations SET parameters = '{'")
        raw.commit()
        other = replace(with_winner.problem, batch=1)
        with_winner.propose(with_winner.contender(PRESETS["v1"], problem=other), other)
        assert [winner.problem for winner in with_winner.store.winners()] == [other]

    def test_a_date(self, with_winner: Any, raw: Any) -> None:
        raw.execute("UPDATE winners SET created_at = 'yesterday'")
        raw.commit()
        with pytest.raises(connect.DatabaseError, match="yesterday"):
            with_winner.store.winner(with_winner.problem, with_winner.gpu)


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> sa.URL:
    path = tmp_path_factory.mktemp("migrated") / "bwdtune.sqlite"
    shutil.copy(Path(__file__).parent / "fixtures" / "schema_1.sqlite", path)
    with contextlib.closing(Store.open(path)) as store:
        store.optuna_storage()
        return store.url


class TestMigrations:
    """The migrations, and the models that they are to result in: a new database has the tables of the models."""

    def test_they_end_in_the_models(self, migrated: sa.URL) -> None:
        engine = connect.make_engine(migrated)
        with engine.connect() as connection:
            context = MigrationContext.configure(
                connection,
                opts={
                    "version_table": VERSION_TABLE,
                    "compare_type": True,
                    "include_name": lambda name, kind, parents: kind != "table" or name in Base.metadata.tables,
                },
            )
            assert compare_metadata(context, Base.metadata) == []
        engine.dispose()

    def test_they_end_in_the_models_constraints(self, migrated: sa.URL) -> None:
        """Which Alembic does not compare."""

        def constraints(engine: sa.Engine) -> dict[str, Any]:
            inspector = sa.inspect(engine)
            return {
                table: (
                    sorted((check["name"], check["sqltext"]) for check in inspector.get_check_constraints(table)),
                    sorted(
                        (key["name"], key["constrained_columns"], key["referred_columns"])
                        for key in inspector.get_foreign_keys(table)
                    ),
                    sorted(
                        (unique["name"], unique["column_names"]) for unique in inspector.get_unique_constraints(table)
                    ),
                    inspector.get_pk_constraint(table),
                )
                for table in Base.metadata.tables
            }

        of_models = sa.create_engine("sqlite://")
        Base.metadata.create_all(of_models)
        of_migrations = connect.make_engine(migrated)
        assert constraints(of_migrations) == constraints(of_models)
        of_migrations.dispose()

    def test_a_new_database_has_the_version_table_that_they_leave(self, migrated: sa.URL, tmp_path: Path) -> None:
        def version_table(path: str | None) -> tuple[list[tuple[str]], list[tuple[str]]]:
            with contextlib.closing(sqlite3.connect(str(path))) as connection:
                made = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (VERSION_TABLE,)).fetchall()
                return made, connection.execute(f"SELECT * FROM {VERSION_TABLE}").fetchall()

        with contextlib.closing(Store.open(tmp_path / "new.sqlite")) as store:
            assert version_table(store.url.database) == version_table(migrated.database)

    def test_the_newest_is_the_programs_schema(self) -> None:
        config = AlembicConfig()
        config.set_main_option("script_location", str(migrate.MIGRATIONS).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        script = ScriptDirectory.from_config(config)
        revisions = [revision.revision for revision in script.walk_revisions()]
        assert script.get_heads() == [SCHEMA]
        assert revisions == [f"{number:04}" for number in range(int(SCHEMA), 0, -1)]

    def test_there_is_a_file_of_each_schema(self) -> None:
        fixtures = Path(__file__).parent / "fixtures"
        assert {path.name for path in fixtures.glob("schema_*")} == {
            f"schema_{number}.sqlite" for number in range(1, int(SCHEMA) + 1)
        }
