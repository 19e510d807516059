"""What is computed: the sizes, the element type and the mask of one attention backward."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .cached import cached_property
from .errors import UsageError
from .lengths import lengths

ELEMENT_BYTES = {"bf16": 2, "fp16": 2}
ACCUMULATOR_BYTES = 4
_HEAD_DIM_MATMULS, _VALUE_MATMULS = 3, 2  # over D: S = QK^T again, dK and dQ; over v's head_dim: dP and dV
_LARGEST_DIMENSION = 2**31 - 1  # TMA coordinates are signed 32-bit

UNLIMITED = -1
FULL, CAUSAL, WINDOW = "full", "causal", "window"
TOP_LEFT, BOTTOM_RIGHT = "top-left", "bottom-right"

FLAGS = ("bottom_right", "softcap", "varlen", "deterministic", "lse_grad", "sink", "alibi", "bias_grad")
"""What a problem may ask for besides a mask, and a kernel has to be generated for: all that is asked for or not."""

BIAS = ("bias", "bias_dtype")
"""The fields that say which bias a problem has; a kernel has to be generated for it as well."""

VALUE_HEAD_DIM = "value_head_dim"
"""The field that says whether v has another head_dim than q and k."""

FEATURES = (WINDOW, *FLAGS, "bias", VALUE_HEAD_DIM)
"""What a problem may ask for that not every family's template has."""

OF_ROWS = ("lse_grad", "sink")
"""Those of `FLAGS` that change what is computed of a row before the main kernel, and leave that one as it is."""

_KIND_NAMES = {
    "bottom_right": "br",
    "softcap": "softcap",
    "varlen": "varlen",
    "deterministic": "det",
    "lse_grad": "lse",
    "sink": "sink",
    "alibi": "alibi",
    "bias_grad": "dbias",
}

BIAS_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_BIAS_LETTERS = "BHS"  # of the batch, the heads and the queries


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
        head_dim: D, columns of q and k.
        causal: Whether query i sees no key past its diagonal.
        window_left: Keys before the diagonal that a query sees; -1 for all of them.
        window_right: Keys past the diagonal that a query sees; -1 for all of them, and where ``causal`` says that there
            are none. A limit of 0 is turned into ``causal``, so that one mask has one name.
        bottom_right: Where the diagonal lies if Sq and Skv differ: from the last query and key upwards (query i is at
            key ``i + Skv - Sq``, FlashAttention's alignment) instead of from the first (PyTorch's ``is_causal``).
        softcap: Whether scores are ``c * tanh(score / c)`` for some c.
        varlen: Whether q, k and v hold sequences of several lengths one after another; B is then their number, and Sq
            and Skv are the longest.
        deterministic: Whether the gradients must be the same bits at each call.
        lse_grad: Whether a gradient flows into the log-sum-exp too, as into a second output.
        sink: Whether each query head has a learnable score of its own in all of its softmaxes, whose probability goes
            to no value.
        alibi: Whether ``-slope * abs(i + Skv - Sq - j)`` is added to the score of query i and key j of a sequence, each
            query head with a slope of its own (FlashAttention's ALiBi).
        bias: Which bias is added to the scores, after the cap and before the mask: empty for none, else ``B_H_S`` with
            a 1 for each of batch, query heads and queries that it is broadcast over, such as ``1_H_S``. It has an
            element for every key.
        bias_dtype: Its element type: ``bf16``, ``fp16`` or ``fp32``; where it is left out, that of q.
        bias_grad: Whether its gradient is wanted: a mask, say, has none.
        value_head_dim: Columns of v and o where they differ from D (192 and 128 in multi-head latent attention), else
            0, which D itself is turned into. `head_dim_v` is the number in either case.
        lengths_as: With ``varlen``: how long the sequences are, as far as they are timed; see `gen.lengths.lengths`. No
            kernel depends on it, and no stored row has it.

    Raises:
        UsageError: A size is not positive, the heads do not divide, the dtype is unknown or the mask a contradiction.
    """

    dtype: str
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    causal: bool = False
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    bottom_right: bool = False
    softcap: bool = False
    varlen: bool = False
    deterministic: bool = False
    lse_grad: bool = False
    sink: bool = False
    alibi: bool = False
    bias: str = ""
    bias_dtype: str = ""
    bias_grad: bool = False
    value_head_dim: int = 0
    lengths_as: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in ELEMENT_BYTES:
            raise UsageError(f"unknown dtype {self.dtype!r}: use one of {', '.join(ELEMENT_BYTES)}")
        for field in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim"):
            value = getattr(self, field)
            if not 1 <= value <= _LARGEST_DIMENSION:
                raise UsageError(f"{field} is {value}: it must lie between 1 and {_LARGEST_DIMENSION}")
        if not 0 <= self.value_head_dim <= _LARGEST_DIMENSION:
            raise UsageError(
                f"value_head_dim is {self.value_head_dim}: it must lie between 1 and {_LARGEST_DIMENSION}, or be 0"
            )
        if self.value_head_dim == self.head_dim:
            object.__setattr__(self, "value_head_dim", 0)
        if self.heads_q % self.heads_kv:
            raise UsageError(
                f"{self.heads_q} query heads do not divide into {self.heads_kv} key/value heads: "
                "heads_q must be a multiple of heads_kv"
            )
        for field in ("window_left", "window_right"):
            value = getattr(self, field)
            if not UNLIMITED <= value <= _LARGEST_DIMENSION:
                raise UsageError(f"{field} is {value}: it must be a number of keys, or {UNLIMITED} for no limit")
        if self.causal and self.window_right > 0:
            raise UsageError(f"a causal mask shows no key past the diagonal, and window_right is {self.window_right}")
        if self.window_right == 0:
            object.__setattr__(self, "causal", True)
            object.__setattr__(self, "window_right", UNLIMITED)
        if self.lengths_as and not self.varlen:
            raise UsageError("lengths are those of packed sequences: ask for varlen, too")
        if self.bottom_right and self.mask == FULL:
            raise UsageError("a full mask has no diagonal that could be aligned")
        self._check_bias()

    def _check_bias(self) -> None:
        if not self.bias:
            if self.bias_dtype or self.bias_grad:
                raise UsageError("bias_dtype and bias_grad are those of a bias: ask for one, too")
            return
        parts = self.bias.split("_")
        if len(parts) != len(_BIAS_LETTERS) or any(
            part not in (letter, "1") for part, letter in zip(parts, _BIAS_LETTERS, strict=True)
        ):
            raise UsageError(f"unknown bias {self.bias!r}: it is B_H_S, with a 1 for what it is broadcast over")
        if not self.bias_dtype:
            object.__setattr__(self, "bias_dtype", self.dtype)
        if self.bias_dtype not in BIAS_ELEMENT_BYTES:
            raise UsageError(f"unknown bias_dtype {self.bias_dtype!r}: use one of {', '.join(BIAS_ELEMENT_BYTES)}")
        if self.varlen:
            raise UsageError("packed sequences have no common shape for a bias; ALiBi slopes can be had with them")

    @classmethod
    def parse(cls, shape: str, *, dtype: str = "bf16", **features: Any) -> Problem:
        """Reads a shape as people write it.

        Args:
            shape: ``B_H_S_D``, or ``B_HQ_HKV_S_D`` for grouped queries; S may be ``SQxSKV``, and D ``DxDV`` where v has
                another head_dim.
            dtype: ``bf16`` or ``fp16``.
            **features: ``causal``, ``window_left`` and so on: see the class.

        Raises:
            UsageError: The shape is malformed or impossible.
        """
        found = re.fullmatch(r"(\d+)_(\d+)(?:_(\d+))?_(\d+)(?:x(\d+))?_(\d+)(?:x(\d+))?", shape, re.ASCII)
        if not found:
            raise UsageError(f"malformed shape {shape!r}: write B_H_S_D or B_HQ_HKV_S_D, such as 8_16_4096_128")
        batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, head_dim_v = found.groups()
        if head_dim_v is not None and not int(head_dim_v):
            raise UsageError("head_dim_v is 0: it must be positive")
        return cls(
            dtype,
            int(batch),
            int(heads_q),
            int(heads_kv or heads_q),
            int(seqlen_q),
            int(seqlen_kv or seqlen_q),
            int(head_dim),
            value_head_dim=int(head_dim_v or 0),
            **features,
        )

    @property
    def shape(self) -> str:
        """``B_H_S_D`` or ``B_HQ_HKV_S_D``; S is ``SQxSKV`` where the lengths differ, D ``DxDV`` where head_dims do."""
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}_{self.heads_kv}"
        seqlen = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_kv else f"{self.seqlen_q}x{self.seqlen_kv}"
        return f"{self.batch}_{heads}_{seqlen}_{self.head_dims}"

    @property
    def head_dims(self) -> str:
        """``D``, or ``DxDV`` where v has another head_dim than q and k."""
        return f"{self.head_dim}x{self.value_head_dim}" if self.value_head_dim else f"{self.head_dim}"

    @property
    def head_dim_v(self) -> int:
        """Columns of v and o, and of their gradients."""
        return self.value_head_dim or self.head_dim

    @property
    def label(self) -> str:
        """The whole problem for people: shape, dtype, mask and what else is asked for."""
        timed = f" of {self.lengths_as}" if self.lengths_as else ""
        return f"{self.shape} {self.dtype} {self.features_label}{timed}"

    @property
    def features_label(self) -> str:
        """The mask with its limits, and what else is asked for."""
        return self._label(f"window {self.window_left},{self.right}")

    @property
    def kernel_spec_label(self) -> str:
        """The same without limits: what of it a kernel is generated for."""
        return self._label(WINDOW)

    def _label(self, window: str) -> str:
        flags = (name.replace("_", "-") for name in FLAGS if getattr(self, name))
        bias = [f"bias {self.bias} {self.bias_dtype}"] if self.bias else []
        return " ".join([window if self.mask == WINDOW else self.mask, *flags, *bias])

    @property
    def features(self) -> dict[str, Any]:
        """The mask and what else is asked for, by field."""
        return {name: getattr(self, name) for name in ("causal", "window_left", "window_right", *FLAGS, *BIAS)}

    def to_dict(self) -> dict[str, Any]:
        """The problem as the commands' JSON names it: its shape, its features, its dtype."""
        timed = {"lengths": self.lengths_as} if self.lengths_as else {}
        return {"shape": self.shape, **self.features, "dtype": self.dtype, **timed}

    def to_stored(self) -> dict[str, Any]:
        """What a stored row says of it: the fields that make it the problem that it is."""
        return {name: getattr(self, name) for name in self.stored_names()}

    @classmethod
    def stored_names(cls) -> tuple[str, ...]:
        """The names of these fields."""
        return tuple(field.name for field in fields(cls) if field.name != "lengths_as")

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the command line that describe it."""
        asked = ["--shape", self.shape]
        if self.causal:
            asked.append("--causal")
        if self.mask == WINDOW:
            asked.append(f"--window={self.window_left},{self.window_right}")  # a limit may begin with a minus
        if self.bottom_right:
            asked += ["--alignment", BOTTOM_RIGHT]
        asked += [f"--{flag.replace('_', '-')}" for flag in FLAGS if flag != "bottom_right" and getattr(self, flag)]
        if self.bias:
            asked += ["--bias", "_".join(map(str, self.bias_shape)), "--bias-dtype", self.bias_dtype]
        if self.lengths_as:
            asked += ["--lengths", self.lengths_as]
        return (*asked, "--dtype", self.dtype)

    @property
    def mask(self) -> str:
        """The kind of mask, which kernels are generated for: ``full``, ``causal`` or ``window``."""
        if self.window_left != UNLIMITED or self.window_right != UNLIMITED:
            return WINDOW
        return CAUSAL if self.causal else FULL

    @property
    def required_features(self) -> tuple[str, ...]:
        """Which of `FEATURES` it asks for."""
        return tuple(name for name in FEATURES if (self.mask == WINDOW if name == WINDOW else getattr(self, name)))

    @property
    def right(self) -> int:
        """Keys past the diagonal that a query sees, or -1 for all of them."""
        return 0 if self.causal else self.window_right

    @property
    def kernel_spec(self) -> str:
        """What a kernel is generated for, as a name: dtype, head_dims, mask and what else is asked for, but no size."""
        flags = (_KIND_NAMES[name] for name in FLAGS if getattr(self, name))
        bias = [f"bias_{self.bias}_{self.bias_dtype}"] if self.bias else []
        return "_".join([self.dtype, f"d{self.head_dims}", self.mask, *flags, *bias])

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        """The bias' shape: (B or 1, Hq or 1, Sq or 1, Skv)."""
        assert self.bias, "there is none"
        batch, heads, rows = (
            1 if part == "1" else size
            for part, size in zip(self.bias.split("_"), (self.batch, self.heads_q, self.seqlen_q), strict=True)
        )
        return batch, heads, rows, self.seqlen_kv

    @property
    def bias_is_summed(self) -> bool:
        """Whether an element of the bias' gradient is a sum over batches, heads or queries."""
        return self.bias_grad and "1" in self.bias.split("_")

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Sq and Skv of each sequence.

        Where they vary, those of `lengths_as`, and as many keys for each query as the longest has: what is timed, for
        lack of the real lengths.
        """
        if not self.varlen:
            return ((self.seqlen_q, self.seqlen_kv),) * self.batch
        if not self.lengths_as:
            both = (lengths("", self.batch, longest) for longest in (self.seqlen_q, self.seqlen_kv))
            return tuple(zip(*both, strict=True))
        return tuple(
            (length, -(-length * self.seqlen_kv // self.seqlen_q))
            for length in lengths(self.lengths_as, self.batch, self.seqlen_q)
        )

    def visible_range(self, seqlen_q: int, seqlen_kv: int) -> tuple[int, int]:
        """Which keys are seen in a sequence of these lengths: see `visible_range`."""
        return visible_range(seqlen_q, seqlen_kv, self.window_left, self.right, self.bottom_right)

    @property
    def softmax_scale(self) -> float:
        """The default scale, 1/sqrt(D)."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def query_key_pairs(self) -> int:
        """Score elements of one head, over the whole batch, that are counted as work.

        A causal triangle of S(S+1)/2 elements counts as S*S/2, the literature's convention (FlashAttention's
        benchmarks, and the write-up's appendix C); windows are counted exactly.
        """
        if not self.varlen:
            return self.batch * self._pairs(self.seqlen_q, self.seqlen_kv)
        return sum(self._pairs(*lengths) for lengths in self.lengths)

    def _pairs(self, seqlen_q: int, seqlen_kv: int) -> int:
        if self.mask == FULL:
            return seqlen_q * seqlen_kv
        low, high = self.visible_range(seqlen_q, seqlen_kv)
        visible = _keys_up_to(high, seqlen_q, seqlen_kv) - _keys_up_to(low - 1, seqlen_q, seqlen_kv)
        if self.mask == CAUSAL:
            # Half of the diagonal: one key of each row that has one on it.
            rows = max(min(seqlen_q, seqlen_kv - high) - max(-high, 0), 0)
            visible -= -(-rows // 2)
        return visible

    @property
    def flops(self) -> int:
        """Floating-point operations of the five matrix products; softmax and masks are not counted."""
        columns = _HEAD_DIM_MATMULS * self.head_dim + _VALUE_MATMULS * self.head_dim_v
        return 2 * columns * self.heads_q * self.query_key_pairs

    @property
    def positions(self) -> tuple[int, int]:
        """Rows of q and of k of a tensor: S, or with sequences of several lengths those of all of them."""
        if not self.varlen:
            return self.seqlen_q, self.seqlen_kv
        return sum(seqlen_q for seqlen_q, _ in self.lengths), sum(seqlen_kv for _, seqlen_kv in self.lengths)

    @property
    def query_positions(self) -> int:
        """Rows of q of one head, over the whole batch."""
        return self.positions[0] * (1 if self.varlen else self.batch)

    @property
    def key_positions(self) -> int:
        """Rows of k of one head, over the whole batch."""
        return self.positions[1] * (1 if self.varlen else self.batch)

    @property
    def query_elements(self) -> int:
        """Elements of q, and of dQ."""
        return self.query_rows * self.head_dim

    @property
    def output_elements(self) -> int:
        """Elements of o, and of dO."""
        return self.query_rows * self.head_dim_v

    @property
    def key_elements(self) -> int:
        """Elements of k, and of dK."""
        return self.heads_kv * self.key_positions * self.head_dim

    @property
    def value_elements(self) -> int:
        """Elements of v, and of dV."""
        return self.heads_kv * self.key_positions * self.head_dim_v

    @property
    def query_rows(self) -> int:
        """Rows of q over all heads: the elements of the log-sum-exp and of delta."""
        return self.heads_q * self.query_positions

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def read_bytes(self) -> int:
        """Fewest bytes read: q, k, v, o, dO, the fp32 log-sum-exp, and its gradient and a bias where there are such."""
        elements = self.query_elements + 2 * self.output_elements + self.key_elements + self.value_elements
        rows = (1 + self.lse_grad) * self.query_rows * ACCUMULATOR_BYTES
        return elements * self.element_bytes + rows + self.bias_bytes

    @property
    def write_bytes(self) -> int:
        """Fewest bytes written: dQ, dK and dV once each, and the bias' gradient."""
        gradients = self.query_elements + self.key_elements + self.value_elements
        return gradients * self.element_bytes + self.bias_grad * self.bias_bytes

    @property
    def bias_bytes(self) -> int:
        """Bytes of the bias, of which a mask may leave some unread; 0 where there is none."""
        return math.prod(self.bias_shape) * BIAS_ELEMENT_BYTES[self.bias_dtype] if self.bias else 0

    @cached_property
    def _log_sizes(self) -> tuple[float, ...]:
        """What `distance` compares."""
        sizes = (
            self.seqlen_q,
            self.seqlen_kv,
            self.batch * self.heads_q,
            self.heads_q / self.heads_kv,
            # A mask that is only causal shows as many as the lengths say.
            max(self.query_key_pairs, 1) / self.query_positions if self.mask == WINDOW else 1,
        )
        return tuple(math.log2(size) for size in sizes)

    @property
    def without_row_features(self) -> Problem:
        """The problem whose main kernel is the same: without what `OF_ROWS` names."""
        return replace(self, lse_grad=False, sink=False)

    def resized(self, *, batch: int, heads_q: int, heads_kv: int, seqlen_q: int, seqlen_kv: int) -> Problem:
        """The same kind of problem (dtype, head_dims, mask and the rest) at other sizes."""
        return replace(self, batch=batch, heads_q=heads_q, heads_kv=heads_kv, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)


def bias_pattern(shape: Sequence[int], batch: int, heads_q: int, seqlen_q: int, seqlen_kv: int) -> str:
    """What `Problem.bias` is for a bias of this shape: a dimension of size 1 is broadcast unless it has to be 1.

    Args:
        shape: The bias': (B or 1, Hq or 1, Sq or 1, Skv).
        batch: B.
        heads_q: Hq.
        seqlen_q: Sq.
        seqlen_kv: Skv.

    Raises:
        UsageError: The shape does not go with these sizes.
    """
    sizes = (batch, heads_q, seqlen_q)
    if len(shape) != 4 or shape[3] != seqlen_kv or any(a not in (1, b) for a, b in zip(shape, sizes, strict=False)):
        given, whole = "_".join(map(str, shape)), "_".join(map(str, (*sizes, seqlen_kv)))
        raise UsageError(f"a bias of shape {given} cannot be added to scores of shape {whole}: only ones are broadcast")
    letters = zip(shape, sizes, _BIAS_LETTERS, strict=False)
    return "_".join(letter if given == size else "1" for given, size, letter in letters)


def _keys_up_to(high: int, seqlen_q: int, seqlen_kv: int) -> int:
    """The sum over the queries i of the keys 0 to i + high that there are."""
    first = min(max(-high, 0), seqlen_q)  # the first query with such a key
    past = min(max(seqlen_kv - high, first), seqlen_q)  # the first one with all of them
    count = past - first
    return count * (first + high + 1) + count * (count - 1) // 2 + (seqlen_q - past) * seqlen_kv


def visible_range(seqlen_q: int, seqlen_kv: int, left: int, right: int, bottom_right: bool) -> tuple[int, int]:
    """The keys of query i of a sequence: those from ``i + low`` to ``i + high``, as far as there are such.

    Args:
        seqlen_q: Sq.
        seqlen_kv: Skv.
        left: Keys before the diagonal that are seen, or -1 for all.
        right: Keys past it.
        bottom_right: Where it lies.

    Returns:
        low and high; where there is no limit, the lengths are it.
    """
    diagonal = seqlen_kv - seqlen_q if bottom_right else 0
    return -seqlen_q if left == UNLIMITED else diagonal - left, seqlen_kv if right == UNLIMITED else diagonal + right


def distance(a: Problem, b: Problem) -> float:
    """How far apart two problems of a kind are in size: by how many times, in powers of 2, lengths, heads and so on."""
    return sum(abs(x - y) for x, y in zip(a._log_sizes, b._log_sizes, strict=True))
