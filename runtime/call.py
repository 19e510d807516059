"""One call of attention, besides its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..gen.problem import UNLIMITED, Problem
from . import forwards
from .features import Features
from .kernel import TORCH_DTYPES

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


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
    """

    causal: bool
    scale: float
    features: Features
    deterministic: bool | None
    enable_gqa: bool
    return_lse: bool = False
    sink: bool = False

    @property
    def repeatable(self) -> bool:
        """Whether gradients have to be the same bits at each call."""
        return torch.are_deterministic_algorithms_enabled() if self.deterministic is None else self.deterministic

    def problem(self, q: torch.Tensor, k: torch.Tensor) -> Problem:
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
        )

    def forward_name(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, kernel: bool) -> str:
        """See `forwards.choose`."""
        return forwards.choose(
            q, k, v, self.causal, self.scale, self.features, enable_gqa=self.enable_gqa, kernel=kernel
        )
