"""How busy the tensor cores are: the products of a launch, and their share of its cycles."""

from __future__ import annotations

from ...gen.device import Device
from ...gen.families import Config, ceil_div
from ...gen.families.base import MMA_K, MMA_M, MMA_N
from ...gen.problem import Problem

MMA_PRODUCTS = MMA_M * MMA_N * MMA_K  # multiply-adds of an mma.m16n8k16


def query_tiles_met(problem: Problem, block_q: int, block_kv: int, seqlen_q: int, seqlen_kv: int) -> tuple[int, ...]:
    """The tiles of queries that the mask leaves each tile of keys, of one head of a sequence of these lengths."""
    low, high = problem.visible_range(seqlen_q, seqlen_kv)
    query_tiles = ceil_div(seqlen_q, block_q)
    met = []
    for kv_start in range(0, seqlen_kv, block_kv):
        first = max(kv_start - high, 0) // block_q
        end = min((kv_start + block_kv - 1 - low) // block_q + 1, query_tiles)
        met.append(max(end - first, 0))
    return tuple(met)


def mma_count(problem: Problem, config: Config) -> int:
    """The m16n8k16 products of a launch of the main kernel, tails and masked elements of a tile included.

    A block has a tile of keys and meets the tiles of queries that the mask leaves it: five products of ``block_q`` x
    ``block_kv`` x a head_dim each, whose columns some warps and panels fill up.
    """
    met = sum(sum(query_tiles_met(problem, config.block_q, config.block_kv, *lengths)) for lengths in problem.lengths)
    return problem.heads_q * met * (config.block_q * config.block_kv * config.product_columns(problem) // MMA_PRODUCTS)


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
