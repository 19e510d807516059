"""Attention as an autograd function in Python: for what the operator has no word for, and until it is loaded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from . import dispatch, math_attention, row_features, torch_attention
from .call import Call
from .dispatch import counters
from .dispatch.records import Cause
from .kernel import Kernel, KernelError, backward


def run(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    forward: str,
    kernel: Kernel | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward, and where a gradient is needed the kernel's backward, or PyTorch's if there is none.

    Args:
        call: What is asked for.
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, D).
        sink: (Hq), if there is any.
        forward: Of `forwards.choose`.
        kernel: The backward.

    Returns:
        (B, Hq, Sq, D) and the log-sum-exp, (B, Hq, Sq); both differentiable.
    """
    tensors = (q, k, v) if sink is None else (q, k, v, sink)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        found: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(q, k, v, sink, call, forward, kernel)
        return found
    result = _forward(call, q, k, v, sink, forward)
    return result.output, result.lse


def _forward(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None, name: str
) -> torch_attention.Forward:
    return torch_attention.forward(q, k, v, call.causal, call.scale, call.features, name, sink)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        call: Call,
        name: str,
        kernel: Kernel | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result = _forward(call, q, k, v, sink, name)
        if kernel:
            ctx.save_for_backward(sink, q, k, v, result.output, result.lse)
            ctx.gradients = _of_kernel(kernel, call)
        else:
            ctx.save_for_backward(sink, *result.saved)
            ctx.gradients = _of_pytorch(result.gradients, call)
        ctx.set_materialize_grads(False)
        return result.output, result.lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(saved[4])
        # create_graph=True, is_grads_batched=True
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            gradients = _Gradients.apply(ctx.gradients, dout, dlse, *saved)
        else:
            gradients = ctx.gradients(dout, dlse, *saved)
        asked = (gradient if need else None for gradient, need in zip(gradients, ctx.needs_input_grad, strict=False))
        missing = len(ctx.needs_input_grad) - len(gradients)
        return (*asked, *(None,) * missing)


def _of_kernel(kernel: Kernel, call: Call) -> Callable[..., tuple[torch.Tensor, ...]]:
    def gradients(
        dout: torch.Tensor, dlse: torch.Tensor | None, sink: torch.Tensor | None, *saved: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        q, k, v, output, lse = saved
        features = call.features
        if kernel.info.mask == "window":
            features = replace(features, window=features.limits(call.causal))
        try:
            found = backward(kernel, q, k, v, output, dout, lse, call.scale, features, dlse=dlse, sink=sink)
        except KernelError as error:
            dispatch.discard(kernel, f"its launch failed: {error}")
            counters.fell_back(Cause.UNUSABLE)
            elementary = functools.partial(
                math_attention.gradients, causal=call.causal, scale=call.scale, features=call.features
            )
            return _with_sink(elementary, call, dout, dlse, sink, *saved)
        counters.launched(kernel.path.stem)
        return found

    return gradients


def _of_pytorch(found: Callable[..., torch_attention.Gradients], call: Call) -> Callable[..., tuple[torch.Tensor, ...]]:
    def gradients(
        dout: torch.Tensor, dlse: torch.Tensor | None, sink: torch.Tensor | None, *saved: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        with torch_attention.deterministic_algorithms() if call.repeatable else contextlib.nullcontext():
            return _with_sink(found, call, dout, dlse, sink, *saved)

    return gradients


def _with_sink(
    found: Callable[..., torch_attention.Gradients],
    call: Call,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    sink: torch.Tensor | None,
    *saved: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """All gradients by a backward that gives dq, dk and dv of an output's."""
    of_tensors = row_features.gradients(found, dout, dlse, *saved)
    if sink is None:
        return of_tensors
    lse = row_features.rows_of(saved[4], saved[0])
    starts = call.features.sequences.cu_seqlens_q if call.features.sequences else None
    return (*of_tensors, row_features.sink_gradient(sink, saved[3], lse, dout, dlse, starts))


class _Gradients(torch.autograd.Function):
    """The backward where it is transformed: batched, which it does one by one, or differentiated, which it refuses.

    PyTorch's `once_differentiable` refuses only where dout needs a gradient; the gradient of a sum would be a constant.
    """

    @staticmethod
    def forward(gradients: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor | None) -> Any:
        return gradients(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *unused: torch.Tensor) -> Any:
        raise RuntimeError(
            "the gradients of bwdtune.attention cannot be differentiated again: "
            "use torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], gradients: Callable[..., Any], *tensors: Any) -> Any:
        batches = [
            [tensor] * info.batch_size if dim is None else tensor.unbind(dim)
            for tensor, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        found = [gradients(*one) for one in zip(*batches, strict=True)]
        return tuple(torch.stack(gradient) for gradient in zip(*found, strict=True)), (0,) * len(found[0])
