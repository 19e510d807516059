"""How a search tells of itself while it runs, and where its time goes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...gen.families import Config, short_form
from .result import Counts

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_INTERVAL_S = 5.0


class PhaseClock:
    """Splits wall time into named phases; what lies in none of them is overhead."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds = {"compile": 0.0, "verify": 0.0, "time": 0.0}

    def add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] += seconds

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start

    def seconds(self) -> dict[str, float]:
        """By phase, with ``overhead`` and ``total``."""
        total = self.elapsed_s()
        return {**self._seconds, "overhead": total - sum(self._seconds.values()), "total": total}


@dataclass(frozen=True)
class Status:
    """Where a search stands.

    Attributes:
        phase: What it does now.
        counts: See `Counts`.
        total: Candidates that this search may decide.
        best: The best configuration so far and its time in ms, or emulated cycles; or None.
        last: The candidate that was just decided and what became of it.
        emulated: Whether cycles rank.
    """

    phase: str
    counts: Counts
    total: int
    best: tuple[Config, float] | None = None
    last: tuple[Config, str] | None = None
    emulated: bool = False

    def text(self) -> str:
        counts = self.counts
        fallen = f"refused {counts.refused}, failed {counts.failed}"
        if counts.passed:
            return f"passed {counts.passed}, {fallen}"
        best = "no best yet"
        if self.best:
            config, cost = self.best
            cost_text = f"{cost / 1e6:.3f} Mcycles, emulated," if self.emulated else f"{cost:.3f} ms"
            best = f"best {cost_text} {short_form(config)}"
        return f"{best} | measured {counts.measured + counts.stored}, {fallen}"


class Progress(Protocol):
    """Tells people how a search goes."""

    def __enter__(self) -> Progress: ...

    def __exit__(self, *exception: object) -> None: ...

    def update(self, status: Status) -> None:
        """Called whenever something was decided or another phase began."""

    def notice(self, text: str) -> None:
        """Something that a person should read now."""


class Silent:
    """Tells nobody."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, status: Status) -> None:
        pass

    def notice(self, text: str) -> None:
        pass


class PlainProgress:
    """Lines for logs: each failure as it happens, and where it stands every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told = 0.0
        self._phase = ""

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, status: Status) -> None:
        if status.last and status.last[1]:
            self.notice(f"{short_form(status.last[0])}: {status.last[1]}")
        now = time.monotonic()
        if (
            status.phase != self._phase
            or now - self._told >= _PLAIN_INTERVAL_S
            or status.counts.decided == status.total
        ):
            self._told, self._phase = now, status.phase
            self.notice(f"{status.phase} {status.counts.decided}/{status.total}: {status.text()}")

    def notice(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class BarProgress:
    """For terminals: a bar, and below it the best so far and what fell."""

    def __init__(self, console: Console) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        text = TextColumn("{task.description}", markup=False)
        self._bar = Bar(SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self._task = self._bar.add_task("starting", total=None)
        self._status = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._bar, self._status), console=console, refresh_per_second=5)
        self._console = console

    def __enter__(self) -> BarProgress:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def update(self, status: Status) -> None:
        if status.last and status.last[1]:
            self.notice(f"{short_form(status.last[0])}: {status.last[1]}")
        self._bar.update(self._task, description=status.phase, total=status.total, completed=status.counts.decided)
        self._status.plain = status.text()

    def notice(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def progress_for(console: Console) -> Progress:
    """A bar on a terminal, lines elsewhere."""
    return BarProgress(console) if console.is_terminal else PlainProgress(console)
