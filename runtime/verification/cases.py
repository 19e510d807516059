"""The small problems that a kernel is verified on: every tail, mask, layout and content in which a bug may show."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...gen.problem import UNLIMITED, WINDOW, Problem
from ..features import Features, Sequences

SOFTCAP = 2.0
"""The cap of all cases: well within the scores of every kind of input."""


@dataclass(frozen=True)
class Case:
    """One input that a kernel is checked on.

    Attributes:
        problem: The sizes, and the dtype, head_dim and mask of the problem that is tuned.
        inputs: Kind of content: a key of `inputs.INPUTS`.
        heads_inside: Lay tensors out as (B, S, H, D), as models and PyTorch's forward do, instead of (B, H, S, D).
        scale_factor: On the default softmax scale.
        every_head: Compare all heads; else the first and the last of the batch, which real sizes have time for.
        lengths: Sq and Skv of each sequence, where they vary and are not those that `Problem.lengths` makes up.
        draw: Which of all inputs of this kind: a number.
    """

    problem: Problem
    inputs: str
    heads_inside: bool = False
    scale_factor: float = 1.0
    every_head: bool = True
    lengths: tuple[tuple[int, int], ...] = ()
    draw: int = 0

    @property
    def name(self) -> str:
        lengths = f" of {', '.join(f'{q}x{kv}' for q, kv in self.lengths)}" if self.lengths else ""
        layout = " (B, S, H, D)" if self.heads_inside else ""
        scale = f" scale x{self.scale_factor:g}" if self.scale_factor != 1 else ""
        draw = f" draw {self.draw}" if self.draw else ""
        return f"{self.problem.label}{lengths} {self.inputs}{layout}{scale}{draw}"

    @property
    def scale(self) -> float:
        return self.problem.softmax_scale * self.scale_factor

    @property
    def positions(self) -> tuple[int, int]:
        """Rows of q and of k of a tensor."""
        if not self.lengths:
            return self.problem.positions
        return sum(seqlen_q for seqlen_q, _ in self.lengths), sum(seqlen_kv for _, seqlen_kv in self.lengths)

    def slices(self) -> list[tuple[int, slice, slice]]:
        """For each sequence its batch, and its rows of q and of k."""
        problem = self.problem
        if not problem.varlen:
            whole = slice(0, problem.seqlen_q), slice(0, problem.seqlen_kv)
            return [(batch, *whole) for batch in range(problem.batch)]
        starts_q, starts_kv = self._starts()
        return [
            (0, slice(*edges_q), slice(*edges_kv))
            for edges_q, edges_kv in zip(itertools.pairwise(starts_q), itertools.pairwise(starts_kv), strict=True)
        ]

    def features(self, device: torch.device) -> Features:
        """What a kernel and PyTorch are told besides the scale."""
        problem = self.problem
        sequences = None
        if problem.varlen:
            of_q, of_kv = self._starts()
            starts_q = torch.tensor(of_q, dtype=torch.int32, device=device)
            # One tensor for both says that both alignments are one, as a caller says it.
            starts_kv = starts_q if of_q == of_kv else torch.tensor(of_kv, dtype=torch.int32, device=device)
            sequences = Sequences(starts_q, starts_kv, problem.seqlen_q, problem.seqlen_kv)
        window = (problem.window_left, problem.right if problem.mask == WINDOW else UNLIMITED)
        return Features(window, problem.bottom_right, SOFTCAP if problem.softcap else 0.0, sequences)

    def _starts(self) -> tuple[list[int], list[int]]:
        lengths_q, lengths_kv = zip(*(self.lengths or self.problem.lengths), strict=True)
        return list(itertools.accumulate(lengths_q, initial=0)), list(itertools.accumulate(lengths_kv, initial=0))


def cases(problem: Problem, *, cuda: bool) -> tuple[Case, ...]:
    """The small problems on which a kernel for `problem` must be right: of the same kind, and the same group of heads.

    Together they have tails in both lengths for every tile, one token, fewer and more queries than keys, several
    heads and batches, both layouts, and contents in which bugs show that Gaussian noise hides. A window's limits are
    small enough to count, sequences of several lengths have empty ones among them.

    Args:
        problem: What is tuned; its lengths, batch, number of heads and window are replaced.
        cuda: More heads and longer sequences, for which a CPU is too slow: there, a few tiles each way.
    """
    group = problem.heads_q // problem.heads_kv

    def case(
        lengths: Sequence[tuple[int, int]],
        heads_kv: int,
        inputs: str,
        window: tuple[int, int] = (70, 37),
        **options: Any,
    ) -> Case:
        longest_q, longest_kv = (max(length) for length in zip(*lengths, strict=True))
        if not problem.varlen:  # the longest one, and as often as there are sequences
            lengths = lengths if len(set(lengths)) == 1 else [(longest_q, longest_kv)]
        left, right = (
            limit if own == UNLIMITED else min(limit, own)
            for limit, own in zip(window, (problem.window_left, problem.window_right), strict=True)
        )
        sized = replace(
            problem,
            batch=len(lengths),
            heads_q=heads_kv * group,
            heads_kv=heads_kv,
            seqlen_q=longest_q,
            seqlen_kv=longest_kv,
            window_left=UNLIMITED if problem.window_left == UNLIMITED else left,
            window_right=UNLIMITED if problem.window_right == UNLIMITED else right,
            lengths_as="",
        )
        return Case(sized, inputs, lengths=tuple(lengths) if problem.varlen else (), **options)

    small: tuple[Case, ...] = (
        case([(1, 1)], 1, "normal"),
        case([(17, 129)] * 2, 2, "normal", scale_factor=0.5),
        case([(0, 5), (256, 256 if cuda else 128), (64, 64), (7, 0)], 2, "large features", heads_inside=True),
        case([(321, 250) if cuda else (257, 150), (1, 1), (100, 33)], 1, "equal tokens", (129, 200)),
        case([(33, 128), (129, 391 if cuda else 200)], 2 if cuda else 1, "near one-hot", heads_inside=True),
    )
    if not problem.softcap:  # a cap leaves no score far below zero
        small = (*small, case([(167, 101), (40, 77)], 1, "far below zero"))
    if not cuda:
        return (*small, case([(270, 270)], 1, "normal", (1, 1)))
    large = case([(1187, 1187), (0, 0), (77, 1000)], 2, "normal", (500, 300))
    return (*small, case([(333, 333)] * 2, 1, "normal", (1, 1)), large)
