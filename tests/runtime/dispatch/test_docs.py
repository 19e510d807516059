"""What docs/dispatch.md shows runs as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import bwdtune
from bwdtune.gen.device import Device
from bwdtune.runtime.operator import build
from bwdtune.tuner.cli import main

PAGE = (Path(bwdtune.__file__).resolve().parent / "docs" / "dispatch.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^    (tuner prebuild .*)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet(snippet: str, host: Device, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        exec(compile(snippet, "docs/dispatch.md", "exec"), {})
    finally:
        bwdtune.disable()
    assert capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stored here: the answer is PyTorch for each problem."""
    monkeypatch.setattr(build, "is_built", lambda cache: True)
    monkeypatch.setattr(build, "library", lambda cache: tmp_path)
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "path" / "to" / "config.json"
    model.parent.mkdir(parents=True)
    model.write_text('{"num_attention_heads": 4, "hidden_size": 256}')
    _, *arguments = shlex.split(command, comments=True)
    assert main([*arguments, "--arch", "host"]) == 0


def test_there_are_some() -> None:
    assert len(SNIPPETS) == 3
    assert len(COMMANDS) == 3
