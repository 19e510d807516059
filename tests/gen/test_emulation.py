"""Another card's pace: how many dummy mma, and what a build that is only measured has beside the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bwdtune.gen.device import H100, H200, HOST, RTX_5090, RTX_PRO_6000, Device
from bwdtune.gen.emulation import EMULATED_CARDS, emulation
from bwdtune.gen.errors import UsageError
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.tuner.search.tensor_activity import mma_count, tensor_activity

SEED = Problem.parse("8_16_4096_128", causal=True)


@pytest.mark.parametrize(
    ("name", "card", "dummies", "clocks"),
    [
        ("sm_120", H200, 4, 30.4),
        ("sm_120", H100, 4, 30.4),
        ("sm_120", HOST, 4, 30.4),
        ("sm_120", RTX_PRO_6000, 1, 32.0),
        ("rtx_pro_6000", H200, 2, 18.24),
    ],
)
def test_as_many_dummies_as_the_rates_differ(name: str, card: Device, dummies: int, clocks: float) -> None:
    pace = emulation(name, card)
    assert (pace.target, pace.dummies) == (EMULATED_CARDS[name], dummies)
    assert pace.clocks_per_mma == pytest.approx(clocks)
    assert pace.clocks_per_mma == pytest.approx(pace.target.clocks_per_mma, rel=0.15)


@pytest.mark.parametrize("card", EMULATED_CARDS.values(), ids=lambda card: card.name)
def test_an_emulated_cards_rate_is_its_peak(card: Device) -> None:
    flops_per_clock = card.peak_tflops * 1e12 / (card.boost_clock_ghz * 1e9 * card.sm_count * 4)
    assert card.clocks_per_mma == pytest.approx(2 * 16 * 8 * 16 / flops_per_clock, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "card", "message"),
    [
        ("sm_100", H200, "unknown card to emulate"),
        ("sm_120", replace(H200, clocks_per_mma=None), "is not known"),
        ("sm_120", RTX_5090, "not twice as fast"),
        ("rtx_pro_6000", RTX_5090, "not twice as fast"),
        ("sm_120", replace(H200, clocks_per_mma=25.0), "not twice as fast"),
    ],
)
def test_what_cannot_be_emulated_is_refused(name: str, card: Device, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        emulation(name, card)


@pytest.mark.parametrize("dummies", [1, 4, 7])
def test_the_number_of_dummies_follows_from_the_rates(dummies: int) -> None:
    card = replace(H200, clocks_per_mma=32.0 / (dummies + 1))
    text = render(SEED, PRESETS["v3"], emulate="sm_120", card=card).text
    assert f"#define PACE_DUMMIES {dummies}\n" in text


MMA_PRESETS = {name: config for name, config in PRESETS.items() if config.group == "mma"}


@pytest.mark.parametrize("preset", ["w64", "w64lag"])
def test_a_wgmma_kernel_is_neither_slowed_nor_counted(preset: str) -> None:
    with pytest.raises(UsageError, match="wgmma kernels do not count their cycles"):
        render(SEED, PRESETS[preset], cycles=True)


@pytest.mark.parametrize("config", MMA_PRESETS.values(), ids=list(MMA_PRESETS))
def test_a_kernel_that_is_used_has_nothing_of_it(config) -> None:
    plain, probed = render(SEED, config), render(SEED, config, cycles=True)
    emulated = render(SEED, config, emulate="sm_120")
    words = ("probe", "sm_clock", "pace_begin", "spare", "measurement alone", "unpaced")
    assert [word for word in words if word in plain.text.lower()] == []
    assert [word for word in words[:3] if word in probed.text.lower()] == ["probe", "sm_clock"]
    assert all(word in emulated.text.lower() for word in words)
    assert len({source.name for source in (plain, probed, emulated)}) == 3
    assert len({source.hash for source in (plain, probed, emulated)}) == 3
    assert (plain.emulate, plain.probed) == (None, False)
    assert (probed.emulate, probed.probed) == (None, True)
    assert (emulated.emulate, emulated.probed) == ("sm_120", True)


def test_an_mma_is_16_by_8_by_16() -> None:
    full = Problem.parse("1_1_64_64")
    assert mma_count(full, PRESETS["v2"]) == 5 * (64 // 16) * (64 // 8) * (64 // 16)
    # Grouped heads of keys have the products of all query heads; a tail is a whole tile.
    assert mma_count(Problem.parse("2_4_1_65_64"), PRESETS["v2"]) == 2 * 4 * 4 * mma_count(full, PRESETS["v2"])


def test_a_causal_mask_leaves_out_the_tiles_above_it() -> None:
    causal, full = Problem.parse("1_1_256_64", causal=True), Problem.parse("1_1_256_64")
    assert mma_count(causal, PRESETS["v2"]) / mma_count(full, PRESETS["v2"]) == (4 + 3 + 2 + 1) / 16


def test_tensor_activity_of_the_write_ups_v3() -> None:
    """What an H200 showed at a 5090's pace."""
    pace = emulation("sm_120", H200)
    activity = tensor_activity(SEED, PRESETS["v3"], H200, cycles=25.5e6, clocks_per_mma=pace.clocks_per_mma)
    assert activity == pytest.approx(0.77, abs=0.005)
