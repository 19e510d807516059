"""Whole calls of attention as in a training step, autograd included: PyTorch's and ours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...gen.errors import BwdtuneError, UsageError
from ...gen.problem import BOTTOM_RIGHT, TOP_LEFT

if TYPE_CHECKING:
    import torch

    from ...gen.problem import Problem
    from ...runtime.verification.inputs import Inputs

FORWARD, BOTH = "forward", "both"
"""What of a call can be timed: its forward, which saves what a backward needs, or that and the gradients."""

DEFAULT, FLASH, BEST = "default", "flash", "best"
CALLS = {DEFAULT: "F.sdpa()", FLASH: "F.sdpa() (Flash Attention)", BEST: "bwdtune.attention()"}
"""Names of calls, and what they are."""


def prepared(name: str, problem: Problem, inputs: Inputs, direction: str) -> Callable[[], None]:
    """A call with its arguments.

    Args:
        name: Of `CALLS`.
        problem: What is computed.
        inputs: Its tensors.
        direction: `FORWARD` or `BOTH`.

    Raises:
        BwdtuneError: PyTorch's function has no such mask, or there is no kernel of ours.
    """
    import torch

    from ...runtime import torch_attention

    attention = _ours(problem, inputs) if name == BEST else _pytorchs(name, problem, inputs)
    tensors = [tensor.detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    besides = {"sink": inputs.sink, "bias": inputs.bias if inputs.bias_grad else None}
    learned = {name: tensor.detach().requires_grad_() for name, tensor in besides.items() if tensor is not None}
    gradients = (inputs.dout,) if inputs.dlse is None else (inputs.dout, inputs.dlse)

    def run() -> None:
        mode = torch_attention.deterministic_algorithms() if problem.deterministic else contextlib.nullcontext()
        with torch.enable_grad(), mode:
            outputs = attention(*tensors, **learned)
            if direction == BOTH:
                torch.autograd.grad(outputs, [*tensors, *learned.values()], gradients)

    return run


def chosen(problem: Problem, device: torch.device) -> str:
    """The id of the configuration that computes the backward of `BEST`.

    Raises:
        BwdtuneError: There is none, and why.
    """
    from ...runtime import dispatch

    choice = dispatch.choose(problem, device.index or 0)
    if choice.kernel is None:
        raise BwdtuneError(f"there is no kernel: {choice.reason}")
    return choice.kernel.info.config


def wait_for_kernels() -> None:
    """From now on, in this process, a call waits for what it misses: times are to be of kernels."""
    os.environ["BWDTUNE_ON_MISS"] = "wait"


def _pytorchs(name: str, problem: Problem, inputs: Inputs) -> Callable[..., tuple[torch.Tensor, ...]]:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    masked = problem.causal and inputs.bias is not None
    if not inputs.features.plain or problem.lse_grad or problem.sink or masked:
        raise UsageError(f"PyTorch's function has no {problem.features_label}")

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = inputs.bias
    ) -> tuple[torch.Tensor, ...]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if name == FLASH else contextlib.nullcontext():
            grouped = problem.heads_q != problem.heads_kv
            return (F.scaled_dot_product_attention(q, k, v, bias, is_causal=problem.causal, enable_gqa=grouped),)

    return call


def _ours(problem: Problem, inputs: Inputs) -> Callable[..., tuple[torch.Tensor, ...]]:
    from ...runtime.attention import attention, attention_varlen

    features = inputs.features
    options: dict[str, Any] = {
        "is_causal": problem.causal,
        "enable_gqa": True,
        "window_size": features.window,
        "alignment": BOTTOM_RIGHT if features.bottom_right else TOP_LEFT,
        "softcap": features.softcap,
        "deterministic": problem.deterministic,
        "return_lse": problem.lse_grad,
        "alibi_slopes": features.alibi_slopes,
    }
    sequences = features.sequences
    if sequences is None:

        def whole(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            sink: torch.Tensor | None = None,
            bias: torch.Tensor | None = inputs.bias,
        ) -> tuple[torch.Tensor, ...]:
            found = attention(q, k, v, sink=sink, bias=bias, **options)
            return found if problem.lse_grad else (found,)

        return whole
    options.update(cu_seqlens_q=sequences.cu_seqlens_q, cu_seqlens_kv=sequences.cu_seqlens_kv)
    options.update(max_seqlen_q=sequences.seqlen_q, max_seqlen_kv=sequences.seqlen_kv)

    def packed(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
        found = attention_varlen(q, k, v, sink=sink, **options)
        output, *lse = found if problem.lse_grad else (found,)
        return output.transpose(0, 1)[None], *(rows[None] for rows in lse)

    return packed
