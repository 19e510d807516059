"""compute-sanitizer on an exported kernel's own example: small problems with tails, unequal lengths, grouped heads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from bwdtune.gen.config import PRESETS, parse_config
from bwdtune.gen.problem import Problem
from bwdtune.gen.toolchain import find_nvcc
from bwdtune.runtime.gpu import current_device
from bwdtune.tuner.export import export_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not on PATH"),
]

# What the presets leave out: three stages, other swizzles, operands read again, other atomics, several blocks an SM.
OTHERS = (
    "mma_q32_kv64_w2_s1_sw128_k0_v0_b2_r4_u1",
    "mma_q64_kv128_w4_s3_sw64_k0_v0_b1_r1_u0",
    "mma_q16_kv32_w2_s2_sw32_k0_v1_b3_r4_u1",
    "mma_q64_kv32_w1_s3_sw0_k1_v0_b1_r2_u0",
)


SEED = Problem.parse("8_16_4096_128", causal=True)
PLAIN = {config: (SEED, parse_config(config)) for config in (*PRESETS, *OTHERS)}
FEATURED = {
    problem.kind: (problem, parse_config(config))
    for problem, config in (
        (Problem.parse("8_16_4096_72"), "mma_q32_kv32_w1_s3_sw64_k0_v0_b1_r1_u0"),
        (Problem.parse("8_16_4096_40", causal=True, bottom_right=True), OTHERS[2]),
        (Problem.parse("8_16_4096_64", window_left=50, window_right=20, bottom_right=True), "v2"),
        (Problem.parse("8_16_4096_64", causal=True, softcap=True), "v3"),
        (Problem.parse("8_16_4096_128", causal=True, varlen=True), OTHERS[0]),
        (Problem.parse("8_16_4096_128", causal=True, deterministic=True), "v3"),
        (
            Problem.parse("8_16_2_4096_128", causal=True, bottom_right=True),
            "mma_q32_kv64_w4_s2_sw128_k1_v1_b1_r4_u1_g1",
        ),
        (Problem.parse("8_16_2_4096_64", varlen=True), "mma_q64_kv32_w1_s3_sw0_k1_v0_b1_r1_u0_g1"),
        (Problem.parse("8_16_4096_80", window_left=50, varlen=True, deterministic=True, softcap=True), OTHERS[2]),
    )
}


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The examples, built as their README says."""
    nvcc, arch = find_nvcc().nvcc, current_device().arch
    target = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
    programs = {}
    for name, (problem, config) in {**PLAIN, **FEATURED}.items():
        directory = tmp_path_factory.mktemp(config.id)
        written = export_config(problem, config, arch, directory)
        sources = [name for name in written.files if name.endswith(".cu")]
        options = ["-O3", "-std=c++17", "-lineinfo", target, "-o", "example"]
        subprocess.run([str(nvcc), *options, *sources], cwd=directory, check=True)
        programs[name] = directory / "example"
    return programs


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("name", [*PLAIN, *FEATURED])
def test_nothing_is_reported(example: dict[str, Path], name: str, tool: str) -> None:
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", str(example[name])]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "PASSED" in done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards displayed" in done.stdout, done.stdout[-500:]
