"""Compiling in the background."""

from __future__ import annotations

import threading

import pytest

from bwdtune.tuner.lab.pool import Results
from bwdtune.tuner.search.compilers import Compilers


def test_results_come_as_they_are_ready() -> None:
    slow, results = threading.Event(), Results()

    def work(job: str) -> str:
        if job == "slow":
            slow.wait(30)
        return job.upper()

    compilers = Compilers(work, threads=2, results=results)
    for job in ("slow", "a", "b"):
        compilers.submit(job)
    assert {results.next(30), results.next(30)} == {("a", "A"), ("b", "B")}
    assert results.next(0.01) == (None, None)
    slow.set()
    assert results.next(30) == ("slow", "SLOW")
    compilers.close()


def test_what_a_job_raises_is_raised_where_it_is_waited_for() -> None:
    def work(job: str) -> str:
        raise ValueError(job)

    results = Results()
    compilers = Compilers(work, threads=1, results=results)
    compilers.submit("bad")
    with pytest.raises(ValueError, match="bad"):
        results.next(30)
    compilers.close()


def test_jobs_that_were_not_begun_can_be_taken_back() -> None:
    begun, go_on = threading.Event(), threading.Event()
    done, results = [], Results()

    def work(job: int) -> int:
        begun.set()
        go_on.wait(30)
        done.append(job)
        return job

    compilers = Compilers(work, threads=1, results=results)
    for job in range(3):
        compilers.submit(job)
    assert begun.wait(30)
    compilers.forget_waiting()
    go_on.set()
    assert results.next(30) == (0, 0)
    assert results.next(0.05) == (None, None)
    compilers.close()
    assert done == [0]
