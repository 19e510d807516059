"""PyTorch's own backward kernels, which are timed beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...runtime.torch_attention import Forward


@dataclass(frozen=True)
class Peer:
    """One of PyTorch's kernels.

    Attributes:
        title: As the write-up's table has it.
        function: Its forward in `runtime.torch_attention`, by name: only the process that runs it loads PyTorch.
    """

    title: str
    function: str

    @property
    def forward(self) -> Callable[..., Forward]:
        """The forward, whose result has the backward."""
        from ...runtime import torch_attention

        found: Callable[..., Forward] = getattr(torch_attention, self.function)
        return found


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "cudnn": Peer("F.sdpa() (cuDNN)", "cudnn"),
        "fa": Peer("F.sdpa() (Flash Attention)", "flash"),
    }
)
"""By the name that they are asked for."""
