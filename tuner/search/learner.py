"""What a search has learned: how far times are from the predicted ones, and which configurations ptxas spills.

The cost model is the prior. What it does not see (phase effects, what ptxas makes of a kernel) is learned from
outcomes: a Gaussian process over the parameters for the logarithm of measured over predicted, and a logistic regression
for refusals. The next candidate is the one with the largest expected improvement, weighted by its chance to pass the
compiler gate (Jones et al. 1998, "Efficient Global Optimization"; Gardner et al. 2014 for the weight).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...gen.device import Device
from ...gen.families import FAMILIES, Config
from ...gen.problem import Problem
from .cost_model import predict

if TYPE_CHECKING:
    from sklearn.gaussian_process import GaussianProcessRegressor

Floats = NDArray[np.float64]

POOL = 12_288
"""Configurations that are judged at each step: drawn from a larger space, and joined by neighbours of the best."""

_SHORTLIST = 1_024  # of the pool, by the linear part of the model: the Gaussian process judges these alone

_FORESEEN = 60  # trials that the expected gain is computed of: what comes later adds little
_FUTURES = 256  # that are drawn for it
_JUDGED_BY = 6  # outcomes, before they say how sure the process may be of itself

# Standard deviations of the logarithm of time. Chosen by `tuner replay` over the recorded sweeps.
_PARAMETER_EFFECT = 0.05
_INTERACTION = 0.08
_FAMILY_OFFSET = 0.10
_NOISE = 0.012
_INTERACTION_RANGE = 1.7  # configurations whose parameters differ in 2 x 1.7^2 places have little in common


@dataclass(frozen=True)
class Choice:
    """What a learner would try next.

    Attributes:
        index: The configuration's.
        expected_gain: How much less than the best so far the best of the trials that are left is expected to cost,
            relative to it; None while nothing is measured.
    """

    index: int
    expected_gain: float | None


class Learner:
    """Chooses the next configuration from all that is known. The same outcomes and seed give the same choices.

    Args:
        problem: What is computed.
        configs: The valid configurations.
        device: The card that runs them.
        seed: Of the draw of the pool.
        emulate: The card whose pace is kept to: see `cost_model.predict`.
    """

    def __init__(
        self,
        problem: Problem,
        configs: Sequence[Config],
        device: Device,
        *,
        seed: int | None = None,
        emulate: str | None = None,
    ) -> None:
        self._problem, self._device, self._emulate = problem, device, emulate
        self._configs = configs
        self._features, self._with_resources = _Features(problem), _Features(problem, resources=True)
        self._prior: dict[int, float] = {}
        drawn = np.arange(len(configs))
        if len(configs) > POOL:
            drawn = np.sort(np.random.default_rng(seed).choice(drawn, POOL, replace=False))
        self._pool = list(map(int, drawn))

    def predicted(self, index: int) -> float:
        """The logarithm of the cycles that the cost model predicts."""
        if index not in self._prior:
            cycles = predict(self._problem, self._configs[index], self._device, emulate=self._emulate).cycles
            self._prior[index] = math.log(cycles)
        return self._prior[index]

    def choose(
        self,
        untried: Set[int],
        measured: Mapping[int, float],
        refused: Sequence[int],
        pending: Sequence[int],
        left: int = 1,
    ) -> Choice:
        """The configuration to try next.

        Args:
            untried: Indices of what may be chosen; not empty.
            measured: Costs (ms, cycles or a ratio) by index.
            refused: What the compiler gate refused.
            pending: What was proposed and has no outcome yet.
            left: Trials that are left, this one included.
        """
        pool = np.array([index for index in self._pool if index in untried] or sorted(untried)[:POOL])
        prior = np.array([self.predicted(index) for index in pool])
        known = np.array(list(measured), dtype=np.int64)
        offsets = np.log([measured[index] for index in known]) - [self.predicted(index) for index in known]
        shift = float(np.median(offsets)) if len(known) else 0.0
        rows, residuals = self._matrix(known), offsets - shift
        shortlist = self._shortlist(pool, prior, rows, residuals)
        mean, deviation, process = self._judge(shortlist, rows, residuals, pending)
        expected = np.array([self.predicted(index) for index in shortlist]) + shift
        mean += expected
        if measured:
            worth = _expected_improvement(mean, deviation, math.log(min(measured.values())))
        else:  # nothing to improve on yet: the lowest bound, which spreads what is tried at once
            worth = np.exp(0.5 * deviation - mean)
        chances = self._chance_to_compile(shortlist, measured, refused)
        best_first = np.argsort(-worth * chances, kind="stable")
        gain = None
        if measured:
            likeliest = best_first[: min(left, _FORESEEN)]
            mean, covariance = process.predict(self._matrix(shortlist[likeliest]), return_cov=True)
            mean += expected[likeliest] - math.log(min(measured.values()))
            gain = _expected_gain(mean, covariance * _surprise(process) ** 2, chances[likeliest])
        return Choice(int(shortlist[best_first[0]]), gain)

    def add_neighbours(self, index: int, neighbours: Sequence[int]) -> None:
        """Has the pool take in what differs from a new best in one parameter."""
        self._pool = list(dict.fromkeys([*self._pool, *neighbours]))

    def _matrix(self, indices: NDArray[np.int64]) -> Floats:
        return self._features.matrix([self._configs[index] for index in indices])

    def _shortlist(self, pool: NDArray[np.int64], prior: Floats, rows: Floats, residuals: Floats) -> NDArray[np.int64]:
        if len(pool) <= _SHORTLIST or not len(rows):
            return pool[np.argsort(prior, kind="stable")[:_SHORTLIST]]
        from sklearn.linear_model import Ridge

        linear = Ridge(alpha=(_NOISE / _PARAMETER_EFFECT) ** 2, fit_intercept=False).fit(rows, residuals)
        return pool[np.argsort(prior + linear.predict(self._matrix(pool)), kind="stable")[:_SHORTLIST]]

    def _judge(
        self,
        shortlist: NDArray[np.int64],
        rows: Floats,
        residuals: Floats,
        pending: Sequence[int],
    ) -> tuple[Floats, Floats, GaussianProcessRegressor]:
        """Mean and standard deviation of the residual, and the process that knows all but what is pending.

        What is pending counts as if it came out as expected: its mean teaches nothing, but nobody need look there.
        """
        from sklearn.gaussian_process import GaussianProcessRegressor

        wanted, ahead = self._matrix(shortlist), self._matrix(np.array(pending, dtype=np.int64))
        process = GaussianProcessRegressor(_kernel(), alpha=_NOISE**2, optimizer=None)
        if len(rows):
            process.fit(rows, residuals)
        mean, deviation = process.predict(wanted, return_std=True)
        if len(ahead):
            believed = np.concatenate([residuals, np.atleast_1d(process.predict(ahead))])
            fuller = GaussianProcessRegressor(_kernel(), alpha=_NOISE**2, optimizer=None)
            fuller.fit(np.array([*rows, *ahead]), believed)
            _, deviation = fuller.predict(wanted, return_std=True)
        # Of a single row scikit-learn's unfitted process makes a scalar.
        return np.atleast_1d(mean), np.atleast_1d(deviation * _surprise(process)), process

    def _chance_to_compile(
        self, shortlist: NDArray[np.int64], measured: Mapping[int, float], refused: Sequence[int]
    ) -> Floats:
        lost = [self._configs[index] for index in refused]
        passed = [self._configs[index] for index in measured]
        if not lost or not passed:
            return np.ones(len(shortlist))
        asked = [self._configs[index] for index in shortlist]
        return _chances(self._with_resources, passed, lost, asked)


def compile_chances(
    problem: Problem, passed: Sequence[Config], refused: Sequence[Config], asked: Sequence[Config]
) -> Floats:
    """The chance of each configuration to pass the compiler gate, learned from those that did and did not.

    Args:
        problem: What is computed.
        passed: Configurations that passed; one or more.
        refused: Configurations that spilled too much; one or more.
        asked: Those to judge.
    """
    return _chances(_Features(problem, resources=True), passed, refused, asked)


def _chances(
    features: _Features, passed: Sequence[Config], refused: Sequence[Config], asked: Sequence[Config]
) -> Floats:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=0.3, max_iter=500)
    model.fit(features.matrix([*passed, *refused]), [1] * len(passed) + [0] * len(refused))
    found: Floats = model.predict_proba(features.matrix(asked))[:, 1]
    return found


class _Features:
    """A configuration as numbers: each choice of its family's parameters is a 0 or 1.

    Args:
        problem: What is computed.
        resources: Whether estimated registers and shared memory follow.
    """

    def __init__(self, problem: Problem, *, resources: bool = False) -> None:
        self._problem, self._resources = problem, resources
        self._rows: dict[Config, Floats] = {}
        self._places: dict[tuple[str, str, object], int] = {}
        for name, family in FAMILIES.items():
            self._places[name, "", None] = len(self._places)
            for parameter, values in family.choices.items():
                for value in values:
                    self._places[name, parameter, value] = len(self._places)

    def matrix(self, configs: Sequence[Config]) -> Floats:
        """Their features, a row each."""
        for config in configs:
            if config not in self._rows:
                self._rows[config] = self._row(config)
        return np.array([self._rows[config] for config in configs])

    def _row(self, config: Config) -> Floats:
        row = np.zeros(len(self._places) + 2 * self._resources)
        row[self._places[config.family, "", None]] = _FAMILY_OFFSET / _PARAMETER_EFFECT
        for name in config.choices:
            row[self._places[config.family, name, getattr(config, name)]] = 1.0
        if self._resources:
            needs = config.estimate(self._problem)
            row[-2:] = (needs.registers - 200) / 30, (needs.shared_memory_bytes - 100_000) / 50_000
        return row


def _kernel() -> object:
    """Of the Gaussian process: an effect of each choice, and of their interactions."""
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct

    linear = ConstantKernel(_PARAMETER_EFFECT**2) * DotProduct(sigma_0=1e-3)
    return linear + ConstantKernel(_INTERACTION**2) * RBF(_INTERACTION_RANGE)


def _surprise(process: GaussianProcessRegressor) -> float:
    """By how much the outcomes lie further from what the others let expect than the process says: 1 or more.

    Where the cost model and its residual have little to do with the times, the process must not be sure of itself.
    What the others let expect has a closed form (Rasmussen and Williams 2006, "Gaussian Processes for Machine
    Learning", 5.4.2).
    """
    from scipy.linalg import cho_solve

    if not hasattr(process, "L_") or len(process.L_) < _JUDGED_BY:
        return 1.0
    precision = np.diag(cho_solve((process.L_, True), np.eye(len(process.L_))))
    errors = np.ravel(process.alpha_) / np.sqrt(precision)
    return max(1.0, float(np.sqrt(np.mean(errors**2))))


def _expected_gain(mean: Floats, covariance: Floats, chances: Floats) -> float:
    """How much less than the incumbent the best of some configurations is expected to cost.

    Args:
        mean: Logarithms of their costs, the incumbent's being 0.
        covariance: Of them.
        chances: Of each to pass the compiler gate.
    """
    random = np.random.default_rng(0)
    draws = random.multivariate_normal(mean, covariance, _FUTURES, method="cholesky", check_valid="ignore")
    draws[random.random(draws.shape) > chances] = 0.0
    return float(-np.expm1(np.minimum(draws.min(axis=1), 0.0)).mean())


def _expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    from scipy.stats import norm

    deviation = np.maximum(deviation, 1e-6)
    z = (best - mean) / deviation
    improvement: Floats = deviation * (z * norm.cdf(z) + norm.pdf(z))
    return improvement
