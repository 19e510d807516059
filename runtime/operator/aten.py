"""PyTorch's own operators for the backward of attention: how their tensors and masks are to be read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AtenBackward:
    """One operator of the namespace ``aten``.

    Attributes:
        name: Its name.
        heads_inside: Whether its tensors are (B, S, H, D), else (B, H, S, D).
        inside_gradients: Whether gradients lie as (B, S, H, D) in memory whatever their inputs do, as its meta function
            promises; else as `torch.empty_like` of the inputs.
        bottom_right: Where the diagonal of its ``is_causal`` and its windows lies.
        packs: Whether ``cum_seq_q`` makes its tensors packed sequences, (T, H, D); else those are of nested tensors,
            which no kernel takes.
    """

    name: str
    heads_inside: bool = False
    inside_gradients: bool = False
    bottom_right: bool = False
    packs: bool = False


CUDA_BACKWARDS = (
    AtenBackward("_scaled_dot_product_flash_attention_backward", bottom_right=True),
    AtenBackward("_scaled_dot_product_cudnn_attention_backward"),
    AtenBackward("_scaled_dot_product_efficient_attention_backward", inside_gradients=True),
    AtenBackward("_flash_attention_backward", heads_inside=True, bottom_right=True, packs=True),
)
"""Those that have CUDA implementations."""

CPU_BACKWARD = AtenBackward("_scaled_dot_product_flash_attention_for_cpu_backward", inside_gradients=True)
"""The one that stands in for them where there is no GPU: in tests."""
