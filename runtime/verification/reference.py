"""The exact gradients in fp64, and how far a kernel's are from them."""

from __future__ import annotations

import math
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
        gradients: dq (G, Sq, D), dk (Skv, D), dv (Skv, D).
        terms: For each element the root of the sum of squares of what is summed up for it: how large the gradient
            would be if nothing cancelled, and so the scale of unavoidable rounding.
    """

    batch: int
    rows: slice
    keys: slice
    head_kv: int
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    terms: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def errors(self, results: tuple[torch.Tensor, ...]) -> Errors:
        """What is wrong with the gradients of the whole batch."""
        measured = {}
        group = self.gradients[0].shape[0]
        query_heads = slice(self.head_kv * group, (self.head_kv + 1) * group)
        for name, result, exact, terms in zip(GRADIENTS, results, self.gradients, self.terms, strict=True):
            heads, rows = (query_heads, self.rows) if name == "dq" else (self.head_kv, self.keys)
            difference = result[self.batch, heads, ..., rows, :].double() - exact
            size = max(float(exact.norm()), float(terms.norm()) / _CANCELLATION)
            if not size:  # nothing is summed up for any of them: they are zero to the last bit
                measured[name] = (0.0, 0.0) if not bool(difference.any()) else (math.inf, math.inf)
                continue
            faint = terms.square().mean().sqrt() / _FAINT_ELEMENTS
            relative = float(difference.norm()) / size
            worst = float((difference.abs() / torch.hypot(terms, faint)).max())
            measured[name] = (relative, worst) if math.isfinite(relative) else (math.inf, math.inf)
        return measured


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
    dk, dv, dk_terms, dv_terms = (torch.zeros_like(k) for _ in range(4))
    dq, dq_terms = torch.zeros_like(queries), torch.zeros_like(queries)
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
            s.masked_fill_((columns < positions + low) | (columns > positions + high), -math.inf)
            if inputs.sink is not None:
                s = torch.cat([s, inputs.sink[heads][head].double().expand(s.shape[0], 1)], -1)
            p = s.softmax(-1).nan_to_num(0.0)[:, :seqlen_kv]  # of a row that sees no key
            dp = dout @ v.mT
            delta = (dout * (p @ v)).sum(-1, keepdim=True)
            if inputs.dlse is not None:
                delta -= inputs.dlse[batch, heads, rows][head, block, None].double()
            ds = p * (dp - delta) * slope * scale
            ds_squares = (p * slope * scale).square() * (dp.square() + delta.square())
            dq[head, block] = ds @ k
            dq_terms[head, block] = ds_squares @ k.square()
            dk += ds.mT @ q
            dk_terms += ds_squares.mT @ q.square()
            dv += p.mT @ dout
            dv_terms += p.square().mT @ dout.square()
    terms = (dq_terms.sqrt(), dk_terms.sqrt(), dv_terms.sqrt())
    return HeadReference(batch, rows, keys, head_kv, (dq, dk, dv), terms)
