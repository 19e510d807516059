"""How long kernels take, as data: the policy they are timed by, and the times with their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Policy:
    """How kernels are timed: a part of each measurement's identity, by its `id`.

    Attributes:
        warmup_ms: All kernels are run in turn for so long before anything counts, so that clocks have risen.
        budget_ms: Time that each kernel's samples may take in the mean, within the bounds of their number.
        min_samples: Of each kernel, however slow it is.
        max_samples: Of each kernel, however fast it is.
    """

    warmup_ms: float
    budget_ms: float
    min_samples: int
    max_samples: int

    @property
    def id(self) -> str:
        samples = f"n{self.min_samples}-{self.max_samples}"
        return f"events1_cold-l2_w{self.warmup_ms:g}ms_b{self.budget_ms:g}ms_{samples}"


SEARCH_POLICY = Policy(warmup_ms=50, budget_ms=150, min_samples=10, max_samples=100)
"""For one candidate of many."""

RACE_POLICY = Policy(warmup_ms=200, budget_ms=600, min_samples=30, max_samples=400)
"""For finalists."""

BENCH_POLICY = Policy(warmup_ms=2000, budget_ms=1000, min_samples=30, max_samples=400)
"""For a table: sustained, with the clock that the card's power cap leaves when all of them have run for a while."""


@dataclass(frozen=True)
class Timing:
    """A kernel's times.

    Attributes:
        median_ms: The median.
        low_ms: The 10 % quantile.
        high_ms: The 90 % quantile.
        samples: How many there were.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    samples: int

    @classmethod
    def of(cls, times_ms: list[float]) -> Timing:
        """Of one time or more."""
        return cls(*_median_and_quantiles(times_ms), len(times_ms))


@dataclass(frozen=True)
class Cycles:
    """What a kernel counted of itself: the cycles of its main kernel on the SM that took longest.

    Attributes:
        median: The median.
        low: The 10 % quantile.
        high: The 90 % quantile.
        samples: How many launches were counted.
    """

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, counts: list[int]) -> Cycles:
        """Of one launch or more."""
        return cls(*_median_and_quantiles([float(count) for count in counts]), len(counts))


def _median_and_quantiles(values: list[float]) -> tuple[float, float, float]:
    low, *_, high = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 2
    return statistics.median(values), low, high


@dataclass(frozen=True)
class Timings(Mapping[str, Timing]):
    """Timings by the kernels' names, and what was noticed meanwhile.

    Attributes:
        by_name: The timings.
        clock_mhz: The SM clock under load, where it is known.
        notice: One line on noise; empty where there was little.
        unavailable: For each of PyTorch's kernels that did not run the reason.
        cycles: Of the kernels that count them, by name.
        default_kernel: Where PyTorch's default was asked for, the kernel that it is (`peers.pytorchs_default`).
    """

    by_name: dict[str, Timing]
    clock_mhz: float | None = None
    notice: str = ""
    unavailable: dict[str, str] = field(default_factory=dict)
    cycles: dict[str, Cycles] = field(default_factory=dict)
    default_kernel: str | None = None

    def __getitem__(self, name: str) -> Timing:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    def cost(self, name: str, *, by_cycles: bool = False) -> float:
        """What ranks a kernel: its median time in ms, or its median cycles; not a number where it counted none."""
        if not by_cycles:
            return self[name].median_ms
        counted = self.cycles.get(name)
        return counted.median if counted else math.nan
