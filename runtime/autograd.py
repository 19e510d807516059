"""Attention as an autograd function in Python: for what the operator has no word for, and until it is loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from . import dispatch, row_features, torch_attention
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
    bias: torch.Tensor | None,
    forward: str,
    kernel: Kernel | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward, and where a gradient is needed the kernel's backward, or PyTorch's if there is none.

    Args:
        call: What is asked for.
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, Dv).
        sink: (Hq), if there is any.
        bias: (B or 1, Hq or 1, Sq or 1, Skv), if there is any.
        forward: Of `forwards.choose`.
        kernel: The backward.

    Returns:
        (B, Hq, Sq, Dv) and the log-sum-exp, (B, Hq, Sq); both differentiable.
    """
    tensors = (q, k, v, sink, bias)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        found: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(q, k, v, sink, bias, call, forward, kernel)
        return found
    result = _forward(call, q, k, v, sink, bias, forward)
    return result.output, result.lse


def _forward(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    bias: torch.Tensor | None,
    name: str,
) -> torch_attention.Forward:
    return torch_attention.forward(q, k, v, call.causal, call.scale, call.features, name, sink, bias, call.bias_grad)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink: torch.Tensor | None,
        bias: torch.Tensor | None,
        call: Call,
        name: str,
        kernel: Kernel | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result = _forward(call, q, k, v, sink, bias, name)
        ctx.has_sink, ctx.bias_grad = sink is not None, call.bias_grad
        if kernel:
            biases = () if bias is None else (bias,)
            ctx.save_for_backward(sink, q, k, v, result.output, result.lse, *biases)
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
        of_tensors, others = gradients[:3], list(gradients[3:])
        dsink = others.pop(0) if ctx.has_sink else None
        dbias = others.pop(0) if ctx.bias_grad else None
        found = (*of_tensors, dsink, dbias)
        asked = (gradient if need else None for gradient, need in zip(found, ctx.needs_input_grad, strict=False))
        return (*asked, *(None,) * (len(ctx.needs_input_grad) - len(found)))


def _of_kernel(kernel: Kernel, call: Call) -> Callable[..., tuple[torch.Tensor, ...]]:
    def gradients(
        dout: torch.Tensor, dlse: torch.Tensor | None, sink: torch.Tensor | None, *saved: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        q, k, v, output, lse, *biases = saved
        features = call.features
        if kernel.info.mask == "window":
            features = replace(features, window=features.limits(call.causal))
        options: dict[str, Any] = {"dlse": dlse, "sink": sink, "alibi_slopes": features.alibi_slopes}
        if biases:
            bias = biases[0]
            options["bias"] = bias if bias.stride(3) == 1 else bias.contiguous()
            lse = row_features.without_unseen(lse)
        try:
            found = backward(kernel, q, k, v, output, dout, lse, call.scale, features, **options)
        except KernelError as error:
            dispatch.discard(kernel, f"its launch failed: {error}")
            counters.fell_back(Cause.UNUSABLE)
            elementary = torch_attention.elementary_backward(call.causal, call.scale, call.features, call.bias_grad)
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
    """All gradients by a backward that knows of no sinks and of an output's gradient alone."""
    dq, dk, dv, *of_bias = row_features.gradients(found, dout, dlse, *saved)
    if sink is None:
        return (dq, dk, dv, *of_bias)
    lse = row_features.rows_of(saved[4], saved[0])
    starts = call.features.sequences.cu_seqlens_q if call.features.sequences else None
    return (dq, dk, dv, row_features.sink_gradient(sink, saved[3], lse, dout, dlse, starts), *of_bias)


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
