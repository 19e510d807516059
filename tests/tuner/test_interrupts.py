"""Signals strike where a search waits, and nowhere else."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from bwdtune.tuner.interrupts import Interrupts


def strike(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_held_back_until_the_next_wait(number: int) -> None:
    with Interrupts() as interrupts:
        strike(number)
        written = "whole"
        with pytest.raises(KeyboardInterrupt), interrupts.striking():
            pytest.fail("it does not get here")
    assert written == "whole"


def test_a_signal_ends_a_wait() -> None:
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        _strike_while_waiting(interrupts)


def _strike_while_waiting(interrupts: Interrupts) -> None:
    with interrupts.striking():
        strike()
        threading.Event().wait(10)
        pytest.fail("it does not get here")


def test_a_second_signal_strikes_anywhere() -> None:
    with Interrupts():
        strike()
        with pytest.raises(KeyboardInterrupt):
            strike()


def test_a_terminal_that_closes_tells_so_more_than_once() -> None:
    with Interrupts() as interrupts:
        strike(signal.SIGHUP)
        strike(signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt), interrupts.striking():
            pytest.fail("it does not get here")


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.striking():
            strike(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_former_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with Interrupts() as interrupts, interrupts.striking():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
