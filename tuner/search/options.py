"""The options of a search. Cheap to import, so that wrong input is reported at once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ...gen.emulation import EMULATED_CARDS
from ...gen.errors import UsageError
from ..lab.timing import TimingStyle

SAMPLERS = ("learned", "tpe", "random", "exhaustive")

DEFAULT_TRIALS = 60


@dataclass(frozen=True)
class SearchOptions:
    """What a person chooses about a search.

    Attributes:
        sampler: One of ``SAMPLERS``.
        seed: Seeds the sampler; None draws one, which the result tells.
        trials: Candidates to decide.
        time_s: After so many seconds no further candidate is begun; the final race still runs.
        limits: A card whose limits candidates keep to: a key of `gen.emulation.EMULATED_CARDS`, or None.
        emulate: A card whose pace candidates are slowed to, and whose limits they keep to: such a key, or None. They
            are then ranked by cycles.
        timing: How candidates are timed: see `TimingStyle`.
        without_head_start: Withhold presets, shipped configurations and all that won in the database: they are no part
            of the space, and do not race.
        min_gain: The learned sampler proposes no further candidate when those that are left are expected to gain less,
            relative to the best so far (0.001: 0.1 %); 0 goes on to the last trial.

    Raises:
        UsageError: One of them is impossible.
    """

    sampler: str = "learned"
    seed: int | None = None
    trials: int = DEFAULT_TRIALS
    time_s: float | None = None
    limits: str | None = None
    emulate: str | None = None
    timing: TimingStyle = field(default_factory=TimingStyle)
    without_head_start: bool = False
    min_gain: float = 0.001

    @property
    def within(self) -> str | None:
        """The card whose limits candidates keep to; None for the limits of the card that runs."""
        return self.emulate or self.limits

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS:
            raise UsageError(f"unknown sampler {self.sampler!r}: use one of {', '.join(SAMPLERS)}")
        refuse_unknown_cards(self.limits, self.emulate)
        if self.trials < 1:
            raise UsageError(f"trials is {self.trials}: it must be at least 1")
        if self.time_s is not None and not 0 < self.time_s <= threading.TIMEOUT_MAX:
            raise UsageError(f"time is {self.time_s}: it must be a positive number of seconds, or left out")
        if not 0 <= self.min_gain < 1:
            raise UsageError(f"min_gain is {self.min_gain}: it must be at least 0 and less than 1")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise UsageError(f"seed is {self.seed}: it must lie between 0 and {2**32 - 1}")


def refuse_unknown_cards(limits: str | None, emulate: str | None) -> None:
    """Refuses the name of a card that no search can keep to or emulate.

    Raises:
        UsageError: With the names that there are.
    """
    known = ", ".join(EMULATED_CARDS)
    if limits is not None and limits not in EMULATED_CARDS:
        raise UsageError(f"unknown limits {limits!r}: use {known}")
    if emulate is not None and emulate not in EMULATED_CARDS:
        raise UsageError(f"unknown card to emulate {emulate!r}: use {known}")
