"""That templates come to the machine code that they came to before.

For a change that claims to change nothing, such as another name, a comment, or code that is written once instead of
twice. Name the version before the change:

    BWDTUNE_COMPARE_WITH=COMMIT pytest tests/templates/test_machine_code.py -m slow

compiles every preset, with every mask and feature, for both targets; `-k "w64conv and causal"` compiles a few. A kernel
whose PTX is the same takes seconds.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from compiled_code import same_machine_code

import bwdtune
from bwdtune.gen.build.toolchain import ToolchainError, find_compiler
from bwdtune.gen.device import device_for_arch
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.gen.space import refusal
from bwdtune.tuner.earlier import Earlier, earlier

VARIABLE = "BWDTUNE_COMPARE_WITH"
TARGETS = ("sm_90a", "sm_120a")
PACKAGE = Path(bwdtune.__file__).resolve().parent

KINDS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_left": 512, "window_right": 64},
    "causal window, bottom right": {"causal": True, "window_left": 512, "bottom_right": True},
    "softcap": {"causal": True, "softcap": True},
    "varlen": {"causal": True, "varlen": True},
    "deterministic": {"causal": True, "deterministic": True},
    "head_dim 64": {"causal": True},
}


def problem_of(kind: str) -> Problem:
    return Problem.parse("8_16_4096_64" if kind == "head_dim 64" else "8_16_4096_128", **KINDS[kind])


@pytest.fixture(autouse=True)
def _need_nvcc() -> None:
    try:
        for arch in TARGETS:
            find_compiler(arch)
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def before() -> Iterator[Earlier]:
    version = os.environ.get(VARIABLE)
    if not version:
        pytest.skip(f"set {VARIABLE} to the commit before a change that claims to change nothing")
    with earlier(version) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_change_that_claims_to_change_nothing(
    before: Earlier, preset: str, kind: str, arch: str, tmp_path: Path
) -> None:
    problem, config = problem_of(kind), PRESETS[preset]
    if reason := refusal(problem, config, device_for_arch(arch)):
        pytest.skip(reason)
    (source,) = before.render([(problem, config, None)])
    assert same_machine_code(source, render(problem, config), arch, tmp_path)


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """A copy of what renders, to be edited."""
    copy = tmp_path / "version" / "bwdtune"
    for name in ("gen", "templates"):
        shutil.copytree(PACKAGE / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "__init__.py").touch()
    return copy


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [("", "// A comment.\n", True), ("threadIdx", "blockIdx", False)],
    ids=["a comment", "another instruction"],
)
def test_an_edit_is_judged_by_what_it_compiles_to(
    edited: Path, tmp_path: Path, before: str, after: str, same: bool
) -> None:
    file = edited / "templates" / "mma" / "backward.cu.j2"
    text = file.read_text()
    file.write_text(text.replace(before, after) if before else text + after)
    problem = problem_of("head_dim 64")
    with earlier(str(edited)) as version:
        (source,) = version.render([(problem, PRESETS["v1"], None)])
    today = render(problem, PRESETS["v1"])
    assert source.text != today.text
    assert same_machine_code(source, today, "sm_120a", tmp_path) is same
