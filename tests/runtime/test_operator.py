"""The operators of the namespace ``bwdtune``, on the CPU with stub kernels."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from operator_kernels import Kernels, leaves
from stub_kernels import stub_library
from torch.library import opcheck
from torch.utils import flop_counter

from bwdtune.gen.problem import Problem
from bwdtune.runtime import dispatch, math_attention, operator
from bwdtune.runtime.dispatch import Choice
from bwdtune.runtime.features import Features
from bwdtune.runtime.kernel import Kernel

ops = torch.ops.bwdtune
Gradients = tuple[torch.Tensor, ...]
PLAIN = (None, None, None, None, False)
"""Neither a gradient of the log-sum-exp, nor sinks, a bias, slopes and a gradient of a bias."""


def exact(inputs: Gradients, dout: torch.Tensor, **options: Any) -> Gradients:
    """Gradients in fp64, by elementary operations."""
    causal, scale = options.pop("is_causal", False), options.pop("scale", inputs[0].shape[-1] ** -0.5)
    window = options.pop("window_left", -1), options.pop("window_right", -1)
    features = Features(window, options.pop("bottom_right", False), options.pop("softcap", 0.0))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output, _ = math_attention.differentiable(*wide, causal, scale, features)
    return torch.autograd.grad(output, wide, dout.double())


def assert_right(found: Gradients, reference: Gradients) -> None:
    for ours, right in zip(found, reference, strict=True):
        assert (ours.double() - right).norm() < 0.01 * right.norm() + 1e-5


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window_left": 5, "window_right": 3},
    "causal window, bottom-right": {"is_causal": True, "window_left": 6, "bottom_right": True},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(2, 2, 2, 33, 33), (1, 4, 2, 17, 40)])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients(kernels: Kernels, mask: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = leaves(*sizes, dtype=dtype)
    output, lse = ops.attention(*inputs, enable_gqa=True, forward="math", **MASKS[mask])
    assert lse.shape == inputs[0].shape[:3]
    dout = torch.randn(output.shape).to(dtype)
    found = torch.autograd.grad(output, inputs, dout)
    assert_right(found, exact(inputs, dout, **MASKS[mask]))
    assert kernels.launches == 1


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "(B, S, H, D)": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice of a wider tensor": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "a last stride of two": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed heads": lambda x: x.mT.contiguous().mT,
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kernels: Kernels, layout: str) -> None:
    """Of inputs and of dout: right values, in the strides that the fake implementation promises."""
    arrange = LAYOUTS[layout]
    inputs = tuple(arrange(tensor.detach()).requires_grad_() for tensor in leaves(2, 2, 2, 20, 20))
    output, _ = ops.attention(*inputs, is_causal=True, forward="math")
    dout = arrange(torch.randn(output.shape).bfloat16())
    found = torch.autograd.grad(output, inputs, dout)
    assert_right(found, exact(inputs, dout, is_causal=True))
    assert [gradient.stride() for gradient in found] == [torch.empty_like(tensor).stride() for tensor in inputs]
    assert kernels.launches == 1


@pytest.mark.parametrize("padding", [(0, 0), (0, 12)])
@pytest.mark.parametrize("last", [False, True])
def test_the_log_sum_exp_of_each_forward(kernels: Kernels, padding: tuple[int, int], last: bool) -> None:
    """cuDNN's has a last dimension of one, the memory-efficient kernel's rows are padded."""
    q, k, v = (tensor.detach() for tensor in leaves(1, 2, 2, 20, 20))
    output, lse = ops.attention(q, k, v, forward="cpu")
    dout = torch.randn(output.shape).bfloat16()
    yielded = torch.nn.functional.pad(lse, padding, value=float("nan"))
    if last:
        yielded = yielded[..., None]
    mask = (False, 0.125, -1, -1, False, 0.0, None, "cpu", *PLAIN)
    found = ops.backward(dout, q, k, v, output, yielded, None, None, *mask)
    assert_right(found[:3], exact((q, k, v), dout))
    assert kernels.launches == 1


def packed_inputs(lengths: list[int]) -> tuple[Gradients, tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    q, k, v = (
        torch.randn(sum(lengths), heads, 64, generator=generator).bfloat16().requires_grad_() for heads in (4, 2, 2)
    )
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return (q, k, v), (starts, starts, max(lengths), max(lengths))


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(kernels: Kernels, causal: bool, ours: bool) -> None:
    lengths = [7, 1, 20]
    inputs, sizes = packed_inputs(lengths)
    kernels.none = "" if ours else "nothing is stored"
    output, lse = ops.attention_varlen(*inputs, *sizes, causal, enable_gqa=True, forward="math")
    assert lse.shape == (4, sum(lengths))
    dout = torch.randn(output.shape).bfloat16()
    found = torch.autograd.grad(output, inputs, dout)
    assert kernels.launches == int(ours)
    (problem,) = kernels.asked
    assert problem == Problem("bf16", 3, 4, 2, 20, 20, 64, causal=causal, varlen=True)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        begin += length
        one = tuple(tensor.detach()[rows].transpose(0, 1)[None] for tensor in inputs)
        reference = exact(one, dout[rows].transpose(0, 1)[None], is_causal=causal)
        assert_right(tuple(gradient[rows].transpose(0, 1)[None] for gradient in found), reference)


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a limit that reaches everywhere": ({"window_left": 40}, {}),
    "a right limit of none": ({"window_right": 0}, {"causal": True}),
    "equal lengths, bottom-right": ({"is_causal": True, "bottom_right": True}, {"causal": True}),
    "a window": ({"is_causal": True, "window_left": 5}, {"causal": True, "window_left": 5}),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_mask_is_the_same_problem(kernels: Kernels, name: str) -> None:
    options, expected = SAME[name]
    inputs = leaves(1, 2, 2, 20, 20)
    output, _ = ops.attention(*inputs, forward="math", **options)
    output.sum().backward()
    assert kernels.asked == [Problem("bf16", 1, 2, 2, 20, 20, 64, **expected)]


def test_a_problem_is_decided_once_in_all_threads(kernels: Kernels) -> None:
    def work() -> None:
        for _ in range(5):
            ops.attention(*leaves(1, 1, 1, 9, 9), forward="cpu")[0].sum().backward()

    work()
    for thread in [threading.Thread(target=work) for _ in range(3)]:
        thread.start()
        thread.join()
    assert len(kernels.asked) == 1
    assert kernels.launches == 20


def test_a_kernel_that_is_ready_later_is_taken(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.none = "the kernel is being built"
    ops.attention(*leaves(1, 1, 1, 9, 9), forward="cpu")[0].sum().backward()
    assert kernels.fallbacks == {"the kernel is being built": 1}
    kernels.none = ""
    dispatch.forget()  # tells its subscribers, as a build that is done does
    ops.attention(*leaves(1, 1, 1, 9, 9), forward="cpu")[0].sum().backward()
    assert kernels.launches == 1


def test_a_launch_that_fails_is_pytorchs_backward(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Kernel.load(stub_library(fault="ERROR_CODE"))
    discarded: list[str] = []
    monkeypatch.setattr(dispatch, "choose", lambda *_, **__: Choice(broken, "a stub"))
    monkeypatch.setattr(dispatch, "discard", lambda kernel, reason: discarded.append(reason))
    inputs = leaves(1, 2, 2, 20, 20)
    dout = torch.randn(inputs[0].shape).bfloat16()
    for _ in range(2):
        output, _ = ops.attention(*inputs, forward="cpu")
        assert_right(torch.autograd.grad(output, inputs, dout), exact(inputs, dout))
    assert discarded == ["unspecified launch failure"]
    assert kernels.fallbacks == {"a launch failed: unspecified launch failure": 2}
    assert [record.getMessage() for record in caplog.records if record.name == "bwdtune"] == [
        "attention has PyTorch's backward: a launch failed: unspecified launch failure"
    ]


def test_a_resolver_that_raises_is_pytorchs_backward(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def choose(*_: Any, **__: Any) -> Choice:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(dispatch, "choose", choose)
    ops.attention(*leaves(1, 2, 2, 20, 20), forward="cpu")[0].sum().backward()
    assert kernels.fallbacks == {"ZeroDivisionError: oh": 1}
    assert "attention has PyTorch's backward: ZeroDivisionError: oh" in caplog.text


def test_pytorchs_kernels_are_left_alone_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    operator.load()
    ops.attention(*leaves(1, 1, 1, 9, 9), forward="cpu")[0].sum().backward()
    assert "the tensors are on cpu" in caplog.text


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_deterministic(kernels: Kernels, asked: bool | None, mode: bool) -> None:
    inputs = leaves(1, 1, 1, 9, 9)
    output, _ = ops.attention(*inputs, deterministic=asked, forward="cpu")
    torch.use_deterministic_algorithms(mode)
    try:
        output.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [problem.deterministic for problem in kernels.asked] == [mode if asked is None else asked]


@pytest.mark.parametrize("sizes", [(0, 2, 2, 5, 5), (1, 2, 2, 0, 5), (1, 2, 2, 5, 0)])
def test_empty_inputs(kernels: Kernels, sizes: tuple[int, ...]) -> None:
    q, k, v = (tensor.detach() for tensor in leaves(*sizes))
    mask = (False, 0.125, -1, -1, False, 0.0, None, "math", *PLAIN)
    found = ops.backward(q, q, k, v, q, q.new_zeros(q.shape[:3], dtype=torch.float32), None, None, *mask)
    *of_tensors, dsink, dbias = found
    assert [gradient.shape for gradient in of_tensors] == [q.shape, k.shape, v.shape]
    assert not any(gradient.any() for gradient in of_tensors)
    assert (dsink, dbias) == (None, None)
    assert kernels.launches == 0


def gradients(*inputs: torch.Tensor) -> Gradients:
    return torch.autograd.grad(loss(*inputs), inputs)


def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    output, _ = ops.attention(q, k, v, True, None, True, window_left=9, forward="math")
    return output.float().square().sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_is_one_graph(kernels: Kernels, dynamic: bool) -> None:
    inputs = leaves(1, 4, 2, 20, 20)
    eager = gradients(*inputs)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    assert all(map(torch.equal, torch.autograd.grad(compiled(*inputs), inputs), eager))
    assert kernels.launches == 2


def test_torch_func(kernels: Kernels) -> None:
    inputs = leaves(1, 4, 2, 20, 20)
    assert all(map(torch.equal, torch.func.grad(loss, argnums=(0, 1, 2))(*inputs), gradients(*inputs)))
    assert kernels.launches == 2


def test_vmap_of_a_gradient(kernels: Kernels) -> None:
    """A dimension more goes into the batch: one launch."""
    inputs = leaves(1, 4, 2, 20, 20)
    output, _ = ops.attention(*inputs, True, None, True, forward="cpu")
    douts = torch.randn(3, *output.shape).bfloat16()

    def gradient(dout: torch.Tensor) -> Gradients:
        return torch.autograd.grad(output, inputs, dout, retain_graph=True)

    batched = torch.func.vmap(gradient)(douts)
    assert kernels.launches == 1
    for index, dout in enumerate(douts):
        assert all(torch.equal(both[index], one) for both, one in zip(batched, gradient(dout), strict=True))


def test_is_grads_batched(kernels: Kernels) -> None:
    inputs = leaves(1, 4, 2, 20, 20)
    output, _ = ops.attention(*inputs, True, None, True, forward="cpu")
    douts = torch.randn(2, *output.shape).bfloat16()
    batched = torch.autograd.grad(output, inputs, douts, is_grads_batched=True, retain_graph=True)
    single = torch.autograd.grad(output, inputs, douts[1])
    assert all(torch.equal(both[1], one) for both, one in zip(batched, single, strict=True))


def test_a_gradient_of_the_gradient_is_refused(kernels: Kernels) -> None:
    inputs = leaves(1, 1, 1, 20, 20)
    total = ops.attention(*inputs, forward="cpu")[0].sum()
    for gradient in torch.autograd.grad(total, inputs, create_graph=True):
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            gradient.square().sum().backward(retain_graph=True)


@pytest.mark.parametrize("which", ["input", "output"])
def test_what_is_changed_before_the_backward(kernels: Kernels, which: str) -> None:
    inputs = leaves(1, 1, 1, 20, 20)
    used = [tensor * 1 for tensor in inputs]
    output, _ = ops.attention(*used, forward="cpu")
    (used[1] if which == "input" else output).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_what_is_saved_goes_through_hooks(kernels: Kernels) -> None:
    """Offloading of activations, for one: nothing is held outside of them."""
    seen: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor.clone()

    inputs = leaves(1, 2, 2, 20, 20)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, _ = ops.attention(*inputs, forward="cpu")
    output.sum().backward()
    assert seen == [inputs[0].shape] * 4 + [inputs[0].shape[:3]]
    assert kernels.launches == 1


def test_flops_are_counted(kernels: Kernels) -> None:
    """As PyTorch counts its own: two products of matrices forward, five backward."""
    inputs = leaves(1, 4, 2, 20, 30)
    with flop_counter.FlopCounterMode(display=False) as counter:
        output, _ = ops.attention(*inputs, enable_gqa=True, forward="math")
    forward = counter.get_total_flops()
    with flop_counter.FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == 5 * 2 * 4 * 20 * 30 * 64
    with flop_counter.FlopCounterMode(display=False) as counter:
        ops.attention(*(tensor.detach() for tensor in inputs), enable_gqa=True, forward="math")
    assert counter.get_total_flops() == 2 * 2 * 4 * 20 * 30 * 64
    assert forward in (0, counter.get_total_flops())


def test_query_heads_that_do_not_go_with_the_others(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="4 query heads and 2 key and value heads need enable_gqa"):
        ops.attention(*leaves(1, 4, 2, 9, 9), forward="cpu")


def test_opcheck(kernels: Kernels) -> None:
    inputs = leaves(1, 4, 2, 20, 20)
    opcheck(ops.attention.default, (*inputs, True, None, True), {"forward": "cpu"})
    opcheck(ops.attention.default, (*inputs, True, None, True), {"forward": "math"})
    packed, sizes = packed_inputs([7, 1, 20])
    opcheck(ops.attention_varlen.default, (*packed, *sizes, True, None, True), {"forward": "math"})
    q, k, v = (tensor.detach() for tensor in inputs)
    output, lse = ops.attention(q, k, v, True, None, True, forward="cpu")
    mask = (True, 0.125, -1, -1, False, 0.0, None, "cpu", *PLAIN)
    opcheck(ops.backward.default, (torch.randn_like(output), q, k, v, output, lse, None, None, *mask))
    q, k, v = (tensor.detach() for tensor in packed)
    output, lse = ops.attention_varlen(q, k, v, *sizes, True, None, True, forward="math")
    mask = (True, 0.125, -1, -1, False, 0.0, None, "math", None, None, None)
    opcheck(ops.backward_varlen.default, (torch.randn_like(output), q, k, v, output, lse, None, None, *sizes, *mask))
