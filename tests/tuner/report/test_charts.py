"""Scales: whatever is drawn lies within its chart, and ticks are round and few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bwdtune.tuner.report.charts import Scale

values = st.floats(1e-6, 1e9)


@given(values, st.floats(1.0001, 1e6), st.floats(-1e12, 1e12, allow_subnormal=False), st.booleans())
def test_places_lie_between_the_ends(low: float, factor: float, value: float, log: bool) -> None:
    scale = Scale(low, low * factor, 200.0, 8.0, log)
    assert 8.0 <= scale(value) <= 200.0
    assert (scale(low), scale(low * factor)) == (200.0, 8.0)


@given(values, st.floats(1.0001, 1e6), st.integers(2, 9), st.booleans())
def test_ticks_are_few_in_order_and_where_their_labels_say(low: float, factor: float, most: int, log: bool) -> None:
    scale = Scale(low, low * factor, log=log)
    ticks = scale.ticks(most)
    assert len(ticks) <= most
    assert [tick.at for tick in ticks] == sorted(tick.at for tick in ticks)
    for tick in ticks:
        assert scale(float(tick.text.replace(",", ""))) == pytest.approx(tick.at, abs=1.0)


@pytest.mark.parametrize(
    ("scale", "whole", "texts"),
    [
        (Scale(0, 12), False, ["0", "2", "4", "6", "8", "10", "12"]),
        (Scale(0, 16), True, ["0", "5", "10", "15"]),
        (Scale(0, 61), True, ["0", "10", "20", "30", "40", "50", "60"]),
        (Scale(2.1, 6.5, log=True), False, ["2.5", "3", "4", "5", "6"]),
        (Scale(2.2, 2.4, log=True), False, ["2.2", "2.25", "2.3", "2.35", "2.4"]),
        (
            Scale(50, 20_000, log=True),
            False,
            ["50", "100", "200", "500", "1,000", "2,000", "5,000", "10,000", "20,000"],
        ),
    ],
)
def test_ticks_are_round(scale: Scale, whole: bool, texts: list[str]) -> None:
    most = 9 if scale.high > 1000 else 7
    assert [tick.text for tick in scale.ticks(most, whole=whole)] == texts
