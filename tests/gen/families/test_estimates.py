from __future__ import annotations

import dataclasses

import pytest

from bwdtune.gen.device import H200, RTX_5090
from bwdtune.gen.families import PRESETS, TransposedMmaConfig, parse_config
from bwdtune.gen.problem import Problem

SEED = Problem.parse("8_16_4096_128", causal=True)


@pytest.mark.parametrize(
    ("preset", "size"), [("v1", 81_936), ("v2", 81_936), ("v3", 73_744), ("t64", 99_184), ("t128", 231_072)]
)
def test_shared_memory_of_the_presets(preset: str, size: int) -> None:
    assert PRESETS[preset].estimate(SEED).shared_memory_bytes == size


@pytest.mark.parametrize(
    ("preset", "head_dim", "more"),
    [
        ("t64", 128, 64 * 128 * 4),
        ("t64", 72, 64 * 128 * 4),  # five pairs of fragments for four warps: two each
        ("t128", 64, 128 * 64 * 4),
    ],
)
def test_dq_is_staged_in_memory_of_its_own(preset: str, head_dim: int, more: int) -> None:
    problem, config = dataclasses.replace(SEED, head_dim=head_dim), PRESETS[preset]
    in_bulk = dataclasses.replace(config, dq_bulk_reduce=True)
    assert in_bulk.estimate(problem).shared_memory_bytes == config.estimate(problem).shared_memory_bytes + more


def test_dq_is_staged_where_the_query_groups_parts_of_dk_and_dv_are_at_the_end() -> None:
    config = TransposedMmaConfig(block_q=32, block_kv=128, num_warps=8, query_groups=2)
    in_bulk = dataclasses.replace(config, dq_bulk_reduce=True)
    assert in_bulk.estimate(SEED).shared_memory_bytes == config.estimate(SEED).shared_memory_bytes


@pytest.mark.parametrize(
    ("config", "threads", "registers", "more_shared_memory"),
    [("t64", 256, 239, 0), ("t64 loading_warp", 384, 224, 32)],
)
def test_a_loading_warp_brings_a_warpgroup(config: str, threads: int, registers: int, more_shared_memory: int) -> None:
    found = parse_config(config).estimate(SEED)
    assert (found.threads, found.registers) == (threads, registers)
    assert found.shared_memory_bytes == PRESETS["t64"].estimate(SEED).shared_memory_bytes + more_shared_memory


@pytest.mark.parametrize(("preset", "threads"), [("v1", 512), ("v2", 256), ("v3", 256), ("t64", 256), ("t128", 256)])
def test_threads_of_the_presets(preset: str, threads: int) -> None:
    assert PRESETS[preset].estimate(SEED).threads == threads


@pytest.mark.parametrize(
    ("threads", "registers", "shared_memory_bytes", "on_5090", "on_h200"),
    [
        (256, 255, 73_744, 1, 1),  # registers
        (256, 128, 45_504, 2, 2),  # registers
        (256, 64, 45_504, 2, 4),  # shared memory on the one, registers on the other
        (256, 32, 0, 6, 8),  # threads
        (128, 168, 1024, 3, 3),  # registers: 168 a thread are 21,504 a block
        (512, 128, 81_936, 1, 1),
        (512, 255, 0, 0, 0),  # not even one
    ],
)
def test_blocks_of_an_sm(threads: int, registers: int, shared_memory_bytes: int, on_5090: int, on_h200: int) -> None:
    needs = {"threads": threads, "registers": registers, "shared_memory_bytes": shared_memory_bytes}
    assert RTX_5090.blocks_per_sm(**needs) == on_5090
    assert H200.blocks_per_sm(**needs) == on_h200
    assert H200.occupancy(**needs) == on_h200 * threads / 2048
