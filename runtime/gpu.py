"""What the driver says of the GPUs. Asked through its own libraries, which needs neither PyTorch nor a CUDA context.

NVML is asked through nvidia-ml-py. The six calls to libcuda are not worth cuda-bindings: its import takes longer than
PyTorch's first lookup may, and its releases follow the driver's, which this package does not choose."""

from __future__ import annotations

import ctypes
import enum
import functools
import itertools
import os
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from ..db.records import Environment, GpuKey
from ..gen.device import Device, device_from_properties
from ..gen.errors import BwdtuneError

_DRIVER = "libcuda.so.1"
_DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_THROTTLE_REASONS = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "thermal limit",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "power brake",
}
"""Names of NVML's ``nvmlClocksEventReason…``."""

_TEXT_BYTES = 256
_UUID_BYTES = 16


T = TypeVar("T")


class NoGpuError(BwdtuneError):
    """There is no GPU that can be used, or not the one that was asked for."""


class _Attribute(enum.IntEnum):
    """Numbers of ``CUdevice_attribute``."""

    CLOCK_KHZ = 13
    SM_COUNT = 16
    MEMORY_CLOCK_KHZ = 36
    MEMORY_BUS_BITS = 37
    MAX_THREADS_PER_SM = 39
    CAPABILITY_MAJOR = 75
    CAPABILITY_MINOR = 76
    SHARED_MEMORY_PER_SM = 81
    REGISTERS_PER_SM = 82
    SHARED_MEMORY_PER_BLOCK_OPT_IN = 97


@functools.cache
def current_device(index: int | None = None) -> Device:
    """A GPU's limits and peaks.

    Args:
        index: CUDA's ordinal, with `CUDA_VISIBLE_DEVICES` applied; None is the first.

    Raises:
        NoGpuError: The driver shows no such GPU.
        UsageError: No kernel of this project runs on it.
    """
    index = index or 0
    driver = _driver()
    handle = _handle(index)

    def attribute(which: _Attribute) -> int:
        value = ctypes.c_int()
        _check(driver.cuDeviceGetAttribute(ctypes.byref(value), which.value, handle))
        return value.value

    name = ctypes.create_string_buffer(_TEXT_BYTES)
    _check(driver.cuDeviceGetName(name, _TEXT_BYTES, handle))
    # Both edges of the memory clock carry data.
    bandwidth = 2e3 * attribute(_Attribute.MEMORY_CLOCK_KHZ) * attribute(_Attribute.MEMORY_BUS_BITS) / 8
    return device_from_properties(
        name=name.value.decode(errors="replace"),
        capability=(attribute(_Attribute.CAPABILITY_MAJOR), attribute(_Attribute.CAPABILITY_MINOR)),
        sm_count=attribute(_Attribute.SM_COUNT),
        shared_memory_per_block_bytes=attribute(_Attribute.SHARED_MEMORY_PER_BLOCK_OPT_IN),
        shared_memory_per_sm_bytes=attribute(_Attribute.SHARED_MEMORY_PER_SM),
        registers_per_sm=attribute(_Attribute.REGISTERS_PER_SM),
        max_threads_per_sm=attribute(_Attribute.MAX_THREADS_PER_SM),
        clock_ghz=attribute(_Attribute.CLOCK_KHZ) / 1e6,
        bandwidth_tb_s=bandwidth / 1e12,
    )


def usable_gpus() -> Iterator[tuple[int, Device]]:
    """The GPUs that kernels of this project run on, each with CUDA's ordinal of it."""
    for index in itertools.count():
        try:
            yield index, current_device(index)
        except NoGpuError:
            return
        except BwdtuneError:  # one that no kernel runs on
            continue


def gpu_key(device: Device) -> GpuKey:
    """What winners are stored under: the card's name and compute capability."""
    match = re.fullmatch(r"sm_(\d+)(\d)a?", device.arch)
    return GpuKey(device.name, f"{match[1]}.{match[2]}" if match else device.arch)


def environment(device: Device, toolkit: str) -> Environment:
    """Where something is measured.

    Args:
        device: The card.
        toolkit: The version of nvcc.
    """
    return Environment(gpu_key(device), device.arch, driver_version(), toolkit, version("torch"))


def driver_version() -> str:
    """The driver's version, such as ``580.95.05``; ``unknown`` where nothing says it."""
    if said := _ask_nvml(lambda nvml: str(nvml.nvmlSystemGetDriverVersion())):
        return said
    try:
        match = re.search(r"\b\d+\.\d+(\.\d+)?\b", _DRIVER_VERSION_FILE.read_text())
    except OSError:
        match = None
    return match[0] if match else "unknown"


def sm_clock_mhz(index: int) -> float | None:
    """The SM clock of a GPU at this moment, where the driver's management library says it."""
    return _ask_nvml(lambda nvml: float(nvml.nvmlDeviceGetClockInfo(_nvml_handle(index), nvml.NVML_CLOCK_SM)))


def power_limit_w(index: int) -> float | None:
    """The power that a GPU's board may draw at most, where the driver's management library says it."""
    limit_mw = _ask_nvml(lambda nvml: float(nvml.nvmlDeviceGetEnforcedPowerLimit(_nvml_handle(index))))
    return None if limit_mw is None else limit_mw / 1e3


@dataclass(frozen=True)
class GpuState:
    """What a GPU does at one moment; None and empty where nothing says it.

    Attributes:
        clock_mhz: The SM clock.
        power_w: The power that the board draws.
        temperature_c: Of the GPU.
        throttled: Why the clock is lower than it could be, such as ``power cap``.
    """

    clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttled: tuple[str, ...] = ()


def gpu_state(index: int) -> GpuState:
    """What a GPU does at this moment, as far as the driver's management library says it."""
    power_mw = _ask_nvml(lambda nvml: float(nvml.nvmlDeviceGetPowerUsage(_nvml_handle(index))))
    temperature_c = _ask_nvml(
        lambda nvml: int(nvml.nvmlDeviceGetTemperature(_nvml_handle(index), nvml.NVML_TEMPERATURE_GPU))
    )
    return GpuState(
        clock_mhz=sm_clock_mhz(index),
        power_w=None if power_mw is None else power_mw / 1e3,
        temperature_c=temperature_c,
        throttled=_ask_nvml(lambda nvml: _throttled(nvml, index)) or (),
    )


def _throttled(nvml: Any, index: int) -> tuple[str, ...]:
    reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(_nvml_handle(index))
    return tuple(
        text for name, text in _THROTTLE_REASONS.items() if reasons & getattr(nvml, f"nvmlClocksEventReason{name}")
    )


def gpu_count() -> int:
    """How many GPUs the driver shows, with `CUDA_VISIBLE_DEVICES` applied.

    Raises:
        NoGpuError: None.
    """
    count = ctypes.c_int()
    _check(_driver().cuDeviceGetCount(ctypes.byref(count)))
    return count.value


def gpu_uuid(index: int) -> str:
    """The id of one physical GPU, by which other processes know it too: ``GPU-`` and a UUID.

    Raises:
        NoGpuError: The driver shows no such GPU.
    """
    raw = (ctypes.c_ubyte * _UUID_BYTES)()
    _check(_driver().cuDeviceGetUuid(raw, _handle(index)))
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"


def compute_processes(index: int) -> int | None:
    """How many processes use a GPU to compute, this one included, where the driver's management library says it."""
    return _ask_nvml(lambda nvml: len(nvml.nvmlDeviceGetComputeRunningProcesses(_nvml_handle(index))))


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        raise NoGpuError(f"there is no NVIDIA driver ({_DRIVER} is not found)") from None
    status = driver.cuInit(0)
    if status:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hint = f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else ""
        what = "the driver shows no GPU" if status == _NO_DEVICE else f"the driver does not start: error {status}"
        raise NoGpuError(f"{what}{hint}")
    return driver


def _handle(index: int) -> ctypes.c_int:
    count = gpu_count()
    if not 0 <= index < count:
        raise NoGpuError(f"there is no GPU {index}: the driver shows {count}")
    handle = ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), index))
    return handle


def _check(status: int) -> None:
    if status:
        raise NoGpuError(f"the driver does not describe the GPU: error {status}")


@functools.cache
def _nvml() -> ModuleType | None:
    """The driver's management library; None where there is none."""
    import pynvml  # only here: whoever asks nothing of it does not wait for it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return cast(ModuleType, pynvml)


@functools.cache
def _nvml_handle(index: int) -> Any:
    """NVML numbers GPUs otherwise than CUDA, but knows CUDA's unique ids."""
    nvml = _nvml()
    return nvml and nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(index))


def _ask_nvml(question: Callable[[Any], T]) -> T | None:
    """What the management library answers; None where it does not: there is none, or it does not know that."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        return question(nvml)
    except nvml.NVMLError:
        return None
