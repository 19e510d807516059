"""``tuner prebuild``: what is built, what was there, and what is PyTorch's; and what a model's configuration says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cxx_shim import CxxShim

from bwdtune.db.records import Environment, GpuKey
from bwdtune.db.shipped import Shipped, write_shipped
from bwdtune.gen.build.jobs import Variant
from bwdtune.gen.device import HOST
from bwdtune.gen.errors import BwdtuneError
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime.dispatch.identity import Identity, Unproven
from bwdtune.runtime.operator import build
from bwdtune.tuner.cli import main
from bwdtune.tuner.commands.model_config import problems_of_model

PROBLEM = Problem.parse("2_4_128_64", causal=True)
ON_HOST = ["prebuild", "--arch", "host", "--causal"]


def shipped(problem: Problem, **changes: Any) -> Shipped:
    key = GpuKey(HOST.name, "host")
    values = {
        "problem": problem,
        "config": PRESETS["v2"],
        "gpu": key,
        "kind": "measured",
        "environment": Environment(key, "host", "580", "13.0", "2.13"),
        "policy": "race",
        "date": "2026-01-01",
        "command": "tuner search",
        "ms": 1.0,
        "cycles": None,
        "max_error": 2e-3,
        "source_hash": render(problem, PRESETS["v2"]).hash,
        "template_hash": "templates",
    }
    return Shipped(**{**values, **changes})


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CxxShim:
    """Of kernels of one kind; the operator, which has tests of its own, is there."""
    shim = CxxShim(tmp_path / "compiler")
    shim.add(PROBLEM)
    monkeypatch.setenv("CXX", str(shim.program))
    monkeypatch.setenv("BWDTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "is_built", lambda cache: True)
    monkeypatch.setattr(build, "library", lambda cache: tmp_path)
    return shim


def test_shapes(compiler: CxxShim, capsys: pytest.CaptureFixture[str]) -> None:
    write_shipped([shipped(PROBLEM)])
    shapes = ["--shape", "2_4_128_64", "--shape", "2_4_100_64", "--shape", "2_4_5000_64", "--shape", "2_4_128_64"]
    assert main([*ON_HOST, *shapes]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "kernels for host CPU (host)" in lines[0]
    (near,) = (line for line in lines if "2_4_100_64" in line)
    assert "v2" in near
    assert "built in" in near
    (far,) = (line for line in lines if "2_4_5000_64" in line)
    assert "│ PyTorch │ - │ the nearest problem with a kernel" in far
    assert lines[-1] == "the C++ operator: there"
    assert len(compiler.compiled) == 1
    assert main([*ON_HOST, *shapes[:2]]) == 0
    assert "│ there " in capsys.readouterr().out
    assert len(compiler.compiled) == 1


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    write_shipped([shipped(PROBLEM)])
    assert main([*ON_HOST, "--shape", "2_4_128_64", "--shape", "2_4_128_128", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["arch"], found["operator"]) == ("host CPU", "host", "there")
    built, none = found["problems"]
    assert built["config"] == PRESETS["v2"].id
    assert Path(built["library"]).is_file()
    assert built["cause"] is None
    assert (none["config"], none["library"], none["cause"]) == (None, None, "nothing is stored or shipped")


def test_another_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shipped([shipped(PROBLEM)])
    assert main([*ON_HOST, "--shape", "2_4_128_64", "--cache", str(tmp_path / "mine"), "--json"]) == 0
    library = json.loads(capsys.readouterr().out)["problems"][0]["library"]
    assert Path(library).is_relative_to(tmp_path / "mine")


def test_a_kernel_that_does_not_compile_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    full = Problem.parse("2_4_128_64")
    write_shipped([shipped(full)])
    assert main(["prebuild", "--arch", "host", "--shape", "2_4_128_64", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["problems"]
    assert found["cause"] == "the kernel cannot be used"
    assert "was not compiled for host" in found["reason"]


def test_a_kernel_that_has_to_be_verified_elsewhere_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compiler: CxxShim
) -> None:
    """Of another nvcc, on a machine without a GPU: it is compiled, and no second best in its place."""

    def unproven(self: Identity, variant: Variant, problem: Problem) -> str:
        return Unproven("it is verified once, on a GPU, before it is used")

    monkeypatch.setattr(Identity, "known_objection", lambda self, variant: None)
    monkeypatch.setattr(Identity, "objection", unproven)
    near = Problem.parse("2_4_150_64", causal=True)
    write_shipped([shipped(PROBLEM), shipped(near, config=PRESETS["v1"])])
    assert main([*ON_HOST, "--shape", "2_4_128_64", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["problems"]
    assert (found["config"], found["cause"]) == (PRESETS["v2"].id, "the kernel has to be verified on a GPU")
    assert len(compiler.compiled) == 1


def test_an_operator_that_cannot_be_built_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(cache: Path | None) -> None:
        raise BwdtuneError("PyTorch came without its headers")

    monkeypatch.setattr(build, "library", fail)
    write_shipped([shipped(PROBLEM)])
    assert main([*ON_HOST, "--shape", "2_4_128_64"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("the C++ operator: cannot be had: PyTorch came without")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "nothing to build: give --shape, or --model with --length"),
        (["--model", "config.json"], "--model says nothing of lengths: give --length, and --batch"),
        (["--shape", "8x16"], "malformed shape '8x16'"),
    ],
)
def test_wrong_use(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ON_HOST, *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_database_that_was_named_must_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ON_HOST, "--shape", "2_4_128_64", "--db", str(tmp_path / "missing.sqlite")]) == 1
    assert "there is no database at" in capsys.readouterr().err


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def problems(config: dict[str, Any], tmp_path: Path, batch: int = 2, length: int = 128, **features: Any) -> list[str]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = problems_of_model(path, batch, length, lambda shape: Problem.parse(shape, **features))
    return [one.label for one in found]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["2_4_2_128_64 bf16 causal"]),
        ({"head_dim": 128}, ["2_4_2_128_128 bf16 causal"]),
        ({"head_dim": None, "num_key_value_heads": None}, ["2_4_128_64 bf16 causal"]),
        # Mistral: all layers; a window counts the query's own key.
        ({"sliding_window": 32}, ["2_4_2_128_64 bf16 window 31,0"]),
        ({"sliding_window": 128}, ["2_4_2_128_64 bf16 causal"]),
        # Qwen 2
        ({"sliding_window": 32, "use_sliding_window": False}, ["2_4_2_128_64 bf16 causal"]),
        (
            {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 20},
            ["2_4_2_128_64 bf16 causal", "2_4_2_128_64 bf16 window 31,0"],
        ),
        # Gemma 2 and 3
        (
            {"sliding_window": 32, "model_type": "gemma2", "attn_logit_softcapping": 50.0},
            ["2_4_2_128_64 bf16 causal softcap", "2_4_2_128_64 bf16 window 31,0 softcap"],
        ),
        (
            {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            ["2_4_2_128_64 bf16 causal", "2_4_2_128_64 bf16 window 31,0"],
        ),
        ({"sliding_window": 32, "layer_types": ["full_attention"] * 3}, ["2_4_2_128_64 bf16 causal"]),
        ({"architectures": ["BertForMaskedLM"]}, ["2_4_2_128_64 bf16 full"]),
        # DeepSeek
        (
            {
                "num_key_value_heads": 4,
                "head_dim": 64,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
            ["2_4_128_192x128 bf16 causal"],
        ),
        # The language model of one that sees, too.
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"num_attention_heads": 8}},
            ["2_8_2_128_32 bf16 causal"],
        ),
    ],
)
def test_what_a_model_computes(changes: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    assert problems({**LLAMA, **changes}, tmp_path) == expected


def test_gpt2(tmp_path: Path) -> None:
    assert problems({"n_head": 12, "n_embd": 768}, tmp_path, dtype="fp16") == ["2_12_128_64 fp16 causal"]


def test_a_model_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_key_value_heads": 4}))
    write_shipped([shipped(PROBLEM)])
    where = ["--model", str(tmp_path), "--batch", "2", "--length", "128"]
    assert main(["prebuild", "--arch", "host", *where, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["problems"]
    assert (found["shape"], found["causal"], found["config"]) == ("2_4_128_64", True, PRESETS["v2"].id)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is no JSON"),
        ("[]", "it holds no object"),
        ("{}", "has no num_attention_heads"),
        ('{"num_attention_heads": 4}', "has no hidden_size"),
        (json.dumps({**LLAMA, "qk_nope_head_dim": 128}), "has no qk_rope_head_dim"),
    ],
)
def test_a_file_that_is_none_of_a_model(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BwdtuneError, match=complaint):
        problems_of_model(path, 1, 128, Problem.parse)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BwdtuneError, match="No such file"):
        problems_of_model(tmp_path / "config.json", 1, 128, Problem.parse)
