"""Opening: exactly the file that was named, and no harm to one that is not ours, not whole, or not for us to write."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bwdtune.db import connect, errors, migrate, models
from bwdtune.db.errors import DatabaseError
from bwdtune.db.store import Store
from bwdtune.gen.errors import BwdtuneError
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem

FIXTURES = Path(__file__).parent / "fixtures"
SCHEMA = models.SCHEMA  # of the program as it is: tests pretend that it is newer
NEWEST = FIXTURES / f"schema_{int(SCHEMA)}.sqlite"


def contents(directory: Path) -> dict[str, str]:
    """All files below a directory, with a hash of what is in them."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def execute(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def refused(expected: type[DatabaseError], database: Path | str, *, read_only: bool = False) -> str:
    """The message with which a database is refused: one line that names it."""
    with pytest.raises(DatabaseError) as caught:
        Store.open(database, read_only=read_only)
    assert type(caught.value) is expected
    message = str(caught.value)
    assert "\n" not in message
    assert str(database) in message
    return message


class TestNames:
    """Exactly the file that was named is used."""

    @pytest.mark.parametrize(
        "name",
        [
            "plain.sqlite",
            "with space.sqlite",
            "a?b.sqlite",
            "a%20b.sqlite",
            "a#b.sqlite",
            "100%.sqlite",
            "%(here)s.sqlite",
            "{braces}.sqlite",
            "{SCHEMA_VERSION}.sqlite",
            "über-π-数据.sqlite",
            "a&mode=ro.sqlite",
            "a;b:c@d.sqlite",
            "quote'\".sqlite",
            "back\\slash.sqlite",
            "+plus=.sqlite",
            "no-extension",
            "~tilde",
            " leading",
            "new/directories/below.sqlite",
            "sp ace/per%cent/que?stion/ha#sh.sqlite",
            os.fsdecode(b"not-utf8-\xff.sqlite"),
        ],
    )
    def test_a_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.chdir(tmp_path)
        Store.open(tmp_path / name).close()
        store = Store.open(name)
        monkeypatch.chdir("/")  # after which the relative one means the same
        assert store.winners() == []
        assert pickle.loads(pickle.dumps(store)).winners() == []
        study = optuna.create_study(storage=store.optuna_storage())
        assert study.trials == []
        files = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
        assert {path for path in files if not str(path).endswith(("-wal", "-shm"))} == {Path(name)}
        assert Store.open(tmp_path / name, read_only=True).winners() == []

    @given(
        name=st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=40)
    )
    @settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_path(self, empty_file: Path, name: str) -> None:
        if name in (".", "..") or len(os.fsencode(name)) > 200:
            return
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, name)
            shutil.copy(empty_file, path)
            with contextlib.closing(Store.open(path)) as store:
                assert store.winners() == []
            assert list(contents(Path(directory))) == [name]

    def test_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        Store.open("~/below/results.sqlite").close()
        assert list(contents(tmp_path)) == ["below/results.sqlite"]

    def test_the_variable(self, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BWDTUNE_DB", str(database))
        assert Store.open().url.database == str(database)
        assert database.exists()

    @pytest.mark.parametrize("scheme", ["sqlite", "sqlite+pysqlite"])
    def test_a_url(self, database: Path, scheme: str) -> None:
        assert Store.open(f"{scheme}:///{database}").url.database == str(database)
        assert database.exists()

    def test_a_symbolic_link(self, database: Path) -> None:
        target = database.with_name("target.sqlite")
        database.symlink_to(target)
        Store.open(database).close()
        assert database.is_symlink()
        assert target.stat().st_size

    @pytest.mark.parametrize(
        "name",
        [
            "",
            ":memory:",
            "sqlite://",
            "sqlite:///:memory:",
            "sqlite:///x.db?mode=ro",
            "sqlite+aiosqlite:///x.db",
            "nosuchdialect://host/x",
            "postgresql+nosuchdriver://host/x",
            "postgresql://host:port/x",
            "x\0y",
        ],
    )
    def test_what_names_no_database(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(errors.BadDatabaseName, match=r"^[^\n]+$") as caught:
            Store.open(name)
        assert caught.value.exit_status == 2
        assert contents(tmp_path) == {}

    def test_a_missing_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "psycopg2", None)
        assert "install" in refused(errors.DatabaseUnavailable, "postgresql+psycopg2://host/x")

    @pytest.mark.skipif(importlib.util.find_spec("psycopg") is None, reason="needs psycopg")
    def test_a_server_that_does_not_answer(self) -> None:
        with pytest.raises(errors.DatabaseUnavailable, match=r"^[^\n]+$") as caught:
            Store.open("postgresql+psycopg://user:secret@127.0.0.1:1/x")
        assert "secret" not in str(caught.value)


def _text(path: Path) -> None:
    path.write_text("these are no results\n")


def _one_byte(path: Path) -> None:
    path.write_text("x")


def _junk(path: Path) -> None:
    path.write_bytes(hashlib.sha256(b"junk").digest() * 1000)


def _only_a_header(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0")


def _directory(path: Path) -> None:
    path.mkdir()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _truncated(path: Path) -> None:
    shutil.copy(NEWEST, path)
    os.truncate(path, path.stat().st_size // 2)


def _cut_to_one_page(path: Path) -> None:
    shutil.copy(NEWEST, path)
    os.truncate(path, 4096)


def _damaged_header(path: Path) -> None:
    data = bytearray(NEWEST.read_bytes())
    data[16:100] = b"\xaa" * 84
    path.write_bytes(data)


def _damaged_first_page(path: Path) -> None:
    data = bytearray(NEWEST.read_bytes())
    data[100:4096] = b"\xaa" * 3996
    path.write_bytes(data)


def _damaged_pages(path: Path) -> None:
    """Of a table in the middle, so that the schema still can be read."""
    data = bytearray(NEWEST.read_bytes())
    with contextlib.closing(sqlite3.connect(NEWEST)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'verifications'").fetchone()
    data[(page - 1) * 4096 : page * 4096] = b"\xaa" * 4096
    path.write_bytes(data)


def _a_column_less(path: Path) -> None:
    shutil.copy(NEWEST, path)
    execute(path, "ALTER TABLE measurements DROP COLUMN clock_mhz")


def _a_table_less(path: Path) -> None:
    shutil.copy(NEWEST, path)
    execute(path, "DROP TABLE winners")


def _no_version(path: Path) -> None:
    shutil.copy(NEWEST, path)
    execute(path, "DELETE FROM bwdtune_schema_version")


def _two_versions(path: Path) -> None:
    shutil.copy(NEWEST, path)
    execute(path, "INSERT INTO bwdtune_schema_version VALUES ('0000')")


def _mlflow(path: Path) -> None:
    execute(
        path,
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)",
        "INSERT INTO alembic_version VALUES ('0584bdc529eb')",
        "CREATE TABLE experiments (experiment_id INTEGER)",
    )


def _only_alembic(path: Path) -> None:
    execute(path, "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")


def _foreign_in_wal_mode(path: Path) -> None:
    execute(path, "PRAGMA journal_mode = WAL", "CREATE TABLE notes (text)")


def _only_a_view(path: Path) -> None:
    execute(path, "CREATE VIEW answer AS SELECT 42")


def _tables_of_our_names(path: Path) -> None:
    execute(path, "CREATE TABLE winners (name)", "CREATE TABLE problems (name)")


def _a_view_of_our_name(path: Path) -> None:
    """What somebody may hand over who wants a lookup to compute something."""
    shutil.copy(NEWEST, path)
    execute(path, "ALTER TABLE searches RENAME TO others", "CREATE VIEW searches AS SELECT * FROM others")


def _optuna_alone(path: Path) -> None:
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    optuna.create_study(storage=storage)
    storage.remove_session()
    storage.engine.dispose()


def _newer(path: Path) -> None:
    shutil.copy(NEWEST, path)
    execute(path, "UPDATE bwdtune_schema_version SET version_num = '0417'", "DROP TABLE winners")


BROKEN: dict[Callable[[Path], None], type[DatabaseError]] = {
    _text: errors.NotADatabase,
    _one_byte: errors.NotADatabase,
    _junk: errors.NotADatabase,
    _only_a_header: errors.NotADatabase,
    _directory: errors.NotADatabase,
    _fifo: errors.NotADatabase,
    _truncated: errors.CorruptDatabase,
    _cut_to_one_page: errors.CorruptDatabase,
    _damaged_header: errors.NotADatabase,
    _damaged_first_page: errors.CorruptDatabase,
    _a_column_less: errors.CorruptDatabase,
    _a_table_less: errors.CorruptDatabase,
    _no_version: errors.CorruptDatabase,
    _two_versions: errors.CorruptDatabase,
    _mlflow: errors.ForeignDatabase,
    _only_alembic: errors.ForeignDatabase,
    _foreign_in_wal_mode: errors.ForeignDatabase,
    _only_a_view: errors.ForeignDatabase,
    _tables_of_our_names: errors.ForeignDatabase,
    _a_view_of_our_name: errors.ForeignDatabase,
    _optuna_alone: errors.ForeignDatabase,
    _newer: errors.NewerDatabase,
}


class TestBroken:
    """What cannot be used is refused in one line, and not changed."""

    @pytest.mark.parametrize("breaking", BROKEN, ids=lambda function: function.__name__.strip("_"))
    @pytest.mark.parametrize("read_only", [False, True])
    def test_it_is_left_as_it_was(self, database: Path, breaking: Callable[[Path], None], read_only: bool) -> None:
        breaking(database)
        before = contents(database.parent)
        refused(BROKEN[breaking], database, read_only=read_only)
        after = contents(database.parent)
        if read_only:  # who only reads a file in WAL mode leaves an empty log beside it
            after = {name: content for name, content in after.items() if not name.endswith(("-wal", "-shm"))}
        assert after == before

    def test_damage_that_only_a_full_look_finds(self, database: Path) -> None:
        _damaged_pages(database)
        before = contents(database.parent)
        refused(errors.CorruptDatabase, database)
        store = Store.open(database, read_only=True)
        with pytest.raises(errors.CorruptDatabase):
            store.winners()
        assert contents(database.parent) == before

    @given(data=st.data())
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_damage(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        """It opens, or is refused, and reading it raises no error but ours."""
        whole = NEWEST.read_bytes()
        start = data.draw(st.integers(0, len(whole) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=64))
        keep = data.draw(st.sampled_from([len(whole), start + len(patch)]))
        path = tmp_path_factory.mktemp("damaged") / "x.sqlite"
        path.write_bytes((whole[:start] + patch + whole[start + len(patch) :])[:keep])
        for read_only in (True, False):
            with contextlib.suppress(BwdtuneError), contextlib.closing(Store.open(path, read_only=read_only)) as store:
                store.measurements()
                for winner in store.winners():
                    store.winner(winner.problem, winner.environment.gpu)

    def test_the_versions_are_named(self, database: Path) -> None:
        _newer(database)
        message = refused(errors.NewerDatabase, database)
        assert "0417" in message
        assert models.SCHEMA in message

    def test_the_tables_of_another_program_are_named(self, database: Path) -> None:
        _mlflow(database)
        assert "experiments" in refused(errors.ForeignDatabase, database)

    def test_a_log_that_another_program_left_is_not_touched(self, database: Path) -> None:
        code = (
            "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('PRAGMA journal_mode = WAL');"
            "c.execute('CREATE TABLE notes (text)'); c.commit(); os._exit(0)"
        )
        subprocess.run([sys.executable, "-c", code, database], check=True)
        before = contents(database.parent)
        refused(errors.ForeignDatabase, database)
        after = contents(database.parent)
        assert {name: after[name] for name in (database.name, f"{database.name}-wal")} == {
            name: before[name] for name in (database.name, f"{database.name}-wal")
        }

    @pytest.mark.parametrize("cause", [cause for cause in vars(errors).values() if isinstance(cause, type)])
    def test_an_error_goes_through_pickle(self, cause: type[BwdtuneError]) -> None:
        error = cause("/a {path}", "what\nfor") if issubclass(cause, DatabaseError) else cause("what for")
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (cause, str(error))
        assert "what for" in str(copy)


class TestNew:
    """Where nothing is yet."""

    def test_an_empty_file_is_a_new_database(self, database: Path) -> None:
        database.touch()
        assert Store.open(database).winners() == []

    def test_a_database_without_tables_is_a_new_one(self, database: Path) -> None:
        execute(database, "PRAGMA user_version = 7")
        assert Store.open(database).winners() == []

    def test_reading_makes_nothing(self, tmp_path: Path) -> None:
        refused(errors.NoDatabase, tmp_path / "none" / "x.sqlite", read_only=True)
        (tmp_path / "empty.sqlite").touch()
        refused(errors.NoDatabase, tmp_path / "empty.sqlite", read_only=True)
        assert list(tmp_path.iterdir()) == [tmp_path / "empty.sqlite"]

    def test_a_file_where_a_directory_must_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("text")
        for name in ("file/x.sqlite", "file/below/x.sqlite"):
            refused(errors.DatabaseUnavailable, tmp_path / name)
            with pytest.raises(DatabaseError):
                Store.open(tmp_path / name, read_only=True)

    def test_a_name_that_is_too_long(self, tmp_path: Path) -> None:
        refused(errors.DatabaseUnavailable, tmp_path / ("x" * 300))

    def test_it_is_in_wal_mode(self, examples: Any) -> None:
        with contextlib.closing(sqlite3.connect(examples.store.url.database)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)

    @pytest.mark.parametrize("when", ["new", "old"])
    def test_a_network_file_system_has_no_wal(
        self, database: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
    ) -> None:
        monkeypatch.setattr(connect, "network_file_system", lambda _: "nfs4")
        if when == "old":
            shutil.copy(NEWEST, database)
        with contextlib.closing(Store.open(database)) as store:
            assert "network file system (nfs4)" in caplog.text
            assert len(store.winners()) == (0 if when == "new" else 3)
        with contextlib.closing(sqlite3.connect(database)) as connection:
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)

    def test_wal_that_is_refused_is_no_failure(self, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Refusing(sqlite3.Connection):
            def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
                if sql == "PRAGMA journal_mode = WAL":
                    raise sqlite3.OperationalError("disk I/O error")
                return super().execute(sql, *parameters)

        plain = sqlite3.connect
        monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: plain(*args, **kwargs, factory=Refusing))
        with contextlib.closing(Store.open(database)) as store:
            assert store.winners() == []

    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/home/me/x.sqlite", "nfs4"),
            ("/home/local disk/x.sqlite", None),
            ("/mnt/share/deep/x.sqlite", "cifs"),
            ("/mnt/sharek/x.sqlite", None),
            ("/remote/x.sqlite", "fuse.sshfs"),
            ("/overlay/x.sqlite", None),
            ("/x.sqlite", None),
        ],
    )
    def test_which_file_systems_are_on_the_network(self, tmp_path: Path, path: str, kind: str | None) -> None:
        mounts = tmp_path / "mounts"
        mounts.write_text(
            "/dev/sda / ext4 rw 0 0\n"
            "server:/home /home nfs4 rw 0 0\n"
            "/dev/sdb /home/local\\040disk ext4 rw 0 0\n"
            "//server/share /mnt/share cifs rw 0 0\n"
            "me@server: /remote fuse.sshfs rw 0 0\n"
            "overlay /overlay fuse.fuse-overlayfs rw 0 0\n"
        )
        assert connect.network_file_system(Path(path), mounts) == kind

    def test_a_system_that_does_not_tell_its_mounts(self, tmp_path: Path) -> None:
        assert connect.network_file_system(tmp_path / "x.sqlite", tmp_path / "none") is None


class TestReadOnly:
    """Files and directories that cannot be written."""

    @pytest.fixture
    def public(self, as_ordinary_user: Any) -> Iterator[Path]:
        """A directory that the ordinary user can reach (pytest's own are private), with a database."""
        directory = Path(tempfile.mkdtemp())
        directory.chmod(0o755)
        shutil.copy(NEWEST, directory / "x.sqlite")
        Store.open(directory / "x.sqlite").close()
        (directory / "x.sqlite").chmod(0o444)
        yield directory
        directory.chmod(0o755)
        shutil.rmtree(directory)

    @pytest.mark.parametrize("journal", ["WAL", "DELETE"])
    @pytest.mark.parametrize("directory_mode", [0o555, 0o777])
    def test_they_can_be_read(self, public: Path, as_ordinary_user: Any, journal: str, directory_mode: int) -> None:
        path = public / "x.sqlite"
        path.chmod(0o644)
        execute(path, f"PRAGMA journal_mode = {journal}")
        path.chmod(0o444)
        public.chmod(directory_mode)

        def look() -> None:
            store = Store.open(path, read_only=True)
            (first, *_) = store.winners()
            assert store.winner(first.problem, first.environment.gpu) == first
            assert len(store.measurements(first.problem)) == 3

        as_ordinary_user(look)

    def test_another_users_can_be_read_while_it_is_written(self, public: Path, as_ordinary_user: Any) -> None:
        public.chmod(0o755)
        (public / "x.sqlite").chmod(0o644)
        with contextlib.closing(Store.open(public / "x.sqlite")) as writer:
            (square,) = (winner.problem for winner in writer.winners() if winner.problem.mask == "causal")
            failed = replace(writer.show(square).failures[0], error="it failed again")
            writer.record_variant(square, failed)
            assert (public / "x.sqlite-wal").stat().st_size

            def look() -> None:
                (seen,) = Store.open(public / "x.sqlite", read_only=True).show(square).failures
                assert seen == failed

            as_ordinary_user(look)

    @pytest.mark.parametrize(("file_mode", "directory_mode"), [(0o444, 0o777), (0o666, 0o555), (0o444, 0o555)])
    def test_they_are_not_opened_for_writing(
        self, public: Path, as_ordinary_user: Any, file_mode: int, directory_mode: int
    ) -> None:
        (public / "x.sqlite").chmod(file_mode)
        public.chmod(directory_mode)
        before = contents(public)
        as_ordinary_user(lambda: refused(errors.ReadOnlyDatabase, public / "x.sqlite") and None)
        assert contents(public) == before

    def test_a_new_one_needs_a_directory_that_can_be_written(self, public: Path, as_ordinary_user: Any) -> None:
        public.chmod(0o555)
        as_ordinary_user(lambda: refused(errors.ReadOnlyDatabase, public / "new.sqlite") and None)
        as_ordinary_user(lambda: refused(errors.ReadOnlyDatabase, public / "below" / "new.sqlite") and None)

    def test_a_file_that_cannot_be_read(self, public: Path, as_ordinary_user: Any) -> None:
        (public / "x.sqlite").chmod(0)
        as_ordinary_user(lambda: refused(errors.DatabaseUnavailable, public / "x.sqlite", read_only=True) and None)
        public.chmod(0)
        as_ordinary_user(lambda: refused(errors.DatabaseUnavailable, public / "x.sqlite", read_only=True) and None)

    def test_a_store_for_reading_does_not_write(self, with_winner: Any) -> None:
        reader = type(with_winner)(Store.open(with_winner.store.url.database, read_only=True))
        with pytest.raises(errors.ReadOnlyDatabase):
            reader.variant()
        with pytest.raises(errors.ReadOnlyDatabase):
            reader.store.optuna_storage()
        assert reader.store.winners() == with_winner.store.winners()

    def test_a_store_for_reading_sees_what_comes_later(self, examples: Any) -> None:
        reader = Store.open(examples.store.url.database, read_only=True)
        assert reader.winners() == []
        examples.propose(examples.contender())
        assert len(reader.winners()) == 1


def killed_while_writing(path: Path, journal: str) -> None:
    """A writer that dies with half of a big transaction in the file."""
    code = f"""
import os, sqlite3, sys
c = sqlite3.connect(sys.argv[1], isolation_level=None)
c.execute("PRAGMA journal_mode = {journal}")
c.execute("PRAGMA cache_size = 1")
c.execute("BEGIN IMMEDIATE")
c.execute("UPDATE variants SET error = ?", ["x" * 100_000])
c.execute("DELETE FROM winners")
c.execute("UPDATE problems SET batch = batch + 1")
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == -9


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
@pytest.mark.parametrize("read_only", [True, False])
def test_what_a_killed_writer_left_is_put_right(database: Path, journal: str, read_only: bool) -> None:
    shutil.copy(NEWEST, database)
    with contextlib.closing(Store.open(database)) as store:
        before = store.winners()
    killed_while_writing(database, journal)
    assert Store.open(database, read_only=read_only).winners() == before


class TestUpgrade:
    """An older schema, by way of a schema that is newer than this version's."""

    @pytest.fixture
    def next_version(self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A program whose schema is one further; returns the file of its newest revision."""
        directory = tmp_path_factory.mktemp("next") / "100% migrations"
        shutil.copytree(migrate.MIGRATIONS, directory)
        following = f"{int(models.SCHEMA) + 1:04}"
        revision = directory / "versions" / f"{following}_notes.py"
        revision.write_text(
            "import sqlalchemy as sa\n"
            "from alembic import op\n"
            f"revision, down_revision = {following!r}, {models.SCHEMA!r}\n"
            "def upgrade():\n"
            "    op.add_column('variants', sa.Column('note', sa.Text))\n"
            "    with op.batch_alter_table('problems') as table:\n"
            "        table.alter_column('dtype', existing_type=sa.String(16), type_=sa.String(20))\n"
            "        table.add_column(sa.Column('note', sa.Text))\n"
        )
        monkeypatch.setattr(migrate, "MIGRATIONS", directory)
        monkeypatch.setattr(models, "SCHEMA", following)
        return revision

    def test_it_keeps_everything_and_a_copy(self, with_winner: Any, next_version: Path) -> None:
        old, path = models.SCHEMA, Path(with_winner.store.url.database)
        before = with_winner.store.show(with_winner.problem)
        with contextlib.closing(Store.open(path)) as store:
            assert store.show(with_winner.problem) == before
        with contextlib.closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT version_num FROM bwdtune_schema_version").fetchall() == [(old,)]
            assert connection.execute("SELECT DISTINCT note FROM problems").fetchall() == [(None,)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        (copy,) = path.parent.glob("*.backup")
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            versions = connection.execute("SELECT version_num FROM bwdtune_schema_version").fetchall()
            assert versions == [(f"{int(old) - 1:04}",)]
            assert f"schema-{versions[0][0]}" in copy.name
            assert connection.execute("SELECT count(*) FROM winners").fetchone() == (1,)

    def test_a_second_copy_does_not_replace_the_first(self, examples: Any, next_version: Path) -> None:
        path = Path(examples.store.url.database)
        old = path.read_bytes()
        for _ in range(2):
            path.write_bytes(old)
            for leftover in path.parent.glob("*-wal"):
                leftover.unlink()
            examples.store.close()
            Store.open(path).close()
        assert len(list(path.parent.glob("*.backup"))) == 2

    def test_reading_does_not_upgrade(self, database: Path, empty_file: Path, next_version: Path) -> None:
        shutil.copy(empty_file, database)
        message = refused(errors.OlderDatabase, database, read_only=True)
        assert models.SCHEMA in message
        assert not list(database.parent.glob("*.backup"))

    @pytest.mark.parametrize(
        ("statement", "cause"),
        [
            ("INSERT INTO nowhere VALUES (1)", errors.CorruptDatabase),
            ("UPDATE variants SET status = NULL", errors.DatabaseUnavailable),
            ("no SQL at all", errors.DatabaseUnavailable),
        ],
    )
    def test_one_that_fails_changes_nothing(
        self, database: Path, next_version: Path, statement: str, cause: type[DatabaseError]
    ) -> None:
        shutil.copy(NEWEST, database)
        next_version.write_text(next_version.read_text() + f"    op.execute({statement!r})\n")
        refused(cause, database)
        with contextlib.closing(sqlite3.connect(database)) as connection:
            assert connection.execute("SELECT version_num FROM bwdtune_schema_version").fetchall() == [(SCHEMA,)]
            assert "note" not in {row[1] for row in connection.execute("PRAGMA table_info(variants)")}

    def test_one_that_breaks_a_reference_changes_nothing(self, database: Path, next_version: Path) -> None:
        shutil.copy(NEWEST, database)
        next_version.write_text(next_version.read_text() + "    op.execute('DELETE FROM variants')\n")
        with pytest.raises(errors.CorruptDatabase, match="refers to a missing row"):
            Store.open(database)
        with contextlib.closing(sqlite3.connect(database)) as connection:
            assert connection.execute("SELECT count(*) FROM variants").fetchone() != (0,)

    def test_without_room_for_a_copy_nothing_changes(
        self, database: Path, next_version: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copy(NEWEST, database)

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", full)
        assert "No space left" in refused(errors.DatabaseUnavailable, database)
        with contextlib.closing(sqlite3.connect(database)) as connection:
            assert connection.execute("SELECT version_num FROM bwdtune_schema_version").fetchall() == [(SCHEMA,)]
        assert not [path for path in database.parent.iterdir() if "backup" in path.name]


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("schema_*.sqlite")), ids=lambda path: path.stem)
def test_what_past_versions_wrote_opens_for_ever(database: Path, path: Path) -> None:
    shutil.copy(path, database)
    with contextlib.closing(Store.open(database)) as store:
        first, *others = store.winners()
        assert (first.config, first.median_ms) == (PRESETS["v1"], 4.0)
        assert len(others) == (1 if path.stem in ("schema_1", "schema_2") else 2)
        (square,) = (winner for winner in (first, *others) if winner.problem.mask == "causal")
        assert square.problem == Problem.parse("8_16_4096_128", causal=True)
        history = store.show(square.problem)
        assert [one.record.median_ms for one in history.measurements] == [4.0, 5.0, 6.0]
        assert [verdict.reason for _, verdict in history.rejected] == ["NaN in dq"]
        assert [variant.error for variant in history.failures] == ["ptxas died"]
        searches = store.searches()
        assert [search.status for search in searches] == (
            [] if int(path.stem.split("_")[1]) < 5 else ["complete", "complete", "running"]
        )
        took = searches[0].id if searches else None
        assert {(one.search_id, one.trusted) for one in history.measurements} == {(took, True)}
        assert history.searches == tuple(searches[:1])
        study = optuna.load_study(storage=store.optuna_storage(), study_name="a study")
        assert [trial.value for trial in study.trials] == [4.0]
        wrong = replace(history.rejected[0][0], source_hash="new")
        assert store.record_variant(square.problem, wrong)
    assert Store.open(database, read_only=True).winners() == [first, *others]


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("schema_*.sqlite")), ids=lambda path: path.stem)
def test_a_configuration_of_a_past_version_is_the_same_one_today(database: Path, path: Path) -> None:
    """Its parameters were fewer; the others are at their defaults."""
    shutil.copy(path, database)
    problem = Problem.parse("8_16_4096_128", causal=True)

    def configurations() -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            return connection.execute("SELECT id, name, family, parameters FROM configurations ORDER BY id").fetchall()

    with contextlib.closing(Store.open(database)) as store:
        before = configurations()
        for name in ("v1", "v2", "v3"):
            identity = {"source_hash": f"source of {name}", "arch": "sm_90a", "toolchain": "13.0.88"}
            variant = store.find_variant(problem, PRESETS[name], **identity)
            assert variant is not None
            store.record_variant(problem, variant)
        assert configurations() == before
        split = replace(PRESETS["v1"], split_gqa_heads=True)
        assert (
            store.find_variant(problem, split, source_hash="source of v1", arch="sm_90a", toolchain="13.0.88") is None
        )
        store.record_variant(problem, replace(variant, config=split))
        assert len(configurations()) == len(before) + 1


def test_optuna_tables_of_another_optuna_are_refused_in_one_line(examples: Any) -> None:
    examples.store.optuna_storage()
    execute(Path(examples.store.url.database), "UPDATE alembic_version SET version_num = '0584bdc529eb'")
    with pytest.raises(errors.DatabaseUnavailable, match=r"^[^\n]+$"):
        examples.store.optuna_storage()
