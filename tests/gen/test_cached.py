"""A property that is computed once, also in a child that is forked while another thread computes one."""

from __future__ import annotations

import os
import signal
import threading

from bwdtune.gen.cached import cached_property


class Slow:
    """Its value takes until it is let go."""

    def __init__(self) -> None:
        self.begun, self.released, self.computed = threading.Event(), threading.Event(), 0

    @cached_property
    def value(self) -> int:
        """A number."""
        self.begun.set()
        self.released.wait()
        self.computed += 1
        return 42


def test_it_is_computed_once() -> None:
    one = Slow()
    one.released.set()
    assert (one.value, one.value, one.computed) == (42, 42, 1)
    assert Slow.value.__doc__ == "A number."


def test_a_child_that_is_forked_meanwhile_computes_its_own() -> None:
    """`functools.cached_property` leaves it waiting for ever before Python 3.12."""
    slow, quick = Slow(), Slow()
    quick.released.set()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    slow.begun.wait()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        os._exit(quick.value != 42)
    slow.released.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
