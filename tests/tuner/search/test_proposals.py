"""Proposals: valid, never twice, the same for the same seed, and a log that keeps what ended."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa

from bwdtune.db.store import Store
from bwdtune.gen.errors import BwdtuneError
from bwdtune.gen.families import FAMILIES, PRESETS, Config, MmaConfig
from bwdtune.gen.render import template_hash
from bwdtune.tuner.search import proposals
from bwdtune.tuner.search.options import SAMPLERS
from bwdtune.tuner.search.proposals import Outcome, Proposals, StudyLog

CONFIGS = tuple(
    MmaConfig(block_q, block_kv, warps, stages)
    for block_q, block_kv, warps, stages in itertools.product((32, 64, 128), (64, 128), (1, 2, 4), (1, 2, 3))
)


def cost(config: Config) -> float:
    return 1.0 + abs(config.block_q - 64) / 32 + abs(config.stages - 2) + abs(config.warps_per_row_group - 2)


def drive(proposals: Proposals, count: int, judge: Callable[[Config], Outcome]) -> list[Config]:
    """Asks and tells; returns what was proposed."""
    proposed = []
    for _ in range(count):
        proposal = proposals.next()
        if proposal is None:
            break
        proposed.append(proposal.config)
        proposals.tell(proposal, judge(proposal.config))
    return proposed


def timed(config: Config) -> Outcome:
    return Outcome.timed(cost(config))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_each_valid_configuration_is_proposed_once_and_then_none(sampler: str) -> None:
    proposed = drive(Proposals(CONFIGS, sampler=sampler, seed=3), 1000, timed)
    assert sorted(proposed) == sorted(CONFIGS)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_seed_repeats_the_proposals(sampler: str) -> None:
    first, second = (drive(Proposals(CONFIGS, sampler=sampler, seed=7), 40, timed) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_another_seed_changes_the_proposals(sampler: str) -> None:
    first, second = (drive(Proposals(CONFIGS, sampler=sampler, seed=seed), 40, timed) for seed in (1, 2))
    assert first != second


def test_exhaustive_keeps_the_order() -> None:
    assert drive(Proposals(CONFIGS, sampler="exhaustive", seed=None), 5, timed) == list(CONFIGS[:5])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_first_ones_come_first_where_they_are_valid(sampler: str) -> None:
    invalid = MmaConfig(16, 32, 8)
    proposals = Proposals(CONFIGS, sampler=sampler, seed=0, first=(PRESETS["v3"], invalid, PRESETS["v1"]))
    proposed = drive(proposals, 10, timed)
    assert proposed[:2] == [PRESETS["v3"], PRESETS["v1"]]
    assert invalid not in proposed


def test_every_second_proposal_is_a_neighbour_of_the_best_of_each_group_in_turn() -> None:
    wgmma = tuple(
        replace(PRESETS["w64"], block_q=q, v_fragments=v, resync=r)
        for q in (64, 128)
        for v in (0, 1, 2)
        for r in (False, True)
    )
    judged: dict[Config, float] = {}

    def judge(config: Config) -> Outcome:
        judged[config] = cost(config) if isinstance(config, MmaConfig) else 0.1 + config.v_fragments
        return Outcome.timed(judged[config])

    first = (CONFIGS[0], wgmma[-1])
    proposals = Proposals((*CONFIGS, *wgmma), sampler="tpe", seed=0, first=first)
    assert drive(proposals, 2, judge) == list(first)
    for group in ("mma", "wgmma") * 3:
        best = min((config for config in judged if config.group == group), key=lambda config: judged[config])
        (neighbour,) = drive(proposals, 1, judge)
        assert sum(neighbour.to_dict()[name] != value for name, value in best.to_dict().items()) == 1
        drive(proposals, 1, judge)


def test_tpe_learns() -> None:
    """After as many trials its proposals are cheaper than random ones on average."""
    costs = {}
    for sampler in ("tpe", "random"):
        proposed = [drive(Proposals(CONFIGS, sampler=sampler, seed=seed), 30, timed)[12:] for seed in range(8)]
        costs[sampler] = sum(cost(config) for run in proposed for config in run)
    assert costs["tpe"] < costs["random"]


def test_failed_and_refused_candidates_stop_nothing() -> None:
    def judge(config: Config) -> Outcome:
        return Outcome("failed", reason="crash") if config.stages == 1 else Outcome("refused", reason="spills")

    assert len(drive(Proposals(CONFIGS, sampler="tpe", seed=0), 1000, judge)) == len(CONFIGS)


@pytest.mark.parametrize("time_ms", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_a_time_that_is_none_is_a_failure(time_ms: float) -> None:
    outcome = Outcome.timed(time_ms)
    assert (outcome.state, outcome.cost) == ("failed", None)
    assert str(time_ms) in outcome.reason


def test_what_was_learnt_is_not_proposed() -> None:
    proposals = Proposals(CONFIGS, sampler="random", seed=0)
    assert proposals.learn(CONFIGS[0], timed(CONFIGS[0]))
    assert not proposals.learn(CONFIGS[0], timed(CONFIGS[0])), "a second outcome of the same is no news"
    assert not proposals.learn(MmaConfig(16, 32, 8), Outcome.timed(1.0)), "not valid here"
    assert proposals.remaining == len(CONFIGS) - 1
    assert CONFIGS[0] not in drive(proposals, 1000, timed)


def test_what_another_search_is_at_is_postponed_until_its_outcome_is_known() -> None:
    proposals = Proposals(CONFIGS, sampler="exhaustive", seed=0)
    postponed, after = proposals.next(), proposals.next()
    proposals.postpone(postponed)
    proposals.tell(after, timed(after.config))
    assert not proposals.learn(after.config, timed(after.config)), "its own outcome is no news"
    assert proposals.learn(postponed.config, timed(postponed.config))
    assert not proposals.learn(postponed.config, timed(postponed.config))
    assert proposals.remaining == len(CONFIGS) - 2
    assert postponed.config not in drive(proposals, 1000, timed)


def open_log(storage: optuna.storages.BaseStorage, space: str = "space1", conditions: str = "here") -> StudyLog:
    return StudyLog(storage, f"1_1_64_64 on card space {space}", space_hash=space, conditions=conditions)


def test_the_log_gives_back_what_ended() -> None:
    storage = optuna.storages.InMemoryStorage()
    failed = Outcome("failed", reason="trap", kind="error")
    outcomes = [Outcome.timed(2.5), failed, Outcome("refused", reason="too many", kind="spills")]
    log = open_log(storage)
    for config, outcome in zip(CONFIGS, outcomes, strict=False):
        log.add(config, outcome)
    assert list(open_log(storage).news()) == list(zip(CONFIGS, outcomes, strict=False))


def test_the_database_holds_a_trial_as_optuna_writes_it(tmp_path: Path) -> None:
    """Ours is written by fewer statements."""
    database = tmp_path / "bwdtune.sqlite"
    with closing(Store.open(database)) as store:
        ours = store.optuna_storage()
        optunas = optuna.storages.RDBStorage(f"sqlite:///{database}")
        failed = Outcome("failed", reason="trap", kind="error")
        for number, outcome in enumerate([Outcome.timed(2.5), failed, Outcome.timed(math.inf)]):
            for space, storage in (("ours", ours), ("optunas", optunas)):
                open_log(storage, space).add(CONFIGS[number], outcome, search_id=7)
        stored = [
            [
                (trial.number, trial.state, trial.values, trial.params, trial.distributions, trial.user_attrs)
                for trial in optuna.load_study(study_name=name, storage=optunas).trials
                if trial.datetime_start and trial.datetime_complete
            ]
            for name in optuna.get_all_study_names(optunas)
        ]
        assert stored[0] == stored[1]
        assert [len(trials) for trials in stored] == [3, 3]


@pytest.fixture(params=["memory", "database"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[optuna.storages.BaseStorage]:
    if request.param == "memory":
        yield optuna.storages.InMemoryStorage()
    else:
        with closing(Store.open(tmp_path / "bwdtune.sqlite")) as store:
            yield store.optuna_storage()


def test_the_log_tells_each_outcome_once_those_of_other_searches_too(storage: optuna.storages.BaseStorage) -> None:
    mine, other = open_log(storage), open_log(storage)
    mine.add(CONFIGS[0], Outcome.timed(2.5))
    assert [config for config, _ in mine.news()] == [CONFIGS[0]]
    other.add(CONFIGS[1], Outcome.timed(1.5))
    assert list(mine.news()) == [(CONFIGS[1], Outcome.timed(1.5))]
    assert list(mine.news()) == []


def test_one_statement_finds_that_nothing_is_new(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path / "bwdtune.sqlite")) as store:
        storage = store.optuna_storage()
        log = open_log(storage)
        log.add(CONFIGS[0], Outcome.timed(2.5))
        assert list(log.news())
        sent = []
        sa.event.listen(storage.engine, "before_cursor_execute", lambda *arguments: sent.append(arguments[2]))
        assert not list(log.news())
        assert len(sent) == 1


def test_the_log_keeps_conditions_apart() -> None:
    storage = optuna.storages.InMemoryStorage()
    open_log(storage).add(CONFIGS[0], Outcome.timed(2.5))
    assert list(open_log(storage, conditions="another driver").news()) == []


def test_an_edit_of_one_family_keeps_the_trials_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = optuna.storages.InMemoryStorage()
    configs = [PRESETS["v1"], PRESETS["t64"], PRESETS["w64"]]
    for config in configs:
        open_log(storage).add(config, Outcome.timed(2.5))
    hashes = {family: template_hash(family) for family in FAMILIES}
    monkeypatch.setattr(proposals, "template_hash", (hashes | {"mma": "edited"}).get)
    assert [config for config, _ in open_log(storage).news()] == configs[1:]


def test_a_changed_space_is_another_study_and_said_once() -> None:
    storage = optuna.storages.InMemoryStorage()
    first = open_log(storage)
    first.add(CONFIGS[0], Outcome.timed(2.5))
    assert not first.replaces_older_space
    changed = open_log(storage, space="space2")
    assert changed.replaces_older_space
    assert list(changed.news()) == []
    assert not open_log(storage, space="space2").replaces_older_space
    assert list(open_log(storage).news()) == [(CONFIGS[0], Outcome.timed(2.5))], "the old rows are kept"


def test_the_log_holds_ended_trials_only() -> None:
    storage = optuna.storages.InMemoryStorage()
    open_log(storage).add(CONFIGS[0], Outcome("failed", reason="trap"))
    (study,) = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=study.study_name, storage=storage).get_trials()
    assert [trial.state for trial in trials] == [optuna.trial.TrialState.FAIL]
    assert trials[0].user_attrs["reason"] == "trap"
    assert trials[0].user_attrs["config"] == CONFIGS[0].id


def test_a_database_that_fails_is_one_line() -> None:
    class Locked(optuna.storages.InMemoryStorage):
        def create_new_trial(self, *unused: object, **also_unused: object) -> int:
            raise optuna.exceptions.StorageInternalError("An exception is raised during the commit.\nIt is long.")

    with pytest.raises(BwdtuneError, match="search again") as error:
        open_log(Locked()).add(CONFIGS[0], Outcome.timed(2.5))
    assert "\n" not in str(error.value)


def test_an_outcome_that_does_not_last_is_not_logged() -> None:
    storage = optuna.storages.InMemoryStorage()
    open_log(storage).add(CONFIGS[0], Outcome("failed", reason="no space", lasting=False))
    assert list(open_log(storage).news()) == []
