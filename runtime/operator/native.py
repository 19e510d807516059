"""The C++ side, loaded: what it asks Python for, and what Python asks of it."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from pathlib import Path

import torch

from ...gen.errors import BwdtuneError
from ...gen.problem import Problem
from .. import dispatch
from ..kernel import Kernel
from . import build, schemas

_log = logging.getLogger("bwdtune")
_DTYPES = ("bf16", "fp16")
_SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim")
_FLAGS = ("bottom_right", "softcap", "varlen", "deterministic")
_MOST_LINES = 20

ATEN_BACKWARDS = (
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
"""In the order of `kAtenBackwards` in ``source/aten.h``."""

DEVICE_TYPES = ["cuda"]
"""Whose tensors kernels are chosen for. Tests add the CPU."""


class _Problem(ctypes.Structure):
    """`bwdtune::Problem`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("device", "fp16", *_SIZES, "causal", "window_left", "window_right", *_FLAGS)
    ]

    def to_problem(self) -> Problem:
        """The same as the rest of the package knows it.

        Raises:
            UsageError: No problem has such sizes.
        """
        return Problem(
            _DTYPES[self.fp16],
            **{name: getattr(self, name) for name in (*_SIZES, "window_left", "window_right")},
            **{name: bool(getattr(self, name)) for name in ("causal", *_FLAGS)},
        )


class _Decision(ctypes.Structure):
    """`bwdtune::Decision`."""

    _fields_ = [("kernel", ctypes.c_void_p), ("reason", ctypes.c_int32), ("lasts", ctypes.c_int32)]


_RESOLVE = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Problem), ctypes.POINTER(_Decision))
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class Native:
    """The library, connected. One of it is made in a process: `load`."""

    def __init__(self, path: Path) -> None:
        torch.ops.load_library(str(path))
        library = ctypes.CDLL(str(path))
        self._add_kernel = library.bwdtune_operator_add_kernel
        self._add_kernel.restype = ctypes.c_void_p
        self._add_kernel.argtypes = [ctypes.c_void_p] * 5
        self._launches = library.bwdtune_operator_launches
        self._launches.restype = ctypes.c_int64
        self._launches.argtypes = [ctypes.c_void_p]
        self._reason = library.bwdtune_operator_reason
        self._reasons = library.bwdtune_operator_reasons
        self._reason_text = library.bwdtune_operator_reason_text
        self._reason_text.restype = ctypes.c_char_p
        self._fallbacks = library.bwdtune_operator_fallbacks
        self._fallbacks.restype = ctypes.c_int64
        self.forget = library.bwdtune_operator_forget
        self.enable = library.bwdtune_operator_enable
        self._install = library.bwdtune_operator_install
        self._kernels: dict[Path, tuple[Kernel, int]] = {}
        self._lock = threading.Lock()
        # Held: C++ calls them as long as the process lives.
        self._callbacks = _RESOLVE(self._resolve), _LOG(self._say)
        library.bwdtune_operator_connect(*self._callbacks, _current_stream())

    def install(self, name: str, dispatch_key: str) -> bool:
        """Puts ours before an implementation of aten's; False where this PyTorch does not have it."""
        return self._install(name.encode(), dispatch_key.encode(), ATEN_BACKWARDS.index(name)) == 0

    def launches(self) -> dict[str, int]:
        """How often each kernel was launched, by its library's name."""
        with self._lock:
            kernels = list(self._kernels.values())
        return {kernel.path.stem: self._launches(handle) for kernel, handle in kernels}

    def fallbacks(self) -> dict[str, int]:
        """How often PyTorch's backward ran, by reason."""
        counts = {self._reason_text(number).decode(): self._fallbacks(number) for number in range(self._reasons())}
        return {reason: count for reason, count in counts.items() if count}

    def _handle(self, kernel: Kernel) -> int:
        with self._lock:
            known = self._kernels.get(kernel.path)
            if known is None:
                known = self._kernels[kernel.path] = (kernel, self._add_kernel(*kernel.addresses()))
        return known[1]

    def _resolve(self, asked: ctypes._Pointer[_Problem], answer: ctypes._Pointer[_Decision]) -> None:
        """Called by C++ where a problem is met for the first time; must not raise."""
        decision = answer.contents
        try:
            choice = _choose(asked.contents)
            decision.lasts = getattr(choice, "final", True)
            if choice.kernel:
                decision.kernel = self._handle(choice.kernel)
                return
            reason = choice.reason
        except BwdtuneError as error:
            reason = str(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        decision.reason = self._reason(reason.encode())
        _tell(reason)

    def _say(self, message: bytes) -> None:
        _tell(message.decode(errors="replace"))


def _choose(asked: _Problem) -> dispatch.Choice:
    on_gpu = asked.device >= 0
    device = "cuda" if on_gpu else "cpu"
    if device not in DEVICE_TYPES:
        return dispatch.Choice(None, f"the tensors are on {device}")
    return dispatch.choose(asked.to_problem(), max(asked.device, 0))


_said: set[str] = set()


def _tell(reason: str) -> None:
    """One line a reason, and not without end."""
    if reason in _said or len(_said) > _MOST_LINES:
        return
    _said.add(reason)
    if len(_said) > _MOST_LINES:
        _log.warning("attention has PyTorch's backward for more reasons than are told here: see bwdtune.stats()")
    else:
        _log.warning("attention has PyTorch's backward: %s", reason)


def _current_stream() -> ctypes.c_void_p | None:
    """PyTorch's C function for the current stream of a device; only builds with CUDA have it."""
    for name in ("libtorch_cuda.so", "libtorch_hip.so"):
        path = Path(torch.__file__).parent / "lib" / name
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).aoti_torch_get_current_cuda_stream, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
    return None


@functools.cache
def load() -> Native:
    """The library, built where the cache does not have it.

    Raises:
        BwdtuneError: It cannot be built or loaded.
    """
    schemas.register_flop_formulas()
    try:
        return Native(build.library())
    except (OSError, AttributeError, RuntimeError) as error:
        raise BwdtuneError(f"the operator's library cannot be loaded: {str(error).splitlines()[0]}") from error
