"""`stats`: which kernels ran in this process, and why PyTorch's backward ran instead."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .. import operator
from . import counters
from .choices import dispatcher


@dataclass(frozen=True)
class Stats:
    """What ran in this process.

    Attributes:
        launches: How often each kernel was launched, by its library's name.
        fallbacks: How often PyTorch's backward ran where one of ours was asked for, by cause.
        building: Kernels that are being looked up, compiled or loaded in the background.
        failed: Why other kernels cannot be had, a line for each.
    """

    launches: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    building: int = 0
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{sum(self.launches.values())} launches, {sum(self.fallbacks.values())} times PyTorch's backward"]
        lines += [f"  {count:>8}  {name}" for name, count in self.launches.items()]
        lines += [f"  {count:>8}  PyTorch: {cause}" for cause, count in self.fallbacks.items()]
        if self.building:
            lines.append(f"{self.building} kernels are being built")
        lines += [f"a kernel cannot be used: {reason}" for reason in self.failed]
        return "\n".join(lines)


def stats(*, reset: bool = False) -> Stats:
    """What ran in this process since it began, or since the counts were last reset.

    A launch that a CUDA graph replays is not counted: it counts once, when it is captured.

    Args:
        reset: Have the counts begin at zero again.
    """
    global _before
    launches, fallbacks = counters.counted()
    native = operator.counters()
    launches.update(native["launches"])
    fallbacks.update(native["fallbacks"])
    since_launches, since_fallbacks = launches - _before[0], fallbacks - _before[1]
    if reset:
        _before = launches, fallbacks
    building, failed = dispatcher.counts()
    return Stats(dict(since_launches.most_common()), dict(since_fallbacks.most_common()), building, failed)


_before: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
