"""The ``mmat`` family (``templates/mmat``): ``mma.sync``, transposed scores, mbarriers instead of block barriers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..device import Device
from ..emulation import Emulation
from ..problem import ACCUMULATOR_BYTES, FEATURES, FULL, Problem
from .base import (
    BARRIER_BYTES,
    FRAGMENT_COLUMNS,
    INDEX_BYTES,
    MMA_K,
    MMA_M,
    Config,
    Contradiction,
    Phase,
    TileWork,
    bias_registers,
    ceil_div,
    family,
    parameter,
)
from .context import KernelContext

_PITCH_BYTES = 128  # of a panel's row
_STAGGERED_WARPS = 8  # two for each of an SM's sub-partitions, which a block's warps go round
_SKIPPED_TILES = 0.3  # of t64, measured: 0.2 on an H200, 0.5 at the pace of a 5090
_COMPUTING_WARPS = 8  # beside a loading one
_WORKING_REGISTERS = 31  # all addresses; measured: more than 224 others spill
_WORKING_REGISTERS_BESIDE_LOADER = 16  # without those of the copies: 224 others again


@family
class TransposedMmaConfig(Config):
    """A point of the ``mmat`` family."""

    family: ClassVar[str] = "mmat"
    group: ClassVar[str] = "mma"
    features: ClassVar[frozenset[str]] = frozenset(FEATURES)
    has_probe: ClassVar[bool] = True

    # Of a loading warp's warpgroup; the template has them from here. The launch gives 168 registers to each thread.
    loading_threads: ClassVar[int] = 128
    loading_registers: ClassVar[int] = 24  # of a thread
    computing_registers: ClassVar[int] = 240  # what is then left to the others

    contradictions: ClassVar[tuple[Contradiction, ...]] = (
        Contradiction(
            ("query_groups", "exchange"),
            lambda groups, exchange: exchange and groups == 1,
            "an exchange is between query groups: there is one",
        ),
        Contradiction(
            ("p_first", "dv_first"),
            lambda p_first, dv_first: dv_first and not p_first,
            "dV before dP needs P before dP",
        ),
        Contradiction(
            ("p_first", "p_in_fp16"),
            lambda p_first, p_in_fp16: p_in_fp16 and not p_first,
            "P in fp16 needs P before dP",
        ),
        Contradiction(
            ("p_first", "p_in_fp16"),
            lambda p_first, p_in_fp16: p_first and not p_in_fp16,
            "dS of a P that is rounded to bf16 has 1.22 times the error of PyTorch's: hold it in fp16",
        ),
        Contradiction(
            ("p_in_fp16", "p_fp16_period"),
            lambda p_in_fp16, period: period > 1 and not p_in_fp16,
            "a period is of blocks of P in fp16",
        ),
        Contradiction(
            ("block_q", "query_groups", "p_fp16_period"),
            lambda queries, groups, period: period > queries // groups // MMA_K,
            "of {block_q} queries in {query_groups} parts, a warp has fewer than {p_fp16_period} blocks of 16",
        ),
        Contradiction(
            ("num_warps", "staggered"),
            lambda warps, staggered: staggered and warps != _STAGGERED_WARPS,
            f"staggered warps are pairs, one a sub-partition: {{num_warps}} are not {_STAGGERED_WARPS}",
        ),
        Contradiction(
            ("dq_vector", "dq_bulk_reduce"),
            lambda vector, bulk: bulk and vector != 4,
            "dQ is added in bulk, and not by vectors of {dq_vector}",
        ),
        Contradiction(
            ("num_warps", "loading_warp"),
            lambda warps, loading: loading and warps != _COMPUTING_WARPS,
            f"registers are divided among warpgroups, and {_COMPUTING_WARPS} warps compute: {{num_warps}} are not that",
        ),
        Contradiction(
            ("min_blocks_per_sm", "loading_warp"),
            lambda blocks, loading: loading and blocks > 1,
            "a block with a loading warp takes all registers of an SM: {min_blocks_per_sm} do not fit",
        ),
        Contradiction(
            ("dq_bulk_reduce", "loading_warp"),
            lambda bulk, loading: bulk and loading,
            "beside a loading warp, dQ is added from registers: in bulk it was slower throughout",
        ),
        Contradiction(
            ("dq_vector", "loading_warp"),
            lambda vector, loading: loading and vector != 4,
            "beside a loading warp, dQ is added by vectors of 4: {dq_vector} were slower throughout",
        ),
        Contradiction(
            ("query_groups", "exchange", "loading_warp"),
            lambda groups, exchange, loading: loading and groups > 1 and not exchange,
            "query groups add up dK and dV where the tiles are, which a loading warp fills again",
        ),
        Contradiction(
            ("loading_warp", "skip_masked"),
            lambda loading, skips: skips and not loading,
            "warps that skip tiles load none of them",
        ),
        Contradiction(
            ("l2_head_group", "loading_warp"),
            lambda group, loading: loading and group != 4,
            "beside a loading warp, groups of {l2_head_group} heads were no faster than those of 4",
        ),
        Contradiction(
            ("dq_vector", "l2_tail_heads"),
            lambda vector, tail: tail > 0 and vector != 4,
            "a longer last group is for kernels that add dQ by vectors of 4: by {dq_vector} all were slower",
        ),
        Contradiction(
            ("l2_head_group", "l2_tail_heads"),
            lambda group, tail: tail > 0 and group != 4,
            "a longer last group follows groups of 4 heads: of {l2_head_group} it was no faster",
        ),
        Contradiction(
            ("dq_vector", "preprocess_rows"),
            lambda vector, rows: rows > 1 and vector != 4,
            "several rows in flight are for kernels that add dQ by vectors of 4: by {dq_vector} all were slower",
        ),
        Contradiction(
            ("l2_head_group", "preprocess_rows"),
            lambda group, rows: rows > 1 and group != 4,
            "several rows in flight are for groups of 4 heads: those of {l2_head_group} were no faster",
        ),
        Contradiction(
            ("query_groups", "skip_masked"),
            lambda groups, skips: skips and groups > 1,
            "two groups of queries have the same keys, and so the same tiles masked",
        ),
    )

    block_q: int = parameter("q", (32, 64, 96, 128), "Rows of a Q/dO tile (B_r).")
    block_kv: int = parameter("kv", (64, 128), "Rows of a K/V tile (B_c); one thread block owns one.")
    num_warps: int = parameter("w", (4, 8), "Warps of a block.")
    query_groups: int = parameter(
        "g", (1, 2), "Groups of warps that divide a tile's queries; the warps of a group divide its keys.", default=1
    )
    exchange: bool = parameter(
        "x",
        (False, True),
        "With two query groups, exchange P and dS through shared memory, so that a warp sums dK and dV over all "
        "queries and for half of the columns; else each group sums over its own queries, added up at the end.",
        default=False,
    )
    dq_row_warps: int = parameter(
        "r", (1, 2, 4), "Warps that divide the queries of dQ = dS K; the others divide its columns.", default=2
    )
    q_stages: int = parameter("s", (2, 3), "Q tiles in shared memory.", default=2)
    do_stages: int = parameter("o", (1, 2, 3), "dO tiles in shared memory; 1 loads after use.", default=1)
    k_in_registers: bool = parameter(
        "k",
        (False, True),
        "Keep the warp's K fragments of S^T = K Q^T in registers, or read them again for each tile.",
        default=False,
    )
    v_in_registers: bool = parameter(
        "v",
        (False, True),
        "The same for V in dP^T = V dO^T; V then needs no shared memory of its own.",
        default=False,
    )
    p_first: bool = parameter(
        "p",
        (False, True),
        "Compute P before dP, packed to 16 bits: half the registers while dP is computed, and dS is made of the "
        "rounded P.",
        default=False,
    )
    p_in_fp16: bool = parameter(
        "f",
        (False, True),
        "With P first, round it to fp16 until dS is made of it, also where the elements are bf16: dS is then as exact "
        "as without P first.",
        default=False,
        affects_validity=False,
    )
    dv_first: bool = parameter("d", (False, True), "Compute dV before dP as well.", default=False)
    staggered: bool = parameter(
        "t",
        (False, True),
        "The second of the two warps of an SM sub-partition begins a tile when the first has issued S.",
        default=False,
        affects_validity=False,
    )
    min_blocks_per_sm: int = parameter("b", (1, 2), "Second argument of `__launch_bounds__`.", default=1)
    l2_head_group: int = parameter(
        "h",
        (2, 4, 8),
        "Heads whose blocks are scheduled together, to share the L2.",
        default=4,
        affects_validity=False,
        stored="head_group",
    )
    p_fp16_period: int = parameter(
        "e",
        (1, 2, 4),
        "Of so many blocks of 16 queries, one is held as `p_in_fp16` says; the others spare the conversions, and their "
        "dS is made of a P that is rounded as the elements are.",
        default=1,
        later=True,
        affects_validity=False,
    )
    dq_vector: int = parameter(
        "a",
        (1, 2, 4),
        "Floats a thread adds to dQ by one `red.global`.",
        default=4,
        later=True,
        affects_validity=False,
    )
    dq_bulk_reduce: bool = parameter(
        "u",
        (False, True),
        "Each warp stages its part of dQ in shared memory, from where one thread adds it by `cp.reduce.async.bulk`; "
        "else threads add theirs from registers.",
        default=False,
        later=True,
        stored="dq_bulk",
    )
    loading_warp: bool = parameter(
        "lw",
        (False, True),
        "One more warp loads all tiles. It comes with a warpgroup of its own; the others have 240 registers a thread.",
        default=False,
        later=True,
    )

    skip_masked: bool = parameter(
        "m",
        (False, True),
        "Warps whose half of a tile's keys is masked altogether compute only their share of dQ there.",
        default=False,
        later=True,
    )

    l2_tail_heads: int = parameter(
        "z",
        (0, 32),
        "So many heads at least are the last of these groups: SMs then end together. 0: as many as in any other.",
        default=0,
        later=True,
        affects_validity=False,
    )

    preprocess_rows: int = parameter(
        "n",
        (1, 4),
        "Rows of O and dO, and of dQ's sums, that a thread of the passes loads before it waits for the first.",
        default=1,
        later=True,
        affects_validity=False,
    )

    @property
    def threads(self) -> int:
        return 32 * self.num_warps + (self.loading_threads if self.loading_warp else 0)

    @property
    def divides_registers(self) -> bool:
        return self.loading_warp

    def register_limit(self, device: Device) -> int:
        return self.computing_registers if self.loading_warp else super().register_limit(device)

    @property
    def exchanges(self) -> bool:
        """Whether query groups hand P and dS to each other."""
        return self.query_groups > 1 and self.exchange

    @property
    def exchanges_p_first(self) -> bool:
        """Whether they hand over P before there is dS, for dV: apart from it, and behind barriers of its own."""
        return self.exchanges and self.dv_first

    @property
    def splits_k(self) -> bool:
        """Whether query groups have parts of dK and dV, to be added up."""
        return self.query_groups > 1 and not self.exchange

    @property
    def ds_parts(self) -> int:
        """Parts of the keys whose dS dQ waits for, one after another: a warp's own first, those that are late last.

        With an exchange, those who exchange are a part. Else more than two cost registers that are not there.
        """
        groups = self.num_warps // self.query_groups
        return groups if self.exchanges else min(groups, 2)

    @property
    def column_parts(self) -> tuple[int, int]:
        """Into how many parts the columns of dK and dV, and those of dQ, are divided."""
        return self.query_groups if self.exchanges else 1, self.num_warps // self.dq_row_warps

    def columns(self, problem: Problem) -> tuple[int, int, int]:
        """Columns that each part of dK, each of dV and each of dQ has, with what fills up the last part's.

        The parts take pairs of fragments in turns.
        """
        dkv_parts, dq_parts = self.column_parts
        head_dim = problem.head_dim
        return _columns(head_dim, dkv_parts), _columns(problem.head_dim_v, dkv_parts), _columns(head_dim, dq_parts)

    def refusal(self, problem: Problem, device: Device) -> str | None:
        groups, warps, row_warps = self.query_groups, self.num_warps, self.dq_row_warps
        for name, head_dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if head_dim < MMA_K:
                return f"{name} {head_dim}: the {self.family} kernels take {MMA_K} and more"
        divisions = (
            ("S", self.block_kv, "keys", warps // groups, MMA_M),
            ("S", self.block_q, "queries", groups, MMA_K),
            ("dQ", self.block_q, "queries", row_warps, MMA_M),
        )
        for product, size, unit, parts, multiple in divisions:
            if size % (parts * multiple):
                wrong = f"{size} {unit} in {parts} parts are not a multiple of {multiple} each"
                return f"{product} does not divide: {wrong}"
        dkv_parts, dq_parts = self.column_parts
        of_parts = [("dK and dV", problem.head_dim, dkv_parts), ("dQ", problem.head_dim, dq_parts)]
        if problem.value_head_dim:
            of_parts.append(("dV", problem.head_dim_v, dkv_parts))
        for product, head_dim, parts in of_parts:
            if (parts - 1) * FRAGMENT_COLUMNS >= head_dim:
                return (
                    f"{product} does not divide: of {head_dim} columns in {parts} parts, {FRAGMENT_COLUMNS} at "
                    "a time, none are left for the last"
                )
            there, filled = _panel_columns(head_dim, problem), parts * _columns(head_dim, parts)
            if filled > there:
                return (
                    f"{product} does not divide: {head_dim} columns in {parts} parts are filled up to "
                    f"{filled}, and a tile has {there}"
                )
        if self.p_first and problem.sink and problem.dtype == "fp16":
            return "a sink may leave all of a row's P below fp16's normal range: dS has to be made of P in fp32"
        if self.skip_masked and problem.mask == FULL:
            return "there is no mask that would leave tiles to be skipped"
        if self.loading_warp and (needed := self.registers(problem)) > self.computing_registers:
            return f"about {needed} registers a thread: beside a loading warp there are {self.computing_registers}"
        if self.p_first and problem.softcap and problem.bias_grad:
            return "with P first, P times the cap's derivative is kept for dS, and dBias needs P itself"
        return None

    def shared_memory_bytes(self, problem: Problem) -> int:
        of_row, of_value_row = (
            _panel_columns(head_dim, problem) * problem.element_bytes
            for head_dim in (problem.head_dim, problem.head_dim_v)
        )
        k_tile, v_tile = self.block_kv * of_row, self.block_kv * of_value_row
        score_tiles = 1 + self.exchanges
        dk_columns, dv_columns, dq_columns = self.columns(problem)
        _, dq_parts = self.column_parts
        staged_dq = self.block_q * dq_parts * dq_columns * ACCUMULATOR_BYTES if self.dq_bulk_reduce else 0
        tiles = (
            k_tile
            + (0 if self.v_in_registers else v_tile)
            + self.block_q * (self.q_stages * of_row + self.do_stages * of_value_row)
            + score_tiles * self.block_q * self.block_kv * problem.element_bytes
            + staged_dq
        )
        # V on its way to registers lies where the others will; at the end, parts of dK and dV where they were.
        at_start = k_tile + v_tile if self.v_in_registers else 0
        at_end = self.block_kv * (dk_columns + dv_columns) * ACCUMULATOR_BYTES if self.splits_k else 0
        statistics = (self.q_stages + self.do_stages) * self.block_q * ACCUMULATOR_BYTES  # L beside Q, delta beside dO
        parts = (1 + self.exchanges_p_first) * self.ds_parts
        barriers = 4 + parts + self.q_stages + self.do_stages
        if self.loading_warp:  # three of its own, and as many of dS as there are stages
            barriers += 3 + max(self.q_stages, self.do_stages) - 1
        indices = (2 + self.num_warps) * INDEX_BYTES  # of this item and of the next one, and each warp's note
        return max(tiles, at_start, at_end) + statistics + barriers * BARRIER_BYTES + indices

    def registers(self, problem: Problem) -> int:
        keys = self.block_kv * self.query_groups // self.num_warps
        queries = self.block_q // self.query_groups
        dk_columns, dv_columns, dq_columns = self.columns(problem)
        sums = keys * (dk_columns + dv_columns) // 32
        of_k, of_v = (ceil_div(head_dim, MMA_K) * MMA_K for head_dim in (problem.head_dim, problem.head_dim_v))
        kept = (self.k_in_registers * of_k + self.v_in_registers * of_v) * keys // 64
        # S and dP are alive together, or P in 16 bits and dP; dQ after them. With a cap, what dS is made of is kept
        # beside P until dV is computed.
        scores = keys * queries // 32
        beside_dp = scores if not self.p_first or (problem.softcap and not self.dv_first) else scores // 2
        passing = max(scores + beside_dp, self.block_q // self.dq_row_warps * dq_columns // 32)
        working = _WORKING_REGISTERS_BESIDE_LOADER if self.loading_warp else _WORKING_REGISTERS
        return sums + kept + passing + bias_registers(problem) + working

    def context(self, problem: Problem, pace: Emulation | None, probed: bool) -> KernelContext:
        return MmatContext.of(problem, self, pace, probed)

    def product_columns(self, problem: Problem) -> int:
        of_scores = sum(ceil_div(head_dim, MMA_K) * MMA_K for head_dim in (problem.head_dim, problem.head_dim_v))
        (dkv_parts, dq_parts), (of_dk, of_dv, of_dq) = self.column_parts, self.columns(problem)
        return of_scores + dq_parts * of_dq + dkv_parts * (of_dk + of_dv)

    def tile_work(self, problem: Problem) -> TileWork:
        warps, groups, block_q, block_kv = self.num_warps, self.query_groups, self.block_q, self.block_kv
        depth, depth_v = ceil_div(problem.head_dim, MMA_K), ceil_div(problem.head_dim_v, MMA_K)
        columns = (problem.head_dim + problem.head_dim_v) // (2 if self.exchanges else 1)
        key_blocks = block_kv * groups // warps // MMA_M
        query_blocks = block_q // groups // MMA_K
        of_scores = depth * (query_blocks + (not self.k_in_registers) * key_blocks)
        of_scores += depth_v * (query_blocks + (not self.v_in_registers) * key_blocks)
        of_dkv = query_blocks * columns // FRAGMENT_COLUMNS
        if self.exchanges:  # twice the queries, half of them with the partner's P and dS, and P read again
            of_dkv = 2 * (of_dkv + query_blocks * key_blocks) + query_blocks * key_blocks * self.dv_first
        dq_columns = problem.head_dim * self.dq_row_warps // warps
        of_dq = block_kv // MMA_K * (block_q // self.dq_row_warps // MMA_M + dq_columns // FRAGMENT_COLUMNS)
        score_tiles = 1.0 + self.exchanges
        if self.exchanges_p_first and self.p_in_fp16 and problem.dtype == "bf16":
            score_tiles += 1 / self.p_fp16_period  # P that dS is made of, apart from dV's
        stored = int(score_tiles * block_q * block_kv) * problem.element_bytes
        # In bulk, dQ is stored and read again.
        added = (1 + self.dq_bulk_reduce) * block_q * problem.head_dim * ACCUMULATOR_BYTES
        panels = sum(
            ceil_div(head_dim * problem.element_bytes, _PITCH_BYTES)
            for head_dim in (problem.head_dim, problem.head_dim_v)
        )
        phase = Phase(
            products=3 * problem.head_dim + 2 * problem.head_dim_v,
            fragments=warps * (of_scores + of_dkv + of_dq),
            shared_bytes=stored + added,
            copied_rows=block_q * panels,
            computes_scores=True,
        )
        return TileWork(
            phases=(phase,),
            # A stage that is loaded after its use has the rest of the tile to arrive in.
            tiles_ahead=min(self.q_stages, self.do_stages) - 0.5,
            in_step=not self.staggered,
            dq_vector=None if self.dq_bulk_reduce else self.dq_vector,
            skipped_tiles=_SKIPPED_TILES * self.skip_masked,
            preprocess_rows=self.preprocess_rows,
        )


@dataclass(frozen=True)
class MmatContext(KernelContext):
    """The ``mmat`` family's."""

    config: TransposedMmaConfig

    @property
    def preprocess_rows(self) -> int:
        return self.config.preprocess_rows

    @property
    def orders_proxies(self) -> bool:
        return self.config.dq_bulk_reduce and self.deterministic

    @property
    def pads_sequences(self) -> bool:
        return self.varlen

    @property
    def sequence(self) -> str:
        """The member of an item that says which sequence it is of."""
        return "sequence" if self.varlen else "batch"

    @property
    def sequence_lengths(self) -> str:
        return "item."

    @property
    def exchanges(self) -> bool:
        """Whether two query groups hand P and dS to each other, so that each sums dK and dV over all queries."""
        return self.config.exchanges

    @property
    def exchanges_p_first(self) -> bool:
        """Whether they hand over P ahead of dS, behind barriers of its own."""
        return self.config.exchanges_p_first

    @property
    def splits_queries(self) -> bool:
        """Whether query groups have parts of dK and dV, which are added up at the end."""
        return self.config.splits_k

    @property
    def held_p(self) -> str:
        """The type in which P waits until dS is made of it."""
        return "fp16" if self.config.p_first and self.config.p_in_fp16 else self.dtype

    @property
    def divides_evenly(self) -> bool:
        """Whether the column groups of dK and dV, and the column warps of dQ, have all the same columns."""
        dkv_groups = self.config.query_groups if self.exchanges else 1
        dq_warps = self.config.num_warps // self.config.dq_row_warps
        of_parts = ((self.head_dim, dkv_groups), (self.head_dim, dq_warps), (self.head_dim_v, dkv_groups))
        return all(head_dim % (FRAGMENT_COLUMNS * parts) == 0 for head_dim, parts in of_parts)

    @property
    def converts_p(self) -> bool:
        """Whether P is held in another type than the products take it in.

        With a cap, dS is made of another value than P, and P itself needs no other type.
        """
        return self.held_p != self.dtype and not self.softcap

    @property
    def mixes_p(self) -> bool:
        """Whether only some blocks of P are held in that other type."""
        return self.converts_p and self.config.p_fp16_period > 1

    @property
    def sets_p_aside(self) -> bool:
        """Whether what dS is made of, if it is not dV's P, waits in shared memory where dS will lie."""
        return self.exchanges_p_first and (self.converts_p or self.softcap)


def _columns(head_dim: int, parts: int) -> int:
    """Columns that each of so many parts has, with what fills up the last one's."""
    return ceil_div(ceil_div(head_dim, FRAGMENT_COLUMNS), parts) * FRAGMENT_COLUMNS


def _panel_columns(head_dim: int, problem: Problem) -> int:
    """Columns that a tile of an input has in shared memory: whole panels."""
    panel_columns = _PITCH_BYTES // problem.element_bytes
    return ceil_div(head_dim, panel_columns) * panel_columns
