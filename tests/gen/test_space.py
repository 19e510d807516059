from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

import pytest
from covering import all_representatives

from bwdtune.gen import space
from bwdtune.gen.device import H200, RTX_5090, Device
from bwdtune.gen.errors import UsageError
from bwdtune.gen.families import FAMILIES, PRESETS, Config, WgmmaConfig, parse_config
from bwdtune.gen.problem import Problem
from bwdtune.gen.space import all_configs, refusal, refusals, space_hash, valid_configs

SEED = Problem.parse("8_16_4096_128", causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("device", [RTX_5090, H200], ids=lambda device: device.arch)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_value_of_every_parameter_is_in_some_valid_configuration(device: Device, head_dim: int) -> None:
    valid = valid_configs(Problem.parse(f"8_16_4_4096_{head_dim}", causal=True), device)
    for family, config_type in FAMILIES.items():
        if family == "wgmma" and not device.has_wgmma:
            assert not [config for config in valid if config.family == family]
            continue
        points = [vars(config).values() for config in valid if config.family == family]
        for (name, choices), found in zip(config_type.choices.items(), zip(*points, strict=True), strict=True):
            missing = set(choices) - set(found)
            assert missing == NOT_EVERYWHERE.get((family, name, head_dim, device.arch), set()), (family, name)


NOT_EVERYWHERE = {
    # Eight warps on 16 columns each need 128 columns.
    ("mma", "warps_per_row_group", 64, "sm_90a"): {8},
    ("mma", "warps_per_row_group", 64, "sm_120a"): {8},
    # Tiles of that many queries, with two stages of Q, take more than 99 KiB.
    ("mmat", "block_q", 128, "sm_120a"): {96, 128},
    # dK and dV of two warpgroups fill the registers beside 64 queries; at 64 columns V has four steps.
    ("wgmma", "block_q", 128, "sm_90a"): {128},
    ("wgmma", "v_fragments", 64, "sm_90a"): {5},
    # Above 128 columns alone does one consumer accumulate dV and the other dK.
    **{("wgmma", "split_accumulators", head_dim, "sm_90a"): {True} for head_dim in (64, 128)},
    **{("wgmma", "dout_stages", head_dim, "sm_90a"): {1} for head_dim in (64, 128)},
    **{("wgmma", "p_first", head_dim, "sm_90a"): {True} for head_dim in (64, 128)},
    **{("wgmma", "cluster_size", head_dim, "sm_90a"): {2} for head_dim in (64, 128)},
}


@functools.cache
def every_config() -> tuple[int, tuple[Config, ...]]:
    """How many there are, and a sample of them, whose stride is prime to the parameters' numbers of choices."""
    number, sample = 0, []
    for number, config in enumerate(all_configs(), 1):
        if number % 157 == 1:
            sample.append(config)
    return number, tuple(sample)


@functools.cache
def valid_set(problem: Problem, device: Device) -> frozenset[Config]:
    return frozenset(valid_configs(problem, device))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_points_of_the_space(preset: str) -> None:
    of_preset = {"w128": (64, 0), "w64split": (256, 0), "w64bulk": (256, 0), "w64pair": (256, 0), "w64mla": (192, 128)}
    head_dims = of_preset.get(preset, (128, 0))
    problem = dataclasses.replace(SEED, head_dim=head_dims[0], value_head_dim=head_dims[1])
    config = PRESETS[preset]
    assert refusal(problem, config, H200) is None
    assert (refusal(problem, config, RTX_5090) is None) == (preset != "t128" and preset[0] != "w")


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem", [dataclasses.replace(SEED, head_dim=64, causal=False), dataclasses.replace(SEED, softcap=True)], ids=str
)
@pytest.mark.parametrize("device", [RTX_5090, H200], ids=lambda device: device.name)
def test_a_configuration_is_either_valid_or_refused_with_a_reason(problem: Problem, device: Device) -> None:
    valid, refused = valid_configs(problem, device), refusals(problem, device)
    number, sample = every_config()
    found = set(valid)
    assert len(found) == len(valid)
    assert len(valid) + refused.total() == number
    assert all(reason and "\n" not in reason for reason in refused)
    # The whole space is judged by a part of its parameters.
    for config in sample:
        reason = refusal(problem, config, device)
        assert (config in found) if reason is None else (config not in found and refused[reason])


def test_a_space_is_judged_by_a_part_of_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search waits for it. What is counted does not depend on what else the machine does, as seconds would."""
    card = dataclasses.replace(H200, name="a card that was not judged yet")
    judged: list[Config] = []
    for family in FAMILIES.values():

        def counted(
            config: Config, problem: Problem, device: Device, refuses: Callable[..., str | None] = family.refusal
        ) -> str | None:
            judged.append(config)
            return refuses(config, problem, device)

        monkeypatch.setattr(family, "refusal", counted)
    assert valid_configs(SEED, card) == valid_configs(SEED, H200)
    assert 0 < 4 * len(judged) < every_config()[0]


def test_the_smaller_card_takes_a_part_of_the_larger_ones_space() -> None:
    on_5090, on_h200 = valid_set(SEED, RTX_5090), valid_set(SEED, H200)
    assert on_5090 < on_h200
    limit = RTX_5090.shared_memory_per_block_bytes
    assert all(config.estimate(SEED).shared_memory_bytes <= limit for config in on_5090)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_q": 128, "warps_per_row_group": 8}, "2048 threads: a block has at most 1024"),
        ({"block_kv": 32, "warps_per_row_group": 4}, "S does not divide: 32 keys among 4 warps"),
        ({"block_q": 128, "stages": 3}, "bytes of shared memory: a block of NVIDIA GeForce RTX 5090 has at most"),
        ({"min_blocks_per_sm": 3}, "registers a thread: 3 blocks of 512 threads leave 40"),
        (
            {
                "block_q": 16,
                "block_kv": 128,
                "warps_per_row_group": 2,
                "min_blocks_per_sm": 2,
                "k_in_registers": False,
                "v_in_registers": False,
            },
            "registers a thread|2 blocks an SM are asked for, 1 fit",
        ),
    ],
)
def test_a_refusal_says_what_is_too_much(changes: dict[str, int], said: str) -> None:
    reason = refusal(SEED, dataclasses.replace(PRESETS["v1"], **changes), RTX_5090)
    assert reason is not None
    assert re.search(said, reason), reason


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"query_groups": 1}, "an exchange is between query groups"),
        ({"p_first": False}, "dV before dP needs P before dP"),
        ({"num_warps": 4}, "4 are not 8"),
        ({"block_kv": 64, "query_groups": 1, "exchange": False}, "S does not divide: 64 keys in 8 parts"),
        ({"block_q": 32}, "dQ does not divide: 32 queries in 4 parts are not a multiple of 16 each"),
        ({"v_in_registers": True, "q_stages": 3}, "registers a thread"),
        ({"q_stages": 3}, "bytes of shared memory"),
        ({"dq_bulk_reduce": True}, "296,608 bytes of shared memory"),
        ({"dq_bulk_reduce": True, "dq_vector": 2}, "dQ is added in bulk, and not by vectors of 2"),
    ],
)
def test_a_refusal_of_the_transposed_family_says_why(changes: dict[str, int], said: str) -> None:
    reason = refusal(SEED, dataclasses.replace(PRESETS["t128"], **changes), H200)
    assert reason is not None
    assert re.search(said, reason), reason


def test_beside_a_sink_fp16_has_p_in_fp32_for_ds() -> None:
    """P in fp16 is also the operand of dV there, so it cannot be scaled."""
    sink = dataclasses.replace(SEED, sink=True)
    assert refusal(sink, PRESETS["t64"], H200) is None
    assert "below fp16's normal range" in (refusal(dataclasses.replace(sink, dtype="fp16"), PRESETS["t64"], H200) or "")


GROUPED = dataclasses.replace(SEED, heads_kv=4)


def test_a_group_is_split_where_there_is_one() -> None:
    """And then with whatever else is asked for, but for an order of sums."""
    for config in (PRESETS["v1"], PRESETS["v2"], PRESETS["v3"]):
        split = dataclasses.replace(config, split_gqa_heads=True)
        assert refusal(SEED, split, H200) == "a group is one query head: there is nothing to split"
        for features in ({}, {"window_left": 9}, {"bottom_right": True}, {"softcap": True}, {"varlen": True}):
            assert refusal(dataclasses.replace(GROUPED, **features), split, H200) is None
        assert "not deterministic" in (refusal(dataclasses.replace(GROUPED, deterministic=True), split, H200) or "")


def test_a_group_that_is_split_needs_what_a_whole_one_does() -> None:
    splits = [config for config in valid_configs(GROUPED, RTX_5090) if getattr(config, "split_gqa_heads", False)]
    wholes = [dataclasses.replace(config, split_gqa_heads=False) for config in splits]
    assert set(wholes) == {config for config in valid_configs(SEED, RTX_5090) if config.family == "mma"}
    assert all(a.estimate(GROUPED) == b.estimate(GROUPED) for a, b in zip(splits, wholes, strict=True))


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({"window_left": 512}, {}),
        ({"bottom_right": True}, {}),
        ({"softcap": True}, {"wgmma": "log-sum-exp .* would be capped"}),
        ({"varlen": True}, {}),
        ({"head_dim": 104}, {}),
    ],
)
def test_what_a_family_does_not_compute_is_refused_with_its_name(
    changes: dict[str, int], lacking: dict[str, str]
) -> None:
    problem = dataclasses.replace(SEED, **changes)
    for config in (PRESETS[name] for name in ("v1", "v2", "v3", "t64", "t128", "w64", "w64lag")):
        reason = refusal(problem, config, H200)
        if config.family in lacking:
            assert reason is not None
            assert re.search(lacking[config.family], reason), reason
        else:
            assert reason is None, (config.id, reason)


def test_packed_sequences_are_not_converted_head_by_head() -> None:
    packed = dataclasses.replace(SEED, varlen=True)
    assert "dQ is converted by heads" in (refusal(packed, PRESETS["w64conv"], H200) or "")
    assert refusal(packed, PRESETS["w64first"], H200) is None


def test_only_what_a_mask_hides_can_be_skipped() -> None:
    masks = ({}, False), ({"causal": True}, True), ({"window_right": 5}, True)
    backwards = ({"causal": True, "deterministic": True}, False), ({"window_left": 5, "deterministic": True}, True)
    for features, hides in masks + backwards:
        reason = refusal(Problem.parse("8_16_4096_128", **features), PRESETS["w64lag"], H200)
        assert (reason is None) == hides, reason


@pytest.mark.parametrize(
    ("head_dim", "said"),
    [(24, "most of the 64 columns"), (32, None), (128, None), (136, "136 registers"), (192, "192 registers a thread")],
)
def test_a_head_dim_that_wgmma_kernels_do_not_take_is_refused_with_the_cause(head_dim: int, said: str | None) -> None:
    reason = refusal(Problem.parse(f"8_16_4096_{head_dim}", causal=True), WgmmaConfig(), H200)
    if said is None:
        assert reason is None
    else:
        assert reason is not None
        assert f"head_dim {head_dim}: the wgmma kernels take 32 to 128" in reason
        assert said in reason


@pytest.mark.parametrize(
    ("head_dim", "changes", "said"),
    [
        (128, {}, "up to 128 it has registers for both"),
        (136, {}, None),
        (256, {}, None),
        (256, {"v_fragments": 5}, "about 244 registers a thread"),
        (256, {"dq_bulk_reduce": True}, "bytes of shared memory"),
        (256, {"dq_bulk_reduce": True, "dout_stages": 1}, None),
        (192, {"dq_bulk_reduce": True}, None),
        (256, {"block_q": 128}, "registers for 64 queries: a tile has 128"),
        (256, {"dq_delayed": False}, "dQ of the tile before"),
        (256, {"code_copies": 2}, "not 2 copies of it"),
        (256, {"split_accumulators": False, "dout_stages": 1}, "two stages of dO: 1"),
    ],
)
def test_accumulators_are_split_above_head_dim_128(head_dim: int, changes: dict[str, int], said: str | None) -> None:
    config = dataclasses.replace(PRESETS["w64split"], **changes)
    reason = refusal(Problem.parse(f"8_16_4096_{head_dim}", causal=True), config, H200)
    assert reason is None if said is None else said in (reason or "")


@pytest.mark.parametrize(
    ("head_dims", "config", "said"),
    [
        ("192x128", "w64mla", None),
        ("192x128", "w64mla lse_delta_k_step=1", "bytes of shared memory"),
        ("192x128", "w64mla v_fragments=1", "no registers are left for V"),
        ("192x136", "w64mla", "head_dim_v 136: beside a head_dim of 192 it may be 32 to 128"),
        ("128x64", "w64mla", "up to 128 there are registers for both at once"),
        ("200x128", "w64mla", "dP after P is for 136 to 192"),
        ("192x128", "w64mla dq_epilogue_in_kernel", "leave no room to convert dQ"),
        ("192x128", "w64mla split_accumulators", "have S or dP, not both"),
        ("192x128", "w64mla store_first delta_in_kernel", "leave no room for rows of O and dO"),
        ("128x64", "w64last delta_in_kernel", None),
        ("128x64", "w64conv delta_in_kernel", "clears dQ's accumulator, too"),
        ("192x128", "w64", "dK and dV of 64 keys alone are 160 registers a thread"),
        ("192x128", "w64split", None),
        ("256x32", "w64split", "V has 2 steps along head_dim: 4 cannot be kept"),
        ("128x192", "w64split", "up to 128 it has registers for both"),
        ("128x64", "w64", None),
        ("64x128", "w64lag", None),
        ("128x16", "w64", "head_dim_v 16: beside a head_dim of 128 it may be 32 to 128"),
        ("576x512", "w64mla", "head_dim 576: the kernels take multiples of 8 up to 256"),
    ],
)
def test_head_dims_of_values(head_dims: str, config: str, said: str | None) -> None:
    reason = refusal(Problem.parse(f"4_16_4096_{head_dims}", causal=True), parse_config(config), H200)
    assert reason is None if said is None else said in (reason or "")


@pytest.mark.parametrize(
    ("head_dims", "config", "said"),
    [
        ("200", "w64pair", None),
        ("256", "w64pair", None),
        ("192", "w64pair", "head_dims 192 and 192: a cluster's consumers divide four panels"),
        ("256x128", "w64pair", "head_dims 256 and 128: a cluster's consumers divide four panels"),
        ("256", "w64pair dout_stages=2", "room for one stage of dO: 2"),
        ("256", "w64pair dq_bulk_reduce", "no room to stage dQ"),
        ("128", "w64pair split_accumulators=0 dout_stages=2", "clusters are of blocks with 64 keys each"),
    ],
)
def test_clusters_are_for_head_dims_above_192(head_dims: str, config: str, said: str | None) -> None:
    reason = refusal(Problem.parse(f"8_16_4096_{head_dims}", causal=True), parse_config(config), H200)
    assert reason is None if said is None else said in (reason or "")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"window_left": 512}, "no window"),
        ({"window_right": 7, "causal": False, "bottom_right": True}, "no window and no bottom-right"),
        ({"bottom_right": True}, "no bottom-right"),
        ({"softcap": True}, "no softcap"),
        ({"varlen": True, "deterministic": True}, "no varlen and no deterministic"),
    ],
)
def test_what_a_template_does_not_have_is_refused_by_name(
    changes: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = dataclasses.replace(SEED, **changes)
    assert refusal(problem, PRESETS["v3"], H200) is None
    for preset in ("t64", "w64"):
        monkeypatch.setattr(type(PRESETS[preset]), "features", frozenset())
        reason = refusal(problem, PRESETS[preset], H200)
        assert reason is not None
        assert f"{said}: " in reason
        assert "mma" in reason.partition(": ")[2]


@pytest.mark.parametrize(
    ("head_dims", "named"),
    [*((str(size), f"head_dim {size}") for size in (1, 20, 100, 264, 272)), ("576x512", "head_dim 576")],
)
def test_a_head_dim_that_no_kernel_takes_is_named(head_dims: str, named: str) -> None:
    for shape in (f"8_16_4096_{head_dims}", f"8_16_4096_64x{head_dims.split('x')[0]}"):
        said = named if shape.endswith(f"_{head_dims}") else named.replace("head_dim", "head_dim_v")
        with pytest.raises(UsageError, match=f"^{said}: the kernels take multiples of 8 up to 256"):
            valid_configs(Problem.parse(shape), H200)


@pytest.mark.slow
@pytest.mark.parametrize("device", [RTX_5090, H200], ids=lambda device: device.arch)
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim_has_a_space(device: Device, head_dim: int) -> None:
    for features in ({}, {"deterministic": True}):
        problem = Problem.parse(f"8_16_4096_{head_dim}", causal=True, **features)
        assert any(refusal(problem, config, device) is None for config in all_representatives())


def test_an_empty_space_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "FAMILIES", {"wgmma": WgmmaConfig})
    with pytest.raises(UsageError, match=r"^no configuration fits 8_16_4096_128 .* another; most often .*wgmma"):
        valid_configs(SEED, dataclasses.replace(RTX_5090, name="another"))  # that has not been judged yet


def test_the_order_of_the_space_is_fixed() -> None:
    # Another card of the same limits is judged anew.
    assert valid_configs(SEED, dataclasses.replace(H200, name="another")) == valid_configs(SEED, H200)
    assert space_hash() == space_hash()
