"""compute-sanitizer on an exported kernel's own example: small problems with tails, unequal lengths, grouped heads."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bwdtune.gen.build.toolchain import ToolchainError, find_nvcc
from bwdtune.gen.device import H200
from bwdtune.gen.families import FAMILIES, PRESETS, Config, TransposedMmaConfig, WgmmaConfig, parse_config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import TEMPLATES
from bwdtune.gen.space import refusal
from bwdtune.runtime.gpu import current_device
from bwdtune.tuner.commands.export import export_config

# What the presets leave out: three stages, other swizzles, operands read again, other atomics, several blocks an SM.
OTHERS = (
    "mma_q32_kv64_w2_s1_sw128_k0_v0_b2_r4_u1",
    "mma_q64_kv128_w4_s3_sw64_k0_v0_b1_r1_u0",
    "mma_q16_kv32_w2_s2_sw32_k0_v1_b3_r4_u1",
    "mma_q64_kv32_w1_s3_sw0_k1_v0_b1_r2_u0",
)

SEED = Problem.parse("8_16_4096_128", causal=True)
WINDOW = Problem.parse("8_16_4096_72", window_left=50, window_right=20, bottom_right=True)
OF_OTHER_HEAD_DIMS = {"w128", "w64split", "w64bulk", "w64mla", "w64pair"}
PLAIN = [(SEED, config) for config in (*PRESETS, *OTHERS) if config not in OF_OTHER_HEAD_DIMS]
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
        "wgmma_q64_f0_l0_v0_r0_m0_c1_h8",
    ),
    (
        Problem.parse("8_16_4096_64", causal=True, bottom_right=True, deterministic=True),
        "wgmma_q128_f1_l1_v0_r1_m0_c1_h8",
    ),
    (SEED, "wgmma_q64_f1_l1_v3_r0_m1_c1_h8_s1"),
    (SEED, "wgmma_q64_f1_l1_v3_r0_m0_c1_h8_u0"),
    (SEED, "wgmma_q80_f0_l1_v0_r0_m0_c1_h8"),
    (Problem.parse("8_16_4096_64"), "wgmma_q128_f1_l1_v0_r0_m0_c1_h8_d1"),
    (Problem.parse("8_16_4096_64"), "w128"),
    (Problem.parse("8_16_4096_256", causal=True), "w64split"),
    (Problem.parse("8_16_4096_256", causal=True), "w64pair"),
    (Problem.parse("8_16_4096_192", causal=True, deterministic=True), "w64bulk"),
    (Problem.parse("8_16_4096_192x128", causal=True), "w64mla"),
    (Problem.parse("8_16_4096_136x64", causal=True, deterministic=True), "w64mla lse_delta_k_step=1"),
    (Problem.parse("8_16_4096_64x128", causal=True), "t64"),
    (Problem.parse("8_16_4096_72x40", window_left=50), OTHERS[2]),
    (Problem.parse("8_16_4096_96", causal=True, deterministic=True), "wgmma_q64_f1_l1_v3_r0_m0_c1_h8_s1"),
    (Problem.parse("8_16_4096_96", deterministic=True), "w64last"),
    (Problem.parse("8_16_4096_96", causal=True, lse_grad=True), "w64last delta_in_kernel=1"),
    (Problem.parse("8_16_4096_128", causal=True, varlen=True), "w64lag"),
    (Problem.parse("8_16_4096_96", causal=True, varlen=True, deterministic=True), "w64first"),
    (
        Problem.parse("8_16_2_4096_64", window_left=50, window_right=20, bottom_right=True, varlen=True),
        "wgmma_q128_f1_l1_v0_r0_m0_c1_h8_u0",
    ),
    (Problem.parse("8_16_4096_104", causal=True, bottom_right=True, lse_grad=True), "v3"),
    (Problem.parse("8_16_4096_72", window_left=50, varlen=True, sink=True), OTHERS[0]),
    (Problem.parse("8_16_4096_56", causal=True, bottom_right=True, varlen=True, sink=True, lse_grad=True), "t64"),
    (Problem.parse("8_16_4096_72", window_left=50, bottom_right=True, lse_grad=True), "w64"),
    (Problem.parse("8_16_4096_96", causal=True, sink=True, lse_grad=True), "w64"),
    (Problem.parse("8_16_4096_64", sink=True), "w64conv"),
    (Problem.parse("8_16_4096_96", causal=True, varlen=True, sink=True), "w64lag"),
    (Problem.parse("8_16_4096_72", causal=True, varlen=True, alibi=True), "w64lag"),
    (Problem.parse("8_16_4096_64", causal=True, alibi=True, bias="1_H_S", bias_grad=True), "w64"),
    (Problem.parse("8_16_4096_56", window_left=50, bias="B_H_S", bias_dtype="fp32", bias_grad=True, alibi=True), "t64"),
    (Problem.parse("8_16_4096_64", bias="B_1_1", bias_grad=True, deterministic=True, alibi=True), "v3"),
]

# racecheck takes an arrival at an mbarrier for that of the arriving lane alone, although a __syncwarp before it put all
# lanes' accesses behind it: releases 2025.3 to 2026.4 report `words` of sanitizer_controls.cu, which is right.
EACH_LANE_ARRIVES = {
    '"r"(static_cast<uint32_t>(arrives))': '"r"(1u)',
    '"mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)': (
        '"mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(32 * arrivals)'
    ),
    '"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"': (
        '"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\\n"\n"mbarrier.arrive.shared::cta.b64 _, [%0], 32;"'
    ),
}
"""In a text with ptx.cuh, for kernels whose warps arrive as a whole: each lane does so for itself."""
SPLIT_LANES_ARRIVE = {
    "const auto arrive = [&](int index) { block.arrive(index, lane == 0); };": (
        "const auto arrive = [&](int index) {\n"
        "  block.arrive(index, lane == 0 || index == P_FULL || (index >= DS_FULL && index < DS_FULL + STAGES));\n"
        "};"
    ),
    "init(P_FULL, 1, CONSUMER_WARPS);": "init(P_FULL, 1, 32 * CONSUMER_WARPS);",
    "init(DS_FULL, STAGES, WARPGROUP_WARPS);": "init(DS_FULL, STAGES, 32 * WARPGROUP_WARPS);",
}
"""The same for `split_accumulators`, at the barriers that lead to what a consumer's threads read of the other's."""

WARPGROUPS = "racecheck knows from 2026.1 on that threads meet at wgmma, and then reports none"
CLEARED_ROWS = "racecheck 2025.3 reports the clearing of rows; the host target's does not, nor 2026.4 of t128"
UNJUDGED = {
    "wgmma_q64_f0_l1_v0_r1_m0_c1_h8": WARPGROUPS,
    "wgmma_q64_f0_l0_v0_r0_m0_c1_h8": WARPGROUPS,
    "wgmma_q80_f0_l1_v0_r0_m0_c1_h8": "racecheck 2025.3 reports it as it does those of 64; no later one was asked",
    "w64last": "racecheck 2025.3 takes the reads of lanes that do not arrive themselves for a race",
    "w64last delta_in_kernel=1": "racecheck 2025.3 takes the reads of lanes that do not arrive themselves for a race",
    "w64mla": "racecheck 2025.3 reports the reads of L and delta, as it does those of the ones above",
    "bf16_d64_causal_br_varlen_det t128": CLEARED_ROWS,
    "bf16_d56_causal_br_varlen_lse_sink t64": CLEARED_ROWS,
}
"""Why racecheck's word on a configuration, for one kind of problem or for any, does not count."""


def splits(config: Config) -> bool:
    return isinstance(config, WgmmaConfig) and config.split_accumulators


def build_example(
    problem: Problem, config: Config, arch: str, directory: Path, replacements: Mapping[str, str]
) -> Path:
    """The example, built as its README says, and with line numbers; in the kernel's text each of these is replaced."""
    written = export_config(problem, config, arch, directory)
    sources = [name for name in written.files if name.endswith(".cu")]
    kernel = next(directory / name for name in sources if name != "example.cu")
    kernel.write_text(replaced(kernel.read_text(), replacements))
    return build_program(sources, arch, directory)


def build_program(sources: list[str], arch: str, directory: Path) -> Path:
    target = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
    options = ["-O3", "-std=c++17", "-lineinfo", target, "-o", "example"]
    subprocess.run([str(find_nvcc().nvcc), *options, *sources], cwd=directory, check=True)
    return directory / "example"


def replaced(text: str, replacements: Mapping[str, str]) -> str:
    for old, new in replacements.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def fault(tool: str, *command: str | Path) -> str | None:
    """What the tool reports, or how it failed."""
    options = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3"]
    done = subprocess.run([*options, *map(str, command)], text=True, capture_output=True, timeout=300)
    clean = "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards displayed" in done.stdout
    if done.returncode == 0 and "PASSED" in done.stdout and clean:
        return None
    return f"{tool} (status {done.returncode}): {done.stdout[:2000]} … {done.stdout[-500:]}"


def on_a_gpu(test: Callable[..., None]) -> Callable[..., None]:
    reason = "compute-sanitizer is not on PATH"
    return pytest.mark.gpu(pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason=reason)(test))


kernels = pytest.mark.parametrize(
    ("problem", "config"), [*PLAIN, *FEATURED], ids=lambda value: getattr(value, "kernel_spec", value)
)


def build_controls(arch: str, directory: Path) -> Path:
    (directory / "ptx.cuh").write_text(replaced((TEMPLATES / "common" / "ptx.cuh").read_text(), EACH_LANE_ARRIVES))
    shutil.copy(Path(__file__).with_name("sanitizer_controls.cu"), directory)
    return build_program(["sanitizer_controls.cu"], arch, directory)


@pytest.fixture(scope="module")
def controls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_controls(current_device().arch, tmp_path_factory.mktemp("controls"))


@pytest.fixture(scope="module")
def wrong_word(controls: Path) -> str | None:
    """What racecheck reports of what is right; nothing in 2025.3, in 2026.4 of bulk copies."""
    return fault("racecheck", controls, "words") or fault("racecheck", controls, "bulk_copies")


@pytest.fixture(scope="module")
def wrong_word_on_copies(controls: Path) -> str | None:
    """What synccheck reports of warps that meet at a barrier from two copies of code, which is right."""
    return fault("synccheck", controls, "copies")


@on_a_gpu
@kernels
def test_nothing_is_reported(tmp_path: Path, problem: Problem, config: str, wrong_word_on_copies: str | None) -> None:
    """No configuration here has `code_copies`, but each consumer of `split_accumulators` has code of its own."""
    device, parsed = current_device(), parse_config(config)
    if reason := refusal(problem, parsed, device):
        pytest.skip(reason)
    example = build_example(problem, parsed, device.arch, tmp_path, {})
    tools = ("memcheck",) if splits(parsed) and wrong_word_on_copies else ("memcheck", "synccheck")
    with ThreadPoolExecutor() as pool:
        faults = [report for report in pool.map(fault, tools, [example] * len(tools)) if report]
    assert not faults, "\n".join(faults)


@on_a_gpu
@kernels
def test_no_race_is_reported(tmp_path: Path, problem: Problem, config: str, wrong_word: str | None) -> None:
    device, parsed = current_device(), parse_config(config)
    transposed = parsed.family == TransposedMmaConfig.family
    replacements = EACH_LANE_ARRIVES if transposed else SPLIT_LANES_ARRIVE if splits(parsed) else {}
    unjudged = UNJUDGED.get(config) or UNJUDGED.get(f"{problem.kernel_spec} {config}")
    if reason := refusal(problem, parsed, device) or unjudged or (transposed and wrong_word):
        pytest.skip(reason)
    example = build_example(problem, parsed, device.arch, tmp_path, replacements)
    assert fault("racecheck", example) is None


@on_a_gpu
@pytest.mark.parametrize("name", ["racing_words", "racing_bulk_copies"])
def test_a_race_is_reported(controls: Path, name: str) -> None:
    assert "Race reported" in (fault("racecheck", controls, name) or "")


@pytest.mark.slow
def test_what_runs_on_a_gpu_only_can_be_built(tmp_path: Path) -> None:
    try:
        find_nvcc().check_arch(H200.arch)
    except ToolchainError as error:
        pytest.skip(str(error))
    build_controls(H200.arch, tmp_path)
    build_example(SEED, parse_config("t64"), H200.arch, tmp_path / "kernel", EACH_LANE_ARRIVES)


def test_every_feature_of_every_family_is_run_on_a_card_with_all_of_them() -> None:
    run = [(problem, parse_config(config)) for problem, config in (*PLAIN, *FEATURED)]
    assert not [reason for problem, config in run if (reason := refusal(problem, config, H200))]
    features = {(config.family, feature) for problem, config in run for feature in problem.required_features}
    assert features == {(family, feature) for family, config in FAMILIES.items() for feature in config.features}
