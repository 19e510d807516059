"""The operator's library in the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bwdtune.runtime.operator import build

FAKE_COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo once >> "{count}"
sleep 0.2
echo library > "$2"
"""


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a file instead of a library; returns the file that has a line for each of its runs."""
    count, compiler = tmp_path / "count", tmp_path / "a compiler"
    compiler.write_text(FAKE_COMPILER.format(count=count))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{compiler}'")
    return count


def test_it_is_built_once(fake_compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "a cache"
    assert not build.is_built(cache)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(build.library(cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.is_built(cache)
    assert len(set(found)) == 1
    assert fake_compiler.read_text() == "once\n"
    assert not list((cache / "work").iterdir())


@pytest.mark.slow
def test_processes_build_it_once(fake_compiler: Path, tmp_path: Path) -> None:
    program = "import sys\nfrom pathlib import Path\nfrom bwdtune.runtime.operator import build\n"
    program += "build.library(Path(sys.argv[1]))\n"
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, env=dict(os.environ)) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert fake_compiler.read_text() == "once\n"


def test_what_is_in_the_cache_needs_no_compiler(
    fake_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build.library(tmp_path / "cache")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    assert build.library(tmp_path / "cache") == library
    build.discard(library)
    with pytest.raises(build.OperatorBuildError, match=r"there is no C\+\+ compiler"):
        build.library(tmp_path / "cache")


def test_a_compiler_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho in a header\necho 'operator.cpp:1: error: no good'\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.OperatorBuildError, match=r"the operator: operator.cpp:1: error: no good"):
        build.library(tmp_path / "cache")
    (log,) = (tmp_path / "cache" / "operator").glob("*.log")
    assert "in a header" in log.read_text()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written(fake_compiler: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o500)
    with pytest.raises(Exception, match="cannot write"):
        build.library(cache)


def test_a_library_that_is_damaged_is_built_again(tmp_path: Path) -> None:
    """In a process of its own: a library is loaded once."""
    program = (
        "from bwdtune.runtime.operator import build, native\n"
        "import sys\nfrom pathlib import Path\n"
        "right, damaged = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "asked = []\n"
        "build.library = lambda: damaged if not asked and not asked.append(1) else right\n"
        "native.load()\n"
        "assert not damaged.exists() and asked\n"
    )
    damaged = tmp_path / "entry" / "bwdtune_operator.so"
    damaged.parent.mkdir()
    damaged.write_bytes(b"\x7fELF")
    right = build.library()
    subprocess.run([sys.executable, "-c", program, str(right), str(damaged)], check=True)
