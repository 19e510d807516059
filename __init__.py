"""bwdtune: tuned CUDA attention-backward kernels for PyTorch.

`attention` and `attention_varlen` compute attention with the stored winner as its backward; `enable` and `disable` let
PyTorch's own `scaled_dot_product_attention` go through it. `warmup` builds kernels before they are needed, `explain`
says which one computes a call and why, `stats` what ran. `tune` searches for a problem's fastest kernel, as
``tuner search`` does. `flash_attn` has the functions of the package of that name, `integrations.transformers` an
attention implementation for Hugging Face's models. They are loaded when they are first used: importing the package
costs next to nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime import flash_attn, integrations
    from .runtime.attention import attention, attention_varlen
    from .runtime.dispatch.explanation import explain
    from .runtime.dispatch.statistics import stats
    from .runtime.dispatch.warming import warmup
    from .runtime.sdpa import disable, enable, enabled
    from .tuner.tune import tune

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "attention",
    "attention_varlen",
    "disable",
    "enable",
    "enabled",
    "explain",
    "flash_attn",
    "integrations",
    "stats",
    "tune",
    "warmup",
]

_MODULES = {
    "attention": ".runtime.attention",
    "attention_varlen": ".runtime.attention",
    "disable": ".runtime.sdpa",
    "enable": ".runtime.sdpa",
    "enabled": ".runtime.sdpa",
    "explain": ".runtime.dispatch.explanation",
    "stats": ".runtime.dispatch.statistics",
    "tune": ".tuner.tune",
    "warmup": ".runtime.dispatch.warming",
}


class _Alias(ModuleType):
    """A module of `runtime` under the name that users import it by."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules loads none
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__.replace(".", ".runtime.", 1)), name)


def _alias(name: str) -> Any:
    return sys.modules.setdefault(f"{__name__}.{name}", _Alias(f"{__name__}.{name}"))


flash_attn, integrations = _alias("flash_attn"), _alias("integrations")
setattr(integrations, "transformers", _alias("integrations.transformers"))  # noqa: B010


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
