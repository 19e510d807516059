"""Which card a command is about: the GPU that is here, or one that stands for a compile target."""

from __future__ import annotations

from ...gen.device import HOST_ARCH, RTX_5090, Device, device_for_arch
from ...runtime.gpu import NoGpuError, current_device


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
