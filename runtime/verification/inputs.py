"""What a kernel is given: tensors of several kinds of content, drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import forwards, row_features, torch_attention
from ..features import Features
from ..kernel import BIAS_DTYPES, TORCH_DTYPES
from .cases import Case

_FAR_SCORE = 150.0  # at the default scale; exp(89) overflows in fp32
_HIDDEN = -1e4  # a bias that leaves a key no probability


def _normal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> None:
    del q, k, v, dout  # as they were drawn


def _large_features(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> None:
    """A few channels far larger than the others, as trained models have them."""
    channels = slice(3, 6)
    for tensor, factor in ((q, 4.0), (k, 4.0), (v, 16.0), (dout, 16.0)):
        tensor[..., channels] *= factor


def _equal_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> None:
    """A long run of one token (padding, silence): most of dS cancels."""
    del dout
    run = slice(0, max(1, k.shape[2] * 3 // 4))
    k[:, :, run] = k[:, :, :1].clone()
    v[:, :, run] = v[:, :, :1].clone()
    q[:, :, : q.shape[2] // 2] = q[:, :, :1].clone()


def _near_one_hot(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> None:
    """Each query is some key that it sees, weakly or strongly scaled: one probability is almost one."""
    del v, dout
    rows = torch.arange(q.shape[2], device=q.device)
    keys = rows * 7919 % (rows + 1).clamp(max=k.shape[2])
    strength = torch.where(rows % 2 == 0, 1.0, 2.5)[:, None]
    q.copy_(k.repeat_interleave(q.shape[1] // k.shape[1], 1)[:, :, keys] * strength)


def _far_below_zero(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> None:
    """Every score is about -150, where exp(0 - lse) overflows: a key past the end, whose score is 0, must not count."""
    del v, dout
    offset = _FAR_SCORE**0.5 / q.shape[-1] ** 0.25
    q.mul_(0.1).sub_(offset)
    k.add_(offset)


INPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]] = {
    "normal": _normal,
    "large features": _large_features,
    "equal tokens": _equal_tokens,
    "near one-hot": _near_one_hot,
    "far below zero": _far_below_zero,
}


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a backward is given, on one device. Sequences of several lengths are a batch of one, and S counts them all.

    Attributes:
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, Dv).
        dout: (B, Hq, Sq, Dv).
        features: The window, the cap and the sequences.
        forward: PyTorch's forward of q, k, v and the sinks.
        dlse: (B, Hq, Sq), fp32: the gradient of the log-sum-exp, if the problem has one.
        sink: (Hq), fp32, if the problem has sinks.
        bias: (B or 1, Hq or 1, Sq or 1, Skv), if the problem has one.
        bias_grad: Whether its gradient is wanted.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    features: Features
    forward: torch_attention.Forward
    dlse: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    bias_grad: bool = False

    def read(self) -> dict[str, torch.Tensor]:
        """The tensors that a kernel reads, by the names that `Kernel.prepare` has for them."""
        found = {"q": self.q, "k": self.k, "v": self.v, "dout": self.dout}
        found |= {"o": self.forward.output, "lse": self.forward.lse}
        slopes = self.features.alibi_slopes
        besides = {"dlse": self.dlse, "sink": self.sink, "bias": self.bias, "alibi_slopes": slopes}
        return found | {name: tensor for name, tensor in besides.items() if tensor is not None}

    def written(self) -> dict[str, torch.Tensor]:
        """For each tensor that it writes, by such a name, one that it is allocated like."""
        found = {"dq": self.q, "dk": self.k, "dv": self.v}
        if self.sink is not None:
            found["dsink"] = self.sink
        if self.bias is not None and self.bias_grad:
            found["dbias"] = torch.empty_like(self.bias, memory_format=torch.contiguous_format)
        return found

    def outputs(self) -> dict[str, torch.Tensor]:
        """What it writes, allocated, with any content."""
        return {name: torch.empty_like(tensor) for name, tensor in self.written().items()}

    def gradients_of(self, forward: torch_attention.Forward) -> tuple[torch.Tensor, ...]:
        """All gradients by the backward of a forward of PyTorch's, dsink last."""
        found = forward.backward(self.dout, self.dlse)
        return found if self.sink is None else (*found, self.dsink())

    def dsink(self) -> torch.Tensor:
        """The gradient of the sinks, by the output and the log-sum-exp that a kernel is given, as they are."""
        assert self.sink is not None, "there are none"
        starts = self.features.sequences.cu_seqlens_q if self.features.sequences else None
        output, lse = self.forward.output, self.forward.lse
        return row_features.sink_gradient(self.sink, output, lse, self.dout, self.dlse, starts)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Draws a case's inputs: the same at each call on one kind of device."""
    problem, dtype = case.problem, TORCH_DTYPES[case.problem.dtype]
    generator = torch.Generator(device).manual_seed(20 + case.draw)
    batch, (positions_q, positions_kv) = 1 if problem.varlen else problem.batch, case.positions
    queries = (batch, problem.heads_q, positions_q, problem.head_dim)
    keys = (batch, problem.heads_kv, positions_kv, problem.head_dim)
    outputs, values = (*queries[:3], problem.head_dim_v), (*keys[:3], problem.head_dim_v)

    def draw(shape: tuple[int, int, int, int]) -> torch.Tensor:
        batch, heads, seqlen, head_dim = shape
        stored = (batch, seqlen, heads, head_dim) if case.heads_inside else shape
        values = torch.randn(stored, device=device, dtype=dtype, generator=generator)
        return values.transpose(1, 2) if case.heads_inside else values

    q, k, v, dout = (draw(shape) for shape in (queries, keys, values, outputs))
    INPUTS[case.inputs](q, k, v, dout)
    features = case.features(device)
    dlse = sink = bias = None
    if problem.bias:
        bias = _bias(case, device, generator)
    if problem.alibi:
        # So steep that it shows at once, and not so that nothing else does.
        per_head = (problem.batch, problem.heads_q) if case.heads_inside else (problem.heads_q,)
        slopes = torch.rand(per_head, device=device, generator=generator) * 0.2 + 0.01
        features = replace(features, alibi_slopes=slopes)
    # Of a query that sees no key, the fused forward with a bias may say anything: elementary operations say what it is.
    name = None if bias is None else forwards.MATH
    biased: dict[str, Any] = {"name": name, "bias": bias, "bias_grad": problem.bias_grad}
    forward = torch_attention.forward(q, k, v, problem.causal, case.scale, features, **biased)
    if problem.lse_grad:
        dlse = torch.randn(q.shape[:3], device=device, generator=generator)
    if problem.sink:
        # Of about the size of all other scores of a row together, whatever these are; rows of hidden keys aside.
        sees = forward.lse.isfinite() & (forward.lse > _HIDDEN / 2)
        seen = forward.lse.where(sees, torch.nan).nanmean((0, 2)).nan_to_num()
        sink = seen + torch.randn(problem.heads_q, device=device, generator=generator)
        forward = torch_attention.forward(q, k, v, problem.causal, case.scale, features, sink=sink, **biased)
    return Inputs(q, k, v, dout, features, forward, dlse, sink, bias, problem.bias_grad)


def _bias(case: Case, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Of about the size of scores; without a gradient, a tenth of it hides keys. Heads are inside as in the others."""
    problem = case.problem
    batch, heads, rows, keys = problem.bias_shape
    stored = (batch, rows, heads, keys + 3) if case.heads_inside else (batch, heads, rows, keys)
    values = torch.randn(stored, device=device, generator=generator) * 2
    if not problem.bias_grad:
        values.masked_fill_(torch.rand(stored, device=device, generator=generator) < 0.1, _HIDDEN)
    values = values.to(BIAS_DTYPES[problem.bias_dtype])
    return values.transpose(1, 2)[..., :keys] if case.heads_inside else values
