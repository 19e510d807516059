"""Where the wall time of a search goes."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from bwdtune.tuner.search.clock import SearchClock


class Time:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def clock(time: Time) -> SearchClock:
    return SearchClock(1, time)


def split(clock: SearchClock) -> dict[str, float]:
    """What is not zero, without the total."""
    seconds = clock.seconds()
    assert seconds["total"] == sum(seconds[kind] for kind in ("compile", "verify", "time", "overhead"))
    return {kind: value for kind, value in seconds.items() if value and kind != "total"}


def test_nothing_at_work_is_overhead(clock: SearchClock, time: Time) -> None:
    time.now = 3
    assert split(clock) == {"overhead": 3}


def test_compilers_count_while_nothing_is_ready(clock: SearchClock, time: Time) -> None:
    with clock.compiling():
        time.now = 2
        with clock.compiling():
            time.now = 3
        time.now = 7  # one is ready, and the GPU idle
        clock.is_taken()
        time.now = 8
    assert split(clock) == {"compile": 4, "overhead": 4}


def test_a_gpu_at_work_hides_all_else(clock: SearchClock, time: Time) -> None:
    with clock.at_work("time"), clock.compiling():
        time.now = 1
        with clock.phase("propose"):
            time.now = 5
        clock.is_ready()
        time.now = 6
    assert split(clock) == {"time": 6, "propose": 4}


def test_an_idle_gpu_beside_one_at_work_is_overhead_where_a_candidate_is_ready(time: Time) -> None:
    clock = SearchClock(2, time)
    with clock.at_work("verify"):
        time.now = 1
        clock.is_ready()
        time.now = 3
        clock.loses_gpu()
        time.now = 4
    assert split(clock) == {"verify": 2, "overhead": 2}


def test_what_is_never_measured_is_not_waited_for(clock: SearchClock, time: Time) -> None:
    with clock.compiling():
        pass
    clock.none_is_ready()
    clock.is_taken()  # it comes all the same
    with clock.compiling():
        time.now = 2
    assert split(clock) == {"compile": 2}


def test_without_gpus_compilers_count_whatever_is_ready(time: Time) -> None:
    clock = SearchClock(0, time)
    with ExitStack() as stack:
        stack.enter_context(clock.compiling())
        with clock.compiling():
            time.now = 1
        time.now = 4
    assert split(clock) == {"compile": 4}


def test_a_part_of_a_timing_may_be_verification(clock: SearchClock, time: Time) -> None:
    with clock.at_work("time"):
        time.now = 4
    clock.move("time", "verify", 3)
    clock.move("time", "verify", 3)  # there is only so much left
    assert split(clock) == {"verify": 4}
