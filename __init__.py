"""bwdtune: tuned CUDA attention-backward kernels for PyTorch.

`attention` and `attention_varlen` compute attention with the stored winner as its backward; `enable` and `disable` let
PyTorch's own `scaled_dot_product_attention` go through it. They are loaded when they are first used: importing the
package costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime.attention import attention, attention_varlen
    from .runtime.sdpa import disable, enable, enabled

__version__ = "0.1.0"
__all__ = ["__version__", "attention", "attention_varlen", "disable", "enable", "enabled"]

_MODULES = {
    "attention": ".runtime.attention",
    "attention_varlen": ".runtime.attention",
    "disable": ".runtime.sdpa",
    "enable": ".runtime.sdpa",
    "enabled": ".runtime.sdpa",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
