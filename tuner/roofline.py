"""The speed of light of a problem: its arithmetic and its traffic against the card's peaks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..gen.device import HOST_ARCH, RTX_5090, Device
from ..gen.errors import UsageError
from ..gen.problem import Problem

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Roofline:
    """Lower bounds on the time of one attention backward.

    Attributes:
        problem: What is computed.
        device: The device's name.
        arch: Its compile target.
        flops: Operations of the five matrix products; a causal mask halves them.
        read_bytes: q, k, v, o, dO and the log-sum-exp, each once.
        write_bytes: dQ, dK and dV, each once.
        peak_tflops: The device's dense tensor peak.
        bandwidth_tb_s: The device's memory bandwidth.
        compute_ms: ``flops`` at the peak.
        memory_ms: All bytes at the bandwidth.
        bound: ``compute`` or ``memory``: the longer of both.
        bound_ms: The longer of both times: no kernel is faster.
    """

    problem: Problem
    device: str
    arch: str
    flops: int
    read_bytes: int
    write_bytes: int
    peak_tflops: float
    bandwidth_tb_s: float
    compute_ms: float
    memory_ms: float
    bound: str
    bound_ms: float

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``tuner roofline --json``."""
        values = asdict(self)
        del values["problem"]
        return {**self.problem.to_dict(), **values}

    def table(self) -> Table:
        """The write-up's table: work, peak and bound of compute and of memory."""
        from rich.table import Table

        table = Table(title=f"{self.problem.label} on {self.device}: {self.bound}-bound")
        table.add_column("")
        for heading in ("work", "peak", "bound"):
            table.add_column(heading, justify="right")
        table.add_row(
            "compute", f"{_scaled(self.flops)}FLOPs", f"{self.peak_tflops:g} TFLOP/s", f"{self.compute_ms:.2f} ms"
        )
        table.add_row(
            "memory",
            f"{_scaled(self.read_bytes)}B read + {_scaled(self.write_bytes)}B written",
            f"{self.bandwidth_tb_s:g} TB/s",
            f"{self.memory_ms:.2f} ms",
        )
        return table


def roofline(problem: Problem, device: Device) -> Roofline:
    """Appendix C of the write-up, for any problem and device.

    Args:
        problem: What is computed.
        device: Whose peaks count.

    Raises:
        UsageError: The device is the host CPU, which has no stated peaks.
    """
    if device.arch == HOST_ARCH:
        raise UsageError(f"arch {HOST_ARCH!r} has no stated peak: choose a GPU's, such as --arch {RTX_5090.arch}")
    compute_ms = problem.flops / (device.peak_tflops * 1e12) * 1e3
    memory_ms = (problem.read_bytes + problem.write_bytes) / (device.bandwidth_tb_s * 1e12) * 1e3
    return Roofline(
        problem=problem,
        device=device.name,
        arch=device.arch,
        flops=problem.flops,
        read_bytes=problem.read_bytes,
        write_bytes=problem.write_bytes,
        peak_tflops=device.peak_tflops,
        bandwidth_tb_s=device.bandwidth_tb_s,
        compute_ms=compute_ms,
        memory_ms=memory_ms,
        bound="compute" if compute_ms >= memory_ms else "memory",
        bound_ms=max(compute_ms, memory_ms),
    )


def _scaled(amount: int) -> str:
    """Four digits and a decimal prefix: ``1.374 T`` for 1,374,389,534,720."""
    value, prefix = float(amount), ""
    for larger in ("k", "M", "G", "T", "P"):
        if value < 1000:
            break
        value, prefix = value / 1000, larger
    return f"{value:.4g} {prefix}"
