"""Who is about to measure what: one of several searches, and a search that has ended without a word does not."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bwdtune.db.records import Holder
from bwdtune.db.store import Store

SCOPE, LIFETIME_S = "a study", 60.0
MINE = Holder("mine", "here", os.getpid())
ANOTHERS = Holder("another's", "elsewhere", 1)


@pytest.fixture
def store(tmp_path: Path):
    with closing(Store.open(tmp_path / "results.sqlite")) as store:
        yield store


def claim(store: Store, subject: str, holder: Holder, lifetime_s: float = LIFETIME_S, scope: str = SCOPE) -> bool:
    return store.claim(scope, subject, holder, lifetime_s)


def test_the_first_has_it(store: Store) -> None:
    assert claim(store, "a", MINE)
    assert not claim(store, "a", ANOTHERS)
    assert claim(store, "a", MINE), "again"
    assert claim(store, "b", ANOTHERS)
    assert claim(store, "a", ANOTHERS, scope="another study")


def test_what_is_given_up_is_free(store: Store) -> None:
    assert claim(store, "a", MINE)
    assert claim(store, "b", ANOTHERS)
    store.release(SCOPE, MINE)
    assert claim(store, "a", ANOTHERS)
    assert not claim(store, "b", MINE), "another's is kept"


def test_a_claim_expires_unless_it_is_renewed(store: Store) -> None:
    assert claim(store, "a", MINE, lifetime_s=-1.0)
    assert claim(store, "b", MINE, lifetime_s=-1.0)
    assert claim(store, "a", ANOTHERS)
    store.renew(SCOPE, MINE, LIFETIME_S)
    assert not claim(store, "b", ANOTHERS)


def test_the_claims_of_a_process_of_this_machine_end_with_it(store: Store) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    its = Holder("its", "here", process.pid)
    assert claim(store, "a", its)
    assert not claim(store, "a", MINE)
    process.communicate()
    assert not claim(store, "a", replace(MINE, host="elsewhere")), "where nobody knows of that process"
    assert claim(store, "a", MINE)


def test_of_many_at_once_one_has_it(store: Store) -> None:
    holders = [Holder(str(number), "here", os.getpid()) for number in range(8)]
    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(lambda holder: claim(store, "a", holder), holders)) == 1
