"""Verdicts on libraries: found in a process of their own, once, and remembered beside the library."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stub_kernels import stub_library

from bwdtune.gen.build.jobs import build_one
from bwdtune.gen.device import HOST
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.gen.space import refusal
from bwdtune.runtime import gpu
from bwdtune.runtime.verification import verdicts
from bwdtune.runtime.verification.verdicts import UnverifiedError, Verdict, known, verify

PROBLEM = Problem.parse("1_1_1_64")
Entry = Callable[..., Path]


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    """An entry of the cache, with a stub of the fault that is asked for in it."""
    monkeypatch.setattr(verdicts, "_remembered", {})

    def make(fault: str = "NONE") -> Path:
        folder = tmp_path / fault
        folder.mkdir()
        return Path(shutil.copy(stub_library(fault=fault), folder / "kernel.so"))

    return make


def _no_process(*_: Any, **__: Any) -> Any:
    raise AssertionError("it is remembered")


def test_a_right_kernel_passes_once(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    library = entry()
    assert known(library, HOST) is None
    assert verify(library, PROBLEM, HOST, 0) == Verdict(True)
    monkeypatch.setattr(subprocess, "run", _no_process)
    monkeypatch.setattr(verdicts, "_remembered", {})  # as another process sees it
    assert verify(library, PROBLEM, HOST, 0) == known(library, HOST) == Verdict(True)
    assert known(library, replace(HOST, name="another model")) is None
    monkeypatch.setattr(gpu, "driver_version", lambda: "another driver")
    assert known(library, HOST) is None


@pytest.mark.slow
def test_another_library_in_its_place_has_no_verdict(entry: Entry) -> None:
    library = entry()
    verify(library, PROBLEM, HOST, 0)
    shutil.copy(stub_library(fault="HALF_OF_THE_ROWS"), library)
    assert known(library, HOST) is None


@pytest.mark.slow
def test_a_wrong_kernel_does_not_pass(entry: Entry) -> None:
    library = entry("HALF_OF_THE_ROWS")
    verdict = verify(library, PROBLEM, HOST, 0)
    assert not verdict.passed
    assert "of dk were not written" in verdict.reason
    assert known(library, HOST) == verdict


@pytest.mark.slow
def test_a_kernel_that_ends_its_process_does_not_pass(entry: Entry) -> None:
    library = entry("ABORTS")
    verdict = verify(library, PROBLEM, HOST, 0)
    assert not verdict.passed
    assert "signal" in verdict.reason
    assert known(library, HOST) == verdict


def test_what_is_no_fault_of_the_library_is_not_remembered(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    library = entry()
    monkeypatch.setattr(verdicts, "_TIMEOUT_S", 0.01)
    with pytest.raises(UnverifiedError, match=r"^[^\n]+$"):
        verify(library, PROBLEM, HOST, 0)
    monkeypatch.undo()
    assert known(library, HOST) is None


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_remembered_for_the_process(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = entry()

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    assert verify(library, PROBLEM, HOST, 0).passed
    monkeypatch.setattr(subprocess, "run", _no_process)
    assert verify(library, PROBLEM, HOST, 0).passed
    assert not list(library.parent.glob("*.json"))


@pytest.mark.gpu
def test_a_kernel_is_verified_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_remembered", {})
    device = gpu.current_device(0)
    problem = Problem.parse("1_1_1_64", causal=True)
    config = next(config for config in PRESETS.values() if refusal(problem, config, device) is None)
    variant = build_one(render(problem, config), device.arch, cache=tmp_path)
    assert variant.library
    assert verify(variant.library, problem, device, 0) == known(variant.library, device) == Verdict(True)
    other = replace(problem, causal=False)  # the same library as a kernel for another mask: wrong
    variant.library.with_name("other").mkdir()
    library = Path(shutil.copy(variant.library, variant.library.with_name("other")))
    assert not verify(library, other, device, 0).passed
