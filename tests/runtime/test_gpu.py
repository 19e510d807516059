"""What the driver says: read from a stand-in for its libraries, and from the real ones where there is a GPU."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from bwdtune.db.records import GpuKey
from bwdtune.gen.device import HOST, RTX_5090
from bwdtune.gen.errors import UsageError
from bwdtune.runtime import gpu

_CACHED = (gpu.current_device, gpu._driver, gpu._nvml, gpu._nvml_handle)


@pytest.fixture
def install_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a stand-in in the place of the driver's libraries."""

    def clear() -> None:
        for cached in _CACHED:
            cached.cache_clear()

    def install(**defines: int) -> None:
        library = tmp_path / "driver.so"
        source = Path(__file__).parents[1] / "support" / "fake_driver.cpp"
        flags = [f"-D{name}={value}" for name, value in defines.items()]
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, "-shared", "-fPIC", *flags, str(source), "-o", str(library)], check=True)
        monkeypatch.setattr(gpu, "_DRIVER", str(library))
        use_nvml(str(library), monkeypatch)
        clear()

    yield install
    clear()


def use_nvml(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has nvidia-ml-py load that library in the place of the driver's."""
    monkeypatch.setattr(pynvml, "CDLL", lambda _: ctypes.CDLL(library))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


def test_a_cards_limits(install_driver: Callable[..., None]) -> None:
    install_driver()
    device = gpu.current_device()
    assert device.name == "NVIDIA Imaginary 1"
    assert device.arch == "sm_121a"
    assert (device.sm_count, device.max_threads_per_sm, device.registers_per_sm) == (100, 1536, 65536)
    assert (device.shared_memory_per_block_bytes, device.shared_memory_per_sm_bytes) == (101376, 102400)
    assert device.bandwidth_tb_s == pytest.approx(1.792, rel=1e-3)
    assert gpu.gpu_key(device) == GpuKey("NVIDIA Imaginary 1", "12.1")


def test_a_known_card_keeps_its_published_peaks(install_driver: Callable[..., None]) -> None:
    install_driver()
    assert gpu.current_device(1).peak_tflops == RTX_5090.peak_tflops


def test_where_something_is_measured(install_driver: Callable[..., None]) -> None:
    install_driver()
    found = gpu.environment(gpu.current_device(), "13.0.88")
    assert (found.arch, found.driver, found.toolkit) == ("sm_121a", "580.95.05", "13.0.88")
    assert found.torch[0].isdigit()


def test_the_management_library_finds_the_card(install_driver: Callable[..., None]) -> None:
    install_driver()
    assert gpu.sm_clock_mhz(0) == 1755
    assert gpu.compute_processes(0) == 3
    assert gpu.sm_clock_mhz(1) is None
    assert gpu.compute_processes(1) is None


def test_a_gpu_that_is_not_there(install_driver: Callable[..., None]) -> None:
    install_driver()
    with pytest.raises(gpu.NoGpuError, match="there is no GPU 2: the driver shows 2"):
        gpu.current_device(2)


def test_no_gpu_at_all(install_driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install_driver(INIT_STATUS=100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(gpu.NoGpuError, match=r"the driver shows no GPU \(CUDA_VISIBLE_DEVICES is ''\)$"):
        gpu.current_device()


def test_a_driver_that_does_not_start(install_driver: Callable[..., None]) -> None:
    install_driver(INIT_STATUS=803)
    with pytest.raises(gpu.NoGpuError, match="the driver does not start: error 803"):
        gpu.current_device()


def test_no_driver(install_driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_driver()
    monkeypatch.setattr(gpu, "_DRIVER", "libmissing.so.1")
    use_nvml("libmissing.so.1", monkeypatch)
    monkeypatch.setattr(gpu, "_DRIVER_VERSION_FILE", tmp_path / "version")
    with pytest.raises(gpu.NoGpuError, match=r"there is no NVIDIA driver \(libmissing.so.1 is not found\)"):
        gpu.current_device()
    assert gpu.driver_version() == "unknown"
    assert gpu.sm_clock_mhz(0) is None
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n")
    assert gpu.driver_version() == "535.183.01"


def test_a_card_without_tma(install_driver: Callable[..., None]) -> None:
    install_driver(MAJOR=8)
    with pytest.raises(UsageError, match=r"compute capability 8\.1"):
        gpu.current_device()


def test_the_host_has_a_key_too() -> None:
    assert gpu.gpu_key(HOST) == GpuKey("host CPU", "host")


@pytest.mark.gpu
def test_the_driver_and_pytorch_agree() -> None:
    import torch

    device, properties = gpu.current_device(0), torch.cuda.get_device_properties(0)
    assert device.name == properties.name
    assert gpu.gpu_key(device).capability == f"{properties.major}.{properties.minor}"
    assert device.sm_count == properties.multi_processor_count
    assert device.shared_memory_per_block_bytes > 90_000
    assert device.bandwidth_tb_s > 0.3
    assert gpu.driver_version() != "unknown"
