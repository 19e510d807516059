"""`attention` through the operators, with stub kernels on the CPU: masks, packed sequences, compiled code, counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from operator_kernels import Kernels, leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import bwdtune
from bwdtune.runtime import attention as attention_module
from bwdtune.runtime import autograd

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, bottom-right": {"is_causal": True, "alignment": "bottom-right"},
    "window": {"window_size": (5, 3)},
    "causal window": {"window_size": (5, -1), "is_causal": True},
    "capped": {"is_causal": True, "softcap": 2.0},
    "deterministic": {"is_causal": True, "deterministic": True},
}
STARTS = torch.tensor([0, 9, 9, 29, 33], dtype=torch.int32)
OTHER_STARTS = torch.tensor([0, 12, 17, 37, 40], dtype=torch.int32)


@pytest.fixture(autouse=True)
def ours(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The CPU in the place of a GPU; nothing goes through Python's autograd function."""
    monkeypatch.setattr(attention_module, "_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(autograd._Attention, "apply", None)
    return kernels


def in_fp64(attention: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output and gradients of elementary operations."""
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output = torch.func.vjp(attention, *wide)
    return output[0], *output[1](dout_of(output[0]))


def dout_of(output: torch.Tensor) -> torch.Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype)


def assert_right(attention: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
    output = attention(*inputs)
    found = (output, *torch.autograd.grad(output, inputs, dout_of(output)))
    for ours, exact in zip(found, in_fp64(attention, *inputs), strict=True):
        assert (ours.double() - exact).norm() <= 0.01 * exact.norm() + 1e-5


@pytest.mark.parametrize("sizes", [(2, 4, 2, 17, 40), (1, 2, 2, 33, 33)])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(ours: Kernels, mask: str, sizes: tuple[int, ...]) -> None:
    assert_right(
        lambda q, k, v: bwdtune.attention(q, k, v, enable_gqa=True, **MASKS[mask]), leaves(*sizes, head_dim=32)
    )
    assert ours.launches == 1
    assert not ours.fallbacks


def packed(heads_q: int = 2, heads_kv: int = 1) -> tuple[torch.Tensor, ...]:
    q, k, v = leaves(1, heads_q, heads_kv, 33, 40, head_dim=32)
    return tuple(tensor.detach()[0].transpose(0, 1).contiguous().requires_grad_() for tensor in (q, k, v))


def packed_attention(**options: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: bwdtune.attention_varlen(q, k, v, STARTS, OTHER_STARTS, 20, 20, enable_gqa=True, **options)


@pytest.mark.parametrize("mask", MASKS)
def test_packed_sequences(ours: Kernels, mask: str) -> None:
    assert_right(packed_attention(**{"alignment": "top-left", **MASKS[mask]}), packed())
    assert ours.launches == 1


@pytest.mark.parametrize("mask", MASKS)
def test_without_a_kernel(ours: Kernels, mask: str) -> None:
    ours.none = "nothing is stored"
    options = MASKS[mask]
    assert_right(
        lambda q, k, v: bwdtune.attention(q, k, v, enable_gqa=True, **options), leaves(2, 4, 2, 17, 40, head_dim=32)
    )
    assert_right(packed_attention(**options), packed())
    assert ours.launches == 0
    assert ours.fallbacks == {"nothing is stored": 2}


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_code_runs_our_kernel(ours: Kernels, mask: str, dynamic: bool | None) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return bwdtune.attention(q, k, v, **MASKS[mask]) * 2

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for length in (20, 30):
        inputs = leaves(1, 2, 2, length, length, head_dim=32)
        results = []
        for function in (call, compiled):
            output = function(*inputs)
            results.append((output, *torch.autograd.grad(output, inputs, dout_of(output))))
        for eager, graph in zip(*results, strict=True):
            assert torch.equal(eager, graph)
            assert eager.stride() == graph.stride()
    assert ours.launches == 4


def test_compiled_packed_sequences(ours: Kernels) -> None:
    torch._dynamo.reset()
    call = packed_attention(is_causal=True)
    inputs = packed()
    output = torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs)
    assert torch.equal(output, call(*inputs))
    torch.autograd.grad(output, inputs, dout_of(output))
    assert ours.launches == 1


@pytest.mark.parametrize("mask", MASKS)
def test_batched_gradients(ours: Kernels, mask: str) -> None:
    inputs = leaves(1, 2, 2, 17, 17, head_dim=32)
    output = bwdtune.attention(*inputs, **MASKS[mask])
    douts = torch.randn(3, *output.shape).bfloat16()
    batched = torch.autograd.grad(output, inputs, douts, is_grads_batched=True, retain_graph=True)
    for index, dout in enumerate(douts):
        for all_of_them, one in zip(batched, torch.autograd.grad(output, inputs, dout, retain_graph=True), strict=True):
            assert torch.allclose(all_of_them[index].float(), one.float(), atol=1e-2)


def flops(attention: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> int:
    with FlopCounterMode(display=False) as counter:
        attention(*inputs).sum().backward()
    return int(counter.get_total_flops())


def test_flops_are_counted_as_pytorchs(ours: Kernels) -> None:
    """Two products forward, five backward, each of 2 * Sq * Skv * D a head, whatever the mask."""
    inputs = leaves(1, 2, 2, 20, 20, head_dim=32)
    product = 2 * 2 * 20 * 20 * 32
    # PyTorch counts nothing of its forward for a CPU.
    assert flops(lambda *tensors: bwdtune.attention(*tensors, is_causal=True), inputs) == 5 * product
    assert flops(lambda *tensors: bwdtune.attention(*tensors, window_size=(5, 3)), inputs) == 7 * product
    assert ours.launches == 2
    pairs = sum(int(rows * keys) for rows, keys in zip(STARTS.diff(), OTHER_STARTS.diff(), strict=True))
    assert flops(packed_attention(), packed()) == 7 * 2 * 2 * pairs * 32


def test_a_gradient_of_the_gradient_is_refused() -> None:
    inputs = leaves(1, 1, 1, 20, 20, head_dim=32)
    loss = bwdtune.attention(*inputs).sum()
    gradients = torch.autograd.grad(loss, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated"):
        sum(gradient.float().square().sum() for gradient in gradients).backward()


def test_autocast(ours: Kernels) -> None:
    inputs = leaves(1, 2, 2, 20, 20, head_dim=32, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = bwdtune.attention(*inputs)
    assert output.dtype == torch.bfloat16
    assert {gradient.dtype for gradient in torch.autograd.grad(output.sum(), inputs)} == {torch.float32}
    assert ours.launches == 1


def test_layouts_no_fused_operator_reads(ours: Kernels) -> None:
    plain = leaves(1, 2, 2, 20, 20, head_dim=32)
    odd = [tensor.detach().mT.contiguous().mT.requires_grad_() for tensor in plain]
    for inputs in (plain, odd):
        assert_right(lambda q, k, v: bwdtune.attention(q, k, v, is_causal=True), tuple(inputs))
    assert ours.launches == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(ours: Kernels, reentrant: bool) -> None:
    inputs = leaves(1, 2, 2, 20, 20, head_dim=32)
    gradients = []
    for call in (bwdtune.attention, lambda *tensors: checkpoint(bwdtune.attention, *tensors, use_reentrant=reentrant)):
        call(*inputs).float().square().sum().backward()
        gradients.append([tensor.grad for tensor in inputs])
        for tensor in inputs:
            tensor.grad = None
    for found, right in zip(*gradients, strict=True):
        assert torch.equal(found, right)
    assert ours.launches == 2


def test_one_tensor_for_all_three(ours: Kernels) -> None:
    (x, _, _) = leaves(1, 2, 2, 20, 20, head_dim=32)
    assert_right(lambda x: bwdtune.attention(x, x, x, is_causal=True), (x,))
    assert ours.launches == 1


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_saved_tensor_hooks_and_defaults_of_pytorch(ours: Kernels, mask: str) -> None:
    inputs = leaves(1, 2, 2, 20, 20, head_dim=32)
    dout = dout_of(inputs[0])
    expected = torch.autograd.grad(bwdtune.attention(*inputs, **MASKS[mask]), inputs, dout)
    packed: list[torch.Tensor] = []
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (packed.append(tensor), len(packed) - 1)[1], lambda index: packed[index]
        ):
            output = bwdtune.attention(*inputs, **MASKS[mask])
        for _ in range(2):
            found = torch.autograd.grad(output, inputs, dout, retain_graph=True)
            for gradient, right in zip(found, expected, strict=True):
                assert torch.equal(gradient, right)
    finally:
        torch.set_default_dtype(default)
    assert len(packed) >= 5, "nothing is held outside of the hooks"
    assert ours.launches == 3
    with torch.inference_mode():
        assert torch.allclose(bwdtune.attention(*inputs, **MASKS[mask]), output, atol=0.02)
