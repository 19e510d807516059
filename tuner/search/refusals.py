"""Predicts which configurations compile: a probability, learned from those that did and those that did not.

ptxas spills, or serializes wgmma, when registers are short. A lower bound of the registers that a thread needs is known
in advance, and so is how many it can have. The difference decides most, the values of the parameters some of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from ...gen.device import Device
from ...gen.families import FAMILIES, Config
from ...gen.problem import Problem
from .encoding import one_hot, places, sizes

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

Floats = NDArray[np.float64]

# Of a card's registers a thread: a feature each says how near to none are left.
_REACHES = np.array([8, 16, 32, 64, 128])
_DERIVED = len(_REACHES) + 3  # features beside the choices of parameters
_STRENGTH = 3.0  # of these, beside that of a choice
_SCALE_OF_LEFT = 32.0

# While nothing was refused or nothing passed: half of those fail that have none left. Seen in the recorded sweeps.
_LOST_AT_NONE, _REACH = 0.5, 8.0


_NEVER = 0.05  # of the choices of parameters no kernel compiles with: what is expected before any outcome


class Refusals:
    """The chance of configurations to pass."""

    def __init__(self) -> None:
        self._model: LogisticRegression | None = None
        self._at_most: Floats | None = None

    def know(self, passed: Floats, refused: Floats) -> None:
        """Takes what passed and what did not, in the place of what was known before.

        Args:
            passed: Rows of `features`.
            refused: The same.
        """
        self._model = None
        self._at_most = _at_most(passed[:, :-_DERIVED], refused[:, :-_DERIVED])
        if len(passed) and len(refused):
            from sklearn.linear_model import LogisticRegression

            model = LogisticRegression(C=0.3, max_iter=500, solver="liblinear")
            self._model = model.fit(np.concatenate([passed, refused]), [1] * len(passed) + [0] * len(refused))

    def chances(self, asked: Floats) -> Floats:
        """Of each row of `features` the chance to pass."""
        if self._model is None:
            found: Floats = 1 - _LOST_AT_NONE * np.exp(-asked[:, -1] * _SCALE_OF_LEFT / _REACH)
        else:
            found = expit(asked @ self._model.coef_[0] + self._model.intercept_[0])
        if self._at_most is not None:
            found = np.minimum(found, np.where(asked[:, :-_DERIVED] > 0, self._at_most, 1.0).min(axis=1))
        return found


def _at_most(passed: Floats, refused: Floats) -> Floats:
    """Of each choice the chance to pass at most, by those that have it.

    A choice with which nothing has passed may be one with which nothing does: a regression that weighs all choices
    learns that slowly. If it is none, its configurations pass as often as all do.
    """
    share = (len(passed) + 1) / (len(passed) + len(refused) + 2)
    by_chance = (1 - _NEVER) * (1 - share) ** refused.sum(axis=0)
    never_passed: Floats = np.where(passed.any(axis=0), 1.0, share * by_chance / (_NEVER + by_chance))
    return np.where(refused.any(axis=0), never_passed, 1.0)


def features(problem: Problem, device: Device, configs: Sequence[Config]) -> Floats:
    """A row each: a 1 for its family and for each choice of it, what a block needs, and how short registers are."""
    widths = [sum(sizes(family)) for family in FAMILIES]
    rows = places(configs)
    choices = np.zeros((len(configs), len(FAMILIES) + sum(widths)))
    choices[np.arange(len(configs)), rows[:, 0]] = 1.0
    start = len(FAMILIES)
    for code, (family, width) in enumerate(zip(FAMILIES, widths, strict=True)):
        members = np.flatnonzero(rows[:, 0] == code)
        choices[members, start : start + width] = one_hot(family, rows[members])
        start += width
    needs = [config.estimate(problem) for config in configs]
    registers = np.array([one.registers for one in needs], dtype=np.float64)
    memory = np.array([one.shared_memory_bytes for one in needs], dtype=np.float64)
    left = np.array([config.register_limit(device) for config in configs]) - registers
    short = np.maximum(0.0, 1 - left[:, None] / _REACHES)
    scaled = [(registers - 200) / 30, (memory - 100_000) / 50_000]
    return np.column_stack([choices, *scaled, _STRENGTH * short, left / _SCALE_OF_LEFT])
