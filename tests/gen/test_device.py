from __future__ import annotations

from typing import Any

import pytest

from bwdtune.gen.device import H200, HOST, RTX_5090, device_for_arch, device_from_properties
from bwdtune.gen.errors import UsageError

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
    ("arch", "device"), [("sm_120", RTX_5090), ("sm_120a", RTX_5090), ("sm_90a", H200), ("host", HOST)]
)
def test_an_arch_stands_for_a_card(arch: str, device: object) -> None:
    assert device_for_arch(arch) is device


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
