"""What other problems and cards have shown: outcomes that a search begins with.

By how much kernels differ from their predicted times is much the same for problems that are alike: the differences
between the configurations of one problem let expect those of another, the less the further the two are apart. What a
compiler refuses depends on the kind of problem and on the target alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ...gen.device import Device
from ...gen.families import Config
from ...gen.problem import BIAS, FLAGS, Problem, distance
from .cost_model import predict
from .encoding import places
from .residual import feature_sizes, features

Floats = NDArray[np.float64]

MOST = 64
"""Outcomes of others that a family's residual begins with. They cost each proposal time."""

# How far problems and cards are apart, in the unit of `gen.problem.distance`: a doubling of a length. They are guesses;
# how quickly the likeness falls with the distance is learned, for each family.
_OTHER_CONDITIONS = 2.0  # the same problem on the same card under another driver, say
_OTHER_DTYPE = 2.0
_OTHER_MASK = 6.0
_OTHER_FEATURE = 4.0
_HEAD_DIM_DOUBLED = 10.0
_OTHER_CARD = 4.0
_OTHER_TARGET = 20.0


@dataclass(frozen=True)
class Outcomes:
    """What was found of a problem on a card.

    Attributes:
        problem: The problem.
        device: The card.
        costs: Times, in a unit of their own.
        compiled: Whether configurations came through the compilers, for the limits that were kept to.
        limits: The card whose limits those were, or None.
    """

    problem: Problem
    device: Device
    costs: Mapping[Config, float] = field(default_factory=dict)
    compiled: Mapping[Config, bool] = field(default_factory=dict)
    limits: str | None = None

    def without(self, withheld: Collection[Config]) -> Outcomes:
        """The same, but for some configurations."""
        return replace(
            self,
            costs={config: cost for config, cost in self.costs.items() if config not in withheld},
            compiled={config: passes for config, passes in self.compiled.items() if config not in withheld},
        )


@dataclass(frozen=True)
class KnownResiduals:
    """What others have shown of a family's residual.

    Attributes:
        rows: (n, columns) configurations, as `residual.features` has them.
        residuals: (n,) logarithms of measured over predicted times, each about the median of its problem.
        problems: (n,) places in `History.distances`; 0 is the problem that is searched.
    """

    rows: Floats
    residuals: Floats
    problems: NDArray[np.int64]

    def none(self) -> KnownResiduals:
        """The first none of them."""
        return KnownResiduals(self.rows[:0], self.residuals[:0], self.problems[:0])


class History:
    """Outcomes of others, as a learner takes them.

    Args:
        problem: What is searched.
        device: On which card.
        others: What was found elsewhere. Those that are too far away, or too many, are left out.
        limits: The card whose limits are kept to, or None.
        emulate: The card whose pace is kept to: the costs are cycles at that.

    Attributes:
        distances: (p, p) how far apart problems are; the first is the one that is searched.
        passed: Configurations that came through the compilers, for this kind of problem and this target.
        refused: Those that did not.
    """

    def __init__(
        self,
        problem: Problem,
        device: Device,
        others: Sequence[Outcomes] = (),
        *,
        limits: str | None = None,
        emulate: str | None = None,
    ) -> None:
        others = sorted(others, key=lambda one: apart((problem, device), (one.problem, one.device)))
        where = [(problem, device), *((one.problem, one.device) for one in others)]
        self.distances = np.array([[apart(one, other) for other in where] for one in where])
        self.distances += _OTHER_CONDITIONS * (1 - np.eye(len(where)))
        self._residuals = [_residuals(one, emulate) for one in others]
        self._others = others
        same = [
            one
            for one in others
            if one.problem.kernel_spec == problem.kernel_spec
            and one.device.arch == device.arch
            and one.limits == limits
        ]
        compiled = {config: passes for one in reversed(same) for config, passes in one.compiled.items()}
        self.passed = tuple(config for config, passes in compiled.items() if passes)
        self.refused = tuple(config for config, passes in compiled.items() if not passes)

    def residuals(self, family: str) -> KnownResiduals:
        """What is known of a family: of the nearest problems first, and in each from its quickest to its slowest."""
        rows = [np.zeros((0, sum(feature_sizes(family))))]
        values: list[float] = []
        problems: list[int] = []
        for place, (other, residuals) in enumerate(zip(self._others, self._residuals, strict=True), 1):
            mine = [config for config in sorted(residuals, key=other.costs.__getitem__) if config.family == family]
            left = MOST - len(values)
            room = (left + 1) // 2 if place < len(self._others) else left
            if len(mine) > room:
                mine = [mine[round(number)] for number in np.linspace(0, len(mine) - 1, room)]
            if mine:
                rows.append(features(other.problem, other.device, mine, places(mine)))
                values += [residuals[config] for config in mine]
                problems += [place] * len(mine)
        return KnownResiduals(np.concatenate(rows), np.array(values), np.array(problems, dtype=np.int64))


def apart(one: tuple[Problem, Device], other: tuple[Problem, Device]) -> float:
    """How far apart two problems, each on a card, are, in doublings of a length. It is a metric."""
    (a, mine), (b, its) = one, other
    return (
        distance(a, b)
        + _OTHER_DTYPE * (a.dtype != b.dtype)
        + _OTHER_MASK * (a.mask != b.mask)
        + _OTHER_FEATURE * sum(getattr(a, name) != getattr(b, name) for name in (*FLAGS, *BIAS))
        + _HEAD_DIM_DOUBLED * (_doublings(a.head_dim, b.head_dim) + _doublings(a.head_dim_v, b.head_dim_v)) / 2
        + _OTHER_CARD * (mine.name != its.name)
        + _OTHER_TARGET * (mine.arch != its.arch)
    )


def _doublings(one: int, other: int) -> float:
    return abs(math.log2(one / other))


def _residuals(outcomes: Outcomes, emulate: str | None) -> dict[Config, float]:
    found = {
        config: math.log(cost / predict(outcomes.problem, config, outcomes.device, emulate=emulate).cycles)
        for config, cost in outcomes.costs.items()
    }
    median = float(np.median(list(found.values()))) if found else 0.0
    return {config: residual - median for config, residual in found.items()}
