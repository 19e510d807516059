"""How far measured times are from predicted ones: a Gaussian process over a family's parameters.

Two configurations are the more similar, the fewer parameters they differ in. How much each parameter matters is learned
from the outcomes: of a dozen parameters, two or three decide where the cost model is wrong. What one problem has shown
holds for another in part. (Hutter, Hoos and Leyton-Brown 2011, "Sequential Model-Based Optimization for General
Algorithm Configuration", for the kernel over choices; Rasmussen and Williams 2006, "Gaussian Processes for Machine
Learning", chapter 5 for the evidence; Bonilla, Chai and Williams 2007, "Multi-task Gaussian Process Prediction".)
scikit-learn's process has no such kernel. With a custom one it needs the derivative of each covariance by each
parameter, which is too slow between two candidates of a search.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_solve, cholesky, solve_triangular
from scipy.optimize import minimize

from ...gen.device import Device
from ...gen.families import Config
from ...gen.problem import Problem
from .encoding import Places, one_hot, sizes

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Standard deviations of the logarithm of time, and the weight of a parameter that differs: what is expected before any
# outcome, and (as logarithms) how sure of that one may be. Chosen by `tuner replay` over the recorded sweeps.
_SCALE, _SURE_OF_SCALE = 0.15, 0.5
_NOISE, _SURE_OF_NOISE = 0.006, 0.7
_WEIGHT, _SURE_OF_WEIGHT = 0.1, 1.5
_OFFSET = 0.1  # of a family as a whole
_FADING, _SURE_OF_FADING = 0.05, 1.0  # of what one problem shows for another: 5 % a doubling of a length

_BLOCKS, _REGISTERS, _REGISTERS_A_STEP = 9, 16, 16  # values of `features`: so many blocks or more, and so many steps

_STEPS = 15  # of the search for the likeliest weights
_ENOUGH = 6  # outcomes to learn weights from


def features(problem: Problem, device: Device, configs: Sequence[Config], rows: Places) -> Floats:
    """What configurations of one family have in common: for `Residual`, a row each.

    Beside the choices of parameters it is what follows from several of them and the cost model takes for exact: how
    many blocks share an SM, and how many registers a thread needs, both of the first gate's estimate.

    Args:
        problem: What is computed.
        device: The card.
        configs: The configurations, one at least.
        rows: Their `encoding.places`.
    """
    needs = [config.estimate(problem) for config in configs]
    blocks = np.array([device.blocks_per_sm(**vars(one)) for one in needs])
    registers = np.array([one.registers for one in needs])
    derived = np.zeros((len(configs), _BLOCKS + _REGISTERS))
    each = np.arange(len(configs))
    derived[each, np.clip(blocks, 0, _BLOCKS - 1)] = 1.0
    derived[each, _BLOCKS + np.clip(registers // _REGISTERS_A_STEP, 0, _REGISTERS - 1)] = 1.0
    return np.concatenate([one_hot(configs[0].family, rows), derived], axis=1)


def feature_sizes(family: str) -> list[int]:
    """How many values each of a family's `features` has."""
    return [*sizes(family), _BLOCKS, _REGISTERS]


class Residual:
    """A process over the configurations of one family.

    Args:
        sizes: How many values each feature has. A configuration is a row that has a 1 for its value of each feature,
            one after another, else 0.
        distances: (p, p) how far apart each two problems are; problem 0 is the one that is asked about. None: there is
            no other. What one shows holds for another in part, exponentially less with the distance, and how much less
            is learned.
    """

    def __init__(self, sizes: list[int], distances: Floats | None = None) -> None:
        self._of_column = np.repeat(np.arange(len(sizes)), sizes)
        self._distances = np.zeros((1, 1)) if distances is None else distances
        self._expected = np.log([_SCALE, _NOISE, _FADING, *[_WEIGHT] * len(sizes)])
        self._sure = np.array([_SURE_OF_SCALE, _SURE_OF_NOISE, _SURE_OF_FADING, *[_SURE_OF_WEIGHT] * len(sizes)])
        self._theta = self._expected
        self._rows = np.zeros((0, len(self._of_column)))
        self._problems = np.zeros(0, dtype=np.int64)
        self._factor = np.zeros((0, 0))

    @property
    def deviation(self) -> float:
        """The standard deviation of what nothing is known of."""
        return float(np.hypot(np.exp(self._theta[0]), _OFFSET))

    def know(
        self, rows: Floats, residuals: Floats, extra: Floats, problems: Integers | None = None, *, learn: bool
    ) -> None:
        """Takes outcomes in the place of those before.

        Args:
            rows: (n, columns) configurations.
            residuals: (n,) logarithms of measured over predicted times.
            extra: (n,) standard deviations of what else these have, beside the noise of all.
            problems: (n,) places of their problems in ``distances``; None: all are of problem 0.
            learn: Whether what matters is to be learned anew. That takes some dozens of times as long.
        """
        self._rows, self._residuals, self._extra = rows, residuals, extra
        self._problems = np.zeros(len(rows), dtype=np.int64) if problems is None else problems
        self._between = self._distances[np.ix_(self._problems, self._problems)]
        if learn and len(rows) >= _ENOUGH:
            found = minimize(self._improbability, self._theta, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS})
            if np.isfinite(found.fun):
                self._theta = found.x
        covariance, _ = self._covariance(self._theta)
        self._factor = cholesky(covariance, lower=True)
        self._solved = cho_solve((self._factor, True), residuals)

    def mean(self, asked: Floats) -> Floats:
        """(m,) what is expected of configurations, (m, columns), for problem 0."""
        if not len(self._rows):
            return np.zeros(len(asked))
        found: Floats = self._cross(asked, self._rows, self._problems) @ self._solved
        return found

    def covariance(self, asked: Floats, pending: Floats) -> Floats:
        """(m, m) of what is expected of configurations, when it is also known what comes of those that are pending."""
        return self._beside(asked, pending)[0]

    def deviations(self, asked: Floats, pending: Floats) -> Floats:
        """(m,) the square root of that covariance's diagonal."""
        shown = self._shown(asked, pending)
        variance = self.deviation**2 - np.einsum("ij,ij->j", shown, shown)
        found: Floats = np.sqrt(np.maximum(variance, 1e-12))
        return found

    def surprise(self) -> float:
        """By how much outcomes of problem 0 lie further from what others let expect than this process says; 1 or more.

        Where the residual has little to do with the parameters, the process must not be sure of itself. What the others
        let expect has a closed form (Rasmussen and Williams, 5.4.2).
        """
        mine = self._problems == 0
        if mine.sum() < _ENOUGH:
            return 1.0
        inverse = cho_solve((self._factor, True), np.eye(len(self._factor)))
        errors = (self._solved / np.sqrt(np.diag(inverse)))[mine]
        return max(1.0, float(np.sqrt(np.mean(errors**2))))

    def _beside(self, asked: Floats, pending: Floats) -> tuple[Floats, Floats]:
        shown = self._shown(asked, pending)
        alone = self._cross(asked, asked, np.zeros(len(asked), dtype=np.int64))
        return alone - shown.T @ shown, shown

    def _shown(self, asked: Floats, pending: Floats) -> Floats:
        """(n, m): its columns' squares add up to what outcomes take from each variance."""
        rows = np.concatenate([self._rows, pending])
        if not len(rows):
            return np.zeros((0, len(asked)))
        problems = np.zeros(len(rows), dtype=np.int64)
        factor = self._factor
        if len(self._rows):
            problems[: len(self._rows)] = self._problems
        if len(pending):
            factor = self._extended(pending)
        found: Floats = solve_triangular(factor, self._cross(asked, rows, problems).T, lower=True)
        return found

    def _extended(self, pending: Floats) -> Floats:
        """The factor with rows for what is pending."""
        known, ahead = len(self._rows), len(pending)
        mine = self._cross(pending, pending, np.zeros(ahead, dtype=np.int64))
        mine += np.exp(2 * self._theta[1]) * np.eye(ahead)
        factor = np.zeros((known + ahead, known + ahead))
        if known:
            factor[:known, :known] = self._factor
            cross = self._cross(pending, self._rows, self._problems)
            factor[known:, :known] = solve_triangular(self._factor, cross.T, lower=True).T
            mine -= factor[known:, :known] @ factor[known:, :known].T
        factor[known:, known:] = cholesky(mine, lower=True)
        return factor

    def _cross(self, asked: Floats, rows: Floats, problems: Integers) -> Floats:
        """(m, n) covariances of configurations of problem 0 with some of other problems."""
        common = np.exp(2 * self._theta[0]) * self._likeness(self._theta, asked, rows)
        found: Floats = (common + _OFFSET**2) * self._kinship(self._theta, self._distances[0, problems])
        return found

    @staticmethod
    def _kinship(theta: Floats, distances: Floats) -> Floats:
        """How much of what one problem shows holds for another, 0 to 1."""
        found: Floats = np.exp(-np.exp(theta[2]) * distances)
        return found

    def _likeness(self, theta: Floats, a: Floats, b: Floats) -> Floats:
        """(m, n): 1 of equal configurations, and the less the more of what matters differs."""
        weights = np.exp(theta[3:])
        found: Floats = np.exp((a * weights[self._of_column]) @ b.T - weights.sum())
        return found

    def _covariance(self, theta: Floats) -> tuple[Floats, Floats]:
        """(n, n) of the outcomes, and the part of it that depends on parameters."""
        kinship = self._kinship(theta, self._between)
        common = np.exp(2 * theta[0]) * self._likeness(theta, self._rows, self._rows) * kinship
        noise = np.exp(2 * theta[1]) + self._extra**2
        return common + _OFFSET**2 * kinship + np.diag(noise), common

    def _improbability(self, theta: Floats) -> tuple[float, Floats]:
        """Minus the logarithm of the probability of the outcomes and of theta, and its derivative.

        The derivative by a weight needs no matrix for each parameter: the covariance is a product over the parameters.
        """
        covariance, common = self._covariance(theta)
        try:
            factor = cholesky(covariance, lower=True)
        except LinAlgError:
            return np.inf, np.zeros_like(theta)
        inverse = cho_solve((factor, True), np.eye(len(factor)))
        solved = inverse @ self._residuals
        slope = np.outer(solved, solved) - inverse
        by_common = slope * common
        in_common = (self._rows * (by_common @ self._rows)).sum(axis=0)
        weights = np.exp(theta[3:])
        shared = by_common + slope * _OFFSET**2 * self._kinship(theta, self._between)
        fading = -0.5 * np.exp(theta[2]) * (shared * self._between).sum()
        gradient = np.concatenate(
            [
                [by_common.sum(), np.exp(2 * theta[1]) * np.trace(slope), fading],
                0.5 * weights * (np.bincount(self._of_column, in_common, len(weights)) - by_common.sum()),
            ]
        )
        away = (theta - self._expected) / self._sure
        value = 0.5 * self._residuals @ solved + np.log(np.diag(factor)).sum() + 0.5 * away @ away
        return float(value), away / self._sure - gradient
