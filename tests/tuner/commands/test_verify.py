"""`tuner verify` on the host target: what it must catch, in kernels whose gradients may be right."""

from __future__ import annotations

import json

import pytest

from bwdtune.gen.families import Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source, render
from bwdtune.tuner.cli import main

VERIFY = ["verify", "--arch", "host", "--shape", "1_2_192_64", "--causal", "--json"]


def reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], preset: str, old: str, new: str) -> str:
    """Why a kernel with a changed line does not pass."""

    def planted(problem: Problem, config: Config) -> Source:
        right = render(problem, config)
        assert old in right.text, f"the template no longer says {old!r}"
        return Source(right.kernel_spec, right.config, right.text.replace(old, new))

    monkeypatch.setattr("bwdtune.tuner.commands.verify.render", planted)
    assert main([*VERIFY, "--config", preset]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"]
    return str(found["reason"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "old", "new", "diagnosis"),
    [
        (
            "v3",
            "const float lse = ptx::load_global(",
            "ptx::load_global(arguments.lse + place.row + 1); const float lse = ptx::load_global(",
            "outside all buffers (offset 4 of the nearest, lse, which has 4 bytes)",
        ),
        (
            "t64",
            "delta = multiply_8_columns(o_pairs, dout_pairs);",
            "delta = multiply_8_columns(o_pairs, dout_pairs); ptx::store_global(const_cast<uint16_t*>(o), *o);",
            "the buffer is not to be written (offset 0 of the nearest, o, which has",
        ),
    ],
    ids=["a read past the end", "a write to an input"],
)
def test_global_memory_is_watched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], preset: str, old: str, new: str, diagnosis: str
) -> None:
    found = reason(monkeypatch, capsys, preset, old, new)
    assert "preprocess_kernel, block (" in found
    assert diagnosis in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "old", "new"),
    [
        ("v3", "return min(row + mask.high, seqlen_kv - 1)", "return row + mask.high"),
        ("w64", "key >= arguments.seqlen_kv ? INT_MAX : ", ""),
    ],
)
def test_keys_past_the_end_are_caught(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], preset: str, old: str, new: str
) -> None:
    """They are zeros, which do no harm until exp(0 - lse) overflows."""
    assert "far below zero: " in reason(monkeypatch, capsys, preset, old, new)
