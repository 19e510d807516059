"""What a configuration needs, by arithmetic alone: shared memory, threads, registers, blocks an SM."""

from __future__ import annotations

from dataclasses import dataclass

from .config import MMA_COLUMNS, MMA_DEPTH, MMA_ROWS, Config
from .device import Device
from .problem import Problem

_CHUNK_BYTES = 16  # what ldmatrix reads of a row, and the narrowest panel
_BARRIER_BYTES = 8
_NUMBER_BYTES = 4  # where a block's threads read the number that one of them took
FRAGMENT_COLUMNS = 16  # ldmatrix.x4 reads two 8-column B fragments at a time
_FRAGMENT_REGISTERS = 4  # an accumulator fragment's fp32 values in a thread; also an ldmatrix.x4
_WORKING_REGISTERS = 16  # two operand fragments in flight, and the addresses and loop state that nothing can do without
_REGISTER_ALLOCATION = 256  # registers are handed to a warp in these units
_SHARED_MEMORY_ALLOCATION = 128


@dataclass(frozen=True)
class Estimate:
    """What one block of a kernel needs.

    Attributes:
        threads: Threads a block.
        shared_memory_bytes: Dynamic shared memory a block; exact, the template computes the same.
        registers: Registers a thread, estimated from below: the accumulators and kept fragments that are alive
            together, and a bare minimum of everything else.
    """

    threads: int
    shared_memory_bytes: int
    registers: int


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def estimate(problem: Problem, config: Config) -> Estimate:
    """What `config` needs for `problem`. The configuration's divisibility is not checked here but in `space`."""
    return Estimate(config.threads, _shared_memory_bytes(problem, config), _registers(problem, config))


def _shared_memory_bytes(problem: Problem, config: Config) -> int:
    pitch = config.swizzle or _CHUNK_BYTES
    warps_per_key_group, _ = key_group_warps(config)
    columns = max(
        warps * columns_per_warp(problem.head_dim, warps)
        for warps in (1, config.warps_per_row_group, warps_per_key_group)
    )
    row_bytes = ceil_div(columns * problem.element_bytes, pitch) * pitch
    keys = 2 * config.block_kv * row_bytes
    queries = 2 * config.stages * config.block_q * row_bytes
    scores = 2 * config.block_q * config.block_kv * problem.element_bytes
    barriers = 1 + max(config.stages - 1, 1)
    number = _NUMBER_BYTES if problem.deterministic else 0
    return keys + queries + scores + barriers * _BARRIER_BYTES + number


def columns_per_warp(head_dim: int, warps: int) -> int:
    """Columns of head_dim that each of some warps takes: whole pairs of fragments, and so perhaps more than exist."""
    return ceil_div(head_dim, warps * FRAGMENT_COLUMNS) * FRAGMENT_COLUMNS


def key_group_warps(config: Config) -> tuple[int, int]:
    """How the warps share out dK and dV: warps to a group of 16 keys, and groups of 16 keys to a warp."""
    groups = config.block_kv // MMA_ROWS
    warps_per_group = max(config.num_warps // groups, 1)
    return warps_per_group, groups * warps_per_group // config.num_warps


def _registers(problem: Problem, config: Config) -> int:
    score_fragments = config.block_kv // MMA_COLUMNS // config.warps_per_row_group
    dq_fragments = columns_per_warp(problem.head_dim, config.warps_per_row_group) // MMA_COLUMNS
    warps_per_key_group, groups_per_warp = key_group_warps(config)
    dkv_fragments = groups_per_warp * columns_per_warp(problem.head_dim, warps_per_key_group) // MMA_COLUMNS
    kept_operands = int(config.k_in_registers) + int(config.v_in_registers)
    kept = kept_operands * ceil_div(problem.head_dim, MMA_DEPTH) * score_fragments * 2
    # S and dP are alive together, dQ after them.
    passing = _FRAGMENT_REGISTERS * max(2 * score_fragments, dq_fragments)
    return 2 * _FRAGMENT_REGISTERS * dkv_fragments + kept + passing + _WORKING_REGISTERS


def blocks_per_sm(device: Device, *, threads: int, registers: int, shared_memory_bytes: int) -> int:
    """Blocks that fit on one SM at a time, by threads, registers and shared memory; 0 where not even one does."""
    warps = ceil_div(threads, 32)
    registers_per_warp = ceil_div(registers * 32, _REGISTER_ALLOCATION) * _REGISTER_ALLOCATION
    shared = ceil_div(shared_memory_bytes, _SHARED_MEMORY_ALLOCATION) * _SHARED_MEMORY_ALLOCATION
    return min(
        device.max_threads_per_sm // (warps * 32),
        device.registers_per_sm // (registers_per_warp * warps),
        device.shared_memory_per_sm_bytes // (shared + device.reserved_shared_memory_per_block_bytes),
    )


def occupancy(device: Device, *, threads: int, registers: int, shared_memory_bytes: int) -> float:
    """Resident threads over the most an SM holds, 0 to 1."""
    blocks = blocks_per_sm(device, threads=threads, registers=registers, shared_memory_bytes=shared_memory_bytes)
    return blocks * threads / device.max_threads_per_sm
