"""What templates can use: one object, `kernel`, whose type declares its contents.

No included file reads a variable of the file that includes it. What only one family's templates need is in that
family's class, in its file.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..emulation import Emulation
from ..problem import BIAS, CAUSAL, FLAGS, FULL, WINDOW, Problem
from .base import Config


@dataclass(frozen=True)
class KernelContext:
    """What a kernel is rendered from.

    Attributes:
        kind: `Problem.kernel_spec`.
        dtype: ``bf16`` or ``fp16``.
        head_dim: D, of q, k, dq and dk.
        head_dim_v: Of v, o, dout and dv.
        mask: ``full``, ``causal`` or ``window``.
        bottom_right: The mask is aligned with the last query and the last key.
        softcap: Scores are capped.
        varlen: Packed sequences.
        deterministic: dQ is summed in one order.
        lse_grad: The log-sum-exp has a gradient, which delta is lessened by.
        sink: dSink is computed.
        alibi: Scores have a linear bias.
        bias: Which of batch, heads and queries a bias is broadcast over: `Problem.bias`.
        bias_dtype: The bias' element type.
        bias_grad: dBias is computed.
        config: The configuration.
        pace: The other card whose pace it keeps to, or None.
        probed: It counts its cycles.
        shared_memory_bytes: Dynamic shared memory of a block, as the search counts it.
    """

    kind: str
    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    bottom_right: bool
    softcap: bool
    varlen: bool
    deterministic: bool
    lse_grad: bool
    sink: bool
    alibi: bool
    bias: str
    bias_dtype: str
    bias_grad: bool
    config: Config
    pace: Emulation | None
    probed: bool
    shared_memory_bytes: int

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
    def has_row_features(self) -> bool:
        """Whether rows of queries have more than O, dO and the log-sum-exp: see `gen.problem.OF_ROWS`."""
        return self.lse_grad or self.sink

    @property
    def has_score_bias(self) -> bool:
        """Whether something is added to scores."""
        return self.alibi or bool(self.bias)

    @property
    def bias_has_rows(self) -> bool:
        """Whether a bias is another for each query."""
        return self.bias.endswith("S")

    @property
    def bias_is_summed(self) -> bool:
        """Whether an element of dBias is a sum over batches, heads or queries."""
        return self.bias_grad and "1" in self.bias.split("_")

    @property
    def adds_dbias(self) -> bool:
        """Whether all blocks add to its sums; else each stores its part, and sums are made of these in one order."""
        return self.bias_is_summed and not self.deterministic

    @property
    def adds_dbias_of_keys(self) -> bool:
        """Whether what they add is summed over a tile's queries before."""
        return self.adds_dbias and not self.bias_has_rows

    @property
    def clears_dbias(self) -> bool:
        """Whether some of it has to be zero before the main kernel, which does not visit tiles that a mask hides."""
        return self.adds_dbias or (self.bias_grad and not self.is_full)

    @property
    def dbias_place(self) -> str:
        """The member of `ScoreBias` that the main kernel writes it to."""
        return "sums" if self.adds_dbias else "ds" if self.bias_is_summed else "dbias"

    @property
    def dbias_store_dtype(self) -> str:
        """The type that it has there."""
        return {"sums": "fp32", "ds": self.dtype, "dbias": self.bias_dtype}[self.dbias_place]

    @property
    def has_transposed_scores(self) -> bool:
        """Whether scores are computed as keys x queries, so that a lane has neighbouring queries of a key."""
        return True

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
        return f"{self.sequence_lengths}seqlen_q" if self.varlen else "arguments.seqlen_q"

    @property
    def seqlen_kv(self) -> str:
        """The same of its keys."""
        return f"{self.sequence_lengths}seqlen_kv" if self.varlen else "arguments.seqlen_kv"

    @property
    def sequence_lengths(self) -> str:
        """What has the lengths of a packed sequence as members, with its dot; empty where they are variables."""
        return ""

    @property
    def masked_keys(self) -> str:
        """The constant for the keys of a tile whose scores are masked together."""
        return "BLOCK_KV"

    @property
    def in_clusters(self) -> bool:
        """Whether blocks of the main kernel run in clusters, which share an item."""
        return False

    @property
    def key_tile_rows(self) -> str:
        """The constant for the rows of K and V that a block loads of an item."""
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
    def divides_registers(self) -> bool:
        """Whether warpgroups divide a block's registers among themselves (``setmaxnreg``)."""
        return self.config.divides_registers

    @property
    def orders_proxies(self) -> bool:
        """Whether blocks tell each other, through global memory, of what bulk copies have written there."""
        return False

    @property
    def pads_sequences(self) -> bool:
        """Whether each packed sequence has whole tiles of the workspace."""
        return False

    @property
    def schedules_sequences(self) -> bool:
        """Whether items of packed sequences are taken in an order of the sequences that is made on the GPU."""
        return False

    @property
    def bounds_sequences(self) -> bool:
        """Whether copies of TMA leave out what lies past the end of a packed sequence."""
        return False

    @property
    def launches_postprocess(self) -> bool:
        """Whether a third kernel converts dQ, once the main kernel has ended."""
        return True

    @property
    def preprocess_rows(self) -> int:
        """Rows that a thread of preprocess has, whose loads are all on their way at once."""
        return 1

    @property
    def makes_delta(self) -> bool:
        """Whether the main kernel computes delta, but for that of the first heads."""
        return False

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

    @classmethod
    def of(cls, problem: Problem, config: Config, pace: Emulation | None, probed: bool) -> KernelContext:
        """What the templates of the configuration's family see for a problem."""
        return cls(
            kind=problem.kernel_spec,
            dtype=problem.dtype,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            mask=problem.mask,
            **{name: getattr(problem, name) for name in (*FLAGS, *BIAS)},
            config=config,
            pace=pace,
            probed=probed,
            shared_memory_bytes=config.shared_memory_bytes(problem),
        )
