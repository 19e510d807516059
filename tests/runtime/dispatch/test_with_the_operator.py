"""The whole way, by default: a model's first steps are PyTorch's, and the kernel's from when it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from cxx_shim import CxxShim
from operator_kernels import leaves
from subscriber import Told

import bwdtune
from bwdtune.gen.device import Device
from bwdtune.gen.problem import Problem
from bwdtune.runtime import operator, sdpa
from bwdtune.runtime.dispatch.choices import dispatcher
from bwdtune.runtime.dispatch.records import Cause
from bwdtune.runtime.operator import native
from bwdtune.runtime.operator.aten import CPU_BACKWARD

PROBLEM = Problem.parse("2_4_128_64", causal=True)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Iterator[Told]:
    """The operator on the CPU, and a subscriber beside it, which is told after it."""
    with monkeypatch.context() as patch:
        assert pytestconfig.cache
        patch.setenv("BWDTUNE_CACHE", str(pytestconfig.cache.mkdir("kernels")))  # where it is built once for all tests
        patch.delenv("CXX")
        native.load()
    monkeypatch.setattr(operator, "load", native.load)
    monkeypatch.setattr(native, "DEVICE_TYPES", ["cpu"])
    monkeypatch.setattr(sdpa, "ATEN_BACKWARDS", [(CPU_BACKWARD, "CPU")])
    monkeypatch.setattr(dispatcher, "_subscribers", list(dispatcher._subscribers))
    bwdtune.stats(reset=True)
    yield Told()
    bwdtune.disable()


@pytest.mark.slow
@pytest.mark.usefixtures("in_background")
def test_the_steps_of_a_training(
    host: Device, store_winner: Callable[..., None], compiler: CxxShim, told: Told
) -> None:
    store_winner(PROBLEM)
    compiler.hold()
    inputs = leaves(2, 4, 4, 128, 128)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(F.scaled_dot_product_attention(*inputs, is_causal=True).sum(), inputs)

    plain = step()
    bwdtune.enable()
    dispatcher.wait_until((PROBLEM, 0), lambda choice: choice.cause == Cause.BUILDING)
    for _ in range(2):
        for ours, pytorchs in zip(step(), plain, strict=True):
            assert torch.equal(ours, pytorchs)
    assert (bwdtune.stats().launches, bwdtune.stats().fallbacks) == ({}, {Cause.BUILDING: 2})
    compiler.release()
    told.wait_for()
    for ours, pytorchs in zip(step(), plain, strict=True):
        assert (ours - pytorchs).norm() < 0.02 * pytorchs.norm()
    (launches,) = bwdtune.stats().launches.values()
    assert launches == 1
    assert bwdtune.stats().fallbacks == {Cause.BUILDING: 2}
    assert bwdtune.explain(PROBLEM).kernel in bwdtune.stats().launches
