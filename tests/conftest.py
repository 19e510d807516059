"""What holds for all tests: GPU tests are skipped without a GPU, and nothing of the user's is read or written."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import compile_record
import pytest

from bwdtune.db import shipped
from bwdtune.gen.build.toolchain import find_nvcc

KERNELS_KEPT_S = 7 * 24 * 3600.0

# The tests' tensors are small. Several threads for one spin while they wait, which takes more than the work, and from
# the other workers. PyTorch reads this when it is imported; child processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor prepares for more than the few small graphs of these tests, in three times as long as they take: it
# precompiles headers, finds out by compiling which vector instructions there are, and starts processes.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


# What the tests' processes have asked the record of compiled kernels for, and which keys were not on it.
_asked: dict[str, tuple[str, compile_record.Figures]] = {}
_off_record: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-record", action="store_true", help="write tests/templates/compiled.jsonl anew")


def pytest_configure(config: pytest.Config) -> None:
    # For all workers, their children and the next run: what is compiled is addressed by content.
    os.environ["BWDTUNE_CACHE"] = str(_kernel_cache(config))
    # What a shell starts in the background ignores Ctrl-C, and what nohup starts SIGHUP, children included: those that
    # a test sends such a signal would go on.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays. To look for garbage in it takes a third of the collection's time, and a
    tenth of the tests', whose own garbage can wait longer than it does by default."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(5000, 20)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch  # only here: most runs of a few tests need no torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _kernel_cache(config: pytest.Config) -> Path:
    assert config.cache
    return config.cache.mkdir("kernels")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Forgets kernels that were compiled long ago: few of them are still asked for."""
    if hasattr(session.config, "workerinput"):
        return
    cache = _kernel_cache(session.config)
    for entry in (path for kind in ("kernels", "device_code", "stubs", "once") for path in cache.glob(f"{kind}/*")):
        if time.time() - entry.stat().st_mtime > KERNELS_KEPT_S:
            entry.unlink() if entry.is_file() else shutil.rmtree(entry, ignore_errors=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Hands what was asked of the record to the process that all others belong to, which writes it where told to."""
    if compile_record.record.cache_info().currsize:
        _asked.update(compile_record.record().asked)
        _off_record.update(compile_record.record().compiled)
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["compile_record"] = (_asked, [*_off_record])
    elif session.config.option.write_record and exitstatus == pytest.ExitCode.OK:
        compile_record.PATH.write_text(compile_record.written(_asked, find_nvcc().version))
        _off_record.clear()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes what a worker of pytest-xdist hands over."""
    asked, off_record = getattr(node, "workeroutput", {}).get("compile_record", ({}, []))
    _asked.update(asked)
    _off_record.update(off_record)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _off_record:
        terminalreporter.write_line(f"{len(_off_record)} compiled kernels are not on record: `make record`")


@pytest.fixture(scope="session")
def _empty_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shipped.write_shipped([], tmp_path_factory.mktemp("package") / "shipped.json")


@pytest.fixture(autouse=True)
def _own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, _empty_table: Path) -> Iterator[None]:
    monkeypatch.setenv("BWDTUNE_DB", str(tmp_path / "bwdtune.sqlite"))
    # What this version ships would answer where a test says that nothing is stored.
    monkeypatch.setattr(shipped, "TABLE", _empty_table)
    before = _empty_table.read_bytes()
    yield
    if _empty_table.read_bytes() != before:  # a test of `tuner ship`
        _empty_table.write_bytes(before)
