"""What a report shows of a problem, as charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...gen.families import short_form
from ..lab.peers import DEFAULT, PEERS
from ..roofline import Roofline, roofline
from .charts import Bar, Lanes, Level, Plot, Point, Scale, Segment
from .history import Entry, History, Lane
from .worth import ParameterWorth

_HEIGHT = 240  # of a plot, in pixels
_STRIP = 26  # its lowest part, for candidates without a time
_MARGIN = 8
_SPREAD = 3.0  # slower candidates than so many times the best lie at the upper edge
_X_TICKS, _Y_TICKS = 6, 6
_GIGA, _TERA = 1e9, 1e12


def cost_text(cost: float, history: History) -> str:
    """A time, or emulated cycles."""
    return f"{cost / 1e6:,.3f} Mcycles" if history.emulated else f"{cost:,.3f} ms"


def key_of(entry: Entry) -> str:
    """Names an entry's row of the table within its section."""
    return f"{entry.number or 0}-{entry.config.id}"


def describe(entry: Entry, history: History) -> str:
    """An entry in one line."""
    number = f"{entry.number}: " if entry.number else ""
    cost, outcome = entry.outcome.cost, entry.outcome
    became = outcome.reason or outcome.state if cost is None else cost_text(cost, history)
    return f"{number}{short_form(entry.config)}, {became}"


def convergence(history: History) -> Plot | None:
    """The costs of candidates in the order of decisions, and the best so far; None where no order is known."""
    decided = [entry for entry in history.entries if entry.number is not None]
    costs = [entry.outcome.cost for entry in decided if entry.outcome.cost]
    if not costs:
        return None
    unit = 1e6 if history.emulated else 1.0
    best = min(costs)
    levels = [level for level in _levels(history, best) if level[0] < _SPREAD * best]
    most = max(*(min(cost, _SPREAD * best) for cost in costs), *(cost for cost, _, _ in levels), 1.05 * best)
    y = Scale(best / 1.03 / unit, most * 1.03 / unit, _HEIGHT - _STRIP - _MARGIN, _MARGIN, log=True)
    x = Scale(0.0, len(decided) + 1.0)
    points, lines = [], []
    least, since = math.inf, 0.0
    for place, entry in enumerate(decided, start=1):
        at, cost = x(place), entry.outcome.cost
        text, key = describe(entry, history), key_of(entry)
        if cost is None:
            points.append(Point(at, _HEIGHT - _STRIP / 2, entry.outcome.state, text, key))
            continue
        points.append(Point(at, y(cost / unit), entry.config.family, text, key, beyond=cost / unit > y.high))
        if cost < least:
            if least < math.inf:
                lines.append(Segment(since, y(least / unit), at, y(least / unit)))
                lines.append(Segment(at, y(least / unit), at, y(cost / unit)))
            least, since = cost, at
    lines.append(Segment(since, y(least / unit), 100.0, y(least / unit)))
    return Plot(
        title=f"{len(decided)} candidates in the order of decisions; the best takes {cost_text(best, history)}",
        x_title="candidate",
        x_ticks=x.ticks(_X_TICKS, whole=True)[1:],
        y_title="Mcycles, logarithmic" if history.emulated else "ms, logarithmic",
        y_ticks=y.ticks(_Y_TICKS),
        height=_HEIGHT,
        points=tuple(points),
        lines=tuple(lines),
        levels=tuple(Level(y(cost / unit), kind, label, kind == "preset") for cost, kind, label in levels),
    )


def _levels(history: History, best: float) -> list[tuple[float, str, str]]:
    """PyTorch's default and the best preset: cost, kind and label.

    The default's is that of the best, times how much longer it took than the fastest of ours in the race: clocks fall
    between the search and the race.
    """
    found = []
    default, ours = _default_and_ours(history)
    if default and ours:
        found.append((best * default.median / ours.median, "peer", "PyTorch's default"))
    preset = best_preset(history)
    if preset and preset.outcome.cost:
        found.append((preset.outcome.cost, "preset", f"best preset, {preset.row.kernel}"))
    return found


def best_preset(history: History) -> Entry | None:
    """The fastest preset among the candidates."""
    presets = [entry for entry in history.entries if entry.row.kernel != "candidate" and entry.outcome.cost]
    return min(presets, key=lambda entry: entry.outcome.cost or math.inf, default=None)


def _default_and_ours(history: History) -> tuple[Lane | None, Lane | None]:
    if history.race is None:
        return None, None
    return history.race.lane(DEFAULT), next((lane for lane in history.race.lanes if lane.config), None)


def race_lanes(history: History) -> Lanes | None:
    """The newest race, fastest first, from 0."""
    race = history.race
    if race is None:
        return None
    unit = 1e6 if history.emulated else 1.0
    first = next((lane for lane in race.lanes if lane.config), None)
    scale = Scale(0.0, 1.02 * max(lane.high or lane.median for lane in race.lanes) / unit)
    bars = []
    for lane in race.lanes:
        config = lane.config
        kind = "peer" if config is None else "winner" if lane is first else config.family
        bars.append(
            Bar(
                label=short_form(config) if config else _peer_title(lane.name, race.default_kernel),
                text=f"{lane.median / unit:,.3f}",
                note=_beside(lane, first),
                kind=kind,
                title=lane.name,
                at=scale(lane.median / unit),
                low=None if lane.low is None else scale(lane.low / unit),
                high=None if lane.high is None else scale(lane.high / unit),
            )
        )
    return Lanes("the final race", tuple(bars))


def _peer_title(name: str, default_kernel: str) -> str:
    title = PEERS[name].title
    return f"{title}, {default_kernel}" if name == DEFAULT and default_kernel else title


def _beside(lane: Lane, first: Lane | None) -> str:
    """How much longer than the fastest of ours."""
    if first is None or lane is first:
        return "fastest of ours" if lane is first else ""
    if lane.ratio and lane.ratio.median != 1 and not lane.ratio.told_apart:
        return "not told apart"
    return f"{lane.median / first.median - 1:+.1%}"


def worth_lanes(parameter: ParameterWorth) -> Lanes:
    """A parameter's values, by how much longer a kernel takes with each than with the best."""
    low = min(0.0, *(value.low for value in parameter.values))
    high = max(0.01, *(value.high for value in parameter.values))
    scale = Scale(1.05 * low, 1.05 * high)
    bars = tuple(
        Bar(
            label=f"{value.value:d}",
            text=f"{value.effect:+.1%}" if value.effect else "best",
            note=f"{value.trials} timed",
            kind="effect",
            title=f"{parameter.name}={value.value:d}: {value.low:+.1%} to {value.high:+.1%}",
            at=scale(value.effect),
            low=scale(value.low) if value.low < value.high else None,
            high=scale(value.high) if value.low < value.high else None,
        )
        for value in parameter.values
    )
    return Lanes(parameter.name, bars, scale(0.0))


def fallen_lanes(entries: Sequence[Entry]) -> Lanes | None:
    """How many candidates were refused or failed, by the kind of reason; None where none was."""
    fallen = [entry for entry in entries if entry.outcome.state in ("refused", "failed")]
    if not fallen:
        return None
    counts = Counter((entry.outcome.kind or entry.outcome.state, entry.outcome.state) for entry in fallen)
    examples = {entry.outcome.kind or entry.outcome.state: entry.outcome.reason for entry in reversed(fallen)}
    scale = Scale(0.0, float(max(counts.values())))
    bars = tuple(
        Bar(kind, f"{count}", f"{count / len(entries):.0%}", state, examples[kind], scale(count))
        for (kind, state), count in counts.most_common()
    )
    return Lanes("refused and failed candidates", bars)


@dataclass(frozen=True)
class Rate:
    """What a kernel reaches of a card's peaks.

    Attributes:
        name: The kernel.
        kind: What it looks like.
        ms: Its time.
        tflops: Effective: the problem's operations over the time.
        of_bound: The least time by the roofline over its time.
    """

    name: str
    kind: str
    ms: float
    tflops: float
    of_bound: float


@dataclass(frozen=True)
class Bound:
    """A problem under its card's roof.

    Attributes:
        roof: The roofline.
        intensity: Operations a byte.
        rates: Of the winner, and of PyTorch's default where that is known.
    """

    roof: Roofline
    intensity: float
    rates: tuple[Rate, ...]


def bound(history: History) -> Bound | None:
    """A problem under its card's roof; None where no time is known."""
    default, ours = _default_and_ours(history)
    if history.emulated or not history.target.gpu or ours is None:
        return None
    roof = roofline(history.problem, history.device)
    times = [("fastest of ours", "winner", ours.median)]
    times += [("PyTorch's default", "peer", default.median)] if default else []
    rates = [Rate(name, kind, ms, roof.flops / ms / _GIGA, roof.bound_ms / ms) for name, kind, ms in times]
    return Bound(roof, roof.flops / (roof.read_bytes + roof.write_bytes), tuple(rates))


def roofline_plot(found: Sequence[tuple[str, Bound]]) -> Plot:
    """Problems under the roof of one card.

    Args:
        found: A label and the bound of each; one or more.
    """
    roof = found[0][1].roof
    ridge = roof.peak_tflops / roof.bandwidth_tb_s
    intensities = [bound.intensity for _, bound in found]
    x = Scale(min(ridge / 4, *intensities, ridge) / 1.5, max(ridge, *intensities) * 3, log=True)
    slowest = min(rate.tflops for _, bound in found for rate in bound.rates)
    least = min(slowest / 1.5, roof.peak_tflops / 3)
    y = Scale(least, roof.peak_tflops * 1.25, _HEIGHT - _MARGIN, _MARGIN, log=True)
    corner = max(x.low, least / roof.bandwidth_tb_s)
    lines = [
        Segment(x(corner), y(corner * roof.bandwidth_tb_s), x(ridge), y(roof.peak_tflops)),
        Segment(x(ridge), y(roof.peak_tflops), 100.0, y(roof.peak_tflops)),
    ]
    points = []
    for label, bound in found:
        for rate in reversed(bound.rates):
            text = f"{label}{rate.name}: {rate.ms:,.3f} ms, {rate.tflops:,.0f} TFLOPS"
            name = "" if len(found) > 1 else rate.name
            points.append(Point(x(bound.intensity), y(rate.tflops), rate.kind, text, label=name))
    return Plot(
        title=f"effective TFLOPS under the roof of {roof.device}",
        x_title="operations a byte, logarithmic",
        x_ticks=x.ticks(_X_TICKS),
        y_title="TFLOPS, logarithmic",
        y_ticks=y.ticks(_Y_TICKS),
        height=_HEIGHT,
        points=tuple(points),
        lines=tuple(lines),
        levels=(Level(y(roof.peak_tflops), "roof", f"peak {roof.peak_tflops:g} TFLOPS", right=True),),
    )
