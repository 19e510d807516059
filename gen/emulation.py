"""Emulates another card's ``mma`` rate: how far a card's tensor cores are slowed to stand for a card that is not here.

Each real ``mma`` is accompanied by dummy ones, which add zero, and no more blocks run on an SM than on the other card.
Everything else runs at its own speed: barriers, shared memory, latencies, L2 and DRAM are those of the running card.
"""

from __future__ import annotations

from dataclasses import dataclass

from .device import RTX_5090, RTX_PRO_6000, Device
from .errors import UsageError

EMULATED_CARDS = {"sm_120": RTX_5090, "rtx_pro_6000": RTX_PRO_6000}
"""Cards that another one can stand for, by the name they are asked for."""


@dataclass(frozen=True)
class Emulation:
    """One card at the pace of another.

    Attributes:
        name: A key of ``EMULATED_CARDS``.
        target: The card that is emulated.
        card: The card that runs.
        dummies: Dummy mma beside each real one.
        clocks_per_mma: What a sub-partition of the running card takes for a real mma and its dummies, at its best.
    """

    name: str
    target: Device
    card: Device
    dummies: int
    clocks_per_mma: float


def emulation(name: str, card: Device) -> Emulation:
    """How `card` is brought to the mma rate of another: by the ratio of the two, to the nearest whole number.

    Args:
        name: A key of ``EMULATED_CARDS``.
        card: The card that runs.

    Raises:
        UsageError: Nobody emulates a card of that name, the card's rate is not known, or it is not faster.
    """
    if name not in EMULATED_CARDS:
        raise UsageError(f"unknown card to emulate {name!r}: use {', '.join(EMULATED_CARDS)}")
    target = EMULATED_CARDS[name]
    if card.clocks_per_mma is None or target.clocks_per_mma is None:
        raise UsageError(f"{card.name} cannot emulate {name}: the rate of its mma is not known")
    mmas = round(target.clocks_per_mma / card.clocks_per_mma)
    if mmas < 2:
        raise UsageError(f"{card.name} cannot emulate {name}: its own mma are not twice as fast")
    return Emulation(name, target, card, mmas - 1, mmas * card.clocks_per_mma)
