from __future__ import annotations

from typing import Any

import pytest

from bwdtune.gen.device import (
    B200,
    GB10,
    GB300,
    H200,
    HOST,
    RTX_5090,
    RTX_PRO_6000,
    Device,
    alike,
    device_for_arch,
    device_from_properties,
)
from bwdtune.gen.errors import UsageError

CARDS = [("sm_100a", B200), ("sm_103a", GB300), ("sm_121a", GB10)]
H200_PROPERTIES: dict[str, Any] = {
    "name": H200.name,
    "capability": (9, 0),
    "sm_count": 132,
    "shared_memory_per_block_bytes": 232_448,
    "shared_memory_per_sm_bytes": 233_472,
    "registers_per_sm": 65_536,
    "max_threads_per_sm": 2048,
    "clock_ghz": 1.98,
    "bandwidth_tb_s": 4.9,
}


def test_the_5090_is_the_write_ups() -> None:
    assert (RTX_5090.sm_count, RTX_5090.shared_memory_per_block_bytes) == (170, 101_376)
    # Four tensor cores an SM, each 64 fused multiply-adds a clock with fp32 accumulation.
    assert RTX_5090.peak_tflops == pytest.approx(170 * 2.407 * 4 * 64 * 2 / 1000, rel=1e-3)


@pytest.mark.parametrize(
    ("arch", "device"),
    [("sm_120", RTX_5090), ("sm_120a", RTX_5090), ("sm_90a", H200), *CARDS, ("host", HOST)],
)
def test_an_arch_stands_for_a_card(arch: str, device: object) -> None:
    assert device_for_arch(arch) is device


@pytest.mark.parametrize(
    ("device", "per_sm"),
    [(B200, 8192), (GB300, 8192), (GB10, 512), (H200, 4096), (RTX_5090, 512), (RTX_PRO_6000, 1024)],
)
def test_peaks_are_what_the_tensor_cores_do_in_a_clock(device: Device, per_sm: int) -> None:
    assert device.peak_tflops == pytest.approx(device.sm_count * device.boost_clock_ghz * per_sm / 1000, rel=2e-3)


def test_a_gb10_takes_what_an_rtx_5090_does() -> None:
    assert alike("12.1") == ("12.1", "12.0")
    assert alike("9.0") == ("9.0",)
    for limit in ("shared_memory_per_block_bytes", "shared_memory_per_sm_bytes", "max_threads_per_sm"):
        assert getattr(GB10, limit) == getattr(RTX_5090, limit)


@pytest.mark.parametrize("arch", ["sm_80", "gfx942", ""])
def test_an_unknown_arch_is_refused(arch: str) -> None:
    with pytest.raises(UsageError, match="unknown arch"):
        device_for_arch(arch)


def test_a_card_known_by_name_keeps_its_published_peaks() -> None:
    assert device_from_properties(**H200_PROPERTIES) == H200


def test_another_card_is_what_its_driver_says() -> None:
    device = device_from_properties(**H200_PROPERTIES | {"name": "NVIDIA GH200", "sm_count": 114})
    assert (device.arch, device.sm_count, device.bandwidth_tb_s) == ("sm_90a", 114, 4.9)
    assert device.peak_tflops == pytest.approx(114 * 1.98 * 4096 / 1000)


def test_a_card_without_tma_is_refused() -> None:
    with pytest.raises(UsageError, match=r"compute capability 8\.0: the kernels need TMA"):
        device_from_properties(**H200_PROPERTIES | {"name": "NVIDIA A100", "capability": (8, 0)})
