"""The C++ side, loaded: what it asks Python for, and what Python asks of it."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...gen.errors import BwdtuneError
from ...gen.problem import BIAS, FLAGS, VALUE_HEAD_DIM, Problem
from .. import dispatch
from ..dispatch import Choice, notices
from ..kernel import Kernel
from . import build, schemas
from .aten import AtenBackward

_DTYPES = ("bf16", "fp16")
_BIAS_DTYPES = (*_DTYPES, "fp32")
_SIZES = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim")

DEVICE_TYPES = ["cuda"]
"""Whose tensors kernels are chosen for. Tests add the CPU."""


class _Problem(ctypes.Structure):
    """`bwdtune::Problem`."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("device", "fp16", *_SIZES, "causal", "window_left", "window_right", *FLAGS, *BIAS, VALUE_HEAD_DIM)
    ]

    def to_problem(self) -> Problem:
        """The same as the rest of the package knows it.

        Raises:
            UsageError: No problem has such sizes.
        """
        sizes = {name: getattr(self, name) for name in (*_SIZES, "window_left", "window_right", VALUE_HEAD_DIM)}
        flags: dict[str, Any] = {name: bool(getattr(self, name)) for name in ("causal", *FLAGS)}
        if self.bias:
            letters = (letter if self.bias & bit else "1" for letter, bit in (("B", 4), ("H", 2), ("S", 1)))
            flags |= {"bias": "_".join(letters), "bias_dtype": _BIAS_DTYPES[self.bias_dtype]}
        return Problem(_DTYPES[self.fp16], **sizes, **flags)


class _Decision(ctypes.Structure):
    """`bwdtune::Decision`."""

    _fields_ = [("kernel", ctypes.c_void_p), ("reason", ctypes.c_int32)]


_RESOLVE = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Problem), ctypes.POINTER(_Decision))
_FAILED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)
_SAY = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class Native:
    """The library, connected to dispatch."""

    def __init__(self, path: Path) -> None:
        """Use `load`."""
        torch.ops.load_library(str(path))
        library = ctypes.CDLL(str(path))

        def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            found = getattr(library, f"bwdtune_operator_{name}")
            found.restype, found.argtypes = result, arguments
            return found

        pointer, text, int32, int64 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int64
        self._add_kernel = function("add_kernel", pointer, ctypes.c_int, *[pointer] * 5)
        self._launches = function("launches", int64, pointer)
        self._reason = function("reason", int32, text)
        self._reasons = function("reasons", int32)
        self._reason_text = function("reason_text", text, int32)
        self._fallbacks = function("fallbacks", int64, int32)
        self._install = function("install", ctypes.c_int, text, text, *[ctypes.c_int] * 4)
        self._enable = function("enable", None, ctypes.c_int)
        self.forget = function("forget", None)
        self._kernels: dict[int | None, tuple[Kernel, int]] = {}  # by the address of what is launched
        self._lock = threading.Lock()
        # Held: C++ calls them as long as the process lives.
        self._callbacks = _RESOLVE(self._resolve), _FAILED(self._failed), _SAY(_say)
        function("connect", None, _RESOLVE, _FAILED, _SAY, pointer)(*self._callbacks, _current_stream())
        dispatch.subscribe(lambda *_: self.forget())  # rare: what is known already is soon asked for again

    def install(self, operator: AtenBackward, dispatch_key: str) -> bool:
        """Puts ours before an implementation of aten's, to stay; False where this PyTorch does not have it.

        Args:
            operator: Of `aten`.
            dispatch_key: Such as ``CUDA``.
        """
        how = (operator.heads_inside, operator.inside_gradients, operator.bottom_right, operator.packs)
        return bool(self._install(operator.name.encode(), dispatch_key.encode(), *how) == 0)

    def enable(self, on: bool) -> None:
        """Whether what is installed takes anything."""
        self._enable(on)

    def launches(self) -> dict[str, int]:
        """How often each kernel was launched, by the name of its library."""
        with self._lock:
            kernels = list(self._kernels.values())
        counts = Counter[str]()
        for kernel, handle in kernels:
            counts[kernel.path.stem] += self._launches(handle)
        return dict(counts)

    def fallbacks(self) -> dict[str, int]:
        """How often PyTorch's backward ran, by reason."""
        counts = {self._reason_text(number).decode(): self._fallbacks(number) for number in range(self._reasons())}
        return {reason: count for reason, count in counts.items() if count}

    def _resolve(self, asked: ctypes._Pointer[_Problem], answer: ctypes._Pointer[_Decision]) -> None:
        """Called by C++ where a problem is met for the first time; must not raise."""
        try:
            choice = _choose(asked.contents)
            decision = answer.contents
            if choice.kernel:
                decision.kernel = self._handle(choice.kernel)
            else:
                decision.reason = self._reason((choice.cause or choice.reason).encode())
        except Exception as error:
            reason = str(error) if isinstance(error, BwdtuneError) else f"{type(error).__name__}: {error}"
            answer.contents.reason = self._reason(reason.encode())
            notices.warn_once(reason, f"attention has PyTorch's backward: {reason}")

    def _failed(self, handle: int, reason: bytes) -> None:
        """Called by C++ where a launch has failed; must not raise."""
        with self._lock:
            kernels = [kernel for kernel, known in self._kernels.values() if known == handle]
        for kernel in kernels:
            dispatch.discard(kernel, reason.decode(errors="replace"))

    def _handle(self, kernel: Kernel) -> int:
        addresses = kernel.addresses()
        with self._lock:
            known = self._kernels.get(addresses[0])
            if known is None:
                handle = self._add_kernel(kernel.info.writes_all_rows, *addresses)
                known = self._kernels[addresses[0]] = (kernel, handle)
        return known[1]


def _choose(asked: _Problem) -> Choice:
    on_gpu = asked.device >= 0
    device = "cuda" if on_gpu else "cpu"
    if device not in DEVICE_TYPES:
        reason = f"the tensors are on {device}"
        notices.warn_once(reason, f"attention has PyTorch's backward: {reason}")
        return Choice(None, reason)
    capturing = on_gpu and torch.cuda.is_current_stream_capturing()
    return dispatch.choose(asked.to_problem(), max(asked.device, 0), capturing=capturing)


def _say(message: bytes) -> None:
    reason = message.decode(errors="replace")
    notices.warn_once(reason, f"attention has PyTorch's backward: {reason}")


def _current_stream() -> int | None:
    """The address of PyTorch's C function for a device's current stream; only builds with CUDA have it."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    try:
        function = ctypes.CDLL(str(path)).aoti_torch_get_current_cuda_stream
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


class _State:
    lock = threading.Lock()
    found: Native | BwdtuneError | None = None


def load() -> Native:
    """The library, built where the cache does not have it; later calls cost nothing.

    Raises:
        BwdtuneError: It cannot be built or loaded. It is tried once in a process.
    """
    with _State.lock:
        if _State.found is None:
            _State.found = _load()
    if isinstance(_State.found, BwdtuneError):
        raise _State.found
    return _State.found


def loaded() -> Native | None:
    """The library, where `load` has been called with success."""
    return _State.found if isinstance(_State.found, Native) else None


def _load() -> Native | BwdtuneError:
    schemas.register_flop_formulas()
    try:
        library = build.library()
        try:
            return Native(library)
        except OSError:  # damaged: the cache's disk was full, say
            build.discard(library)
            return Native(build.library())
    except BwdtuneError as error:
        return error
    except (OSError, AttributeError, RuntimeError) as error:
        return BwdtuneError(f"the operator's library cannot be loaded: {str(error).splitlines()[0]}")
