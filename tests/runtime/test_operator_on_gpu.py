"""The operator and `enable` on a GPU: PyTorch's CUDA operators, strides, streams, graphs, threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operator_kernels import Kernels, leaves
from torch.nn.attention import SDPBackend, sdpa_kernel
from ways_in import WAYS_IN, eager, loss

import bwdtune
from bwdtune.gen.build.jobs import build
from bwdtune.gen.families import MmaConfig
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime import dispatch
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import Kernel

pytestmark = pytest.mark.gpu

ops = torch.ops
HEAD_DIM = 64
CONFIG = MmaConfig(32, 64, 2, stages=2, k_in_registers=False, v_in_registers=False)
KINDS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "bottom_right": True},
    {"causal": True, "deterministic": True},
    {"window_left": 50, "window_right": 30},
    {"window_left": 50, "window_right": 30, "bottom_right": True},
    {"causal": True, "varlen": True},
    {"window_left": 50, "window_right": 30, "varlen": True},
]


@pytest.fixture(scope="module")
def libraries(pytestconfig: pytest.Config) -> dict[str, Kernel]:
    """A kernel of each kind, compiled beside one another."""
    problems = [Problem("bf16", 1, 1, 1, 1, 1, HEAD_DIM, **kind) for kind in KINDS]
    assert pytestconfig.cache
    cache = pytestconfig.cache.mkdir("kernels")
    variants = build([render(problem, CONFIG) for problem in problems], current_device().arch, cache=cache)
    loaded = {}
    for problem, variant in zip(problems, variants, strict=True):
        assert variant.library, variant.error
        loaded[problem.kernel_spec] = Kernel.load(variant.library)
    return loaded


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, libraries: dict[str, Kernel]) -> Iterator[Kernels]:
    found = Kernels(lambda problem: libraries[problem.kernel_spec])
    monkeypatch.setattr(dispatch, "choose", found.choose)
    yield found
    bwdtune.disable()
    found.native.forget()


def assert_near(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], bound: float = 0.02) -> None:
    for ours, pytorchs in zip(found, expected, strict=True):
        assert (ours.float() - pytorchs.float()).norm() <= bound * pytorchs.float().norm() + 1e-4


def cuda(*sizes: int) -> tuple[torch.Tensor, ...]:
    return leaves(*sizes, head_dim=HEAD_DIM, device="cuda")


def packed_qkv(*sizes: int) -> tuple[torch.Tensor, ...]:
    """Views of one (B, S, 3, H, D) tensor."""
    q, k, v = (tensor.detach() for tensor in cuda(*sizes))
    together = torch.stack([tensor.transpose(1, 2) for tensor in (q, k, v)], 2)
    return tuple(part.transpose(1, 2).detach().requires_grad_() for part in together.unbind(2))


def heads_inside(*sizes: int) -> tuple[torch.Tensor, ...]:
    """(B, S, H, D) in memory."""
    return tuple(
        tensor.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for tensor in cuda(*sizes)
    )


def by(backend: SDPBackend, **options: Any) -> Callable[..., torch.Tensor]:
    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*inputs, **options)

    return forward


def flash_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    lengths = (None, None, q.shape[2], k.shape[2])
    inside = (tensor.transpose(1, 2) for tensor in (q, k, v))
    limits = {"window_size_left": 50, "window_size_right": 30}
    return ops.aten._flash_attention_forward(*inside, *lengths, 0.0, False, False, **limits)[0].transpose(1, 2)


def flash_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device="cuda") * q.shape[2]
    rows = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
    lengths = (starts, starts, q.shape[2], k.shape[2])
    out = ops.aten._flash_attention_forward(*rows, *lengths, 0.0, True, False)[0]
    return out.unflatten(0, (q.shape[0], -1)).transpose(1, 2)


def lower_right(*inputs: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.bias import causal_lower_right  # only here: it loads Dynamo, which takes two seconds

    mask = causal_lower_right(inputs[0].shape[2], inputs[1].shape[2])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(*inputs, attn_mask=mask)


FORWARDS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "default, causal": (lambda *inputs: F.scaled_dot_product_attention(*inputs, is_causal=True), (2, 4, 4, 300, 300)),
    "cuDNN": (by(SDPBackend.CUDNN_ATTENTION), (2, 4, 4, 300, 300)),
    "cuDNN, causal, unequal": (by(SDPBackend.CUDNN_ATTENTION, is_causal=True), (2, 4, 4, 200, 300)),
    "flash": (by(SDPBackend.FLASH_ATTENTION, is_causal=True), (2, 4, 4, 300, 300)),
    "flash, grouped": (by(SDPBackend.FLASH_ATTENTION, is_causal=True, enable_gqa=True), (2, 4, 2, 300, 300)),
    "efficient": (by(SDPBackend.EFFICIENT_ATTENTION, is_causal=True), (2, 4, 4, 300, 300)),
    "efficient, unequal": (by(SDPBackend.EFFICIENT_ATTENTION, is_causal=True), (2, 4, 4, 200, 300)),
    "flash, window": (flash_window, (2, 4, 4, 300, 300)),
    "flash, window, unequal": (flash_window, (2, 4, 4, 200, 300)),
    "flash, packed": (flash_packed, (2, 4, 4, 300, 300)),
    "lower right": (lower_right, (2, 4, 4, 200, 300)),
}
LAYOUTS = {"contiguous": cuda, "heads inside": heads_inside, "packed qkv": packed_qkv}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORWARDS)
def test_pytorchs_forwards_have_our_backward(kernels: Kernels, name: str, layout: str) -> None:
    forward, sizes = FORWARDS[name]
    if layout == "packed qkv" and (sizes[1] != sizes[2] or sizes[3] != sizes[4]):
        pytest.skip("packed tensors are of one shape")
    inputs = LAYOUTS[layout](*sizes)
    output = forward(*inputs)
    dout = torch.randn_like(output)
    plain = torch.autograd.grad(output, inputs, dout, retain_graph=True)
    with bwdtune.enabled():
        ours = torch.autograd.grad(output, inputs, dout)
    assert kernels.launches == 1, kernels.fallbacks
    assert_near(ours, plain)
    assert [tensor.stride() for tensor in ours] == [tensor.stride() for tensor in plain]


@pytest.mark.parametrize("way", WAYS_IN)
def test_every_way_in_runs_our_kernel(kernels: Kernels, way: str) -> None:
    plain = eager(*cuda(2, 2, 2, 300, 300))
    inputs = cuda(2, 2, 2, 300, 300)
    with bwdtune.enabled():
        found = WAYS_IN[way](*inputs)
    assert kernels.launches >= 1, kernels.fallbacks
    assert_near(found, plain)


OWN: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "cudnn": ({"is_causal": True}, (2, 4, 4, 300, 300)),
    "flash": ({"is_causal": True}, (2, 4, 2, 300, 300)),
    "efficient": ({"is_causal": True}, (2, 4, 2, 200, 300)),
    "flash_window": ({"window_left": 50, "window_right": 30}, (2, 4, 2, 200, 300)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("forward", OWN)
def test_our_differentiable_operator(kernels: Kernels, forward: str, compiled: bool) -> None:
    """With a kernel, and with PyTorch's backward of each forward."""
    options, sizes = OWN[forward]
    inputs = cuda(*sizes)

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        return ops.bwdtune.attention(*inputs, enable_gqa=True, forward=forward, **options)[0]

    torch._dynamo.reset()
    run = torch.compile(call, fullgraph=True) if compiled else call
    output = run(*inputs)
    dout = torch.randn_like(output)
    ours = torch.autograd.grad(output, inputs, dout, retain_graph=True)
    assert kernels.launches == 1, kernels.fallbacks
    kernels.none = "a test says so"
    kernels.native.forget()
    plain = torch.autograd.grad(output, inputs, dout)
    assert kernels.launches == 1
    assert_near(ours, plain)
    assert [tensor.stride() for tensor in ours] == [tensor.stride() for tensor in plain]


def test_our_packed_operator(kernels: Kernels) -> None:
    starts = torch.tensor([0, 100, 101, 300], dtype=torch.int32, device="cuda")
    q, k, v = (
        torch.randn(310, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    output, lse = ops.bwdtune.attention_varlen(q, k, v, starts, starts, 199, 199, True, None, True)
    assert lse.shape == (4, 310)
    dout = torch.randn_like(output)
    ours = torch.autograd.grad(output, (q, k, v), dout, retain_graph=True)
    assert kernels.launches == 1, kernels.fallbacks
    kernels.none = "a test says so"
    kernels.native.forget()
    plain = torch.autograd.grad(output, (q, k, v), dout)
    assert_near(tuple(tensor[:300] for tensor in ours), tuple(tensor[:300] for tensor in plain))
    assert not any(tensor[300:].any() for tensor in ours)


def test_dropout_is_pytorchs(kernels: Kernels) -> None:
    with bwdtune.enabled(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(*cuda(1, 2, 2, 64, 64), dropout_p=0.5).sum().backward()
    assert kernels.launches == 0
    assert kernels.fallbacks == {"dropout is asked for": 1}


def test_deterministic_algorithms(kernels: Kernels) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with bwdtune.enabled():
            first, second = (eager(*cuda(2, 2, 2, 300, 300)) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))
    assert [problem.deterministic for problem in kernels.asked] == [True]


@pytest.mark.parametrize("known", [False, True])
def test_cuda_graph(kernels: Kernels, known: bool) -> None:
    """Captured forward and backward, replayed with other inputs."""
    inputs = cuda(2, 2, 2, 300, 300)
    with bwdtune.enabled():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            eager(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        if not known:
            kernels.native.forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = eager(*inputs)
    assert kernels.launches == 2
    assert kernels.capturing == ([False] if known else [False, True])
    with torch.no_grad():
        for tensor in inputs:
            tensor.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert_near(captured, eager(*inputs))


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_compiled_into_cuda_graphs(kernels: Kernels, mode: str) -> None:
    inputs = cuda(2, 2, 2, 300, 300)
    plain = eager(*inputs)
    torch._dynamo.reset()
    compiled = torch.compile(loss, mode=mode, fullgraph=True)
    with bwdtune.enabled():
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            found = [tensor.clone() for tensor in torch.autograd.grad(compiled(*inputs), inputs)]
    assert kernels.launches >= 1, kernels.fallbacks
    assert_near(tuple(found), plain)


def test_another_stream(kernels: Kernels) -> None:
    """What is enqueued before on the same stream is done before: inputs are made on it, behind a long wait."""
    plain = eager(*cuda(2, 2, 2, 300, 300))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    sources = [tensor.detach() for tensor in cuda(2, 2, 2, 300, 300)]
    with bwdtune.enabled(), torch.cuda.stream(stream):
        inputs = [torch.full_like(tensor, float("nan")) for tensor in sources]
        torch.cuda._sleep(100_000_000)
        for tensor, source in zip(inputs, sources, strict=True):
            tensor.copy_(source)
            tensor.requires_grad_()
        found = eager(*inputs)
    torch.cuda.synchronize()
    assert kernels.launches == 1
    assert_near(found, plain)


def test_threads_with_streams_of_their_own(kernels: Kernels) -> None:
    plain = eager(*cuda(2, 2, 2, 300, 300))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    found = eager(*cuda(2, 2, 2, 300, 300))
                    torch.cuda.current_stream().synchronize()
                    assert_near(found, plain)
        except BaseException as error:
            failures.append(error)

    with bwdtune.enabled():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert kernels.launches == 40


def test_nothing_is_printed() -> None:
    program = "import torch, bwdtune\ntorch.cuda.init()\nbwdtune.enable()\nbwdtune.disable()\nbwdtune.enable()\n"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_varlen_attn(kernels: Kernels) -> None:
    """PyTorch's own function for packed sequences."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    starts = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    inputs = tuple(
        torch.randn(300, 4, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    try:
        output = varlen.varlen_attn(*inputs, starts, starts, 200, 200, is_causal=True)
    except TypeError:
        output = varlen.varlen_attn(*inputs, starts, starts, 200, 200, window_size=(-1, 0))
    dout = torch.randn_like(output)
    plain = torch.autograd.grad(output, inputs, dout, retain_graph=True)
    with bwdtune.enabled():
        ours = torch.autograd.grad(output, inputs, dout)
    assert kernels.launches == 1, kernels.fallbacks
    assert_near(ours, plain)


def test_tensors_that_are_distributed(kernels: Kernels) -> None:
    """DTensor, sharded by heads over a mesh of one GPU: its rules are those of PyTorch's operators."""
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("nccl", rank=0, world_size=1, store=distributed.HashStore())
    try:
        plain = cuda(2, 2, 2, 300, 300)
        expected = eager(*plain)
        mesh = init_device_mesh("cuda", (1,))
        inputs = [distribute_tensor(tensor.detach(), mesh, [Shard(1)]).requires_grad_() for tensor in plain]
        with bwdtune.enabled():
            found = eager(*inputs)
    finally:
        distributed.destroy_process_group()
    assert kernels.launches == 1, kernels.fallbacks
    assert_near(tuple(tensor.to_local() for tensor in found), expected)
