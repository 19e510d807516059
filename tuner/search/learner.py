"""What a search learns: how far times are from the predicted ones, and which configurations are refused.

The cost model is the prior. What it does not know (phase effects, what ptxas makes of a kernel) is learned from
outcomes: for each family a Gaussian process for the logarithm of measured over predicted time, and a logistic
regression for refusals. The next candidate has the largest expected improvement, weighted by its chance to pass the
compiler gate (Jones et al. 1998, "Efficient Global Optimization"; Gardner et al. 2014 for the weight).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from ...gen.device import Device
from ...gen.families import FAMILIES, Config
from ...gen.problem import Problem
from .cost_model import predict
from .encoding import Indices, Space
from .history import History
from .refusals import Refusals, features
from .residual import Residual, feature_sizes
from .residual import features as residual_features

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

Floats = NDArray[np.float64]

POOL = 12_288
"""Configurations that are judged at each step: drawn from a larger space, and joined by neighbours of the best."""

_SHORTLIST = 512  # of each family's pool, by what is expected: how sure of that the process is, is asked of these alone

_OTHERS = 0.02  # what a time of another search has scattered by: its clock was another at each

_SLOW = 0.08  # so much of how many times (as a logarithm) it takes the fastest's time a slow outcome may be off besides

_TO_DOUBT = 5  # outcomes that may show others' to be misleading

_SPREAD = 3.0  # standard deviations below the mean: what counts while there is no outcome

_GROWN = 1.25  # what takes a while is learned anew when there are so many times the outcomes

_FORESEEN = 60  # trials that the expected gain is computed of: what comes later adds little
_FUTURES = 256  # that are drawn for it


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


class Prospects:
    """What is known of configurations before anything is measured. Several learners may share it.

    Args:
        problem: What is computed.
        configs: The valid configurations.
        device: The card that runs them.
        emulate: The card whose pace is kept to: see `cost_model.predict`.
        history: What other problems and cards have shown.

    Attributes:
        space: The configurations.
        passed: A row of `refusals.features` for each configuration that came through the compilers for other problems.
        refused: The same of those that did not.
    """

    def __init__(
        self,
        problem: Problem,
        configs: Sequence[Config],
        device: Device,
        *,
        emulate: str | None = None,
        history: History | None = None,
    ) -> None:
        self.problem, self.device, self.emulate = problem, device, emulate
        self.history = history or History(problem, device)
        self.space = Space(configs)
        self.passed = features(problem, device, self.history.passed)
        self.refused = features(problem, device, self.history.refused)
        self._predicted: dict[int, float] = {}
        self._compile_features: dict[int, Floats] = {}
        self._rows: dict[int, Floats] = {}

    def predicted(self, indices: Sequence[int] | Indices) -> Floats:
        """Of each the logarithm of the cycles that the cost model predicts."""
        for index in indices:
            if index not in self._predicted:
                config = self.space.configs[index]
                cycles = predict(self.problem, config, self.device, emulate=self.emulate).cycles
                self._predicted[index] = math.log(cycles)
        return np.array([self._predicted[index] for index in indices])

    def compile_features(self, indices: Sequence[int] | Indices) -> Floats:
        """A row of `refusals.features` for each."""
        new = [index for index in indices if index not in self._compile_features]
        if new:
            rows = features(self.problem, self.device, [self.space.configs[index] for index in new])
            self._compile_features.update(zip(new, rows, strict=True))
        return np.array([self._compile_features[index] for index in indices]).reshape(-1, self.passed.shape[1])

    def rows(self, family: str, indices: Sequence[int] | Indices) -> Floats:
        """A row of `residual.features` for each of a family's configurations."""
        new = [index for index in indices if index not in self._rows]
        if new:
            configs = [self.space.configs[index] for index in new]
            found = residual_features(self.problem, self.device, configs, self.space.places[new])
            self._rows.update(zip(new, found, strict=True))
        return np.array([self._rows[index] for index in indices]).reshape(-1, sum(feature_sizes(family)))


class _Family:
    """A family's part of the pool, and what is learned of it."""

    def __init__(self, name: str, prospects: Prospects, pool: Indices) -> None:
        self.name, self._prospects = name, prospects
        self.residual = Residual(feature_sizes(name), prospects.history.distances)
        self._others = prospects.history.residuals(name)
        self._expected: dict[int, float] = {}  # of outcomes, before they came
        self.pool = pool
        self._predicted, self._rows = prospects.predicted(pool), prospects.rows(name, pool)
        self._compile_features = prospects.compile_features(pool)
        self._known: dict[int, float] = {}
        self._learned_of = 0
        self._surprise = 1.0
        self._mean = self._predicted
        if len(self._others.problems):
            self._learned_of = len(self._others.problems)
            self._learn({}, {}, learn=True)

    def extend(self, indices: Indices) -> None:
        """Takes more configurations into the pool."""
        new = np.setdiff1d(indices, self.pool)
        if not len(new):
            return
        self.pool = np.concatenate([self.pool, new])
        self._predicted = np.concatenate([self._predicted, self._prospects.predicted(new)])
        self._rows = np.concatenate([self._rows, self._prospects.rows(self.name, new)])
        self._compile_features = np.concatenate([self._compile_features, self._prospects.compile_features(new)])
        self._mean = self._predicted + self.residual.mean(self._rows)

    def know(self, residuals: Mapping[int, float], slowness: Mapping[int, float]) -> None:
        """Takes what was measured of the family: of each the residual, and the logarithm of how slow it is."""
        if residuals == self._known:
            return
        self._known = dict(residuals)
        self._doubt_others(residuals)
        learn = len(residuals) + len(self._others.problems) >= _GROWN * self._learned_of
        if learn:
            self._learned_of = len(residuals) + len(self._others.problems)
        self._learn(residuals, slowness, learn=learn)

    def _doubt_others(self, residuals: Mapping[int, float]) -> None:
        """Forgets others where outcomes are further from what was expected of them than from the predicted times."""
        if not len(self._others.problems):
            return
        new = [index for index in residuals if index not in self._expected]
        expected = self.residual.mean(self._prospects.rows(self.name, new))
        self._expected.update(zip(new, expected, strict=True))
        got = np.array(list(residuals.values()))
        if len(got) >= _TO_DOUBT and np.std(got - [self._expected[index] for index in residuals]) > np.std(got):
            self._others = self._others.none()
            self._learned_of = 0

    def _learn(self, residuals: Mapping[int, float], slowness: Mapping[int, float], *, learn: bool) -> None:
        others = self._others
        self.residual.know(
            np.concatenate([self._prospects.rows(self.name, list(residuals)), self._others.rows]),
            np.concatenate([list(residuals.values()), others.residuals]),
            np.concatenate([[_SLOW * slowness[index] for index in residuals], np.full(len(others.residuals), _OTHERS)]),
            np.concatenate([np.zeros(len(residuals), dtype=np.int64), others.problems]),
            learn=learn,
        )
        self._surprise = self.residual.surprise()
        self._mean = self._predicted + self.residual.mean(self._rows)

    def expected(self, indices: Sequence[int]) -> Floats:
        """What is expected of some of the family (log cycles)."""
        return self._prospects.predicted(indices) + self.residual.mean(self._prospects.rows(self.name, indices))

    def shortlist(self, untried: NDArray[np.bool_]) -> tuple[Indices, Floats]:
        """Places in the pool of those untried that are expected to be fastest, and what is expected (log cycles)."""
        places = np.flatnonzero(untried[self.pool])
        if len(places) > _SHORTLIST:
            places = places[np.argpartition(self._mean[places], _SHORTLIST)[:_SHORTLIST]]
        return places, self._mean[places]

    def chances(self, places: Indices, refusals: Refusals) -> Floats:
        """Of those at some places of the pool to pass the compiler gate."""
        return refusals.chances(self._compile_features[places])

    def deviations(self, places: Indices, pending: Sequence[int]) -> Floats:
        """Of those at some places of the pool, with what is pending."""
        found = self.residual.deviations(self._rows[places], self._prospects.rows(self.name, pending))
        return found * self._surprise

    def covariance(self, places: Indices, pending: Sequence[int]) -> Floats:
        """The same, of each two."""
        found = self.residual.covariance(self._rows[places], self._prospects.rows(self.name, pending))
        return found * self._surprise**2


class Learner:
    """Chooses the next configuration from all that is known. The same outcomes and seed give the same choices.

    Args:
        prospects: What is known before.
        seed: Of the draw of the pool.
    """

    def __init__(self, prospects: Prospects, *, seed: int | None = None) -> None:
        self._prospects = prospects
        self._seed = seed
        self._families: list[_Family] = []
        self._refusals = Refusals()
        self._passed = self._refused = 0
        self._shift, self._shifted_of = 0.0, 0
        self._best = -1

    @property
    def space(self) -> Space:
        """The configurations."""
        return self._prospects.space

    def prepare(self) -> None:
        """Does what takes a second and needs no outcome. It is done by `choose` where it was not before."""
        if self._families:
            return
        import sklearn.linear_model  # noqa: F401  so that the first refusal need not wait for it

        with _one_thread():
            self._prepare()

    def _prepare(self) -> None:
        random = np.random.default_rng(self._seed)
        members = {name: self.space.members(name) for name in FAMILIES}
        left = POOL
        # An equal share each, since small families have few members and are as promising; large ones take what is left.
        for number, name in enumerate(sorted(members, key=lambda name: len(members[name]))):
            pool, share = members[name], left // (len(members) - number)
            if len(pool) > share:
                pool = np.sort(random.choice(pool, share, replace=False))
            left -= len(pool)
            if len(pool):
                self._families.append(_Family(name, self._prospects, pool))

    def choose(
        self,
        untried: NDArray[np.bool_],
        measured: Mapping[int, float],
        refused: Sequence[int],
        pending: Sequence[int],
        left: int = 1,
    ) -> Choice:
        """The configuration to try next.

        Args:
            untried: Of each configuration whether it may be chosen; one at least.
            measured: Costs (ms, cycles or a ratio) by index.
            refused: What did not come to a cost, and never will.
            pending: What was proposed and has no outcome yet.
            left: Trials that are left, this one included.
        """
        self.prepare()
        with _one_thread():
            return self._choose(untried, measured, refused, pending, left)

    def _choose(
        self,
        untried: NDArray[np.bool_],
        measured: Mapping[int, float],
        refused: Sequence[int],
        pending: Sequence[int],
        left: int,
    ) -> Choice:
        best = self._know(measured)
        # Another one that passes, of many, says little.
        if len(refused) != self._refused or len(measured) >= _GROWN * self._passed:
            self._passed, self._refused = len(measured), len(refused)
            compiled = self._prospects.compile_features
            passed, lost = self._prospects.passed, self._prospects.refused
            self._refusals.know(
                np.concatenate([passed, compiled(list(measured))]), np.concatenate([lost, compiled(refused)])
            )
        ahead = {family.name: [index for index in pending if self._is_of(index, family)] for family in self._families}
        worths, picked = [], []
        for family in self._families:
            places, mean = family.shortlist(untried)
            deviations = family.deviations(places, ahead[family.name])
            chances = family.chances(places, self._refusals)
            if best is None:  # nothing to improve on yet: the lowest bound, so low that what is tried at once is spread
                worth = np.exp(_SPREAD * deviations - mean)
            else:
                worth = _expected_improvement(mean, deviations, best)
            worths.append(worth * chances)
            picked += [(family, place, one, chance) for place, one, chance in zip(places, mean, chances, strict=True)]
        if not picked:  # the pool is used up
            return Choice(int(untried.argmax()), None)
        worth = np.concatenate(worths)
        best_first = np.argsort(-worth, kind="stable")
        family, place, *_ = picked[best_first[0]]
        gain = None
        if best is not None:
            gain = self._gain([picked[number] for number in best_first[: min(left, _FORESEEN)]], ahead, best)
        return Choice(int(family.pool[place]), gain)

    def expected(self, measured: Mapping[int, float], asked: Sequence[int] | Indices) -> Floats:
        """What configurations are expected to cost, after these costs: logarithms, in the unit of the costs."""
        self.prepare()
        with _one_thread():
            self._know(measured)
        found = np.zeros(len(asked))
        for family in self._families:
            mine = [place for place, index in enumerate(asked) if self._is_of(index, family)]
            found[mine] = family.expected([asked[place] for place in mine])
        return found + self._shift

    def _know(self, measured: Mapping[int, float]) -> float | None:
        """Takes outcomes; returns the logarithm of the best's predicted cycles and residual, where there is one."""
        if not measured:
            return None
        indices = list(measured)
        costs = np.log(list(measured.values()))
        offsets = costs - self._prospects.predicted(indices)
        if len(indices) >= _GROWN * self._shifted_of:
            self._shift, self._shifted_of = float(np.median(offsets)), len(indices)
        best = int(costs.argmin())
        residuals = dict(zip(indices, offsets - self._shift, strict=True))
        slowness = dict(zip(indices, costs - costs[best], strict=True))
        if indices[best] != self._best:
            self._best = indices[best]
            near = np.flatnonzero(self.space.neighbours(self.space.places[self._best]))
            next(family for family in self._families if self._is_of(self._best, family)).extend(near)
        for family in self._families:
            mine = {index: residual for index, residual in residuals.items() if self._is_of(index, family)}
            family.know(mine, slowness)
        return float(costs[best] - self._shift)

    def _is_of(self, index: int, family: _Family) -> bool:
        return self.space.configs[index].family == family.name

    def _gain(
        self,
        likeliest: Sequence[tuple[_Family, int, float, float]],
        ahead: Mapping[str, Sequence[int]],
        best: float,
    ) -> float:
        """How much less than the best the best of these is expected to cost: of drawn futures the mean."""
        random = np.random.default_rng(0)
        lowest = np.zeros(_FUTURES)
        for family in self._families:
            mine = [(place, mean, chance) for other, place, mean, chance in likeliest if other is family]
            if not mine:
                continue
            places, means, chances = (np.array(column) for column in zip(*mine, strict=True))
            covariance = family.covariance(places, ahead[family.name]) + 1e-10 * np.eye(len(places))
            draws = means - best + random.standard_normal((_FUTURES, len(places))) @ np.linalg.cholesky(covariance).T
            draws[random.random(draws.shape) > chances] = 0.0
            lowest = np.minimum(lowest, draws.min(axis=1))
        return float(-np.expm1(lowest).mean())


def _one_thread() -> AbstractContextManager[Any]:
    """Has linear algebra run in this thread alone.

    These matrices are small. While compilers have the cores, several threads wait for each other at each product, and
    a choice takes ten times as long. The same seed also gives the same search on any number of cores.
    """
    return _thread_pools().limit(limits=1, user_api="blas")


@cache
def _thread_pools() -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()  # looking for the libraries takes a while


def _expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    z = (best - mean) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    improvement: Floats = deviation * (z * ndtr(z) + density)
    return improvement
