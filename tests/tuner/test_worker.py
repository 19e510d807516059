"""The process that owns the GPU, on the CPU: whatever a candidate does, the next one is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from stub_kernels import stub_library

from bwdtune.gen.build import Variant
from bwdtune.gen.config import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source
from bwdtune.tuner.timing import Policy
from bwdtune.tuner.worker import CandidateError, Worker, WorkerError

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


def test_a_wrong_kernel_is_not_an_error_of_the_process(worker: Worker) -> None:
    record = worker.verify(PROBLEM, variant("OTHER_MASK"))
    assert not record.passed
    assert "relative error" in record.reason


@pytest.mark.parametrize("fault", ["HALF_OF_THE_ROWS", "NAN_TAIL"])
def test_a_kernel_that_does_not_fill_its_outputs_has_no_time(worker: Worker, fault: str) -> None:
    with pytest.raises(CandidateError, match="unwritten, or not finite") as error:
        worker.time(PROBLEM, [variant(), variant(fault, "v2")], [], QUICK)
    assert error.value.candidate == PRESETS["v2"].id


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


def test_a_hang_costs_one_candidate() -> None:
    with Worker("cpu", limit_s=20) as worker:
        assert worker.verify(PROBLEM, variant()).passed
        worker._limit_s = 1
        with pytest.raises(CandidateError, match="it hung: no answer in 1 s"):
            worker.verify(PROBLEM, variant("ENDLESS"))
        worker._limit_s = 20
        assert worker.verify(PROBLEM, variant()).passed


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
from test_worker import PROBLEM, Worker, variant

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
    script.write_text(textwrap.dedent(PARENT.format(tests=str(here.parent), here=str(here))))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout
    child = psutil.Process(int(process.stdout.readline().split()[1]))
    time.sleep(0.5)
    yield process, child
    process.kill()
    process.wait()


def test_the_child_dies_with_its_parent(parent: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    process, child = parent
    process.kill()
    child.wait(10)


def test_ctrl_c_is_the_parents_to_handle(parent: tuple[subprocess.Popen[str], psutil.Process]) -> None:
    process, child = parent
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert output.split() == ["interrupted", "True"]
    assert process.returncode == 0
    child.wait(10)
