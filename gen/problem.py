"""What is computed: the sizes, the element type and the mask of one attention backward."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .errors import UsageError

ELEMENT_BYTES = {"bf16": 2, "fp16": 2}
ACCUMULATOR_BYTES = 4
_GRADIENT_MATMULS = 5  # S = QK^T again, then dV, dP, dK and dQ
_LARGEST_DIMENSION = 2**31 - 1  # TMA coordinates are signed 32-bit


@dataclass(frozen=True, order=True)
class Problem:
    """One attention backward.

    Attributes:
        dtype: Element type of q, k, v, o and of all gradients: ``bf16`` or ``fp16``.
        batch: B.
        heads_q: Hq, the number of query heads.
        heads_kv: Hkv, the number of key and value heads; divides ``heads_q``.
        seqlen_q: Sq, rows of q.
        seqlen_kv: Skv, rows of k and v.
        head_dim: D.
        causal: Whether query i sees the keys 0..i only (aligned top-left, as PyTorch's ``is_causal``).

    Raises:
        UsageError: A size is not positive, the heads do not divide, or the dtype is unknown.
    """

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    causal: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise UsageError(f"unknown dtype {self.dtype!r}: use one of {', '.join(ELEMENT_BYTES)}")
        for field in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim"):
            value = getattr(self, field)
            if not 1 <= value <= _LARGEST_DIMENSION:
                raise UsageError(f"{field} is {value}: it must lie between 1 and {_LARGEST_DIMENSION}")
        if self.heads_q % self.heads_kv:
            raise UsageError(
                f"{self.heads_q} query heads do not divide into {self.heads_kv} key/value heads: "
                "heads_q must be a multiple of heads_kv"
            )

    @classmethod
    def parse(cls, shape: str, *, dtype: str = "bf16", causal: bool = False) -> Problem:
        """Reads a shape as people write it.

        Args:
            shape: ``B_H_S_D``, or ``B_HQ_HKV_S_D`` for grouped queries.
            dtype: ``bf16`` or ``fp16``.
            causal: See the class.

        Raises:
            UsageError: The shape is malformed or impossible.
        """
        parts = shape.split("_")
        if len(parts) not in (4, 5) or not all(part.isascii() and part.isdecimal() for part in parts):
            raise UsageError(f"malformed shape {shape!r}: write B_H_S_D or B_HQ_HKV_S_D, such as 8_16_4096_128")
        numbers = [int(part) for part in parts]
        batch, heads_q, seqlen, head_dim = numbers[0], numbers[1], numbers[-2], numbers[-1]
        heads_kv = numbers[2] if len(numbers) == 5 else heads_q
        return cls(dtype, batch, heads_q, heads_kv, seqlen, seqlen, head_dim, causal)

    @property
    def shape(self) -> str:
        """``B_H_S_D`` or ``B_HQ_HKV_S_D``; where Sq and Skv differ, S is written ``SQxSKV``."""
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}_{self.heads_kv}"
        seqlen = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_kv else f"{self.seqlen_q}x{self.seqlen_kv}"
        return f"{self.batch}_{heads}_{seqlen}_{self.head_dim}"

    @property
    def label(self) -> str:
        """The whole problem for people: shape, dtype and mask."""
        return f"{self.shape} {self.dtype} {'causal' if self.causal else 'full'}"

    @property
    def softmax_scale(self) -> float:
        """The default scale, 1/sqrt(D)."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def query_key_pairs(self) -> int:
        """Score elements of one head that are counted as work; a causal mask of a square problem halves them.

        The exact triangle has S(S+1)/2 elements; S*S/2 is the literature's convention (FlashAttention's
        benchmarks, and the write-up's appendix C).
        """
        if not self.causal:
            return self.seqlen_q * self.seqlen_kv
        square = min(self.seqlen_q, self.seqlen_kv)
        return square * square // 2 + max(self.seqlen_q - self.seqlen_kv, 0) * self.seqlen_kv

    @property
    def flops(self) -> int:
        """Floating-point operations of the five matrix products; softmax and masks are not counted."""
        return 2 * _GRADIENT_MATMULS * self.batch * self.heads_q * self.query_key_pairs * self.head_dim

    @property
    def query_elements(self) -> int:
        """Elements of q, and of o, dO and dQ."""
        return self.batch * self.heads_q * self.seqlen_q * self.head_dim

    @property
    def key_elements(self) -> int:
        """Elements of k, and of v, dK and dV."""
        return self.batch * self.heads_kv * self.seqlen_kv * self.head_dim

    @property
    def query_rows(self) -> int:
        """Rows of q over all heads: the elements of the log-sum-exp and of delta."""
        return self.batch * self.heads_q * self.seqlen_q

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def read_bytes(self) -> int:
        """Fewest bytes read: q, k, v, o, dO and the fp32 log-sum-exp once each."""
        elements = 3 * self.query_elements + 2 * self.key_elements
        return elements * self.element_bytes + self.query_rows * ACCUMULATOR_BYTES

    @property
    def write_bytes(self) -> int:
        """Fewest bytes written: dQ, dK and dV once each."""
        return (self.query_elements + 2 * self.key_elements) * self.element_bytes

    def resized(self, *, batch: int, heads_q: int, heads_kv: int, seqlen_q: int, seqlen_kv: int) -> Problem:
        """The same kind of problem (dtype, head_dim, mask) at other sizes."""
        return replace(self, batch=batch, heads_q=heads_q, heads_kv=heads_kv, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
