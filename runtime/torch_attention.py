"""PyTorch's own fused attention: the forward that yields the log-sum-exp, and the backward that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_aten = torch.ops.aten

_LARGEST_GRID = 65_535  # of CUDA's y and z, which PyTorch's kernels count batches and heads in

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Forward:
    """The result of one of PyTorch's forwards.

    Attributes:
        output: (B, Hq, Sq, D), in the dtype of q.
        lse: (B, Hq, Sq), fp32, contiguous, natural logarithm.
        backward: PyTorch's backward of this forward: dout -> dq, dk, dv. Asynchronous; may be called repeatedly.
    """

    output: torch.Tensor
    lse: torch.Tensor
    backward: Callable[[torch.Tensor], Gradients]


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Forward:
    """The fastest of PyTorch's forwards that yields the log-sum-exp with a mask aligned top-left.

    Args:
        q: (B, Hq, Sq, D), bf16 or fp16, not empty.
        k: (B, Hkv, Skv, D); Hkv divides Hq.
        v: (B, Hkv, Skv, D).
        causal: Whether query i sees the keys 0..i only.
        scale: The softmax scale.
    """
    if not q.is_cuda:
        return _for_cpu(q, k, v, causal, scale)
    for dim in (0, 1):
        if q.shape[dim] > _LARGEST_GRID:
            return _in_parts(q, k, v, causal, scale, dim)
    if causal and q.shape[2] != k.shape[2]:
        return _efficient(q, k, v, causal, scale)
    return flash(q, k, v, causal, scale)


def _in_parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, dim: int) -> Forward:
    """`forward`, with the batch or the heads in parts that PyTorch's kernels take."""
    parts = -(-q.shape[dim] // _LARGEST_GRID)
    size = -(-k.shape[dim] // parts)
    group = q.shape[dim] // k.shape[dim]
    rows = q.split(size * group, dim)
    results = [forward(*part, causal, scale) for part in zip(rows, k.split(size, dim), v.split(size, dim), strict=True)]

    def backward(dout: torch.Tensor) -> Gradients:
        found = [result.backward(part) for result, part in zip(results, dout.split(size * group, dim), strict=True)]
        dq, dk, dv = (torch.cat(gradients, dim) for gradients in zip(*found, strict=True))
        return dq, dk, dv

    output = torch.cat([result.output for result in results], dim)
    return Forward(output, torch.cat([result.lse for result in results], dim), backward)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Forward:
    """FlashAttention on CUDA. See `forward` for the arguments.

    Raises:
        ValueError: A causal mask with Sq != Skv, which this one aligns bottom-right.
    """
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError("PyTorch's flash attention aligns a causal mask bottom-right where Sq and Skv differ")
    output, lse, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )

    def backward(dout: torch.Tensor) -> Gradients:
        gradients: Gradients = _aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, output, lse, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
        )
        return gradients

    return Forward(output, lse.contiguous(), backward)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Forward:
    """cuDNN's attention. See `forward` for the arguments.

    Raises:
        RuntimeError: cuDNN is missing, too old or has no plan for this problem.
    """
    output, lse, cum_seq_q, cum_seq_k, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )

    def backward(dout: torch.Tensor) -> Gradients:
        gradients: Gradients = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, output, lse, seed, offset, None, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, causal, scale=scale
        )
        return gradients

    return Forward(output, lse.reshape(q.shape[:3]).contiguous(), backward)


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Forward:
    keys, values = _expand_heads(q, k), _expand_heads(q, v)
    output, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
        q, keys, values, None, True, 0.0, causal, scale=scale
    )

    def backward(dout: torch.Tensor) -> Gradients:
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout, q, keys, values, None, output, lse, seed, offset, 0.0, [True, True, True, False], causal, scale=scale
        )
        return dq, _sum_heads(dk, k), _sum_heads(dv, v)

    # The kernel pads its rows to a multiple of 32.
    return Forward(output, lse[..., : q.shape[2]].contiguous(), backward)


def _for_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> Forward:
    keys, values = _expand_heads(q, k), _expand_heads(q, v)
    output, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, causal, scale=scale)

    def backward(dout: torch.Tensor) -> Gradients:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, keys, values, output, lse, 0.0, causal, scale=scale
        )
        return dq, _sum_heads(dk, k), _sum_heads(dv, v)

    return Forward(output, lse.contiguous(), backward)


def _expand_heads(q: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    group = q.shape[1] // tensor.shape[1]
    return tensor if group == 1 else tensor.repeat_interleave(group, 1)


def _sum_heads(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    group = gradient.shape[1] // tensor.shape[1]
    return gradient if group == 1 else gradient.unflatten(1, (tensor.shape[1], group)).sum(2)
