"""One HTML page with everything in it: no file beside it, nothing from a network, no script but its own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import jinja2

from ... import __version__
from ...db.records import EmulatedBest, StoredSearch, Winner
from ...gen.families import short_form
from ..search.progress import duration
from ..search.rows import cell
from .charts import Lanes, Plot
from .figures import (
    Bound,
    best_preset,
    bound,
    convergence,
    cost_text,
    fallen_lanes,
    key_of,
    race_lanes,
    roofline_plot,
    worth_lanes,
)
from .history import Entry, History
from .worth import COVERED, LEAST_TRIALS, RESAMPLES, FamilyWorth, worths

_TELLING = 0.2

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Figure:
    """A number that sums a section up.

    Attributes:
        value: The number.
        name: What it is.
    """

    value: str
    name: str


@dataclass(frozen=True)
class TrialRow:
    """A row of the table of candidates. Numbers are None where they are not known.

    Attributes:
        key: See `figures.key_of`.
        number: Its place in the order of decisions.
        short: The configuration, for people.
        config: Its id.
        family: Its family.
        outcome: ``measured``, ``refused``, ``failed`` or ``passed``.
        best: Whether it is the winner's configuration.
        cost: What ranks it: ms, or millions of cycles.
        interval: Of its time, in words.
        beside: How much more it costs than the best of the table.
        predicted: What the cost model says, in the unit of `cost`.
        registers: A thread's.
        spill_bytes: A thread's.
        shared_kib: A block's.
        max_error: The largest relative L2 error.
        reason: Why it was refused or failed, with its kind.
    """

    key: str
    number: int | None
    short: str
    config: str
    family: str
    outcome: str
    best: bool
    cost: float | None
    interval: str
    beside: float | None
    predicted: float | None
    registers: int | None
    spill_bytes: int | None
    shared_kib: float | None
    max_error: float | None
    reason: str


@dataclass(frozen=True)
class FamilyPart:
    """What a family's parameters are worth, as charts."""

    worth: FamilyWorth
    lanes: tuple[tuple[str, Lanes], ...]
    """Each parameter's meaning and chart."""
    explained: str
    tells: bool
    """Whether the model explains enough for its effects to mean something."""
    same: str


@dataclass(frozen=True)
class Section:
    """All that the page shows of a problem on a target; a chart is None where there is nothing for it."""

    anchor: str
    history: History
    figures: tuple[Figure, ...]
    winner: str
    winner_id: str
    convergence: Plot | None
    race: Lanes | None
    families: tuple[FamilyPart, ...]
    fallen: Lanes | None
    bound: Bound | None
    roofline: Plot | None
    trials: tuple[TrialRow, ...]
    searches: tuple[tuple[str, ...], ...]


SEARCH_HEADINGS = ("began", "ended", "sampler", "seed", "decided", "where", "versions")
"""Of `Section.searches`."""


def render_page(histories: Sequence[History], database: str, *, now: datetime | None = None) -> str:
    """The page: of one history a section, of several an index before their sections.

    Args:
        histories: What is shown; one or more.
        database: Where they come from, for people.
        now: When the page is made; UTC.
    """
    sections = [_section(f"s{number}", history) for number, history in enumerate(histories, start=1)]
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        sections=sections,
        rooflines=_rooflines(sections) if len(sections) > 1 else [],
        database=database,
        made=f"{now or datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        version=__version__,
        cost_text=cost_text,
        search_headings=SEARCH_HEADINGS,
        covered=COVERED,
        resamples=RESAMPLES,
        least_trials=LEAST_TRIALS,
        style=style,
        script=script,
        style_hash=_csp_hash(style),
        script_hash=_csp_hash(script),
    )


def _csp_hash(text: str) -> str:
    """How a content security policy names the one text that it allows."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _rooflines(sections: Sequence[Section]) -> list[tuple[str, Plot]]:
    """A chart for each card with all of its problems."""
    by_card: dict[str, list[tuple[str, Bound]]] = {}
    for section in sections:
        if section.bound and not section.history.target.limits:
            label = f"{section.history.problem.label}, "
            by_card.setdefault(section.bound.roof.device, []).append((label, section.bound))
    return [(card, roofline_plot(found)) for card, found in by_card.items() if len(found) > 1]


def _section(anchor: str, history: History) -> Section:
    costs = ((entry.config, entry.outcome.cost) for entry in history.entries)
    timed = [(config, cost) for config, cost in costs if cost]
    under_roof = bound(history)
    winner = history.winner.config if history.winner else None
    return Section(
        anchor=anchor,
        history=history,
        figures=tuple(_figures(history, under_roof)),
        winner=short_form(winner) if winner else "",
        winner_id=winner.id if winner else "",
        convergence=convergence(history),
        race=race_lanes(history),
        families=tuple(map(_family, sorted(worths(timed), key=lambda one: -(one.explained or 0.0)))),
        fallen=fallen_lanes(history.entries),
        bound=under_roof,
        roofline=roofline_plot([("", under_roof)]) if under_roof else None,
        trials=tuple(_rows(history)),
        searches=tuple(map(_search, history.searches)),
    )


def _figures(history: History, under_roof: Bound | None) -> list[Figure]:
    found, winner, entries = [], history.winner, history.entries
    preset = best_preset(history)
    if isinstance(winner, Winner):
        found.append(Figure(f"{winner.median_ms:,.3f} ms", f"{winner.low_ms:,.3f} to {winner.high_ms:,.3f}"))
        if winner.advantage:
            found.append(Figure(f"{winner.advantage:.2f} ×", "as fast as PyTorch's default"))
    elif isinstance(winner, EmulatedBest):
        found.append(Figure(cost_text(winner.cycles, history), "emulated"))
    costs = [entry.outcome.cost for entry in entries if entry.outcome.cost]
    if preset and preset.outcome.cost:
        found.append(
            Figure(f"{preset.outcome.cost / min(costs):.2f} ×", f"as fast as {preset.row.kernel}, the best preset")
        )
    if under_roof:
        found.append(Figure(f"{under_roof.rates[0].of_bound:.0%}", f"of the {under_roof.roof.bound} roof"))
    found.append(Figure(f"{len(entries):,}", "candidates"))
    refused = sum(entry.outcome.state == "refused" for entry in entries)
    failed = sum(entry.outcome.state == "failed" for entry in entries)
    if entries:
        found.append(Figure(f"{refused / len(entries):.0%}", f"refused; {failed} failed"))
    return found


def _family(worth: FamilyWorth) -> FamilyPart:
    explained = "" if worth.explained is None else f"{worth.explained:.0%}"
    same = ", ".join(f"{name}={value:d}" for name, value in worth.same)
    lanes = tuple((parameter.meaning, worth_lanes(parameter)) for parameter in worth.parameters)
    return FamilyPart(worth, lanes, explained, (worth.explained or 0.0) >= _TELLING, same)


def _rows(history: History) -> list[TrialRow]:
    unit = 1e6 if history.emulated else 1.0
    least = min((entry.outcome.cost for entry in history.entries if entry.outcome.cost), default=None)
    return [_row(entry, history, unit, least) for entry in history.entries]


def _row(entry: Entry, history: History, unit: float, least: float | None) -> TrialRow:
    row, outcome = entry.row, entry.outcome
    predicted = row.predicted_cycles if history.emulated else row.predicted_ms
    shared = row.shared_memory_bytes
    return TrialRow(
        key=key_of(entry),
        number=entry.number,
        short=short_form(entry.config),
        config=entry.config.id,
        family=entry.config.family,
        outcome="passed" if outcome.state == "unmeasured" else outcome.state,
        best=history.winner is not None and history.winner.config == entry.config,
        cost=outcome.cost / unit if outcome.cost else None,
        interval=f"{row.timing.low_ms:,.3f} to {row.timing.high_ms:,.3f}" if row.timing else "",
        beside=outcome.cost / least - 1 if outcome.cost and least else None,
        predicted=predicted / unit if predicted else None,
        registers=row.registers,
        spill_bytes=row.spill_bytes,
        shared_kib=None if shared is None else shared / 1024,
        max_error=row.max_error,
        reason=f"{outcome.kind}: {outcome.reason}" if outcome.kind else outcome.reason,
    )


def _search(search: StoredSearch) -> tuple[str, ...]:
    record = search.record
    ended = "no: it runs, or was killed"
    if search.ended_at:
        ended = f"{search.status} after {duration((search.ended_at - search.started_at).total_seconds())}"
    versions = {
        "bwdtune": record.bwdtune,
        "driver": record.driver,
        "nvcc": record.toolkit,
        "torch": record.torch,
        "optuna": record.optuna,
    }
    card = f" {record.gpu_uuid}" if record.gpu_uuid else ""
    power = f", {record.power_limit_w:.0f} W" if isinstance(record.power_limit_w, float) else ""
    return (
        f"{search.started_at:%Y-%m-%d %H:%M}",
        f"{ended}: {search.error}" if search.error else ended,
        record.sampler,
        f"{record.seed}",
        cell(search.decided, "{}"),
        f"{record.host}{card}{power}",
        ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    )
