"""Which forward a call of attention takes: the fastest one for its mask, by what was measured.

Where the mask is plain that is PyTorch's own choice, but for a user's FlashAttention-3 where it was measured to be
faster. Windows, bottom-right alignment and packed sequences have FlashAttention's forward, a softcap that of
FlashAttention-3 or elementary operations.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention as torch_attention_registry
from torch.nn.attention import SDPBackend

from ..features import Features
from . import flash_3, linear_bias

CUDNN, FLASH, EFFICIENT, FLASH_WINDOW, FOR_CPU = "cudnn", "flash", "efficient", "flash_window", "cpu"
"""PyTorch's forwards. `FLASH_WINDOW` is FlashAttention with limits."""

OF_ONE_HEAD_DIM = (FLASH, FLASH_WINDOW, FOR_CPU)
"""Those that take v of the head_dim of q and k alone: where it has another, columns of zeros make them equal."""

MATH, FLASH_3, ALIBI = "math", "flash_3", "alibi"
"""Elementary operations; FlashAttention-3 of the package ``flash_attn_interface``; one of PyTorch's with more columns,
whose products are the slopes' bias (`linear_bias`)."""

_BACKENDS = {
    SDPBackend.CUDNN_ATTENTION.value: CUDNN,
    SDPBackend.FLASH_ATTENTION.value: FLASH,
    SDPBackend.EFFICIENT_ATTENTION.value: EFFICIENT,
}
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD_DIM = 256
LARGEST_GRID = 65_535
"""Of CUDA's y and z, which PyTorch's kernels count batches and heads in."""


@dataclass(frozen=True)
class Measurement:
    """How long forwards of one problem took, in one interleaved run.

    Attributes:
        capability: The GPU's compute capability.
        seqlen: Sq and Skv.
        head_dim: D.
        causal: The mask.
        ms: By the forward's name.
    """

    capability: tuple[int, int]
    seqlen: int
    head_dim: int
    causal: bool
    ms: Mapping[str, float]


# One NVIDIA H200, torch 2.11+cu130, cuDNN 9.19, FlashAttention-3, bf16, 2026-11-30.
MEASURED = (
    Measurement((9, 0), 4096, 128, True, {FLASH: 1.87, CUDNN: 1.00, FLASH_3: 0.81}),
    Measurement((9, 0), 4096, 128, False, {FLASH: 3.45, CUDNN: 1.73, FLASH_3: 1.60}),
    Measurement((9, 0), 16384, 128, True, {FLASH: 7.27, CUDNN: 3.71, FLASH_3: 2.97}),
    Measurement((9, 0), 1024, 128, True, {FLASH: 0.565, CUDNN: 0.318, FLASH_3: 0.280}),
    Measurement((9, 0), 512, 128, True, {FLASH: 0.364, CUDNN: 0.195, FLASH_3: 0.204}),
    Measurement((9, 0), 4096, 64, True, {FLASH: 1.01, CUDNN: 0.65, FLASH_3: 0.58}),
)


def choose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    features: Features,
    *,
    enable_gqa: bool,
    kernel: bool,
    bias_dtype: torch.dtype | None = None,
) -> str:
    """The name of the forward for this input: one of the constants above.

    `MATH` for a plain mask says that PyTorch has no fused forward for this input, or that all are turned off
    (`torch.nn.attention.sdpa_kernel`).

    Args:
        q: (B, Hq, Sq, D); with packed sequences B is 1, and S counts the rows of all.
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, Dv).
        causal: Whether a query sees no key past its diagonal.
        scale: The softmax scale.
        features: The rest.
        enable_gqa: Whether Hkv may be a divisor of Hq.
        kernel: Whether a kernel of ours is the backward: where not, PyTorch's forward goes with PyTorch's backward.
        bias_dtype: That of a bias that is added to the scores; None where there is none.
    """
    if bias_dtype is not None:
        return by_mask(q, k, v, causal, scale, features, bias_dtype)
    if features.plain:
        return _plain(q, k, v, causal, scale, enable_gqa, kernel)
    like_flash_3 = features.alibi_slopes is None and q.shape[3] == v.shape[3]
    if kernel and q.is_cuda and like_flash_3 and _has_flash_3(q.device):
        uncapped = Features(features.window, features.bottom_right, 0.0, features.sequences)
        if by_mask(q, k, v, causal, scale, uncapped) in (FLASH, FLASH_WINDOW):
            return FLASH_3
    return by_mask(q, k, v, causal, scale, features)


def by_mask(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    features: Features,
    bias_dtype: torch.dtype | None = None,
) -> str:
    """FlashAttention, or what of PyTorch's takes its place where it lacks the mask. See `choose` for the arguments."""
    if not _fusible(q, k, v, scale):
        return MATH
    if features.alibi_slopes is not None:
        return MATH if bias_dtype is not None else _with_slopes(q, k, v, causal, scale, features)
    if not q.is_cuda:
        return FOR_CPU if features.plain and bias_dtype is None else MATH
    if bias_dtype is not None:
        # The mask of a window is made part of the bias. One of more bits than q would be rounded in the forward alone.
        too_many = max(q.shape[:2]) > LARGEST_GRID
        return MATH if features.softcap or bias_dtype != q.dtype or too_many else EFFICIENT
    if features.plain:
        return EFFICIENT if causal and q.shape[2] != k.shape[2] else FLASH
    if features.softcap:
        return MATH
    if features.sequences:
        return FLASH if _aligned(causal, features) else MATH
    # FlashAttention drops a limit of as many keys as there are, which with more queries than keys still masks.
    return FLASH_WINDOW if q.shape[2] <= k.shape[2] else MATH


def _with_slopes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, features: Features
) -> str:
    without = Features(features.window, features.bottom_right, features.softcap, features.sequences)
    fits = q.shape[3] + linear_bias.COLUMNS <= _LARGEST_HEAD_DIM and scale * linear_bias.LARGEST_INVERSE_SCALE >= 1
    linear = linear_bias.is_linear(causal, features, q.shape[2], k.shape[2])
    return ALIBI if fits and linear and by_mask(q, k, v, causal, scale, without) != MATH else MATH


def nearest(capability: tuple[int, int], seqlen: int, head_dim: int, causal: bool) -> Measurement | None:
    """What was measured on such a GPU at the nearest size: by the sum of ``|log2(ratio)|``, and 1 for another mask."""

    def distance(row: Measurement) -> float:
        return (
            abs(math.log2(row.seqlen / seqlen)) + abs(math.log2(row.head_dim / head_dim)) + (row.causal is not causal)
        )

    return min((row for row in MEASURED if row.capability == capability), key=distance, default=None)


def _fusible(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> bool:
    if not (q.numel() and k.numel()) or not scale > 0:  # fused ones mask scores before they scale them
        return False
    if not q.is_cuda:
        return True
    head_dim, head_dim_v = q.shape[3], v.shape[3]
    return q.dtype in _HALF and not (head_dim % 8 or head_dim_v % 8) and max(head_dim, head_dim_v) <= _LARGEST_HEAD_DIM


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, enable_gqa: bool, kernel: bool
) -> str:
    chosen, head_dims = by_mask(q, k, v, causal, scale, Features()), (q.shape[3], v.shape[3])
    if torch.compiler.is_compiling():
        if chosen != FLASH:
            return chosen
        # With dynamic shapes these are symbols. `index` makes them constants: a graph serves one pair of head_dims.
        head_dim, head_dim_v = operator.index(q.shape[3]), operator.index(v.shape[3])
        return _default_under_compile(q.device, q.dtype, head_dim, head_dim_v, causal, kernel)
    if chosen != FLASH:
        switch = {
            FOR_CPU: torch.backends.cuda.flash_sdp_enabled,
            EFFICIENT: torch.backends.cuda.mem_efficient_sdp_enabled,
        }
        return chosen if chosen == MATH or switch[chosen]() else MATH
    backend = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, scale=scale, enable_gqa=enable_gqa)
    chosen = _BACKENDS.get(backend, MATH)
    if head_dims[0] != head_dims[1]:
        return _of_head_dims(chosen, head_dims, kernel)
    activated = _activated() == "FA3" and torch.backends.cuda.flash_sdp_enabled()
    if chosen == MATH or not (activated or (kernel and _has_flash_3(q.device))):
        return chosen
    row = nearest(torch.cuda.get_device_capability(q.device), q.shape[2], q.shape[3], causal)
    if row is None or row.ms[FLASH_3] >= row.ms.get(chosen, math.inf):
        return chosen
    return FLASH if activated else FLASH_3


def _of_head_dims(default: str, head_dims: tuple[int, int], kernel: bool) -> str:
    """FlashAttention, which PyTorch does not think of where v has another head_dim, in place of what is slower."""
    taken = kernel and head_dims[0] != head_dims[1] and default != CUDNN and torch.backends.cuda.flash_sdp_enabled()
    return FLASH if taken else default


def constant_under_compile(function: Callable[..., Any]) -> None:
    """Has `torch.compile` call a function as it traces, with constants, and take the result for one.

    As `torch.compiler.assume_constant_result` does, which loads the whole compiler at once.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _default_under_compile(
    device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int, causal: bool, kernel: bool
) -> str:
    """The choice at a common length: a traced graph serves many lengths, and tensors have no storage there."""
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

    with unset_fake_temporarily(), FakeTensorMode():
        q = torch.empty(1, 8, 1024, head_dim, dtype=dtype, device=device, requires_grad=True)
        v = torch.empty(1, 8, 1024, head_dim_v, dtype=dtype, device=device, requires_grad=True)
        default = _BACKENDS.get(torch._fused_sdp_choice(q, q, v, None, 0.0, causal), MATH)
    return _of_head_dims(default, (head_dim, head_dim_v), kernel)


constant_under_compile(_default_under_compile)


def _aligned(causal: bool, features: Features) -> bool:
    """Whether FlashAttention's alignment of packed sequences, bottom-right, is the one that is asked for."""
    sequences = features.sequences
    assert sequences
    unmasked = not causal and features.window == Features().window
    return unmasked or features.bottom_right or sequences.cu_seqlens_q is sequences.cu_seqlens_kv


def _activated() -> str | None:
    """What has taken FlashAttention's place in PyTorch: ``FA3``, ``FA4`` or a name of a user's."""
    current = getattr(torch_attention_registry, "current_flash_attention_impl", None)  # torch 2.10
    return current() if current else None


def _has_flash_3(device: torch.device) -> bool:
    """Whether the package serves here; where it is activated PyTorch's own operators are it."""
    return (
        not torch.compiler.is_compiling()
        and torch.cuda.get_device_capability(device) == flash_3.CAPABILITY
        and _activated() is None
        and flash_3.module() is not None
    )
