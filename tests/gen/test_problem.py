from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bwdtune.gen.errors import UsageError
from bwdtune.gen.problem import Problem, bias_pattern


def test_the_write_ups_shape_has_its_flops_and_bytes() -> None:
    problem = Problem.parse("8_16_4096_128", causal=True)
    assert problem.flops == 5 * 8 * 16 * 4096**2 * 128
    assert problem.read_bytes == 673_185_792
    assert problem.write_bytes == 402_653_184


def test_a_full_mask_doubles_the_work() -> None:
    causal, full = (Problem.parse("2_4_512_64", causal=causal) for causal in (True, False))
    assert full.flops == 2 * causal.flops
    assert full.read_bytes == causal.read_bytes


def test_grouped_queries() -> None:
    problem = Problem.parse("4_32_8_4096_128", dtype="fp16")
    assert (problem.heads_q, problem.heads_kv) == (32, 8)
    assert problem.shape == "4_32_8_4096_128"
    assert problem.write_bytes == 2 * (4 * 32 + 2 * 4 * 8) * 4096 * 128


def test_a_head_dim_of_v_counts_where_v_and_o_are() -> None:
    problem = Problem.parse("2_8_4_100x200_192x128", causal=True)
    assert (problem.head_dim, problem.head_dim_v) == (192, 128)
    assert problem.shape == "2_8_4_100x200_192x128"
    assert problem.kernel_spec == "bf16_d192x128_causal"
    assert problem.required_features == ("value_head_dim",)
    assert problem.flops == 2 * (3 * 192 + 2 * 128) * 8 * problem.query_key_pairs
    queries, keys = 2 * 8 * 100, 2 * 4 * 200
    assert problem.read_bytes == 2 * (queries * (192 + 2 * 128) + keys * (192 + 128)) + 4 * queries
    assert problem.write_bytes == 2 * (queries * 192 + keys * (192 + 128))
    assert problem != Problem.parse("2_8_4_100x200_192", causal=True)


def test_a_head_dim_of_v_that_is_that_of_q_is_none() -> None:
    plain = Problem.parse("8_16_4096_128")
    assert (plain.head_dim_v, plain.value_head_dim) == (128, 0)
    assert Problem.parse("8_16_4096_128x128") == plain
    assert replace(plain, head_dim=64).head_dim_v == 64
    assert replace(plain, value_head_dim=64).kernel_spec == "bf16_d128x64_full"


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(3, 256), (256, 3), (256, 512), (512, 256), (64, 64), (1, 1)])
def test_causal_pairs_are_the_triangle_but_for_half_the_diagonal(seqlen_q: int, seqlen_kv: int) -> None:
    problem = Problem("bf16", 1, 1, 1, seqlen_q, seqlen_kv, 64, causal=True)
    exact = sum(min(query + 1, seqlen_kv) for query in range(seqlen_q))
    assert 0 <= exact - problem.query_key_pairs <= min(seqlen_q, seqlen_kv)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("8_16_4096", "malformed shape"),
        ("8_16_4096_128_1_1", "malformed shape"),
        ("8x16x4096x128", "malformed shape"),
        ("", "malformed shape"),
        ("8_16_-4096_128", "malformed shape"),
        ("8_16_4096_12٨", "malformed shape"),
        ("0_16_4096_128", "batch is 0"),
        ("8_16_0_128", "seqlen_q is 0"),
        ("8_16_4294967296_128", "seqlen_q is 4294967296"),
        ("8_16_3_4096_128", "multiple of heads_kv"),
        ("8_16_0_4096_128", "heads_kv is 0"),
        ("8_16_4096x_128", "malformed shape"),
        ("8_16_4096x0_128", "seqlen_kv is 0"),
        ("8_16_4096_192x", "malformed shape"),
        ("8_16_4096_192x0", "head_dim_v is 0"),
        ("8_16_4096_192x4294967296", "value_head_dim is 4294967296"),
    ],
)
def test_a_bad_shape_is_refused_in_one_line(shape: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        Problem.parse(shape)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_status == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"window_left": -2}, "window_left is -2"),
        ({"causal": True, "window_right": 5}, "a causal mask shows no key past the diagonal"),
        ({"bottom_right": True}, "a full mask has no diagonal"),
    ],
)
def test_a_mask_that_is_a_contradiction_is_refused(fields: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Problem.parse("8_16_4096_128", **fields)


def test_one_mask_has_one_name() -> None:
    assert Problem.parse("1_1_9_64", window_right=0) == Problem.parse("1_1_9_64", causal=True)
    windows = [{"window_left": 5, "window_right": 0}, {"window_left": 5, "window_right": 0, "causal": True}]
    assert {Problem.parse("1_1_9_64", **window) for window in windows} == {
        Problem.parse("1_1_9_64", window_left=5, causal=True)
    }


def test_a_kind_is_all_but_sizes_and_limits() -> None:
    one = Problem.parse("1_1_9x20_64", window_left=5, bottom_right=True, varlen=True)
    assert one.kernel_spec == "bf16_d64_window_br_varlen"
    assert Problem.parse("3_4_2_77_64", window_right=7, bottom_right=True, varlen=True).kernel_spec == one.kernel_spec
    assert one.label == "1_1_9x20_64 bf16 window 5,-1 bottom-right varlen"


@given(
    lengths=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    window=st.tuples(st.integers(-1, 22), st.integers(-1, 22)),
    aligned=st.booleans(),
)
def test_pairs_are_counted(lengths: tuple[int, int], window: tuple[int, int], aligned: bool) -> None:
    left, right = window
    masked = window != (-1, -1)
    problem = Problem(
        "bf16", 3, 1, 1, *lengths, 64, window_left=left, window_right=right, bottom_right=aligned and masked
    )
    low, high = problem.visible_range(*lengths)
    seen = sum(i + low <= j <= i + high for i in range(lengths[0]) for j in range(lengths[1]))
    on_diagonal = sum(0 <= i + high < lengths[1] for i in range(lengths[0])) if problem.mask == "causal" else 0
    assert problem.query_key_pairs == 3 * (seen - (on_diagonal + 1) // 2)


def test_sequences_of_several_lengths_count_as_they_are() -> None:
    problem = Problem.parse("4_2_100_64", varlen=True)
    assert problem.lengths == ((25, 25), (50, 50), (75, 75), (100, 100))
    assert problem.positions == (250, 250)
    assert problem.flops == 5 * 2 * 2 * 64 * sum(length**2 for length, _ in problem.lengths)
    assert problem.query_elements == 2 * 250 * 64


@pytest.mark.parametrize(
    ("shape", "pattern"),
    [
        ((2, 4, 10, 20), "B_H_S"),
        ((1, 4, 10, 20), "1_H_S"),
        ((2, 1, 1, 20), "B_1_1"),
        ((1, 1, 1, 20), "1_1_1"),
        ((2, 4, 10, 21), ""),
        ((2, 4, 10, 1), ""),
        ((2, 3, 10, 20), ""),
        ((4, 10, 20), ""),
    ],
)
def test_a_bias_is_named_by_what_it_is_broadcast_over(shape: tuple[int, ...], pattern: str) -> None:
    if not pattern:
        with pytest.raises(UsageError, match="cannot be added to scores of shape 2_4_10_20"):
            bias_pattern(shape, 2, 4, 10, 20)
        return
    assert bias_pattern(shape, 2, 4, 10, 20) == pattern
    problem = Problem("fp16", 2, 4, 4, 10, 20, 64, bias=pattern)
    assert problem.bias_shape == shape
    assert problem.bias_dtype == "fp16"
    assert problem.kernel_spec == f"fp16_d64_full_bias_{pattern}_fp16"
    assert not problem.bias_is_summed
    assert replace(problem, bias_grad=True).bias_is_summed == ("1" in pattern)


def test_a_dimension_of_one_is_not_broadcast() -> None:
    assert bias_pattern((1, 4, 1, 20), 1, 4, 1, 20) == "B_H_S"


def test_a_bias_is_read_and_its_gradient_written_once() -> None:
    plain = Problem("bf16", 2, 4, 4, 10, 20, 64)
    biased = replace(plain, bias="1_H_S", bias_dtype="fp32", bias_grad=True)
    assert biased.read_bytes - plain.read_bytes == biased.write_bytes - plain.write_bytes == 4 * 10 * 20 * 4


@pytest.mark.parametrize(
    ("features", "said"),
    [
        ({"bias": "S_H_B"}, "unknown bias 'S_H_B': it is B_H_S"),
        ({"bias": "B_H_S_S"}, "unknown bias"),
        ({"bias": "B_H_S", "bias_dtype": "fp64"}, "unknown bias_dtype 'fp64': use one of bf16, fp16, fp32"),
        ({"bias_grad": True}, "ask for one"),
        ({"bias_dtype": "fp32"}, "ask for one"),
        ({"bias": "B_H_S", "varlen": True}, "packed sequences"),
    ],
)
def test_a_bias_that_cannot_be_is_refused(features: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Problem("bf16", 2, 4, 4, 10, 20, 64, **features)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown dtype 'fp8': use one of bf16, fp16"):
        Problem.parse("8_16_4096_128", dtype="fp8")


sizes = st.integers(min_value=1, max_value=2**31 - 1)


@given(batch=sizes, heads_kv=st.integers(1, 2**12), group=st.integers(1, 2**12), seqlen=sizes, head_dim=sizes)
def test_a_shape_is_read_as_it_is_written(batch: int, heads_kv: int, group: int, seqlen: int, head_dim: int) -> None:
    problem = Problem("bf16", batch, heads_kv * group, heads_kv, seqlen, seqlen, head_dim)
    assert Problem.parse(problem.shape) == problem
