from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from bwdtune.db.records import Environment, GpuKey, Winner
from bwdtune.gen.build.jobs import build_one
from bwdtune.gen.build.toolchain import ToolchainError, find_host_compiler, find_nvcc
from bwdtune.gen.errors import UsageError
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import TEMPLATES, render, template_hash
from bwdtune.runtime.gpu import current_device
from bwdtune.tuner.commands import export as module
from bwdtune.tuner.commands.export import HEADER, MANIFEST, ExportError, export_config, export_winner

CAUSAL = Problem.parse("8_16_4096_128", causal=True)
FULL_FP16 = Problem.parse("8_16_4096_64", dtype="fp16")
FAKE_RUNTIME = Path(__file__).parents[2] / "support" / "fake_cuda_runtime.cpp"


@pytest.fixture
def winner() -> Winner:
    source = render(CAUSAL, PRESETS["v3"])
    return Winner(
        problem=CAUSAL,
        config=PRESETS["v3"],
        environment=Environment(GpuKey("NVIDIA H200", "9.0"), "sm_90a", "580.65.06", "13.0.88", "2.11.0"),
        source_hash=source.hash,
        template_hash=template_hash("mma"),
        median_ms=7.1,
        low_ms=7.05,
        high_ms=7.2,
        max_error=0.0026,
        registers=254,
        spill_bytes=0,
        shared_memory_bytes=73_744,
        partial=False,
        policy="race",
        limits=None,
        created_at=datetime(2026, 9, 1, 12, 30),
    )


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_source_is_exported_byte_for_byte(tmp_path):
    result = export_config(CAUSAL, PRESETS["v3"], "sm_120a", tmp_path / "out")
    source = render(CAUSAL, PRESETS["v3"])
    exported = (tmp_path / "out" / f"{source.name}.cu").read_bytes()
    assert exported == source.text.encode()
    assert hashlib.sha256(exported).hexdigest()[:16] == source.hash == result.source_hash
    assert (tmp_path / "out" / HEADER).read_text() == (TEMPLATES / "common" / "interface.h").read_text()
    assert set(contents(tmp_path / "out")) == set(result.files)


def test_the_same_export_has_the_same_bytes(tmp_path, winner):
    export_winner(winner, tmp_path / "a")
    export_winner(winner, tmp_path / "b" / "deeper")
    assert contents(tmp_path / "a") == contents(tmp_path / "b" / "deeper")


def test_readme_tells_configuration_provenance_and_build_line(tmp_path, winner):
    export_winner(winner, tmp_path)
    readme = (tmp_path / "README.md").read_text()
    measured = ("NVIDIA H200", "580.65.06", "13.0.88", "7.1", "0.0026", "2026-09-01T12:30:00 UTC")
    for fact in ("`v3`", "| block_q | 32 |", *measured):
        assert fact in readme
    assert "nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o example example.cu" in readme
    assert "exactly as it was timed" in readme
    assert json.loads((tmp_path / MANIFEST).read_text())["measurement"]["median_ms"] == 7.1


def test_what_was_not_measured_says_so(tmp_path):
    assert export_config(CAUSAL, PRESETS["v2"], "sm_120a", tmp_path).measurement is None
    readme = (tmp_path / "README.md").read_text()
    assert "Not measured" in readme
    assert "timed" not in readme


def test_a_winner_of_other_templates_is_refused(tmp_path, winner):
    with pytest.raises(ExportError, match=r"templates have changed.*tuner search") as caught:
        export_winner(replace(winner, source_hash="0" * 16), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("machine_code", "exported"), [("the winner's", True), ("another", False), (None, False)])
def test_other_text_of_a_winners_machine_code_is_exported(tmp_path, monkeypatch, winner, machine_code, exported):
    monkeypatch.setattr(module, "build_one", lambda source, arch: SimpleNamespace(machine_code=machine_code))
    before = replace(winner, source_hash="0" * 16, machine_code="the winner's")
    if exported:
        assert export_winner(before, tmp_path / "out").source_hash == winner.source_hash
    else:
        with pytest.raises(ExportError, match="templates have changed"):
            export_winner(before, tmp_path / "out")


@pytest.mark.parametrize(
    ("arch", "message"), [("sm_75", "unknown arch"), ("host", "choose a GPU's arch")], ids=["unknown", "host"]
)
def test_arch_must_be_a_gpus(tmp_path, arch, message):
    with pytest.raises(UsageError, match=message):
        export_config(CAUSAL, PRESETS["v3"], arch, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_impossible_configuration_is_refused(tmp_path):
    config = replace(PRESETS["v1"], stages=3)
    with pytest.raises(UsageError, match="shared memory"):
        export_config(CAUSAL, config, "sm_120a", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_earlier_export_is_replaced_and_the_rest_left_alone(tmp_path):
    export_config(CAUSAL, PRESETS["v3"], "sm_120a", tmp_path)
    (tmp_path / "example").write_text("a binary that was built here")
    result = export_config(FULL_FP16, PRESETS["v2"], "sm_120a", tmp_path)
    assert set(contents(tmp_path)) == {*result.files, "example"}


def test_foreign_files_are_not_touched(tmp_path):
    (tmp_path / "README.md").write_text("my notes")
    with pytest.raises(ExportError, match="not empty"):
        export_config(CAUSAL, PRESETS["v3"], "sm_120a", tmp_path)
    assert contents(tmp_path) == {"README.md": b"my notes"}


def test_a_file_that_was_edited_is_not_overwritten(tmp_path):
    export_config(CAUSAL, PRESETS["v3"], "sm_120a", tmp_path)
    (tmp_path / "example.cu").write_text("my changes")
    before = contents(tmp_path)
    with pytest.raises(ExportError, match=r"example\.cu was changed"):
        export_config(CAUSAL, PRESETS["v2"], "sm_120a", tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"files": {"../secret": "0"}}', '{"files": []}'])
def test_a_manifest_that_is_not_ours_protects_the_directory(tmp_path, manifest):
    secret = tmp_path / "secret"
    secret.write_text("keep")
    directory = tmp_path / "out"
    directory.mkdir()
    (directory / MANIFEST).write_text(manifest)
    with pytest.raises(ExportError, match="not empty"):
        export_config(CAUSAL, PRESETS["v3"], "sm_120a", directory)
    assert secret.read_text() == "keep"


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ExportError, match=r"cannot write to .*file") as caught:
            export_config(CAUSAL, PRESETS["v3"], "sm_120a", directory)
        assert "\n" not in str(caught.value)


def build_by_readme(directory: Path, arch: str) -> Path:
    """Runs the nvcc line of the README as a person would; returns the example."""
    try:
        nvcc = find_nvcc()
        nvcc.check_arch(arch)
    except ToolchainError as error:
        pytest.skip(str(error))
    lines = [line.strip() for line in (directory / "README.md").read_text().splitlines()]
    line = next(line for line in lines if line.startswith("nvcc") and "-o example" in line)
    environment = {**os.environ, "PATH": f"{nvcc.nvcc.parent}:{os.environ['PATH']}"}
    subprocess.run(line.split(), cwd=directory, env=environment, check=True)
    return directory / "example"


FEATURED = (
    Problem.parse("8_16_4096_72", window_left=50, window_right=20, bottom_right=True, deterministic=True),
    Problem.parse("8_16_4096_64", causal=True, bottom_right=True, varlen=True, softcap=True),
    Problem.parse("8_16_4096_64", dtype="fp16", window_left=9, causal=True, varlen=True, deterministic=True),
    Problem.parse("8_16_4096_64", causal=True, lse_grad=True),
    Problem.parse("8_16_4096_64", causal=True, bottom_right=True, sink=True, lse_grad=True),
    Problem.parse("8_16_4096_64", dtype="fp16", window_left=9, varlen=True, sink=True, alibi=True),
    Problem.parse("8_16_4096_64", causal=True, alibi=True, bias="1_H_S", bias_dtype="fp32", bias_grad=True),
)
VALUES = Problem.parse("8_16_4096_128x64", causal=True)
KINDS = pytest.mark.parametrize(
    ("problem", "preset"),
    [(CAUSAL, "v3"), (FULL_FP16, "v2"), *((problem, "v2") for problem in FEATURED), (VALUES, "w64")],
    ids=lambda value: getattr(value, "kernel_spec", value),
)


@pytest.mark.slow
@pytest.mark.parametrize(("problem", "arch"), [(CAUSAL, "sm_120a"), (FULL_FP16, "sm_90a")], ids=["sm_120a", "sm_90a"])
def test_the_build_line_of_the_readme_builds(tmp_path, problem, arch):
    export_config(problem, PRESETS["v3"], arch, tmp_path)
    assert os.access(build_by_readme(tmp_path, arch), os.X_OK)


@pytest.mark.gpu
@KINDS
def test_the_example_passes_on_the_gpu(tmp_path, problem, preset):
    arch = current_device().arch
    export_config(problem, PRESETS[preset], arch, tmp_path)
    result = subprocess.run([build_by_readme(tmp_path, arch)], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "PASSED"


@pytest.mark.slow
def test_cmake_builds(tmp_path):
    try:
        nvcc = find_nvcc()
    except ToolchainError as error:
        pytest.skip(str(error))
    if shutil.which("cmake") is None:
        pytest.skip("cmake is not installed")
    export_config(CAUSAL, PRESETS["v3"], "sm_120a", tmp_path)
    build = tmp_path / "build"
    configure = ["cmake", "-S", tmp_path, "-B", build, f"-DCMAKE_CUDA_COMPILER={nvcc.nvcc}"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build], check=True, capture_output=True)
    assert {"example", "libbwdtune_backward.so"} <= {path.name for path in build.iterdir()}


@pytest.fixture
def example_on_host(tmp_path):
    """Builds an exported example against the kernel as plain C++ and a CUDA runtime whose memory is the CPU's."""

    def make(problem: Problem, config, *, kernel=None) -> Path:
        try:
            include = find_nvcc().root / "include"
            compiler = find_host_compiler()
        except ToolchainError as error:
            pytest.skip(str(error))
        directory = tmp_path / "export"
        export_config(problem, config, "sm_90a", directory)
        library = build_one(kernel or render(problem, config), "host").library
        assert library is not None
        program = tmp_path / "example"
        command = [*compiler.program, "-std=c++17", "-Og", f"-I{include}", "-x", "c++"]
        command += [str(directory / "example.cu"), str(FAKE_RUNTIME)]
        command += ["-x", "none", str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)]
        subprocess.run(command, check=True)
        return program

    return make


@pytest.mark.slow
@KINDS
def test_the_example_accepts_a_right_kernel(example_on_host, problem, preset):
    result = subprocess.run([example_on_host(problem, PRESETS[preset])], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert (len(lines), lines[-1]) == (7 if problem.varlen else 6, "PASSED")
    for gradient in (
        "dQ",
        "dK",
        "dV",
        *(("dSink",) if problem.sink else ()),
        *(("dBias",) if problem.bias_grad else ()),
    ):
        assert all(f"  {gradient} 0.00" in line for line in lines[1:-1])


@pytest.mark.slow
def test_the_example_refuses_a_wrong_kernel(example_on_host):
    wrong = render(replace(CAUSAL, causal=False), PRESETS["v3"])
    result = subprocess.run([example_on_host(CAUSAL, PRESETS["v3"], kernel=wrong)], capture_output=True, text=True)
    assert result.returncode == 1
    assert "WRONG" in result.stdout
    assert result.stdout.splitlines()[-1] == "FAILED"
