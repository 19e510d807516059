"""Makes our backward PyTorch's own: models, compiled code and exported programs need not be changed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch.nn.attention

from ..gen.errors import BwdtuneError
from . import dispatch, operator
from .dispatch import notices
from .operator.aten import CUDA_BACKWARDS, AtenBackward

_lock = threading.Lock()
_IMPLEMENTATION = "bwdtune"

ATEN_BACKWARDS: list[tuple[AtenBackward, str]] = [(backward, "CUDA") for backward in CUDA_BACKWARDS]
"""The operators of aten, with their dispatch keys, whose implementation ours becomes. Tests take the CPU's."""


class _Enabled:
    """Who wants it: `enable` once, and every ``with`` block that is entered; and what does it."""

    by_call = False
    blocks = 0
    overriding: operator.Native | operator.PythonOverrides | None = None


def enable() -> None:
    """From now on the backward of PyTorch's attention is the stored winner's kernel wherever there is one.

    The CUDA implementations of aten's attention backward operators (flash, cuDNN's, the memory-efficient one, and the
    packed and windowed flash one) become ours. PyTorch keeps its forward, its autograd and its graphs. What no kernel
    takes goes on to PyTorch's implementation: dropout, other dtypes, a problem without a winner. For the
    whole process; calling it again changes nothing. Safe between threads.

    The database is read here, so that no step has to. The first call on a machine builds the operator (half a minute of
    a C++ compiler). Where it cannot be built, Python does its work since PyTorch 2.10, and before it PyTorch's backward
    stays; one line in the log of ``bwdtune`` says so.

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
        if on and not _Enabled.overriding:
            _Enabled.overriding = _overriding()
        if overriding := _Enabled.overriding:
            for backward, dispatch_key in ATEN_BACKWARDS if on else ():
                overriding.install(backward, dispatch_key)
            overriding.enable(on)


def _overriding() -> operator.Native | operator.PythonOverrides | None:
    try:
        return operator.overriding()
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
