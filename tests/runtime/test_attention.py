"""`attention` and the takeover of PyTorch's function, with a winner for the CPU in the place of one for a GPU."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stub_kernels import stub_for, stub_library

import bwdtune
from bwdtune.gen.device import Device
from bwdtune.gen.problem import Problem
from bwdtune.runtime import dispatch
from bwdtune.runtime.dispatch import Choice
from bwdtune.runtime.kernel import Kernel

HEAD_DIM = 64
_pytorch = F.scaled_dot_product_attention


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a user is told."""
    records = [record for record in caplog.records if record.name == "bwdtune"]
    return [record.getMessage() for record in records if record.levelno == logging.WARNING]


class Launches:
    """The problems whose backward was a kernel of ours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        launch = Kernel.launch

        def counting(*arguments: Any, **options: Any) -> None:
            self.count += 1
            launch(*arguments, **options)

        monkeypatch.setattr(Kernel, "launch", counting)


@pytest.fixture
def launches(host: Device, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Every problem has a right kernel; counts what is launched."""

    def choose(problem: Problem, device_index: int, *, capturing: bool = False) -> Choice:
        library = stub_for(problem)
        return Choice(Kernel.load(library), "a stub")

    monkeypatch.setattr(dispatch, "choose", choose)
    return Launches(monkeypatch)


def leaves(
    *sizes: int, dtype: torch.dtype = torch.bfloat16, head_dim: int = HEAD_DIM, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of B, Hq, Hkv, Sq, Skv, with a gradient each."""
    batch, heads_q, heads_kv, seqlen_q, seqlen_kv = sizes
    generator = torch.Generator(device).manual_seed(sum(sizes))
    shapes = [(heads_q, seqlen_q), (heads_kv, seqlen_kv), (heads_kv, seqlen_kv)]
    q, k, v = (
        torch.randn(batch, heads, seqlen, head_dim, generator=generator, device=device).to(dtype).requires_grad_()
        for heads, seqlen in shapes
    )
    return q, k, v


def assert_right(
    found: tuple[torch.Tensor | None, ...], inputs: tuple[torch.Tensor, ...], dout: torch.Tensor, **options: Any
) -> None:
    """Compares gradients with the exact ones."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output = _pytorch(*exact, **options, enable_gqa=True)
    for gradient, reference in zip(found, torch.autograd.grad(output, exact, dout.double()), strict=True):
        assert gradient is not None
        assert (gradient.double() - reference).norm() < 0.01 * reference.norm() + 1e-5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(2, 2, 2, 33, 33), (1, 4, 2, 17, 40), (1, 4, 1, 40, 17), (1, 1, 1, 1, 1)])
def test_gradients(launches: Launches, sizes: tuple[int, ...], dtype: torch.dtype, causal: bool) -> None:
    inputs = leaves(*sizes, dtype=dtype)
    output = bwdtune.attention(*inputs, is_causal=causal, enable_gqa=True)
    reference = _pytorch(*(tensor.double() for tensor in inputs), is_causal=causal, enable_gqa=True)
    assert torch.allclose(output.double(), reference, atol=0.02)
    dout = torch.randn(output.shape).to(dtype)
    assert_right(torch.autograd.grad(output, inputs, dout), inputs, dout, is_causal=causal)
    assert launches.count == 1


def test_a_winner_from_the_database_to_the_gradient(
    host: Device, store_winner: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No stub: the real template, compiled as plain C++ on first use."""
    store_winner(Problem.parse("1_2_1_70_64", causal=True))
    launches = Launches(monkeypatch)
    inputs = leaves(1, 2, 1, 70, 70)
    output = bwdtune.attention(*inputs, is_causal=True, enable_gqa=True)
    dout = torch.randn(output.shape).bfloat16()
    assert_right(torch.autograd.grad(output, inputs, dout), inputs, dout, is_causal=True)
    assert launches.count == 1
    assert not said(caplog)


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_scale(launches: Launches, scale: float) -> None:
    inputs = leaves(1, 2, 2, 20, 20)
    output = bwdtune.attention(*inputs, scale=scale)
    dout = torch.randn(output.shape).bfloat16()
    assert_right(torch.autograd.grad(output, inputs, dout), inputs, dout, scale=scale)


GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of a sum": lambda output: output.sum(),
    "transposed": lambda output: (output.transpose(1, 2) * torch.arange(2.0)[:, None]).sum(),
    "of a concatenation": lambda output: torch.cat([output, output], -1).square().sum(),
    "of a slice": lambda output: output[:, :, ::2, ::2].square().sum(),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_that_are_not_packed(launches: Launches, name: str) -> None:
    inputs = leaves(2, 2, 2, 20, 20)
    output = bwdtune.attention(*inputs)
    (dout,) = torch.autograd.grad(GRADIENTS[name](output), output, retain_graph=True)
    found = torch.autograd.grad(GRADIENTS[name](output), inputs)
    assert_right(found, inputs, dout)
    assert launches.count == 1


@pytest.mark.parametrize("asked", [asked for asked in itertools.product([False, True], repeat=3) if any(asked)])
def test_only_the_gradients_that_are_asked_for(launches: Launches, asked: tuple[bool, bool, bool]) -> None:
    inputs = leaves(1, 2, 2, 20, 20)
    everything = torch.autograd.grad(bwdtune.attention(*inputs).float().square().sum(), inputs)
    for tensor, need in zip(inputs, asked, strict=True):
        tensor.requires_grad_(need)
    bwdtune.attention(*inputs).float().square().sum().backward()
    for tensor, need, gradient in zip(inputs, asked, everything, strict=True):
        assert (tensor.grad is not None) == need
        assert tensor.grad is None or torch.equal(tensor.grad, gradient)


def test_self_attention_of_one_tensor(launches: Launches) -> None:
    x, _, _ = leaves(1, 2, 2, 20, 20)
    output = bwdtune.attention(x, x, x)
    (found,) = torch.autograd.grad(output, x, torch.ones_like(output))
    exact = x.detach().double().requires_grad_()
    (reference,) = torch.autograd.grad(_pytorch(exact, exact, exact), exact, torch.ones_like(exact))
    assert (found.double() - reference).norm() < 0.01 * reference.norm()


def test_views_of_one_packed_tensor(launches: Launches) -> None:
    packed = torch.randn(2, 20, 3, 2, HEAD_DIM).bfloat16().requires_grad_()
    output = bwdtune.attention(*(part.transpose(1, 2) for part in packed.unbind(2)), is_causal=True)
    (found,) = torch.autograd.grad(output, packed, torch.ones_like(output))
    exact = packed.detach().double().requires_grad_()
    reference = _pytorch(*(part.transpose(1, 2) for part in exact.unbind(2)), is_causal=True)
    (reference,) = torch.autograd.grad(reference, exact, torch.ones_like(reference))
    assert (found.double() - reference).norm() < 0.01 * reference.norm()


def test_a_gradient_of_the_gradient_is_refused(launches: Launches) -> None:
    inputs = leaves(1, 1, 1, 20, 20)
    loss = bwdtune.attention(*inputs).sum()
    dq, dk, dv = torch.autograd.grad(loss, inputs, create_graph=True)
    for gradient in (dq, dk, dv):
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            (loss + gradient.square().sum()).backward(retain_graph=True)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_input_that_is_changed_before_the_backward(launches: Launches, which: int) -> None:
    inputs = [tensor.detach() for tensor in leaves(1, 1, 1, 20, 20)]
    inputs[0].requires_grad_()
    used = [tensor * 1 for tensor in inputs]
    output = bwdtune.attention(*used)
    used[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_an_output_that_is_changed_before_the_backward(launches: Launches) -> None:
    inputs = leaves(1, 1, 1, 20, 20)
    output = bwdtune.attention(*inputs)
    output.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_launch_that_fails_is_not_an_error_of_the_step(
    host: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The gradients are there all the same, and the kernel is not launched again."""
    kernel = Kernel.load(stub_library(causal=True, fault="ERROR_CODE"))
    discarded: list[str] = []
    monkeypatch.setattr(dispatch, "choose", lambda *asked, **options: Choice(kernel, "a stub"))
    monkeypatch.setattr(dispatch, "discard", lambda kernel, reason: discarded.append(reason))
    inputs = leaves(1, 2, 1, 20, 30)
    output = bwdtune.attention(*inputs, is_causal=True, enable_gqa=True)
    dout = torch.randn(output.shape).bfloat16()
    assert_right(torch.autograd.grad(output, inputs, dout), inputs, dout, is_causal=True)
    (reason,) = discarded
    assert reason.startswith("its launch failed: ")


def test_where_no_gradient_is_needed_pytorch_computes_alone(
    launches: Launches, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = leaves(1, 1, 1, 20, 20)
    with torch.no_grad():
        plain = bwdtune.attention(*inputs)
    assert not plain.requires_grad
    assert not bwdtune.attention(*(tensor.detach() for tensor in inputs)).requires_grad
    with torch.inference_mode():
        bwdtune.attention(*inputs)
    assert not said(caplog)


def test_autocast_casts_as_for_pytorchs_function(launches: Launches) -> None:
    inputs = leaves(1, 2, 2, 20, 20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = bwdtune.attention(*inputs)
        assert output.dtype == _pytorch(*inputs).dtype == torch.bfloat16
    found = torch.autograd.grad(output, inputs, torch.ones_like(output))
    assert launches.count == 1
    assert {gradient.dtype for gradient in found} == {torch.float32}
    assert_right(found, inputs, torch.ones_like(output))


def test_tensors_on_two_devices() -> None:
    q, k, v = leaves(1, 1, 1, 20, 20)
    with pytest.raises(ValueError, match="q is on cpu, k on meta and v on cpu: they must be on one device"):
        bwdtune.attention(q, k.to("meta"), v)


class Subclass(torch.Tensor):
    pass


DECLINED: dict[str, Callable[[], torch.Tensor]] = {
    "kernels are for bfloat16 and float16": lambda: bwdtune.attention(*leaves(1, 1, 1, 9, 9, dtype=torch.float32)),
    "the tensors have 3, 3 and 3 dimensions": lambda: bwdtune.attention(*(t[0] for t in leaves(1, 1, 1, 9, 9))),
    "the shapes are": lambda: bwdtune.attention(leaves(2, 1, 1, 9, 9)[0], *leaves(1, 1, 1, 9, 9)[1:]),
    "the scale is -0.5": lambda: bwdtune.attention(*leaves(1, 1, 1, 9, 9), scale=-0.5),
    "the input is empty": lambda: bwdtune.attention(*leaves(2, 1, 1, 0, 9)),
    "a tensor is of a subclass": lambda: bwdtune.attention(*(t.as_subclass(Subclass) for t in leaves(1, 1, 1, 9, 9))),
}


@pytest.mark.parametrize("reason", DECLINED)
def test_what_no_kernel_takes_is_pytorchs(launches: Launches, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    DECLINED[reason]().sum().backward()
    DECLINED[reason]()
    (line,) = said(caplog)
    assert reason in line
    assert launches.count == 0


@pytest.mark.parametrize("sizes", [(0, 2, 2, 5, 5), (1, 2, 2, 0, 5), (1, 2, 2, 5, 0)])
def test_empty_inputs_give_empty_or_zero_gradients(launches: Launches, sizes: tuple[int, ...]) -> None:
    inputs = leaves(*sizes)
    bwdtune.attention(*inputs).sum().backward()
    for tensor in inputs:
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any()


def test_a_backend_that_is_turned_off(launches: Launches, caplog: pytest.LogCaptureFixture) -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        bwdtune.attention(*leaves(1, 1, 1, 9, 9)).sum().backward()
    assert "fused attention, whose forward is used, is turned off" in caplog.text
    assert launches.count == 0


def test_one_line_a_kind_of_problem(host: Device, caplog: pytest.LogCaptureFixture) -> None:
    """No winner is stored here, and a new length is no news."""
    for length in (20, 20, 30, 20):
        bwdtune.attention(*leaves(1, 1, 1, length, length)).sum().backward()
    bwdtune.attention(*leaves(1, 1, 1, 20, 20), is_causal=True).sum().backward()
    assert [line.split(" or one")[0] for line in said(caplog)] == [
        "attention has PyTorch's backward: no winner is stored for 1_1_20_64 bf16 full",
        "attention has PyTorch's backward: no winner is stored for 1_1_20_64 bf16 causal",
    ]


def test_the_cpu_is_pytorchs(caplog: pytest.LogCaptureFixture) -> None:
    bwdtune.attention(*leaves(1, 1, 1, 9, 9)).sum().backward()
    assert "the tensors are on cpu" in caplog.text


def test_functional_transforms(launches: Launches) -> None:
    inputs = leaves(1, 1, 1, 9, 9)
    found = torch.func.grad(lambda q: bwdtune.attention(q, *inputs[1:]).float().sum())(inputs[0])
    assert found.shape == inputs[0].shape


def test_compiled_code_agrees(launches: Launches) -> None:
    inputs = leaves(1, 2, 2, 20, 20)
    eager = torch.autograd.grad(bwdtune.attention(*inputs, is_causal=True).float().square().sum(), inputs)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return bwdtune.attention(q, k, v, is_causal=True).float().square().sum()

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(eager, torch.autograd.grad(compiled(*inputs), inputs), strict=True):
        assert torch.allclose(ours, theirs, atol=0.05)
