"""Which card a command is about: the GPU that is here, or one that stands for a compile target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...db.records import Environment
from ...gen.device import HOST_ARCH, RTX_5090, Device, device_for_arch
from ...runtime.gpu import NoGpuError, current_device, environment
from ..lab.gpu_client import Worker


def gpu_here() -> Device:
    """The GPU, for a command that can do nothing without one.

    Raises:
        NoGpuError: There is none: with what works without.
        UsageError: No kernel of this project runs on it.
    """
    try:
        return current_device()
    except NoGpuError as error:
        raise NoGpuError(
            f"{error}: without a GPU, `tuner verify --arch {HOST_ARCH}` checks a kernel on the CPU, and `tuner search` "
            "predicts times"
        ) from None


def described_card(arch: str | None) -> Device:
    """The card that a command without a kernel to run speaks about.

    Args:
        arch: A compile target, or None for the GPU; without one, the RTX 5090 of the write-up.

    Raises:
        UsageError: Unknown arch, or a GPU that no kernel here can run on.
    """
    if arch is not None:
        return device_for_arch(arch)
    try:
        return current_device()
    except NoGpuError:
        return RTX_5090


def searched_card(arch: str | None, gpu: Device | None) -> Device:
    """The card that a search is for: the GPU where it is meant, else the card that stands for the arch."""
    if gpu and arch in (None, gpu.arch):
        return gpu
    device = device_for_arch(RTX_5090.arch if arch is None else arch)
    return gpu if gpu and gpu.arch == device.arch else device


@contextmanager
def laboratory(gpu: Device | None, toolkit: str) -> Iterator[tuple[Worker, Environment | None]]:
    """The process that owns the GPU, and where it measures; without a GPU, one that verifies on the CPU."""
    if gpu is None:
        with Worker("cpu") as worker:
            yield worker, None
        return
    with Worker() as worker:
        yield worker, environment(gpu, toolkit)
