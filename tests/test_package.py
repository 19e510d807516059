"""The package as a whole: what an import costs, what a wheel holds, what make would do."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bwdtune

ROOT = Path(bwdtune.__file__).resolve().parent


def _built(folder: str) -> set[str]:
    """What setuptools leaves beside the package; `gen/build` is a room of ours."""
    return {"build"} if Path(folder) == ROOT else set()


def _python(code: str) -> str:
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def test_import_runs_no_other_file() -> None:
    """So that it takes no time, which would depend on what else the machine does: files are counted."""
    code = (
        "import importlib, sys, types, typing; before = set(sys.modules); import bwdtune\n"
        "print(*[name for name in set(sys.modules) - before if getattr(sys.modules[name], '__file__', None)])"
    )
    assert _python(code) == "bwdtune"


def test_the_public_api_needs_no_optuna_and_no_sqlalchemy() -> None:
    code = (
        "import bwdtune, sys; bwdtune.attention, bwdtune.enable;"
        "print([name for name in ('optuna', 'sqlalchemy', 'alembic') if name in sys.modules])"
    )
    assert _python(code) == "[]"


def test_all_names_are_there_and_no_others() -> None:
    assert set(bwdtune.__all__) <= set(dir(bwdtune))
    for name in bwdtune.__all__:
        assert getattr(bwdtune, name) is not None
    assert callable(bwdtune.attention)
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        _ = bwdtune.attend


def test_a_wheel_holds_all_that_is_read_at_run_time(tmp_path: Path) -> None:
    """Built from a copy, so that nothing is left in this folder."""
    copy = tmp_path / "copy"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "tests")
    shutil.copytree(ROOT, copy, ignore=lambda folder, names: {*unwanted(folder, names), *_built(folder)})
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy],
        check=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    (wheel,) = tmp_path.glob("bwdtune-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    folders = ("db", "gen", "runtime", "templates", "tuner")
    files = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    needed = {f"bwdtune/{path.relative_to(ROOT)}" for path in files if "__pycache__" not in path.parts}
    information = f"bwdtune-{bwdtune.__version__}.dist-info"
    licences = {f"{information}/licenses/{name}" for name in ("LICENSE", "NOTICE")}
    assert needed | licences | {"bwdtune/py.typed"} <= held
    assert {name.split("/")[0] for name in held} == {"bwdtune", information}


def test_every_dependency_is_pinned() -> None:
    pins = {_normal(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    asked = importlib.metadata.requires("bwdtune")
    assert asked
    assert {_normal(requirement) for requirement in asked} <= pins


def _normal(requirement: str) -> str:
    """The package's name, as packaging compares them."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=;]", requirement)[0]).lower()


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
class TestMake:
    @staticmethod
    def plan(*arguments: str) -> str:
        """What make would run."""
        command = ["make", "--dry-run", "--no-print-directory", "-C", str(ROOT), *arguments]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "ARGS"
        }
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def tools(self, *goals: str) -> list[str]:
        """What checks the code, in order; pytest may have collected tests before."""
        return re.findall(r"-m (ruff|mypy|pytest)\b", self.plan(*goals))[-3:]

    def test_search_runs_the_main_job(self) -> None:
        assert self.plan("search").endswith("-m bwdtune.tuner search --shape 8_16_4096_128 --causal\n")

    def test_search_passes_options_on(self) -> None:
        plan = self.plan("search", "ARGS=--shape 1_2_64_64 --trials 3")
        assert plan.endswith("-m bwdtune.tuner search --shape 1_2_64_64 --trials 3\n")

    def test_test_runs_ruff_mypy_and_pytest(self) -> None:
        assert self.tools("test") == ["ruff", "mypy", "pytest"]

    def test_ci_runs_what_make_test_does(self) -> None:
        script = ROOT / ".ci" / "run"
        assert os.access(script, os.X_OK)
        targets = re.findall(r"\bmake (\w+)$", script.read_text(), re.MULTILINE)
        assert targets[-2:] == ["prepare", "pytest"]
        assert self.tools(*targets[-2:]) == ["ruff", "mypy", "pytest"]

    def test_an_old_python_is_refused_with_one_line(self, tmp_path: Path) -> None:
        old = tmp_path / "python"
        old.write_text("#!/bin/sh\nexit 1\n")
        old.chmod(0o755)
        shutil.copy(ROOT / "Makefile", tmp_path)
        for name in ("pyproject.toml", "constraints.txt"):
            (tmp_path / name).touch()
        answer = subprocess.run(
            ["make", "--no-print-directory", "-C", str(tmp_path), "test", f"PYTHON={old}"],
            capture_output=True,
            text=True,
        )
        assert answer.stdout.splitlines() == ["Python 3.10 or newer is needed: make PYTHON=..."]
        assert not (tmp_path / ".venv").exists()


def test_modules_that_users_import_by_name() -> None:
    code = (
        "import sys, bwdtune; assert 'torch' not in sys.modules;"
        "[hasattr(module, '__file__') for module in list(sys.modules.values())]; assert 'torch' not in sys.modules;"
        "from bwdtune.flash_attn import flash_attn_func; from bwdtune.runtime import flash_attn;"
        "print(flash_attn_func is flash_attn.flash_attn_func is bwdtune.flash_attn.flash_attn_func)"
    )
    assert _python(code) == "True"
