"""Proposes the next configuration: Optuna's samplers, restricted to valid configurations that were not tried yet.

There are two Optuna studies. The one in memory is asked and told; our sampler gives it valid parameters only, so it has
no invalid trials. The one in the database is a log: a trial is added in one transaction when it has ended. So a killed
search leaves no half-open trial, and another run can read what was decided.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from ...db.errors import DatabaseUnavailable
from ...gen.errors import BwdtuneError
from ...gen.families import FAMILIES, Config, config_from_dict
from ...gen.render import template_hash
from ..lab.protocol import Fault
from .encoding import Space, choices, places_of

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

    from ...db.records import Environment
    from .learner import Choice, Learner

_CONFIG_ATTRIBUTE = "config"
_SEARCH_ATTRIBUTE = "search"
_REASON_ATTRIBUTE = "reason"
_CONDITIONS_ATTRIBUTE = "conditions"
_FAULT_ATTRIBUTE = "fault"
_KIND_ATTRIBUTE = "kind"
_RACES_ATTRIBUTE = "races"
_TEMPLATES = " templates "  # before the templates' hash, in a trial's conditions
_KINDS = {
    "wrong:": "gradients",
    "spilled": "spills",
    "shared memory": "shared memory",
    "another kernel's pace": "occupancy",
    "no time": "timing",
    "it hung": "hang",
    "SIGKILL": "killed",
    "its process": "crash",
    "sm_": "compiler",
}
"""What reasons have in them, by their kind: earlier versions logged no kind."""
_KEPT_RACES = 20  # of one problem: an attribute is read whole


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate.

    Attributes:
        state: ``measured``; ``refused`` by the compiler gate (it spills); ``failed`` (to compile, to verify, to
            run); or ``unmeasured`` where it passed and nothing was there to time it.
        cost: What a measured candidate is ranked by, the less the better: its median time in ms, in an emulated search
            its median cycles. None for the others: no number stands in for a failure.
        reason: Why it was refused or failed, in one line.
        kind: What kind of reason that is: ``compiler``, ``spills``, ``shared memory``, ``occupancy`` (of an emulated
            build), ``gradients``, ``timing``; where its process failed, the kind of `Fault`. Empty for the others.
        fault: How its process failed, where it did.
        lasting: Another search would come to the same; not so where the machine failed, and not the candidate.
    """

    state: Literal["measured", "refused", "failed", "unmeasured"]
    cost: float | None = None
    reason: str = ""
    lasting: bool = True
    fault: Fault | None = None
    kind: str = ""

    @classmethod
    def timed(cls, cost: float, unit: str = "ms") -> Outcome:
        """A measured candidate, or a failed one where the time is no time (NaN, infinite, zero or negative)."""
        if not (math.isfinite(cost) and cost > 0):
            return cls("failed", reason=f"its timing is {cost} {unit}, which is no time", kind="timing")
        return cls("measured", cost=cost)


@dataclass(frozen=True)
class Proposal:
    """A configuration to be tried and the open trial (in memory) that waits for its outcome."""

    number: int
    config: Config


class Proposals:
    """Proposes valid configurations, each of them once.

    Given the same configurations, seed and outcomes, the proposals are the same.

    Args:
        configs: The valid configurations in a deterministic order.
        sampler: One of ``options.SAMPLERS``.
        seed: Seeds the sampler; None draws one.
        first: Configurations to be tried before any other (those of them that are valid).
        learner: Chooses for the sampler ``learned``, with the same configurations.
    """

    def __init__(
        self,
        configs: Sequence[Config],
        *,
        sampler: str,
        seed: int | None,
        first: Sequence[Config] = (),
        learner: Learner | None = None,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space = learner.space if learner else Space(configs)
        self._sampler = _ValidSampler(space, sampler, seed, first, learner)
        self._study = optuna.create_study(sampler=self._sampler)
        self._postponed: set[Config] = set()

    @property
    def remaining(self) -> int:
        """Valid configurations that were neither proposed nor learnt."""
        return int(self._sampler.untried.sum())

    def learn(self, config: Config, outcome: Outcome) -> bool:
        """Takes an outcome of another search: the sampler learns from it, and the configuration is not proposed.

        Returns:
            Whether it was news: a valid configuration that was neither learnt nor proposed before, or was postponed.
        """
        if config in self._postponed:
            self._postponed.discard(config)
            self._sampler.note(config, outcome)
        elif not self._sampler.take(config, outcome):
            return False
        self._study.add_trial(_finished_trial(_parameters(config), outcome))
        return True

    def prepare(self) -> None:
        """Does what the first choice would take a second for, and needs no outcome."""
        self._sampler.prepare()

    def expected_gain(self, left: int) -> float | None:
        """How much less than the best so far the best of the next few is expected to cost, relative to it.

        Args:
            left: How many.

        Returns:
            0.01 is 1 %; None where nothing is learned of that, or a configuration is tried first whatever it gains.
        """
        return self._sampler.expected_gain(self._study, left)

    def next(self) -> Proposal | None:
        """The next configuration, or None when every valid one was proposed."""
        if not self._sampler.untried.any():
            return None
        # Only TPE reads what earlier trials of this study had: to keep that takes as long as all else of a proposal.
        trial = self._study.ask(_distributions() if self._sampler.kind == "tpe" else None)
        return Proposal(trial.number, _config_of(trial.relative_params))

    def postpone(self, proposal: Proposal) -> None:
        """Takes a proposal back that another search is at: its outcome is learned when that has it."""
        self._sampler.drop(proposal.config)
        self._study.tell(proposal.number, state=TrialState.FAIL)  # which samplers pass over
        self._postponed.add(proposal.config)

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        """Ends a proposal's trial.

        A refused candidate is told as pruned, which TPE takes for a poor one without a number; a failed one as failed,
        which samplers pass over.
        """
        self._sampler.drop(proposal.config)
        self._sampler.note(proposal.config, outcome)
        self._study.tell(proposal.number, outcome.cost, state=_STATES[outcome.state])


class StudyLog:
    """The ended trials of all searches for one problem, device and space, as an Optuna study in the database.

    Args:
        storage: Optuna's storage.
        name: The study's name, which ends with the hash of the search space: choices that changed make another study.
        space_hash: That hash.
        conditions: What a time depends on besides the configuration (driver, toolkit, policy, …). Trials made under
            other conditions, or with other templates of their family, stay in the log but are not read back.

    Raises:
        BwdtuneError: The database fails, here or in a method.
    """

    def __init__(self, storage: BaseStorage, name: str, *, space_hash: str, conditions: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._conditions = conditions
        other_space = name.removesuffix(space_hash)
        with _one_line_errors():
            known = optuna.get_all_study_names(storage)
            self._study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
        self._read: set[int] = set()
        self.replaces_older_space = name not in known and any(other.startswith(other_space) for other in known)

    def news(self) -> Iterator[tuple[Config, Outcome]]:
        """The outcomes logged under the same conditions since the last time, oldest first.

        What is no configuration today is left out.
        """
        with _one_line_errors():
            trials = self._study.get_trials(deepcopy=False)
        fresh = [trial for trial in trials if trial.state in _OUTCOME_STATES and trial.number not in self._read]
        self._read.update(trial.number for trial in fresh)
        for trial in _logged(fresh):
            if trial.conditions == self._conditions_of(trial.config):
                yield trial.config, trial.outcome

    def add(self, config: Config, outcome: Outcome, search_id: int | None = None) -> None:
        """Logs an ended trial of a search, in one transaction; not one whose outcome does not last."""
        if not outcome.lasting:
            return
        with _one_line_errors():
            attributes = self._trial_attributes(config, outcome) | {_SEARCH_ATTRIBUTE: search_id}
            self._study.add_trial(_finished_trial(_by_stored_name(config), outcome, attributes))

    def add_race(self, race: Mapping[str, Any]) -> None:
        """Logs a race beside the trials: when, on which clocks, and who was told apart from whom."""
        with _one_line_errors():
            races = [*self._study.user_attrs.get(_RACES_ATTRIBUTE, []), dict(race)]
            self._study.set_user_attr(_RACES_ATTRIBUTE, races[-_KEPT_RACES:])

    def _trial_attributes(self, config: Config, outcome: Outcome) -> dict[str, Any]:
        return {
            _CONFIG_ATTRIBUTE: config.id,
            _REASON_ATTRIBUTE: outcome.reason,
            _KIND_ATTRIBUTE: outcome.kind,
            _CONDITIONS_ATTRIBUTE: self._conditions_of(config),
            **({_FAULT_ATTRIBUTE: asdict(outcome.fault)} if outcome.fault else {}),
        }

    def _conditions_of(self, config: Config) -> str:
        return f"{self._conditions}{_TEMPLATES}{template_hash(config.family)}"


def conditions(environment: Environment, policy: str) -> str:
    """What a time depends on besides the configuration: for `StudyLog`, and as `LoggedTrial.made_under` has it."""
    return " ".join(
        (
            f"{environment.gpu.name} {environment.gpu.capability}",
            f"driver {environment.driver}",
            f"nvcc {environment.toolkit}",
            f"torch {environment.torch}",
            policy,
        )
    )


@dataclass(frozen=True)
class LoggedTrial:
    """An ended trial, as the log of a study has it.

    Attributes:
        config: The configuration.
        outcome: What became of it.
        conditions: Those of `StudyLog`, with the templates' hash.
        search_id: The search that it belongs to, where that is known.
        ended_at: When, by the clock of the machine that searched.
    """

    config: Config
    outcome: Outcome
    conditions: str
    search_id: int | None
    ended_at: datetime | None

    @property
    def made_under(self) -> str:
        """The conditions without the templates: see `conditions`."""
        return self.conditions.partition(_TEMPLATES)[0]


def read_log(storage: BaseStorage, names: Iterable[str]) -> tuple[list[LoggedTrial], list[Mapping[str, Any]]]:
    """The ended trials of studies, oldest first, and their races. Whatever else is stored there is left out.

    Raises:
        StudyError: The database fails.
    """
    trials: list[LoggedTrial] = []
    races: list[Mapping[str, Any]] = []
    with _one_line_errors():
        for name in names:
            study = optuna.load_study(study_name=name, storage=storage)
            trials += _logged(study.get_trials(deepcopy=False))
            found = study.user_attrs.get(_RACES_ATTRIBUTE)
            races += [race for race in found if isinstance(race, dict)] if isinstance(found, list) else []
    return sorted(trials, key=lambda trial: trial.ended_at or datetime.min), races


def _logged(trials: Iterable[FrozenTrial]) -> Iterator[LoggedTrial]:
    for trial in trials:
        if trial.state not in _OUTCOME_STATES:
            continue
        try:
            config, outcome = _config_of(trial.params), _outcome(trial)
        except (BwdtuneError, TypeError, ValueError):  # another version's, or whoever else wrote to the database
            continue
        attributes = trial.user_attrs
        search_id = attributes.get(_SEARCH_ATTRIBUTE)
        yield LoggedTrial(
            config,
            outcome,
            str(attributes.get(_CONDITIONS_ATTRIBUTE, "")),
            search_id if isinstance(search_id, int) else None,
            trial.datetime_complete,
        )


class StudyError(DatabaseUnavailable):
    """Optuna cannot use the database."""

    text = "Optuna cannot use the database ({detail}): search again to go on"


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise StudyError("", reason) from error


_STATES: Mapping[str, TrialState] = {
    "measured": TrialState.COMPLETE,
    "refused": TrialState.PRUNED,
    "failed": TrialState.FAIL,
    "unmeasured": TrialState.FAIL,
}
_OUTCOME_STATES: Mapping[TrialState, Literal["measured", "refused", "failed"]] = {
    TrialState.COMPLETE: "measured",
    TrialState.PRUNED: "refused",
    TrialState.FAIL: "failed",
}


def _outcome(trial: FrozenTrial) -> Outcome:
    if trial.state is TrialState.COMPLETE and trial.value is not None:
        return Outcome.timed(trial.value)
    reason, kind = (str(trial.user_attrs.get(name, "")) for name in (_REASON_ATTRIBUTE, _KIND_ATTRIBUTE))
    return Outcome(_OUTCOME_STATES[trial.state], reason=reason, kind=kind or _kind_of(reason))


def _kind_of(reason: str) -> str:
    return next((kind for words, kind in _KINDS.items() if words in reason), "error" if reason else "")


def _finished_trial(
    parameters: dict[str, Any], outcome: Outcome, attributes: dict[str, Any] | None = None
) -> FrozenTrial:
    distributions = _distributions()
    return create_trial(
        state=_STATES[outcome.state],
        value=outcome.cost,
        params=parameters,
        distributions={name: distributions[name] for name in parameters},
        user_attrs=attributes,
    )


def _parameters(config: Config) -> dict[str, Any]:
    """A configuration as Optuna sees it: what its family does not have is at its first choice.

    TPE learns from trials that have every parameter; what never varies within a family tells it nothing there.
    """
    return _firstchoices() | _by_stored_name(config)


def _by_stored_name(config: Config) -> dict[str, Any]:
    """All of its parameters, by the names under which studies have them."""
    return {"family": config.family, **{one.stored: getattr(config, name) for name, one in config.parameters.items()}}


@cache
def _firstchoices() -> dict[str, Any]:
    return {name: values[0] for name, values in choices().items()}


def _config_of(parameters: Mapping[str, Any]) -> Config:
    """The inverse.

    Raises:
        UsageError: It is no configuration of this version.
    """
    family = FAMILIES.get(parameters.get("family", ""))
    names = _names(family) if family else set(parameters)
    return config_from_dict({name: value for name, value in parameters.items() if name in names})


def _names(family: type[Config]) -> set[str]:
    return {"family", *(one.stored for one in family.parameters.values())}


@cache
def _distributions() -> dict[str, BaseDistribution]:
    return {name: CategoricalDistribution(values) for name, values in choices().items()}


class _ValidSampler(BaseSampler):
    """Answers Optuna with untried valid configurations only.

    TPE knows nothing of validity: what it proposes is moved to the nearest untried valid configuration, where a
    step of one parameter to its next choice is a distance of one. The trial holds the parameters that are really
    tried, so TPE learns from the truth.

    It also spreads over thousands of configurations, of which a search tries dozens. So every second proposal is one
    that differs from the best so far in one parameter: the best of each group of families in turn, as each has users.
    """

    def __init__(
        self, space: Space, kind: str, seed: int | None, first: Sequence[Config], learner: Learner | None
    ) -> None:
        self._space = space
        self._learner = learner
        self.untried = np.ones(len(space.configs), dtype=bool)
        self._first = [space.index[config] for config in first if config in space.index]
        self._outcomes: dict[int, Outcome] = {}
        self._pending: dict[int, None] = {}
        self.kind = kind
        self._random = np.random.default_rng(seed)
        self._turns = itertools.count()
        self._chosen: int | None = None  # by the learner, and not proposed yet
        self._tpe = _make_tpe(seed) if kind == "tpe" else None

    def take(self, config: Config, outcome: Outcome) -> bool:
        """Counts a configuration as tried; returns whether it was valid and untried."""
        index = self._space.index.get(config)
        if index is None or not self.untried[index]:
            return False
        self.untried[index] = False
        self._outcomes[index] = outcome
        return True

    def drop(self, config: Config) -> None:
        """Waits for the outcome of a proposal no longer."""
        del self._pending[self._space.index[config]]

    def note(self, config: Config, outcome: Outcome) -> None:
        """Takes note of what became of a configuration that was proposed."""
        self._outcomes[self._space.index[config]] = outcome

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return _distributions()

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        index = self._choose(study, trial, search_space)
        self.untried[index] = False
        self._pending[index] = None
        return _parameters(self._space.configs[index])

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise NotImplementedError("every parameter is part of the relative search space")

    def prepare(self) -> None:
        """See `Proposals.prepare`."""
        if self._learner:
            self._learner.prepare()

    def expected_gain(self, study: optuna.Study, left: int) -> float | None:
        """See `Proposals.expected_gain`."""
        if not self._learner or not self.untried.any() or self._next_first() is not None:
            return None
        choice = self._learned(self._learner, left)
        self._chosen = choice.index
        return choice.expected_gain

    def _next_first(self) -> int | None:
        return next((index for index in self._first if self.untried[index]), None)

    def _choose(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]) -> int:
        first = self._next_first()
        if first is not None:
            return first
        if self.kind == "exhaustive":
            return int(self.untried.argmax())
        if self._learner:
            chosen, self._chosen = self._chosen, None
            return self._learned(self._learner).index if chosen is None else chosen
        untried = np.flatnonzero(self.untried)
        if self._tpe is None:
            return int(self._random.choice(untried))
        neighbours = self._neighbours_of_a_best(study, untried)
        if len(neighbours):
            return int(self._random.choice(neighbours))
        plural = {name: distribution for name, distribution in search_space.items() if not distribution.single()}
        proposed = self._tpe.sample_relative(study, trial, plural)
        if not proposed:  # too few results for TPE to learn from
            return int(self._random.choice(untried))
        single = {name: values[0] for name, values in choices().items() if name not in plural}
        values = {**single, **proposed}
        names = _names(FAMILIES[values["family"]])
        counted = np.array([name in names for name in choices()])
        steps = np.abs(self._space.places[untried] - np.array(places_of(values), dtype=np.int8))
        distances = steps[:, counted].sum(axis=1, dtype=np.int64)
        # Another family is further away than anything within the family.
        families_between = steps[:, 0].astype(np.int64)
        distances += families_between * steps.max() * len(counted)
        return int(self._random.choice(untried[distances == distances.min()]))

    def _learned(self, learner: Learner, left: int = 1) -> Choice:
        """The learner's choice after all that is known. What fails for good is as little use as what is refused."""
        measured = {index: one.cost for index, one in self._outcomes.items() if one.cost is not None}
        lost = [index for index, one in self._outcomes.items() if one.state in ("refused", "failed") and one.lasting]
        return learner.choose(self.untried, measured, lost, list(self._pending), left)

    def _neighbours_of_a_best(self, study: optuna.Study, untried: np.ndarray) -> np.ndarray:
        """At every second call, what differs in one parameter from the best of a group; else nothing."""
        turn = next(self._turns)
        if turn % 2:
            return untried[:0]
        bests: dict[str, tuple[float, FrozenTrial]] = {}
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            group, cost = FAMILIES[trial.params["family"]].group, trial.value
            if cost is not None and (group not in bests or cost < bests[group][0]):
                bests[group] = (cost, trial)
        if not bests:
            return untried[:0]
        _, best = bests[sorted(bests)[turn // 2 % len(bests)]]
        return untried[self._space.neighbours(np.array(places_of(best.params)))[untried]]


def _make_tpe(seed: int | None) -> TPESampler:
    """TPE that sees parameters together, and takes candidates that are being measured for poor ones meanwhile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # Optuna 4's, of both arguments
        return TPESampler(seed=seed, multivariate=True, constant_liar=True)
