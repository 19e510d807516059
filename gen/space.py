"""The search space: the valid points for a problem on a device, and for each other point the reason."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from .config import FAMILIES, MMA_DEPTH, MMA_ROWS, Config, MmaConfig, TransposedMmaConfig, WgmmaConfig
from .device import Device
from .errors import UsageError
from .problem import CAUSAL, FULL, WINDOW, Problem
from .resources import (
    FRAGMENT_COLUMNS,
    blocks_per_sm,
    ceil_div,
    columns_per_warp,
    estimate,
    key_group_warps,
    transposed_column_parts,
    transposed_columns,
    transposed_panel_columns,
)

_LARGEST_HEAD_DIM = 256
_HEAD_DIM_STEP = 8  # 16 bytes: TMA's strides are multiples of that
_WGMMA_HEAD_DIMS = range(32, 128 + 1, _HEAD_DIM_STEP)
_WGMMA_REGISTERS = 240  # what is left to each of 256 computing threads where 128 others have 24
_SPACE_HASH_DIGITS = 12


def refusal(problem: Problem, config: Config, device: Device) -> str | None:
    """Why `config` cannot serve `problem` on `device`, in words; None where it can, as far as arithmetic tells."""
    if reason := head_dim_refusal(problem.head_dim):
        return reason
    if config.threads > device.max_threads_per_block:
        return f"{config.threads} threads: a block has at most {device.max_threads_per_block}"
    if reason := config.contradiction:
        return reason
    if reason := _feature_refusal(problem, config):
        return reason
    if isinstance(config, TransposedMmaConfig):
        reason = _transposed_refusal(problem, config)
    elif isinstance(config, WgmmaConfig):
        reason = _wgmma_refusal(problem, config, device)
    else:
        reason = _mma_refusal(problem, config)
    if reason:
        return reason
    needs = estimate(problem, config)
    if needs.shared_memory_bytes > device.shared_memory_per_block_bytes:
        return (
            f"{needs.shared_memory_bytes:,} bytes of shared memory: a block of {device.name} has at most "
            f"{device.shared_memory_per_block_bytes:,}"
        )
    if isinstance(config, WgmmaConfig):
        return None  # one block, whose warpgroups divide the registers: see its own reasons
    blocks = config.min_blocks_per_sm
    registers = min(device.registers_per_sm // (config.threads * blocks) // 8 * 8, device.max_registers_per_thread)
    if needs.registers > registers:
        return (
            f"about {needs.registers} registers a thread: {blocks} block{'s' if blocks > 1 else ''} of "
            f"{config.threads} threads leave {registers}"
        )
    fitting = blocks_per_sm(
        device,
        threads=config.threads,
        registers=needs.registers,
        shared_memory_bytes=needs.shared_memory_bytes,
    )
    if fitting < blocks:
        return f"{blocks} blocks an SM are asked for, {fitting} fit by threads and shared memory"
    return None


def _feature_refusal(problem: Problem, config: Config) -> str | None:
    """What a problem asks for that the family's template does not have."""
    lacking = [name for name in problem.asked if name not in config.features]
    if not lacking:
        return None
    others = [family for family, config_type in FAMILIES.items() if set(problem.asked) <= config_type.features]
    named = " and no ".join(name.replace("_", "-") for name in lacking)
    return f"the {config.family} kernels have no {named}: the {' and '.join(others)} kernels do"


def _mma_refusal(problem: Problem, config: MmaConfig) -> str | None:
    if config.split_group and problem.heads_q == problem.heads_kv:
        return "a group is one query head: there is nothing to split"
    if config.split_group and problem.deterministic:
        return "dK and dV of a split group are added up in any order, which is not deterministic"
    head_dim, warps, per_row_group = problem.head_dim, config.num_warps, config.warps_per_row_group
    if config.block_kv % (FRAGMENT_COLUMNS * per_row_group):
        return (
            f"S does not divide: {config.block_kv} keys among {per_row_group} warps are not a multiple of "
            f"{FRAGMENT_COLUMNS} each"
        )
    if reason := _idle_warp("dQ", head_dim, per_row_group):
        return reason
    key_groups = config.block_kv // MMA_ROWS
    if warps % key_groups and key_groups % warps:
        return f"dK and dV do not divide: {warps} warps for {key_groups} groups of {MMA_ROWS} keys"
    warps_per_key_group, _ = key_group_warps(config)
    if reason := _idle_warp("dK and dV", head_dim, warps_per_key_group):
        return reason
    return None


def _transposed_refusal(problem: Problem, config: TransposedMmaConfig) -> str | None:
    groups, warps, row_warps = config.query_groups, config.num_warps, config.dq_row_warps
    if problem.head_dim < MMA_DEPTH:
        return f"head_dim {problem.head_dim}: the {config.family} kernels take {MMA_DEPTH} and more"
    divisions = (
        ("S", config.block_kv, "keys", warps // groups, MMA_ROWS),
        ("S", config.block_q, "queries", groups, MMA_DEPTH),
        ("dQ", config.block_q, "queries", row_warps, MMA_ROWS),
    )
    for product, size, unit, parts, multiple in divisions:
        if size % (parts * multiple):
            return f"{product} does not divide: {size} {unit} in {parts} parts are not a multiple of {multiple} each"
    there = transposed_panel_columns(problem)
    column_parts = zip(transposed_column_parts(config), transposed_columns(problem.head_dim, config), strict=True)
    for product, (parts, columns) in zip(("dK and dV", "dQ"), column_parts, strict=True):
        if (parts - 1) * FRAGMENT_COLUMNS >= problem.head_dim:
            return (
                f"{product} does not divide: of {problem.head_dim} columns in {parts} parts, {FRAGMENT_COLUMNS} at a "
                "time, none are left for the last"
            )
        if parts * columns > there:
            return (
                f"{product} does not divide: {problem.head_dim} columns in {parts} parts are filled up to "
                f"{parts * columns}, and a tile has {there}"
            )
    return None


def _wgmma_refusal(problem: Problem, config: WgmmaConfig, device: Device) -> str | None:
    if not device.has_wgmma:
        return f"{device.name} has no wgmma: it is an instruction of sm_90a alone"
    if problem.head_dim not in _WGMMA_HEAD_DIMS:
        why = (
            "most of the 64 columns that it is filled up to would be zeros"
            if problem.head_dim < _WGMMA_HEAD_DIMS[0]
            else f"dK and dV of 64 keys alone are {problem.head_dim} registers a thread"
        )
        taken = f"the wgmma kernels take {_WGMMA_HEAD_DIMS[0]} to {_WGMMA_HEAD_DIMS[-1]}"
        return f"head_dim {problem.head_dim}: {taken}; {why}"
    steps = ceil_div(problem.head_dim, MMA_DEPTH)
    if config.v_fragments > steps:
        return f"V has {steps} steps along head_dim: {config.v_fragments} cannot be kept"
    if config.fold_statistics and problem.softcap:
        return "the log-sum-exp that is folded into S would be capped with it"
    if config.skip_masked and problem.mask == FULL:
        return "there is no mask that would leave tiles to be skipped"
    if config.skip_masked and problem.deterministic and problem.mask == CAUSAL and not config.store_first:
        return "such a deterministic kernel goes backwards, and a causal mask leaves all of the last queries' tile"
    if config.store_first and (problem.mask == WINDOW or problem.bottom_right):
        return "queries that see no key meet no key tile that would store their dQ: it has to be cleared"
    if problem.deterministic and not config.dq_bulk:
        return "the order in which key tiles add to dQ is kept by the threads that copy it in bulk"
    if problem.deterministic and config.convert_dq:
        return "the threads that copy dQ in bulk keep the order of key tiles, or wait for places: not both"
    if (needed := estimate(problem, config).registers) > _WGMMA_REGISTERS:
        return f"about {needed} registers a thread: two computing warpgroups have {_WGMMA_REGISTERS}"
    return None


def head_dim_refusal(head_dim: int) -> str | None:
    """Why no configuration takes this head_dim, in words; None where some may."""
    if head_dim % _HEAD_DIM_STEP or head_dim > _LARGEST_HEAD_DIM:
        return f"head_dim {head_dim}: the kernels take multiples of {_HEAD_DIM_STEP} up to {_LARGEST_HEAD_DIM}"
    return None


def _idle_warp(gradient: str, head_dim: int, warps: int) -> str | None:
    columns = columns_per_warp(head_dim, warps)
    if (warps - 1) * columns >= head_dim:
        return (
            f"{gradient} does not divide: of {head_dim} columns among {warps} warps, {columns} for each, "
            "none are left for the last"
        )
    return None


def _alike(family: type[Config]) -> Iterator[tuple[int, Iterator[Config]]]:
    """Every point of a family that does not contradict itself, in a fixed order, in sets that are valid together.

    Yields:
        The number of those that differ in ungated parameters alone, one or more, and they themselves, which are made
        as they are taken.
    """
    ungated = [name for name in family.choices if name in family.ungated]
    gated = [name for name in family.choices if name not in family.ungated]
    names = [*gated, *ungated]
    in_order = itemgetter(*map(names.index, family.choices))
    of_gated = [one for one in family.contradictions if family.ungated.isdisjoint(one.parameters)]
    of_both = [one for one in family.contradictions if one not in of_gated]
    deciding = [name for name in gated if any(name in one.parameters for one in of_both)]
    others: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}  # values of those ungated, by the deciding ones

    def config(point: tuple[Any, ...], other: tuple[Any, ...]) -> Config:
        return family.of_choices(dict(zip(family.choices, in_order(point + other), strict=True)))

    for point in itertools.product(*(family.choices[name] for name in gated)):
        values = dict(zip(gated, point, strict=True))
        if any(one.among(values) for one in of_gated):
            continue
        key = tuple(values[name] for name in deciding)
        if key not in others:
            others[key] = [
                other
                for other in itertools.product(*(family.choices[name] for name in ungated))
                if not any(one.among(values | dict(zip(ungated, other, strict=True))) for one in of_both)
            ]
        yield len(others[key]), map(functools.partial(config, point), others[key])


def all_configs() -> Iterator[Config]:
    """Every point of every family that does not contradict itself, valid or not, in a fixed order."""
    for family in FAMILIES.values():
        for _, configs in _alike(family):
            yield from configs


def representatives() -> Iterator[Config]:
    """One point of each set of every family that is valid, or refused, as a whole; in a fixed order.

    They answer whether a problem has a valid configuration at a fraction of `all_configs`' cost. A set's points differ
    in their family's `ungated` parameters alone.
    """
    for family in FAMILIES.values():
        for _, configs in _alike(family):
            yield next(configs)


@functools.lru_cache(maxsize=8)
def _judged(problem: Problem, device: Device) -> tuple[tuple[Config, ...], Counter[str]]:
    """Every point, in one pass: the valid ones, and how many others are refused for which reason.

    There are hundreds of thousands, and a search waits for this: one of those alike is judged, and of what is refused
    no other configuration is made.
    """
    valid: list[Config] = []
    refused: Counter[str] = Counter()
    for family in FAMILIES.values():
        for number, configs in _alike(family):
            first = next(configs)
            reason = refusal(problem, first, device)
            if reason is None:
                valid.append(first)
                valid.extend(configs)
            else:
                refused[reason] += number
    return tuple(valid), refused


def valid_configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    """The points that arithmetic admits, in a fixed order.

    Raises:
        UsageError: There is none, with the reason.
    """
    if reason := head_dim_refusal(problem.head_dim):
        raise UsageError(reason)
    found, _ = _judged(problem, device)
    if not found:
        raise UsageError(f"no configuration fits {problem.label} on {device.name}")
    return found


def refusals(problem: Problem, device: Device) -> Counter[str]:
    """The reasons for which arithmetic refuses points, with their numbers."""
    return _judged(problem, device)[1]


def space_hash() -> str:
    """Changes where the parameters or their choices do: a study of another space cannot go on."""
    parameters = {family: config_type.choices for family, config_type in FAMILIES.items()}
    text = json.dumps(parameters, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_SPACE_HASH_DIGITS]
