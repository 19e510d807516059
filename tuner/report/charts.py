"""Where things lie in a chart: x in percent of its width, which is the reader's, y in pixels of its height."""

from __future__ import annotations

import math
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LOG_STEPS = (
    (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0),
    (1.0, 1.5, 2.0, 3.0, 5.0),
    (1.0, 2.0, 5.0),
    (1.0, 3.0),
    (1.0,),
)
"""Digits of ticks on a logarithmic scale: as many of them as there is room for."""


@dataclass(frozen=True)
class Tick:
    """A line of the grid with its label."""

    at: float
    text: str


@dataclass(frozen=True)
class Point:
    """A candidate or a kernel.

    Attributes:
        x: In percent.
        y: In pixels.
        kind: What it looks like: a family, ``refused``, ``failed``, ``winner`` or ``peer``.
        text: What it is, for whoever points at it.
        key: The row of the section's table that it belongs to; empty where there is none.
        label: Beside it; empty for none.
        beyond: Whether it lies beyond the edge that it is drawn at.
    """

    x: float
    y: float
    kind: str
    text: str
    key: str = ""
    label: str = ""
    beyond: bool = False


@dataclass(frozen=True)
class Segment:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float


@dataclass(frozen=True)
class Level:
    """A line over the whole width, with its label at one of its ends."""

    y: float
    kind: str
    label: str
    right: bool = False


@dataclass(frozen=True)
class Plot:
    """A chart with two axes.

    Attributes:
        title: What it shows, for those who do not see it.
        x_title: What lies on the horizontal axis.
        x_ticks: In percent.
        y_title: What lies on the vertical axis.
        y_ticks: In pixels.
        height: In pixels.
        points: In drawing order.
        lines: Connected ones.
        levels: For comparison.
    """

    title: str
    x_title: str
    x_ticks: tuple[Tick, ...]
    y_title: str
    y_ticks: tuple[Tick, ...]
    height: int
    points: tuple[Point, ...]
    lines: tuple[Segment, ...] = ()
    levels: tuple[Level, ...] = ()


@dataclass(frozen=True)
class Bar:
    """A value with its interval, in percent of its lane.

    Attributes:
        label: Whose.
        text: The value.
        note: Behind it.
        kind: What it looks like.
        title: More of whose it is.
        at: Where the value lies.
        low: Where its interval begins; None where there is none.
        high: Where that ends.
    """

    label: str
    text: str
    note: str
    kind: str
    title: str
    at: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Lanes:
    """Values below one another on one scale.

    Attributes:
        title: What they are.
        bars: From the top.
        zero: Where 0 lies, in percent.
    """

    title: str
    bars: tuple[Bar, ...]
    zero: float = 0.0


@dataclass(frozen=True)
class Scale:
    """From values to places.

    Attributes:
        low: The value at the beginning.
        high: The value at the end; above `low`.
        start: Where the beginning lies.
        end: Where the end lies.
        log: Whether places follow the logarithm: then both values are positive.
    """

    low: float
    high: float
    start: float = 0.0
    end: float = 100.0
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value; of one beyond an end that end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return round(self.start + part * (self.end - self.start), 2)

    def ticks(self, most: int, *, whole: bool = False) -> tuple[Tick, ...]:
        """Round values on the scale, at most so many, or whole numbers alone."""
        values = _log_ticks(self.low, self.high, most) if self.log else _linear_ticks(self.low, self.high, most)
        values = [value for value in values if not whole or value == round(value)]
        return tuple(Tick(self(value), f"{value:,.9g}") for value in values)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    magnitude = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(magnitude * step for step in _STEPS if high - low <= most * magnitude * step * (1 + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.9g}") for number in range(first, last + 1)][:most]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    values: list[float] = []
    for digits in _LOG_STEPS:
        values = [digit * 10.0**decade for decade in decades for digit in digits if low <= digit * 10.0**decade <= high]
        if len(values) <= most:
            break
    if len(values) < 3:
        return _linear_ticks(low, high, most)
    return values[:: math.ceil(len(values) / most)]
