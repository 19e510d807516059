"""The snippets of docs/ways_in.md, the examples, and the script that times training steps, run as by a reader."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bwdtune

ROOT = Path(bwdtune.__file__).resolve().parent
SNIPPETS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "ways_in.md").read_text("utf-8"), re.M | re.S)


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """What earlier snippets have defined."""
    return {"__name__": "ways_in"}


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_a_snippet(index: int, namespace: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snippet = SNIPPETS[index]
    for needed in re.findall(r"^# needs: (\w+)$", snippet, re.M):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    # Where none has the package of FlashAttention-3.
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: None, raising=False)
    # TorchScript reads the source of a class.
    path = tmp_path / "ways_in.py"
    path.write_text(snippet, "utf-8")
    exec(compile(snippet, str(path), "exec"), namespace)
    if index == 0:
        assert namespace["q"].requires_grad


def test_the_training_step_learns() -> None:
    losses = runpy.run_path(str(ROOT / "examples" / "training_step.py"))["main"](5)
    assert losses[-1] < losses[0]


def test_packed_sequences_are_as_each_alone() -> None:
    assert runpy.run_path(str(ROOT / "examples" / "packed_sequences.py"))["main"]((10, 3, 24)) < 0.02


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "training_step.py"))


@pytest.mark.parametrize("way", ["default", "enable", "attention"])
def test_times_of_training_steps(way: str, script: dict[str, Any], tmp_path: Path) -> None:
    """What each of its processes does."""
    result = tmp_path / "result.json"
    options = [f"--result={result}", f"--way={way}", "--model=tiny", "--mode=eager", "--steps=1"]
    try:
        script["work"](script["parse"](["--worker", *options]))
        found = json.loads(result.read_text())
        assert len(found["ms"]) == 1
        assert found["environment"]["torch"] == torch.__version__
        script["work"](script["parse"](["--worker", *options, "--losses=4"]))
        losses = json.loads(result.read_text())["losses"]
        assert len(losses) == 4
    finally:
        bwdtune.disable()


def test_the_script_compares_its_processes(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the processes, which answer from a table."""
    ms = {"default": 10.0, "enable": 8.0, "attention": 5.0}

    def run(arguments: Any, model: str, mode: str, way: str) -> dict[str, Any]:
        return {"ms": [ms[way]] * 3, "losses": [3.0, ms[way] / 100], "first_step_s": 1.0, "environment": {}}

    main = script["main"]
    monkeypatch.setitem(main.__globals__, "run", run)
    monkeypatch.setattr(sys, "argv", ["training_step.py", "--model", "tiny"])
    main()
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["times_as_fast"] == {"default": 1.0, "enable": 1.25, "attention": 2.0}
    monkeypatch.setattr(sys, "argv", ["training_step.py", "--model", "tiny", "--losses", "2"])
    main()
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["noise"] == [0, 0]
    assert row["distance"] == {"enable": pytest.approx([0.02] * 2), "attention": pytest.approx([0.05] * 2)}
