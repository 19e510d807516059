"""Dispatch with a compiler that hands out stubs, so that a test says when a kernel is there, and costs no compile."""

from __future__ import annotations

from pathlib import Path

import pytest
from cxx_shim import CxxShim
from subscriber import Told

from bwdtune.gen.problem import Problem
from bwdtune.runtime import operator
from bwdtune.runtime.dispatch.choices import dispatcher


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CxxShim:
    """Compiles kernels of one kind, bf16_d64_causal, into a cache of the test's own."""
    shim = CxxShim(tmp_path / "compiler")
    shim.add(Problem.parse("2_4_128_64", causal=True))
    monkeypatch.setenv("CXX", str(shim.program))
    monkeypatch.setenv("BWDTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(operator, "load", lambda: None)  # which has tests of its own
    return shim


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Subscribed for the time of the test."""
    monkeypatch.setattr(dispatcher, "_subscribers", [])
    return Told()


@pytest.fixture
def in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is by default: PyTorch's backward serves until a kernel is there."""
    monkeypatch.delenv("BWDTUNE_ON_MISS")
