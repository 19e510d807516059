"""What a configuration needs, by arithmetic alone: shared memory, threads, registers, blocks an SM."""

from __future__ import annotations

from dataclasses import dataclass

from .config import MMA_COLUMNS, MMA_DEPTH, MMA_ROWS, Config
from .device import Device
from .problem import Problem

_CHUNK_BYTES = 16  # what ldmatrix reads of a row, and the narrowest panel
_BARRIER_BYTES = 8
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
    row_bytes = ceil_div(problem.head_dim * problem.element_bytes, pitch) * pitch
    keys = 2 * config.block_kv * row_bytes
    queries = 2 * config.stages * config.block_q * row_bytes
    scores = 2 * config.block_q * config.block_kv * problem.element_bytes
    barriers = 1 + max(config.stages - 1, 1)
    return keys + queries + scores + barriers * _BARRIER_BYTES


def key_group_warps(config: Config) -> tuple[int, int]:
    """How the warps share out dK and dV: warps to a group of 16 keys, and groups of 16 keys to a warp."""
    groups = config.block_kv // MMA_ROWS
    warps_per_group = max(config.num_warps // groups, 1)
    return warps_per_group, groups * warps_per_group // config.num_warps


def _registers(problem: Problem, config: Config) -> int:
    score_fragments = config.block_kv // MMA_COLUMNS // config.warps_per_row_group
    dq_fragments = problem.head_dim // MMA_COLUMNS // config.warps_per_row_group
    warps_per_key_group, groups_per_warp = key_group_warps(config)
    dkv_fragments = groups_per_warp * problem.head_dim // MMA_COLUMNS // warps_per_key_group
    kept_operands = int(config.k_in_registers) + int(config.v_in_registers)
    kept = kept_operands * problem.head_dim // MMA_DEPTH * score_fragments * 2
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


def mma_count(problem: Problem, config: Config) -> int:
    """The m16n8k16 products of a launch of the main kernel, tails and masked elements of a tile included.

    A block has a tile of keys and meets every tile of queries, of a causal mask those from its first key on: five
    products of ``block_q`` x ``block_kv`` x ``head_dim`` each.
    """
    query_tiles = ceil_div(problem.seqlen_q, config.block_q)
    met = 0
    for kv_start in range(0, problem.seqlen_kv, config.block_kv):
        met += max(query_tiles - (kv_start // config.block_q if problem.causal else 0), 0)
    tile = 5 * config.block_q * config.block_kv * problem.head_dim // (MMA_ROWS * MMA_COLUMNS * MMA_DEPTH)
    return problem.batch * problem.heads_q * met * tile


def tensor_activity(problem: Problem, config: Config, device: Device, *, cycles: float, clocks_per_mma: float) -> float:
    """How much of the time the tensor cores work: ``mma_count x clocks_per_mma / (sub-partitions x cycles)``, 0 to 1.

    The mma are those of all SMs, and so are the sub-partitions: four an SM. The cycles are those of the SM that took
    longest, so an uneven end counts as idle time.

    Args:
        problem: What is computed.
        config: The configuration.
        device: The card that runs.
        cycles: From the first start to the last end of a block on the longest SM.
        clocks_per_mma: Of a sub-partition; where another card's pace is emulated, those of an mma and its dummies.
    """
    sub_partitions = device.sm_count * device.sub_partitions_per_sm
    return mma_count(problem, config) * clocks_per_mma / (sub_partitions * cycles)
