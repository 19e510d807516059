"""What `examples/` shows works. What needs a GPU there runs on the CPU here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import bwdtune
from bwdtune.gen.build.jobs import build_one
from bwdtune.gen.build.toolchain import ToolchainError, find_host_compiler, find_nvcc
from bwdtune.gen.device import HOST_ARCH
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.tuner.commands.export import export_config

EXAMPLES = Path(bwdtune.__file__).resolve().parent / "examples"
FAKE_RUNTIME = Path(__file__).parent / "support" / "fake_cuda_runtime.cpp"


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_cpp_program_calls_an_exported_kernel(causal: bool, tmp_path: Path) -> None:
    """Against the header that is exported, and the kernel as plain C++."""
    problem, config = Problem.parse("1_4_200_64", causal=causal), PRESETS["v3"]
    try:
        cuda, compiler = find_nvcc().root / "include", find_host_compiler()
    except ToolchainError as error:
        pytest.skip(str(error))
    export_config(problem, config, "sm_90a", tmp_path / "exported")
    library = build_one(render(problem, config), HOST_ARCH).library
    assert library
    sources = [str(EXAMPLES / "exported_kernel" / "main.cpp"), str(FAKE_RUNTIME)]
    options = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{tmp_path / 'exported'}", f"-isystem{cuda}"]
    program = tmp_path / "program"
    link = [str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)]
    subprocess.run([*compiler.program, *options, *sources, *link], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "largest relative error of dV: 0.00" in done.stdout
