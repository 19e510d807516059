"""What holds for all tests: GPU tests are skipped without a GPU, and nothing of the user's is read or written."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from bwdtune.db import shipped


def pytest_configure() -> None:
    # What a shell starts in the background ignores Ctrl-C, children included: those that a test sends it would go on.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch  # only here: most runs of a few tests need no torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def _kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests of a run, so that each kernel is compiled once.

    The operator's library is kept between runs: it is addressed by its content, and takes half a minute.
    """
    kernels = tmp_path_factory.mktemp("kernels")
    kept = Path(tempfile.gettempdir(), f"bwdtune-tests-{os.geteuid()}", "operator")
    kept.mkdir(parents=True, exist_ok=True)
    (kernels / "operator").symlink_to(kept)
    return kernels


@pytest.fixture(autouse=True)
def _own_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, _kernel_cache: Path
) -> None:
    monkeypatch.setenv("BWDTUNE_CACHE", str(_kernel_cache))
    monkeypatch.setenv("BWDTUNE_DB", str(tmp_path / "bwdtune.sqlite"))
    # What this version ships would answer where a test says that nothing is stored.
    table = tmp_path_factory.mktemp("package") / "shipped.json"
    monkeypatch.setattr(shipped, "TABLE", shipped.write_shipped([], table))
