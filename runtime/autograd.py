"""Attention as an autograd function in Python: for what the operator has no word for, and until it is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from . import dispatch, math_attention, torch_attention
from .call import Call
from .dispatch import counters
from .dispatch.records import Cause
from .kernel import Kernel, KernelError, backward


def run(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward: str, kernel: Kernel | None
) -> torch.Tensor:
    """A forward, and where a gradient is needed the kernel's backward, or PyTorch's if there is none.

    Args:
        call: What is asked for.
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, D).
        forward: Of `forwards.choose`.
        kernel: The backward.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        output: torch.Tensor = _Attention.apply(q, k, v, call, forward, kernel)
        return output
    return _forward(call, q, k, v, forward).output


def _forward(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str) -> torch_attention.Forward:
    return torch_attention.forward(q, k, v, call.causal, call.scale, call.features, name)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, name: str, kernel: Kernel | None
    ) -> torch.Tensor:
        result = _forward(call, q, k, v, name)
        if kernel:
            ctx.save_for_backward(q, k, v, result.output, result.lse)
            ctx.gradients = _of_kernel(kernel, call)
        else:
            ctx.save_for_backward(*result.saved)
            ctx.gradients = _of_pytorch(result.gradients, call.repeatable)
        return result.output

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        # create_graph=True, is_grads_batched=True
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
            gradients = _Gradients.apply(ctx.gradients, dout, *saved)
        else:
            gradients = ctx.gradients(dout, *saved)
        asked = (gradient if need else None for gradient, need in zip(gradients, ctx.needs_input_grad, strict=False))
        return (*asked, None, None, None)


def _of_kernel(kernel: Kernel, call: Call) -> Callable[..., torch_attention.Gradients]:
    def gradients(dout: torch.Tensor, *saved: torch.Tensor) -> torch_attention.Gradients:
        q, k, v, output, lse = saved
        features = call.features
        if kernel.info.mask == "window":
            features = replace(features, window=features.limits(call.causal))
        try:
            found = backward(kernel, q, k, v, output, dout, lse, call.scale, features)
        except KernelError as error:
            dispatch.discard(kernel, f"its launch failed: {error}")
            counters.fell_back(Cause.UNUSABLE)
            return math_attention.gradients(dout, q, k, v, output, lse, call.causal, call.scale, call.features)
        counters.launched(kernel.path.stem)
        return found

    return gradients


def _of_pytorch(
    found: Callable[..., torch_attention.Gradients], repeatable: bool
) -> Callable[..., torch_attention.Gradients]:
    def gradients(dout: torch.Tensor, *saved: torch.Tensor) -> torch_attention.Gradients:
        with torch_attention.deterministic_algorithms() if repeatable else contextlib.nullcontext():
            return found(dout, *saved)

    return gradients


class _Gradients(torch.autograd.Function):
    """The backward where it is transformed: batched, which it does one by one, or differentiated, which it refuses.

    PyTorch's `once_differentiable` refuses only where dout needs a gradient; the gradient of a sum would be a constant.
    """

    @staticmethod
    def forward(gradients: Callable[..., torch_attention.Gradients], dout: torch.Tensor, *saved: torch.Tensor) -> Any:
        return gradients(dout, *saved)

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
        return tuple(torch.stack(gradient) for gradient in zip(*found, strict=True)), (0, 0, 0)
