"""`tuner doctor`: what is wrong is said in a line, with what to do, on whatever machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from search_fakes import ENVIRONMENT, FakeBuilder

from bwdtune.db import shipped
from bwdtune.db.models import SCHEMA
from bwdtune.db.records import MeasurementRecord, VariantRecord, VerificationRecord
from bwdtune.db.store import Store
from bwdtune.gen.build.jobs import Variant
from bwdtune.gen.device import H200, RTX_5090
from bwdtune.gen.families import PRESETS, Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime import gpu
from bwdtune.runtime.dispatch import diagnosis as diagnosing
from bwdtune.runtime.dispatch.diagnosis import Diagnosis, diagnose
from bwdtune.runtime.dispatch.records import Cause
from bwdtune.runtime.dispatch.rows import read_rows
from bwdtune.tuner import doctor
from bwdtune.tuner.cli import main

FIXTURES = Path(__file__).parents[2] / "db" / "fixtures"
NEWEST = FIXTURES / f"schema_{int(SCHEMA)}.sqlite"
PROBLEM = Problem.parse("8_16_4096_128", causal=True)
NAMES = [
    "bwdtune",
    "GPU",
    "driver",
    "nvcc",
    "C++ compiler",
    "PyTorch",
    "operator",
    "database",
    "cache",
    "shipped table",
    "settings",
]


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, str]]:
    """What is found, by name; the exit status says whether anything is wrong."""
    capsys.readouterr()
    status = main(["doctor", "--json", *arguments])
    said = json.loads(capsys.readouterr().out)
    found = {one["name"]: one for one in said["findings"]}
    assert status == (1 if any(one["status"] == "fault" for one in said["findings"]) else 0)
    assert all(one["text"].isprintable() for one in found.values())
    return found


@pytest.fixture(autouse=True)
def _no_kernel_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another test may have compiled the one that is diagnosed here."""
    monkeypatch.setenv("BWDTUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shipped_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """This version's own, which tests do not see otherwise."""
    monkeypatch.setattr(shipped, "TABLE", Path(shipped.__file__).with_name("shipped.json"))


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and all that kernels need."""
    monkeypatch.setattr(gpu, "current_device", lambda index=None: H200)
    monkeypatch.setattr(gpu, "gpu_uuid", lambda index: "GPU-test")
    monkeypatch.setattr(gpu, "power_limit_w", lambda index: 700.0)
    monkeypatch.setattr(gpu, "compute_processes", lambda index: 0)
    monkeypatch.setattr(gpu, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(gpu, "gpu_state", lambda index: gpu.GpuState(clock_mhz=1755.0))
    monkeypatch.setattr(doctor, "driver_release", lambda: (13, 0))
    monkeypatch.setattr(doctor, "find_nvcc", lambda: Nvcc())


class Nvcc:
    version, nvcc, release = "13.0.88", Path("/cuda/bin/nvcc"), (13, 0)

    def check_arch(self, arch: str) -> None: ...


@pytest.mark.usefixtures("shipped_table")
def test_a_machine_without_a_gpu_has_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever this one is: nothing raises, and the GPU's absence is no more than a warning."""
    found = asked(capsys)
    assert list(found) == NAMES
    if found["GPU"]["status"] != "ok":
        assert found["GPU"]["status"] == "warn"
        assert found["driver"]["status"] == "ok"
    for name in ("bwdtune", "database", "cache", "shipped table", "settings"):
        assert found[name]["status"] == "ok", found[name]


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) in (0, 1)
    text = capsys.readouterr().out
    assert all(name in text for name in NAMES)


@pytest.mark.usefixtures("whole", "shipped_table")
def test_a_machine_with_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = asked(capsys)
    assert {one["status"] for one in found.values()} == {"ok"}, found
    assert "GPU-test" in found["GPU"]["text"]
    assert "700 W" in found["GPU"]["text"]
    assert "for such a GPU" in found["shipped table"]["text"]


def _raises(error: Exception) -> Callable[..., Any]:
    def raising(*unused: object) -> None:
        raise error

    return raising


def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _blind(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def _no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)


def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")


WRONG: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], str, str, str]] = {
    "an old GPU": (
        lambda patch: patch.setattr(gpu, "current_device", _raises(doctor.BwdtuneError("it is an A100"))),
        "GPU",
        "fault",
        "it is an A100",
    ),
    "a busy GPU": (
        lambda patch: patch.setattr(gpu, "compute_processes", lambda index: 2),
        "GPU",
        "warn",
        "2 processes compute on it",
    ),
    "an old driver": (
        lambda patch: patch.setattr(doctor, "driver_release", lambda: (12, 9)),
        "nvcc",
        "fault",
        "the driver does not load what it makes",
    ),
    "no management library": (
        lambda patch: patch.setattr(gpu, "gpu_state", lambda index: gpu.GpuState()),
        "driver",
        "warn",
        "no clocks",
    ),
    "no nvcc": (
        lambda patch: patch.setattr(doctor, "find_nvcc", _raises(doctor.ToolchainError("nvcc is not found"))),
        "nvcc",
        "fault",
        "nvcc is not found",
    ),
    "no C++ compiler": (_no_compiler, "C++ compiler", "fault", "/nowhere/g++"),
    "PyTorch without CUDA": (_no_cuda, "PyTorch", "fault", "built without CUDA"),
    "PyTorch for another driver": (_blind, "PyTorch", "fault", "sees no GPU, and the driver is for 13.0"),
    "an old PyTorch": (lambda patch: patch.setattr(doctor, "version", lambda name: "2.5.1"), "PyTorch", "fault", "old"),
    "a broken PyTorch": (_no_torch, "PyTorch", "fault", "cannot be imported"),
    "a setting that means nothing": (
        lambda patch: patch.setenv("BWDTUNE_ON_MISS", "perhaps"),
        "settings",
        "fault",
        "BWDTUNE_ON_MISS is 'perhaps'",
    ),
    "no number of jobs": (lambda patch: patch.setenv("MAX_JOBS", "many"), "settings", "fault", "MAX_JOBS"),
    "no shipped table": (
        lambda patch: patch.setattr(doctor, "read_shipped", lambda: ()),
        "shipped table",
        "fault",
        "no row",
    ),
    "something nobody has thought of": (
        lambda patch: patch.setattr(doctor, "find_nvcc", _raises(RuntimeError("what\nis this?"))),
        "nvcc",
        "fault",
        "RuntimeError: what is this?",
    ),
}


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    do, name, status, text = WRONG[what]
    do(monkeypatch)
    findings = [one for one in doctor.examine() if one.name == name]
    (found,) = [one for one in findings if one.status.value == status]
    assert text in found.text
    assert found.advice or status == "fault"


class TestDatabase:
    def found(self, capsys: pytest.CaptureFixture[str], path: Path) -> tuple[str, str]:
        one = asked(capsys, "--db", str(path))["database"]
        assert str(path) in one["text"]
        return one["status"], one["text"]

    def test_what_is_in_it(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = Path(shutil.copy(NEWEST, tmp_path))
        assert self.found(capsys, path) == ("ok", f"{path}: 3 winners, 3 searches")

    def test_none_yet(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        status, text = self.found(capsys, tmp_path / "folder" / "none.sqlite")
        assert (status, "the first search makes it" in text) == ("ok", True)
        assert not (tmp_path / "folder").exists()

    def test_an_older_one(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = Path(shutil.copy(FIXTURES / "schema_1.sqlite", tmp_path))
        before = path.read_bytes()
        status, text = self.found(capsys, path)
        assert (status, "older schema" in text) == ("warn", True)
        assert path.read_bytes() == before

    def test_none_at_all(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = tmp_path / "notes.txt"
        path.write_text("these are notes, not results\n")
        status, text = self.found(capsys, path)
        assert (status, "is not a database" in text) == ("fault", True)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_one_that_can_only_be_read(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = Path(shutil.copy(NEWEST, tmp_path))
        path.chmod(0o444)
        status, text = self.found(capsys, path)
        assert (status, "can only be read" in text) == ("warn", True)

    def test_one_that_lies_in_two_files(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        """What a search that was killed leaves."""
        path = tmp_path / "results.sqlite"
        with closing(Store.open(path)) as store:
            store_winner(store, errors={"x": {"y" * 2 * doctor._LARGE_LOG_BYTES: 1.0}})
            status, text = self.found(capsys, path)
        assert (status, "results.sqlite-wal" in text) == ("warn", True)
        assert self.found(capsys, path)[0] == "ok"


def test_a_cache_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = asked(capsys, "--cache", str(tmp_path / "file" / "cache"))["cache"]
    assert found["status"] == "fault"
    assert "cannot write to the cache directory" in found["text"]


# What a problem misses


def store_winner(
    store: Store,
    problem: Problem = PROBLEM,
    config: Config = PRESETS["v2"],
    *,
    machine_code: str | None = "code",
    source_hash: str | None = None,
    errors: Any = None,
    **measured: Any,
) -> None:
    record = MeasurementRecord(ENVIRONMENT, "race-1", 4.0, 3.9, 4.1, 30, default_ms=6.0, default_kernel="cudnn")
    record = replace(record, **measured)
    variant = VariantRecord(
        config,
        source_hash or render(problem, config).hash,
        "templates",
        record.environment.arch,
        record.environment.toolkit,
        machine_code=machine_code,
    )
    variant_id = store.record_variant(problem, variant)
    verdict = store.record_verification(problem, variant_id, VerificationRecord(True, 2e-3, errors or {}))
    measurement = store.record_measurement(problem, variant_id, record)
    store.set_winner(problem, record.environment, None, measurement, verdict)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "results.sqlite"


@pytest.fixture(autouse=True)
def _nothing_is_shipped(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "database" in request.fixturenames:
        monkeypatch.setattr("bwdtune.runtime.dispatch.rows.read_shipped", lambda: ())


def diagnosed(database: Path, problem: Problem, device: Any = H200) -> Diagnosis:
    return diagnose(problem, device, read_rows(database))


@pytest.mark.parametrize(
    ("changes", "differing", "excludes"),
    [
        ({"dtype": "fp16"}, {"dtype": ("bf16", "fp16")}, True),
        ({"head_dim": 64}, {"head_dim": ("128", "64")}, True),
        ({"causal": False}, {"mask": ("causal", "full")}, True),
        ({"window_left": 512}, {"mask": ("causal", "window")}, True),
        ({"softcap": True}, {"softcap": ("False", "True")}, True),
        (
            {"deterministic": True, "varlen": True},
            {"varlen": ("False", "True"), "deterministic": ("False", "True")},
            True,
        ),
        ({"bottom_right": True}, {"bottom_right": ("False", "True")}, True),
        ({"seqlen_q": 2048}, {"seqlen_q": ("4096", "2048")}, False),
        ({"heads_kv": 4, "batch": 9}, {"batch": ("8", "9"), "heads_kv": ("16", "4")}, False),
        ({}, {}, False),
    ],
)
def test_which_field_of_the_key_differs(
    database: Path, changes: dict[str, Any], differing: dict[str, tuple[str, str]], excludes: bool
) -> None:
    with closing(Store.open(database)) as store:
        store_winner(store)
    found = diagnosed(database, replace(PROBLEM, **changes))
    (near,) = found.nearby
    of_the_key = {one.name: (one.stored, one.here) for one in near.differences if one.name not in ("nvcc", "source")}
    assert of_the_key == differing
    assert any(one.excludes for one in near.differences) == excludes
    assert (found.choice.cause == Cause.NOTHING_STORED) == excludes
    assert excludes or found.choice.row == near.row


def test_limits_of_a_window_are_a_matter_of_degree(database: Path) -> None:
    window = replace(PROBLEM, window_left=512)
    with closing(Store.open(database)) as store:
        store_winner(store, window)
    (near,) = diagnosed(database, replace(window, window_left=256)).nearby
    named = {one.name: (one.stored, one.here, one.excludes) for one in near.differences}
    assert named["window"] == ("512,0", "256,0", False)


def test_another_card(database: Path) -> None:
    with closing(Store.open(database)) as store:
        store_winner(store)
    (near,) = diagnosed(database, PROBLEM, RTX_5090).nearby
    assert [(one.name, one.excludes) for one in near.differences] == [("GPU", True)]
    assert near.differences[0].stored == f"{H200.name} (9.0)"


def test_one_that_is_too_far(database: Path) -> None:
    with closing(Store.open(database)) as store:
        store_winner(store)
    found = diagnosed(database, replace(PROBLEM, seqlen_q=128, seqlen_kv=128))
    assert found.choice.cause == Cause.OUT_OF_REACH
    assert "too far" in found.nearby[0].obstacle


def test_one_that_pytorch_beats(database: Path) -> None:
    with closing(Store.open(database)) as store:
        store_winner(store, default_ms=3.0)
    found = diagnosed(database, PROBLEM)
    assert found.choice.cause == Cause.SLOWER
    assert "PyTorch's own was faster" in found.nearby[0].obstacle


@pytest.mark.parametrize(
    ("here", "code", "differing"),
    [
        (ENVIRONMENT.toolkit, "code", {}),
        (ENVIRONMENT.toolkit, "other", {"machine code": True}),
        ("12.8.93", "other", {"nvcc": False, "machine code": False}),
        ("12.8.93", None, {"nvcc": False}),
    ],
)
def test_the_toolkit_and_the_machine_code(
    database: Path, monkeypatch: pytest.MonkeyPatch, here: str, code: str | None, differing: dict[str, bool]
) -> None:
    def find_built(source: Any, arch: str, *, cache: Any = None) -> list[Variant]:
        if code is None:
            return []
        variant = replace(FakeBuilder()(source, arch), toolchain=here)
        variant.__dict__["machine_code"] = code
        return [variant]

    monkeypatch.setattr(diagnosing, "find_built", find_built)
    monkeypatch.setattr(diagnosing, "find_compiler", lambda arch: Here(here))
    with closing(Store.open(database)) as store:
        store_winner(store)
    (near,) = diagnosed(database, PROBLEM).nearby
    assert {one.name: one.excludes for one in near.differences} == differing


class Here:
    def __init__(self, version: str) -> None:
        self.version = version


@pytest.mark.parametrize("machine_code", ["code", None])
def test_another_text(database: Path, machine_code: str | None) -> None:
    """It excludes what is known by its text alone."""
    with closing(Store.open(database)) as store:
        store_winner(store, source_hash="the text of before", machine_code=machine_code)
    found = diagnosed(database, PROBLEM)
    sources = [one.excludes for one in found.nearby[0].differences if one.name == "source"]
    assert sources == [machine_code is None]
    assert (found.choice.cause == Cause.UNUSABLE) == (machine_code is None)


def test_the_nearest_come_first(database: Path) -> None:
    with closing(Store.open(database)) as store:
        for batch in (1, 2, 4, 16, 32, 64, 128):
            store_winner(store, replace(PROBLEM, batch=batch))
        store_winner(store, replace(PROBLEM, dtype="fp16"))
    assert [near.row.problem.batch for near in diagnosed(database, PROBLEM).nearby] == [4, 16, 2, 32, 1]


def test_a_miss_on_the_command_line(database: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Store.open(database)) as store:
        store_winner(store)
    arguments = ["doctor", "--db", str(database), "--arch", "sm_90a", "--shape", "8_16_4096_128"]
    assert main(arguments) in (0, 1)
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "mask: causal, not full" in text
    assert "tuner search --shape 8_16_4096_128" in text
    main([*arguments, "--causal", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert said["findings"][-1]["name"] == "kernel"
    assert said["findings"][-1]["status"] == "warn"
    assert "yet to be compiled" in said["findings"][-1]["text"]
    assert said["kernel"]["config"] == PRESETS["v2"].id
    assert [one["name"] for one in said["kernel"]["nearby"][0]["differences"]] in ([], ["nvcc"])


@pytest.mark.usefixtures("shipped_table")
def test_what_is_shipped_is_near(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["doctor", "--json", "--arch", "sm_90a", "--db", str(tmp_path / "none"), "--shape", "8_16_4096_128"])
    nearby = json.loads(capsys.readouterr().out)["kernel"]["nearby"]
    assert [one["shipped"] for one in nearby] == [True] * diagnosing.NEARBY


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--shape", "8-16"], "malformed shape"), (["--shape", "1_1_64_64", "--arch", "sm_10"], "unknown arch")],
)
def test_wrong_use(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(["doctor", *arguments]) == 2
    assert said in capsys.readouterr().err
