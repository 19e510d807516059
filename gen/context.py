"""What the templates of a kernel see: one object, `kernel`, whose type says what there is.

A template asks for nothing else: no included file reads a variable of the file that includes it. What only one family's
templates need stands in that family's class.
"""

from __future__ import annotations

from dataclasses import dataclass

from .emulation import Emulation
from .families import Config, MmaConfig, TransposedMmaConfig, WgmmaConfig, ceil_div
from .families.base import FRAGMENT_COLUMNS, MMA_K
from .families.wgmma import CONVERTED_ROWS, ZEROS_BYTES
from .problem import CAUSAL, FLAGS, FULL, WINDOW, Problem


@dataclass(frozen=True)
class KernelContext:
    """What a kernel is rendered from.

    Attributes:
        kind: `Problem.kernel_spec`.
        dtype: ``bf16`` or ``fp16``.
        head_dim: D.
        mask: ``full``, ``causal`` or ``window``.
        bottom_right: The mask is aligned with the last query and the last key.
        softcap: Scores are capped.
        varlen: Packed sequences.
        deterministic: dQ is summed in one order.
        config: The configuration.
        pace: The other card whose pace it keeps to, or None.
        probed: It counts its cycles.
    """

    kind: str
    dtype: str
    head_dim: int
    mask: str
    bottom_right: bool
    softcap: bool
    varlen: bool
    deterministic: bool
    config: Config
    pace: Emulation | None
    probed: bool

    @property
    def family(self) -> str:
        """The folder of its templates."""
        return self.config.family

    @property
    def has_window(self) -> bool:
        return self.mask == WINDOW

    @property
    def is_full(self) -> bool:
        return self.mask == FULL

    @property
    def is_causal(self) -> bool:
        return self.mask == CAUSAL

    @property
    def mask_is_constant(self) -> bool:
        """Whether the mask does not depend on the launch: the diagonal begins at the first query and key."""
        return not self.has_window and not self.bottom_right

    @property
    def walks_backwards(self) -> bool:
        """Whether query tiles are taken from the last to the first.

        Key tiles then add to dQ in ascending order, and all of them begin with the same query tile: a mask that is
        limited to the right cuts off tiles in front.
        """
        return self.deterministic

    @property
    def asks_for_last_query_tile(self) -> bool:
        """Whether `Mask` says where the query tiles end that see a tile of keys."""
        return True

    @property
    def seqlen_q(self) -> str:
        """The queries of a sequence, as an expression: where it is an argument, no register has to hold it."""
        return "seqlen_q" if self.varlen else "arguments.seqlen_q"

    @property
    def seqlen_kv(self) -> str:
        """The same of its keys."""
        return "seqlen_kv" if self.varlen else "arguments.seqlen_kv"

    @property
    def masked_keys(self) -> str:
        """The constant for the keys of a tile whose scores are masked together."""
        return "BLOCK_KV"

    @property
    def swizzle_bytes(self) -> int:
        """TMA's swizzle of Q, K, V and dO; 0 is none."""
        return 128

    @property
    def overlaps_kernels(self) -> bool:
        """Whether the three kernels overlap at their ends, by programmatic dependent launch (PDL)."""
        return True

    @property
    def transposes_quads(self) -> bool:
        """Whether the lanes of a quad exchange words, so that each writes whole rows of 16 bytes."""
        return True

    @property
    def orders_proxies(self) -> bool:
        """Whether blocks tell each other, through global memory, of what bulk copies have written there."""
        return False

    @property
    def pads_sequences(self) -> bool:
        """Whether each packed sequence has whole tiles of the workspace."""
        return False

    @property
    def launches_postprocess(self) -> bool:
        """Whether a third kernel converts dQ, once the main kernel has ended."""
        return True

    @property
    def workspace_depends_on_device(self) -> bool:
        """Whether the size of the workspace depends on the device's number of SMs."""
        return False

    @property
    def has_counters(self) -> bool:
        """Whether the workspace ends with counters, which preprocess clears."""
        return True

    @property
    def has_gradient_rows(self) -> bool:
        """Whether some gradient is written by the threads' own stores, in the caller's strides."""
        return True


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
    def has_counters(self) -> bool:
        return self.deterministic

    @property
    def splits_heads(self) -> bool:
        """Whether each query head of a group has blocks of its own, whose dK and dV are added up in global memory."""
        return self.config.split_gqa_heads


@dataclass(frozen=True)
class MmatContext(KernelContext):
    """The ``mmat`` family's."""

    config: TransposedMmaConfig

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
    def seqlen_q(self) -> str:
        return "item.seqlen_q" if self.varlen else "arguments.seqlen_q"

    @property
    def seqlen_kv(self) -> str:
        return "item.seqlen_kv" if self.varlen else "arguments.seqlen_kv"

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
        return all(self.head_dim % (FRAGMENT_COLUMNS * parts) == 0 for parts in (dkv_groups, dq_warps))

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


@dataclass(frozen=True)
class WgmmaContext(KernelContext):
    """The ``wgmma`` family's."""

    config: WgmmaConfig

    @property
    def wgmma_widths(self) -> list[int]:
        """The n of all wgmma: of S and dP, of dK and dV, of dQ."""
        columns = ceil_div(self.head_dim, MMA_K) * MMA_K
        return sorted({self.config.block_q, columns, self.config.dq_queries(self.head_dim)})

    @property
    def converted_rows(self) -> int:
        """Rows of dQ that are converted at a time."""
        return CONVERTED_ROWS

    @property
    def zeros_bytes(self) -> int:
        """Zeros in shared memory that slots of dQ are cleared with."""
        return ZEROS_BYTES

    @property
    def evaluates_mask(self) -> bool:
        """Whether the mask is evaluated by `Mask`; one that is constant and asked for alone is a constant."""
        return not self.mask_is_constant or self.softcap or self.deterministic

    @property
    def orders_dq(self) -> bool:
        """Whether key tiles wait for each other before they add to dQ: for all before them, or for the first."""
        return self.deterministic or self.config.store_first

    @property
    def converts_dq(self) -> bool:
        """Whether the main kernel converts dQ, in the place of postprocess."""
        return self.config.dq_epilogue_in_kernel

    @property
    def launches_postprocess(self) -> bool:
        return not self.converts_dq

    @property
    def workspace_depends_on_device(self) -> bool:
        return self.converts_dq

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
    def orders_proxies(self) -> bool:
        return self.has_counters

    @property
    def has_counters(self) -> bool:
        return self.orders_dq or self.converts_dq

    @property
    def has_gradient_rows(self) -> bool:
        return not self.converts_dq

    @property
    def transposes_quads(self) -> bool:
        return not self.converts_dq


_CONTEXTS: dict[type[Config], type[KernelContext]] = {
    MmaConfig: MmaContext,
    TransposedMmaConfig: MmatContext,
    WgmmaConfig: WgmmaContext,
}


def kernel_context(problem: Problem, config: Config, pace: Emulation | None, probed: bool) -> KernelContext:
    """What the templates of the configuration's family see for a problem."""
    return _CONTEXTS[type(config)](
        kind=problem.kernel_spec,
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        mask=problem.mask,
        **{name: getattr(problem, name) for name in FLAGS},
        config=config,
        pace=pace,
        probed=probed,
    )
