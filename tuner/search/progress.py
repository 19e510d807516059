"""What a search reports while it runs."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...gen.families import Config, short_form
from .result import Counts

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_INTERVAL_S = 5.0
_SHOWN_WORKERS = 8
_PACE_WINDOW = 20  # candidates: presets and what is stored already have another pace than the rest


class Pace:
    """How quickly candidates are decided."""

    def __init__(self) -> None:
        self._times: deque[float] = deque([time.perf_counter()], maxlen=_PACE_WINDOW + 1)

    def decided(self) -> None:
        """Counts a candidate."""
        self._times.append(time.perf_counter())

    @property
    def per_second(self) -> float | None:
        """Candidates a second, of the last few; None before the first."""
        seconds = self._times[-1] - self._times[0]
        return (len(self._times) - 1) / seconds if seconds > 0 else None

    def left_s(self, candidates: int) -> float | None:
        """How long so many more will take, from now on; None while nothing says it."""
        rate = self.per_second
        if rate is None:
            return None
        return max(0.0, self._times[-1] + candidates / rate - time.perf_counter())


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
        expected_gain: How much less than the best so far the best of the trials that are left is expected to cost,
            relative to it (0.01: 1 %); None where nothing is learned of that.
        preset: The best preset so far and its cost, in the unit of the best's.
        default_cost: That of PyTorch's default backward.
        per_second: Candidates decided a second.
        left_s: Seconds until the last candidate is decided, at this pace; the final race follows.
        workers: What each GPU is at, by its name; None of one that has nothing to do.
    """

    phase: str
    counts: Counts
    total: int
    best: tuple[Config, float] | None = None
    last: tuple[Config, str] | None = None
    emulated: bool = False
    expected_gain: float | None = None
    preset: tuple[str, float] | None = None
    default_cost: float | None = None
    per_second: float | None = None
    left_s: float | None = None
    workers: tuple[tuple[str, str | None], ...] = ()

    def lines(self) -> list[str]:
        """What is found, and how it goes: a line each."""
        counts = self.counts
        ways = [f"measured {counts.measured + counts.stored}"] if not counts.passed else [f"passed {counts.passed}"]
        if counts.decided:
            ways.append(f"refused {counts.refused / counts.decided:.0%}, failed {counts.failed}")
        if self.per_second:
            ways.append(f"{self.per_second:.2g} a second")
        if self.left_s is not None and counts.decided < self.total:
            ways.append(f"{duration(self.left_s)} left")
        if self.expected_gain is not None:
            ways.append(f"{self.expected_gain:.2%} expected of going on")
        going = " | ".join(ways)
        return [going] if counts.passed else [self._found(), going]

    def text(self) -> str:
        """The same in one line, with how many GPUs have something to do where there are several."""
        busy = sum(doing is not None for _, doing in self.workers)
        gpus = [f"{busy} of {len(self.workers)} GPUs busy"] if len(self.workers) > 1 else []
        return " | ".join((*self.lines(), *gpus))

    def worker_lines(self) -> list[str]:
        """What each GPU is at, where there are several: the first few, and how many more there are."""
        if len(self.workers) < 2:
            return []
        shown = [f"  {name}: {'idle' if doing is None else doing}" for name, doing in self.workers[:_SHOWN_WORKERS]]
        more = len(self.workers) - _SHOWN_WORKERS
        return [*shown, f"  … and {more} more"] if more > 0 else shown

    def _found(self) -> str:
        if self.best is None:
            return "no best yet"
        config, cost = self.best
        found = f"best {cost / 1e6:.3f} Mcycles, emulated" if self.emulated else f"best {cost:.3f} ms"
        beside = [f"{self.default_cost / cost:.2f} × PyTorch's default"] if self.default_cost else []
        beside += [f"{self.preset[1] / cost:.2f} × {self.preset[0]}"] if self.preset else []
        compared = f" ({', '.join(beside)})" if beside else ""
        return f"{found}{compared}: {short_form(config)}"


def duration(seconds: float) -> str:
    """For people: ``40 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


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
    """For terminals: a bar, and below it what is found and how it goes."""

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
        self._status.plain = "\n".join((*status.lines(), *status.worker_lines()))

    def notice(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def progress_for(console: Console) -> Progress:
    """A bar on a terminal, lines elsewhere."""
    return BarProgress(console) if console.is_terminal else PlainProgress(console)
