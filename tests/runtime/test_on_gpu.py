"""Kernels and dispatch on a GPU: the public bug reports that the CPU tests cannot stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

import bwdtune
from bwdtune.gen.build.jobs import build_one
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime import torch_attention
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import TORCH_DTYPES, Kernel, backward
from bwdtune.runtime.verification.verifier import Verifier

pytestmark = pytest.mark.gpu

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")


@functools.cache
def kernel(dtype: str = "bf16", head_dim: int = 64, causal: bool = True, preset: str = "v2") -> Kernel:
    problem = Problem(dtype, 1, 1, 1, 1, 1, head_dim, causal)
    variant = build_one(render(problem, PRESETS[preset]), current_device().arch)
    assert variant.library
    return Kernel.load(variant.library)


def tensors(
    problem: Problem, device: str = "cuda:0"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch_attention.Forward]:
    """q, k, v, dout and PyTorch's forward."""
    generator = torch.Generator(device).manual_seed(5)
    queries = (problem.batch, problem.heads_q, problem.seqlen_q, problem.head_dim)
    keys = (problem.batch, problem.heads_kv, problem.seqlen_kv, problem.head_dim)
    q, k, v, dout = (
        torch.randn(shape, generator=generator, device=device, dtype=TORCH_DTYPES[problem.dtype])
        for shape in (queries, keys, keys, queries)
    )
    return q, k, v, dout, torch_attention.forward(q, k, v, problem.causal, problem.softmax_scale)


def gradients(problem: Problem, device: str = "cuda:0") -> tuple[torch.Tensor, ...]:
    q, k, v, dout, forward = tensors(problem, device)
    found = kernel(problem.dtype, problem.head_dim, problem.causal)
    return backward(found, q, k, v, forward.output, dout, forward.lse, problem.softmax_scale)


def assert_near(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], bound: float = 0.01) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float() - theirs.float()).norm() <= bound * theirs.float().norm() + 1e-5


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    yield Verifier("cuda:0")
    torch.cuda.empty_cache()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "lengths",
    [(1, 1), (17, 17), (127, 127), (129, 129), (4250, 4250), (256, 3), (3, 256), (256, 512), (512, 256), (1, 2000)],
)
def test_lengths(verifier: Verifier, lengths: tuple[int, int], head_dim: int, causal: bool) -> None:
    """CASES A02 and A03."""
    problem = Problem("bf16", 2, 4, 2, *lengths, head_dim, causal)
    record = verifier.verify_at(problem, kernel("bf16", head_dim, causal))
    assert record.passed, record.reason


@pytest.mark.parametrize(
    "problem",
    [
        Problem("bf16", 70_000, 1, 1, 1, 1, 64, True),
        Problem("bf16", 1, 66_000, 66_000, 3, 5, 64, False),
        Problem.parse("16_64_16384_128", causal=True),
    ],
    ids=lambda problem: problem.label,
)
def test_sizes(verifier: Verifier, problem: Problem) -> None:
    """CASES A07: large batches and heads, and 2^31 elements."""
    torch.cuda.empty_cache()
    needed = 3 * (problem.read_bytes + problem.write_bytes)
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of free GPU memory")
    record = verifier.verify_at(problem, kernel("bf16", problem.head_dim, problem.causal))
    assert record.passed, record.reason


def test_a_gradient_with_a_huge_stride() -> None:
    """CASES A07: a small view whose offsets pass 2^31 elements."""
    problem, stride = Problem("bf16", 1, 1, 1, 4, 4, 64, True), 2**30
    if torch.cuda.mem_get_info()[0] < 2 * 4 * stride:
        pytest.skip("needs 8 GiB of free GPU memory")
    q, k, v, dout, forward = tensors(problem)
    wide = torch.empty(3 * stride + 64, dtype=torch.bfloat16, device="cuda").as_strided(q.shape, (64, 64, stride, 1))
    wide.copy_(dout)
    run = functools.partial(backward, kernel(), q, k, v, forward.output, lse=forward.lse, scale=problem.softmax_scale)
    assert_near(run(dout=wide), run(dout=dout), 1e-4)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "seqlen before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice of wider rows": lambda t: torch.cat([t, t], -1)[..., 64:],
    "a slice of a longer sequence": lambda t: torch.cat([t, t], 2)[:, :, : t.shape[2]],
    "not aligned": lambda t: torch.cat([t, t[..., :3]], -1)[..., :64],
    "last stride of two": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
}


@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, which: str) -> None:
    """CASES A01 and A09."""
    problem = Problem("bf16", 2, 4, 4, 200, 200, 64, True)
    q, k, v, dout, forward = tensors(problem)
    named = {"q": q, "k": k, "v": v, "dout": dout}
    changed = {name: LAYOUTS[layout](t) if which in (name, "all") else t for name, t in named.items()}
    run = functools.partial(backward, kernel(), o=forward.output, lse=forward.lse, scale=problem.softmax_scale)
    dq, dk, dv = run(**changed)
    plain_dq, plain_dk, plain_dv = run(**named)
    assert torch.equal(dk, plain_dk)
    assert torch.equal(dv, plain_dv)
    assert_near((dq,), (plain_dq,), 1e-3)


def test_repeats_are_bit_identical() -> None:
    """CASES A12: but for dq, to which blocks add in any order."""
    problem = Problem("bf16", 4, 8, 4, 2048, 128, 64, False)
    q, k, v, dout, forward = tensors(problem)
    run = functools.partial(
        backward, kernel(causal=False), q, k, v, forward.output, dout, forward.lse, problem.softmax_scale
    )
    dq, dk, dv = run()
    for _ in range(50):
        again = run()
        assert torch.equal(again[1], dk)
        assert torch.equal(again[2], dv)
        assert_near((again[0],), (dq,), 1e-3)


def test_any_stream() -> None:
    """The kernel waits for what its stream does, and for nothing else."""
    problem = Problem("bf16", 1, 2, 2, 300, 300, 64, True)
    expected = gradients(problem)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        q, k, v, dout, forward = tensors(problem)
        late = torch.empty_like(dout)
        torch.cuda._sleep(50_000_000)
        late.copy_(dout)
        found = backward(kernel(), q, k, v, forward.output, late, forward.lse, problem.softmax_scale)
    stream.synchronize()
    assert_near(found, expected, 1e-3)


def test_a_cuda_graph() -> None:
    problem = Problem("bf16", 1, 2, 2, 300, 300, 64, True)
    q, k, v, dout, forward = tensors(problem)
    run = functools.partial(backward, kernel(), q, k, v, forward.output, dout, forward.lse, problem.softmax_scale)
    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for gradient in found:
        gradient.fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert_near(found, expected, 1e-3)


@pytest.mark.parametrize("ready", [False, True])
def test_the_first_call_of_all_is_captured(
    ready: bool, store_winner: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES N14: what is ready is used, nothing else, and the replayed gradients are right."""
    monkeypatch.delenv("BWDTUNE_ON_MISS")
    problem = Problem("bf16", 2, 4, 4, 520, 520, 64, True)
    store_winner(problem, PRESETS["v2"], device=current_device())
    q, k, v, dout, _ = tensors(problem)
    inputs = tuple(tensor.requires_grad_() for tensor in (q, k, v))
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*inputs, is_causal=True), inputs, dout)
    if ready:
        assert bwdtune.warmup(problem).problems[0].choice.kernel
    bwdtune.stats(reset=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(bwdtune.attention(*inputs, is_causal=True), inputs, dout)
    for _ in range(2):
        for gradient in found:
            gradient.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_near(found, expected)
    counted = bwdtune.stats()
    assert sum(counted.launches.values()) == ready
    assert sum(counted.fallbacks.values()) == (not ready)


@needs_two_gpus
@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_the_second_gpu(order: tuple[int, int]) -> None:
    """CASES A05."""
    problem = Problem("bf16", 1, 2, 2, 300, 300, 64, True)
    with torch.cuda.device(0):
        found = {index: gradients(problem, f"cuda:{index}") for index in order}
        assert torch.cuda.current_device() == 0
    assert {gradient.device.index for gradient in found[1]} == {1}
    if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
        assert_near(tuple(gradient.to("cuda:0") for gradient in found[1]), found[0], 1e-3)


@needs_two_gpus
def test_tensors_on_two_gpus() -> None:
    q = torch.zeros(1, 1, 4, 64, device="cuda:0", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="q is on cuda:0, k on cuda:1"):
        bwdtune.attention(q, q.to("cuda:1"), q)


def leaves(problem: Problem, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [tensor.to(dtype or tensor.dtype).requires_grad_() for tensor in tensors(problem)[:3]]


@pytest.mark.parametrize("enable_gqa", [False, True])
@pytest.mark.parametrize("lengths", [(300, 300), (200, 300)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_attention(
    store_winner: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    dtype: str,
    causal: bool,
    lengths: tuple[int, int],
    enable_gqa: bool,
) -> None:
    problem = Problem(dtype, 2, 4, 2 if enable_gqa else 4, *lengths, 64, causal)
    store_winner(problem, device=current_device())
    inputs = leaves(problem)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output = bwdtune.attention(*inputs, is_causal=causal, enable_gqa=enable_gqa)
    reference = F.scaled_dot_product_attention(*exact, is_causal=causal, enable_gqa=enable_gqa)
    assert_near((output,), (reference,))
    dout = torch.randn_like(output)
    found = torch.autograd.grad(output, inputs, dout)
    assert_near(found, torch.autograd.grad(reference, exact, dout.double()))
    assert not [record for record in caplog.records if record.name == "bwdtune"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_under_autocast(store_winner: Callable[..., None], dtype: torch.dtype) -> None:
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    store_winner(Problem(name, 2, 4, 4, 128, 128, 64, False), device=current_device())
    model = torch.nn.MultiheadAttention(256, 4, batch_first=True, device="cuda")
    x = torch.randn(2, 128, 256, device="cuda", requires_grad=True)

    def gradient() -> torch.Tensor:
        with torch.autocast("cuda", dtype):
            output, _ = model(x, x, x, need_weights=False)
        return torch.autograd.grad(output.float().square().sum(), x)[0]

    plain = gradient()
    with bwdtune.enabled():
        ours = gradient()
    assert not torch.equal(ours, plain)
    assert_near((ours,), (plain,), 0.02)


@pytest.mark.parametrize("seqlen", [0, 5])
def test_empty_inputs(seqlen: int) -> None:
    q = torch.randn(2 if not seqlen else 0, 2, seqlen, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bwdtune.attention(q, q, q).sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


def test_pytorchs_backward_of_each_forward() -> None:
    """What gradients are measured against: flash and memory-efficient forwards, and cuDNN where it is there."""
    for lengths, causal in [((300, 300), True), ((200, 300), True), ((200, 300), False)]:
        problem = Problem("bf16", 2, 4, 2, *lengths, 64, causal)
        q, k, v, dout, forward = tensors(problem)
        exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
        reference = F.scaled_dot_product_attention(*exact, is_causal=causal, enable_gqa=True)
        scores = exact[0] @ exact[1].repeat_interleave(2, 1).mT * problem.softmax_scale
        if causal:
            scores = scores.masked_fill(torch.ones(lengths, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
        assert torch.allclose(forward.lse.double(), scores.logsumexp(-1), atol=1e-4)
        assert_near((forward.output,), (reference,))
        assert_near(forward.backward(dout), torch.autograd.grad(reference, exact, dout.double()))


def test_cudnn() -> None:
    problem = Problem("bf16", 2, 4, 4, 256, 256, 64, True)
    q, k, v, dout, flash = tensors(problem)
    try:
        cudnn = torch_attention.cudnn(q, k, v, problem.causal, problem.softmax_scale)
    except RuntimeError as error:
        pytest.skip(f"no cuDNN attention here: {error}")
    assert_near((cudnn.output,), (flash.output,))
    assert torch.allclose(cudnn.lse, flash.lse, atol=1e-2)
    assert_near(cudnn.backward(dout), flash.backward(dout), 0.02)
