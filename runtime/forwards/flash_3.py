"""FlashAttention-3's forward, where a user has its package (``flash_attn_interface``)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from types import ModuleType
from typing import Any

import torch

from ...gen.problem import UNLIMITED
from ..features import Features

_log = logging.getLogger("bwdtune")

CAPABILITY = (9, 0)
_PACKAGE = "flash_attn_interface"


@functools.cache
def module() -> ModuleType | None:
    """The package; None where it is not installed, or does not load."""
    if importlib.util.find_spec(_PACKAGE) is None:
        return None
    try:
        return importlib.import_module(_PACKAGE)
    except Exception as error:  # built for another PyTorch, another CUDA: whatever it is, PyTorch's forward serves
        _log.warning("FlashAttention-3 is installed and does not load: %s", (str(error) or repr(error)).splitlines()[0])
        return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int, right: int, scale: float, features: Features
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, Hq, Sq, D) and log-sum-exp (B, Hq, Sq).

    Args:
        q: (B, Hq, Sq, D), with a unit last stride.
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, D).
        left: Keys before the diagonal, which is aligned bottom-right, that a query sees; -1 for all.
        right: Keys past it; 0 is a causal mask.
        scale: The softmax scale.
        features: The cap and the sequences; with these B is 1.
    """
    options: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": (left, right) == (UNLIMITED, 0),
        "window_size": (left, right),
        "softcap": features.softcap,
    }
    if sequences := features.sequences:
        output, lse = _call(
            "flash_attn_varlen_func",
            *(tensor[0].transpose(0, 1) for tensor in (q, k, v)),
            sequences.cu_seqlens_q,
            sequences.cu_seqlens_kv,
            sequences.seqlen_q,
            sequences.seqlen_kv,
            **options,
        )
        return output.transpose(0, 1)[None], lse[None]
    output, lse = _call("flash_attn_func", *(tensor.transpose(1, 2) for tensor in (q, k, v)), **options)
    return output.transpose(1, 2), lse


def _call(name: str, *tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    function = getattr(module(), name)
    if _asks_for_lse(function):
        options["return_attn_probs"] = True
    with torch.no_grad():
        output, lse, *_ = function(*tensors, **options)
    return output, lse


@functools.cache
def _asks_for_lse(function: Any) -> bool:
    """Releases until the middle of 2025 return the log-sum-exp unasked."""
    return "return_attn_probs" in inspect.signature(function).parameters
