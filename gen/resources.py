"""What a configuration needs, by arithmetic alone: shared memory, threads, registers, blocks an SM."""

from __future__ import annotations

from dataclasses import dataclass

from .config import (
    CONVERTED_ROWS,
    MMA_COLUMNS,
    MMA_DEPTH,
    MMA_ROWS,
    Config,
    MmaConfig,
    TransposedMmaConfig,
    WgmmaConfig,
)
from .device import Device
from .problem import ACCUMULATOR_BYTES, Problem

_CHUNK_BYTES = 16  # what ldmatrix reads of a row, and the narrowest panel
_BARRIER_BYTES = 8
_NUMBER_BYTES = 4  # where a block's threads read the number that one of them took
FRAGMENT_COLUMNS = 16  # ldmatrix.x4 reads two 8-column B fragments at a time
_FRAGMENT_REGISTERS = 4  # an accumulator fragment's fp32 values in a thread; also an ldmatrix.x4
_WORKING_REGISTERS = 16  # two operand fragments in flight, and the addresses and loop state that nothing can do without
_TRANSPOSED_WORKING_REGISTERS = 31  # the same where they are all addresses; measured: more than 224 others spill
_TRANSPOSED_PITCH_BYTES = 128
_WGMMA_PANEL_COLUMNS = 64
_WGMMA_WORKING_REGISTERS = 28
_WGMMA_STAGES = 2  # of Q and of dO, and of dS
_WGMMA_ITEM_STAGES = 8
_WGMMA_BARRIERS = 21 + 2 * _WGMMA_ITEM_STAGES
_WGMMA_ZEROS_BYTES = 2048  # that dQ's places are cleared with where it is converted beside other work
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
    if isinstance(config, TransposedMmaConfig):
        shared_memory, registers = (
            _transposed_shared_memory_bytes(problem, config),
            _transposed_registers(problem, config),
        )
    elif isinstance(config, WgmmaConfig):
        shared_memory, registers = _wgmma_shared_memory_bytes(problem, config), _wgmma_registers(problem, config)
    else:
        shared_memory, registers = _shared_memory_bytes(problem, config), _registers(problem, config)
    return Estimate(config.threads, shared_memory, registers)


def _shared_memory_bytes(problem: Problem, config: MmaConfig) -> int:
    pitch = config.swizzle or _CHUNK_BYTES
    row_bytes = ceil_div(max(_columns(problem, config)) * problem.element_bytes, pitch) * pitch
    keys = 2 * config.block_kv * row_bytes
    queries = 2 * config.stages * config.block_q * row_bytes
    scores = 2 * config.block_q * config.block_kv * problem.element_bytes
    barriers = 1 + max(config.stages - 1, 1)
    number = _NUMBER_BYTES if problem.deterministic else 0
    return keys + queries + scores + barriers * _BARRIER_BYTES + number


def _columns(problem: Problem, config: MmaConfig) -> tuple[int, int, int]:
    """Columns of head_dim as S and dP, dQ, and dK and dV have them, with what fills up the last warp's."""
    warps_per_key_group, _ = key_group_warps(config)
    of_scores, of_dq, of_dkv = (
        warps * columns_per_warp(problem.head_dim, warps)
        for warps in (1, config.warps_per_row_group, warps_per_key_group)
    )
    return of_scores, of_dq, of_dkv


def columns_per_warp(head_dim: int, warps: int) -> int:
    """Columns of head_dim that each of some warps takes: whole pairs of fragments, and so perhaps more than exist."""
    return ceil_div(head_dim, warps * FRAGMENT_COLUMNS) * FRAGMENT_COLUMNS


def key_group_warps(config: MmaConfig) -> tuple[int, int]:
    """How the warps share out dK and dV: warps to a group of 16 keys, and groups of 16 keys to a warp."""
    groups = config.block_kv // MMA_ROWS
    warps_per_group = max(config.num_warps // groups, 1)
    return warps_per_group, groups * warps_per_group // config.num_warps


def _registers(problem: Problem, config: MmaConfig) -> int:
    score_fragments = config.block_kv // MMA_COLUMNS // config.warps_per_row_group
    dq_fragments = columns_per_warp(problem.head_dim, config.warps_per_row_group) // MMA_COLUMNS
    warps_per_key_group, groups_per_warp = key_group_warps(config)
    dkv_fragments = groups_per_warp * columns_per_warp(problem.head_dim, warps_per_key_group) // MMA_COLUMNS
    kept_operands = int(config.k_in_registers) + int(config.v_in_registers)
    kept = kept_operands * ceil_div(problem.head_dim, MMA_DEPTH) * score_fragments * 2
    # S and dP are alive together, dQ after them.
    passing = _FRAGMENT_REGISTERS * max(2 * score_fragments, dq_fragments)
    return 2 * _FRAGMENT_REGISTERS * dkv_fragments + kept + passing + _WORKING_REGISTERS


def transposed_columns(head_dim: int, config: TransposedMmaConfig) -> tuple[int, int]:
    """Columns of head_dim that each group of dK and dV and each column warp of dQ has, with what fills up the last's.

    They take pairs of fragments in turns.
    """
    pairs = ceil_div(head_dim, FRAGMENT_COLUMNS)
    groups, warps = transposed_column_parts(config)
    return ceil_div(pairs, groups) * FRAGMENT_COLUMNS, ceil_div(pairs, warps) * FRAGMENT_COLUMNS


def transposed_column_parts(config: TransposedMmaConfig) -> tuple[int, int]:
    """Into how many parts the columns of dK and dV, and those of dQ, are divided."""
    return config.query_groups if config.exchanges else 1, config.num_warps // config.dq_row_warps


def transposed_panel_columns(problem: Problem) -> int:
    """Columns that a tile of an input has in shared memory: whole panels."""
    panel_columns = _TRANSPOSED_PITCH_BYTES // problem.element_bytes
    return ceil_div(problem.head_dim, panel_columns) * panel_columns


def _transposed_shared_memory_bytes(problem: Problem, config: TransposedMmaConfig) -> int:
    row_bytes = transposed_panel_columns(problem) * problem.element_bytes
    key_tile = config.block_kv * row_bytes
    queries = (config.q_stages + config.do_stages) * config.block_q
    score_tiles = 1 + config.exchanges
    dkv_columns, dq_columns = transposed_columns(problem.head_dim, config)
    _, dq_parts = transposed_column_parts(config)
    staged_dq = config.block_q * dq_parts * dq_columns * ACCUMULATOR_BYTES if config.dq_bulk else 0
    tiles = (
        (1 if config.v_in_registers else 2) * key_tile
        + queries * row_bytes
        + score_tiles * config.block_q * config.block_kv * problem.element_bytes
        + staged_dq
    )
    # V on its way to registers lies where the others will; at the end, parts of dK and dV where they were.
    at_start = 2 * key_tile if config.v_in_registers else 0
    at_end = 2 * config.block_kv * dkv_columns * 4 if config.splits_k else 0
    row_values = config.q_stages + config.do_stages
    parts = (1 + config.exchanges_p_first) * config.ds_parts
    barriers = 4 + parts + config.q_stages + config.do_stages
    numbers = (2 + config.num_warps) * _NUMBER_BYTES  # of this item and of the next one, and each warp's note
    return max(tiles, at_start, at_end) + row_values * config.block_q * 4 + barriers * _BARRIER_BYTES + numbers


def _transposed_registers(problem: Problem, config: TransposedMmaConfig) -> int:
    keys = config.block_kv * config.query_groups // config.num_warps
    queries = config.block_q // config.query_groups
    dkv_columns, dq_columns = transposed_columns(problem.head_dim, config)
    sums = 2 * keys * dkv_columns // 32
    kept_columns = ceil_div(problem.head_dim, MMA_DEPTH) * MMA_DEPTH
    kept = (int(config.k_in_registers) + int(config.v_in_registers)) * keys * kept_columns // 64
    # S and dP are alive together, or P in 16 bits and dP; dQ after them. With a cap, what dS is made of is kept
    # beside P until dV is computed.
    scores = keys * queries // 32
    beside_dp = scores if not config.p_first or (problem.softcap and not config.dv_first) else scores // 2
    passing = max(scores + beside_dp, config.block_q // config.dq_row_warps * dq_columns // 32)
    return sums + kept + passing + _TRANSPOSED_WORKING_REGISTERS


def _wgmma_columns(head_dim: int) -> tuple[int, int]:
    """Columns of head_dim as sums, dK and dV have them, in steps of k, and as tiles and dQ do, in panels."""
    return ceil_div(head_dim, MMA_DEPTH) * MMA_DEPTH, ceil_div(head_dim, _WGMMA_PANEL_COLUMNS) * _WGMMA_PANEL_COLUMNS


def _wgmma_shared_memory_bytes(problem: Problem, config: WgmmaConfig) -> int:
    block_q, block_kv, stages = config.block_q, config.block_kv, _WGMMA_STAGES
    _, panel_columns = _wgmma_columns(problem.head_dim)
    row_bytes = panel_columns * problem.element_bytes
    keys = 2 * block_kv * row_bytes
    queries = 2 * stages * block_q * row_bytes
    ds = stages * block_q * block_kv * problem.element_bytes
    dq = block_q * panel_columns * ACCUMULATOR_BYTES
    # A pattern of 8 rows for every 64 queries, for each stage of L and of delta, and one of zeros; or a float each.
    statistics = block_q // 64 * 1024 if config.fold_statistics else block_q * 4
    zeros, converted, sums_stages = statistics if config.fold_statistics else 0, 0, 0
    if config.convert_dq:
        # Sums on their way in, the last ones converted, and more zeros.
        sums_stages = 3 if block_q == 64 else 2
        row_bytes_of_part = _WGMMA_PANEL_COLUMNS * (sums_stages * ACCUMULATOR_BYTES + problem.element_bytes)
        zeros, converted = _WGMMA_ZEROS_BYTES, CONVERTED_ROWS * row_bytes_of_part
    barriers = (_WGMMA_BARRIERS + sums_stages) * _BARRIER_BYTES
    tiles = keys + queries + ds + dq + converted
    return tiles + 2 * stages * statistics + zeros + barriers + 4 * _WGMMA_ITEM_STAGES


def _wgmma_registers(problem: Problem, config: WgmmaConfig) -> int:
    """Of a computing thread. One that loads or stores needs few; the launch itself asks for a third of an SM's."""
    sums = 2 * _wgmma_columns(problem.head_dim)[0] // 2
    constants = (2 if problem.dtype == "fp16" else 1) * config.fold_statistics
    kept = _FRAGMENT_REGISTERS * (config.v_fragments + constants)
    # S and dP are alive together; P and dS in 16 bits, which take their place, with dQ.
    scores = config.block_q
    slopes = (
        config.block_q * 7 // 32 if problem.softcap else 0
    )  # measured: with less to spare, ptxas spills or serializes
    return sums + kept + scores + slopes + _WGMMA_WORKING_REGISTERS


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

    A block has a tile of keys and meets the tiles of queries that the mask leaves it: five products of ``block_q`` x
    ``block_kv`` x ``head_dim`` each, whose columns some warps and panels fill up.
    """
    met = sum(sum(query_tiles_met(problem, config.block_q, config.block_kv, *lengths)) for lengths in problem.lengths)
    columns = 5 * problem.head_dim
    if isinstance(config, MmaConfig):
        of_scores, of_dq, of_dkv = _columns(problem, config)
        columns = 2 * of_scores + of_dq + 2 * of_dkv
    elif isinstance(config, WgmmaConfig):
        of_sums, of_dq = _wgmma_columns(problem.head_dim)
        columns = 4 * of_sums + of_dq
    elif isinstance(config, TransposedMmaConfig):
        of_scores = ceil_div(problem.head_dim, MMA_DEPTH) * MMA_DEPTH
        (groups, warps), (of_dkv, of_dq) = transposed_column_parts(config), transposed_columns(problem.head_dim, config)
        columns = 2 * of_scores + warps * of_dq + 2 * groups * of_dkv
    tile = config.block_q * config.block_kv * columns // (MMA_ROWS * MMA_COLUMNS * MMA_DEPTH)
    return problem.heads_q * met * tile


def query_tiles_met(problem: Problem, block_q: int, block_kv: int, seqlen_q: int, seqlen_kv: int) -> tuple[int, ...]:
    """The tiles of queries that the mask leaves each tile of keys, of one head of a sequence of these lengths."""
    low, high = problem.band(seqlen_q, seqlen_kv)
    query_tiles = ceil_div(seqlen_q, block_q)
    met = []
    for kv_start in range(0, seqlen_kv, block_kv):
        first = max(kv_start - high, 0) // block_q
        end = min((kv_start + block_kv - 1 - low) // block_q + 1, query_tiles)
        met.append(max(end - first, 0))
    return tuple(met)


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
