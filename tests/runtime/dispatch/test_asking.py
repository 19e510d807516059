"""`warmup`, `explain` and `stats`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cxx_shim import CxxShim
from subscriber import Told

import bwdtune
from bwdtune.db.records import NO_FUSED_BACKWARD
from bwdtune.gen.errors import BwdtuneError, UsageError
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.runtime import dispatch, operator
from bwdtune.runtime.dispatch import choose
from bwdtune.runtime.dispatch.choices import dispatcher
from bwdtune.runtime.dispatch.records import Cause
from bwdtune.runtime.gpu import NoGpuError

PROBLEM = Problem.parse("2_4_128_64", causal=True)
OTHER_KIND = Problem.parse("2_4_128_64")


def tensors(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (torch.randn(sizes, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v


@pytest.mark.usefixtures("host", "in_background")
class TestWarmup:
    def test_the_first_call_after_it_has_its_kernel(self, store_winner: Callable[..., None], compiler: CxxShim) -> None:
        store_winner(PROBLEM)
        (warmed,) = bwdtune.warmup("2_4_128_64", causal=True).problems
        assert re.fullmatch(r"built in \d+ s", warmed.state)
        assert choose(PROBLEM, 0) is warmed.choice
        assert choose(PROBLEM, 0, capturing=True).kernel
        (again,) = bwdtune.warmup(PROBLEM).problems
        assert again.state == "there"
        assert len(compiler.compiled) == 1

    def test_several_problems_and_what_has_no_kernel(
        self, store_winner: Callable[..., None], compiler: CxxShim
    ) -> None:
        compiler.add(OTHER_KIND)
        store_winner(PROBLEM)
        store_winner(OTHER_KIND)
        none = Problem.parse("2_4_128_128")
        warmed = bwdtune.warmup([PROBLEM, OTHER_KIND, none, Problem.parse("2_4_100_64", causal=True)])
        assert [one.problem.shape for one in warmed.problems] == [
            "2_4_128_64",
            "2_4_128_64",
            "2_4_128_128",
            "2_4_100_64",
        ]
        assert [one.state.split()[0] for one in warmed.problems] == ["built", "built", "PyTorch", "built"]
        assert len(compiler.compiled) == 2
        lines = str(warmed).splitlines()
        assert len(lines) == 4
        assert re.match(r"2_4_128_128 bf16 full +PyTorch +no winner is stored", lines[2])

    def test_a_row_that_fails_gives_way(self, store_winner: Callable[..., None]) -> None:
        store_winner(PROBLEM, PRESETS["v1"], source_hash="0" * 16)
        store_winner(Problem.parse("2_4_150_64", causal=True), PRESETS["v2"])
        (warmed,) = bwdtune.warmup(PROBLEM).problems
        assert warmed.choice.row
        assert warmed.choice.row.config == PRESETS["v2"]

    def test_without_waiting(self, store_winner: Callable[..., None], compiler: CxxShim, told: Told) -> None:
        store_winner(PROBLEM)
        compiler.hold()
        (warmed,) = bwdtune.warmup(PROBLEM, wait=False).problems
        assert warmed.state == "being built"
        compiler.release()
        told.wait_for()
        (warmed,) = bwdtune.warmup(PROBLEM, wait=False).problems
        assert warmed.state == "there"

    def test_subscribers_are_told(self, store_winner: Callable[..., None], compiler: CxxShim, told: Told) -> None:
        """A call before it was not final."""
        store_winner(PROBLEM)
        compiler.hold()
        dispatcher.prepare(wait=True)
        dispatcher.wait_until((PROBLEM, 0), lambda choice: choice.cause == Cause.BUILDING)
        compiler.release()
        bwdtune.warmup(PROBLEM)
        told.wait_for()
        assert told.calls[0] == (PROBLEM, 0, choose(PROBLEM, 0))

    def test_no_compiler(self, store_winner: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
        store_winner(PROBLEM)
        monkeypatch.setenv("CXX", "/missing")
        (warmed,) = bwdtune.warmup(PROBLEM).problems
        assert warmed.state == "PyTorch"
        assert "/missing" in warmed.choice.reason

    def test_an_operator_that_cannot_be_built(
        self, store_winner: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> None:
            raise BwdtuneError("there is no C++ compiler")

        monkeypatch.setattr(operator, "load", fail)
        store_winner(PROBLEM)
        warmed = bwdtune.warmup(PROBLEM)
        assert warmed.problems[0].choice.kernel
        assert str(warmed).endswith("there is no C++ compiler")

    def test_wrong_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UsageError, match="malformed shape '8x16'"):
            bwdtune.warmup("8x16")
        monkeypatch.setenv("MAX_JOBS", "many")
        with pytest.raises(UsageError, match="MAX_JOBS is 'many'"):
            bwdtune.warmup(PROBLEM)


def test_warmup_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(NoGpuError):
        bwdtune.warmup(PROBLEM, device=0)


@pytest.mark.usefixtures("host", "in_background")
class TestExplain:
    def test_a_problem_with_a_winner(self, store_winner: Callable[..., None]) -> None:
        store_winner(PROBLEM)
        bwdtune.warmup(PROBLEM)
        found = bwdtune.explain(PROBLEM)
        assert found.kernel == f"bwdtune_{PRESETS['v2'].id}_bf16_d64_causal"
        assert found.reason == "the winner of 2_4_128_64 bf16 causal"
        assert found.final
        assert found.config == PRESETS["v2"]
        assert found.library
        assert found.library.name == f"{found.kernel}.so"
        assert found.row
        assert found.row.ms == 2.0
        text = str(found)
        assert text.startswith("2_4_128_64 bf16 causal: bwdtune_mma_")
        assert "2 ms at 2_4_128_64 bf16 causal" in text

    def test_a_call(self, store_winner: Callable[..., None]) -> None:
        store_winner(PROBLEM)
        bwdtune.warmup(PROBLEM)
        assert bwdtune.explain(*tensors(2, 4, 128, 64), is_causal=True) == bwdtune.explain(PROBLEM)
        assert bwdtune.explain(*tensors(2, 4, 128, 64), True) == bwdtune.explain(PROBLEM)

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, Problem.parse("2_4_128_64")),
            ({"softcap": 30.0}, Problem.parse("2_4_128_64", softcap=True)),
            ({"deterministic": True}, Problem.parse("2_4_128_64", deterministic=True)),
            ({"is_causal": True, "window": (7, -1)}, Problem.parse("2_4_128_64", causal=True, window_left=7)),
        ],
    )
    def test_arguments_are_those_of_attention(self, options: dict[str, object], expected: Problem) -> None:
        assert bwdtune.explain(*tensors(2, 4, 128, 64), **options).problem == expected

    def test_an_input_that_no_kernel_takes(self) -> None:
        found = bwdtune.explain(*tensors(2, 4, 128, 64, dtype=torch.float32))
        assert found.problem is None
        assert found.kernel is None
        assert str(found).startswith("this input: PyTorch\n  why            the dtypes are")

    def test_a_kernel_that_is_being_built(self, store_winner: Callable[..., None], compiler: CxxShim) -> None:
        store_winner(PROBLEM)
        compiler.hold()
        found = bwdtune.explain(PROBLEM)
        assert (found.kernel, found.final) == (None, False)
        assert found.config == PRESETS["v2"]
        assert "until then     PyTorch's backward" in str(found)
        compiler.release()
        dispatcher.wait_until((PROBLEM, 0), lambda choice: choice.final)

    def test_what_lies_in_the_cache_is_there(self, store_winner: Callable[..., None]) -> None:
        store_winner(PROBLEM)
        bwdtune.warmup(PROBLEM)
        dispatch.forget()
        assert bwdtune.explain(PROBLEM).kernel

    def test_times_beside_pytorchs(self, store_winner: Callable[..., None]) -> None:
        store_winner(PROBLEM)
        bwdtune.warmup(PROBLEM)
        found = bwdtune.explain(PROBLEM)
        assert found.row
        raced = replace(found, row=replace(found.row, default_ms=2.6))
        assert "PyTorch's default 2.6 ms: 1.30 times as fast" in str(raced)
        alone = replace(found, row=replace(found.row, default_kernel=NO_FUSED_BACKWARD))
        assert "PyTorch has no fused backward of this kind" in str(alone)


@pytest.mark.usefixtures("host")
class TestStats:
    @pytest.fixture(autouse=True)
    def _from_zero(self) -> None:
        bwdtune.stats(reset=True)

    def test_launches_and_fallbacks(self, store_winner: Callable[..., None]) -> None:
        store_winner(PROBLEM)
        q, k, v = tensors(2, 4, 128, 64)
        for _ in range(3):
            bwdtune.attention(q, k, v, is_causal=True).sum().backward()
        bwdtune.attention(q, k, v).sum().backward()
        found = bwdtune.stats()
        assert found.launches == {f"bwdtune_{PRESETS['v2'].id}_bf16_d64_causal": 3}
        assert found.fallbacks == {Cause.NOTHING_STORED: 1}
        assert str(found).splitlines()[0] == "3 launches, 1 times PyTorch's backward"
        assert bwdtune.stats(reset=True) == found
        assert bwdtune.stats().launches == {}

    def test_those_of_the_operator_count_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = {"launches": {"a kernel": 7}, "fallbacks": {Cause.BUILDING: 2}}
        with monkeypatch.context() as patch:
            patch.setattr(operator, "counters", lambda: counts)
            found = bwdtune.stats(reset=True)
            assert (found.launches, found.fallbacks) == ({"a kernel": 7}, {Cause.BUILDING: 2})
            counts["launches"]["a kernel"] = 8
            found = bwdtune.stats()
            assert (found.launches, found.fallbacks) == ({"a kernel": 1}, {})
        bwdtune.stats(reset=True)

    def test_counts_are_bounded(self) -> None:
        """F17: a thousand shapes that do not fit are not a thousand reasons."""
        for length in range(1, 600):
            dispatch.counters.fell_back(f"a reason with {length} in it")
        found = bwdtune.stats(reset=True)
        assert len(found.fallbacks) < 300
        assert sum(found.fallbacks.values()) == 599
