from __future__ import annotations

import json
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from bwdtune.gen.device import H200, RTX_5090
from bwdtune.gen.errors import UsageError
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.runtime.gpu import current_device
from bwdtune.tuner.commands import kernels
from bwdtune.tuner.commands import profile as module
from bwdtune.tuner.commands.profile import METRICS, ProfileError, find_ncu, parse_raw_csv, profile

SEED = Problem.parse("8_16_4096_128", causal=True)

# v3 of the write-up, as `ncu --csv --page raw --print-units base` lays it out: names, units, one row a launch.
FIGURES = {
    "smsp__sass_inst_executed_op_local_ld.sum": ("inst", "0"),
    "smsp__sass_inst_executed_op_local_st.sum": ("inst", "0"),
    "smsp__inst_executed_op_ldsm.sum": ("inst", "205,520,896"),
    "smsp__sass_inst_executed_op_global_ld.sum": ("inst", "17,039,360"),
    "smsp__inst_executed.sum": ("inst", "1,612,185,600"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "0.21"),
    "sm__inst_issued.avg.pct_of_peak_sustained_active": ("%", "12.79"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "42.31"),
}
KERNELS = {
    "preprocess_kernel(Arguments)": "86,600",
    "void backward_kernel<64>(Arguments)": "8,400,000",
    "postprocess_kernel(Arguments)": "100,000",
}


def raw_csv(figures: dict[str, tuple[str, str]], kernels: dict[str, str] = KERNELS) -> str:
    fixed = ("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size")
    fixed = (*fixed, "Grid Size", "Device", "CC")
    rows = [[*fixed, "gpu__time_duration.sum", *figures]]
    rows.append([*[""] * len(fixed), "ns", *(unit for unit, _ in figures.values())])
    for number, (kernel, duration) in enumerate(kernels.items()):
        launch = [str(number), "4242", "python3.11", "127.0.0.1", kernel, "1", "7", "(256, 1, 1)", "(64, 16, 8)"]
        rows.append([*launch, "0", "12.0", duration, *(value for _, value in figures.values())])
    table = "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)
    return (
        "==PROF== Connected to process 4242 (/usr/bin/python3.11)\n"
        '==PROF== Profiling "backward_kernel" - 1: 0%....50%....100% - 9 passes\n'
        f"{table}\n"
        "==PROF== Disconnected from process 4242\n"
    )


@dataclass(frozen=True)
class FakeVariant:
    library: Path = Path("/cache/libkernel.so")


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Installs an ncu on PATH that answers from `csv`, knows only its counters, and keeps its command lines."""
    monkeypatch.setattr(module, "build_one", lambda source, arch, cache=None: FakeVariant())
    monkeypatch.setattr(kernels, "refusal", lambda problem, config, device: None)

    def install(csv: str = "", *, known=tuple(FIGURES), error: str = "", status: int = 0) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        calls = tmp_path / "calls"
        program = folder / "ncu"
        program.write_text(
            f"""#!{sys.executable}
import sys
if "--version" in sys.argv:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0 (build 36398880) (public-release)")
    raise SystemExit
with open({str(calls)!r}, "a") as stream:
    print(sys.argv[1:], file=stream)
log = open(sys.argv[sys.argv.index("--log-file") + 1], "w")
counters = sys.argv[sys.argv.index("--metrics") + 1].split(",")
unknown = [c for c in counters if c != "gpu__time_duration.sum" and c not in {tuple(known)!r}]
if unknown:
    base = unknown[0].partition(".")[0]
    print(f"==ERROR== Failed to find metric regex:^{{base}}(\\\\..*)?$", file=log)
    raise SystemExit(1)
print({error!r} or {csv!r}, file=log)
raise SystemExit({status})
"""
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(folder))
        return calls

    return install


def test_the_write_ups_figures(ncu):
    calls = ncu(raw_csv(FIGURES))
    result = profile(SEED, PRESETS["v3"], RTX_5090, kernel="v3").to_dict()
    assert result["latency_ms"] == pytest.approx(8.5866)
    assert result["kernel_ms"] == pytest.approx(8.4)
    assert result["tflops"] == pytest.approx(160.06, abs=0.01)
    assert (result["local_loads"], result["local_stores"]) == (0, 0)
    assert (result["ldmatrix"], result["global_loads"]) == (205_520_896, 17_039_360)
    assert result["executed_instructions"] == 1_612_185_600
    assert result["long_scoreboard_stall"] == 0.21
    assert result["issue_slots_busy_percent"] == 12.79
    assert result["tensor_pipe_percent"] == 42.31
    assert (result["kernel"], result["config"], result["ncu"]) == ("v3", PRESETS["v3"].id, "2025.3.1.0")
    json.dumps(result)
    command = calls.read_text()
    for part in (
        "'--clock-control', 'none'",
        "'--profile-from-start', 'off'",
        "bwdtune.tuner.commands.profile_target",
        "libkernel.so",
    ):
        assert part in command


def test_table_is_written_as_in_the_write_up(ncu):
    ncu(raw_csv(FIGURES))
    console = Console(width=120)
    with console.capture() as capture:
        console.print(profile(SEED, PRESETS["v3"], RTX_5090, kernel="v3").table())
    for figure in ("8.5866 ms", "160.06", "205.5M", "17.0M", "1.612B", "0.21", "12.79%", "42.31%", "84.62%"):
        assert figure in capture.get()


@pytest.mark.parametrize(("device", "factor"), [(RTX_5090, 2), (H200, 1)], ids=["geforce", "data center"])
def test_tensor_counter_is_doubled_on_geforce_only(ncu, device, factor):
    ncu(raw_csv(FIGURES))
    result = profile(SEED, PRESETS["v3"], device, kernel="v3")
    assert result.figures["tensor_utilization_percent"] == pytest.approx(factor * 42.31)
    assert ("tensor_utilization_percent" in result.notes) == (factor == 2)


def test_an_unknown_counter_is_replaced_by_the_next(ncu):
    figures = dict(FIGURES)
    figures["sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"] = figures.pop(
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
    )
    calls = ncu(raw_csv(figures), known=tuple(figures))
    assert profile(SEED, PRESETS["v3"], H200, kernel="v3").figures["tensor_pipe_percent"] == 42.31
    assert len(calls.read_text().splitlines()) == 3


def test_a_counter_that_no_ncu_name_reads_is_not_available(ncu):
    name = "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
    figures = {key: value for key, value in FIGURES.items() if key != name}
    ncu(raw_csv(figures), known=tuple(figures))
    result = profile(SEED, PRESETS["v3"], H200, kernel="v3")
    assert result.figures["long_scoreboard_stall"] is None
    assert "does not know" in result.notes["long_scoreboard_stall"]


@pytest.mark.parametrize("text", ["n/a", "nan", "", "(!) n/a"])
def test_a_value_that_is_none_is_not_available(ncu, text):
    ncu(raw_csv({**FIGURES, "smsp__inst_executed.sum": ("inst", text)}))
    result = profile(SEED, PRESETS["v3"], H200, kernel="v3")
    assert result.figures["executed_instructions"] is None
    assert "read no value" in result.notes["executed_instructions"]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(result.table())
    assert "n/a" in capture.get()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", 1, "may not read the GPU's counters"),
        ("==ERROR== The application returned an error code (1).", 1, "exit status 1: ==ERROR== The application"),
        ("==WARNING== No kernels were profiled.", 0, "No kernels were profiled"),
    ],
)
def test_what_goes_wrong_is_one_line(ncu, error, status, message):
    ncu(error=error, status=status)
    with pytest.raises(ProfileError, match=message) as caught:
        profile(SEED, PRESETS["v3"], H200, kernel="v3")
    assert "\n" not in str(caught.value)


def test_a_profile_without_the_main_kernel_fails(ncu):
    ncu(raw_csv(FIGURES, {"preprocess_kernel(Arguments)": "86,600"}))
    with pytest.raises(ProfileError, match="preprocess_kernel"):
        profile(SEED, PRESETS["v3"], H200, kernel="v3")


def test_an_impossible_configuration_is_refused_before_anything_runs(ncu, monkeypatch):
    calls = ncu(raw_csv(FIGURES))
    monkeypatch.setattr(kernels, "refusal", lambda problem, config, device: "too much shared memory")
    with pytest.raises(UsageError, match="too much shared memory"):
        profile(SEED, PRESETS["v3"], H200, kernel="v3")
    assert not calls.exists()


def test_ncu_is_found_in_the_toolkit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    program = tmp_path / "nsight-compute-2025.3.1" / "ncu"
    program.parent.mkdir()

    @dataclass(frozen=True)
    class FakeToolchain:
        root: Path = tmp_path

    monkeypatch.setattr(module, "find_nvcc", FakeToolchain)
    with pytest.raises(ProfileError, match="was not found"):
        find_ncu()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_ncu() == program


@pytest.mark.parametrize(("unit", "milliseconds"), [("nsecond", 1e-6), ("us", 1e-3), ("ms", 1.0), ("second", 1e3)])
def test_durations_in_any_unit(unit, milliseconds):
    launches = parse_raw_csv(raw_csv({}, {"backward_kernel": "2.5"}).replace('"ns"', f'"{unit}"'))
    assert launches[0].milliseconds == pytest.approx(2.5 * milliseconds)


def test_metric_names_are_stable():
    assert [metric.name for metric in METRICS] == [
        "local_loads",
        "local_stores",
        "ldmatrix",
        "global_loads",
        "executed_instructions",
        "long_scoreboard_stall",
        "issue_slots_busy_percent",
        "tensor_pipe_percent",
    ]


@pytest.mark.gpu
def test_a_real_profile():
    try:
        find_ncu()
    except ProfileError as error:
        pytest.skip(str(error))
    problem = Problem.parse("2_4_1024_128", causal=True)
    try:
        result = profile(problem, PRESETS["v2"], current_device(), kernel="v2")
    except ProfileError as error:
        if "may not read" in str(error):
            pytest.skip(str(error))
        raise
    assert 0 < result.kernel_ms < result.latency_ms
    assert not [name for name, value in result.figures.items() if value is None]
    assert result.figures["local_loads"] == 0
    assert result.figures["ldmatrix"] > 0
