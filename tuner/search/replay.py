"""Runs samplers against a recorded sweep: how close they come to its best, without a GPU."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...gen.errors import UsageError
from ...gen.families import Config
from .candidates import LOOK_AHEAD
from .cost_model import predict
from .history import History, Outcomes
from .learner import Learner, Prospects
from .options import SearchOptions
from .proposals import Outcome, Proposal, Proposals
from .race import FINALISTS
from .refusals import Refusals, features
from .sweep import Sweep
from .worth import Worth

WITHIN = 0.01
"""A search that ends so near to the sweep's best has found it, as far as timings tell."""

NOISE = 0.005
"""Standard deviation of a timing, relative to the time: what a seed's search sees of the recorded costs."""

_FOLDS = 5
_TIMINGS = 200  # pairs of them, which the ceiling is the mean of

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Replay:
    """How a sampler did over several seeds.

    Attributes:
        sampler: Its name.
        candidates: How many it had.
        gaps: For each seed, how much longer the best of its candidates takes than the sweep's best: 0.01 is 1 %.
        decided: For each seed, how many candidates it decided before it ended by itself.
    """

    sampler: str
    candidates: int
    gaps: tuple[float, ...]
    decided: tuple[int, ...]

    @property
    def median_gap(self) -> float:
        """The median over the seeds."""
        return statistics.median(self.gaps)

    @property
    def share_within_1_percent(self) -> float:
        """The share of the seeds that end within 1 % of the best."""
        return sum(gap <= WITHIN for gap in self.gaps) / len(self.gaps)

    def to_dict(self) -> dict[str, Any]:
        """With stable names, for JSON."""
        return {
            "sampler": self.sampler,
            "candidates": self.candidates,
            "seeds": len(self.gaps),
            "mean_decided": statistics.mean(self.decided),
            "median_gap": self.median_gap,
            "share_within_1_percent": self.share_within_1_percent,
        }


@dataclass(frozen=True)
class ModelQuality:
    """How well the models describe a sweep.

    Attributes:
        rank_correlation: Spearman's, of the cost model's prediction and the time, over all timed rows.
        top_decile_rank_correlation: The same over the tenth that is predicted to be fastest.
        learned_rank_correlation: The same as the first of what a learner expects of a fifth of the rows after the times
            of the others.
        learned_top_decile_rank_correlation: That over the tenth of which it expects to be fastest.
        top_decile_ceiling: The rank correlation of two timings of these same rows, with the noise of a replay: a model
            can hardly do better there.
        spill_auc: Area under the ROC curve of the prediction which rows the compiler gate refuses, cross-validated;
            None where all pass or none does.
    """

    rank_correlation: float
    top_decile_rank_correlation: float
    learned_rank_correlation: float
    learned_top_decile_rank_correlation: float
    top_decile_ceiling: float
    spill_auc: float | None

    def to_dict(self) -> dict[str, float | None]:
        """With stable names, for JSON."""
        return asdict(self)


def replay(
    sweep: Sweep,
    sampler: str,
    *,
    candidates: int,
    seeds: Sequence[int],
    withheld: Sequence[Config] = (),
    first: Sequence[Config] = (),
    min_gain: float = SearchOptions.min_gain,
    history: Sequence[Sweep] = (),
) -> Replay:
    """Runs a sampler's searches over a sweep's configurations.

    Args:
        sweep: What is known of them.
        sampler: One of ``options.SAMPLERS``.
        candidates: Candidates that each search decides.
        seeds: One search each.
        withheld: Configurations that are taken out of the sweep first, such as presets.
        first: Configurations that each search tries before its sampler chooses.
        min_gain: See `SearchOptions`: a search that expects less ends with fewer candidates.
        history: Sweeps whose outcomes the learned sampler begins with, without what is withheld.

    Raises:
        UsageError: Nothing that was timed is left.
    """
    hidden = set(withheld)
    rows = {row.config: row for row in sweep.rows if row.config not in hidden}
    costs = {config: row.cost for config, row in rows.items() if row.cost is not None}
    if not costs:
        raise UsageError("nothing of this sweep was timed")
    configs, best = list(rows), min(costs.values())
    gaps, counts = [], []
    others = [_outcomes(other).without(hidden) for other in history]
    known = History(sweep.problem, sweep.device, others, limits=sweep.limits)
    prospects = Prospects(sweep.problem, configs, sweep.device, history=known)
    for seed in seeds:
        learner = Learner(prospects, seed=seed) if sampler == "learned" else None
        proposals = Proposals(configs, sampler=sampler, seed=seed, first=first, learner=learner)
        random = np.random.default_rng(seed)
        seen = {config: cost * math.exp(random.normal(0, NOISE)) for config, cost in costs.items()}
        decided = _decided(proposals, seen, min(candidates, len(configs)), min_gain)
        counts.append(len(decided))
        finalists = sorted((config for config in decided if config in seen), key=seen.__getitem__)[:FINALISTS]
        gaps.append(min(costs[config] for config in finalists) / best - 1 if finalists else math.inf)
    return Replay(sampler, candidates, tuple(gaps), tuple(counts))


def _outcomes(sweep: Sweep) -> Outcomes:
    costs = {row.config: row.cost for row in sweep.timed if row.cost is not None}
    compiled = {row.config: row.cost is not None for row in sweep.rows}
    return Outcomes(sweep.problem, sweep.device, costs, compiled, sweep.limits)


def model_quality(sweep: Sweep) -> ModelQuality:
    """How well the models order a sweep, and how well refusals can be told."""
    predicted = np.array([predict(sweep.problem, row.config, sweep.device).cycles for row in sweep.timed])
    cost = np.array([row.cost for row in sweep.timed], dtype=np.float64)
    learned = _learned(sweep, cost)
    return ModelQuality(
        _rank_correlation(predicted, cost),
        _rank_correlation(*_top(predicted, cost)),
        _rank_correlation(learned, cost),
        _rank_correlation(*_top(learned, cost)),
        _ceiling(_top(learned, cost)[1]),
        _spill_auc(sweep),
    )


def _rank_correlation(one: Floats, other: Floats) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(one, other).statistic)


def _top(predicted: Floats, cost: Floats) -> tuple[Floats, Floats]:
    """Of the tenth that is predicted to be fastest what is predicted, and the cost."""
    top = np.argsort(predicted, kind="stable")[: max(len(predicted) // 10, 3)]
    return predicted[top], cost[top]


def _learned(sweep: Sweep, cost: Floats) -> Floats:
    """What is expected of each timed row after those of the other folds."""
    prospects = Prospects(sweep.problem, [row.config for row in sweep.timed], sweep.device)
    found = np.zeros(len(cost))
    for asked in _folds(len(cost)):
        known = {int(index): float(cost[index]) for index in np.flatnonzero(~asked)}
        found[asked] = Learner(prospects, seed=0).expected(known, np.flatnonzero(asked))
    return found


def _ceiling(cost: Floats) -> float:
    random = np.random.default_rng(0)
    pairs = cost * np.exp(random.normal(0, NOISE, (_TIMINGS, 2, len(cost))))
    return float(np.mean([_rank_correlation(one, other) for one, other in pairs]))


def _decided(proposals: Proposals, costs: dict[Config, float], total: int, min_gain: float) -> list[Config]:
    """The candidates of one search, proposed so far ahead of their outcomes as a real one proposes them."""
    waiting: deque[Proposal] = deque()
    decided: list[Config] = []
    worth = Worth(min_gain, LOOK_AHEAD)
    left = total
    while True:
        while left and len(waiting) < LOOK_AHEAD:
            if not worth.go_on(proposals.expected_gain(left)):
                left = 0
                break
            proposal = proposals.next()
            assert proposal, "there are no more trials than configurations"
            waiting.append(proposal)
            left -= 1
        if not waiting:
            return decided
        proposal = waiting.popleft()
        cost = costs.get(proposal.config)
        outcome = Outcome("refused", reason="by the sweep") if cost is None else Outcome("measured", cost=cost)
        proposals.tell(proposal, outcome)
        decided.append(proposal.config)


def _spill_auc(sweep: Sweep) -> float | None:
    """Each fifth of the rows is judged by what the others taught."""
    from sklearn.metrics import roc_auc_score

    rows = features(sweep.problem, sweep.device, [row.config for row in sweep.rows])
    passed = np.array([row.cost is not None for row in sweep.rows])
    if passed.all() or not passed.any():
        return None
    chances = np.zeros(len(rows))
    for asked in _folds(len(rows)):
        refusals = Refusals()
        refusals.know(rows[passed & ~asked], rows[~passed & ~asked])
        chances[asked] = refusals.chances(rows[asked])
    return float(roc_auc_score(passed, chances))


def _folds(count: int) -> list[NDArray[np.bool_]]:
    """Masks that divide so many into equal parts."""
    parts = np.random.default_rng(0).permutation(count) % _FOLDS
    return [parts == part for part in range(_FOLDS)]
