"""`attention`: PyTorch's own forward with the stored winner as its backward."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..gen.errors import UsageError
from ..gen.problem import Problem
from . import dispatch, torch_attention
from .kernel import TORCH_DTYPES, Kernel, backward

_log = logging.getLogger("bwdtune")
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_DEVICE_TYPES = ("cuda",)
_said: set[str] = set()

# As it is before `sdpa.enable` replaces it: what is handed back to PyTorch must not come here again.
_pytorch = F.scaled_dot_product_attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention: `F.scaled_dot_product_attention` with a tuned backward.

    The forward is PyTorch's fused one. The backward is the kernel that `tuner search` stored as the winner for this
    problem (or the nearest one to it: `dispatch.choose`) on the tensors' GPU, compiled on first use. Where there is
    none, or the input is not one that a kernel takes (on the CPU, not 4-dimensional, of another dtype, empty, a tensor
    subclass, while PyTorch's deterministic mode is on or its flash attention off), the whole call is PyTorch's, and one
    line in the log of ``bwdtune`` says why, once. So it is, without a line, under `torch.compile` and where no gradient
    is needed.

    Under autocast the inputs are cast as for PyTorch's function. The gradient cannot be differentiated again.

    Args:
        q: (B, Hq, Sq, D), bf16 or fp16, any strides.
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, D).
        is_causal: Query i sees the keys 0..i only (aligned top-left).
        scale: The softmax scale; 1/sqrt(D) by default.
        enable_gqa: Allow Hkv to be a divisor of Hq.

    Returns:
        (B, Hq, Sq, D).

    Raises:
        ValueError: q, k and v are on different devices.
    """
    if not q.device == k.device == v.device:
        raise ValueError(f"q is on {q.device}, k on {k.device} and v on {v.device}: they must be on one device")
    if not torch.compiler.is_compiling() and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        q, k, v = _autocast(q, k, v)
        kernel = _kernel_for(q, k, v, is_causal, enable_gqa)
        if kernel:
            output: torch.Tensor = _Attention.apply(
                q, k, v, is_causal, q.shape[-1] ** -0.5 if scale is None else scale, kernel
            )
            return output
    # Of an empty batch, PyTorch's fused kernels may make no tensor at all.
    empty = not torch.compiler.is_compiling() and not (q.numel() and k.numel())
    with sdpa_kernel(SDPBackend.MATH) if empty else contextlib.nullcontext():
        return _pytorch(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, kernel: Kernel
    ) -> torch.Tensor:
        result = torch_attention.forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, result.output, result.lse)
        ctx.scale, ctx.kernel = scale, kernel
        return result.output

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, output, lse = ctx.saved_tensors
        with torch.no_grad():
            gradients = backward(ctx.kernel, q, k, v, output, dout, lse, ctx.scale)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _Once.apply(*gradients, q, k, v, dout)
        asked = (gradient if need else None for gradient, need in zip(gradients, ctx.needs_input_grad, strict=False))
        return (*asked, None, None, None)


class _Once(torch.autograd.Function):
    """Hands gradients on, and keeps anyone from taking them for constants.

    PyTorch's `once_differentiable` does so only where dout needs a gradient; the gradient of a sum would be a constant.
    """

    @staticmethod
    def forward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, *sources: torch.Tensor) -> Any:
        return dq, dk, dv

    @staticmethod
    def backward(ctx: Any, *unused: torch.Tensor) -> Any:
        raise RuntimeError(
            "the gradients of bwdtune.attention cannot be differentiated again: "
            "use torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH"
        )


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)


def _kernel_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, enable_gqa: bool) -> Kernel | None:
    """The kernel for this input; where there is none, its reason goes to the log, once."""
    reason = _objection(q, k, v, causal, enable_gqa)
    if not reason:
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
        try:
            choice = dispatch.choose(Problem(_DTYPE_NAMES[q.dtype], *sizes, causal), q.device.index or 0)
        except UsageError as error:  # a size that no problem can have
            choice = dispatch.Choice(None, str(error))
        if choice.kernel:
            return choice.kernel
        reason = choice.reason
    if reason not in _said:
        _said.add(reason)
        _log.warning("attention has PyTorch's backward: %s", reason)
    return None


def _objection(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, enable_gqa: bool) -> str | None:
    """Why no kernel takes this input, whatever is stored."""
    if any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in (q, k, v)):
        return "a tensor is of a subclass of torch.Tensor"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is active"
    if q.device.type not in _DEVICE_TYPES:
        return f"the tensors are on {q.device.type}"
    if q.dtype not in _DTYPE_NAMES or not q.dtype == k.dtype == v.dtype:
        return f"the dtypes are {q.dtype}, {k.dtype} and {v.dtype}: kernels are for bfloat16 and float16"
    if not q.dim() == k.dim() == v.dim() == 4:
        return f"the tensors have {q.dim()}, {k.dim()} and {v.dim()} dimensions, not four"
    batch, heads_q, _, head_dim = q.shape
    if k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, head_dim):
        return f"the shapes are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    if not q.numel() or not k.numel():
        return "the input is empty"
    if heads_q != k.shape[1] and (not enable_gqa or heads_q % k.shape[1]):
        return f"{heads_q} query heads do not go with {k.shape[1]} key and value heads"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and kernels add to dq in any order"
    square = not causal or q.shape[2] == k.shape[2]
    if not (torch.backends.cuda.flash_sdp_enabled() if square else torch.backends.cuda.mem_efficient_sdp_enabled()):
        return f"PyTorch's {'flash' if square else 'memory-efficient'} attention, whose forward is used, is turned off"
    return None
