"""Makes our backward PyTorch's own: models, compiled code and exported programs need not be changed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch.nn.attention

from ..gen.errors import BwdtuneError
from . import dispatch, operator
from .dispatch import notices

_lock = threading.Lock()
_IMPLEMENTATION = "bwdtune"

AtenBackward = tuple[str, str]
ATEN_BACKWARDS: list[AtenBackward] = [(name, "CUDA") for name in operator.ATEN_BACKWARDS if "_for_cpu" not in name]
"""The operators of aten, with their dispatch keys, whose implementation ours becomes. Tests add the CPU's."""


class _Enabled:
    """Who wants it: `enable` once, and every ``with`` block that is entered."""

    by_call = False
    blocks = 0


def enable() -> None:
    """From now on the backward of PyTorch's attention is the stored winner's kernel wherever there is one.

    The CUDA implementations of aten's attention backward operators (flash, cuDNN's, the memory-efficient one, and the
    packed and windowed flash one) become ours. PyTorch keeps its forward, its autograd and its graphs. What no kernel
    takes goes on to PyTorch's implementation: a mask tensor, dropout, other dtypes, a problem without a winner. For the
    whole process; calling it again changes nothing. Safe between threads.

    The database is read here, so that no step has to. The first call on a machine builds the operator (half a minute of
    a C++ compiler). Where it cannot be built
    PyTorch's backward stays, and one line in the log of ``bwdtune`` says why.

    Raises:
        UsageError: ``BWDTUNE_ON_MISS`` has a value that means nothing.
    """
    dispatch.prepare()
    with _changing():
        _Enabled.by_call = True


def disable() -> None:
    """Undoes `enable`. A block of `enabled` that is still open keeps it on until it ends."""
    with _changing():
        _Enabled.by_call = False


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """`enable` for the time of a ``with`` block, in all threads. Blocks nest."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    dispatch.prepare()
    with _changing():
        _Enabled.blocks += 1


def _leave() -> None:
    with _changing():
        _Enabled.blocks -= 1


@contextlib.contextmanager
def _changing() -> Iterator[None]:
    with _lock:
        yield
        on = _Enabled.by_call or _Enabled.blocks > 0
        native = operator.loaded()
        if on and native is None:
            native = _loaded()
        if native:
            for name, dispatch_key in ATEN_BACKWARDS if on else ():
                native.install(name, dispatch_key)
            native.enable(on)


def _loaded() -> operator.Native | None:
    try:
        return operator.load()
    except BwdtuneError as error:
        notices.warn_once("operator", f"PyTorch's attention keeps its own backward: {error}")
        return None


class _Activation:
    """What `torch.nn.attention.activate_flash_attention_impl` is handed, and removes."""

    def __init__(self) -> None:
        _enter()

    def remove(self) -> None:
        """Ends it."""
        _leave()


# Since PyTorch 2.11 it has a list of implementations to choose from by name.
if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl(_IMPLEMENTATION, register_fn=_Activation)
