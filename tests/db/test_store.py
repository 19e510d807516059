"""The contract of a store, on every kind of database."""

from __future__ import annotations

import itertools
import math
import pickle
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import optuna
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bwdtune.db.errors import InvalidRecord, NotAWinner
from bwdtune.db.records import (
    EMULATED,
    NO_FUSED_BACKWARD,
    Environment,
    GpuKey,
    MeasurementRecord,
    VariantRecord,
    VerificationRecord,
)
from bwdtune.db.store import Store
from bwdtune.gen.device import H200, RTX_5090
from bwdtune.gen.errors import UsageError
from bwdtune.gen.families import FAMILIES, PRESETS, Config, config_from_dict
from bwdtune.gen.problem import BIAS, ELEMENT_BYTES, FLAGS, VALUE_HEAD_DIM, Problem
from bwdtune.gen.render import render

PROBLEM = Problem.parse("8_16_4096_128", causal=True)
OTHER_PROBLEMS = {
    "dtype": "fp16",
    "batch": 4,
    "heads_q": 32,
    "heads_kv": 8,
    "seqlen_q": 2048,
    "seqlen_kv": 8192,
    "head_dim": 64,
    "causal": False,
    "window_left": 512,
    "bottom_right": True,
    "softcap": True,
    "varlen": True,
    "deterministic": True,
    "lse_grad": True,
    "sink": True,
    "alibi": True,
    "bias": "B_H_S",
    "bias_dtype": "fp32",
    "bias_grad": True,
    "value_head_dim": 64,
}
BIASES: list[dict[str, Any]] = [
    {},
    {"bias": "1_H_S", "bias_dtype": "fp32"},
    {"bias": "B_1_1", "bias_dtype": "bf16", "bias_grad": True},
]


def other_problem(problem: Problem, field: str) -> Problem:
    """That differs in a field, and in what it needs for that."""
    needed = {"bias": "1_H_S"} if field in ("bias_dtype", "bias_grad") else {}
    return replace(problem, **{**needed, field: OTHER_PROBLEMS[field]})


def source_hash() -> str:
    """Of the variant that `Examples` stores unless told otherwise."""
    return render(PROBLEM, PRESETS["v2"]).hash


def test_a_winner_comes_back_as_it_was_stored(any_examples: Any) -> None:
    before = datetime.now(timezone.utc)
    assert any_examples.propose(any_examples.contender(median_ms=4.25), partial=True)

    winner = any_examples.store.winner(any_examples.problem, any_examples.gpu)
    assert winner is not None
    assert (winner.problem, winner.config, winner.environment) == (
        any_examples.problem,
        PRESETS["v2"],
        any_examples.environment,
    )
    assert (winner.source_hash, winner.template_hash) == (source_hash(), "fedcba9876543210")
    assert winner.machine_code == "0011223344556677"
    assert (winner.median_ms, winner.low_ms, winner.high_ms) == (4.25, 4.25 * 0.99, 4.25 * 1.01)
    assert (winner.max_error, winner.policy, winner.limits, winner.partial) == (2e-3, "search-1", None, True)
    assert (winner.registers, winner.spill_bytes, winner.shared_memory_bytes) == (168, 0, 81_920)
    assert before - timedelta(seconds=1) < winner.created_at < datetime.now(timezone.utc) + timedelta(seconds=1)
    assert any_examples.store.winners() == [winner]


@pytest.mark.parametrize("field", OTHER_PROBLEMS)
def test_a_winner_is_of_its_problem_only(any_examples: Any, field: str) -> None:
    any_examples.propose(any_examples.contender())
    other = other_problem(any_examples.problem, field)
    assert any_examples.store.winner(other, any_examples.gpu) is None


@pytest.mark.parametrize(
    ("gpu", "limits"),
    [
        (GpuKey("NVIDIA H100", "9.0"), None),
        (GpuKey("NVIDIA H200", "10.0"), None),
        (GpuKey("NVIDIA H200", "9.0"), "sm_120"),
    ],
)
def test_a_winner_is_of_its_card_and_limits_only(any_examples: Any, gpu: GpuKey, limits: str | None) -> None:
    any_examples.propose(any_examples.contender())
    assert any_examples.store.winner(any_examples.problem, gpu, limits) is None

    environment = replace(any_examples.environment, gpu=gpu)
    any_examples.propose(
        any_examples.contender(PRESETS["v3"], 9.0, environment=environment, limits=limits),
        environment=environment,
        limits=limits,
    )
    assert any_examples.store.winner(any_examples.problem, gpu, limits).config == PRESETS["v3"]
    assert any_examples.store.winner(any_examples.problem, any_examples.gpu).config == PRESETS["v2"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_best_wins_in_whatever_order_they_come(any_examples: Any, order: tuple[int, ...]) -> None:
    times = [4.0, 5.0, 6.0]
    configs = [PRESETS[name] for name in ("v1", "v2", "v3")]
    contenders = [any_examples.contender(config, time) for config, time in zip(configs, times, strict=True)]
    won = [any_examples.propose(contenders[index]) for index in order]

    winner = any_examples.store.winner(any_examples.problem, any_examples.gpu)
    assert (winner.config, winner.median_ms) == (PRESETS["v1"], 4.0)
    assert won == [index == min(order[: place + 1]) for place, index in enumerate(order)]
    assert len(any_examples.store.winners()) == 1


def test_a_race_decides_by_the_winners_newest_time(any_examples: Any) -> None:
    any_examples.propose(any_examples.contender(PRESETS["v1"], 5.0))
    variant = any_examples.variant(PRESETS["v1"])
    any_examples.measurement(variant, 5.4)  # raced again: its first time was luck
    assert any_examples.propose(any_examples.contender(PRESETS["v2"], 5.2))
    assert any_examples.store.winner(any_examples.problem, any_examples.gpu).config == PRESETS["v2"]


def test_a_winner_that_wins_again_shows_its_newest_time(any_examples: Any) -> None:
    any_examples.propose(any_examples.contender(PRESETS["v1"], 5.0))
    assert any_examples.propose(any_examples.contender(PRESETS["v1"], 5.4))
    assert any_examples.store.winner(any_examples.problem, any_examples.gpu).median_ms == 5.4


@pytest.mark.parametrize("changed", ["policy", "toolkit", "kernel"])
def test_a_time_from_other_conditions_does_not_block_a_winner(any_examples: Any, changed: str) -> None:
    other_kernel = {"source_hash": "old", "machine_code": "old"} if changed == "kernel" else {}
    old = any_examples.variant(PRESETS["v1"], **other_kernel)
    environment = replace(any_examples.environment, **({changed: "12.8.93"} if changed == "toolkit" else {}))
    policy = "search-0" if changed == "policy" else "search-1"
    verified = any_examples.verification(old)
    any_examples.propose((any_examples.measurement(old, 4.0, environment=environment, policy=policy), verified))

    challenger = any_examples.contender(PRESETS["v2"], 5.0)
    useless = changed == "kernel"
    assert any_examples.propose(challenger, partial=True) == useless, "a whole search's winner is not lost to Ctrl-C"
    assert any_examples.propose(challenger)


def test_what_another_database_claims_neither_wins_nor_stands_in_for_a_measurement(any_examples: Any) -> None:
    store, problem = any_examples.store, any_examples.problem
    honest = any_examples.contender(PRESETS["v1"], 5.0)
    (stored,) = store.measurements(problem)
    claims = {
        time_ms: store.record_measurement(
            problem,
            stored.variant_id,
            replace(stored.record, median_ms=time_ms, low_ms=0.01, high_ms=99.0),
            trusted=False,
        )
        for time_ms in (0.02, 98.0)
    }
    with pytest.raises(NotAWinner, match="claims"):
        any_examples.propose((claims[0.02], honest[1]))
    any_examples.propose(honest)
    assert not any_examples.propose(any_examples.contender(PRESETS["v2"], 6.0)), "98 ms are only claimed"
    conditions = {"policy": "search-1", "source_hash": render(PROBLEM, PRESETS["v1"]).hash}
    found = store.measurement_for(problem, PRESETS["v1"], any_examples.environment, **conditions)
    assert found.record.median_ms == 5.0
    valid = {one.record.median_ms: one.valid for one in store.measurements(problem)}
    assert valid == {0.02: False, 98.0: False, 5.0: True, 6.0: True}


def test_a_winner_of_other_text_counts_where_its_machine_code_is_the_same(any_examples: Any) -> None:
    old = any_examples.variant(PRESETS["v1"], source_hash="the text of before")
    any_examples.propose((any_examples.measurement(old, 4.0), any_examples.verification(old)))
    any_examples.variant(PRESETS["v1"])  # today's text, which was compiled to the same
    assert not any_examples.propose(any_examples.contender(PRESETS["v2"], 5.0))
    assert any_examples.propose(any_examples.contender(PRESETS["v2"], 3.9))


@pytest.mark.parametrize(
    ("default", "advantage", "beats"),
    [
        ({}, None, None),
        ({"default_ms": 6.0, "default_kernel": "cudnn"}, 1.2, True),
        ({"default_ms": 4.0, "default_kernel": "flash"}, 0.8, False),
        ({"default_kernel": NO_FUSED_BACKWARD}, None, None),
    ],
)
def test_a_winner_knows_whether_it_beats_pytorchs_default(
    any_examples: Any, default: dict[str, Any], advantage: float | None, beats: bool | None
) -> None:
    any_examples.propose(any_examples.contender(median_ms=5.0, **default))
    winner = any_examples.store.winner(any_examples.problem, any_examples.gpu)
    assert (winner.advantage, winner.beats_default) == (advantage, beats)
    assert winner.default_kernel == default.get("default_kernel")


def test_an_interrupted_search_wins_by_its_time(any_examples: Any) -> None:
    any_examples.propose(any_examples.contender(PRESETS["v1"], 5.0))
    assert not any_examples.propose(any_examples.contender(PRESETS["v1"], 4.9), partial=True)
    assert not any_examples.store.winner(any_examples.problem, any_examples.gpu).partial
    assert any_examples.propose(any_examples.contender(PRESETS["v2"], 4.0), partial=True)
    assert any_examples.store.winner(any_examples.problem, any_examples.gpu).partial


def _emulated(examples: Any) -> tuple[int, int]:
    return examples.contender(kind=EMULATED, limits="sm_120", cycles=25.5e6)


def _failed_verification(examples: Any) -> tuple[int, int]:
    variant = examples.variant()
    return examples.measurement(variant), examples.verification(variant, passed=False, reason="dq is off")


def _failed_since(examples: Any) -> tuple[int, int]:
    contender = examples.contender()
    examples.verification(examples.variant(), passed=False)
    return contender


def _verification_of_another_variant(examples: Any) -> tuple[int, int]:
    return examples.contender(PRESETS["v1"])[0], examples.contender(PRESETS["v2"])[1]


def _verification_of_another_problem(examples: Any) -> tuple[int, int]:
    other = replace(examples.problem, batch=1)
    return examples.contender()[0], examples.verification(examples.variant(), problem=other)


def _measurement_of_another_problem(examples: Any) -> tuple[int, int]:
    other = replace(examples.problem, batch=1)
    variant = examples.variant()
    return examples.measurement(variant, problem=other), examples.verification(variant)


def _measurement_of_another_card(examples: Any) -> tuple[int, int]:
    return examples.contender(environment=replace(examples.environment, gpu=GpuKey("NVIDIA H100", "9.0")))


def _measurement_with_limits(examples: Any) -> tuple[int, int]:
    return examples.contender(limits="sm_120")


def _failed_compilation(examples: Any) -> tuple[int, int]:
    contender = examples.contender()
    examples.variant(status="failed", error="ptxas died")
    return contender


def _unknown(_: Any) -> tuple[int, int]:
    return 17, 17


@pytest.mark.parametrize(
    "contender",
    [
        _emulated,
        _failed_verification,
        _failed_since,
        _verification_of_another_variant,
        _verification_of_another_problem,
        _measurement_of_another_problem,
        _measurement_of_another_card,
        _measurement_with_limits,
        _failed_compilation,
        _unknown,
    ],
)
def test_what_must_not_win_is_refused(any_examples: Any, contender: Any) -> None:
    ids = contender(any_examples)
    with pytest.raises(NotAWinner, match=r"^[^\n]+$"):
        any_examples.propose(ids)
    assert any_examples.store.winners() == []


def test_a_failed_verification_ends_a_win(any_examples: Any) -> None:
    any_examples.propose(any_examples.contender())
    any_examples.verification(any_examples.variant(), passed=False, max_error=math.nan, reason="NaN in dq")
    assert any_examples.store.winner(any_examples.problem, any_examples.gpu) is None
    (rejected,) = any_examples.store.show(any_examples.problem).rejected
    assert rejected[1].reason == "NaN in dq"
    assert math.isnan(rejected[1].max_error)


@pytest.mark.parametrize("field", ["dtype", "head_dim", "causal", "window_left", *FLAGS, *BIAS, VALUE_HEAD_DIM])
def test_a_variant_belongs_to_its_kind_of_problem(any_examples: Any, field: str) -> None:
    if field in ("bias_grad", "bias_dtype"):
        any_examples.problem = replace(any_examples.problem, bias="1_H_S")
    other = replace(any_examples.problem, **{field: OTHER_PROBLEMS[field]})
    variant = any_examples.variant()
    for record in (any_examples.verification, any_examples.measurement):
        with pytest.raises(InvalidRecord):
            record(variant, problem=other)


def test_a_window_is_no_full_mask(examples: Any) -> None:
    full = replace(examples.problem, causal=False)
    window = replace(full, window_left=512)
    for variants, problem in ((full, window), (window, full)):
        with pytest.raises(InvalidRecord):
            examples.measurement(examples.variant(problem=variants), problem=problem)


def test_a_variant_is_measured_on_its_target(any_examples: Any) -> None:
    with pytest.raises(InvalidRecord, match="sm_120a"):
        any_examples.measurement(any_examples.variant(arch="sm_120a"))


def test_results_of_an_unknown_variant_are_refused(any_examples: Any) -> None:
    for record in (any_examples.verification, any_examples.measurement):
        with pytest.raises(InvalidRecord):
            record(17)


@pytest.mark.parametrize("time", [math.nan, math.inf, -math.inf, 0.0, -1.0])
@pytest.mark.parametrize("field", ["median_ms", "low_ms", "high_ms"])
def test_what_is_no_time_is_refused(field: str, time: float) -> None:
    times = {"median_ms": 5.0, "low_ms": 4.0, "high_ms": 6.0, field: time}
    environment = Environment(GpuKey("NVIDIA H200", "9.0"), "sm_90a", "580", "13.0.88", "2.13.0")
    with pytest.raises(InvalidRecord):
        MeasurementRecord(environment, "search-1", **times, samples=20)


@pytest.mark.parametrize(
    "changes",
    [
        {"low_ms": 5.5},
        {"high_ms": 4.5},
        {"samples": 0},
        {"kind": "guessed"},
        {"default_ms": math.nan, "default_kernel": "cudnn"},
        {"default_ms": 5.0},
    ],
    ids=lambda changes: str(changes),
)
def test_figures_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    environment = Environment(GpuKey("NVIDIA H200", "9.0"), "sm_90a", "580", "13.0.88", "2.13.0")
    with pytest.raises(InvalidRecord):
        MeasurementRecord(
            environment, "search-1", **{"median_ms": 5.0, "low_ms": 4.0, "high_ms": 6.0, "samples": 9, **changes}
        )


@pytest.mark.parametrize("error", [math.nan, math.inf, -1.0])
def test_a_verification_without_an_error_cannot_pass(error: float) -> None:
    with pytest.raises(InvalidRecord):
        VerificationRecord(True, error)


class TestMeasurementFor:
    """Whether something was measured already."""

    def find(self, examples: Any, **changes: Any) -> Any:
        wanted = {
            "problem": examples.problem,
            "config": PRESETS["v2"],
            "environment": examples.environment,
            "limits": None,
            "policy": "search-1",
            "source_hash": source_hash(),
        }
        return examples.store.measurement_for(**{**wanted, **changes})

    def test_it_has_the_newest_time_and_the_ids_of_a_winner(self, any_examples: Any) -> None:
        any_examples.contender(median_ms=5.0)
        measurement, verification = any_examples.contender(median_ms=5.5)
        found = self.find(any_examples)
        assert (found.id, found.verification_id, found.record.median_ms) == (measurement, verification, 5.5)
        assert found.record.environment == any_examples.environment
        assert found.verification.errors == {"normal": {"dq": 2e-3, "torch_dq": 1.5e-3}}
        assert any_examples.propose((found.id, found.verification_id))

    def test_other_text_with_the_same_machine_code_is_the_same(self, any_examples: Any) -> None:
        any_examples.contender(median_ms=5.0)
        assert self.find(any_examples, source_hash="another", machine_code="0011223344556677")
        assert self.find(any_examples, source_hash="another", machine_code="ffffffffffffffff") is None

    @pytest.mark.parametrize("field", ["gpu", "arch", "driver", "toolkit", "torch"])
    def test_another_environment_is_another_measurement(self, any_examples: Any, field: str) -> None:
        any_examples.contender()
        changed = replace(
            any_examples.environment, **{field: GpuKey("NVIDIA H100", "9.0") if field == "gpu" else "other"}
        )
        assert self.find(any_examples, environment=changed) is None

    @pytest.mark.parametrize(
        "changes",
        [{"policy": "race-1"}, {"source_hash": "other"}, {"limits": "sm_120"}, {"config": PRESETS["v1"]}],
        ids=lambda changes: next(iter(changes)),
    )
    def test_another_condition_is_another_measurement(self, any_examples: Any, changes: dict[str, Any]) -> None:
        any_examples.contender()
        assert self.find(any_examples, **changes) is None

    @pytest.mark.parametrize("field", OTHER_PROBLEMS)
    def test_another_problem_is_another_measurement(self, any_examples: Any, field: str) -> None:
        any_examples.contender()
        assert self.find(any_examples, problem=other_problem(any_examples.problem, field)) is None

    @pytest.mark.parametrize("invalid", [_emulated, _failed_verification, _failed_since, _failed_compilation])
    def test_what_may_not_win_is_not_found(self, any_examples: Any, invalid: Any) -> None:
        invalid(any_examples)
        assert self.find(any_examples) is None

    def test_what_was_not_verified_is_not_found(self, any_examples: Any) -> None:
        any_examples.measurement(any_examples.variant())
        assert self.find(any_examples) is None


@pytest.mark.parametrize("status", ["failed", "timeout"])
def test_failures_of_the_compiler_are_remembered(any_examples: Any, status: str) -> None:
    any_examples.variant(status=status, error="ptxas died", registers=None)
    identity = {"source_hash": source_hash(), "arch": "sm_90a", "toolchain": "13.0.88"}
    find = any_examples.store.find_variant
    found = find(any_examples.problem, PRESETS["v2"], **identity)
    assert (found.config, found.status, found.error, found.registers) == (PRESETS["v2"], status, "ptxas died", None)
    assert found == find(replace(any_examples.problem, batch=1), PRESETS["v2"], **identity), "the sizes do not matter"
    assert find(any_examples.problem, PRESETS["v1"], **identity) is None
    assert find(replace(any_examples.problem, causal=False), PRESETS["v2"], **identity) is None
    for name in identity:
        assert find(any_examples.problem, PRESETS["v2"], **{**identity, name: "other"}) is None


def test_compiling_again_replaces_the_outcome(any_examples: Any) -> None:
    first = any_examples.variant(status="timeout", error="120 s were not enough", registers=None)
    assert any_examples.variant(compile_seconds=150.0) == first
    identity = {"source_hash": source_hash(), "arch": "sm_90a", "toolchain": "13.0.88"}
    found = any_examples.store.find_variant(any_examples.problem, PRESETS["v2"], **identity)
    assert (found.status, found.registers, found.compile_seconds) == ("ok", 168, 150.0)


def test_a_status_must_be_known() -> None:
    with pytest.raises(InvalidRecord):
        VariantRecord(PRESETS["v1"], "a", "b", "sm_90a", "13.0.88", status="maybe")


def test_the_history_of_a_problem(any_examples: Any) -> None:
    for config, time in (("v1", 6.0), ("v2", 4.0), ("v3", 5.0)):
        any_examples.propose(any_examples.contender(PRESETS[config], time))
    other = replace(any_examples.problem, batch=1)
    any_examples.propose(any_examples.contender(PRESETS["v1"], 1.0, other), other)
    wrong = replace(PRESETS["v1"], stages=3)
    any_examples.verification(any_examples.variant(wrong), passed=False, reason="dv is off", max_error=math.inf)
    any_examples.variant(replace(PRESETS["v1"], stages=2), status="failed", error="ptxas died")

    history = any_examples.store.show(any_examples.problem)
    assert [winner.config for winner in history.winners] == [PRESETS["v2"]]
    assert [one.record.median_ms for one in history.measurements] == [4.0, 5.0, 6.0]
    assert all(one.valid for one in history.measurements)
    assert [(variant.config, verdict.reason) for variant, verdict in history.rejected] == [(wrong, "dv is off")]
    assert [variant.error for variant in history.failures] == ["ptxas died"]
    assert len(any_examples.store.measurements()) == 4
    assert [winner.problem for winner in any_examples.store.winners()] == [other, any_examples.problem]
    empty = any_examples.store.show(replace(any_examples.problem, batch=2))
    assert (empty.winners, empty.measurements, empty.rejected) == ((), (), ())


def test_errors_that_are_not_finite_survive(any_examples: Any) -> None:
    errors = {"normal": {"dq": math.nan, "dk": math.inf, "dv": -math.inf, "torch_dq": 1e-3}}
    any_examples.verification(any_examples.variant(), passed=False, max_error=math.inf, errors=errors)
    ((_, verdict),) = any_examples.store.show(any_examples.problem).rejected
    assert repr(verdict.errors) == repr(errors)


def configs() -> st.SearchStrategy[Config]:
    def of_family(config_type: type[Config]) -> st.SearchStrategy[Config]:
        return st.fixed_dictionaries(
            {name: st.sampled_from(values) for name, values in config_type.choices.items()}
        ).map(lambda values: config_type(**values))

    return st.sampled_from(list(FAMILIES.values())).flatmap(of_family)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    size = st.integers(1, 2**31 - 1)
    heads_kv = draw(st.integers(1, 2**15))
    causal, limit, varlen = draw(st.booleans()), st.integers(-1, 2**31 - 1), draw(st.booleans())
    left, right = draw(limit), -1 if causal else draw(limit)
    return Problem(
        dtype=draw(st.sampled_from(list(ELEMENT_BYTES))),
        batch=draw(size),
        heads_q=heads_kv * draw(st.integers(1, 2**15)),
        heads_kv=heads_kv,
        seqlen_q=draw(size),
        seqlen_kv=draw(size),
        head_dim=draw(st.integers(1, 256)),  # what a template unrolls
        causal=causal,
        window_left=left,
        window_right=right,
        bottom_right=(causal or (left, right) != (-1, -1)) and draw(st.booleans()),
        softcap=draw(st.booleans()),
        varlen=varlen,
        deterministic=draw(st.booleans()),
        lse_grad=draw(st.booleans()),
        sink=draw(st.booleans()),
        alibi=draw(st.booleans()),
        value_head_dim=draw(st.integers(0, 256)),
        **draw(st.sampled_from(BIASES if not varlen else [{}])),
    )


@pytest.mark.slow
@given(problem=problems(), config=configs(), time=st.floats(1e-6, 1e6))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_problem_and_configuration_come_back(
    any_examples: Any, problem: Problem, config: Config, time: float
) -> None:
    any_examples.propose(any_examples.contender(config, time, problem), problem)
    winner = any_examples.store.winner(problem, any_examples.gpu)
    assert winner is not None
    assert winner.problem == problem
    history = any_examples.store.show(problem)
    assert config in {one.variant.config for one in history.measurements}
    assert time in {one.record.median_ms for one in history.measurements}


def test_results_outlive_the_store(any_examples: Any) -> None:
    any_examples.propose(any_examples.contender())
    again = Store.open(any_examples.store.url.render_as_string(hide_password=False))
    assert again.winners() == any_examples.store.winners()
    again.close()


def test_a_store_goes_through_pickle(any_examples: Any) -> None:
    any_examples.propose(any_examples.contender())
    copy = pickle.loads(pickle.dumps(any_examples.store))
    assert copy.winners() == any_examples.store.winners()
    copy.close()


def test_a_closed_store_opens_again(any_examples: Any) -> None:
    any_examples.propose(any_examples.contender())
    any_examples.store.close()
    assert len(any_examples.store.winners()) == 1


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_optuna_lives_in_the_same_database(any_examples: Any) -> None:
    any_examples.propose(any_examples.contender())
    storage = any_examples.store.optuna_storage()
    study = optuna.create_study(storage=storage, study_name="a study")
    study.tell(study.ask({"x": optuna.distributions.FloatDistribution(0, 1)}), 2.0)
    any_examples.propose(any_examples.contender(PRESETS["v1"], 1.0))

    again = Store.open(any_examples.store.url.render_as_string(hide_password=False))
    study = optuna.load_study(storage=again.optuna_storage(), study_name="a study")
    assert [trial.value for trial in study.trials] == [2.0]
    assert again.winner(any_examples.problem, any_examples.gpu).median_ms == 1.0
    again.close()


def test_a_study_is_of_one_problem_card_limit_and_space(examples: Any) -> None:
    name = examples.store.study_name
    problem = examples.problem
    names = {
        name(problem, H200, None, "space"),
        name(problem, H200, None, "other space"),
        name(problem, H200, "sm_120", "space"),
        name(problem, RTX_5090, None, "space"),
        *(name(other_problem(problem, field), H200, None, "space") for field in OTHER_PROBLEMS),
    }
    assert len(names) == 4 + len(OTHER_PROBLEMS)
    assert name(problem, H200, None, "space") in names


def test_config_from_dict_refuses_what_a_database_might_hold() -> None:
    with pytest.raises(UsageError):
        config_from_dict({**PRESETS["v1"].to_dict(), "block_q": "64; asm"})


class TestEmulatedBests:
    """What is best on a card that another one stands for: ranked by cycles, and kept apart from winners."""

    def propose(self, examples: Any, contender: tuple[int, int], target: str = "sm_120", **options: Any) -> bool:
        return examples.store.set_emulated_best(examples.problem, examples.environment, target, *contender, **options)

    def contender(self, examples: Any, config: Config, cycles: float, median_ms: float = 14.0) -> tuple[int, int]:
        return examples.contender(config, median_ms, kind=EMULATED, limits="sm_120", cycles=cycles)

    def test_fewer_cycles_win_whatever_the_time(self, any_examples: Any) -> None:
        assert self.propose(any_examples, self.contender(any_examples, PRESETS["v3"], 25e6, 15.0))
        assert not self.propose(any_examples, self.contender(any_examples, PRESETS["v2"], 26e6, 14.0))
        assert self.propose(any_examples, self.contender(any_examples, PRESETS["v1"], 24e6, 16.0))
        best = any_examples.store.emulated_best(any_examples.problem, any_examples.gpu, "sm_120")
        assert (best.config, best.cycles, best.target) == (PRESETS["v1"], 24e6, "sm_120")
        assert any_examples.store.emulated_bests() == [best]
        assert any_examples.store.emulated_best(any_examples.problem, any_examples.gpu, "sm_90") is None

    def test_it_is_no_winner(self, any_examples: Any) -> None:
        contender = self.contender(any_examples, PRESETS["v3"], 25e6)
        with pytest.raises(NotAWinner, match="it was emulated, not measured"):
            any_examples.propose(contender, limits="sm_120")
        self.propose(any_examples, contender)
        assert any_examples.store.winners() == []
        assert any_examples.store.winner(any_examples.problem, any_examples.gpu, "sm_120") is None
        (measurement,) = any_examples.store.measurements(any_examples.problem)
        assert measurement.verified
        assert not measurement.valid

    def test_what_was_measured_is_no_emulated_best(self, any_examples: Any) -> None:
        with pytest.raises(NotAWinner, match="it was measured, not emulated"):
            self.propose(any_examples, any_examples.contender(limits="sm_120", cycles=3e6))

    def test_a_failed_verification_ends_it(self, any_examples: Any) -> None:
        self.propose(any_examples, self.contender(any_examples, PRESETS["v2"], 25e6))
        any_examples.verification(any_examples.variant(emulate="sm_120"), passed=False)
        assert any_examples.store.emulated_bests() == []

    def test_an_emulated_measurement_is_found_as_one(self, any_examples: Any) -> None:
        self.contender(any_examples, PRESETS["v2"], 25e6)
        source = render(PROBLEM, PRESETS["v2"], emulate="sm_120").hash
        wanted = {"limits": "sm_120", "policy": "search-1", "source_hash": source}
        find = any_examples.store.measurement_for
        about = (any_examples.problem, PRESETS["v2"], any_examples.environment)
        assert find(*about, **wanted) is None
        assert find(*about, **wanted, kind=EMULATED).record.cycles == 25e6

    @pytest.mark.parametrize("changes", [{"cycles": None}, {"limits": None}, {"cycles": float("nan")}, {"cycles": 0.0}])
    def test_without_cycles_and_a_card_there_is_none(self, changes: dict[str, Any]) -> None:
        where = Environment(GpuKey("NVIDIA H200", "9.0"), "sm_90a", "580.65.06", "13.0.88", "2.13.0")
        record = MeasurementRecord(where, "p", 5.0, 5.0, 5.0, 9, limits="sm_120", kind=EMULATED, cycles=2e7)
        with pytest.raises(InvalidRecord):
            replace(record, **changes)


def test_outcomes_are_of_the_problems_asked_for_and_the_newest(any_examples: Any) -> None:
    other = replace(PROBLEM, seqlen_q=2048)
    for config, median_ms, problem in (
        (PRESETS["v1"], 5.0, PROBLEM),
        (PRESETS["v2"], 4.0, PROBLEM),
        (PRESETS["v3"], 3.0, other),
    ):
        any_examples.measurement(any_examples.variant(config, problem), median_ms, problem)
    outcomes = any_examples.store.outcomes
    found = [(one.problem, one.config, one.record.median_ms) for one in outcomes([PROBLEM, other], newest=2)]
    assert found == [(other, PRESETS["v3"], 3.0), (PROBLEM, PRESETS["v2"], 4.0)]
    assert [one.config for one in outcomes([PROBLEM], newest=9)] == [PRESETS["v2"], PRESETS["v1"]]
    assert outcomes([], newest=9) == []


def test_of_variants_the_newest_can_be_had_alone(any_examples: Any) -> None:
    for name in ("v1", "v2", "v3"):
        any_examples.variant(PRESETS[name])
    found = any_examples.store.variants(PROBLEM, "sm_90a", newest=2)
    assert [one.config for one in found] == [PRESETS["v2"], PRESETS["v3"]]
