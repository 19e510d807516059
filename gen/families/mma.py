"""The ``mma`` family (``templates/mma``): ``mma.sync``, one block for each tile of keys, block barriers in the loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..device import Device
from ..emulation import Emulation
from ..problem import ACCUMULATOR_BYTES, FEATURES, Problem
from .base import (
    BARRIER_BYTES,
    FRAGMENT_COLUMNS,
    FRAGMENT_REGISTERS,
    INDEX_BYTES,
    MMA_K,
    MMA_M,
    MMA_N,
    Config,
    Phase,
    TileWork,
    bias_registers,
    ceil_div,
    family,
    parameter,
)
from .context import KernelContext

_CHUNK_BYTES = 16  # what ldmatrix reads of a row, and the narrowest panel
_WORKING_REGISTERS = 16  # two operand fragments in flight, and the addresses and loop state that nothing can do without


@family
class MmaConfig(Config):
    """A point of the ``mma`` family. All tuning: none of it changes the result."""

    family: ClassVar[str] = "mma"
    group: ClassVar[str] = "mma"
    features: ClassVar[frozenset[str]] = frozenset(FEATURES)
    has_probe: ClassVar[bool] = True

    block_q: int = parameter("q", (16, 32, 64, 128), "Rows of a Q/dO tile (B_r).")
    block_kv: int = parameter("kv", (32, 64, 128), "Rows of a K/V tile (B_c); one thread block owns one.")
    warps_per_row_group: int = parameter(
        "w", (1, 2, 4, 8), "Warps that share 16 rows of S; with `block_q` it gives the number of warps."
    )
    stages: int = parameter(
        "s", (1, 2, 3), "Q/dO tiles in shared memory: 1 loads after use, 2 and 3 load ahead.", default=1
    )
    swizzle: int = parameter(
        "sw",
        (128, 64, 32, 0),
        "Bytes of a shared-memory panel's row that TMA and ldmatrix permute; 0 is none: panels of 16 bytes, which need "
        "no permutation to be free of bank conflicts.",
        default=128,
    )
    k_in_registers: bool = parameter(
        "k",
        (False, True),
        "Keep the warp's K fragments of S = QK^T in registers, or read them again for each tile.",
        default=True,
    )
    v_in_registers: bool = parameter("v", (False, True), "The same for V in dP = dO V^T.", default=True)
    min_blocks_per_sm: int = parameter(
        "b",
        (1, 2, 3),
        "Second argument of `__launch_bounds__`: caps the registers so that as many blocks fit.",
        default=1,
    )
    dq_vector: int = parameter(
        "r",
        (1, 2, 4),
        "Floats a thread adds to dQ by one `red.global`; to dK and dV too, where blocks add them up.",
        default=2,
        affects_validity=False,
    )
    unroll_dq: bool = parameter(
        "u",
        (False, True),
        "Unroll the loop over keys of dQ = dS K; a loop keeps fewer operands in flight, and so in registers.",
        default=True,
        affects_validity=False,
    )
    split_gqa_heads: bool = parameter(
        "g",
        (False, True),
        "Give each query head of a group blocks of its own, whose dK and dV are added up in global memory; else a "
        "block goes over the heads of the group, one after another.",
        default=False,
        later=True,
        stored="split_group",
    )

    @property
    def row_groups(self) -> int:
        """Groups of 16 query rows in a tile."""
        return self.block_q // MMA_M

    @property
    def num_warps(self) -> int:
        return self.row_groups * self.warps_per_row_group

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    @property
    def key_group_warps(self) -> tuple[int, int]:
        """How the warps share out dK and dV: warps to a group of 16 keys, and groups of 16 keys to a warp."""
        groups = self.block_kv // MMA_M
        warps_per_group = max(self.num_warps // groups, 1)
        return warps_per_group, groups * warps_per_group // self.num_warps

    def refusal(self, problem: Problem, device: Device) -> str | None:
        if self.split_gqa_heads and problem.heads_q == problem.heads_kv:
            return "a group is one query head: there is nothing to split"
        if self.split_gqa_heads and problem.deterministic:
            return "dK and dV of a split group are added up in any order, which is not deterministic"
        if self.split_gqa_heads and problem.value_head_dim:
            return "dV of a split group is added up and converted as dK is, with as many columns"
        head_dim, warps, per_row_group = problem.head_dim, self.num_warps, self.warps_per_row_group
        if self.block_kv % (FRAGMENT_COLUMNS * per_row_group):
            return (
                f"S does not divide: {self.block_kv} keys among {per_row_group} warps are not a multiple of "
                f"{FRAGMENT_COLUMNS} each"
            )
        if reason := _idle_warp("dQ", head_dim, per_row_group):
            return reason
        key_groups = self.block_kv // MMA_M
        if warps % key_groups and key_groups % warps:
            return f"dK and dV do not divide: {warps} warps for {key_groups} groups of {MMA_M} keys"
        warps_per_key_group, _ = self.key_group_warps
        return _idle_warp("dK and dV", min(head_dim, problem.head_dim_v), warps_per_key_group)

    def shared_memory_bytes(self, problem: Problem) -> int:
        pitch = self.swizzle or _CHUNK_BYTES
        row_bytes = sum(
            ceil_div(max(self._columns(head_dim)) * problem.element_bytes, pitch) * pitch
            for head_dim in (problem.head_dim, problem.head_dim_v)
        )
        keys = self.block_kv * row_bytes
        queries = self.stages * self.block_q * row_bytes
        scores = 2 * self.block_q * self.block_kv * problem.element_bytes
        barriers = 1 + max(self.stages - 1, 1)
        index = INDEX_BYTES if problem.deterministic else 0
        return keys + queries + scores + barriers * BARRIER_BYTES + index

    def registers(self, problem: Problem) -> int:
        score_fragments = self.block_kv // MMA_N // self.warps_per_row_group
        dq_fragments = _columns_per_warp(problem.head_dim, self.warps_per_row_group) // MMA_N
        warps_per_key_group, groups_per_warp = self.key_group_warps
        dk_and_dv = (problem.head_dim, problem.head_dim_v)
        columns = sum(_columns_per_warp(head_dim, warps_per_key_group) for head_dim in dk_and_dv)
        of_k, of_v = (ceil_div(head_dim, MMA_K) for head_dim in dk_and_dv)
        kept = (self.k_in_registers * of_k + self.v_in_registers * of_v) * score_fragments * 2
        # S and dP are alive together, dQ after them.
        passing = FRAGMENT_REGISTERS * max(2 * score_fragments, dq_fragments)
        sums = FRAGMENT_REGISTERS * groups_per_warp * columns // MMA_N
        return sums + kept + passing + bias_registers(problem) + _WORKING_REGISTERS

    def context(self, problem: Problem, pace: Emulation | None, probed: bool) -> KernelContext:
        return MmaContext.of(problem, self, pace, probed)

    def product_columns(self, problem: Problem) -> int:
        of_s, of_dq, of_dk = self._columns(problem.head_dim)
        of_dp, _, of_dv = self._columns(problem.head_dim_v)
        return of_s + of_dp + of_dq + of_dk + of_dv

    def tile_work(self, problem: Problem) -> TileWork:
        warps, block_q, block_kv = self.num_warps, self.block_q, self.block_kv
        of_s, of_dq, of_dk = self._columns(problem.head_dim)
        of_dp, _, of_dv = self._columns(problem.head_dim_v)
        warps_per_key_group, groups = self.key_group_warps
        dq_columns, dkv_columns = of_dq // self.warps_per_row_group, (of_dk + of_dv) // warps_per_key_group
        key_pairs = block_kv // self.warps_per_row_group // FRAGMENT_COLUMNS
        read_for_s = of_s // MMA_K * (1 + (not self.k_in_registers) * key_pairs)
        read_for_dp = of_dp // MMA_K * (1 + (not self.v_in_registers) * key_pairs)
        read_for_dkv = warps * block_q // MMA_K * (2 * groups + dkv_columns // FRAGMENT_COLUMNS)
        read_for_dq = warps * block_kv // MMA_K * (1 + dq_columns // FRAGMENT_COLUMNS)
        panels = sum(
            ceil_div(head_dim * problem.element_bytes, self.swizzle or _CHUNK_BYTES)
            for head_dim in (problem.head_dim, problem.head_dim_v)
        )
        return TileWork(
            phases=(
                Phase(
                    products=of_s + of_dp,
                    fragments=warps * (read_for_s + read_for_dp),
                    copied_rows=block_q * panels,
                ),
                Phase(shared_bytes=2 * block_q * block_kv * problem.element_bytes, computes_scores=True),
                Phase(
                    products=of_dk + of_dv + of_dq,
                    fragments=read_for_dkv + read_for_dq,
                    shared_bytes=block_q * problem.head_dim * ACCUMULATOR_BYTES,
                ),
            ),
            block_barriers=2,
            tiles_ahead=self.stages - 1,
            dq_vector=self.dq_vector,
        )

    def _columns(self, head_dim: int) -> tuple[int, int, int]:
        """Columns of a head_dim as S or dP, dQ, and dK or dV have them, with what fills up the last warp's."""
        warps_per_key_group, _ = self.key_group_warps
        of_scores, of_dq, of_dkv = (
            warps * _columns_per_warp(head_dim, warps) for warps in (1, self.warps_per_row_group, warps_per_key_group)
        )
        return of_scores, of_dq, of_dkv


@dataclass(frozen=True)
class MmaContext(KernelContext):
    """The ``mma`` family's."""

    config: MmaConfig

    @property
    def swizzle_bytes(self) -> int:
        return self.config.swizzle

    @property
    def overlaps_kernels(self) -> bool:
        return False

    @property
    def transposes_quads(self) -> bool:
        return False

    @property
    def has_transposed_scores(self) -> bool:
        return False

    @property
    def has_counters(self) -> bool:
        return self.deterministic

    @property
    def splits_heads(self) -> bool:
        """Whether each query head of a group has blocks of its own, whose dK and dV are added up in global memory."""
        return self.config.split_gqa_heads


def _columns_per_warp(head_dim: int, warps: int) -> int:
    """Columns of head_dim that each of some warps takes: whole pairs of fragments, and so perhaps more than exist."""
    return ceil_div(head_dim, warps * FRAGMENT_COLUMNS) * FRAGMENT_COLUMNS


def _idle_warp(gradient: str, head_dim: int, warps: int) -> str | None:
    columns = _columns_per_warp(head_dim, warps)
    if (warps - 1) * columns >= head_dim:
        return (
            f"{gradient} does not divide: of {head_dim} columns among {warps} warps, {columns} for each, "
            "none are left for the last"
        )
    return None
