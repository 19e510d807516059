"""The rule of choice: which rows may compute a problem, in which order. Arithmetic, so it is tested for an H200."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from bwdtune.db.records import NO_FUSED_BACKWARD, GpuKey
from bwdtune.gen.device import GB10, H100, H200, RTX_5090
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.runtime.dispatch.records import Cause, Row
from bwdtune.runtime.dispatch.rows import Rows
from bwdtune.runtime.dispatch.selection import Refusal, busy_share, candidates, expected_advantage

WGMMA = PRESETS["w64"]
CARD = GpuKey(H200.name, "9.0")


def problem(shape: str, *, causal: bool = True, **features: object) -> Problem:
    return Problem.parse(shape, causal=causal, **features)


def row(shape: str, advantage: float | None = 1.4, **changes: object) -> Row:
    """Measured for that shape, so many times as fast as PyTorch's default."""
    features = {name: changes.pop(name) for name in ("causal", "window_left") if name in changes}
    found_for = problem(shape, **features)
    default_ms = None if advantage is None else 2.0 * advantage
    return replace(Row(found_for, WGMMA, "hash", CARD, 2.0, default_ms), **changes)


def select(asked: Problem, *rows: Row) -> list[Row]:
    """Which rows may compute it on an H200."""
    return [found for found in candidates(asked, H200, Rows(rows)) if isinstance(found, Row)]


def refusals(asked: Problem, *rows: Row) -> list[Refusal]:
    """Why others may not."""
    return [found for found in candidates(asked, H200, Rows(rows)) if isinstance(found, Refusal)]


def shapes(asked: str, *rows: Row) -> list[str]:
    """Whose rows may compute it."""
    return [found.problem.shape for found in select(problem(asked), *rows)]


# What the project has measured on an H200: see README and docs/dispatch.md.
MEASURED = (
    row("8_16_4096_128", 1.43),
    row("2_16_16384_128", 1.44),
    row("4_32_8_4096_128", 1.44),
    row("32_16_1024_128", 1.33),
    row("64_16_512_128", 1.18),
)


def test_the_problems_own_row_comes_first() -> None:
    assert shapes("8_16_4096_128", *MEASURED)[0] == "8_16_4096_128"
    assert shapes("64_16_512_128", *MEASURED)[0] == "64_16_512_128"


def test_a_shipped_row_of_this_very_problem_comes_before_a_winner_of_another() -> None:
    winner, shipped = row("8_16_4000_128"), row("8_16_4096_128", shipped=True)
    assert shapes("8_16_4096_128", winner, shipped) == ["8_16_4096_128", "8_16_4000_128"]
    assert shapes("8_16_4010_128", winner, shipped) == ["8_16_4000_128", "8_16_4096_128"]


def test_of_two_for_one_problem_the_winner_comes_first() -> None:
    winner, shipped = row("8_16_4096_128", 1.2), row("8_16_4096_128", 1.5, shipped=True)
    assert select(winner.problem, shipped, winner) == [winner, shipped]


def test_the_order_does_not_depend_on_that_of_the_rows() -> None:
    """Ranks of a job read the same rows, whatever order a server gives them in."""
    rows = [*MEASURED, *(replace(one, shipped=True, config=PRESETS["w64conv"]) for one in MEASURED)]
    asked = problem("8_16_2048_128")
    expected = select(asked, *rows)
    assert len(expected) > 4
    for seed in range(10):
        random.Random(seed).shuffle(rows)
        assert select(asked, *rows) == expected


@pytest.mark.parametrize(
    "asked",
    [
        "8_8_1024_128",  # a model of 6 layers, d 1024
        "2_16_8192_128",
        "1_16_16384_128",
        "4_16_4096_128",
        "1_32_8_4096_128",  # one sequence of Llama 3 8B
        "8_32_8_2048_128",
        "64_16_300_128",
        "32_12_2048_128",
    ],
)
def test_what_is_near_enough_has_a_kernel(asked: str) -> None:
    assert shapes(asked, *MEASURED)


@pytest.mark.parametrize(
    "asked",
    [
        "1_32_8_1024_128",  # measured: 0.88 of cuDNN
        "1_1_128_128",
        "1_8_512_128",
        "2_16_100000_128",
        "64_16_100_128",
        "64_71_1_512_128",
        "64_16_512x77_128",
    ],
)
def test_what_is_out_of_reach_is_pytorchs(asked: str) -> None:
    assert shapes(asked, *MEASURED) == []
    nearest = refusals(problem(asked), *MEASURED)[0]
    assert nearest.cause == Cause.OUT_OF_REACH
    assert "is too far from" in nearest.reason
    assert "run `tuner search`" in nearest.reason


def test_its_own_row_serves_a_problem_however_small() -> None:
    assert shapes("1_32_8_1024_128", *MEASURED, row("1_32_8_1024_128", 1.05)) == ["1_32_8_1024_128"]


@pytest.mark.parametrize("advantage", [0.88, 1.0])
def test_a_row_that_pytorch_beat_is_not_chosen(advantage: float) -> None:
    lost = row("8_16_4096_128", advantage)
    near = row("8_16_4000_128")
    assert select(lost.problem, lost, near) == []
    (refused,) = refusals(lost.problem, lost, near)
    assert refused.cause == Cause.SLOWER
    assert refused.reason == f"PyTorch's own was faster at 8_16_4096_128 bf16 causal: {2 * advantage:.4g} ms for 2"


def test_a_lost_race_counts_for_its_neighbours() -> None:
    rows = row("8_16_4096_128", 0.9), row("8_16_2048_128", 1.4)
    assert shapes("8_16_4000_128", *rows) == []
    assert shapes("8_16_2100_128", *rows) == ["8_16_2048_128"]


def test_a_row_that_was_not_raced_with_pytorch_may_be_chosen() -> None:
    assert shapes("8_16_4096_128", row("8_16_4096_128", None)) == ["8_16_4096_128"]
    assert shapes("8_16_4000_128", row("8_16_4096_128", None)) == ["8_16_4096_128"]


def test_where_pytorch_has_no_fused_backward_any_kernel_is_better() -> None:
    """Such as with a softcap: its elementary operations are tens of times slower."""
    alone = row("8_16_4096_128", None, default_kernel=NO_FUSED_BACKWARD)
    assert shapes("1_1_1500_128", alone) == ["8_16_4096_128"]
    assert shapes("1_1_128_128", alone) == []


def test_other_kinds_and_other_cards() -> None:
    own = problem("8_16_4096_128")
    for other in (row("8_16_4096_128", causal=False), row("8_16_4096_64"), row("8_16_4096_128", window_left=5)):
        assert [found.cause for found in refusals(own, other)] == [Cause.NOTHING_STORED]
    elsewhere = replace(row("8_16_4096_128"), gpu=GpuKey(H100.name, "9.0"))
    assert not select(own, elsewhere)
    assert select(own, replace(elsewhere, shipped=True))  # of the same compute capability
    blackwell = replace(elsewhere, shipped=True, gpu=GpuKey("NVIDIA B200", "10.0"))
    assert not select(own, blackwell)


def test_what_is_asked_of_rows_besides_has_the_winner_of_the_same_main_kernel() -> None:
    """At its own size also before one that was found with it elsewhere."""
    plain, near = row("8_16_4096_128"), row("8_16_2048_128")
    with_sinks = replace(near, problem=replace(near.problem, sink=True))
    asked = replace(plain.problem, sink=True)
    first, *others = select(asked, plain, near, with_sinks)
    assert (first.problem, first.found_for, first.stands_in) == (asked, plain.problem, True)
    assert others == [with_sinks, replace(with_sinks, stands_in=True)]
    assert first.name == "the winner of 8_16_4096_128 bf16 causal"
    assert not select(plain.problem, with_sinks)
    both = replace(asked, lse_grad=True)
    assert [found.stands_in for found in select(both, plain, with_sinks)] == [True]
    assert not select(replace(asked, deterministic=True), plain)


def test_a_gb10_takes_what_is_shipped_for_an_rtx_5090() -> None:
    """Its SM is the same; nothing else of another card is taken."""
    own = problem("8_16_4096_128")
    shipped = row("8_16_4096_128", config=PRESETS["t64"], shipped=True, gpu=GpuKey(RTX_5090.name, "12.0"))
    asked = candidates(own, GB10, Rows((shipped, replace(shipped, gpu=GpuKey("NVIDIA B200", "10.0")))))
    assert list(asked) == [shipped]
    (none,) = candidates(own, GB10, Rows((replace(shipped, shipped=False),)))
    assert isinstance(none, Refusal)


def test_this_model_comes_before_another_of_its_capability() -> None:
    here, elsewhere = row("8_16_2048_128"), row("8_16_4000_128", shipped=True, gpu=GpuKey(H100.name, "9.0"))
    assert shapes("8_16_4096_128", here, elsewhere) == ["8_16_2048_128", "8_16_4000_128"]


def test_a_configuration_that_is_invalid_here_is_passed_over() -> None:
    split = row("8_16_4_4096_128", config=replace(PRESETS["v3"], split_gqa_heads=True))
    (refused,) = refusals(problem("8_16_4096_128"), split)
    assert refused.reason.endswith("cannot be used: a group is one query head: there is nothing to split")
    assert refused.cause == Cause.UNUSABLE


def test_what_is_expected_never_grows() -> None:
    """What a row promises at other sizes is at most what was measured."""
    found = MEASURED[0]
    for batch, heads, length in itertools.product((1, 2, 8, 64), (1, 8, 64), (200, 1024, 4096, 16384)):
        asked = problem(f"{batch}_{heads}_{length}_128")
        assert 0 < expected_advantage(found, asked, H200) <= 1.43


@pytest.mark.parametrize(
    ("shape", "features", "share"),
    [
        ("8_16_4096_128", {}, 1.0),
        ("1_32_8_1024_128", {}, 32 / 132),  # 8 heads of 8 tiles, half of each masked
        ("1_32_8_1024_128", {"causal": False}, 64 / 132),
        ("1_4_2048_128", {"causal": False}, 64 / 132),
        ("1_1_100_128", {"causal": False}, 1 / 132),
        ("1_8_4096_128", {"window_left": 127}, 1.0),
    ],
)
def test_the_share_of_sms_that_have_work(shape: str, features: dict[str, object], share: float) -> None:
    found = busy_share(problem(shape, **features), WGMMA, H200)
    assert found == pytest.approx(share, rel=0.03)


def test_a_kernel_that_splits_groups_has_more_blocks() -> None:
    asked = problem("1_32_8_1024_128", causal=False)
    split = replace(PRESETS["v3"], split_gqa_heads=True)
    assert busy_share(asked, split, H200) > busy_share(asked, PRESETS["v3"], H200)
