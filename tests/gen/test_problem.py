from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bwdtune.gen.errors import UsageError
from bwdtune.gen.problem import Problem


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
    ],
)
def test_a_bad_shape_is_refused_in_one_line(shape: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        Problem.parse(shape)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_status == 2


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown dtype 'fp8': use one of bf16, fp16"):
        Problem.parse("8_16_4096_128", dtype="fp8")


sizes = st.integers(min_value=1, max_value=2**31 - 1)


@given(batch=sizes, heads_kv=st.integers(1, 2**12), group=st.integers(1, 2**12), seqlen=sizes, head_dim=sizes)
def test_a_shape_is_read_as_it_is_written(batch: int, heads_kv: int, group: int, seqlen: int, head_dim: int) -> None:
    problem = Problem("bf16", batch, heads_kv * group, heads_kv, seqlen, seqlen, head_dim)
    assert Problem.parse(problem.shape) == problem
