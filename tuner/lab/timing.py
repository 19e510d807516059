"""Timings as data: the policy, the times and their intervals."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...gen.errors import UsageError
from ...gen.problem import Problem
from ...runtime.gpu import GpuState
from .paired import Ratio, paired_ratio


@dataclass(frozen=True)
class Policy:
    """How kernels are timed: a part of each measurement's identity, by its `id`.

    Attributes:
        warmup_ms: All kernels are run in turn for so long before anything counts, so that clocks have risen.
        budget_ms: Time that each kernel's samples may take in the mean, within the bounds of their number.
        min_samples: Of each kernel, however slow it is.
        max_samples: Of each kernel, however fast it is.
        cold_l2: L2 is flushed before each run, as a training step leaves it; else it holds what the run before left.
        graph: Kernels are launched by CUDA graphs, which leaves out what the CPU does for a launch.
        lengths_as: Of packed sequences, where a person chose them: see `gen.lengths`.
    """

    warmup_ms: float
    budget_ms: float
    min_samples: int
    max_samples: int
    cold_l2: bool = True
    graph: bool = False
    lengths_as: str = ""

    @property
    def id(self) -> str:
        kind = f"{'cold' if self.cold_l2 else 'warm'}-l2{'_graph' if self.graph else ''}"
        samples = f"n{self.min_samples}-{self.max_samples}"
        lengths = f"_lengths-{_short(self.lengths_as)}" if self.lengths_as else ""
        return f"events1_{kind}_w{self.warmup_ms:g}ms_b{self.budget_ms:g}ms_{samples}{lengths}"

    def of(self, problem: Problem) -> Policy:
        """The same with a problem's lengths."""
        return replace(self, lengths_as=problem.lengths_as)


def _short(lengths_as: str) -> str:
    """The lengths themselves may be thousands of numbers."""
    if "," not in lengths_as:
        return lengths_as
    return f"{lengths_as.count(',') + 1}-of-{hashlib.sha256(lengths_as.encode()).hexdigest()[:8]}"


SEARCH_POLICY = Policy(warmup_ms=50, budget_ms=150, min_samples=10, max_samples=100)
"""For one candidate of many."""

RACE_POLICY = Policy(warmup_ms=200, budget_ms=600, min_samples=30, max_samples=400)
"""For finalists."""

BENCH_POLICY = Policy(warmup_ms=2000, budget_ms=1000, min_samples=30, max_samples=400)
"""For a table: sustained, with the clock that the card's power cap leaves when all of them have run for a while."""


_SUSTAINED_WARMUP_MS = 2000.0


@dataclass(frozen=True)
class TimingStyle:
    """What a person chooses of a policy.

    Attributes:
        l2: ``cold`` or ``warm``.
        launch: ``eager`` or ``graph``.
        load: ``burst`` keeps the policy's warm-up, ``sustained`` lasts until the card's power cap has set the clock.

    Raises:
        UsageError: One of them is something else.
    """

    l2: str = "cold"
    launch: str = "eager"
    load: str = "burst"

    def __post_init__(self) -> None:
        for name, choices in TIMING_STYLES.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"unknown timing {getattr(self, name)!r}: use {' or '.join(choices)}")

    @classmethod
    def parse(cls, text: str) -> TimingStyle:
        """Of words between commas, such as ``warm,graph``; what is not named stays as it is by default.

        Raises:
            UsageError: A word that means nothing, or two of a kind.
        """
        values: dict[str, str] = {}
        for word in filter(None, (part.strip() for part in text.split(","))):
            name = next((name for name, choices in TIMING_STYLES.items() if word in choices), None)
            if name is None or name in values:
                known = ", ".join(" or ".join(choices) for choices in TIMING_STYLES.values())
                raise UsageError(f"cannot time {text!r}: use {known}")
            values[name] = word
        return cls(**values)

    def applied_to(self, policy: Policy) -> Policy:
        """The policy in this style."""
        warmup_ms = max(policy.warmup_ms, _SUSTAINED_WARMUP_MS) if self.load == "sustained" else policy.warmup_ms
        return replace(policy, warmup_ms=warmup_ms, cold_l2=self.l2 == "cold", graph=self.launch == "graph")


TIMING_STYLES = {"l2": ("cold", "warm"), "launch": ("eager", "graph"), "load": ("burst", "sustained")}
"""The choices of `TimingStyle`, the default first."""


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
        state: The card under load, where the driver says it.
        notice: One line on noise; empty where there was little.
        unavailable: For each of PyTorch's kernels that did not run the reason.
        cycles: Of the kernels that count them, by name.
        default_kernel: Where PyTorch's default was asked for, the kernel that it is (`peers.pytorchs_default`).
        rounds_ms: All times by name: those at one index are of one round.
    """

    by_name: dict[str, Timing]
    state: GpuState = field(default_factory=GpuState)
    notice: str = ""
    unavailable: dict[str, str] = field(default_factory=dict)
    cycles: dict[str, Cycles] = field(default_factory=dict)
    default_kernel: str | None = None
    rounds_ms: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Timing:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    def ratio(self, name: str, other: str) -> Ratio:
        """How many times as long as another a kernel takes, round by round; by medians where rounds are unknown."""
        if name == other:
            return Ratio(1.0, 1.0, 1.0)
        if name in self.rounds_ms and other in self.rounds_ms:
            return paired_ratio(self.rounds_ms[name], self.rounds_ms[other])
        ratio = self[name].median_ms / self[other].median_ms
        return Ratio(ratio, ratio, ratio)

    def cost(self, name: str, *, by_cycles: bool = False) -> float:
        """What ranks a kernel: its median time in ms, or its median cycles; not a number where it counted none."""
        if not by_cycles:
            return self[name].median_ms
        counted = self.cycles.get(name)
        return counted.median if counted else math.nan
