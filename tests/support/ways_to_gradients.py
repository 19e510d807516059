"""Ways in which the gradients of a loss are asked for, apart from plain `torch.autograd.grad`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from exact_attention import Tensors
from torch.utils.checkpoint import checkpoint


def _compiled(loss: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Tensors:
    torch._dynamo.reset()
    return torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*inputs), inputs)


def _autocast(loss: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Tensors:
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        total = loss(*wide)
    return torch.autograd.grad(total, wide)


WAYS: dict[str, Callable[..., Tensors]] = {
    "torch.compile": _compiled,
    "checkpoint": lambda loss, *inputs: torch.autograd.grad(checkpoint(loss, *inputs, use_reentrant=False), inputs),
    "torch.func": lambda loss, *inputs: torch.func.grad(loss, argnums=tuple(range(len(inputs))))(*inputs),
    "autocast": _autocast,
    "a graph that is differentiated": lambda loss, *inputs: torch.autograd.grad(
        loss(*inputs), inputs, create_graph=True
    ),
}
"""By name: a loss and its inputs, which require gradients -> the gradients of all of them."""
