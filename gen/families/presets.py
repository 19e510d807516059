"""Configurations with a name, and how any other is written: as a preset and what differs from it."""

from __future__ import annotations

from ..errors import UsageError
from .base import Config
from .mma import MmaConfig
from .mmat import TransposedMmaConfig
from .registry import parse_id
from .wgmma import WgmmaConfig

PRESETS: dict[str, Config] = {
    "v1": MmaConfig(block_q=64, block_kv=64, warps_per_row_group=4, stages=1),
    "v2": MmaConfig(block_q=64, block_kv=64, warps_per_row_group=2, stages=1, unroll_dq=False),
    "v3": MmaConfig(block_q=32, block_kv=64, warps_per_row_group=4, stages=2),
    "t64": TransposedMmaConfig(
        block_q=64, block_kv=128, num_warps=8, v_in_registers=True, p_first=True, p_in_fp16=True, staggered=True
    ),
    "t128": TransposedMmaConfig(
        block_q=128,
        block_kv=128,
        num_warps=8,
        query_groups=2,
        exchange=True,
        dq_row_warps=4,
        p_first=True,
        p_in_fp16=True,
        dv_first=True,
        staggered=True,
    ),
    "w64": WgmmaConfig(v_fragments=3),
    "w64lag": WgmmaConfig(dq_delayed=True, v_fragments=3, resync=True, skip_masked=True),
    "w64first": WgmmaConfig(dq_delayed=True, v_fragments=3, store_first=True),
    "w64conv": WgmmaConfig(dq_delayed=True, v_fragments=3, dq_epilogue_in_kernel=True),
    "w128": WgmmaConfig(block_q=128, dq_delayed=True),
}
"""v1, v2 and v3 are the three kernels of the public write-up this project starts from; v2 needs the loop for dQ to fit
its registers. t64 and t128 are the transposed kernels for 99 KiB and for 227 KiB of shared memory, those with a w are
for Hopper: w64first for short sequences and deterministic gradients, w64conv, whose dQ needs no kernel of its own, for
long ones, w128 for head_dims up to 64."""


def preset_name(config: Config) -> str | None:
    """The name of the preset that the configuration is, if it is one."""
    return next((name for name, preset in PRESETS.items() if preset == config), None)


def parse_config(text: str) -> Config:
    """A preset's name, such as ``v2``, or a configuration's id.

    Raises:
        UsageError: Neither of them, with what would be.
    """
    config = PRESETS.get(text) or parse_id(text)
    if config is None:
        raise UsageError(
            f"unknown configuration {text!r}: use {', '.join(PRESETS)} or an id such as {PRESETS['v2'].id}"
        )
    return config
