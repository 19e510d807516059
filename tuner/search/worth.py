"""Decides when a search ends by itself."""

from __future__ import annotations


class Worth:
    """Whether going on can be expected to gain something.

    A single estimate may be low because the learner is sure of something that the next outcomes contradict. So a search
    ends after as many low ones in a row as it has candidates in flight: their outcomes have come in since the first.

    Args:
        min_gain: Less than that, relative to the best so far, is low; 0 goes on for ever.
        patience: How many in a row.
    """

    def __init__(self, min_gain: float, patience: int) -> None:
        self._min_gain, self._patience = min_gain, patience
        self._low = 0

    def go_on(self, expected_gain: float | None) -> bool:
        """Takes the next estimate; None where nothing is learned of that."""
        self._low = self._low + 1 if expected_gain is not None and expected_gain < self._min_gain else 0
        return self._low < self._patience
