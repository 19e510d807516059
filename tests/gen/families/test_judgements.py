"""What arithmetic says of configurations stays what it was when their measurements were stored.

``judgements.txt`` has an id a line, with a hash of all refusals, estimates and counts of mma over `PROBLEMS` and
`DEVICES`. A line changes where a change is meant, and only then: `python tests/gen/families/test_judgements.py` writes
the file anew.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from bwdtune.gen.device import H200, HOST, RTX_5090
from bwdtune.gen.families import FAMILIES, PRESETS, Config, parse_config
from bwdtune.gen.problem import Problem
from bwdtune.gen.space import refusal
from bwdtune.tuner.search.tensor_activity import mma_count

FILE = Path(__file__).with_name("judgements.txt")
HEAD_DIMS = (16, 40, 64, 72, 128, 136, 256)
FEATURES = (
    {},
    {"causal": True},
    {"causal": True, "deterministic": True},
    {"window_left": 100},
    {"softcap": True},
    {"causal": True, "bottom_right": True, "varlen": True},
)
PROBLEMS = tuple(
    Problem(("bf16", "fp16")[number % 2], 3, 8, (8, 2)[number // 2 % 2], 1000, 1500, head_dim, **features)
    for head_dim in HEAD_DIMS
    for number, features in enumerate(FEATURES)
)
DEVICES = (H200, RTX_5090, HOST)
EXPECTED = dict(line.split() for line in FILE.read_text().splitlines())


def judgement(config: Config) -> str:
    digest = hashlib.sha256()
    for problem in PROBLEMS:
        needs = config.estimate(problem)
        figures = (needs.threads, needs.shared_memory_bytes, needs.registers, mma_count(problem, config))
        digest.update(repr(figures).encode())
        for device in DEVICES:
            digest.update(repr(refusal(problem, config, device)).encode())
    return digest.hexdigest()[:12]


@pytest.mark.parametrize("name", EXPECTED)
def test_what_arithmetic_says_stays_as_it_was(name: str) -> None:
    config = parse_config(name)
    assert config.id == name
    assert judgement(config) == EXPECTED[name]


def test_every_family_and_preset_is_judged() -> None:
    judged = [parse_config(name) for name in EXPECTED]
    assert {config.family for config in judged} == set(FAMILIES)
    assert set(PRESETS.values()) <= set(judged)


if __name__ == "__main__":
    FILE.write_text("".join(f"{name} {judgement(parse_config(name))}\n" for name in EXPECTED))
