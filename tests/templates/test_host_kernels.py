"""Generated kernels on the host target: the gradients against fp64, with the race check and all of its detectors on."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import os
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from covering import covering, valid_presets
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from bwdtune.gen.build.jobs import build_one
from bwdtune.gen.device import HOST
from bwdtune.gen.families import FAMILIES, PRESETS, Config, TransposedMmaConfig, WgmmaConfig, parse_config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source, render
from bwdtune.gen.space import refusal, valid_configs
from bwdtune.runtime.kernel import Kernel, KernelError, backward
from bwdtune.runtime.verification.cases import Case
from bwdtune.runtime.verification.inputs import make_inputs
from bwdtune.runtime.verification.verifier import Verifier

pytestmark = pytest.mark.slow

VERIFIER = Verifier("cpu")
KINDS = list(itertools.product(("bf16", "fp16"), (64, 128), (True, False)))
# Where pairs of values are covered, also a head_dim for which accumulators are split.
KINDS_OF_PAIRS = [*KINDS, ("bf16", 136, True), ("fp16", 136, False)]


@pytest.fixture(autouse=True)
def _race_check_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_RACECHECK", "1")
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", "2")


def problem_of(dtype: str, head_dim: int, causal: bool, *, group: int = 2) -> Problem:
    """Any lengths: a kernel is not rendered for them, and `Verifier.verify` has its own."""
    return Problem(dtype, 1, 2 * group, 2, 256, 256, head_dim, causal)


def load(source: Source) -> Kernel:
    library = build_one(source, HOST.arch).library
    assert library
    return Kernel.load(library)


# ---- presets ----


@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal", "preset"),
    [(*kind, preset) for kind in KINDS for preset in valid_presets(problem_of(*kind), HOST)],
)
def test_presets(dtype: str, head_dim: int, causal: bool, preset: str) -> None:
    problem = problem_of(dtype, head_dim, causal, group=1 if preset == "v1" else 2)
    record = VERIFIER.verify(problem, load(render(problem, PRESETS[preset])))
    assert record.passed, record.reason


@pytest.mark.parametrize(("preset", "causal"), [("v3", True), ("t64", True), ("w64lag", True), ("w64first", False)])
def test_more_tiles_than_the_small_cases_have(preset: str, causal: bool) -> None:
    problem = Problem("bf16", 2, 4, 2, 391, 433, 64, causal)
    record = VERIFIER.verify_at(problem, load(render(problem, PRESETS[preset])))
    assert record.passed, record.reason


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim", [192, 256])
@pytest.mark.parametrize(("dtype", "preset"), [("bf16", "w64split"), ("fp16", "w64bulk")])
def test_split_accumulators(dtype: str, preset: str, head_dim: int, causal: bool) -> None:
    """At one size: the host target takes seconds for each."""
    problem = Problem.parse(f"1_4_2_131x150_{head_dim}", dtype=dtype, causal=causal)
    record = VERIFIER.verify_at(problem, load(render(problem, PRESETS[preset])))
    assert record.passed, record.reason


SPLIT_FEATURES: tuple[tuple[str, dict[str, object], str], ...] = (
    ("1_4_2_70x200_136", {"causal": True, "softcap": True}, "w64bulk lse_delta_k_step=0 v_fragments=5"),
    ("2_2_1_131_136", {"softcap": True, "window_left": 40, "dtype": "fp16"}, "w64split lse_delta_k_step=0"),
    ("1_4_2_70x200_192", {"causal": True, "deterministic": True}, "w64bulk"),
    ("1_2_2_190x65_200", {"causal": True, "deterministic": True}, "w64bulk store_first=1"),
    ("1_2_2_190x65_136", {"window_left": 50, "window_right": 10, "deterministic": True}, "w64bulk resync=1"),
    ("1_2_2_190x65_192", {"causal": True, "bottom_right": True}, "w64split"),
    ("2_2_1_131_200", {"causal": True, "varlen": True, "dtype": "fp16"}, "w64split"),
    ("2_2_1_131_136", {"window_left": 30, "varlen": True, "deterministic": True}, "w64bulk"),
    # Clusters: the second block's keys past the end, or hidden from the first queries.
    ("1_4_2_131x190_256", {}, "w64pair"),
    ("1_2_2_190x261_200", {"causal": True, "dtype": "fp16"}, "w64pair lse_delta_k_step=0"),
    ("2_2_1_131_256", {"window_left": 40, "varlen": True}, "w64pair v_fragments=3"),
)


@pytest.mark.parametrize(("shape", "features", "config"), SPLIT_FEATURES)
def test_features_of_split_accumulators(shape: str, features: dict[str, object], config: str) -> None:
    problem = Problem.parse(shape, **features)  # type: ignore[arg-type]
    record = VERIFIER.verify_at(problem, load(render(problem, parse_config(config))))
    assert record.passed, record.reason


OF_VALUES: tuple[tuple[str, dict[str, object], str], ...] = (
    ("1_4_2_131x150_192x128", {"causal": True}, "w64mla skip_masked=1"),
    ("1_2_2_70x200_136x72", {"dtype": "fp16"}, "w64mla resync=1 code_copies=2 l2_head_group=16"),
    ("2_2_1_200x80_176x104", {"causal": True, "deterministic": True}, "w64mla store_first=1"),
    ("1_2_1_131x150_192x128", {"window_left": 20, "window_right": 70, "deterministic": True}, "w64mla l2_head_group=4"),
    ("2_2_1_131_192x128", {"causal": True, "varlen": True}, "w64mla dq_bulk_reduce=0 lse_delta_k_step=1"),
    ("1_2_1_70x90_136x64", {"alibi": True, "bias": "1_H_S", "bias_grad": True}, "w64mla"),
    ("1_2_1_70x90_136x256", {"causal": True}, "w64bulk"),
    ("1_2_1_131x150_64x128", {"causal": True}, "w64lag"),
    ("1_2_1_131x150_128x72", {}, "w64conv"),
    ("1_4_2_131x150_128x64", {"causal": True}, "v2"),
    ("2_2_1_131_72x136", {"varlen": True, "dtype": "fp16"}, "mma_q32_kv32_w2_s2_sw64_k1_v1_b1_r2_u1"),
    ("1_4_2_131x150_64x128", {"causal": True}, "t128"),
    ("2_2_1_131_136x72", {"varlen": True, "sink": True}, "mmat_q32_kv64_w8_g2_x0_r2_s2_o3_k0_v1_p1_f1_d1_t1_b1_h8"),
)


@pytest.mark.parametrize(("shape", "features", "config"), OF_VALUES)
def test_head_dims_of_values(shape: str, features: dict[str, object], config: str) -> None:
    problem = Problem.parse(shape, **features)  # type: ignore[arg-type]
    record = VERIFIER.verify_at(problem, load(render(problem, parse_config(config))))
    assert record.passed, record.reason


@pytest.mark.parametrize(("dtype", "causal"), [("bf16", True), ("fp16", False)])
@pytest.mark.parametrize(("shape", "preset"), [("2_8_2_256_64", "v2"), ("1_4_1_256_128", "v3")])
def test_groups_that_are_split(shape: str, preset: str, dtype: str, causal: bool) -> None:
    problem = Problem.parse(shape, dtype=dtype, causal=causal)
    record = VERIFIER.verify(problem, load(render(problem, dataclasses.replace(PRESETS[preset], split_gqa_heads=True))))
    assert record.passed, record.reason


def test_a_split_group_needs_room_for_its_sums() -> None:
    whole, split = (load(render(MUTATED_PROBLEM, config)) for config in (PRESETS["v3"], SPLIT))
    sizes = (3, 8, 2, 100, 77)
    assert split.workspace_bytes(*sizes) == whole.workspace_bytes(*sizes) + 2 * 3 * 2 * 77 * 64 * 4
    many = (1, 2**16, 2**15, 1, 2**21)  # 64 keys a block: 2^30 blocks, or twice as many
    assert whole.workspace_bytes(*many) > 0
    with pytest.raises(KernelError, match=r"passes 2\^31 - 1"):
        split.workspace_bytes(*many)
    longest = (1, 2, 1, 1, 2**31 - 65)
    assert split.workspace_bytes(*longest) - whole.workspace_bytes(*longest) == 2 * longest[-1] * 64 * 4


def test_a_small_backward_takes_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile included. In CPU time, with room for what others on the same core cost."""

    def cpu_seconds() -> float:
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    monkeypatch.delenv("BWDTUNE_HOST_RACECHECK")
    monkeypatch.setenv("BWDTUNE_CACHE", str(tmp_path))
    case = Case(Problem.parse("1_2_256_128", causal=True), "normal")
    inputs = make_inputs(case, torch.device("cpu"))
    forward = inputs.forward
    start = cpu_seconds()
    kernel = load(render(case.problem, PRESETS["v3"]))
    backward(kernel, inputs.q, inputs.k, inputs.v, forward.output, inputs.dout, forward.lse, scale=case.scale)
    assert cpu_seconds() - start < 15


# ---- every parameter value ----


@pytest.fixture(scope="module")
def pair_configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, ...]:
    """Few configurations in which every two values that some valid configuration has together occur together.

    To find them takes ten seconds: the first of a run's workers that needs them does it for all.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker's own folder lies in the run's
        folder = folder.parent
    with (folder / "pair_configs").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        found = file.read().split()
        if not found:
            valid = (valid_configs(problem_of("bf16", head_dim, True), HOST) for head_dim in (64, 128, 136))
            found = [config.id for config in covering(itertools.chain.from_iterable(valid), together=2)]
            file.write("\n".join(found))
    return tuple(parse_config(config_id) for config_id in found)


@pytest.fixture(scope="module")
def pair_cases(pair_configs: tuple[Config, ...]) -> dict[Problem, list[Config]]:
    """Those configurations, each for the next kind of problem that it is valid for."""
    cases: dict[Problem, list[Config]] = {problem_of(*kind): [] for kind in KINDS_OF_PAIRS}
    kinds = itertools.cycle(cases)
    for config in pair_configs:
        problem = next(kind for kind in kinds if refusal(kind, config, HOST) is None)
        cases[problem].append(config)
    return cases


def test_every_value_of_every_parameter_is_covered(pair_configs: tuple[Config, ...]) -> None:
    for family, config_type in FAMILIES.items():
        for name, choices in config_type.choices.items():
            named = [*pair_configs, *(parse_config(config) for _, _, config in (*OF_VALUES, *SPLIT_FEATURES))]
            found = {config.to_dict()[name] for config in named if config.family == family}
            assert found == set(choices), name


@pytest.mark.parametrize(("dtype", "head_dim", "causal"), KINDS_OF_PAIRS)
def test_every_pair_of_parameter_values(
    dtype: str, head_dim: int, causal: bool, pair_cases: dict[Problem, list[Config]]
) -> None:
    """Each kind of problem has some of them: to name them all would take a search through the space at import."""
    problem = problem_of(dtype, head_dim, causal)
    for config in pair_cases[problem]:
        record = VERIFIER.verify(problem, load(render(problem, config)))
        assert record.passed, f"{config.id}: {record.reason}"


# ---- a sample of everything ----


@st.composite
def points(draw: st.DrawFn) -> tuple[Problem, Config]:
    """Of each family as many. Drawn until one is valid: to enumerate a space takes seconds."""
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    problem = Problem(
        draw(st.sampled_from(("bf16", "fp16"))),
        draw(st.integers(1, 2)),
        heads_kv * group,
        heads_kv,
        draw(st.integers(1, 200)),
        draw(st.integers(1, 200)),
        draw(st.sampled_from((16, 32, 40, 64, 72, 80, 96, 112, 128, 192, 200))),
        draw(st.booleans()),
    )
    family, random = draw(st.sampled_from([*FAMILIES.values()])), draw(st.randoms(use_true_random=False))
    for _ in range(2000):
        config = family.of_choices({name: random.choice(choices) for name, choices in family.choices.items()})
        if refusal(problem, config, HOST) is None:
            return problem, config
    reject()  # the family has next to nothing for this head_dim


@settings(
    max_examples=16,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(points())
def test_any_valid_configuration_at_any_sizes(point: tuple[Problem, Config]) -> None:
    problem, config = point
    record = VERIFIER.verify_at(problem, load(render(problem, config)))
    assert record.passed, f"{problem.label} {config.id}: {record.reason}"


# ---- launches at the same time ----


@pytest.mark.parametrize(
    ("preset", "deterministic"), [*itertools.product(("v3", "w64", "w64lag"), (False, True)), ("w64conv", False)]
)
def test_launches_from_two_threads(preset: str, deterministic: bool) -> None:
    """Each has a workspace, in which anything lies at first: what has an order is the same bits at each launch."""
    problem = Problem("bf16", 1, 4, 2, 150, 300, 64, causal=not deterministic, deterministic=deterministic)
    config = PRESETS[preset]
    if refusal(problem, config, HOST) is not None:
        assert isinstance(config, WgmmaConfig)
        config = dataclasses.replace(config, skip_masked=False)
    kernel, case = load(render(problem, config)), Case(problem, "normal")
    inputs = make_inputs(case, torch.device("cpu"))
    tensors = (inputs.q, inputs.k, inputs.v, inputs.forward.output, inputs.dout, inputs.forward.lse)
    expected = backward(kernel, *tensors, case.scale, inputs.features)

    def differ(_: int) -> list[tuple[bool, ...]]:
        found = tuple(torch.full_like(gradient, torch.nan) for gradient in expected)
        launch = kernel.prepare(*tensors, *found, scale=case.scale, features=inputs.features)
        launch.tensors[-1].fill_(0xFF)
        differing = []
        for _ in range(5):
            launch()
            differing.append(tuple(not torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)))
        return differing

    with ThreadPoolExecutor(2) as pool:
        for of_launch in itertools.chain.from_iterable(pool.map(differ, range(2))):
            assert not any(of_launch[0 if deterministic else 1 :])  # dQ's additions may have no order


# ---- slots for dQ that are used again ----

MANY_HEADS = Problem.parse("1_20_300_64", causal=True)


@pytest.fixture
def _few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots for fewer heads than the problem has: as on a card that computes one item at a time."""
    monkeypatch.setenv("BWDTUNE_HOST_SM_COUNT", "1")


@pytest.mark.parametrize("threads", ["1", "2", "4"])
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (MANY_HEADS, dataclasses.replace(PRESETS["w64conv"], l2_head_group=4)),
        (MANY_HEADS, dataclasses.replace(PRESETS["w64last"], l2_head_group=4)),
        (
            Problem.parse("2_20_10_300_64"),
            dataclasses.replace(PRESETS["w128"], l2_head_group=4, dq_epilogue_in_kernel=True),
        ),
        (
            Problem("bf16", 1, 28, 28, 70, 200, 72, causal=True, window_left=50),
            WgmmaConfig(lse_delta_k_step=False, dq_epilogue_in_kernel=True),
        ),
    ],
    ids=["causal", "the last key tile converts", "groups", "window"],
)
@pytest.mark.usefixtures("_few_slots")
def test_a_slot_for_dq_is_used_again(
    problem: Problem, config: Config, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", threads)
    record = VERIFIER.verify_at(problem, load(render(problem, config)))
    assert record.passed, record.reason


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (
            PRESETS["w64conv"],
            ("ptx::bulk_store(sums + cleared / 4, block.shared + ZEROS_OFFSET, ZEROS_BYTES);", ";"),
        ),
        (PRESETS["w64conv"], ("if (ptx::load_acquire_global(added) != all) {", "if (false) {")),
        (PRESETS["w64last"], ("to_release = heads_done;", "")),
    ],
    ids=["is not cleared", "is converted too early", "is never given back"],
)
@pytest.mark.usefixtures("_few_slots")
def test_it_is_caught_that_a_slot_for_dq(
    config: Config, change: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", "1")
    few = dataclasses.replace(config, l2_head_group=4)
    assert not VERIFIER.verify_at(MANY_HEADS, load(mutated("slot", *change, few, MANY_HEADS))).passed


# ---- delta in the main kernel, but for the first heads ----

DELTA_IN_KERNEL = dataclasses.replace(PRESETS["w64last"], delta_in_kernel=True, l2_head_group=4)
TILES_ACROSS_CHUNKS = WgmmaConfig(
    block_q=80, lse_delta_k_step=False, store_first=True, delta_in_kernel=True, l2_head_group=4
)
FEWER_COUNTED = ("DELTA_COUNTED = 256;", "DELTA_COUNTED = 10;")
NOT_WAITED_FOR = ("ptx::wait_for_global(arguments.delta_done", "if (false) ptx::wait_for_global(arguments.delta_done")
WAIT = "DELTA_COUNTED, counted);\n      ptx::fence_proxy_async_global();"


def begun_at(item: int) -> tuple[str, str]:
    """Delta is begun when so many items have been taken."""
    delay = f"ptx::wait_for_at_least_global(arguments.next_item, {item});"
    return "uint32_t use = 0;", f"uint32_t use = 0;\n  {delay}"


def with_changes(problem: Problem, config: Config, *changes: tuple[str, str]) -> Source:
    source = render(problem, config)
    for old, new in changes:
        code = without_comments(source.text)
        assert old in code, f"the code no longer has {old!r}"
        source = Source(source.kernel_spec, config, code.replace(old, new))
    return source


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (MANY_HEADS, DELTA_IN_KERNEL),
        (dataclasses.replace(MANY_HEADS, sink=True, lse_grad=True), DELTA_IN_KERNEL),
        (MANY_HEADS, TILES_ACROSS_CHUNKS),
    ],
    ids=["", "features of rows", "tiles across chunks"],
)
@pytest.mark.parametrize(("threads", "changes"), [("1", (FEWER_COUNTED, begun_at(13))), ("3", (FEWER_COUNTED,))])
@pytest.mark.usefixtures("_few_slots")
def test_items_wait_for_delta(
    problem: Problem,
    config: Config,
    threads: str,
    changes: tuple[tuple[str, str], ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is begun after the items of the first 4 heads, and there are several counters, the last for fewer."""
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", threads)
    record = VERIFIER.verify_at(problem, load(with_changes(problem, config, *changes)))
    assert record.passed, record.reason


@pytest.mark.parametrize(
    "changes",
    [
        (NOT_WAITED_FOR, begun_at(60)),
        ((WAIT, WAIT.split("\n")[0]),),
        (("if (lane - lane % DELTA_ROWS == row) delta = sum;", "delta = sum;"),),
        (("load_from(in_all_lanes(taken));", ""),),
        (("if (use > 0) release();", ""),),
    ],
    ids=["is not waited for", "is copied with no fence", "is another row's", "is another chunk's", "is never counted"],
)
@pytest.mark.usefixtures("_few_slots")
def test_it_is_caught_that_delta(changes: tuple[tuple[str, str], ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", "1")
    assert not VERIFIER.verify_at(MANY_HEADS, load(with_changes(MANY_HEADS, DELTA_IN_KERNEL, *changes))).passed


# ---- offsets past 2^31 ----


@pytest.mark.parametrize("preset", ["v2", "t64", "w64"])
def test_tensors_whose_sequences_are_far_apart(preset: str) -> None:
    """All of them lie in one buffer, of which next to nothing is touched: none of it but that is memory."""
    problem = Problem("bf16", 2, 2, 2, 40, 33, 64, True)
    kernel = load(render(problem, PRESETS[preset]))
    inputs = make_inputs(Case(problem, "normal"), torch.device("cpu"))
    named = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": inputs.forward.output, "dout": inputs.dout}
    gradients = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    room, apart = 8192, 2**31
    buffer = torch.empty(apart + len(named | gradients) * room, dtype=torch.bfloat16)

    def far(place: int, like: torch.Tensor) -> torch.Tensor:
        _, *strides = torch.empty(like.shape).stride()
        return buffer[place * room :].as_strided(like.shape, (apart, *strides))

    places = {name: far(place, like) for place, (name, like) in enumerate((named | gradients).items())}
    for name, tensor in named.items():
        places[name].copy_(tensor)
    kernel.launch(**places, lse=inputs.forward.lse, scale=problem.softmax_scale)
    plain = backward(kernel, **named, lse=inputs.forward.lse, scale=problem.softmax_scale)
    for name, gradient in zip(gradients, plain, strict=True):
        assert torch.equal(places[name], gradient), name


# ---- planted faults ----

MUTATIONS: dict[str, tuple[str, str]] = {
    "the diagonal is masked": ("n * MMA_N + i > last_column", "n * MMA_N + i >= last_column"),
    "tiles on the diagonal are not masked": (
        "kv_start + BLOCK_KV - 1 > query_start + high",
        "kv_start > query_start + high",
    ),
    "a query tile too few": ("return kv_start / BLOCK_Q;", "return kv_start / BLOCK_Q + 1;"),
    "the first query head again": ("{place.head + 1, first}", "{place.head, first}"),
    "another row's statistics": ("lane_row + half * 8;\n      lse_delta", "lane_row + half * 4;\n      lse_delta"),
    "delta with the wrong sign": ("+ i] - lse_delta[half].y)", "+ i] + lse_delta[half].y)"),
    "rows and columns of A^T swapped": (
        "columns_first_row = lane % 8 + lane / 16 * 8",
        "columns_first_row = lane % 16",
    ),
    "P is stored off its swizzle": (
        "in_panel / 8 ^ chunk_permutation(row)",
        "in_panel / 8 ^ chunk_permutation(row + 1)",
    ),
    "no barrier before the products": (
        "ptx::pack<Element>(ds[0], ds[1]));\n      }\n    ptx::sync_threads();",
        "ptx::pack<Element>(ds[0], ds[1]));\n      }",
    ),
    "no barrier between iterations": ("QUERY_BARRIERS % 2);\n    ptx::sync_threads();", "QUERY_BARRIERS % 2);"),
    "always the first phase": ("iteration / QUERY_BARRIERS % 2)", "0)"),
    "half of the bytes expected": ("(barrier, Q_TILE_BYTES + DO_TILE_BYTES)", "(barrier, Q_TILE_BYTES)"),
    "a tile loaded into the stage in use": (
        "stage = shared + iteration % STAGES * Q_TILE_BYTES;\n    const uint32_t do_stage",
        "stage = shared + (iteration + 1) % STAGES * Q_TILE_BYTES;\n    const uint32_t do_stage",
    ),
    "dQ of another row group": (
        "(first_row + query_start + query_row + lane_row) * HEAD_DIM",
        "(first_row + query_start + lane_row) * HEAD_DIM",
    ),
    "dK past the end": ("if (key < arguments.seqlen_kv) {", "if (key < arguments.seqlen_kv + 1) {"),
    "dQ past the end": ("if (rows_left > half * 8)", "if (rows_left > -16)"),
    "batch and head swapped": (
        "column, first_key + kv_start, kv_head, batch, kv_barrier",
        "column, first_key + kv_start, batch, kv_head, kv_barrier",
    ),
    "keys past the end": ("return min(row + mask.high, seqlen_kv - 1)", "return row + mask.high"),
    "dK without the scale": ("pair[0] * arguments.scale", "pair[0]"),
    "two keys change places": (
        "ptx::mma_m16n8k16<Element>(dq[n], ds, k[0], k[1])",
        "ptx::mma_m16n8k16<Element>(dq[n], ds, k[1], k[0])",
    ),
}
TRANSPOSED_MUTATIONS: dict[str, tuple[str, str, str]] = {
    "dS overwritten while others read it": ("t64", "ptx::mbarrier_wait(ds_empty, (i + 1) % 2);", ""),
    "dS read before it is whole": (
        "t64",
        "ptx::mbarrier_wait(ds_full + 8 * part, ptx::optimization_barrier(i) % 2);",
        "",
    ),
    "dS of other pairs read before it is whole": (
        "t128",
        "if (step > 0) ptx::mbarrier_wait(ds_full + 8 * part, ptx::optimization_barrier(i) % 2);",
        "",
    ),
    "dS of one part times K of another": ("t64", "k_tile + (part * PART_KEYS", "k_tile + (own_part * PART_KEYS"),
    "P set aside over dS that others read": ("t128", "ptx::mbarrier_wait(ds_empty, (i + 1) % 2);", ""),
    "dO loaded while others read it": ("t64", "ptx::mbarrier_wait(do_empty, i % 2);", ""),
    "a lane arrives for a warp that is not done": (
        "t64",
        "ptx::sync_warp();\n    ptx::mbarrier_arrive(barrier",
        "ptx::mbarrier_arrive(barrier",
    ),
    "the upper warps' turn never comes": (
        "t64",
        "if (warp < NUM_WARPS / 2) ptx::named_barrier_arrive(1 + warp, 64);",
        "",
    ),
    "the partner's P read too early": ("t128", "ptx::mbarrier_wait(p_full, i % 2);", ""),
    "the partner's dS read too early": ("t128", "ptx::mbarrier_wait(ds_full + 8 * own_part, i % 2);", ""),
    "its own P in place of the partner's": ("t128", "score_lane ^ MMA_K * ELEMENT_BYTES", "score_lane"),
    "the other group's columns": ("t128", "DKV_COLUMN_GROUPS * MMA_N + dkv_column", "DKV_COLUMN_GROUPS * MMA_N"),
    "the diagonal masked, transposed": ("t128", "distance > last_distance", "distance >= last_distance"),
    "P read in another type": ("t128", "ptx::unpack<HeldP>(pairs[j])", "ptx::unpack<Element>(pairs[j])"),
    "P left scaled": ("t128", "dv[m][of_dv + 1], P_UNIT, ", "dv[m][of_dv + 1], 1.0f, "),
    "delta added": ("t64", "isinf(lse) ? 0.0f : -delta", "isinf(lse) ? 0.0f : delta"),
    "one group's heads again": ("t64", "group * L2_HEAD_GROUP + in_group % group_heads", "group * L2_HEAD_GROUP"),
    "dQ of another row block": ("t128", "+ dq_row_warp * MMA_M * HEAD_DIM", ""),
    "halves of a block swapped": ("t64", "lane / 4 + lane % 4 / 2 * 8", "lane / 4 + (1 - lane % 4 / 2) * 8"),
    "keys past the end, transposed": ("t128", "if (key > last_key || ", "if ("),
    "keys past the end, of warpgroups": ("w64lag", "key >= arguments.seqlen_kv ? INT_MAX : ", ""),
    "dK past the end, transposed": ("t64", "if (key < arguments.seqlen_kv) {", "if (key < arguments.seqlen_kv + 1) {"),
    "the next item's tiles over what others read": (
        "t128",
        "ptx::fence_proxy_async_shared();\n    ptx::sync_threads();",
        "ptx::fence_proxy_async_shared();",
    ),
    "dK is another item's": ("t64", "const Item stored(arguments, noted / 2);", "const Item stored(arguments, 0);"),
    "every item is a block's first": ("t64", "parity = 1 - noted % 2;", "parity = 0;"),
    "a kernel that does not wait for the one before": ("t64", "ptx::griddepcontrol_wait();", ""),
    "warpgroups that do not wait for the kernel before": ("w64", "ptx::griddepcontrol_wait();", ""),
}
MUTATED_PROBLEM = problem_of("bf16", 64, True)

LOADED = parse_config("t64load l2_tail_heads=32")
LOADING_MUTATIONS: dict[str, tuple[str, str]] = {
    "dO loaded by the warp while others read it": ("ptx::mbarrier_wait(do_empty, i % 2);", ""),
    "the next item's tiles over those of this one": ("ptx::mbarrier_wait(shared + TILES_EMPTY_OFFSET, parity);", ""),
    "half of the keys is skipped that a query sees": (
        "first_key > place.start + BLOCK_Q - 1 + item.mask.high",
        "first_key >= place.start + item.mask.high",
    ),
    "dS of warps that skip a tile": ("if (hidden(part)) continue;", ""),
    "warps that skip a tile do not say so": ("arrive(ds_full + 8 * own_part);\n        ptx", "ptx"),
    "the last group has other heads": ("? heads - group * L2_HEAD_GROUP", "? L2_HEAD_GROUP"),
}

SEVERAL_ROWS = parse_config("t128 preprocess_rows=4")
SEVERAL_ROWS_MUTATIONS: dict[str, tuple[str, str]] = {
    "delta of a thread's first row for all": (
        "% arguments.chunks * THREAD_ROWS + ROW);",
        "% arguments.chunks * THREAD_ROWS);",
    ),
    "dQ of a warp's first block for all": ("* THREAD_ROWS + ROW) * ROWS_PER_BLOCK", "* THREAD_ROWS) * ROWS_PER_BLOCK"),
}

# With one stage of dO, that it has been read says that Q has been, too, and that it comes says that V has been read.
LOADED_AHEAD = dataclasses.replace(LOADED, block_q=96, do_stages=2)
LOADED_AHEAD_MUTATIONS: dict[str, tuple[str, str]] = {
    "loaded while others compute": (
        "wait_for_last(i);\n          load_ahead(place);",
        "load_ahead(place);",
    ),
    "dS over V that others have not read": ("if constexpr (!DO_COMES_AFTER_V)", "if constexpr (false)"),
}

FEATURE_MUTATIONS: dict[str, tuple[str, str]] = {
    "the window's left edge is one too far": ("diagonal - window_left,", "diagonal - window_left - 1,"),
    "the window's right edge is one too near": ("diagonal + window_right}", "diagonal + window_right - 1}"),
    "tiles on the left edge are not masked": (" || kv_start < query_start + BLOCK_Q - 1 + low", ""),
    "the last query tile of a window is left out": ("last_row / BLOCK_Q + 1)", "last_row / BLOCK_Q)"),
    "the diagonal begins at the first query": ("int diagonal = seqlen_kv - seqlen_q", "int diagonal = 0"),
    "every sequence has the first one's keys": ("arguments.cu_seqlens_kv, sequence,", "arguments.cu_seqlens_kv, 0,"),
    "every sequence has the first one's rows": ("arguments.positions_q + first_query;", "arguments.positions_q;"),
    "the cap has no slope": ("(1.0f - capped * capped)", "1.0f"),
    "a cap of another base": ("arguments.softcap * LOG2_E", "arguments.softcap"),
}
SPLIT = dataclasses.replace(PRESETS["v3"], split_gqa_heads=True)
SPLIT_MUTATIONS: dict[str, tuple[str, str]] = {
    "the first head's queries for all": ("first_place = {query_head, ", "first_place = {kv_head, "),
    "another group's keys": (
        "query_head / (arguments.heads_q / arguments.heads_kv)",
        "query_head % arguments.heads_kv",
    ),
    "dV's sum is not cleared": ("  float delta = 0.0f;", "  if (gradient == 2) return;\n  float delta = 0.0f;"),
    "dV is dK's sum": ("key_rows(a.dv, main.dv_accumulator", "key_rows(a.dv, main.dk_accumulator"),
    "dV with dK's scale": ("main.dv_accumulator, 1.0f)", "main.dv_accumulator, a.scale)"),
    "the sums of one key head for all": (
        "* arguments.heads_kv + kv_head) * arguments.seqlen_kv",
        "* 1) * arguments.seqlen_kv",
    ),
    "a sum past the end": ("rows_left = arguments.seqlen_kv - key;", "rows_left = BLOCK_KV;"),
    "a workspace for dK alone": (
        "dv_accumulator = take(key_rows * HEAD_DIM",
        "dv_accumulator = take(0 * key_rows * HEAD_DIM",
    ),
    "the last rows are not converted": ("return query_row_blocks(a) + 2 *", "return query_row_blocks(a) - 1 + 2 *"),
}

TRANSPOSED_FEATURE_MUTATIONS: dict[str, tuple[str, str, str]] = {
    "the right edge is one too near, transposed": ("t64", "distance > last_distance", "distance >= last_distance"),
    "the left edge is not masked, transposed": ("t128", " || distance < first_distance", ""),
    "the cap has no slope, transposed": ("t64", "fmaxf(1.0f - score * score, 0.0f)", "1.0f"),
    "a masked score has a slope": ("t128", "fmaxf(1.0f - score * score, 0.0f)", "1.0f - score * score"),
    "every sequence has the first one's rows of the workspace": (
        "t64",
        "first_padded_row(item.sequence + 1, item.first_position)",
        "first_padded_row(1, 0)",
    ),
    "rows are looked up a sequence too late": ("t128", "first_padded_row(middle + 1,", "first_padded_row(middle + 2,"),
}
FEATURED_PROBLEM = dataclasses.replace(
    MUTATED_PROBLEM,
    causal=False,
    window_left=70,
    window_right=37,
    bottom_right=True,
    softcap=True,
    varlen=True,
    deterministic=True,
)

WGMMA_MUTATIONS: dict[str, tuple[str, str]] = {
    "half a tile is skipped that is not dead": (
        "kv_start > query_start + BLOCK_Q - 1 + mask.high",
        "kv_start > query_start + mask.high",
    ),
    "a key's queries begin one too late": ("key - mask.high : INT_MAX", "key - mask.high + 1 : INT_MAX"),
    "a key's queries end one too late": ("return key - mask.low;", "return key - mask.low + 1;"),
    "the next head begins a tile too late": (
        "query_start >= item.end_of_queries(arguments)",
        "query_start > item.end_of_queries(arguments)",
    ),
}
WGMMA_PROBLEM = dataclasses.replace(MUTATED_PROBLEM, causal=False, window_left=70, window_right=37, bottom_right=True)

PACKED_PROBLEM = dataclasses.replace(MUTATED_PROBLEM, varlen=True)
PACKED_WGMMA_MUTATIONS: dict[str, tuple[str, str]] = {
    "dK is stored over the next sequence's": (
        "map, column, END_OF_ROWS - length + row, head, first + length, END_OF_ROWS, source",
        "map, column, row, head, first + END_OF_ROWS, END_OF_ROWS, source",
    ),
    "all sequences have the statistics of the first": (
        "arguments.query_tiles + item.first_tile + start / BLOCK_Q;\n      const char* lse_delta",
        "arguments.query_tiles + start / BLOCK_Q;\n      const char* lse_delta",
    ),
    "all sequences' dQ is added to the first one's": ("item.first_tile * BLOCK_Q + start", "start"),
    "statistics of rows are looked up a sequence too late": (
        "first_padded_row(middle + 1,",
        "first_padded_row(middle + 2,",
    ),
    "who has no queries is not in the schedule": ("max(2 * least, 1u)", "2 * least"),
    "the schedule counts tiles from one on": (
        "sequence.kv_tiles_before = lane_tiles;",
        "sequence.kv_tiles_before = lane_tiles + 1;",
    ),
    "heads of a sequence are counted from another one on": (
        "number - sequence.kv_tiles_before * heads",
        "number - sequence.kv_tiles_before",
    ),
    "the search ends a sequence too early": ("<= tile)", "< tile)"),
}

SPLIT_ACCUMULATORS_PROBLEM = Problem.parse("1_2_1_131x150_136", causal=True)
# Each stands for both presets' code, but those of staged dQ.
SPLIT_ACCUMULATORS_MUTATIONS = {
    "P is not waited for": ("block.wait_full<1>(P_FULL, tile);", ""),
    "P is handed over before all lanes have stored it": (
        "ptx::sync_warp();\n        arrive(P_FULL);",
        "arrive(P_FULL);",
    ),
    "P over what the other consumer still reads": (
        "(s, tile);\n        if constexpr (!FIRST) {\n          block.wait_full<STAGES>(DS_FULL, tile - 1);",
        "(s, tile);\n        if constexpr (!FIRST) {",
    ),
    "dS is not shown to wgmma": (
        "ptx::fence_proxy_async_shared();\n        ptx::sync_warp();\n        arrive(DS_FULL",
        "ptx::sync_warp();\n        arrive(DS_FULL",
    ),
    "dS over what the other consumer still reads": (
        "init(P_FULL, 1, CONSUMER_WARPS);",
        "init(P_FULL, 1, WARPGROUP_WARPS);",
    ),
    "dO is given back before dV is computed": (
        "ptx::wgmma_wait<0>();\n        arrive(DO_EMPTY",
        "arrive(DO_EMPTY",
    ),
    "Q is given back before dK is computed": (
        "ptx::wgmma_wait<0>();\n        arrive(Q_EMPTY",
        "arrive(Q_EMPTY",
    ),
    "dK over what the other consumer still reads": (
        "ptx::named_barrier_sync(CONSUMERS_BARRIER, CONSUMER_WARPGROUPS * WARPGROUP_THREADS);",
        "",
    ),
    "dV and dK are not shown to the copies": (
        "ptx::fence_proxy_async_shared();\n    ptx::sync_warp();\n    arrive(DKV_FULL",
        "ptx::sync_warp();\n    arrive(DKV_FULL",
    ),
    "K and V over what copies still read": (
        "ptx::bulk_wait_read<0>();\n    block.arrive(warpgroup == 0",
        "block.arrive(warpgroup == 0",
    ),
    "both consumers have the same columns of dQ": ("(FIRST_PANEL + panel) * (KEY", "panel * (KEY"),
    "the last tile's dQ lacks a panel": ("panel < DQ_PANELS", "panel < 1"),
    "dV where K was": ("COMPUTES_P ? V_OFFSET : K_OFFSET)", "K_OFFSET)"),
}
VALUES_PROBLEM = Problem.parse("1_2_1_131x150_136x72", causal=True)
VALUES_MUTATIONS = {
    "dV is stored with dK's columns": ("a.dv, HEAD_DIM_V,", "a.dv, HEAD_DIM,"),
    "delta sums over Q's columns": ("column < HEAD_DIM_V)", "column < HEAD_DIM)"),
    "dP sums over Q's columns": ("step < HEAD_DIM_V_STEPS;", "step < HEAD_DIM_STEPS;"),
    "both consumers have the same queries of dQ's last columns": (
        "shared + DS_OFFSET + warpgroup * LAST_DQ_QUERIES * ROW_BYTES",
        "shared + DS_OFFSET",
    ),
    "dS of the other consumer is not waited for": ("block.wait_full<STAGES>(DS_FULL, tile - 1);", ""),
    "Q is given back while dK is computed": ("ptx::wgmma_wait<0>();\n      arrive(Q_EMPTY", "arrive(Q_EMPTY"),
    "dK over K that dQ still reads": (
        "ptx::named_barrier_sync(CONSUMERS_BARRIER, CONSUMER_WARPGROUPS * WARPGROUP_THREADS);\n    const int place",
        "const int place",
    ),
    "K and V over dK and dV that copies still read": (
        "ptx::bulk_wait_read<0>();\n    block.arrive(K_EMPTY",
        "block.arrive(K_EMPTY",
    ),
}
NARROW_VALUES_PROBLEM = Problem.parse("1_2_1_131x150_64x40", causal=True)
NARROW_VALUES_MUTATIONS = {
    "dP lacks V's last columns": ("v3", "DP_COLUMNS = ceil_to_pairs(HEAD_DIM_V)", "DP_COLUMNS = HEAD_DIM_V / 16 * 16"),
    "a warp's dV past its columns": ("v3", "n * MMA_N < HEAD_DIM_V)", "n * MMA_N < HEAD_DIM)"),
    "delta of more columns than O has": (
        "t64",
        "in_o = position < found.end && column < HEAD_DIM_V",
        "in_o = position < found.end && column < HEAD_DIM",
    ),
    "dV past its columns, transposed": ("t64", "column < HEAD_DIM_V;", "column < HEAD_DIM;"),
}
SPLIT_BULK_MUTATIONS = {
    "dQ's second panel where the first one is": ("start, panel);", "start, first_dq_panel(warpgroup));"),
    "a panel of dQ is not copied": ("panel < first_dq_panel(warpgroup + 1)", "panel < first_dq_panel(warpgroup) + 1"),
}

PAIR_PROBLEM = dataclasses.replace(SPLIT_ACCUMULATORS_PROBLEM, head_dim=200)
PAIR_MUTATIONS = {
    "the other block's dS is not waited for": ("block.wait_full<STAGES>(PEER_DS_FULL, tile - 1);", ""),
    "dS over what goes to the other block": ("block.wait_empty<STAGES>(PEER_DS_EMPTY, tile);", ""),
    "dP is not waited for, and dO is given back before": (
        "issue_scores(dp, tile);\n        ptx::wgmma_wait<0>();",
        "issue_scores(dp, tile);",
    ),
    "a block exits before the other one's last arrival": ("  ptx::sync_cluster();\n}", "}"),
    "a half of Q and dO is for one block alone": ("barrier, BOTH_BLOCKS)", "barrier, 1 << block.rank())"),
    "the columns of dQ of one block alone": ("first_panel = block.rank() * SHARED_PANELS + ", "first_panel = "),
    "own keys in the place of the other block's": ("item.kv_start + block.peer()", "item.kv_start + block.rank()"),
}

BULK = dataclasses.replace(PRESETS["t64"], dq_bulk_reduce=True)
BULK_OF_TWO_GROUPS = TransposedMmaConfig(block_q=32, block_kv=128, num_warps=8, query_groups=2, dq_bulk_reduce=True)
DETERMINISTIC_PROBLEM = dataclasses.replace(MUTATED_PROBLEM, causal=False, deterministic=True)
DQ_MUTATIONS: dict[str, tuple[Config, Problem, str, str]] = {
    "dQ is added to another tile's": (
        dataclasses.replace(PRESETS["w64lag"], dq_bulk_reduce=False),
        MUTATED_PROBLEM,
        "if (DQ_DELAYED) find_dq();\n      tile++;\n      iterations--;\n      query_start += BLOCK_Q;",
        "tile++;\n      iterations--;\n      query_start += BLOCK_Q;\n      if (DQ_DELAYED) find_dq();",
    ),
    "sums that come over what is still read": (
        PRESETS["w64conv"],
        MUTATED_PROBLEM,
        "ptx::fence_proxy_async_shared();\n      ptx::sync_warp();\n      if (first_lane()) {\n        load",
        "ptx::fence_proxy_async_shared();\n      if (first_lane()) {\n        load",
    ),
    "dQ over what a copy still reads": (
        PRESETS["w64conv"],
        MUTATED_PROBLEM,
        "if (first_lane()) ptx::bulk_wait_read<1>();",
        "",
    ),
    "converted dQ that is not shown to the copy": (
        PRESETS["w64conv"],
        MUTATED_PROBLEM,
        "ptx::fence_proxy_async_shared();\n      ptx::sync_warp();\n      if (first_lane()) {\n        load",
        "ptx::sync_warp();\n      if (first_lane()) {\n        load",
    ),
    "dQ counted before it is in memory": (
        PRESETS["w64conv"],
        MUTATED_PROBLEM,
        "ptx::bulk_wait<0>();\n    ptx::fence_proxy_async();\n    ptx::release_add_global(arguments.added",
        "ptx::fence_proxy_async();\n    ptx::release_add_global(arguments.added",
    ),
    "counted dQ that copies are not ordered after": (
        PRESETS["w64conv"],
        MUTATED_PROBLEM,
        "ptx::fence_proxy_async();\n      for (int i = 0; i < DQ_SUMS_STAGES",
        "for (int i = 0; i < DQ_SUMS_STAGES",
    ),
    "sums that are not waited for": (
        PRESETS["w64last"],
        MUTATED_PROBLEM,
        "if (has_sums) block.wait_full<1>(DQ_SUMS_FULL + warpgroup, sums++);",
        "",
    ),
    "sums over what the consumer still reads": (
        PRESETS["w64last"],
        MUTATED_PROBLEM,
        "block.wait_full<1>(DQ_FULL + warpgroup, tile++);\n        if (is_loaded) load_sums(next_head, next_start);",
        "if (is_loaded) load_sums(next_head, next_start);\n        block.wait_full<1>(DQ_FULL + warpgroup, tile++);",
    ),
    "sums that copies are not ordered after": (
        PRESETS["w64last"],
        MUTATED_PROBLEM,
        ">= awaited_by(next_start);\n          ptx::fence_proxy_async_global();",
        ">= awaited_by(next_start);",
    ),
    "dQ that is converted with another tile's sums": (
        PRESETS["w64last"],
        MUTATED_PROBLEM,
        "if (DQ_DELAYED) find_dq();\n      tile++;\n      iterations--;\n      query_start += BLOCK_Q;",
        "tile++;\n      iterations--;\n      query_start += BLOCK_Q;\n      if (DQ_DELAYED) find_dq();",
    ),
    "a thread's rows in one place": (
        dataclasses.replace(PRESETS["w64first"], preprocess_rows=4),
        MUTATED_PROBLEM,
        "arguments.chunks * THREAD_ROWS + ROW)",
        "arguments.chunks * THREAD_ROWS)",
    ),
    "dQ staged over what a copy still reads": (
        BULK,
        MUTATED_PROBLEM,
        "if (ptx::elect_one()) ptx::bulk_wait_read<0>();\n      arrive(ds_empty);",
        "arrive(ds_empty);",
    ),
    "dQ staged by lanes that do not know that it is read": (
        BULK,
        MUTATED_PROBLEM,
        "if (ptx::elect_one()) ptx::bulk_wait_read<0>();\n      arrive(ds_empty);",
        "arrive(ds_empty);\n      if (ptx::elect_one()) ptx::bulk_wait_read<0>();",
    ),
    "dQ is not shown to the copies": (
        BULK,
        MUTATED_PROBLEM,
        "ptx::fence_proxy_async_shared();\n      ptx::sync_warp();",
        "ptx::sync_warp();",
    ),
    "dQ is copied before all lanes have staged it": (
        BULK,
        MUTATED_PROBLEM,
        "ptx::fence_proxy_async_shared();\n      ptx::sync_warp();",
        "ptx::fence_proxy_async_shared();",
    ),
    "all warps stage dQ in one place": (BULK, MUTATED_PROBLEM, "DQ_OFFSET + warp * DQ_PART_BYTES", "DQ_OFFSET"),
    "all warps' dQ in the first one's columns": (BULK, MUTATED_PROBLEM, "dq_column_warp * 2 * MMA_N * MMA_M", "0"),
    "a block ends before its copies": (
        BULK,
        MUTATED_PROBLEM,
        "if (ptx::elect_one()) ptx::bulk_wait_read<0>();\n    ptx::sync_warp();",
        "ptx::sync_warp();",
    ),
    "dK's parts over what a copy still reads": (
        BULK_OF_TWO_GROUPS,
        MUTATED_PROBLEM,
        "if (ptx::elect_one()) ptx::bulk_wait_read<0>();\n    ptx::sync_warp();",
        "ptx::sync_warp();",
    ),
    "the last fragment of an odd number is left out": (
        BULK,
        dataclasses.replace(MUTATED_PROBLEM, head_dim=72),
        "HEAD_DIM / MMA_N - (",
        "HEAD_DIM / (2 * MMA_N) * 2 - (",
    ),
    "a turn is over when dQ is only read": (
        BULK,
        DETERMINISTIC_PROBLEM,
        "ptx::bulk_wait<0>();",
        "ptx::bulk_wait_read<0>();",
    ),
    "the turn after copies that are not ordered": (
        BULK,
        DETERMINISTIC_PROBLEM,
        "ptx::fence_proxy_async();\n        ptx::release_global",
        "ptx::release_global",
    ),
    "copies that are not ordered after the turn": (
        BULK,
        DETERMINISTIC_PROBLEM,
        "tiles_before);\n        ptx::fence_proxy_async();",
        "tiles_before);",
    ),
    "the turn is over when a warpgroup's dQ is only read": (
        PRESETS["w64"],
        DETERMINISTIC_PROBLEM,
        "ptx::bulk_wait<1>();\n        release();",
        "release();",
    ),
    "a warpgroup's turn that is not ordered after its copies": (
        PRESETS["w64first"],
        DETERMINISTIC_PROBLEM,
        "ptx::fence_proxy_async();\n    ptx::release_global(last_semaphore",
        "ptx::release_global(last_semaphore",
    ),
    "the first one adds too": (
        PRESETS["w64first"],
        DETERMINISTIC_PROBLEM,
        "if (tiles_before == 0)\n          ptx::bulk_store",
        "if (false)\n          ptx::bulk_store",
    ),
    "dQ's first floats twice": (
        dataclasses.replace(PRESETS["t64"], dq_vector=2),
        MUTATED_PROBLEM,
        "make_float2(dq[m][n][j], dq[m][n][j + 1])",
        "make_float2(dq[m][n][0], dq[m][n][1])",
    ),
    "dQ's floats all in one place": (
        dataclasses.replace(PRESETS["t64"], dq_vector=1),
        MUTATED_PROBLEM,
        "* MMA_N * MMA_M + j,",
        "* MMA_N * MMA_M,",
    ),
}

ROWS_PROBLEM = dataclasses.replace(MUTATED_PROBLEM, lse_grad=True, sink=True)
ROW_MUTATIONS: dict[str, tuple[str, str, str]] = {
    "the gradient of L is added to delta": ("v3", "delta - ptx::load_global(dlse", "delta + ptx::load_global(dlse"),
    "another row's gradient of L": ("w64lag", "ptx::load_global(dlse + row)", "ptx::load_global(dlse + row / 2 * 2)"),
    "the gradient of L of another head": (
        "t64",
        "with_dlse(delta, head_index * arguments.seqlen + place.position",
        "with_dlse(delta, place.position",
    ),
    "one sink for all heads": ("v3", "ptx::load_global(sink + head)", "ptx::load_global(sink)"),
    "dSink with the wrong sign": ("w64lag", "0.0f : -expf(", "0.0f : expf("),
    "dSink of the first batch alone": ("v3", "batch < arguments.batch", "batch < 1"),
    "the first row adds nothing to dSink": ("t64", "first = thread; first <", "first = thread + 1; first <"),
    "a warp that adds nothing to dSink": ("v3", "of_warps + thread * 16", "of_warps + thread / 2 * 32"),
    "no room for what dSink is summed up of": (
        "w64lag",
        "sink_terms = take(query_heads(a) * sink_rows(a) * ",
        "sink_terms = take(0 * ",
    ),
    "warps' sums that are read too early": (
        "v3",
        "make_float4(sums[0], sums[1], sums[2], sums[3]));\n  ptx::sync_threads();",
        "make_float4(sums[0], sums[1], sums[2], sums[3]));",
    ),
}

BIAS_PROBLEM = dataclasses.replace(MUTATED_PROBLEM, alibi=True, bias="1_H_S", bias_grad=True)
STORED_BIAS_PROBLEM = dataclasses.replace(MUTATED_PROBLEM, bias="B_H_S", bias_dtype="fp32", bias_grad=True)
BIAS_MUTATIONS: dict[str, tuple[str, Problem, str, str]] = {
    "slopes with the wrong sign": ("v3", BIAS_PROBLEM, "bias - slope_log2_", "bias + slope_log2_"),
    "distances from the first diagonal": ("w64lag", BIAS_PROBLEM, "query + last_key_ - last_row_ - key", "query - key"),
    "the next query head with the bias of the first": (
        "w64lag",
        STORED_BIAS_PROBLEM,
        "(arguments.heads_q / arguments.heads_kv) + query_head,",
        "(arguments.heads_q / arguments.heads_kv),",
    ),
    "another row's bias": ("v3", BIAS_PROBLEM, "min(query + query_step,", "min(query + query_step / 2,"),
    "a row past the end": ("v3", STORED_BIAS_PROBLEM, "if (query >= end_query_ ||", "if ("),
    "lanes that swap the other half": (
        "w64lag",
        BIAS_PROBLEM,
        "(even ? second : first, 4)",
        "(even ? first : second, 4)",
    ),
    "sums of dBias that are not cleared": (
        "t64",
        BIAS_PROBLEM,
        "if (const cudaError_t error = launch_clear_bias(a, main.score_bias.sums)) return error;",
        "",
    ),
    "dBias that the mask hides is not zero": (
        "w64lag",
        STORED_BIAS_PROBLEM,
        "if (const cudaError_t error = launch_clear_bias(a, main.score_bias.dbias)) return error;",
        "",
    ),
    "a sum over half of the queries": (
        "t64",
        dataclasses.replace(MUTATED_PROBLEM, bias="B_H_1", bias_grad=True),
        "lanes < 4; lanes *= 2",
        "lanes < 2; lanes *= 2",
    ),
    "a sum over the first head alone": (
        "v3",
        dataclasses.replace(MUTATED_PROBLEM, bias="B_1_S", bias_grad=True, deterministic=True),
        "head < summed.summed_heads",
        "head < 1",
    ),
}


def without_comments(text: str) -> str:
    """The code alone, its layout kept: what a fault is planted in does not depend on what a comment says."""
    return re.sub(r"^[ \t]*//.*\n|[ \t]*//.*$", "", text, flags=re.MULTILINE)


def mutated(
    name: str, old: str, new: str, config: Config = PRESETS["v3"], problem: Problem = MUTATED_PROBLEM
) -> Source:
    """The kernel with a fault: all places where its code, comments aside, has one text get another."""
    right = render(problem, config)
    code = without_comments(right.text)
    assert old in code, f"{name}: the code no longer has {old!r}"
    return Source(right.kernel_spec, right.config, code.replace(old, new))


# Each fault's configuration, problem, the text, and what stands in its place.
Fault = tuple[Config, Problem, str, str]
FAULTS: dict[str, Fault] = {
    **{name: (PRESETS["v3"], MUTATED_PROBLEM, *change) for name, change in MUTATIONS.items()},
    **{name: (PRESETS[preset], MUTATED_PROBLEM, *change) for name, (preset, *change) in TRANSPOSED_MUTATIONS.items()},
    **{name: (LOADED, MUTATED_PROBLEM, *change) for name, change in LOADING_MUTATIONS.items()},
    **{name: (SEVERAL_ROWS, MUTATED_PROBLEM, *change) for name, change in SEVERAL_ROWS_MUTATIONS.items()},
    **{name: (LOADED_AHEAD, MUTATED_PROBLEM, *change) for name, change in LOADED_AHEAD_MUTATIONS.items()},
    **{name: (PRESETS["v3"], FEATURED_PROBLEM, *change) for name, change in FEATURE_MUTATIONS.items()},
    **{
        name: (PRESETS[preset], FEATURED_PROBLEM, *change)
        for name, (preset, *change) in TRANSPOSED_FEATURE_MUTATIONS.items()
    },
    **{name: (SPLIT, MUTATED_PROBLEM, *change) for name, change in SPLIT_MUTATIONS.items()},
    **{name: (PRESETS["w64lag"], WGMMA_PROBLEM, *change) for name, change in WGMMA_MUTATIONS.items()},
    **{name: (PRESETS["w64mla"], VALUES_PROBLEM, *change) for name, change in VALUES_MUTATIONS.items()},
    **{
        name: (PRESETS[preset], NARROW_VALUES_PROBLEM, *change)
        for name, (preset, *change) in NARROW_VALUES_MUTATIONS.items()
    },
    **{name: (PRESETS["w64lag"], PACKED_PROBLEM, *change) for name, change in PACKED_WGMMA_MUTATIONS.items()},
    **{
        name: (PRESETS[preset], SPLIT_ACCUMULATORS_PROBLEM, *change)
        for preset, changes in (("w64split", SPLIT_ACCUMULATORS_MUTATIONS), ("w64bulk", SPLIT_BULK_MUTATIONS))
        for name, change in changes.items()
    },
    **{name: (PRESETS["w64pair"], PAIR_PROBLEM, *change) for name, change in PAIR_MUTATIONS.items()},
    **DQ_MUTATIONS,
    **{name: (PRESETS[preset], ROWS_PROBLEM, *change) for name, (preset, *change) in ROW_MUTATIONS.items()},
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_kernel_is_caught(name: str) -> None:
    config, problem, old, new = FAULTS[name]
    assert not VERIFIER.verify(problem, load(mutated(name, old, new, config, problem))).passed


def test_staggered_warps_are_not_a_tile_ahead_of_those_that_skip_it() -> None:
    problem = dataclasses.replace(MUTATED_PROBLEM, seqlen_q=150, seqlen_kv=131)
    config = parse_config("t64load staggered=1 v_in_registers=0")
    record = VERIFIER.verify_at(problem, load(render(problem, config)))
    assert record.passed, record.reason


@pytest.mark.parametrize("config", ["t64load", "t64load q_stages=3 do_stages=3"])
def test_a_loading_warp_may_be_late(config: str) -> None:
    """It begins each iteration when the others have ended theirs: it would miss a barrier that is a phase ahead."""
    problem = dataclasses.replace(MUTATED_PROBLEM, seqlen_q=391, seqlen_kv=150)
    waits = "wait_for_last(i);\n          load_ahead(place);"
    late = "ptx::mbarrier_wait(ds_empty + 8 * (i % STAGES), i / STAGES % 2);"
    source = mutated("late", waits, late + waits, parse_config(config), problem)
    record = VERIFIER.verify_at(problem, load(source))
    assert record.passed, record.reason


@pytest.mark.parametrize("name", BIAS_MUTATIONS)
def test_a_fault_with_a_bias_is_caught(name: str) -> None:
    """On a tile that the diagonal crosses, one that it hides, and tails of both."""
    preset, problem, old, new = BIAS_MUTATIONS[name]
    sized = dataclasses.replace(problem, batch=2, seqlen_q=150, seqlen_kv=161)
    kernel = load(mutated(name, old, new, PRESETS[preset], problem))
    assert not VERIFIER.verify_on([Case(sized, "normal")], kernel).passed


def test_a_copy_over_v_before_all_have_it_is_caught() -> None:
    """dO's only stage lies where V is at the start, with head_dim 128."""
    problem = dataclasses.replace(MUTATED_PROBLEM, head_dim=128)
    first = "if (loads_q) load_first(item, i, true);"
    source = mutated("dO over V", f"ptx::sync_threads();\n      {first}", first, PRESETS["t64"], problem)
    assert "race: cp.async.bulk" in VERIFIER.verify(problem, load(source)).reason
