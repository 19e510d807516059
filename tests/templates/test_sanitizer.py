"""compute-sanitizer on an exported kernel's own example: small problems with tails, unequal lengths, grouped heads."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bwdtune.gen.config import FAMILIES, PRESETS, Config, parse_config
from bwdtune.gen.device import H200
from bwdtune.gen.problem import Problem
from bwdtune.gen.space import refusal
from bwdtune.gen.toolchain import find_nvcc
from bwdtune.runtime.gpu import current_device
from bwdtune.tuner.export import export_config

# What the presets leave out: three stages, other swizzles, operands read again, other atomics, several blocks an SM.
OTHERS = (
    "mma_q32_kv64_w2_s1_sw128_k0_v0_b2_r4_u1",
    "mma_q64_kv128_w4_s3_sw64_k0_v0_b1_r1_u0",
    "mma_q16_kv32_w2_s2_sw32_k0_v1_b3_r4_u1",
    "mma_q64_kv32_w1_s3_sw0_k1_v0_b1_r2_u0",
)

SEED = Problem.parse("8_16_4096_128", causal=True)
WINDOW = Problem.parse("8_16_4096_72", window_left=50, window_right=20, bottom_right=True)
PLAIN = [(SEED, config) for config in (*PRESETS, *OTHERS)]
FEATURED = [
    (Problem.parse("8_16_4096_72"), "mma_q32_kv32_w1_s3_sw64_k0_v0_b1_r1_u0"),
    (Problem.parse("8_16_4096_40", causal=True, bottom_right=True), OTHERS[2]),
    (Problem.parse("8_16_4096_64", window_left=50, window_right=20, bottom_right=True), "v2"),
    (Problem.parse("8_16_4096_64", causal=True, softcap=True), "v3"),
    (Problem.parse("8_16_4096_128", causal=True, varlen=True), OTHERS[0]),
    (Problem.parse("8_16_4096_128", causal=True, deterministic=True), "v3"),
    (Problem.parse("8_16_2_4096_128", causal=True, bottom_right=True), "mma_q32_kv64_w4_s2_sw128_k1_v1_b1_r4_u1_g1"),
    (Problem.parse("8_16_2_4096_64", varlen=True), "mma_q64_kv32_w1_s3_sw0_k1_v0_b1_r1_u0_g1"),
    (Problem.parse("8_16_4096_80", window_left=50, varlen=True, deterministic=True, softcap=True), OTHERS[2]),
    (WINDOW, "t64"),
    (
        Problem.parse("8_16_4096_96", causal=True, softcap=True, deterministic=True),
        "mmat_q32_kv128_w8_g1_x0_r2_s3_o3_k0_v1_p1_f1_d0_t1_b1_h4",
    ),
    (Problem.parse("8_16_4096_64", causal=True, bottom_right=True, varlen=True, deterministic=True), "t128"),
    (
        Problem.parse("8_16_4096_40", window_left=50, softcap=True, varlen=True),
        "mmat_q64_kv64_w4_g2_x0_r2_s2_o1_k0_v0_p0_f0_d0_t0_b2_h2",
    ),
    (WINDOW, "w64"),
    (WINDOW, "w64lag"),
    (Problem.parse("8_16_4096_96", causal=True, softcap=True), "wgmma_q64_f0_l1_v0_r1_m0_c1_h8"),
    (
        Problem.parse("8_16_4096_96", causal=True, softcap=True, deterministic=True),
        "wgmma_q64_f0_l0_v0_r0_m0_c2_h8",
    ),
    (
        Problem.parse("8_16_4096_64", causal=True, bottom_right=True, deterministic=True),
        "wgmma_q128_f1_l1_v0_r1_m0_c1_h8",
    ),
]
TOOLS = ("memcheck", "racecheck", "synccheck")


def build_example(problem: Problem, config: Config, arch: str, directory: Path) -> Path:
    """The example, built as its README says, and with line numbers."""
    written = export_config(problem, config, arch, directory)
    target = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
    sources = [name for name in written.files if name.endswith(".cu")]
    options = ["-O3", "-std=c++17", "-lineinfo", target, "-o", "example"]
    subprocess.run([str(find_nvcc().nvcc), *options, *sources], cwd=directory, check=True)
    return directory / "example"


def fault(example: Path, tool: str) -> str | None:
    """What the tool reports, or how it failed."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", str(example)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300)
    clean = "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards displayed" in done.stdout
    if done.returncode == 0 and "PASSED" in done.stdout and clean:
        return None
    return f"{tool} (status {done.returncode}): {done.stdout[:2000]} … {done.stdout[-500:]}"


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not on PATH")
@pytest.mark.parametrize(("problem", "config"), [*PLAIN, *FEATURED], ids=lambda value: getattr(value, "kind", value))
def test_nothing_is_reported(tmp_path: Path, problem: Problem, config: str) -> None:
    device = current_device()
    if reason := refusal(problem, parse_config(config), device):
        pytest.skip(reason)
    example = build_example(problem, parse_config(config), device.arch, tmp_path)
    with ThreadPoolExecutor() as pool:
        faults = [report for report in pool.map(fault, [example] * len(TOOLS), TOOLS) if report]
    assert not faults, "\n".join(faults)


def test_every_feature_of_every_family_is_run_on_a_card_with_all_of_them() -> None:
    kernels = [(problem, parse_config(config)) for problem, config in (*PLAIN, *FEATURED)]
    assert not [reason for problem, config in kernels if (reason := refusal(problem, config, H200))]
    run = {(config.family, feature) for problem, config in kernels for feature in problem.asked}
    assert run == {(family, feature) for family, config in FAMILIES.items() for feature in config.features}
