"""Whether one kernel is faster than another, by times that were taken side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.99


@dataclass(frozen=True)
class Ratio:
    """How many times as long as another kernel one takes.

    Attributes:
        median: Of the ratios of all rounds.
        low: Lower end of the median's confidence interval.
        high: Upper end of it.
    """

    median: float
    low: float
    high: float

    @property
    def told_apart(self) -> bool:
        """Whether the two differ: whether the interval leaves out 1."""
        return self.low > 1 or self.high < 1

    def to_dict(self) -> dict[str, Any]:
        """With stable names, for JSON."""
        return {"median": self.median, "low": self.low, "high": self.high, "told_apart": self.told_apart}


def paired_ratio(times: Sequence[float], others: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """Compares two kernels that ran in the same rounds, whatever the clock did from one round to the next.

    The interval is that of the sign test: its ends are order statistics of the ratios, so nothing is assumed of their
    distribution. Fewer than eight rounds tell nothing apart at 99 %.

    Args:
        times: One kernel's, a round each.
        others: The other's, of the same rounds.
        confidence: Of the interval.
    """
    ratios = sorted(time / other for time, other in zip(times, others, strict=True))
    count = len(ratios)
    left_out, tail = 0, 1.0  # ratios beyond either end of the interval, and the chance of so few of them, in 2**-count
    while 2 * tail <= (1 - confidence) * 2.0**count:
        left_out += 1
        tail += math.comb(count, left_out)
    if not left_out:
        return Ratio(statistics.median(ratios), 0.0, math.inf)
    return Ratio(statistics.median(ratios), ratios[left_out - 1], ratios[-left_out])
