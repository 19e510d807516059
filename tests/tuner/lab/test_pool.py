"""Work for several benches: what becomes of it when one of them goes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bwdtune.tuner.lab.pool import Answered, Lost, Pool, Results, Work
from bwdtune.tuner.lab.protocol import CandidateError, WorkerError

LIMIT_S = 60


@contextmanager
def pool_of(*names: str) -> Iterator[tuple[Pool, Results]]:
    """Benches that are their own names: work is a function of the name."""
    results = Results()
    pool = Pool({name: name for name in names}, results)  # type: ignore[dict-item]
    yield pool, results
    pool.close()


def ended(pool: Pool, results: Results) -> Iterator[tuple[Any, Any]]:
    """What comes until nothing is left to be done."""
    while pool.busy:
        task, result = results.next(LIMIT_S)
        if isinstance(task, Work):
            pool.release(task)
        yield task, result


def test_each_bench_does_one_thing_at_a_time() -> None:
    at_work: list[str] = []
    both = threading.Barrier(2, timeout=LIMIT_S)

    def do(bench: Any) -> str:
        assert bench not in at_work
        at_work.append(bench)
        both.wait()
        at_work.remove(bench)
        return bench

    with pool_of("a", "b") as (pool, results):
        assert (pool.size, pool.takes(), pool.busy) == (2, True, False)
        for _ in range(4):
            pool.submit(Work(do))
        assert (pool.takes(), pool.busy) == (False, True)
        assert sorted(answer.get() for _, answer in ended(pool, results)) == ["a", "a", "b", "b"]
        assert (pool.takes(), pool.busy) == (True, False)


def test_a_bench_does_nothing_more_before_its_result_is_known() -> None:
    """What is begun next may depend on it: the incumbent, say."""
    with pool_of("a") as (pool, results):
        pool.submit(Work(lambda bench: 1))
        work, answer = results.next(LIMIT_S)
        assert (pool.takes(), pool.busy, answer) == (False, True, Answered(1))
        pool.release(work)
        assert (pool.takes(), pool.busy) == (True, False)


def test_a_second_try_is_another_benchs() -> None:
    go_on = threading.Event()
    with pool_of("a", "b") as (pool, results):
        pool.submit(Work(lambda bench: go_on.wait(LIMIT_S), avoid="a"))
        assert (pool.takes(), pool.takes("b"), pool.takes("a")) == (True, True, False)
        go_on.set()
        ((work, _),) = ended(pool, results)
        assert work.bench == "b"
        for _ in range(3):
            pool.submit(Work(lambda bench: bench, avoid="a"))
            ((work, answer),) = ended(pool, results)
            assert answer.get() == work.bench == "b"
    with pool_of("a") as (pool, results):
        assert pool.takes("a")
        pool.submit(Work(lambda bench: bench, avoid="a"))
        ((_, answer),) = ended(pool, results)
        assert answer.get() == "a", "there is no other"


def test_a_pool_says_what_each_bench_is_at() -> None:
    go_on, begun = threading.Event(), threading.Barrier(2, timeout=LIMIT_S)

    def do(bench: Any) -> None:
        begun.wait()
        go_on.wait(LIMIT_S)

    with pool_of("a", "b") as (pool, results):
        assert pool.doing == {"a": None, "b": None}
        pool.submit(Work(do, label="w64"))
        begun.wait()
        assert pool.doing == {"a": "w64", "b": None}
        go_on.set()
        list(ended(pool, results))
        assert pool.doing == {"a": None, "b": None}


def test_a_candidates_fault_is_an_answer() -> None:
    def do(bench: Any) -> None:
        raise CandidateError("it crashed")

    with pool_of("a") as (pool, results):
        pool.submit(Work(do))
        ((_, answer),) = ended(pool, results)
        with pytest.raises(CandidateError, match="it crashed"):
            answer.get()
        assert pool.size == 1


def test_what_a_lost_bench_did_is_done_by_another() -> None:
    def do(bench: Any) -> str:
        if bench == "a":
            raise WorkerError("fell off the bus")
        return bench

    with pool_of("a", "b") as (pool, results):
        works = [Work(do, subject) for subject in range(3)]
        for work in works:
            pool.submit(work)
        came = list(ended(pool, results))
        assert {answer.get() for task, answer in came if isinstance(task, Work)} == {"b"}
        (lost,) = (task for task, _ in came if isinstance(task, Lost))
        assert str(lost) == "a is lost: fell off the bus; 1 left, and what it was doing is done again"
        assert {id(task) for task, _ in came if isinstance(task, Work)} == set(map(id, works))
        assert pool.size == 1


def test_what_benches_are_lost_by_does_not_cost_all_of_them() -> None:
    def poison(bench: Any) -> None:
        raise WorkerError("process 7 cannot be ended")

    with pool_of("a", "b", "c") as (pool, results):
        pool.submit(Work(poison))
        *lost, (_, answer) = ended(pool, results)
        assert len(lost) == 2
        with pytest.raises(CandidateError, match="2 GPUs were lost while they ran it: process 7 cannot be ended"):
            answer.get()
        pool.submit(Work(lambda bench: bench))
        ((_, answer),) = ended(pool, results)
        assert answer.get() == "c"


@pytest.mark.parametrize("error", [WorkerError("gone"), ValueError("a fault of ours")])
def test_the_last_benchs_loss_is_raised_as_any_other_error(error: Exception) -> None:
    def do(bench: Any) -> None:
        raise error

    with pool_of("a") as (pool, results):
        pool.submit(Work(do))
        with pytest.raises(type(error), match=str(error)):
            results.next(LIMIT_S)


def test_what_ends_after_the_pool_is_nobodys() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def do(bench: Any) -> None:
        begun.set()
        go_on.wait(LIMIT_S)
        raise WorkerError("closed")

    with pool_of("a") as (pool, results):
        pool.submit(Work(do))
        pool.submit(Work(lambda bench: pytest.fail("nothing more is begun")))
        assert begun.wait(LIMIT_S)
    go_on.set()
    assert results.next(0.1) == (None, None)
