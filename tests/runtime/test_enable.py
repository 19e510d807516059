"""`bwdtune.enable`: PyTorch's attention with our backward, by every way in.

The CPU's operator of aten stands in for those of CUDA.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operator_kernels import Kernels, leaves
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.utils import checkpoint, flop_counter

import bwdtune
from bwdtune.runtime import sdpa

Gradients = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _cpu_stands_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sdpa, "ATEN_BACKWARDS", [("_scaled_dot_product_flash_attention_for_cpu_backward", "CPU")])
    yield
    bwdtune.disable()


def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().sum()


def eager(*inputs: torch.Tensor) -> Gradients:
    return torch.autograd.grad(loss(*inputs), inputs)


def function_imported_before(*inputs: torch.Tensor) -> Gradients:
    return torch.autograd.grad(imported_before(*inputs, is_causal=True).float().square().sum(), inputs)


def compiled(backend: str, **options: Any) -> Callable[..., Gradients]:
    def gradients(*inputs: torch.Tensor) -> Gradients:
        torch._dynamo.reset()
        return torch.autograd.grad(torch.compile(loss, backend=backend, fullgraph=True, **options)(*inputs), inputs)

    return gradients


def compiled_autograd(*inputs: torch.Tensor) -> Gradients:
    torch._dynamo.reset()
    total = loss(*inputs)
    with torch._dynamo.utils.maybe_enable_compiled_autograd(True, fullgraph=True, dynamic=False):
        total.backward()
    return tuple(tensor.grad for tensor in inputs)


def checkpointed(reentrant: bool) -> Callable[..., Gradients]:
    def gradients(*inputs: torch.Tensor) -> Gradients:
        checkpoint.checkpoint(loss, *inputs, use_reentrant=reentrant).backward()
        return tuple(tensor.grad for tensor in inputs)

    return gradients


def selectively_checkpointed(*inputs: torch.Tensor) -> Gradients:
    kept = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]

    def contexts() -> Any:
        return checkpoint.create_selective_checkpoint_contexts(kept)

    checkpoint.checkpoint(loss, *inputs, use_reentrant=False, context_fn=contexts).backward()
    return tuple(tensor.grad for tensor in inputs)


def autocast(*inputs: torch.Tensor) -> Gradients:
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        total = loss(*wide)
    return tuple(gradient.bfloat16() for gradient in torch.autograd.grad(total, wide))


def functional(*inputs: torch.Tensor) -> Gradients:
    return torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)


def batched(*inputs: torch.Tensor) -> Gradients:
    output = F.scaled_dot_product_attention(*inputs, is_causal=True)
    douts = torch.stack([2 * output.detach(), output.detach()])
    return tuple(both[0] for both in torch.autograd.grad(output, inputs, douts, is_grads_batched=True))


def traced(*inputs: torch.Tensor) -> Gradients:
    return torch.autograd.grad(torch.jit.trace(loss, inputs)(*inputs), inputs)


def symbolically_traced(*inputs: torch.Tensor) -> Gradients:
    return torch.autograd.grad(torch.fx.symbolic_trace(loss)(*inputs), inputs)


class Model(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().sum()


def scripted(*inputs: torch.Tensor) -> Gradients:
    return torch.autograd.grad(torch.jit.script(Model())(*inputs), inputs)


def exported(*inputs: torch.Tensor) -> Gradients:
    program = torch.export.export(Model(), inputs)
    return torch.autograd.grad(program.module()(*inputs), inputs)


WAYS_IN: dict[str, Callable[..., Gradients]] = {
    "eager": eager,
    "function imported before": function_imported_before,
    "torch.compile, AOTAutograd, dynamic": compiled("aot_eager", dynamic=True),
    "torch.compile, inductor": compiled("inductor"),
    "compiled autograd": compiled_autograd,
    "checkpoint": checkpointed(False),
    "checkpoint, reentrant": checkpointed(True),
    "checkpoint, selective": selectively_checkpointed,
    "autocast": autocast,
    "torch.func": functional,
    "is_grads_batched": batched,
    "torch.jit.trace": traced,
    "torch.jit.script": scripted,
    "torch.fx": symbolically_traced,
    "torch.export": exported,
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_every_way_in_runs_our_kernel(kernels: Kernels, way: str) -> None:
    plain = eager(*leaves(2, 2, 2, 33, 33))
    assert kernels.launches == 0
    inputs = leaves(2, 2, 2, 33, 33)
    with bwdtune.enabled():
        found = WAYS_IN[way](*inputs)
    assert kernels.launches >= 1
    assert not kernels.fallbacks
    for ours, pytorchs in zip(found, plain, strict=True):
        assert (ours - pytorchs).norm() < 0.02 * pytorchs.norm()


def test_gradients_have_the_strides_that_pytorchs_have(kernels: Kernels) -> None:
    """Views of one packed tensor, (B, S, 3, H, D): the most common layout, and not a dense one."""

    def parts() -> list[torch.Tensor]:
        packed = torch.randn(2, 20, 3, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        return [part.transpose(1, 2).detach().requires_grad_() for part in packed.unbind(2)]

    strides = [gradient.stride() for gradient in eager(*parts())]
    with bwdtune.enabled():
        assert [gradient.stride() for gradient in eager(*parts())] == strides
    assert kernels.launches == 1


def test_multi_head_attention(kernels: Kernels) -> None:
    model = torch.nn.MultiheadAttention(128, 2, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(2, 20, 128).bfloat16().requires_grad_()

    def gradient() -> torch.Tensor:
        output, _ = model(x, x, x, need_weights=False)
        return torch.autograd.grad(output.float().square().sum(), x)[0]

    plain = gradient()
    with bwdtune.enabled():
        ours = gradient()
    assert kernels.launches == 1
    assert (ours - plain).norm() < 0.02 * plain.norm()


def test_flops_are_counted_as_before(kernels: Kernels) -> None:
    counts = []
    for on in (False, True):
        inputs = leaves(1, 2, 2, 33, 33)
        with (
            bwdtune.enabled() if on else contextlib.nullcontext(),
            flop_counter.FlopCounterMode(display=False) as counter,
        ):
            loss(*inputs).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
    assert kernels.launches == 1


DECLINED: dict[str, Callable[[], torch.Tensor]] = {
    "a mask or bias tensor is given": lambda: F.scaled_dot_product_attention(
        *leaves(1, 1, 1, 9, 9), attn_mask=torch.ones(9, 9, dtype=torch.bool).tril()
    ),
    "the dtypes are not all bfloat16 or all float16": lambda: F.scaled_dot_product_attention(
        *leaves(1, 1, 1, 9, 9, dtype=torch.float32)
    ),
    "head_dim is not a multiple of 8": lambda: F.scaled_dot_product_attention(*leaves(1, 1, 1, 9, 9, head_dim=12)),
    "the scale is not positive": lambda: F.scaled_dot_product_attention(*leaves(1, 1, 1, 9, 9), scale=-0.5),
}


@pytest.mark.parametrize("reason", DECLINED)
def test_what_no_kernel_takes_is_pytorchs(kernels: Kernels, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with bwdtune.enabled():
        for _ in range(2):
            DECLINED[reason]().sum().backward()
    assert kernels.launches == 0
    assert kernels.fallbacks == {reason: 2}
    assert [record.getMessage() for record in caplog.records if record.name == "bwdtune"] == [
        f"attention has PyTorch's backward: {reason}"
    ]


def test_a_problem_without_a_winner_is_pytorchs(kernels: Kernels) -> None:
    plain = eager(*leaves(1, 2, 2, 20, 20))
    kernels.none = "nothing is stored"
    with bwdtune.enabled():
        found = eager(*leaves(1, 2, 2, 20, 20))
    assert all(map(torch.equal, found, plain))
    assert kernels.fallbacks == {"nothing is stored": 1}


@pytest.mark.parametrize("on", [False, True])
def test_deterministic_algorithms(kernels: Kernels, on: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        with bwdtune.enabled():
            eager(*leaves(1, 2, 2, 20, 20))
    finally:
        torch.use_deterministic_algorithms(before)
    assert [problem.deterministic for problem in kernels.asked] == [on]


def test_enable_and_disable(kernels: Kernels) -> None:
    function = F.scaled_dot_product_attention
    bwdtune.enable()
    bwdtune.enable()
    assert F.scaled_dot_product_attention is function
    eager(*leaves(1, 1, 1, 9, 9))
    assert kernels.launches == 1
    bwdtune.disable()
    eager(*leaves(1, 1, 1, 9, 9))
    bwdtune.disable()
    assert kernels.launches == 1
    assert not kernels.fallbacks


def test_blocks_nest_and_end_with_an_exception(kernels: Kernels) -> None:
    with bwdtune.enabled():
        with bwdtune.enabled():
            pass
        eager(*leaves(1, 1, 1, 9, 9))
    assert kernels.launches == 1
    with pytest.raises(ZeroDivisionError), bwdtune.enabled():
        raise ZeroDivisionError
    eager(*leaves(1, 1, 1, 9, 9))
    assert kernels.launches == 1


def test_a_block_leaves_on_what_was_on(kernels: Kernels) -> None:
    bwdtune.enable()
    with bwdtune.enabled():
        pass
    eager(*leaves(1, 1, 1, 9, 9))
    assert kernels.launches == 1


def test_threads(kernels: Kernels) -> None:
    """Blocks of several threads overlap; each one's own backward is ours."""
    begin = threading.Barrier(4)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            begin.wait()
            for _ in range(20):
                with bwdtune.enabled():
                    eager(*leaves(1, 1, 1, 9, 9))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert kernels.launches == 80
    eager(*leaves(1, 1, 1, 9, 9))
    assert kernels.launches == 80


def test_registry_of_pytorch(kernels: Kernels) -> None:
    attention = pytest.importorskip("torch.nn.attention")
    if not hasattr(attention, "activate_flash_attention_impl"):
        pytest.skip("this PyTorch has no such registry")
    attention.activate_flash_attention_impl("bwdtune")
    try:
        eager(*leaves(1, 1, 1, 9, 9))
        assert kernels.launches == 1
    finally:
        attention.restore_flash_attention_impl()
    eager(*leaves(1, 1, 1, 9, 9))
    assert kernels.launches == 1


def test_nothing_is_printed() -> None:
    """PyTorch's dispatcher warns of an implementation that is registered twice."""
    program = (
        "import bwdtune\nfrom bwdtune.runtime import sdpa\n"
        "sdpa.ATEN_BACKWARDS += [('_scaled_dot_product_flash_attention_for_cpu_backward', 'CPU')]\n"
        "bwdtune.enable()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_without_a_compiler_pytorchs_backward_stays() -> None:
    program = (
        "import logging, torch\nlogging.basicConfig(format='%(message)s')\nimport bwdtune\n"
        "bwdtune.enable()\nbwdtune.enable()\n"
        "q = torch.randn(1, 1, 9, 64).bfloat16().requires_grad_()\n"
        "torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()\n"
    )
    environment = {"PATH": "/nowhere", "BWDTUNE_CACHE": "/nowhere/cache"}
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line == (
        "PyTorch's attention keeps its own backward: there is no C++ compiler (g++, or the one that CXX names)"
    )
