"""Which of two winners is better: by what ran side by side, never by the milliseconds of two searches."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from bwdtune.db.evidence import Judgement, compare
from bwdtune.db.records import (
    EMULATED,
    Environment,
    GpuKey,
    MeasurementRecord,
    StoredMeasurement,
    VariantRecord,
)
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem

H200 = Environment(GpuKey("NVIDIA H200", "9.0"), "sm_90a", "580.65.06", "13.0.88", "2.13.0")
CARDS = {1: "GPU-one", 2: "GPU-two", 3: "GPU-one", 4: "GPU-one,GPU-two", 5: "GPU-one,GPU-two"}
DEFAULT = {"default_kernel": "cudnn"}


def measured(name: str, median_ms: float, search: int | None = None, wide: float = 0.01, **changes: Any) -> Any:
    """Of a preset's kernel, by a search."""
    record = MeasurementRecord(H200, "race-1", median_ms, median_ms * (1 - wide), median_ms * (1 + wide), 30)
    return StoredMeasurement(
        id=0,
        problem=Problem.parse("8_16_4096_128", causal=True),
        variant_id=0,
        variant=VariantRecord(PRESETS[name], f"source of {name}", "templates", "sm_90a", "13.0.88"),
        record=replace(record, **changes),
        verification_id=None,
        verification=None,
        created_at=datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(days=search or 0),
        search_id=search,
    )


def judged(mine: StoredMeasurement, its: StoredMeasurement, *others: StoredMeasurement) -> Judgement:
    evidence = compare(mine, its, [mine, its, *others], CARDS)
    assert evidence.reason
    return evidence.judgement


@pytest.mark.parametrize(
    ("mine_ms", "its_ms", "found"),
    [(4.0, 5.0, Judgement.BETTER), (5.0, 4.0, Judgement.WORSE), (5.0, 5.05, Judgement.ALIKE)],
)
def test_one_search_that_timed_both_decides(mine_ms: float, its_ms: float, found: Judgement) -> None:
    """Whatever the times are that they won by."""
    fast, slow = measured("v1", 1.0, 1), measured("v2", 9.0, 2)
    assert judged(fast, slow, measured("v1", mine_ms, 3), measured("v2", its_ms, 3)) is found
    # Of several such searches the newest.
    assert (
        judged(
            measured("v1", 9.0, 1), slow, measured("v2", 5.0, 1), measured("v1", mine_ms, 2), measured("v2", its_ms, 2)
        )
        is found
    )


def test_times_of_another_policy_or_limit_are_no_race_of_theirs() -> None:
    mine, its = measured("v1", 4.0, 1), measured("v2", 5.0, 2)
    for changes in ({"policy": "search-1"}, {"limits": "sm_120"}):
        assert judged(mine, its, measured("v2", 9.0, 1, **changes)) is Judgement.UNKNOWN
    assert judged(mine, its, measured("v2", 9.0)) is Judgement.UNKNOWN, "it belongs to no search"


@pytest.mark.parametrize(
    ("mine", "its", "found"),
    [
        ((4.0, 6.0), (5.0, 6.0), Judgement.BETTER),
        ((4.0, 6.0), (5.0, 9.0), Judgement.WORSE),  # on a slower card
        ((4.0, 6.0), (5.0, 7.5), Judgement.ALIKE),
    ],
)
def test_ratios_to_pytorchs_default_compare_across_cards(
    mine: tuple[float, float], its: tuple[float, float], found: Judgement
) -> None:
    times = [
        measured(name, ours, search, default_ms=default, **DEFAULT)
        for name, search, (ours, default) in (("v1", 1, mine), ("v2", 2, its))
    ]
    assert judged(*times) is found


@pytest.mark.parametrize(
    "changes",
    [
        {"default_kernel": "flash", "default_ms": 6.0},
        {"default_ms": None, "default_kernel": None},
        {"environment": replace(H200, torch="2.11.0"), "default_ms": 6.0, **DEFAULT},
        {"environment": replace(H200, toolkit="12.8.93"), "default_ms": 6.0, **DEFAULT},
        {"policy": "race-2", "default_ms": 6.0, **DEFAULT},
    ],
)
def test_ratios_of_other_kernels_and_conditions_do_not(changes: dict[str, Any]) -> None:
    mine = measured("v1", 4.0, 1, default_ms=6.0, **DEFAULT)
    assert judged(mine, measured("v2", 5.0, 2, **changes)) is Judgement.UNKNOWN


def test_times_compare_on_one_card_with_one_driver() -> None:
    mine = measured("v1", 4.0, 1)
    assert judged(mine, measured("v2", 5.0, 3)) is Judgement.BETTER
    assert judged(mine, measured("v2", 4.05, 3)) is Judgement.ALIKE
    assert judged(mine, measured("v2", 5.0, 2)) is Judgement.UNKNOWN, "another card"
    newer = replace(H200, driver="590.1")
    assert judged(mine, measured("v2", 5.0, 3, environment=newer)) is Judgement.UNKNOWN
    assert judged(mine, measured("v2", 5.0)) is Judgement.UNKNOWN, "nobody knows on which"
    assert judged(measured("v1", 4.0, 4), measured("v2", 5.0, 4)) is Judgement.BETTER, "one search timed both"
    assert judged(measured("v1", 4.0, 4), measured("v2", 5.0, 5)) is Judgement.UNKNOWN, "on one of two"


def test_cycles_of_emulated_ones_compare() -> None:
    mine, its = (
        measured(name, 9.0, search, kind=EMULATED, limits="sm_120", cycles=cycles)
        for name, search, cycles in (("v1", 1, 2e7), ("v2", 2, 3e7))
    )
    assert judged(mine, its) is Judgement.BETTER
    assert judged(its, mine) is Judgement.WORSE
    other = replace(its, record=replace(its.record, environment=replace(H200, toolkit="12.8.93")))
    assert judged(mine, other) is Judgement.UNKNOWN
