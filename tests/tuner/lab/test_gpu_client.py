"""The process that owns the GPU, on the CPU: whatever a candidate does, the next one is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from covering import valid_presets
from stub_kernels import stub_library

from bwdtune.gen.build.jobs import Variant, build_one
from bwdtune.gen.build.toolchain import ToolchainError
from bwdtune.gen.device import H200
from bwdtune.gen.families import PRESETS, Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import TEMPLATES, Source, render
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import Kernel
from bwdtune.tuner.lab.gpu_client import Worker
from bwdtune.tuner.lab.protocol import CandidateError, WorkerError
from bwdtune.tuner.lab.timing import Policy

PROBLEM = Problem.parse("1_2_33_32", causal=True)
QUICK = Policy(warmup_ms=1, budget_ms=5, min_samples=3, max_samples=5)


def variant(fault: str = "NONE", preset: str = "v1", *, library: Path | None = None) -> Variant:
    return Variant(
        source=Source("bf16_d32_causal", PRESETS[preset], "text"),
        arch="host",
        library=library or stub_library(head_dim=32, causal=True, fault=fault),
        key="key",
        toolchain="g++",
        resources=None,
        status="ok",
        error="",
        log=None,
        seconds=0.0,
        cached=False,
    )


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker("cpu") as worker:
        yield worker


def test_a_right_kernel_is_verified_and_timed(worker: Worker) -> None:
    assert worker.verify(PROBLEM, variant()).passed
    assert worker.verify_at(PROBLEM, variant()).passed
    timings = worker.time(PROBLEM, [variant(), variant(preset="v2")], ["fa", "cudnn"], QUICK)
    assert set(timings) == {PRESETS["v1"].id, PRESETS["v2"].id}
    assert set(timings.unavailable) == {"fa", "cudnn"}
    for timing in timings.values():
        assert 0 < timing.low_ms <= timing.median_ms <= timing.high_ms
        assert timing.samples >= 3


def test_a_race_that_nobody_can_run_in(worker: Worker) -> None:
    timings = worker.time(PROBLEM, [], ["fa", "cudnn"], QUICK)
    assert not timings
    assert timings.unavailable == dict.fromkeys(("fa", "cudnn"), "it runs on a GPU only")


def test_a_wrong_kernel_is_not_an_error_of_the_process(worker: Worker) -> None:
    record = worker.verify(PROBLEM, variant("OTHER_MASK"))
    assert not record.passed
    assert "relative error" in record.reason


@pytest.mark.parametrize("fault", ["HALF_OF_THE_ROWS", "NAN_TAIL"])
def test_a_kernel_that_does_not_fill_its_outputs_has_no_time(worker: Worker, fault: str) -> None:
    with pytest.raises(CandidateError, match="unwritten, or not finite") as error:
        worker.time(PROBLEM, [variant(), variant(fault, "v2")], [], QUICK)
    assert error.value.candidate == PRESETS["v2"].id


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"), [("SEGFAULT", "its process died of SIGSEGV"), ("ABORTS", "its process died of SIGABRT")]
)
def test_a_crash_costs_one_candidate(worker: Worker, fault: str, reason: str) -> None:
    with pytest.raises(CandidateError, match=reason) as error:
        worker.time(PROBLEM, [variant(), variant(fault, "v2"), variant(preset="v3")], [], QUICK)
    assert error.value.candidate == PRESETS["v2"].id
    with pytest.raises(CandidateError, match=reason) as error:
        worker.verify(PROBLEM, variant(fault))
    assert error.value.candidate == PRESETS["v1"].id
    assert worker.verify(PROBLEM, variant()).passed


@pytest.mark.slow
def test_a_hang_costs_one_candidate() -> None:
    with Worker("cpu", limit_s=20) as worker:
        assert worker.verify(PROBLEM, variant()).passed
        worker._limit_s = 1
        with pytest.raises(CandidateError, match="it hung: no answer in 1 s"):
            worker.verify(PROBLEM, variant("ENDLESS"))
        worker._limit_s = 20
        assert worker.verify(PROBLEM, variant()).passed


@pytest.mark.slow
def test_whoever_ends_it_tells_the_thread_that_waits() -> None:
    """At once, whatever a kernel does; and it stays ended."""
    worker, errors = Worker("cpu"), []

    def wait() -> None:
        with pytest.raises(WorkerError, match="was ended") as error:
            worker.verify(PROBLEM, variant("ENDLESS"))
        errors.append(error)

    assert worker.verify(PROBLEM, variant()).passed
    child = psutil.Process(worker._child._process.pid)
    thread = threading.Thread(target=wait)
    thread.start()
    until = child.cpu_times().user + 0.2
    while child.cpu_times().user < until:
        time.sleep(0.01)
    worker.close()
    thread.join(10)
    assert len(errors) == 1
    assert not child.is_running()
    with pytest.raises(WorkerError, match="was ended"):
        worker.verify(PROBLEM, variant())


def test_an_error_code_costs_one_candidate_and_not_the_process(worker: Worker) -> None:
    with pytest.raises(CandidateError, match="stub: unspecified launch failure"):
        worker.time(PROBLEM, [variant("ERROR_CODE")], [], QUICK)
    assert len(worker.time(PROBLEM, [variant()], [], QUICK)) == 1


def test_what_is_not_a_library(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(CandidateError, match="cannot load the kernel"):
        worker.verify(PROBLEM, variant(library=tmp_path / "missing.so"))


def test_a_gpu_that_is_not_there() -> None:
    pytest.importorskip("torch")
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with Worker("cuda:0") as worker, pytest.raises(WorkerError, match=r"PyTorch .* (built without CUDA|sees no GPU)"):
        worker.verify(PROBLEM, variant())


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
sys.path.insert(0, {here!r})
from test_gpu_client import PROBLEM, Worker, variant

if __name__ == "__main__":
    worker = Worker("cpu")
    worker.verify(PROBLEM, variant())
    print("child", worker._child._process.pid, flush=True)
    try:
        worker.verify(PROBLEM, variant("ENDLESS"))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        print(worker.verify(PROBLEM, variant()).passed, flush=True)
        worker.close()
"""


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A parent whose child hangs in a kernel, in a process group of its own."""
    here = Path(__file__).parent
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT.format(tests=str(here.parents[1] / "support"), here=str(here))))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout
    child = psutil.Process(int(process.stdout.readline().split()[1]))
    until = child.cpu_times().user + 0.2
    while child.cpu_times().user < until:  # it runs, and a kernel that never ends does
        time.sleep(0.01)
    yield process, child
    process.kill()
    process.wait()


def test_the_child_dies_with_its_parent(parent: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    process, child = parent
    process.kill()
    child.wait(10)


@pytest.mark.slow
def test_ctrl_c_is_the_parents_to_handle(parent: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    process, child = parent
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert output.split() == ["interrupted", "True"]
    assert process.returncode == 0
    child.wait(10)


GPU_PROBLEM = Problem.parse("1_2_130_64", causal=True)


def gpu_variant(config: Config = PRESETS["v2"], fault: str = "", arch: str = "") -> Variant:
    """A kernel of the templates, or one that ruins its context, for the first GPU or for an arch."""
    source = render(GPU_PROBLEM, config)
    if fault:
        header = (TEMPLATES / "common" / "interface.h").read_text()
        text = (Path(__file__).parents[2] / "support" / "faulty_kernel.cu").read_text()
        source = replace(source, text=f"#define FAULT {fault}\n{text}".replace('#include "interface.h"', header))
    return build_one(source, arch or current_device().arch)


@pytest.mark.parametrize("fault", ["ILLEGAL_ACCESS", "TRAP", "ENDLESS"])
def test_what_ruins_a_context_is_a_kernel_for_the_problem(fault: str) -> None:
    try:
        library = gpu_variant(fault=fault, arch=H200.arch).library
    except ToolchainError as error:
        pytest.skip(str(error))
    assert library
    faulty, good = Kernel.load(library).info, GPU_PROBLEM
    assert (faulty.dtype, faulty.head_dim, faulty.mask) == (good.dtype, good.head_dim, good.mask)


@pytest.fixture(scope="module")
def gpu_worker() -> Iterator[Worker]:
    with Worker(limit_s=60) as worker:
        yield worker


@pytest.mark.gpu
def test_on_a_gpu(gpu_worker: Worker) -> None:
    presets = valid_presets(GPU_PROBLEM, current_device()).values()
    variants = [gpu_variant(config) for config in presets]
    for variant in variants:
        for record in (gpu_worker.verify(GPU_PROBLEM, variant), gpu_worker.verify_at(GPU_PROBLEM, variant)):
            assert record.passed, record.reason
    timings = gpu_worker.time(GPU_PROBLEM, variants, ["fa", "cudnn"], QUICK)
    assert set(timings) | set(timings.unavailable) == {config.id for config in presets} | {"fa", "cudnn"}
    assert "fa" in timings
    assert all(0 < timing.median_ms < 10 for timing in timings.values())


@pytest.mark.gpu
@pytest.mark.parametrize("fault", ["ILLEGAL_ACCESS", "TRAP"])
def test_a_ruined_context_costs_one_candidate(gpu_worker: Worker, fault: str) -> None:
    """CASES B01: the third of six candidates."""
    good = gpu_variant()
    for candidate in (good, good, gpu_variant(fault=fault), good, good, good):
        if candidate is good:
            assert gpu_worker.verify(GPU_PROBLEM, good).passed
            assert gpu_worker.time(GPU_PROBLEM, [good], [], QUICK)
        else:
            with pytest.raises(CandidateError, match=r"CUDA|illegal|trap|launch"):
                gpu_worker.verify(GPU_PROBLEM, candidate)
    with pytest.raises(CandidateError) as error:
        gpu_worker.time(GPU_PROBLEM, [good, gpu_variant(PRESETS["v1"], fault)], ["fa"], QUICK)
    assert error.value.candidate == PRESETS["v1"].id


@pytest.mark.gpu
def test_a_kernel_that_never_ends_costs_one_candidate() -> None:
    good, endless = gpu_variant(), gpu_variant(fault="ENDLESS")
    with Worker(limit_s=60) as worker:
        assert worker.verify(GPU_PROBLEM, good).passed
        worker._limit_s = 5
        with pytest.raises(CandidateError, match="it hung: no answer in 5 s"):
            worker.verify(GPU_PROBLEM, endless)
        worker._limit_s = 60
        assert worker.verify(GPU_PROBLEM, good).passed


@pytest.mark.gpu
def test_a_problem_that_does_not_fit(gpu_worker: Worker) -> None:
    with pytest.raises(WorkerError, match="too little free memory"):
        gpu_worker.time(Problem.parse("64_128_65536_64", causal=True), [gpu_variant()], [], QUICK)
    assert gpu_worker.verify(GPU_PROBLEM, gpu_variant()).passed
