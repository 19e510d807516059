"""The ``wgmma`` family (``templates/wgmma``): Hopper's warpgroups, one producer and two consumers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..device import Device
from ..emulation import Emulation
from ..problem import ACCUMULATOR_BYTES, BIAS_ELEMENT_BYTES, CAUSAL, FEATURES, FULL, WINDOW, Problem
from .base import (
    BARRIER_BYTES,
    FRAGMENT_REGISTERS,
    INDEX_BYTES,
    MMA_K,
    Config,
    Contradiction,
    Phase,
    TileWork,
    Value,
    ceil_div,
    family,
    parameter,
)
from .context import KernelContext

_CONVERTED_ROWS = 32  # of dQ, that the warp which converts it takes at a time
_HEAD_DIMS = range(32, 128 + 1, 8)
_P_FIRST_HEAD_DIMS = range(128 + 8, 192 + 1, 8)
_SPLIT_HEAD_DIMS = range(128 + 8, 256 + 1, 8)
_SPLIT_VALUE_HEAD_DIMS = range(32, 256 + 1, 8)
_CLUSTER_HEAD_DIMS = range(192 + 8, 256 + 1, 8)
_PANEL_COLUMNS = 64
_WORKING_REGISTERS = 28
_SKIPPED_TILES = 0.15  # measured at 512 and 1024 keys, head_dim 128
_PREFETCH_SLACK = 20  # measured: with fewer to spare, ptxas spills a bias that is read ahead


def _of_split(name: str, value: Value, reason: str) -> Contradiction:
    """That a parameter has this value where accumulators are split."""
    return Contradiction((name, "split_accumulators"), lambda found, split: split and found != value, reason)


@family
class WgmmaConfig(Config):
    """A point of the ``wgmma`` family."""

    family: ClassVar[str] = "wgmma"
    group: ClassVar[str] = "wgmma"
    features: ClassVar[frozenset[str]] = frozenset(FEATURES)

    # What is no parameter: the template has it from here.
    warpgroup_threads: ClassVar[int] = 128
    warpgroup_keys: ClassVar[int] = 64  # m of wgmma
    consumer_warpgroups: ClassVar[int] = 2
    threads: ClassVar[int] = (consumer_warpgroups + 1) * warpgroup_threads
    min_blocks_per_sm: ClassVar[int] = 1
    producer_registers: ClassVar[int] = 24  # of a thread
    consumer_registers: ClassVar[int] = 240  # what is then left to the others
    stages: ClassVar[int] = 2  # of Q and of dS
    item_stages: ClassVar[int] = 8
    packed_item_bytes: ClassVar[int] = 32  # what roles are told of an item of packed sequences; else its number
    converted_rows: ClassVar[int] = _CONVERTED_ROWS
    delta_stage_bytes: ClassVar[int] = 4096  # rows of O and dO, where the kernel computes delta
    zeros_bytes: ClassVar[int] = 2048  # that slots of dQ are cleared with where the kernel converts dQ

    contradictions: ClassVar[tuple[Contradiction, ...]] = (
        Contradiction(
            ("block_q", "lse_delta_k_step"),
            lambda block_q, folded: folded and block_q % 64 != 0,
            "the statistics that are folded into S lie in rows of 64 queries: a tile has {block_q}",
        ),
        Contradiction(
            ("store_first", "dq_bulk_reduce"),
            lambda store_first, bulk: store_first and not bulk,
            "what the first key tile stores, and who adds to it, waits in the thread that copies dQ in bulk",
        ),
        Contradiction(
            ("dq_bulk_reduce", "dq_epilogue_in_kernel"),
            lambda bulk, in_kernel: in_kernel and not bulk,
            "that all of dQ is in memory is known of bulk copies alone",
        ),
        Contradiction(
            ("block_q", "dq_epilogue_in_kernel"),
            lambda block_q, in_kernel: in_kernel and block_q % _CONVERTED_ROWS != 0,
            f"dQ is converted by {_CONVERTED_ROWS} rows at a time: a tile has {{block_q}}",
        ),
        Contradiction(
            ("store_first", "dq_epilogue_in_kernel"),
            lambda store_first, in_kernel: store_first and in_kernel,
            "dQ's place is cleared where it is converted: nothing is left for the first key tile to store",
        ),
        Contradiction(
            ("convert_last", "store_first"),
            lambda convert_last, store_first: convert_last and not store_first,
            "in ascending order the last key tile would wait for all others at each of its tiles",
        ),
        Contradiction(
            ("block_q", "convert_last"),
            lambda block_q, convert_last: convert_last and block_q % _CONVERTED_ROWS != 0,
            "both consumers convert dQ by 16 queries at a time: a tile has {block_q}",
        ),
        Contradiction(
            ("delta_in_kernel", "store_first"),
            lambda in_kernel, store_first: in_kernel and not store_first,
            "the pass that computes delta clears dQ's accumulator, too, which would be left to it",
        ),
        _of_split("delta_in_kernel", False, "tiles of head_dims above 128 leave no room for rows of O and dO"),
        Contradiction(
            ("p_first", "delta_in_kernel"),
            lambda p_first, in_kernel: p_first and in_kernel,
            "tiles of head_dims above 128 leave no room for rows of O and dO",
        ),
        _of_split("convert_last", False, "panels of dQ that come one after another leave no room for their sums"),
        Contradiction(
            ("p_first", "convert_last"),
            lambda p_first, convert_last: p_first and convert_last,
            "tiles of head_dims above 128 leave no room to convert dQ",
        ),
        _of_split("block_q", 64, "a consumer of dK or dV alone has registers for 64 queries: a tile has {block_q}"),
        _of_split("dq_delayed", True, "consumers of the same keys compute dQ of the tile before"),
        _of_split("skip_masked", False, "consumers of the same keys have the same tiles masked"),
        _of_split("code_copies", 1, "consumers of dK and of dV have code of their own, not {code_copies} copies of it"),
        _of_split("dq_epilogue_in_kernel", False, "tiles of head_dims above 128 leave no room to convert dQ"),
        Contradiction(
            ("p_first", "split_accumulators"),
            lambda p_first, split: p_first and split,
            "consumers of dK or dV alone have S or dP, not both",
        ),
        Contradiction(
            ("p_first", "block_q"),
            lambda p_first, block_q: p_first and block_q != 64,
            "with dK and dV of head_dims above 128 there are registers for 64 queries: a tile has {block_q}",
        ),
        Contradiction(
            ("p_first", "v_fragments"),
            lambda p_first, fragments: p_first and fragments,
            "beside dK and dV of head_dims above 128 no registers are left for V",
        ),
        Contradiction(
            ("p_first", "dq_delayed"),
            lambda p_first, delayed: p_first and not delayed,
            "beside dV and dP it is dQ of the tile before that is multiplied",
        ),
        Contradiction(
            ("p_first", "dq_epilogue_in_kernel"),
            lambda p_first, in_kernel: p_first and in_kernel,
            "tiles of head_dims above 128 leave no room to convert dQ",
        ),
        Contradiction(
            ("dout_stages", "split_accumulators"),
            lambda stages, split: stages != 2 and not split,
            "consumers of different keys have two stages of dO: {dout_stages}",
        ),
        Contradiction(
            ("cluster_size", "split_accumulators"),
            lambda blocks, split: blocks != 1 and not split,
            "clusters are of blocks with 64 keys each, whose accumulators are split",
        ),
        Contradiction(
            ("cluster_size", "dout_stages"),
            lambda blocks, stages: blocks != 1 and stages != 1,
            "keys of the other block leave room for one stage of dO: {dout_stages}",
        ),
        Contradiction(
            ("cluster_size", "dq_bulk_reduce"),
            lambda blocks, bulk: blocks != 1 and bulk,
            "keys and dS of the other block leave no room to stage dQ",
        ),
    )

    block_q: int = parameter("q", (64, 80, 128), "Rows of a Q/dO tile (B_r).", default=64)
    lse_delta_k_step: bool = parameter(
        "f",
        (False, True),
        "The log-sum-exp and delta enter S and dP as an extra k-step, of 16-bit terms and constants, and need neither "
        "loads nor additions of the consumer threads; else they are read from shared memory.",
        default=True,
        stored="fold_statistics",
    )
    dq_delayed: bool = parameter(
        "l",
        (False, True),
        "Compute dQ one tile late, when the other warpgroup's half of dS has long arrived; else both warpgroups meet "
        "in each tile.",
        default=False,
        affects_validity=False,
        stored="lag_dq",
    )
    v_fragments: int = parameter(
        "v",
        (0, 1, 2, 3, 4, 5),
        "k-steps along head_dim for which V is kept in registers, and K where the accumulators are split: they spare "
        "shared memory's bandwidth.",
        default=0,
    )
    resync: bool = parameter(
        "r",
        (False, True),
        "The warps of a warpgroup meet before they stage dQ.",
        default=False,
        affects_validity=False,
    )
    skip_masked: bool = parameter(
        "m",
        (False, True),
        "A warpgroup whose half of the first tile is masked altogether computes its share of dQ alone there.",
        default=False,
    )
    code_copies: int = parameter(
        "c",
        (1, 2),
        "Copies of the consumers' code: one for both warpgroups, or one each.",
        default=1,
        affects_validity=False,
        stored="copies",
    )
    l2_head_group: int = parameter(
        "h",
        (4, 8, 16, 2),
        "Heads whose items are taken together, to share the L2.",
        default=8,
        affects_validity=False,
        stored="head_group",
    )
    store_first: bool = parameter(
        "s",
        (False, True),
        "The first key tile that meets a query tile stores its part of dQ, and the others wait until it has; else all "
        "of them add to what was cleared before.",
        default=False,
        later=True,
    )
    dq_bulk_reduce: bool = parameter(
        "u",
        (True, False),
        "dQ is staged in shared memory, from where one thread adds it by `cp.reduce.async.bulk`; else the consumer "
        "threads add it themselves, by `red.global` of four floats.",
        default=True,
        later=True,
        stored="dq_bulk",
    )
    dq_epilogue_in_kernel: bool = parameter(
        "d",
        (False, True),
        "A warp converts dQ of heads whose items are done, while later ones are computed, and clears its place for "
        "heads that are later still; else two other kernels clear all of it before and convert it after.",
        default=False,
        later=True,
        stored="convert_dq",
    )
    split_accumulators: bool = parameter(
        "a",
        (False, True),
        "Both consumers have the same 64 keys, one accumulates dV and the other dK, for head_dims above 128; else each "
        "has both of 64 keys of its own.",
        default=False,
        later=True,
    )
    dout_stages: int = parameter(
        "o",
        (2, 1),
        "Stages of dO: two, or one that leaves shared memory to dQ, where the accumulators are split.",
        default=2,
        later=True,
    )

    p_first: bool = parameter(
        "p",
        (False, True),
        "P is rounded to 16 bits and dV summed before dP is computed, which takes the registers that S had: for "
        "head_dims above 128 with values of 128 or fewer, of whose 64 keys a consumer then has dK and dV.",
        default=False,
        later=True,
    )
    cluster_size: int = parameter(
        "x",
        (1, 2),
        "Blocks of a cluster: two exchange dS through shared memory, each computes half of dQ's columns over the keys "
        "of both, and what one loads of Q and dO arrives in both.",
        default=1,
        later=True,
    )

    convert_last: bool = parameter(
        "e",
        (False, True),
        "The first key tile that meets a query tile stores its part of dQ, and the last one takes the sum, adds its "
        "own and converts it: nothing is cleared before the main kernel, nor converted after it.",
        default=False,
        later=True,
    )
    l2_tail_heads: int = parameter(
        "t",
        (0, 32),
        "So many heads at least are the last of these groups: SMs then end together. 0: as many as in any other.",
        default=0,
        later=True,
        affects_validity=False,
    )

    delta_in_kernel: bool = parameter(
        "i",
        (False, True),
        "A warp of each block computes delta beside the items of earlier heads, from a queue of its own; else, and for "
        "the first heads, a kernel before does.",
        default=False,
        later=True,
    )

    preprocess_rows: int = parameter(
        "n",
        (1, 2, 4),
        "Rows of O and dO that a thread of preprocess loads before it waits for the first.",
        default=1,
        later=True,
        affects_validity=False,
    )

    @property
    def block_kv(self) -> int:
        """Rows of a K/V tile (B_c): the keys of an item."""
        return self.warpgroup_keys * (self.cluster_size if self.split_accumulators else self.consumer_warpgroups)

    def refusal(self, problem: Problem, device: Device) -> str | None:
        if not device.has_wgmma:
            return f"{device.name} has no wgmma: it is an instruction of sm_90a alone"
        if reason := self._head_dim_refusal(problem):
            return reason
        if self.lse_delta_k_step and problem.softcap:
            return "the log-sum-exp that is folded into S would be capped with it"
        if self.keeps_p_in_fp16 and problem.softcap and problem.bias_grad:
            return "dS and dBias are made of P times the cap's derivative, in 16 bits, and dBias needs P itself"
        if self.skip_masked and problem.mask == FULL:
            return "there is no mask that would leave tiles to be skipped"
        if self.skip_masked and problem.deterministic and problem.mask == CAUSAL and not self.store_first:
            return "such a deterministic kernel goes backwards, and a causal mask leaves all of the last queries' tile"
        if self.store_first and (problem.mask == WINDOW or problem.bottom_right):
            return "queries that see no key meet no key tile that would store their dQ: it has to be cleared"
        if problem.varlen and self.dq_epilogue_in_kernel:
            return "dQ is converted by heads that have all the same rows: packed sequences' have not"
        if problem.varlen and self.delta_in_kernel:
            return "delta is computed by heads that have all the same rows: packed sequences' have not"
        if problem.varlen and self.convert_last:
            return "packed sequences may have queries without keys, whose dQ no key tile would store"
        if problem.deterministic and not self.dq_bulk_reduce:
            return "the order in which key tiles add to dQ is kept by the threads that copy it in bulk"
        if problem.deterministic and self.dq_epilogue_in_kernel:
            return "the threads that copy dQ in bulk keep the order of key tiles, or wait for places: not both"
        if (needed := self.registers(problem)) > self.consumer_registers:
            return f"about {needed} registers a thread: two computing warpgroups have {self.consumer_registers}"
        return None

    def _head_dim_refusal(self, problem: Problem) -> str | None:
        """Why it does not take these head_dims, in words."""
        head_dim, values = problem.head_dim, problem.head_dim_v
        of_values = _SPLIT_VALUE_HEAD_DIMS if self.split_accumulators else _HEAD_DIMS
        if self.split_accumulators:
            if head_dim not in _SPLIT_HEAD_DIMS:
                return (
                    f"head_dim {head_dim}: a consumer of dK alone, or of dV, is for {_SPLIT_HEAD_DIMS[0]} to "
                    f"{_SPLIT_HEAD_DIMS[-1]}; up to {_HEAD_DIMS[-1]} it has registers for both"
                )
        elif self.p_first:
            if head_dim not in _P_FIRST_HEAD_DIMS:
                return (
                    f"head_dim {head_dim}: dP after P is for {_P_FIRST_HEAD_DIMS[0]} to {_P_FIRST_HEAD_DIMS[-1]}; "
                    f"up to {_HEAD_DIMS[-1]} there are registers for both at once"
                )
        elif head_dim not in _HEAD_DIMS:
            why = (
                "most of the 64 columns that it is filled up to would be zeros"
                if head_dim < _HEAD_DIMS[0]
                else f"dK and dV of 64 keys alone are {(head_dim + values) // 2} registers a thread"
            )
            taken = f"the wgmma kernels take {_HEAD_DIMS[0]} to {_HEAD_DIMS[-1]}"
            return f"head_dim {head_dim}: {taken}; {why}"
        if self.cluster_size > 1 and not {head_dim, values} <= set(_CLUSTER_HEAD_DIMS):
            return (
                f"head_dims {head_dim} and {values}: a cluster's consumers divide four panels of columns, which are "
                f"{_CLUSTER_HEAD_DIMS[0]} to {_CLUSTER_HEAD_DIMS[-1]}"
            )
        if values not in of_values:
            return f"head_dim_v {values}: beside a head_dim of {head_dim} it may be {of_values[0]} to {of_values[-1]}"
        # Of V, and where the accumulators are split, of K.
        kept = "V or K" if self.split_accumulators and head_dim < values else "V"
        steps = ceil_div(min(head_dim, values) if self.split_accumulators else values, MMA_K)
        if self.v_fragments > steps:
            return f"{kept} has {steps} steps along head_dim: {self.v_fragments} cannot be kept"
        return None

    @property
    def divides_registers(self) -> bool:
        return True

    def register_limit(self, device: Device) -> int:
        """Of a consumer thread."""
        return self.consumer_registers

    @property
    def stages_in_place(self) -> bool:
        """Whether dK and dV are staged where K and V were, and not where dQ and dS were."""
        return self.split_accumulators or self.p_first

    @property
    def keeps_p_in_fp16(self) -> bool:
        """Whether dS is made of a P that was rounded to fp16, and not of that in fp32."""
        return self.split_accumulators or self.p_first

    @property
    def sums_stages(self) -> int:
        """Stages of fp32 sums on their way to be converted, as many as there is room for."""
        if not self.dq_epilogue_in_kernel:
            return 0
        return 3 if self.block_q == 64 else 2

    @property
    def delta_stages(self) -> int:
        """Stages of rows that delta is made of, as many as there is room for."""
        if not self.delta_in_kernel:
            return 0
        return 3 if self.block_q == 64 else 2

    def dq_queries(self, head_dim: int) -> int:
        """Queries of a warpgroup's dQ^T: the warpgroups divide its columns, or where there are 64 its queries."""
        return self.block_q if head_dim > _PANEL_COLUMNS else self.block_q // self.consumer_warpgroups

    def shared_memory_bytes(self, problem: Problem) -> int:
        block_q, block_kv, stages = self.block_q, self.block_kv, self.stages
        of_row, of_value_row = (
            _columns(head_dim)[1] * problem.element_bytes for head_dim in (problem.head_dim, problem.head_dim_v)
        )
        # K and V have places of their own, or change them. In a cluster a block has its share of the keys, and of the
        # others' K the columns of dQ that it computes.
        own_keys = block_kv // self.cluster_size
        keys = own_keys * (of_row + of_value_row if self.stages_in_place else 2 * max(of_row, of_value_row))
        keys += (block_kv - own_keys) * of_row // self.cluster_size
        queries = block_q * (stages * of_row + self.dout_stages * of_value_row)
        ds = stages * block_q * block_kv * problem.element_bytes
        dq = block_q * _columns(problem.head_dim)[1] * ACCUMULATOR_BYTES
        if self.stages_in_place:  # dQ's panels come there one after another, or not at all
            dq = self.consumer_warpgroups * block_q * _PANEL_COLUMNS * ACCUMULATOR_BYTES * self.dq_bulk_reduce
        p = block_q * own_keys * problem.element_bytes * self.split_accumulators
        # A pattern of 8 rows for every 64 queries, for each stage of L and of delta, and one of zeros; or a float each.
        statistics = block_q // 64 * 1024 if self.lse_delta_k_step else block_q * ACCUMULATOR_BYTES
        zeros, converted = statistics if self.lse_delta_k_step else 0, 0
        if self.dq_epilogue_in_kernel:
            # Sums on their way in, the last ones converted, and more zeros.
            row_bytes_of_part = _PANEL_COLUMNS * (self.sums_stages * ACCUMULATOR_BYTES + problem.element_bytes)
            zeros, converted = self.zeros_bytes, _CONVERTED_ROWS * row_bytes_of_part
        if self.convert_last:
            # As many columns as a warpgroup has, or as many queries.
            queries_of_both = self.consumer_warpgroups * self.dq_queries(problem.head_dim)
            converted = queries_of_both * _PANEL_COLUMNS * problem.element_bytes
        others = 17 - self.p_first + self.sums_stages + self.consumer_warpgroups * self.convert_last
        others += 2 * stages * (self.cluster_size > 1) + self.delta_stages
        barriers = (others + 2 * self.dout_stages + 2 * self.item_stages) * BARRIER_BYTES
        tiles = keys + queries + ds + p + dq + converted + self.delta_stages * self.delta_stage_bytes
        own = tiles + (stages + self.dout_stages) * statistics + zeros + barriers
        if problem.varlen:
            return ceil_div(own, 16) * 16 + self.item_stages * self.packed_item_bytes
        return own + self.item_stages * INDEX_BYTES

    def registers(self, problem: Problem) -> int:
        """Of a consumer thread. A producer needs few; the launch itself asks for a third of an SM's."""
        of_dk, of_dv = (_columns(head_dim)[0] // 2 for head_dim in (problem.head_dim, problem.head_dim_v))
        sums = max(of_dk, of_dv) if self.split_accumulators else of_dk + of_dv
        # In fp16 L's constants are not delta's, and one consumer may have both.
        both = problem.dtype == "fp16" and not self.split_accumulators
        constants = (1 + both) * self.lse_delta_k_step
        kept = FRAGMENT_REGISTERS * (self.v_fragments + constants)
        # S and dP, or one of them and dQ, are alive together; P and dS in 16 bits, which take their place, with dQ.
        scores = self.block_q
        # With P first, these 16 bits are there beside dP in S's place; else they are among the others.
        working = _WORKING_REGISTERS - self.p_first * self.block_q // 4
        # Measured: with less to spare for a cap's slopes, ptxas spills or serializes.
        slopes = self.block_q * 7 // 32 if problem.softcap else 0
        return sums + kept + scores + slopes + self._bias_registers(problem) + working

    def _bias_registers(self, problem: Problem) -> int:
        """Measured: what a bias that is read where it is added needs, and addresses of its gradient's elements."""
        if not problem.bias:
            return 0
        of_elements = problem.bias_grad and (problem.bias.endswith("S") or problem.deterministic)
        return self.block_q * ((4 if of_elements else 2) + problem.alibi) // 16

    def prefetches_bias(self, problem: Problem) -> bool:
        """Whether there are registers for a tile's bias while S is computed."""
        if not problem.bias:
            return False
        elements = self.block_q // 2 * BIAS_ELEMENT_BYTES[problem.bias_dtype] // 4
        return self.registers(problem) + elements + _PREFETCH_SLACK <= self.consumer_registers

    def context(self, problem: Problem, pace: Emulation | None, probed: bool) -> KernelContext:
        found = WgmmaContext.of(problem, self, pace, probed)
        assert isinstance(found, WgmmaContext), "it makes what it is asked of"
        return replace(found, prefetches_bias=self.prefetches_bias(problem))

    def product_columns(self, problem: Problem) -> int:
        of_sums, of_dq = _columns(problem.head_dim)
        of_values, _ = _columns(problem.head_dim_v)
        return 2 * (of_sums + of_values) + of_dq

    def tile_work(self, problem: Problem) -> TileWork:
        """The tensor cores read operands from shared memory themselves: A of 64 rows and B of each k-step, for each of
        two warpgroups, but for what lies in registers."""
        head_dim, values = problem.head_dim, problem.head_dim_v
        block_q, element = self.block_q, problem.element_bytes
        # Each consumer has all products of its own keys; or both have one of each pair, and divide dQ.
        split = self.split_accumulators
        shares = 1 if split else self.consumer_warpgroups
        step_a, steps = self.warpgroup_keys * MMA_K * element, (head_dim + values) // MMA_K
        of_scores = steps * (step_a + block_q * MMA_K * element) - (1 + split) * self.v_fragments * step_a
        of_scores += 2 * self.lse_delta_k_step * block_q * MMA_K * element
        of_dkv = block_q * (head_dim + values) * element
        of_dq = self.block_kv // MMA_K * (step_a + self.dq_queries(head_dim) * MMA_K * element)
        of_dq *= ceil_div(head_dim, _PANEL_COLUMNS) // self.cluster_size if split else 1
        if self.p_first:  # and half the queries of a third panel
            of_dq += self.block_kv // MMA_K * (step_a + block_q // 2 * MMA_K * element)
        # dS, and P where it is handed over; in a cluster dS to the other block and from there, too.
        handed_over = 1 + 2 * split + 2 * (self.cluster_size > 1)
        moved = (handed_over * self.block_kv // self.cluster_size + head_dim + values) * block_q * element
        moved += 2 * block_q * head_dim * ACCUMULATOR_BYTES // self.cluster_size
        phase = Phase(
            products=3 * head_dim + 2 * values + 2 * MMA_K * self.lse_delta_k_step,
            shared_bytes=shares * (of_scores + of_dkv + of_dq) + moved,
            computes_scores=True,
        )
        return TileWork(
            phases=(phase,),
            warpgroup_barriers=0 if self.dq_delayed else 1,
            asynchronous=True,
            statistics_rows=0 if self.lse_delta_k_step else block_q,
            added_rows=0 if self.dq_bulk_reduce else block_q,
            converts_dq=self.dq_epilogue_in_kernel or self.convert_last,
            one_warp_converts=self.dq_epilogue_in_kernel,
            computes_delta=self.delta_in_kernel,
            preprocess_rows=self.preprocess_rows,
            skipped_tiles=_SKIPPED_TILES * self.skip_masked,
            blocks=self.cluster_size,
        )


@dataclass(frozen=True)
class WgmmaContext(KernelContext):
    """The ``wgmma`` family's.

    Attributes:
        prefetches_bias: A tile's bias is read ahead of the scores that it is added to.
    """

    config: WgmmaConfig
    prefetches_bias: bool = False

    @property
    def wgmma_widths(self) -> list[int]:
        """The n of all wgmma: of S and dP, of dK and dV, of dQ."""
        sums = {_columns(head_dim)[0] for head_dim in (self.head_dim, self.head_dim_v)}
        of_dq = {self.config.dq_queries(self.head_dim)}
        if self.config.p_first:  # and of dQ's last columns
            of_dq.add(self.config.block_q // self.config.consumer_warpgroups)
        return sorted({self.config.block_q, *sums, *of_dq})

    @property
    def stages_in_place(self) -> bool:
        """Whether dK and dV are staged where K and V were, and not where dQ and dS were."""
        return self.config.stages_in_place

    @property
    def has_dq_buffer(self) -> bool:
        """Whether shared memory has a place where dQ is staged, or else dK."""
        return self.config.dq_bulk_reduce or not self.stages_in_place

    @property
    def adds_dq_in_parts(self) -> bool:
        """Whether a consumer has several parts of a tile's dQ, one after another."""
        return self.config.split_accumulators or self.config.p_first

    @property
    def evaluates_mask(self) -> bool:
        """Whether the mask is evaluated by `Mask`; one that is constant and asked for alone is a constant."""
        return not self.mask_is_constant or self.softcap or self.deterministic

    @property
    def orders_dq(self) -> bool:
        """Whether key tiles wait for each other before they add to dQ: for all before them, or for the first."""
        return self.deterministic or self.config.store_first

    @property
    def counts_query_heads(self) -> bool:
        """Whether consumers know which of the query heads of a key head they are at."""
        return not self.config.dq_bulk_reduce or self.has_score_bias

    @property
    def converts_dq(self) -> bool:
        """Whether a warp of the main kernel converts dQ, in the place of postprocess."""
        return self.config.dq_epilogue_in_kernel

    @property
    def loads_by_one_thread(self) -> bool:
        """Whether one thread loads all tiles: its warpgroup's other warps have other work."""
        return self.converts_dq or self.makes_delta

    @property
    def preprocess_rows(self) -> int:
        return self.config.preprocess_rows

    @property
    def makes_delta(self) -> bool:
        return self.config.delta_in_kernel

    @property
    def launches_postprocess(self) -> bool:
        return not (self.converts_dq or self.config.convert_last)

    @property
    def reuses_slots(self) -> bool:
        """Whether heads accumulate dQ in slots of the workspace that others had before."""
        return self.converts_dq or self.config.convert_last

    @property
    def workspace_depends_on_device(self) -> bool:
        return self.reuses_slots

    @property
    def pads_sequences(self) -> bool:
        return self.varlen

    @property
    def schedules_sequences(self) -> bool:
        return self.varlen

    @property
    def bounds_sequences(self) -> bool:
        return self.varlen

    @property
    def sequence_lengths(self) -> str:
        return "item."

    @property
    def walks_backwards(self) -> bool:
        return self.deterministic and not self.config.store_first

    @property
    def asks_for_last_query_tile(self) -> bool:
        return self.has_window or self.walks_backwards

    @property
    def masked_keys(self) -> str:
        return "WARPGROUP_KEYS"

    @property
    def in_clusters(self) -> bool:
        return self.config.cluster_size > 1

    @property
    def key_tile_rows(self) -> str:
        return "TILE_KEYS" if self.in_clusters else "BLOCK_KV"

    @property
    def orders_proxies(self) -> bool:
        return self.has_counters

    @property
    def releases_late(self) -> bool:
        """Whether an item's last release comes after dK and dV, as no key tile but a head's first waits for it then."""
        return self.config.convert_last and not self.deterministic

    @property
    def has_counters(self) -> bool:
        return self.orders_dq or self.converts_dq

    @property
    def has_gradient_rows(self) -> bool:
        return self.launches_postprocess

    @property
    def transposes_quads(self) -> bool:
        return self.launches_postprocess


def _columns(head_dim: int) -> tuple[int, int]:
    """Columns of head_dim as sums, dK and dV have them, in k-steps, and as tiles and dQ do, in panels."""
    return ceil_div(head_dim, MMA_K) * MMA_K, ceil_div(head_dim, _PANEL_COLUMNS) * _PANEL_COLUMNS
