"""Which of two winners is the better one, where they were found by different searches, perhaps on different cards.

Milliseconds of two searches do not compare: clocks fall under load, and cards of one name differ by several per cent.
What compares is what ran side by side, or beside the same third kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from .records import EMULATED, MeasurementRecord, StoredMeasurement

Interval = tuple[float, float]


class Judgement(Enum):
    """Of a challenger beside the present winner."""

    BETTER = "better"
    WORSE = "worse"
    ALIKE = "not told apart"
    UNKNOWN = "not comparable"


@dataclass(frozen=True)
class Evidence:
    """What is known of a challenger beside the present winner.

    Attributes:
        judgement: Which is better.
        reason: What that rests on, in a few words.
    """

    judgement: Judgement
    reason: str


def compare(
    challenger: StoredMeasurement,
    present: StoredMeasurement,
    measurements: Iterable[StoredMeasurement],
    cards: Mapping[int, str | None],
) -> Evidence:
    """Judges by the best evidence that there is, where the intervals of the two do not overlap.

    In this order: one search that timed both; their ratios to PyTorch's default backward, each of its own race; times
    on one and the same card. Emulated ones by their cycles, which do not depend on the clock.

    Args:
        challenger: What it is to win by.
        present: What the present winner wins by.
        measurements: All of the problem's.
        cards: The UUID of the card of each search, by its id.
    """
    mine, its = challenger.record, present.record
    if EMULATED in (mine.kind, its.kind):
        return _by_cycles(mine, its)
    if both := _side_by_side(challenger, present, measurements):
        one, other = both
        return _judged(_times(one), _times(other), f"one search timed both ({one.policy})")
    alike = _conditions(mine) == _conditions(its)
    if alike and mine.default_ms and its.default_ms and mine.default_kernel == its.default_kernel:
        ratios = f"{mine.default_ms / mine.median_ms:.3f} and {its.default_ms / its.median_ms:.3f}"
        reason = f"{ratios} times as fast as PyTorch's default ({mine.default_kernel}), each in its own race"
        return _judged(_times(mine, mine.default_ms), _times(its, its.default_ms), reason)
    card = _card(challenger, cards)
    if alike and card and card == _card(present, cards) and mine.environment.driver == its.environment.driver:
        return _judged(_times(mine), _times(its), f"{mine.median_ms:.4g} and {its.median_ms:.4g} ms on one card")
    return Evidence(Judgement.UNKNOWN, "they were neither timed together, nor beside the same kernel, nor on one card")


def _by_cycles(mine: MeasurementRecord, its: MeasurementRecord) -> Evidence:
    if (
        mine.cycles is None
        or its.cycles is None
        or (mine.policy, mine.environment.toolkit)
        != (
            its.policy,
            its.environment.toolkit,
        )
    ):
        return Evidence(Judgement.UNKNOWN, "their cycles were not counted in the same way")
    reason = f"{mine.cycles / 1e6:.3f} and {its.cycles / 1e6:.3f} Mcycles"
    return Evidence(Judgement.BETTER if mine.cycles < its.cycles else Judgement.WORSE, reason)


def _side_by_side(
    challenger: StoredMeasurement, present: StoredMeasurement, measurements: Iterable[StoredMeasurement]
) -> tuple[MeasurementRecord, MeasurementRecord] | None:
    """The newest times of the two kernels that one search took, under a policy by which one of them wins."""
    policies = {challenger.record.policy, present.record.policy}
    kernels = [same_kernel(challenger), same_kernel(present)]
    found: dict[tuple[int, str], dict[int, MeasurementRecord]] = {}
    for one in sorted(measurements, key=lambda one: one.created_at):
        record = one.record
        if one.search_id is None or record.policy not in policies or same_kernel(one) not in kernels:
            continue
        if record.limits == challenger.record.limits and record.kind == challenger.record.kind:
            # Put in anew, so that the last key is that of the newest.
            times = found.pop((one.search_id, record.policy), {})
            found[one.search_id, record.policy] = times | {kernels.index(same_kernel(one)): record}
    both = [times for times in found.values() if len(times) == len(kernels)]
    return (both[-1][0], both[-1][1]) if both else None


def same_kernel(measurement: StoredMeasurement) -> tuple[object, ...]:
    """What two measurements of one kernel have in common: its machine code, or its text where that is not known."""
    variant = measurement.variant
    return variant.config, variant.arch, variant.machine_code or variant.source_hash


def _conditions(record: MeasurementRecord) -> tuple[object, ...]:
    """What times beside PyTorch's kernels depend on; not the driver, which both have."""
    environment = record.environment
    return environment.gpu, environment.torch, environment.toolkit, record.policy, record.limits


def _card(measurement: StoredMeasurement, cards: Mapping[int, str | None]) -> str | None:
    card = None if measurement.search_id is None else cards.get(measurement.search_id)
    return None if card is None or "," in card else card  # of several, nobody knows which


def _times(record: MeasurementRecord, unit_ms: float = 1.0) -> Interval:
    return record.low_ms / unit_ms, record.high_ms / unit_ms


def _judged(mine: Interval, its: Interval, reason: str) -> Evidence:
    if mine[1] < its[0]:
        return Evidence(Judgement.BETTER, reason)
    return Evidence(Judgement.WORSE if its[1] < mine[0] else Judgement.ALIKE, reason)
