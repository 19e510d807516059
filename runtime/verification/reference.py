"""The exact gradients in fp64, and how far a kernel's are from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .cases import SOFTCAP, Case
from .inputs import Inputs

GRADIENTS = ("dq", "dk", "dv")

_CANCELLATION = 8.0  # a gradient smaller than its terms by more than this is measured against the terms
_FAINT_ELEMENTS = 16.0  # an element's terms count as no smaller than the tensor's average over this
_CHUNK_ELEMENTS = 2**25  # of a score matrix in fp64: 256 MiB

Errors = dict[str, tuple[float, float]]
"""Of dq, dk and dv: the relative L2 error, and the worst element's."""


@dataclass(frozen=True, eq=False)
class HeadReference:
    """The exact gradients of one key/value head and the query heads that share it, in fp64, of one sequence.

    Attributes:
        batch: Index.
        rows: The sequence's rows of q.
        keys: Its rows of k.
        head_kv: Index; the query heads are ``head_kv * G`` to ``(head_kv + 1) * G - 1``.
        gradients: dq (G, Sq, D), dk (Skv, D), dv (Skv, Dv).
        terms: For each element the root of the sum of squares of what is summed up for it: how large the gradient
            would be if nothing cancelled, and so the scale of unavoidable rounding.
        dbias: (G, Sq or 1, Skv), the heads' part of the bias' gradient, if that is wanted: summed over queries where
            the bias is broadcast over them.
        dbias_squares: The sum of squares of what is summed up for each.
    """

    batch: int
    rows: slice
    keys: slice
    head_kv: int
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    terms: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    dbias: torch.Tensor | None = None
    dbias_squares: torch.Tensor | None = None

    def errors(self, results: tuple[torch.Tensor, ...]) -> Errors:
        """What is wrong with the gradients of the whole batch."""
        measured = {}
        group = self.gradients[0].shape[0]
        query_heads = slice(self.head_kv * group, (self.head_kv + 1) * group)
        for name, result, exact, terms in zip(GRADIENTS, results, self.gradients, self.terms, strict=True):
            heads, rows = (query_heads, self.rows) if name == "dq" else (self.head_kv, self.keys)
            measured[name] = _errors(result[self.batch, heads, ..., rows, :], exact, terms)
        return measured


def _errors(result: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> tuple[float, float]:
    """The relative L2 error, and the worst element's by its terms."""
    difference = result.double() - exact
    size = max(float(exact.norm()), float(terms.norm()) / _CANCELLATION)
    if not size:  # nothing is summed up for any of them: they are zero to the last bit
        return (0.0, 0.0) if not bool(difference.any()) else (math.inf, math.inf)
    faint = terms.square().mean().sqrt() / _FAINT_ELEMENTS
    relative = float(difference.norm()) / size
    worst = float((difference.abs() / torch.hypot(terms, faint)).max())
    return (relative, worst) if math.isfinite(relative) else (math.inf, math.inf)


@dataclass(frozen=True, eq=False)
class BiasReference:
    """The exact gradient of a bias, in fp64, of some batches and heads of its own.

    Attributes:
        parts: For each the index of its batch and of its head, the gradient (Sq or 1, Skv), and its terms as in
            `HeadReference`.
    """

    parts: tuple[tuple[tuple[int, int], torch.Tensor, torch.Tensor], ...]

    def errors(self, result: torch.Tensor) -> tuple[float, float]:
        """The largest errors over the parts, each kind for itself, as `Errors` has them."""
        by_part = [_errors(result[place], exact, terms) for place, exact, terms in self.parts]
        return max(relative for relative, _ in by_part), max(worst for _, worst in by_part)


def bias_reference(case: Case, heads: Sequence[HeadReference]) -> BiasReference | None:
    """What the references of heads say of the bias' gradient; None where they are not all whose sum it is."""
    batches, bias_heads, _, _ = case.problem.bias_shape
    if not case.every_head and (batches, bias_heads) != (case.problem.batch, case.problem.heads_q):
        return None
    sums: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for head in heads:
        assert head.dbias is not None, "it is wanted"
        assert head.dbias_squares is not None, "it is wanted"
        for number, part in enumerate(zip(head.dbias, head.dbias_squares, strict=True)):
            query_head = head.head_kv * len(head.dbias) + number
            place = (head.batch if batches > 1 else 0, query_head if bias_heads > 1 else 0)
            gradient, squares = sums.get(place, (torch.zeros_like(part[0]), torch.zeros_like(part[1])))
            sums[place] = gradient + part[0], squares + part[1]
    return BiasReference(tuple((place, gradient, squares.sqrt()) for place, (gradient, squares) in sums.items()))


@dataclass(frozen=True, eq=False)
class SinkReference:
    """The exact gradient of the sinks for the output and the log-sum-exp that a kernel is given, in fp64.

    Attributes:
        dsink: (Hq).
        terms: (Hq), the sum of the sizes of all that is summed up for each.
    """

    dsink: torch.Tensor
    terms: torch.Tensor

    def error(self, result: torch.Tensor) -> float:
        """The largest error of a head, by its terms; infinite where one is not a number."""
        difference = (result.double() - self.dsink).abs()
        relative = torch.where(difference > 0, difference / self.terms, difference)
        return float(relative.max()) if bool(relative.isfinite().all()) else math.inf


def sink_reference(inputs: Inputs) -> SinkReference:
    """dSink = -sum over rows of exp(sink - L) (rowsum(dO O) - dL), a head at a time."""
    assert inputs.sink is not None, "there are none"
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    rows = slice(None)
    if sequences := inputs.features.sequences:  # rows past the last one belong to none
        rows = slice(int(sequences.cu_seqlens_q[0]), int(sequences.cu_seqlens_q[-1]))
    for head, sink in enumerate(inputs.sink.double()):
        lse = inputs.forward.lse[:, head, rows].double()
        p = torch.exp(sink - lse).where(lse.isfinite(), 0.0)
        products = inputs.dout[:, head, rows].double() * inputs.forward.output[:, head, rows].double()
        dlse = torch.zeros_like(lse) if inputs.dlse is None else inputs.dlse[:, head, rows].double()
        found.append((-(p * (products.sum(-1) - dlse)).sum(), (p * (products.abs().sum(-1) + dlse.abs())).sum()))
    dsink, terms = (torch.stack(part) for part in zip(*found, strict=True))
    return SinkReference(dsink, terms)


def head_reference(case: Case, inputs: Inputs, sequence: int, head_kv: int) -> HeadReference:
    """The textbook backward of one group of heads of one sequence in fp64.

    A block of rows at a time, so that memory stays bounded.

    Args:
        case: Whose.
        inputs: Of `make_inputs`.
        sequence: Index; where all have the same length, of the batch.
        head_kv: Index.
    """
    problem, scale = case.problem, case.scale
    group = problem.heads_q // problem.heads_kv
    batch, rows, keys = case.slices()[sequence]
    heads = slice(head_kv * group, (head_kv + 1) * group)
    k, v = (tensor[batch, head_kv, keys].double() for tensor in (inputs.k, inputs.v))
    queries, douts = (tensor[batch, heads, rows].double() for tensor in (inputs.q, inputs.dout))
    seqlen_q, seqlen_kv = queries.shape[1], k.shape[0]
    low, high = problem.visible_range(seqlen_q, seqlen_kv)
    dq, dk, dv = (torch.zeros_like(tensor) for tensor in (queries, k, v))
    dq_terms, dk_terms, dv_terms = (torch.zeros_like(tensor) for tensor in (queries, k, v))
    dbias = dbias_squares = None
    if inputs.bias is not None and problem.bias_grad:
        dbias, dbias_squares = (k.new_zeros(group, inputs.bias.shape[2], seqlen_kv) for _ in range(2))
    slopes = inputs.features.alibi_slopes
    if slopes is not None:
        slopes = (slopes[sequence] if slopes.dim() == 2 else slopes)[heads].double()
    columns = torch.arange(seqlen_kv, device=k.device)
    chunk = max(1, _CHUNK_ELEMENTS // max(1, seqlen_kv))
    for head in range(group):
        for start in range(0, seqlen_q if seqlen_kv else 0, chunk):
            block = slice(start, min(start + chunk, seqlen_q))
            q, dout = queries[head, block], douts[head, block]
            s, slope = q @ k.mT * scale, torch.ones((), dtype=k.dtype, device=k.device)
            if problem.softcap:
                capped = torch.tanh(s / SOFTCAP)
                s, slope = capped * SOFTCAP, 1 - capped.square()
            positions = torch.arange(block.start, block.stop, device=k.device)[:, None]
            if inputs.bias is not None:
                s = s + _of_head(inputs.bias, batch, heads.start + head, block).double()
            if slopes is not None:
                s = s - slopes[head] * (positions + seqlen_kv - seqlen_q - columns).abs()
            s.masked_fill_((columns < positions + low) | (columns > positions + high), -math.inf)
            if inputs.sink is not None:
                s = torch.cat([s, inputs.sink[heads][head].double().expand(s.shape[0], 1)], -1)
            p = s.softmax(-1).nan_to_num(0.0)[:, :seqlen_kv]  # of a row that sees no key
            dp = dout @ v.mT
            delta = (dout * (p @ v)).sum(-1, keepdim=True)
            if inputs.dlse is not None:
                delta -= inputs.dlse[batch, heads, rows][head, block, None].double()
            ds, ds_squares = p * (dp - delta), p.square() * (dp.square() + delta.square())
            if dbias is not None and dbias_squares is not None:
                for total, part in ((dbias, ds), (dbias_squares, ds_squares)):
                    if total.shape[1] == 1:
                        total[head] += part.sum(0)
                    else:
                        total[head, block] = part
            ds, ds_squares = ds * slope * scale, ds_squares * (slope * scale).square()
            dq[head, block] = ds @ k
            dq_terms[head, block] = ds_squares @ k.square()
            dk += ds.mT @ q
            dk_terms += ds_squares.mT @ q.square()
            dv += p.mT @ dout
            dv_terms += p.square().mT @ dout.square()
    terms = (dq_terms.sqrt(), dk_terms.sqrt(), dv_terms.sqrt())
    return HeadReference(batch, rows, keys, head_kv, (dq, dk, dv), terms, dbias, dbias_squares)


def _of_head(bias: torch.Tensor, batch: int, head: int, rows: slice) -> torch.Tensor:
    """The rows of a bias for a query head, or the one that it has for all of them."""
    part = bias[min(batch, bias.shape[0] - 1), min(head, bias.shape[1] - 1)]
    return part[rows] if bias.shape[2] > 1 else part
