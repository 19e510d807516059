"""PyTorch's own backward kernels, timed beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...db.records import NO_FUSED_BACKWARD

if TYPE_CHECKING:
    from ...gen.problem import Problem
    from ...runtime.torch_attention import Forward
    from ...runtime.verification.inputs import Inputs


DEFAULT = "default"
"""The name of the backward that PyTorch takes by itself."""


@dataclass(frozen=True)
class Peer:
    """One of PyTorch's kernels.

    Attributes:
        title: As the write-up's table has it.
        function: Its forward in `runtime.torch_attention`, by name: only the process that runs it loads PyTorch. None
            for PyTorch's default, which depends on the problem: `pytorchs_default`.
    """

    title: str
    function: str | None

    @property
    def forward(self) -> Callable[..., Forward]:
        """The forward, whose result has the backward."""
        from ...runtime import torch_attention

        assert self.function, "PyTorch's default is found for each problem"
        found: Callable[..., Forward] = getattr(torch_attention, self.function)
        return found


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        DEFAULT: Peer("F.sdpa() (PyTorch's default)", None),
        "cudnn": Peer("F.sdpa() (cuDNN)", "cudnn"),
        "fa": Peer("F.sdpa() (Flash Attention)", "flash"),
    }
)
"""By the name that they are asked for."""


SAME_KERNEL = MappingProxyType({"cudnn": "cudnn", "flash": "fa"})
"""PyTorch's default, by the kernel that it is, as a peer that is timed anyway; of plain masks alone."""


def pytorchs_default(problem: Problem, inputs: Inputs) -> str:
    """The kernel that computes a problem's backward where none of ours does, here and with this PyTorch.

    Of a plain mask that is what the dispatcher of `F.scaled_dot_product_attention` picks; of others FlashAttention's,
    as far as it has them.

    Args:
        problem: The problem.
        inputs: Its tensors.

    Returns:
        A name of `runtime.forwards`, such as ``cudnn``, ``flash``, ``efficient``; `db.records.NO_FUSED_BACKWARD` where
        PyTorch has no fused backward, as with a softcap.
    """
    import torch

    from ...runtime import forwards

    with torch.enable_grad():  # what a training step has: the dispatcher looks at it
        q, k, v = (tensor.detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
        bias_dtype = None if inputs.bias is None else inputs.bias.dtype
        plain = (q, k, v, problem.causal, problem.softmax_scale, inputs.features)
        name = forwards.choose(*plain, enable_gqa=True, kernel=False, bias_dtype=bias_dtype)
    return NO_FUSED_BACKWARD if name == forwards.MATH else name
