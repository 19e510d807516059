"""What a call of attention may ask for besides its tensors, its scale and a plain causal mask."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ..gen.problem import UNLIMITED


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of several lengths, which lie one after another in the rows of q, and of k and v.

    Attributes:
        cu_seqlens_q: int32 (B + 1), on the tensors' device: where each begins in q, and one past the end of the last.
        cu_seqlens_kv: The same for k and v.
        seqlen_q: Length of the longest in q, or a bound on it.
        seqlen_kv: The same for k and v.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    seqlen_q: int
    seqlen_kv: int

    @property
    def count(self) -> int:
        """B."""
        return self.cu_seqlens_q.numel() - 1

    def slices(self) -> list[tuple[slice, slice]]:
        """The rows of q, and of k and v, of each sequence. Waits for the device."""
        starts = zip(self.cu_seqlens_q.tolist(), self.cu_seqlens_kv.tolist(), strict=True)
        return [(slice(q, end_q), slice(kv, end_kv)) for (q, kv), (end_q, end_kv) in itertools.pairwise(starts)]


@dataclass(frozen=True, eq=False)
class Features:
    """What of a call is out of the ordinary.

    Attributes:
        window: Keys before and past the diagonal that a query sees, -1 for all. Where the mask is causal as well, none
            is seen past it.
        bottom_right: Where the diagonal lies: see `gen.problem.Problem`.
        softcap: The cap on scores, 0 for none.
        sequences: Of packed input. B is then 1, and S counts the rows of all sequences.
        alibi_slopes: fp32, (Hq), or (B, Hq) with B the number of sequences where they are packed; None for no ALiBi.
            ``-slope * abs(i + Skv - Sq - j)`` is added to the score of query i and key j of a sequence.
    """

    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    bottom_right: bool = False
    softcap: float = 0.0
    sequences: Sequences | None = None
    alibi_slopes: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing is."""
        unlimited = self.window == (UNLIMITED, UNLIMITED)
        return unlimited and not (self.bottom_right or self.softcap or self.sequences or self.alibi_slopes is not None)

    def limits(self, causal: bool) -> tuple[int, int]:
        """The window's limits, where a causal mask is one to the right."""
        return self.window[0], 0 if causal else self.window[1]


PLAIN = Features()
