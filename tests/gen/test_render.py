from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest

from bwdtune.gen.device import H200
from bwdtune.gen.families import FAMILIES, PRESETS, Config, MmaConfig
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import TEMPLATES, environment, render, template_files, template_hash
from bwdtune.gen.space import refusal

SEED = Problem.parse("8_16_4096_128", causal=True)


def code(problem: Problem, config: Config) -> str:
    """The rendered text without the lines that name the configuration."""
    return "\n".join(line for line in render(problem, config).text.splitlines() if config.id not in line)


@pytest.mark.parametrize("name", MmaConfig.choices)
def test_each_value_of_a_parameter_changes_the_code(name: str) -> None:
    texts = [code(SEED, dataclasses.replace(PRESETS["v2"], **{name: value})) for value in MmaConfig.choices[name]]
    assert all(a != b for a, b in itertools.combinations(texts, 2))


def test_each_way_to_add_to_dq_has_its_code() -> None:
    problem = dataclasses.replace(SEED, head_dim=64)
    ways = ({}, {"dq_vector": 2}, {"dq_vector": 1}, {"dq_bulk_reduce": True})
    texts = [code(problem, dataclasses.replace(PRESETS["t64"], **way)) for way in ways]
    assert all(a != b for a, b in itertools.combinations(texts, 2))


def test_dtype_head_dim_and_mask_change_the_code() -> None:
    problems = [
        Problem.parse(f"8_16_4096_{head_dim}", dtype=dtype, causal=causal)
        for head_dim in (64, 128)
        for dtype in ("bf16", "fp16")
        for causal in (False, True)
    ]
    texts = [code(problem, PRESETS["v3"]) for problem in problems]
    assert len(set(texts)) == len(problems)


def test_every_feature_changes_the_code() -> None:
    features = [
        {},
        {"bottom_right": True},
        {"window_left": 5},
        {"softcap": True},
        {"varlen": True},
        {"deterministic": True},
        {"lse_grad": True},
        {"sink": True},
    ]
    problems = [Problem.parse("8_16_4096_128", causal=True, **feature) for feature in features]
    texts = [code(problem, PRESETS["v3"]).replace(problem.kernel_spec, "") for problem in problems]
    assert all(a != b for a, b in itertools.combinations(texts, 2))


def test_limits_of_windows_do_not_change_the_text() -> None:
    texts = {render(Problem.parse("8_16_4096_128", window_left=left, causal=True), PRESETS["v3"]) for left in (1, 4096)}
    assert len(texts) == 1


def test_a_configuration_that_is_refused_has_a_text_too() -> None:
    """Databases hold them, and tests that draw any."""
    both = dataclasses.replace(PRESETS["w64conv"], delta_in_kernel=True)
    assert refusal(SEED, both, H200)
    assert both.id in render(SEED, both).text


def test_sizes_do_not_change_the_text() -> None:
    other = Problem("bf16", 1, 32, 8, 77, 1000, 128, causal=True)
    assert render(other, PRESETS["v3"]) == render(SEED, PRESETS["v3"])


def test_rendering_is_the_same_in_another_process() -> None:
    program = (
        "from bwdtune.gen.families import PRESETS; from bwdtune.gen.problem import Problem;"
        "from bwdtune.gen.render import render, template_hash;"
        "print(render(Problem.parse('8_16_4096_128', causal=True), PRESETS['v1']).hash, template_hash('mma'))"
    )
    hashes = [
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, text=True, capture_output=True, check=True
        ).stdout.split()
        for seed in ("0", "1")
    ]
    assert hashes[0] == hashes[1] == [render(SEED, PRESETS["v1"]).hash, template_hash("mma")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_hash_covers_what_the_kernels_read(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file that rendering opens, in whatever folder, is one that the hash covers."""
    opened: set[str] = set()
    read_text, get_source = Path.read_text, jinja2.FileSystemLoader.get_source

    def read(path: Path, *args: Any, **options: Any) -> str:
        opened.add(path.relative_to(TEMPLATES).as_posix())
        return read_text(path, *args, **options)

    def load(loader: jinja2.FileSystemLoader, environment: jinja2.Environment, name: str) -> Any:
        opened.add(name)
        return get_source(loader, environment, name)

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(jinja2.FileSystemLoader, "get_source", load)
    files = template_files(family)
    opened.clear()
    environment().cache.clear()
    for config in (config for config in PRESETS.values() if config.family == family):
        for problem in (SEED, Problem.parse("8_16_4096_128", window_left=5, varlen=True, softcap=True)):
            render(problem, config)
    assert opened <= files
    assert f"{family}/backward.cu.j2" in opened


def test_a_template_hash_is_of_one_family() -> None:
    assert len({template_hash(family) for family in FAMILIES}) == len(FAMILIES)
    assert not {name for name in template_files("wgmma") if name.startswith(("mma/", "mmat/"))}


def test_one_file_is_the_whole_product() -> None:
    text = render(SEED, PRESETS["v1"]).text
    outside = {line for line in text.splitlines() if line.startswith("#include")}
    assert outside == {
        '#include "ptx_host.hpp"',  # of the host target alone
        "#include <cuda.h>",
        "#include <cuda_runtime.h>",
        "#include <math.h>",
        "#include <stdint.h>",
    }
    assert "<<<" not in text
    assert "torch" not in text


def test_the_name_is_safe_for_files() -> None:
    source = render(SEED, PRESETS["v3"])
    assert source.name == f"bwdtune_{PRESETS['v3'].id}_bf16_d128_causal"
    assert source.name.replace("_", "").isalnum()
