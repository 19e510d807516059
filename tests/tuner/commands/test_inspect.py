from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bwdtune.gen.build.toolchain import ToolchainError, find_nvcc
from bwdtune.gen.device import HOST, RTX_5090, device_for_arch
from bwdtune.gen.errors import BwdtuneError, UsageError
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.tuner.commands import inspect as module
from bwdtune.tuner.commands.inspect import Inspection, inspect, sass

SEED = Problem.parse("8_16_4096_128", causal=True)


@pytest.fixture
def inspected() -> Inspection:
    """v2 of the write-up, compiled for its card."""
    try:
        find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))
    return inspect(SEED, PRESETS["v2"], RTX_5090)


def test_v2_is_the_write_ups(inspected):
    result = inspected.to_dict()
    assert (result["spill_bytes"], result["stack_bytes"]) == (0, 0)
    assert 200 < result["registers"] <= 255
    assert (result["shared_memory_bytes"], result["threads"]) == (81_936, 256)
    assert result["blocks_per_sm"] == 1
    assert result["occupancy"] == pytest.approx(256 / 1536)
    assert (result["preset"], result["config"], result["arch"]) == ("v2", PRESETS["v2"].id, "sm_120a")
    json.dumps(result)


def test_the_estimate_stands_beside_what_was_compiled(inspected):
    result = inspected.to_dict()
    assert result["estimate"]["shared_memory_bytes"] == result["shared_memory_bytes"]
    assert result["estimate"]["threads"] == result["threads"]
    assert result["estimate"]["registers"] <= result["registers"]


def test_every_kernel_of_the_library_has_its_figures(inspected):
    kernels = inspected.to_dict()["kernels"]
    for name in ("preprocess_kernel", "backward_kernel", "postprocess_kernel"):
        assert any(name in kernel for kernel in kernels)
    main = next(figures for kernel, figures in kernels.items() if "backward_kernel" in kernel)
    assert main["registers"] == inspected.resources.registers


def test_tables_show_the_figures(inspected):
    console = Console(width=160)
    with console.capture() as capture:
        console.print(inspected.table())
        console.print(inspected.kernels_table())
    for text in ("81,936", "101,376", "16.7%", "255", "backward_kernel", "postprocess_kernel"):
        assert text in capture.get()


@pytest.fixture
def no_compiler(monkeypatch):
    def build_one(*_: object, **__: object) -> None:
        pytest.fail("something was compiled")

    monkeypatch.setattr(module, "build_one", build_one)


@pytest.mark.usefixtures("no_compiler")
def test_an_impossible_configuration_is_refused_before_it_is_compiled():
    with pytest.raises(UsageError, match=r"sm_120a: .*bytes of shared memory"):
        inspect(SEED, replace(PRESETS["v2"], stages=3), RTX_5090)


@pytest.mark.usefixtures("no_compiler")
def test_a_head_dim_that_no_template_takes_is_refused():
    with pytest.raises(UsageError, match="head_dim 100"):
        inspect(Problem.parse("8_16_4096_100"), PRESETS["v2"], device_for_arch("sm_90a"))


@pytest.mark.usefixtures("no_compiler")
def test_the_host_has_no_figures():
    with pytest.raises(UsageError, match="host CPU has no registers"):
        inspect(SEED, PRESETS["v2"], HOST)


def test_sass_is_what_cuobjdump_prints(tmp_path, monkeypatch):
    program = tmp_path / "cuobjdump"
    program.write_text(f"#!{sys.executable}\nimport sys\nprint(*sys.argv[1:])\n")
    program.chmod(0o755)
    monkeypatch.setattr(module, "cuobjdump", lambda: program)
    assert sass(Path("/cache/lib.so")) == "-sass /cache/lib.so\n"


def test_cuobjdumps_failure_is_one_line(tmp_path, monkeypatch):
    program = tmp_path / "cuobjdump"
    program.write_text("#!/bin/sh\necho 'cuobjdump fatal: no such file' >&2\necho more >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(module, "cuobjdump", lambda: program)
    with pytest.raises(BwdtuneError, match="no such file") as caught:
        sass(tmp_path / "lib.so")
    assert "\n" not in str(caught.value)


def test_sass_without_cuobjdump_says_what_to_do(monkeypatch):
    monkeypatch.setattr(module, "cuobjdump", lambda: None)
    with pytest.raises(BwdtuneError, match="install the full CUDA toolkit"):
        sass(Path("lib.so"))
