"""What another database hands on goes into any backend, and once more changes nothing."""

from __future__ import annotations

import pytest
from exports import exported

from bwdtune.db.adoption import adopt
from bwdtune.db.blocks import read_blocks
from bwdtune.db.exchange import read_export, write_export
from bwdtune.db.integrity import faults
from bwdtune.db.records import EMULATED
from bwdtune.db.store import Store


@pytest.mark.parametrize("trusted", [False, True])
def test_it_is_stored_once(any_store: Store, trusted: bool) -> None:
    blocks = read_export(exported())
    first = [adopt(any_store, block, trusted=trusted) for block in blocks]
    again = [adopt(any_store, block, trusted=trusted) for block in blocks]
    assert sum(one.searches for one in first) == len(any_store.searches()) == 3
    assert sum(one.measurements for one in first) == len(any_store.measurements()) == 10
    assert all((one.searches, one.measurements, one.conflicts) == (0, 0, ()) for one in again)
    assert [one.contenders for one in again] == [one.contenders for one in first]
    assert {one.trusted for one in any_store.measurements()} == {trusted}
    assert any_store.winners() == any_store.emulated_bests() == [], "nothing wins by that alone"
    assert list(faults(any_store)) == []

    contenders = [contender for one in first for contender in one.contenders]
    assert {contender.verification_id is not None for contender in contenders} == {trusted}
    if not trusted:
        assert not any(block.kernels for block in read_blocks(any_store))
        return
    for one in contenders:
        assert one.verification_id
        adopted = (one.problem, one.timed.record, one.measurement_id, one.verification_id)
        any_store.adopt_best(*adopted, partial=one.timed.wins == "partial")
    emulated = [one for one in contenders if one.timed.record.kind == EMULATED]
    assert (len(any_store.winners()), len(any_store.emulated_bests())) == (len(contenders) - 1, len(emulated))
    assert write_export(read_blocks(any_store)) == exported()


def test_a_search_that_has_ended_since_is_brought_up_to_date(any_store: Store) -> None:
    (running,) = [block for block in read_export(exported()) if block.searches and not block.searches[0].ended_at]
    adopt(any_store, running, trusted=False)
    assert any_store.searches()[0].status == "running"
    text = (
        exported()
        .replace('"status": "running"', '"status": "partial"')
        .replace('"ended_at": null', '"ended_at": "2026-12-02T00:00:00+00:00"')
    )
    for block in read_export(text):
        adopt(any_store, block, trusted=False)
    (search,) = any_store.searches(running.problem)
    assert (search.status, search.decided) == ("partial", running.searches[0].decided)
    assert search.ended_at is not None
