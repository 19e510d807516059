"""What each parameter of a family is worth, as far as the timed candidates tell.

An additive model: the logarithm of a time is a sum of one term for each parameter's value, fitted by ridge regression.
A search times what it expects to be fast, so values are not met equally often, nor beside the same other values: the
medians of what has a value would mix that up with the rest, which the sum takes apart. Interactions are left out, and
what the fit does not explain is told: `FamilyWorth.explained`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...gen.families import FAMILIES, Config
from ...gen.families.base import Value

LEAST_TRIALS = 8
"""Fewer timed candidates of a family tell nothing of a dozen parameters."""

RESAMPLES = 200
COVERED = 0.8
"""The part of the resamples whose effects lie within an interval."""

_PENALTIES = np.logspace(-2, 2, 13)


@dataclass(frozen=True)
class ValueWorth:
    """A value of a parameter.

    Attributes:
        value: The value.
        trials: Timed candidates that have it.
        best: The least cost of one.
        median: Their median cost.
        effect: How much longer a kernel takes with it than with the parameter's best value, all else being equal, by
            the model: 0.03 is 3 %.
        low: Lower end of the effect's interval; below 0 where it may be the faster value.
        high: Upper end.
    """

    value: Value
    trials: int
    best: float
    median: float
    effect: float
    low: float
    high: float


@dataclass(frozen=True)
class ParameterWorth:
    """A parameter of which several values were timed.

    Attributes:
        name: The parameter's.
        meaning: In one sentence.
        values: In the order in which the family declares them.
    """

    name: str
    meaning: str
    values: tuple[ValueWorth, ...]

    @property
    def worth(self) -> float:
        """How much longer the worst of the values takes than the best."""
        return max(value.effect for value in self.values)


@dataclass(frozen=True)
class FamilyWorth:
    """What is known of a family's parameters.

    Attributes:
        family: Its name.
        trials: How many of its candidates were timed.
        parameters: What is worth most first; empty where too few were timed.
        same: Those of which one value alone was timed, with that value.
        explained: The part of the variance of the logarithms of times that the model predicts of candidates that it
            was not fitted to; 0 where it predicts nothing, None where there are too few.
    """

    family: str
    trials: int
    parameters: tuple[ParameterWorth, ...]
    same: tuple[tuple[str, Value], ...]
    explained: float | None


def worths(costs: Sequence[tuple[Config, float]]) -> list[FamilyWorth]:
    """What each parameter is worth, for each family of which something was timed.

    Args:
        costs: Timed configurations with their time, or cycles.
    """
    by_family: dict[str, list[tuple[Config, float]]] = {}
    for config, cost in costs:
        by_family.setdefault(config.family, []).append((config, cost))
    return [_of_family(name, by_family[name]) for name in FAMILIES if name in by_family]


def _of_family(name: str, costs: Sequence[tuple[Config, float]]) -> FamilyWorth:
    parameters = FAMILIES[name].parameters
    met = {
        parameter: _in_order(one.choices, [getattr(config, parameter) for config, _ in costs])
        for parameter, one in parameters.items()
    }
    varied = {parameter: values for parameter, values in met.items() if len(values) > 1}
    same = tuple((parameter, values[0]) for parameter, values in met.items() if len(values) == 1)
    if len(costs) < LEAST_TRIALS or not varied:
        return FamilyWorth(name, len(costs), (), same, None)
    columns = [(parameter, value) for parameter, values in varied.items() for value in values]
    rows = np.array(
        [[getattr(config, parameter) == value for parameter, value in columns] for config, _ in costs], float
    )
    logs = np.log([cost for _, cost in costs])
    penalty, explained = _penalty(rows, logs)
    fitted = dict(zip(columns, _fit(rows, logs, penalty), strict=True))
    random = np.random.default_rng(0)
    draws = [random.integers(len(logs), size=len(logs)) for _ in range(RESAMPLES)]
    resampled = np.array([_fit(rows[draw], logs[draw], penalty) for draw in draws])
    found = []
    for parameter, values in varied.items():
        best = min(values, key=lambda value: fitted[parameter, value])
        reference = resampled[:, columns.index((parameter, best))]
        of_values = []
        for value in values:
            ratios = np.expm1(resampled[:, columns.index((parameter, value))] - reference)
            low, high = np.quantile(ratios, [(1 - COVERED) / 2, (1 + COVERED) / 2])
            having = [cost for config, cost in costs if getattr(config, parameter) == value]
            effect = float(np.expm1(fitted[parameter, value] - fitted[parameter, best]))
            of_values.append(
                ValueWorth(
                    value,
                    len(having),
                    min(having),
                    statistics.median(having),
                    effect,
                    min(float(low), effect),
                    max(float(high), effect),
                )
            )
        found.append(ParameterWorth(parameter, parameters[parameter].meaning, tuple(of_values)))
    found.sort(key=lambda one: one.worth, reverse=True)
    return FamilyWorth(name, len(costs), tuple(found), same, explained)


def _in_order(choices: Sequence[Value], met: Sequence[Value]) -> list[Value]:
    """The values that were met, as they are declared; what is declared no more comes last."""
    return [value for value in dict.fromkeys([*choices, *met]) if value in met]


def _penalty(rows: NDArray[np.float64], logs: NDArray[np.float64]) -> tuple[float, float]:
    """The penalty that predicts left-out candidates best, and the part of their variance that it predicts."""
    from sklearn.linear_model import RidgeCV

    model = RidgeCV(_PENALTIES).fit(rows, logs)  # each candidate is left out once
    variance = float(np.var(logs))
    explained = 1 + float(model.best_score_) / variance if variance else 0.0
    return float(model.alpha_), max(0.0, explained)


def _fit(rows: NDArray[np.float64], logs: NDArray[np.float64], penalty: float) -> NDArray[np.float64]:
    """The terms of ridge regression; their mean over the candidates lies in the intercept, which nobody needs."""
    centred = rows - rows.mean(axis=0)
    gram = centred.T @ centred + penalty * np.eye(rows.shape[1])
    found: NDArray[np.float64] = np.linalg.solve(gram, centred.T @ (logs - logs.mean()))
    return found
