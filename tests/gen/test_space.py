from __future__ import annotations

import dataclasses
import re

import pytest

from bwdtune.gen.config import PRESETS, MmaConfig
from bwdtune.gen.device import H200, RTX_5090, Device
from bwdtune.gen.errors import UsageError
from bwdtune.gen.problem import Problem
from bwdtune.gen.resources import estimate
from bwdtune.gen.space import all_configs, refusal, refused_configs, space_hash, valid_configs

SEED = Problem.parse("8_16_4096_128", causal=True)


@pytest.mark.parametrize("device", [RTX_5090, H200], ids=lambda device: device.arch)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_value_of_every_parameter_is_in_some_valid_configuration(device: Device, head_dim: int) -> None:
    valid = valid_configs(Problem.parse(f"8_16_4096_{head_dim}", causal=True), device)
    for name, choices in MmaConfig.choices.items():
        missing = set(choices) - {getattr(config, name) for config in valid}
        # Eight warps on 16 columns each need 128 columns.
        assert missing == ({8} if name == "warps_per_row_group" and head_dim == 64 else set())


@pytest.mark.parametrize("device", [RTX_5090, H200], ids=lambda device: device.arch)
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_points_of_the_space(device: Device, preset: str) -> None:
    assert PRESETS[preset] in valid_configs(SEED, device)


def test_a_configuration_is_either_valid_or_refused_with_a_reason() -> None:
    valid, refused = valid_configs(SEED, RTX_5090), refused_configs(SEED, RTX_5090)
    assert len(set(valid)) == len(valid)
    assert set(valid) | set(refused) == set(all_configs())
    assert not set(valid) & set(refused)
    assert all(reason and "\n" not in reason for reason in refused.values())


def test_the_smaller_card_takes_a_part_of_the_larger_ones_space() -> None:
    on_5090, on_h200 = set(valid_configs(SEED, RTX_5090)), set(valid_configs(SEED, H200))
    assert on_5090 < on_h200
    limit = RTX_5090.shared_memory_per_block_bytes
    assert all(estimate(SEED, config).shared_memory_bytes <= limit for config in on_5090)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_q": 128, "warps_per_row_group": 8}, "2048 threads: a block has at most 1024"),
        ({"block_kv": 32, "warps_per_row_group": 4}, "S does not divide: 32 keys among 4 warps"),
        ({"block_q": 128, "stages": 3}, "bytes of shared memory: a block of NVIDIA GeForce RTX 5090 has at most"),
        ({"min_blocks_per_sm": 3}, "registers a thread: 3 blocks of 512 threads leave 40"),
        (
            {
                "block_q": 16,
                "block_kv": 128,
                "warps_per_row_group": 2,
                "min_blocks_per_sm": 2,
                "k_in_registers": False,
                "v_in_registers": False,
            },
            "registers a thread|2 blocks an SM are asked for, 1 fit",
        ),
    ],
)
def test_a_refusal_says_what_is_too_much(changes: dict[str, int], said: str) -> None:
    reason = refusal(SEED, dataclasses.replace(PRESETS["v1"], **changes), RTX_5090)
    assert reason is not None
    assert re.search(said, reason), reason


@pytest.mark.parametrize("head_dim", [1, 20, 100, 264, 272])
def test_a_head_dim_that_no_kernel_takes_is_named(head_dim: int) -> None:
    problem = Problem.parse(f"8_16_4096_{head_dim}")
    with pytest.raises(UsageError, match=f"head_dim {head_dim}: the kernels take multiples of 8 up to 256"):
        valid_configs(problem, H200)


@pytest.mark.parametrize("device", [RTX_5090, H200], ids=lambda device: device.arch)
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim_has_a_space(device: Device, head_dim: int) -> None:
    for features in ({}, {"deterministic": True}):
        assert valid_configs(Problem.parse(f"8_16_4096_{head_dim}", causal=True, **features), device)


def test_the_order_of_the_space_is_fixed() -> None:
    valid_configs.cache_clear()
    first = valid_configs(SEED, H200)
    valid_configs.cache_clear()
    assert valid_configs(SEED, H200) == first
    assert space_hash() == space_hash()
