from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bwdtune.gen import paths
from bwdtune.gen.errors import BwdtuneError


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No variable is set, and the temporary directory is the test's own."""
    for name in ("BWDTUNE_CACHE", "BWDTUNE_DB", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    paths._private_dir.cache_clear()
    yield
    paths._private_dir.cache_clear()


def test_the_order_is_option_variable_xdg_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert paths.cache_dir() == tmp_path / "home/.cache/bwdtune"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert paths.cache_dir() == tmp_path / "xdg/bwdtune"
    monkeypatch.setenv("BWDTUNE_CACHE", str(tmp_path / "variable"))
    assert paths.cache_dir() == tmp_path / "variable"
    assert paths.cache_dir(tmp_path / "option") == tmp_path / "option"


@pytest.mark.parametrize("function", [paths.cache_dir, paths.writable_cache_dir])
def test_an_empty_or_relative_variable_counts_as_unset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, function: object
) -> None:
    monkeypatch.setenv("BWDTUNE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert function() == tmp_path / ".cache/bwdtune"  # type: ignore[operator]


def test_a_relative_or_home_option_becomes_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert paths.cache_dir(Path("here")) == tmp_path / "here"
    assert paths.cache_dir(Path("~/there")) == tmp_path / "home/there"


@pytest.mark.parametrize("home", [None, "", "/proc/nowhere", "/dev/null"])
def test_without_a_usable_home_a_private_directory_is_used_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str | None
) -> None:
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="BWDTUNE_CACHE"):
        cache = paths.writable_cache_dir()
    assert cache.parent == tmp_path
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert paths.cache_dir() == cache
    assert [path.name for path in tmp_path.iterdir()] == [cache.name], "nothing in the current directory"


def test_a_private_directory_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    squatted = tmp_path / f"bwdtune-{os.geteuid()}"
    squatted.mkdir()
    squatted.chmod(0o777)
    with pytest.warns(UserWarning, match="BWDTUNE_CACHE"):
        assert paths.writable_cache_dir() != squatted


@pytest.mark.parametrize("by_option", [True, False])
def test_a_cache_that_was_asked_for_and_cannot_be_written_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_option: bool
) -> None:
    (tmp_path / "file").touch()
    asked = tmp_path / "file" / "cache"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BWDTUNE_CACHE", str(asked))
    with pytest.raises(BwdtuneError, match="cannot write to the cache directory") as caught:
        paths.writable_cache_dir(asked if by_option else None)
    assert str(asked) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_default_that_cannot_be_written_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.writable_cache_dir() == tmp_path / ".cache/bwdtune"
    assert list((tmp_path / ".cache/bwdtune").iterdir()) == [], "the probe is removed"


def test_the_database_is_in_the_users_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.default_database() == tmp_path / ".local/share/bwdtune/bwdtune.sqlite"


def test_a_read_only_home_is_passed_over_for_the_database_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", "/proc/nowhere")
    paths._private_dir.cache_clear()
    with pytest.warns(UserWarning, match="BWDTUNE_DB"):
        database = paths.default_database()
    paths._private_dir.cache_clear()
    assert isinstance(database, Path)
    assert database.is_relative_to(tmp_path)


def test_a_database_that_is_there_is_used_where_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    database = tmp_path / ".local/share/bwdtune/bwdtune.sqlite"
    database.parent.mkdir(parents=True)
    database.touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(paths, "_could_be_written", lambda path: False)
    assert paths.default_database() == database


def test_to_ask_for_the_database_makes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths.default_database()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a b.sqlite", "50%20?#.sqlite", "ü.sqlite"])
def test_the_database_variable_is_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("BWDTUNE_DB", str(tmp_path / name))
    assert paths.default_database() == tmp_path / name


def test_the_database_variable_may_be_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BWDTUNE_DB", "postgresql://team@server/bwdtune")
    assert paths.default_database() == "postgresql://team@server/bwdtune"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without an entry")
def test_an_arbitrary_user_without_home_gets_a_private_directory(tmp_path: Path) -> None:
    """As in containers that run as any user."""
    code = f"""
import os
from bwdtune.gen import paths
paths.default_database()  # loads what it needs, which that user may not be able to read
os.chdir({str(tmp_path)!r})
os.setuid(54321)
print(paths.writable_cache_dir(), paths.default_database(), sep="\\n")
"""
    tmp_path.chmod(0o777)
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "BWDTUNE_DB")}
    child = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "TMPDIR": "/tmp"}, capture_output=True, text=True
    )
    cache, database = child.stdout.split()
    Path(cache).rmdir()
    assert cache.startswith("/tmp/bwdtune-")
    assert Path(database).is_absolute()
    assert list(tmp_path.iterdir()) == []
    assert "BWDTUNE_CACHE" in child.stderr


def test_importing_paths_is_cheap() -> None:
    code = "import bwdtune.gen.paths, sys; print('platformdirs' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
