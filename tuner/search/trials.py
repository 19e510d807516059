"""A decided candidate with all that is known of it, as the JSON of a search and a report list it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...gen.device import Device
from ...gen.families import short_form
from ...gen.problem import Problem
from .proposals import Outcome
from .rows import Row


@dataclass(frozen=True)
class Trial:
    """A candidate that was decided.

    Attributes:
        number: Its place in the order of decisions, from 1.
        row: Its configuration and figures.
        outcome: What became of it.
        stored: Whether a stored result answered it.
        after_s: Seconds from the beginning of the search to the decision.
    """

    number: int
    row: Row
    outcome: Outcome
    stored: bool
    after_s: float

    def to_dict(self, problem: Problem, device: Device) -> dict[str, Any]:
        """The JSON of a trial."""
        figures = self.row.to_dict(problem, device)
        del figures["ratio_to_winner"], figures["note"], figures["emulate"]
        outcome = self.outcome
        return {
            "number": self.number,
            "short": short_form(self.row.config) if self.row.config else "",
            "outcome": "passed" if outcome.state == "unmeasured" else outcome.state,
            "kind": outcome.kind or None,
            "reason": outcome.reason,
            "signal": outcome.fault.signal if outcome.fault else "",
            "stored": self.stored,
            "after_s": self.after_s,
            "cost": outcome.cost,
            **figures,
        }
