"""Limits and peak rates of cards: architecture, limits of a block and of an SM, throughput."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UsageError

HOST_ARCH = "host"

_REGISTER_ALLOCATION = 256  # registers are handed to a warp in these units
_SHARED_MEMORY_ALLOCATION = 128


@dataclass(frozen=True)
class Device:
    """A card's limits and peaks.

    Attributes:
        name: As the driver reports it.
        arch: The compile target, such as ``sm_120a``; ``host`` compiles as plain C++ and runs on a CPU.
        sm_count: Streaming multiprocessors.
        shared_memory_per_block_bytes: The most a block may ask for (opt-in).
        shared_memory_per_sm_bytes: What the blocks of an SM share, with 1 KiB reserved for each of them.
        registers_per_sm: 32-bit registers of an SM.
        max_threads_per_sm: Resident threads of an SM.
        boost_clock_ghz: The clock at which ``peak_tflops`` is stated.
        peak_tflops: Dense bf16/fp16 tensor peak with fp32 accumulation.
        bandwidth_tb_s: DRAM bandwidth, TB/s.
        clocks_per_mma: Clocks that an SM sub-partition's tensor core takes for one ``mma.sync`` m16n8k16 with fp32
            accumulation, at its best; None where nobody has measured it.
    """

    name: str
    arch: str
    sm_count: int
    shared_memory_per_block_bytes: int
    shared_memory_per_sm_bytes: int
    registers_per_sm: int
    max_threads_per_sm: int
    boost_clock_ghz: float
    peak_tflops: float
    bandwidth_tb_s: float
    clocks_per_mma: float | None = None

    sub_partitions_per_sm = 4
    max_threads_per_block = 1024
    max_registers_per_thread = 255
    reserved_shared_memory_per_block_bytes = 1024

    @property
    def has_wgmma(self) -> bool:
        return self.arch in ("sm_90a", HOST_ARCH)

    def registers_per_thread(self, *, threads: int, blocks: int) -> int:
        """Registers a thread can have where so many blocks of so many threads share an SM."""
        return min(self.registers_per_sm // (threads * blocks) // 8 * 8, self.max_registers_per_thread)

    def blocks_per_sm(self, *, threads: int, registers: int, shared_memory_bytes: int) -> int:
        """Blocks that fit on one SM at a time, by threads, registers and shared memory; 0 where not even one does.

        Args:
            threads: Threads a block.
            registers: Registers a thread.
            shared_memory_bytes: Shared memory a block, static and dynamic.
        """
        warps = -(-threads // 32)
        registers_per_warp = -(-registers * 32 // _REGISTER_ALLOCATION) * _REGISTER_ALLOCATION
        shared = -(-shared_memory_bytes // _SHARED_MEMORY_ALLOCATION) * _SHARED_MEMORY_ALLOCATION
        return min(
            self.max_threads_per_sm // (warps * 32),
            self.registers_per_sm // (registers_per_warp * warps),
            self.shared_memory_per_sm_bytes // (shared + self.reserved_shared_memory_per_block_bytes),
        )

    def occupancy(self, *, threads: int, registers: int, shared_memory_bytes: int) -> float:
        """Resident threads over the most an SM holds, 0 to 1; see `blocks_per_sm`."""
        blocks = self.blocks_per_sm(threads=threads, registers=registers, shared_memory_bytes=shared_memory_bytes)
        return blocks * threads / self.max_threads_per_sm


RTX_5090 = Device(
    name="NVIDIA GeForce RTX 5090",
    arch="sm_120a",
    sm_count=170,
    shared_memory_per_block_bytes=101_376,
    shared_memory_per_sm_bytes=102_400,
    registers_per_sm=65_536,
    max_threads_per_sm=1536,
    boost_clock_ghz=2.407,
    peak_tflops=209.5,
    bandwidth_tb_s=1.792,
    clocks_per_mma=32.0,
)
"""NVIDIA's RTX Blackwell whitepaper; the peak is at the rated boost clock, as the write-up locks it. The mma rate is
that peak's: 209.5 TFLOPS are 4096 operations of a sub-partition in 32 clocks."""

RTX_PRO_6000 = Device(
    name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    arch="sm_120a",
    sm_count=188,
    shared_memory_per_block_bytes=101_376,
    shared_memory_per_sm_bytes=102_400,
    registers_per_sm=65_536,
    max_threads_per_sm=1536,
    boost_clock_ghz=2.617,
    peak_tflops=503.8,
    bandwidth_tb_s=1.792,
    clocks_per_mma=16.0,
)
"""NVIDIA's RTX Blackwell PRO whitepaper (v1.1, table 4). Limits of compute capability 12.0, as an RTX 5090's: the CUDA
programming guide. The mma rate is the peak's, twice a GeForce card's with fp32 accumulation."""

H200 = Device(
    name="NVIDIA H200",
    arch="sm_90a",
    sm_count=132,
    shared_memory_per_block_bytes=232_448,
    shared_memory_per_sm_bytes=233_472,
    registers_per_sm=65_536,
    max_threads_per_sm=2048,
    boost_clock_ghz=1.83,
    peak_tflops=989.4,
    bandwidth_tb_s=4.8,
    clocks_per_mma=6.08,
)
"""NVIDIA's H200 data sheet: dense peak, of `wgmma`; `mma.sync` reaches about two thirds of it, 639 TFLOPS at 1.84 GHz
on a card where this project has measured it."""

H100 = Device(
    name="NVIDIA H100 80GB HBM3",
    arch="sm_90a",
    sm_count=132,
    shared_memory_per_block_bytes=232_448,
    shared_memory_per_sm_bytes=233_472,
    registers_per_sm=65_536,
    max_threads_per_sm=2048,
    boost_clock_ghz=1.83,
    peak_tflops=989.4,
    bandwidth_tb_s=3.35,
    clocks_per_mma=H200.clocks_per_mma,
)
"""NVIDIA's H100 data sheet, SXM5. Its SM is the H200's."""

B200 = Device(
    name="NVIDIA B200",
    arch="sm_100a",
    sm_count=148,
    shared_memory_per_block_bytes=232_448,
    shared_memory_per_sm_bytes=233_472,
    registers_per_sm=65_536,
    max_threads_per_sm=2048,
    boost_clock_ghz=1.856,
    peak_tflops=2250.0,
    bandwidth_tb_s=7.7,
)
"""NVIDIA's HGX B200 data sheet: dense peak of `tcgen05` and bandwidth of one GPU; 148 SMs of 8192 operations a clock
reach it at this clock. Limits of compute capability 10.0: the CUDA programming guide. Its `mma.sync`, which the kernels
here use, is slower than that; by how much nobody has measured for this project."""

GB300 = Device(
    name="NVIDIA GB300",
    arch="sm_103a",
    sm_count=160,
    shared_memory_per_block_bytes=232_448,
    shared_memory_per_sm_bytes=233_472,
    registers_per_sm=65_536,
    max_threads_per_sm=2048,
    boost_clock_ghz=1.907,
    peak_tflops=2500.0,
    bandwidth_tb_s=8.0,
)
"""NVIDIA's description of Blackwell Ultra (160 SMs, 8 TB/s) and its GB300 data sheet; the clock follows as the B200's
does. Limits of compute capability 10.3: the CUDA programming guide."""

GB10 = Device(
    name="NVIDIA GB10",
    arch="sm_121a",
    sm_count=48,
    shared_memory_per_block_bytes=101_376,
    shared_memory_per_sm_bytes=102_400,
    registers_per_sm=65_536,
    max_threads_per_sm=1536,
    boost_clock_ghz=2.52,
    peak_tflops=61.9,
    bandwidth_tb_s=0.273,
)
"""NVIDIA's DGX Spark: 6,144 CUDA cores, so 48 SMs, 273 GB/s, and 31 TFLOPS of fp32, from which the clock follows
(NVIDIA at Hot Chips 2025). The peak is that of an RTX 5090's SM at this clock. Limits of compute capability 12.1: the
CUDA programming guide."""

HOST = Device(
    name="host CPU",
    arch=HOST_ARCH,
    sm_count=1,
    shared_memory_per_block_bytes=232_448,
    shared_memory_per_sm_bytes=233_472,
    registers_per_sm=65_536,
    max_threads_per_sm=2048,
    boost_clock_ghz=1.0,
    peak_tflops=1.0,
    bandwidth_tb_s=1.0,
    clocks_per_mma=H200.clocks_per_mma,
)
"""The CPU that executes a kernel as plain C++, with an H200's limits so that every kernel runs there, an emulated one
too. It has no peak: its rates are placeholders, and no percentage is taken of them."""

KNOWN_DEVICES = (RTX_5090, RTX_PRO_6000, H200, H100, B200, GB300, GB10, HOST)
_BY_ARCH = {
    "sm_120": RTX_5090,
    "sm_120a": RTX_5090,
    "sm_90": H200,
    "sm_90a": H200,
    "sm_100a": B200,
    "sm_103a": GB300,
    "sm_121a": GB10,
    HOST_ARCH: HOST,
}
_SAME_SM = {"12.1": "12.0"}
_TENSOR_FLOPS_PER_CLOCK_AND_SM = {9: 4096, 10: 8192, 12: 512}  # dense bf16, fp32 accumulation


def alike(capability: str) -> tuple[str, ...]:
    """Compute capabilities whose configurations serve a card: its own, then one with the same SM.

    A GB10 (12.1) thus takes what is shipped for an RTX 5090 (12.0), compiled for itself.
    """
    same = _SAME_SM.get(capability)
    return (capability, same) if same else (capability,)


def device_for_arch(arch: str) -> Device:
    """The card that stands for a compile target.

    Raises:
        UsageError: No kernel of this project is made for that target.
    """
    if arch not in _BY_ARCH:
        raise UsageError(f"unknown arch {arch!r}: use one of {', '.join(_BY_ARCH)}")
    return _BY_ARCH[arch]


def device_from_properties(
    *,
    name: str,
    capability: tuple[int, int],
    sm_count: int,
    shared_memory_per_block_bytes: int,
    shared_memory_per_sm_bytes: int,
    registers_per_sm: int,
    max_threads_per_sm: int,
    clock_ghz: float,
    bandwidth_tb_s: float,
) -> Device:
    """A device from what its driver reports; a card that is known by name keeps its published peaks.

    Raises:
        UsageError: The card has no TMA, which every kernel here loads with (compute capability below 9.0).
    """
    major, minor = capability
    if major < 9:
        raise UsageError(
            f"{name} has compute capability {major}.{minor}: the kernels need TMA (9.0 or newer); "
            "use --arch to generate for another card"
        )
    known = next((device for device in KNOWN_DEVICES if device.name == name), None)
    return Device(
        name=name,
        arch=f"sm_{major}{minor}a",
        sm_count=sm_count,
        shared_memory_per_block_bytes=shared_memory_per_block_bytes,
        shared_memory_per_sm_bytes=shared_memory_per_sm_bytes,
        registers_per_sm=registers_per_sm,
        max_threads_per_sm=max_threads_per_sm,
        boost_clock_ghz=known.boost_clock_ghz if known else clock_ghz,
        peak_tflops=known.peak_tflops
        if known
        else sm_count * clock_ghz * _TENSOR_FLOPS_PER_CLOCK_AND_SM.get(major, 4096) / 1000,
        bandwidth_tb_s=known.bandwidth_tb_s if known else bandwidth_tb_s,
        clocks_per_mma=known.clocks_per_mma if known else None,
    )
