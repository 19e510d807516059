"""``tuner profile``: the write-up's hardware counters of one kernel, read by Nsight Compute (ncu)."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...gen.build.jobs import MAIN_KERNEL, build_one
from ...gen.build.toolchain import find_nvcc
from ...gen.device import Device
from ...gen.errors import BwdtuneError
from ...gen.families import Config, parse_config
from ...gen.problem import Problem
from ...gen.render import render
from .cards import gpu_here
from .kernels import BEST, named_config, require_valid
from .options import CacheOption, DatabaseOption, JsonOption, KernelOption, LimitsOption, for_problem
from .output import print_result

if TYPE_CHECKING:
    from rich.table import Table

_KERNELS = "regex:(preprocess|backward|postprocess)_kernel"
_TIMEOUT_S = 600
_MILLISECONDS = {
    "ns": 1e-6,
    "nsecond": 1e-6,
    "us": 1e-3,
    "usecond": 1e-3,
    "ms": 1.0,
    "msecond": 1.0,
    "s": 1e3,
    "second": 1e3,
}
_DURATION = "gpu__time_duration.sum"


@for_problem()
def command(
    problem: Problem,
    kernel: KernelOption,
    limits: LimitsOption = None,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> None:
    """Profile one kernel on the GPU with ncu."""
    if kernel != BEST:
        parse_config(kernel)  # refuses a name before it asks for a GPU
    device = gpu_here()
    config = named_config(kernel, problem, database, limits=limits, arch=device.arch)
    found = profile(problem, config, device, kernel=kernel, cache=cache)
    print_result(found.to_dict(), [found.table()], as_json)


class ProfileError(BwdtuneError):
    """The profiler is missing, was not allowed to read the counters, or failed."""


@dataclass(frozen=True)
class Metric:
    """One figure of the write-up.

    Attributes:
        name: Its name in the JSON.
        title: Its name in the table, as the write-up has it.
        counters: ncu's names for it, best first: not every GPU and version of ncu has each of them.
        unit: ``count``, ``percent`` or ``ratio``.
    """

    name: str
    title: str
    counters: tuple[str, ...]
    unit: str


METRICS = (
    Metric(
        "local_loads",
        "Local loads",
        ("smsp__sass_inst_executed_op_local_ld.sum", "smsp__inst_executed_op_local_ld.sum"),
        "count",
    ),
    Metric(
        "local_stores",
        "Local stores",
        ("smsp__sass_inst_executed_op_local_st.sum", "smsp__inst_executed_op_local_st.sum"),
        "count",
    ),
    Metric(
        "ldmatrix",
        "ldmatrix instructions",
        ("smsp__inst_executed_op_ldsm.sum", "smsp__sass_inst_executed_op_ldsm.sum"),
        "count",
    ),
    Metric(
        "global_loads",
        "Global loads",
        ("smsp__sass_inst_executed_op_global_ld.sum", "smsp__inst_executed_op_global_ld.sum"),
        "count",
    ),
    Metric(
        "executed_instructions", "Executed instructions", ("smsp__inst_executed.sum", "sm__inst_executed.sum"), "count"
    ),
    Metric(
        "long_scoreboard_stall",
        "Long scoreboard stall",
        ("smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",),
        "ratio",
    ),
    Metric(
        "issue_slots_busy_percent",
        "Issue slots busy",
        ("sm__inst_issued.avg.pct_of_peak_sustained_active", "smsp__issue_active.avg.pct_of_peak_sustained_active"),
        "percent",
    ),
    Metric(
        "tensor_pipe_percent",
        "Tensor pipe, as counted",
        (
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
            "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        ),
        "percent",
    ),
)
"""The table of the write-up. All but the latency are of the main kernel."""


@dataclass(frozen=True)
class Launch:
    """What ncu says of one kernel launch.

    Attributes:
        kernel: The kernel's name.
        milliseconds: Its duration.
        counters: The figures by ncu's name; what ncu could not read is left out.
    """

    kernel: str
    milliseconds: float
    counters: Mapping[str, float]


@dataclass(frozen=True)
class Profile:
    """The counters of one kernel on one problem.

    Attributes:
        kernel: The kernel as it was asked for, such as ``v3``.
        config: Its configuration's id.
        problem: What was computed.
        gpu: The GPU's name.
        arch: The compile target.
        ncu: ncu's version.
        command: ncu's command line.
        latency_ms: Sum of the launches of one backward: delta, the main kernel, the conversion of dQ.
        kernel_ms: The main kernel alone.
        tflops: Effective TFLOPS at that latency.
        figures: Each metric by its name; None where ncu has no counter for it.
        notes: For each of those, and each corrected one, why, by metric name.
    """

    kernel: str
    config: str
    problem: Problem
    gpu: str
    arch: str
    ncu: str
    command: str
    latency_ms: float
    kernel_ms: float
    tflops: float
    figures: Mapping[str, float | None]
    notes: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``tuner profile --json``."""
        return {
            "kernel": self.kernel,
            "config": self.config,
            **self.problem.to_dict(),
            "gpu": self.gpu,
            "arch": self.arch,
            "ncu": self.ncu,
            "command": self.command,
            "latency_ms": self.latency_ms,
            "kernel_ms": self.kernel_ms,
            "tflops": self.tflops,
            **self.figures,
            "notes": dict(self.notes),
        }

    def table(self) -> Table:
        """The write-up's table of metrics, with notes below."""
        from rich.table import Table

        notes = "\n".join(f"{name}: {note}" for name, note in self.notes.items())
        table = Table(title=f"{self.problem.label} on {self.gpu}", caption=notes or None, caption_justify="left")
        table.add_column("Metric")
        table.add_column(self.kernel, justify="right")
        table.add_row("Latency, three launches", f"{self.latency_ms:.4f} ms")
        table.add_row("Latency, main kernel", f"{self.kernel_ms:.4f} ms")
        table.add_row("Effective TFLOPS", f"{self.tflops:.2f}")
        for metric in METRICS:
            table.add_row(metric.title, _written(self.figures[metric.name], metric.unit))
        table.add_row("Tensor utilization", _written(self.figures["tensor_utilization_percent"], "percent"))
        return table


def profile(
    problem: Problem,
    config: Config,
    device: Device,
    *,
    kernel: str,
    cache: Path | None = None,
) -> Profile:
    """Compiles a configuration and profiles one backward of it with ncu, at the clocks as they are.

    Args:
        problem: What is computed.
        config: The kernel's configuration.
        device: The current GPU.
        kernel: The kernel's name for the table.
        cache: Where builds are kept; None for the usual place.

    Raises:
        UsageError: The configuration is impossible for this problem and device.
        ProfileError: ncu is missing, was not allowed to read the counters, or failed.
        BwdtuneError: The kernel does not compile.
    """
    require_valid(problem, config, device)
    ncu = find_ncu()
    variant = build_one(render(problem, config), device.arch, cache=cache)
    target = [sys.executable, "-m", f"{__package__}.profile_target", str(variant.library), json.dumps(asdict(problem))]
    launches, counters, command = _collect(ncu, target)
    main = next((launch for launch in launches if MAIN_KERNEL in launch.kernel), None)
    if main is None:
        seen = ", ".join(launch.kernel for launch in launches) or "no launch at all"
        raise ProfileError(f"ncu saw {seen}, and no {MAIN_KERNEL}: is another profiler attached?")
    figures, notes = _figures(main, counters, device)
    latency_ms = sum(launch.milliseconds for launch in launches)
    return Profile(
        kernel=kernel,
        config=config.id,
        problem=problem,
        gpu=device.name,
        arch=device.arch,
        ncu=_version(ncu),
        command=shlex.join(command),
        latency_ms=latency_ms,
        kernel_ms=main.milliseconds,
        tflops=problem.flops / latency_ms / 1e9,
        figures=figures,
        notes=notes,
    )


def find_ncu() -> Path:
    """ncu, from PATH, the CUDA toolkit in use, or where NVIDIA's own packages put it.

    Raises:
        ProfileError: It is in none of them.
    """
    on_path = shutil.which("ncu")
    if on_path:
        return Path(on_path)
    places = [find_nvcc().root / "bin" / "ncu"]
    for root, pattern in ((find_nvcc().root, "nsight-compute*/ncu"), (Path("/opt/nvidia/nsight-compute"), "*/ncu")):
        places += sorted(root.glob(pattern), reverse=True)
    found = next((place for place in places if os.access(place, os.X_OK)), None)
    if found is None:
        raise ProfileError("ncu (Nsight Compute) was not found on PATH or in the CUDA toolkit: install nsight-compute")
    return found


def parse_raw_csv(text: str) -> list[Launch]:
    """Reads ncu's ``--csv --page raw``: a row of names, a row of units, then a row for each launch.

    Args:
        text: ncu's log; its own ``==PROF==`` lines may stand around the table.

    Raises:
        ProfileError: There is no such table.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ProfileError(f"ncu wrote no table of counters: {_complaint(text)}")
    names, *rows = (row for row in csv.reader(lines[start:]) if len(row) > 1)
    if not rows or _DURATION not in names:
        raise ProfileError(f"ncu's table has no {_DURATION}: {_complaint(text)}")
    units = dict(zip(names, rows[0], strict=False))
    return [_launch(dict(zip(names, row, strict=False)), units) for row in rows[1:]]


def _launch(row: Mapping[str, str], units: Mapping[str, str]) -> Launch:
    counters = {name: value for name, text in row.items() if (value := _number(text)) is not None}
    unit = units[_DURATION]
    if _DURATION not in counters or unit not in _MILLISECONDS:
        raise ProfileError(f"ncu gives {row['Kernel Name']} no duration: {row[_DURATION]!r} {unit!r}")
    return Launch(row["Kernel Name"], counters[_DURATION] * _MILLISECONDS[unit], counters)


def _number(text: str) -> float | None:
    """A figure as ncu prints it, with thousands separators; None for ``n/a`` and texts."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if value == value else None


def _collect(ncu: Path, target: Sequence[str]) -> tuple[list[Launch], dict[str, str], list[str]]:
    """Runs ncu, again with the next of a metric's counters where it does not know one.

    Returns:
        The launches, the counter of each metric that has one, and the command line that worked.
    """
    remaining = {metric.name: list(metric.counters) for metric in METRICS}
    while True:
        counters = {name: choices[0] for name, choices in remaining.items() if choices}
        command = [
            *(str(ncu), "--profile-from-start", "off", "--kernel-name", _KERNELS, "--clock-control", "none"),
            *("--metrics", ",".join([_DURATION, *counters.values()])),
            *("--csv", "--page", "raw", "--print-units", "base"),
        ]
        log = _run(command, target)
        unknown = set(re.findall(r"Failed to find metric \W*(?:regex:\W*)?(\w+)", log))
        refused = [name for name, counter in counters.items() if counter.partition(".")[0] in unknown]
        if not refused:
            return parse_raw_csv(log), counters, [*command, *target]
        for name in refused:
            remaining[name].pop(0)


def _run(command: Sequence[str], target: Sequence[str]) -> str:
    """Runs ncu on the target program.

    Returns:
        What ncu logged, or would have logged; the target's own output is not in it.

    Raises:
        ProfileError: ncu may not read the counters, the target failed, or it took too long.
    """
    with tempfile.TemporaryDirectory(prefix="bwdtune-profile-") as folder:
        log = Path(folder) / "ncu.log"
        process = subprocess.Popen(
            [*command, "--log-file", str(log), *target],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that ncu and its target can be ended together
        )
        try:
            output, errors = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ProfileError(f"ncu did not end within {_TIMEOUT_S} s: is the GPU busy?") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_text() if log.exists() else output
    if "ERR_NVGPUCTRPERM" in text + errors:
        raise ProfileError(
            "ncu may not read the GPU's counters: run as root, or have the driver loaded with "
            "NVreg_RestrictProfilingToAdminUsers=0"
        )
    if process.returncode and "Failed to find metric" not in text:
        raise ProfileError(f"ncu failed with exit status {process.returncode}: {_complaint(text + errors)}")
    return text


def _complaint(text: str) -> str:
    """The line of a log that says most: ncu's error, else its last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("==ERROR==")]
    return (errors or lines[-1:] or ["it wrote nothing"])[0]


def _figures(
    main: Launch, counters: Mapping[str, str], device: Device
) -> tuple[dict[str, float | None], dict[str, str]]:
    """The metrics of the main kernel, and a note for each that is missing or corrected."""
    figures: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    for metric in METRICS:
        counter = counters.get(metric.name)
        figures[metric.name] = main.counters.get(counter) if counter else None
        if counter is None:
            notes[metric.name] = f"n/a: ncu does not know {' or '.join(metric.counters)} on {device.name}"
        elif figures[metric.name] is None:
            notes[metric.name] = f"n/a: ncu read no value of {counter}"
    tensor = figures["tensor_pipe_percent"]
    halved = "GeForce" in device.name
    figures["tensor_utilization_percent"] = tensor * 2 if halved and tensor is not None else tensor
    if halved and tensor is not None:
        notes["tensor_utilization_percent"] = (
            "twice the counter, which ends at 50 % on GeForce cards for bf16 and fp16 with fp32 accumulation"
        )
    return figures, notes


def _version(ncu: Path) -> str:
    output = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"Version (\S+)", output)
    return match[1] if match else "unknown"


def _written(value: float | None, unit: str) -> str:
    """A figure as the write-up has it: 34.3M, 1.938B, 12.79%, 0.21."""
    if value is None:
        return "n/a"
    if unit == "percent":
        return f"{value:.2f}%"
    if unit == "ratio":
        return f"{value:.2f}"
    for scale, suffix, digits in ((1e9, "B", 3), (1e6, "M", 1), (1e3, "K", 1)):
        if value >= scale:
            return f"{value / scale:.{digits}f}{suffix}"
    return f"{value:.0f}"
