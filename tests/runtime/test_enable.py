"""`bwdtune.enable`: PyTorch's attention with our backward, by every way in.

The CPU's operator of aten stands in for those of CUDA.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from operator_kernels import Kernels, leaves
from torch.utils import flop_counter
from ways_in import WAYS_IN, eager, loss

import bwdtune
from bwdtune.runtime import sdpa
from bwdtune.runtime.operator.aten import CPU_BACKWARD

PATH = os.pathsep.join(path for path in sys.path if path)


@pytest.fixture(autouse=True)
def _cpu_stands_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sdpa, "ATEN_BACKWARDS", [(CPU_BACKWARD, "CPU")])
    yield
    bwdtune.disable()


@pytest.mark.slow
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


def test_a_mask_is_a_bias(kernels: Kernels) -> None:
    """PyTorch makes floats of a boolean one."""
    places = torch.arange(20) >= torch.tensor([0, 12])[:, None]

    def gradients() -> tuple[torch.Tensor, ...]:
        inputs = leaves(2, 2, 2, 20, 20)
        output = F.scaled_dot_product_attention(*inputs, attn_mask=places[:, None, None])
        return torch.autograd.grad(output.float().square().sum(), inputs)

    plain = gradients()
    with bwdtune.enabled():
        found = gradients()
    assert [(problem.bias, problem.bias_grad) for problem in kernels.asked] == [("B_1_1", False)]
    assert kernels.launches == 1
    for ours, pytorchs in zip(found, plain, strict=True):
        assert (ours - pytorchs).norm() < 0.02 * pytorchs.norm()


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


@pytest.mark.slow
def test_nothing_is_printed() -> None:
    """PyTorch's dispatcher warns of an implementation that is registered twice."""
    program = (
        "import bwdtune\nfrom bwdtune.runtime import sdpa\n"
        "from bwdtune.runtime.operator.aten import CPU_BACKWARD\n"
        "sdpa.ATEN_BACKWARDS += [(CPU_BACKWARD, 'CPU')]\n"
        "bwdtune.enable()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


WITHOUT_COMPILER = """
import logging, torch
logging.basicConfig(format="%(message)s")
import operator_kernels
import bwdtune
from bwdtune.runtime import dispatch, sdpa
from bwdtune.runtime.operator import aten, counters, native
from torch.nn.functional import scaled_dot_product_attention

native.DEVICE_TYPES = ["cpu"]
dispatch.choose = lambda problem, *_, **__: dispatch.Choice(operator_kernels.stub(problem), "a stub")
sdpa.ATEN_BACKWARDS[:] = [(aten.CPU_BACKWARD, "CPU")]
def gradients(**options):
    inputs = operator_kernels.leaves(2, 2, 2, 20, 20)
    return torch.autograd.grad(scaled_dot_product_attention(*inputs, **options).float().square().sum(), inputs)

plain = gradients(is_causal=True)
def no_compiler():
    raise native.build.OperatorBuildError("there is no C++ compiler")
native.build.library = no_compiler
with bwdtune.enabled():
    for ours, pytorchs in zip(gradients(is_causal=True), plain, strict=True):
        assert ours.stride() == pytorchs.stride()
        assert (ours - pytorchs).norm() < 0.02 * pytorchs.norm()
    masked = gradients(attn_mask=torch.ones(20, 20, dtype=torch.bool).tril())
    for ours, pytorchs in zip(masked, plain, strict=True):
        assert (ours - pytorchs).norm() < 0.02 * pytorchs.norm()
    gradients(scale=-0.5)
assert all(map(torch.equal, gradients(is_causal=True), plain))
print(list(counters()["launches"].values()), counters()["fallbacks"])
"""


def test_without_a_compiler_python_does_it(kernels: Kernels) -> None:
    """In a process of its own: an override stays."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PATH}
    )
    assert ended.returncode == 0, ended.stderr
    if hasattr(torch.library, "get_kernel"):
        said = "PyTorch's attention has our backward through Python, which costs microseconds: there is no C++ compiler"
        reason = "the scale is not positive"
        assert ended.stdout == f"[1, 1] {{{reason!r}: 1}}\n"
        assert ended.stderr.splitlines() == [said, f"attention has PyTorch's backward: {reason}"]
    else:
        assert ended.stdout == "[] {}\n"
        assert ended.stderr == "PyTorch's attention keeps its own backward: there is no C++ compiler\n"
