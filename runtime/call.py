"""One call of attention, besides its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..gen.problem import UNLIMITED, Problem, bias_pattern
from . import forwards
from .features import Features
from .kernel import BIAS_DTYPES, TORCH_DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
BIAS_DTYPE_NAMES = {dtype: name for name, dtype in BIAS_DTYPES.items()}


class Bias(NamedTuple):
    """A bias, besides its values.

    Attributes:
        shape: (B or 1, Hq or 1, Sq or 1, Skv).
        dtype: Its element type.
        gradient: Whether its gradient is wanted.
    """

    shape: torch.Size
    dtype: torch.dtype
    gradient: bool


@dataclass(frozen=True, eq=False)
class Call:
    """What is asked for, besides the tensors.

    Attributes:
        causal: See `attention`.
        scale: The softmax scale.
        features: The mask in its simplest terms, and the rest.
        deterministic: As it was asked for; None where nothing was.
        enable_gqa: See `attention`.
        return_lse: Whether the log-sum-exp is asked for too: a gradient may flow into it.
        sink: Whether sinks are given.
        bias: What of a bias matters; None where there is none.
    """

    causal: bool
    scale: float
    features: Features
    deterministic: bool | None
    enable_gqa: bool
    return_lse: bool = False
    sink: bool = False
    bias: Bias | None = None

    @property
    def bias_grad(self) -> bool:
        """Whether there is a bias whose gradient is wanted."""
        return self.bias is not None and self.bias.gradient

    @property
    def repeatable(self) -> bool:
        """Whether gradients have to be the same bits at each call."""
        return torch.are_deterministic_algorithms_enabled() if self.deterministic is None else self.deterministic

    def problem(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Problem:
        """What a kernel has to compute.

        Raises:
            UsageError: No problem has such sizes.
        """
        sequences = self.features.sequences
        sizes = (
            (sequences.count, q.shape[1], k.shape[1], sequences.seqlen_q, sequences.seqlen_kv, q.shape[3])
            if sequences
            else (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
        )
        left, right = self.features.limits(self.causal)
        biased: dict[str, Any] = {}
        if self.bias:
            pattern = bias_pattern(self.bias.shape, sizes[0], sizes[1], *sizes[3:5])
            dtype = BIAS_DTYPE_NAMES[self.bias.dtype]
            biased = {"bias": pattern, "bias_dtype": dtype, "bias_grad": self.bias.gradient}
        return Problem(
            DTYPE_NAMES[q.dtype],
            *sizes,
            causal=self.causal,
            window_left=left,
            window_right=UNLIMITED if self.causal else right,
            bottom_right=self.features.bottom_right,
            softcap=bool(self.features.softcap),
            varlen=sequences is not None,
            deterministic=self.repeatable,
            lse_grad=self.return_lse,
            sink=self.sink,
            alibi=self.features.alibi_slopes is not None,
            value_head_dim=v.shape[3],
            **biased,
        )

    def forward_name(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, kernel: bool) -> str:
        """See `forwards.choose`."""
        options: dict[str, Any] = {"enable_gqa": self.enable_gqa, "kernel": kernel}
        if self.bias:
            options["bias_dtype"] = self.bias.dtype
        return forwards.choose(q, k, v, self.causal, self.scale, self.features, **options)
