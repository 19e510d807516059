"""A search on several GPUs of one host: cards that differ, processes that are killed, cards that are lost."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import optuna
import pytest
from fake_gpus import FakeGpu, make_card, ran_on
from landscape import PEER_MS, cost_ms
from search_fakes import FakeBench, FakeBuilder, Told, run_search

from bwdtune.db.records import VerificationRecord
from bwdtune.db.store import Store
from bwdtune.gen.build.jobs import Variant
from bwdtune.gen.families import parse_config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source
from bwdtune.tuner.lab.protocol import WorkerError
from bwdtune.tuner.search.candidates import LOOK_AHEAD
from bwdtune.tuner.search.result import SearchResult

PACES = {"first": 1.0, "second": 1.08}


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "results.sqlite"


@pytest.fixture
def cards(tmp_path: Path) -> dict[str, str]:
    return {name: make_card(tmp_path, name, pace) for name, pace in PACES.items()}


def search_on(cards: dict[str, str], database: Path, told: Told | None = None, **options) -> SearchResult:
    with ExitStack() as stack:
        benches = {name: stack.enter_context(FakeGpu(gpu=card)) for name, card in cards.items()}
        return run_search(database, benches=benches, progress=told, **options)


def candidates_of(ran: list[list[str]]) -> list[str]:
    """What was timed as a candidate."""
    return [names[0] for names in ran if not set(PEER_MS) <= set(names)]


def decided(database: Path) -> dict[str, float | None]:
    """All that was, with its cost; None where it has failed."""
    with closing(Store.open(database)) as store:
        storage = store.optuna_storage()
        (summary,) = optuna.get_all_study_summaries(storage)
        trials = optuna.load_study(study_name=summary.study_name, storage=storage).get_trials()
    return {trial.user_attrs["config"]: trial.value for trial in trials}


def costs(database: Path) -> dict[str, float]:
    return {config: cost for config, cost in decided(database).items() if cost}


def test_candidates_of_cards_that_differ_are_compared(cards: dict[str, str], database: Path) -> None:
    result = search_on(cards, database, trials=30)
    assert (result.counts.decided, result.counts.measured) == (30, 30)
    ran = {name: ran_on(card) for name, card in cards.items()}
    assert all(candidates_of(one) for one in ran.values()), "each card had its share"
    tried = list(itertools.chain.from_iterable(map(candidates_of, ran.values())))
    assert len(tried) == len(set(tried)) == 30
    # Only the first of all runs beside no other of ours.
    assert sum(len(set(names) - set(PEER_MS)) == 1 for one in ran.values() for names in one) == 1
    found = costs(database)
    scale = next(found[name] / cost_ms(parse_config(name)) for name in found)
    assert found == pytest.approx({name: scale * cost_ms(parse_config(name)) for name in found})
    races = [names for one in ran.values() for names in one if set(PEER_MS) <= set(names)]
    assert len(races) == 1, "the race is on one card"
    assert not any("noisy" in note or "longer than before" in note for note in result.notes)
    assert result.winner


def test_a_killed_process_costs_the_candidate_in_flight_which_is_tried_elsewhere(
    cards: dict[str, str], database: Path
) -> None:
    Path(cards["second"]).with_suffix(".dies").touch()
    told = Told()
    result = search_on(cards, database, told, trials=20)
    assert (result.counts.failed, result.counts.measured) == (0, 20)
    assert sum("tried once more" in notice for notice in told.notices) == 1
    ran = {name: candidates_of(ran_on(card)) for name, card in cards.items()}
    struck = ran["second"][0]
    assert struck in ran["first"]
    assert not any("is lost" in notice for notice in told.notices)


def test_a_lost_card_costs_the_candidate_in_flight_which_is_tried_elsewhere(
    cards: dict[str, str], database: Path
) -> None:
    Path(cards["second"]).with_suffix(".dies").write_text(".gone")
    told = Told()
    result = search_on(cards, database, told, trials=20)
    assert (result.status, result.counts.failed, result.counts.measured) == ("complete", 0, 20)
    (lost,) = (notice for notice in told.notices if "is lost" in notice)
    assert lost == "second is lost: the GPU has fallen off the bus; 1 left, and what it was doing is done again"
    ran = {name: candidates_of(ran_on(card)) for name, card in cards.items()}
    assert len(ran["second"]) == 1
    assert ran["second"][0] in ran["first"]


def test_a_search_whose_cards_are_all_lost_keeps_its_best(cards: dict[str, str], database: Path) -> None:
    class Losing(Told):
        def update(self, status):
            if status.counts.measured == 5:
                for card in cards.values():
                    Path(card).with_suffix(".dies").write_text(".gone")

    with pytest.raises(WorkerError, match="fallen off the bus"):
        search_on(cards, database, Losing(), trials=20)
    with closing(Store.open(database)) as store:
        (winner,) = store.winners()
    assert winner.partial
    for card in cards.values():
        Path(card).with_suffix(".gone").unlink(missing_ok=True)
        Path(card).with_suffix(".dies").unlink(missing_ok=True)
    before = decided(database)
    assert len(set(filter(None, before.values()))) >= 5
    result = search_on(cards, database, trials=5)
    assert result.counts.earlier == len(before)
    assert set(costs(database)) > {config for config, cost in before.items() if cost}


def test_more_gpus_have_more_candidates_in_flight(database: Path) -> None:
    """As many compilers as for one are busy for each; the first candidate is not decided before that."""
    builder, in_flight = FakeBuilder(), threading.Event()

    class Waiting(FakeBench):
        def verify(self, problem: Problem, variant: Variant) -> VerificationRecord:
            assert in_flight.wait(60)
            return super().verify(problem, variant)

    def compiling(source: Source, arch: str) -> Variant:
        variant = builder(source, arch)
        if len(builder.compiled) == 2 * LOOK_AHEAD:
            in_flight.set()
        return variant

    result = run_search(
        database, benches={"a": Waiting(), "b": Waiting()}, builder=compiling, trials=2 * LOOK_AHEAD + 1
    )
    assert result.counts.measured == 2 * LOOK_AHEAD + 1
