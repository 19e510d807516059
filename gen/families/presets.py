"""Named configurations, and the short form of all others: a preset and what differs from it."""

from __future__ import annotations

import re

from ..errors import UsageError
from .base import Config, Value
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
    "t64load": TransposedMmaConfig(
        block_q=64,
        block_kv=128,
        num_warps=8,
        v_in_registers=True,
        p_first=True,
        p_in_fp16=True,
        loading_warp=True,
        skip_masked=True,
    ),
    "w64": WgmmaConfig(v_fragments=3),
    "w64lag": WgmmaConfig(dq_delayed=True, v_fragments=3, resync=True, skip_masked=True),
    "w64first": WgmmaConfig(dq_delayed=True, v_fragments=3, store_first=True),
    "w64last": WgmmaConfig(dq_delayed=True, v_fragments=3, store_first=True, convert_last=True),
    "w64conv": WgmmaConfig(dq_delayed=True, v_fragments=3, dq_epilogue_in_kernel=True),
    "w128": WgmmaConfig(block_q=128, dq_delayed=True),
    "w64split": WgmmaConfig(dq_delayed=True, v_fragments=4, dq_bulk_reduce=False, split_accumulators=True),
    "w64bulk": WgmmaConfig(dq_delayed=True, v_fragments=4, split_accumulators=True, dout_stages=1),
    "w64mla": WgmmaConfig(lse_delta_k_step=False, dq_delayed=True, p_first=True),
    "w64pair": WgmmaConfig(
        dq_delayed=True,
        v_fragments=4,
        dq_bulk_reduce=False,
        split_accumulators=True,
        dout_stages=1,
        cluster_size=2,
    ),
}
"""v1, v2 and v3 are the three kernels of the public write-up this project starts from; v2 needs the loop for dQ to fit
its registers. t64 and t128 are the transposed kernels for 99 KiB and for 227 KiB of shared memory, t64load is t64 for
masks on cards whose tensor cores are slow. Those with a w are for Hopper: w64last for short sequences and deterministic
gradients, w64first for those of packed sequences, w64conv, whose dQ needs no kernel of its own, for long ones, w128 for
head_dims up to 64, w64split and w64bulk for those above 128, the latter deterministic too, w64mla for 192 with values
of 128, and w64pair, in clusters, for those above 192."""


def preset_name(config: Config) -> str | None:
    """The name of the preset that the configuration is, if it is one."""
    return next((name for name, preset in PRESETS.items() if preset == config), None)


def short_form(config: Config) -> str:
    """A configuration as people write it: the nearest preset and what differs, such as ``w64conv skip_masked=1``.

    `parse_config` takes it back.
    """
    kin = {name: _differences(config, preset) for name, preset in PRESETS.items() if type(preset) is type(config)}
    nearest = min(kin, key=lambda name: len(kin[name]))  # of equals the one that is declared first
    return " ".join([nearest, *(f"{name}={int(value)}" for name, value in kin[nearest].items())])


def parse_config(text: str) -> Config:
    """A configuration by name.

    Args:
        text: A preset's name, such as ``v2``, or a configuration's id; after it, between spaces or commas, what
            differs from it: ``stages=2``, ``skip_masked=0``, or ``skip_masked`` for ``skip_masked=1``. A parameter may
            have the name that it is stored by.

    Raises:
        UsageError: There is no such configuration, with what there is.
    """
    base, *changes = re.split(r"[\s,]+", text.strip())
    config = PRESETS.get(base) or parse_id(base)
    if config is None:
        raise UsageError(
            f"unknown configuration {base!r}: use {', '.join(PRESETS)} or an id such as {PRESETS['v2'].id}, "
            "with what differs from it (skip_masked=0) behind it"
        )
    values = vars(config) | dict(_change(config, change) for change in changes if change)
    return config.of(values)


def _differences(config: Config, preset: Config) -> dict[str, Value]:
    of_preset = vars(preset)
    return {name: value for name, value in vars(config).items() if value != of_preset[name]}


def _change(config: Config, text: str) -> tuple[str, Value]:
    name, stated, value = text.partition("=")
    found = next((one for one in config.parameters.values() if name in (one.name, one.stored)), None)
    if found is None:
        known = ", ".join(config.parameters)
        raise UsageError(f"the {config.family} kernels have no parameter {name!r}: use {known}")
    if not stated and found.is_flag:
        return found.name, True
    numbers = {"true": 1, "false": 0} if found.is_flag else {}
    if value.lower() not in numbers and not re.fullmatch(r"[0-9]{1,9}", value):
        raise UsageError(f"{text!r} gives {found.name} no value: write {found.name}={int(found.choices[-1])}")
    number = numbers[value.lower()] if value.lower() in numbers else int(value)
    return found.name, found.value_of(number)
