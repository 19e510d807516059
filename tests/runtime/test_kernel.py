"""The ctypes side of a kernel: layouts, devices, empty inputs, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from stub_kernels import stub_library

from bwdtune.runtime.kernel import Kernel, KernelError, backward, is_addressable

HEAD_DIM = 64


def kernel(dtype: str = "bf16", causal: bool = False) -> Kernel:
    return Kernel.load(stub_library(dtype=dtype, head_dim=HEAD_DIM, causal=causal))


def tensors(
    batch: int, heads_q: int, heads_kv: int, seqlen_q: int, seqlen_kv: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    queries, keys = (batch, heads_q, seqlen_q, HEAD_DIM), (batch, heads_kv, seqlen_kv, HEAD_DIM)
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in (queries, keys, keys, queries))
    return q, k, v, dout


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, in double precision rounded once."""
    group = q.shape[1] // k.shape[1]
    scores = q.double() @ k.double().repeat_interleave(group, 1).mT * HEAD_DIM**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    output = scores.softmax(-1) @ v.double().repeat_interleave(group, 1)
    return output.to(q.dtype), scores.logsumexp(-1).float()


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, ...]:
    inputs = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    output = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
    return torch.autograd.grad(output, inputs, dout.double())


def assert_close(gradients: tuple[torch.Tensor, ...], references: tuple[torch.Tensor, ...]) -> None:
    for gradient, reference in zip(gradients, references, strict=True):
        assert (gradient.double() - reference).norm() <= 4e-3 * reference.norm() + 1e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("sizes", [(2, 2, 2, 33, 33), (1, 4, 2, 17, 40), (2, 3, 1, 40, 17), (1, 1, 1, 1, 5)])
def test_gradients_of_any_sizes(sizes: tuple[int, int, int, int, int], dtype: str, causal: bool) -> None:
    q, k, v, dout = tensors(*sizes, dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    o, lse = forward(q, k, v, causal)
    gradients = backward(kernel(dtype, causal), q, k, v, o, dout, lse, HEAD_DIM**-0.5)
    assert_close(gradients, expected(q, k, v, dout, causal))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "packed": lambda t: t,
    "seqlen before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice of wider rows": lambda t: torch.cat([t, t], -1)[..., HEAD_DIM:],
    "rows that are not aligned": lambda t: torch.cat([t, t[..., :3]], -1)[..., :HEAD_DIM],
    "base that is not aligned": lambda t: torch.cat([t[..., :3], t, t[..., :5]], -1)[..., 3 : 3 + HEAD_DIM],
    "last stride of two": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "last dimension outermost": lambda t: t.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "a slice of a longer sequence": lambda t: torch.cat([t, t], 2)[:, :, : t.shape[2]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "k", "v", "o", "dout", "all"])
def test_layouts_change_nothing(layout: str, which: str) -> None:
    named = dict(zip(("q", "k", "v", "dout"), tensors(2, 2, 2, 9, 12), strict=True))
    named["o"], lse = forward(named["q"], named["k"], named["v"], False)
    order = ("q", "k", "v", "o", "dout")
    plain = backward(kernel(), *(named[name] for name in order), lse, 0.125)
    changed = {name: LAYOUTS[layout](t) if which in (name, "all") else t for name, t in named.items()}
    assert all(torch.equal(changed[name], named[name]) for name in named)
    gradients = backward(kernel(), *(changed[name] for name in order), lse, 0.125)
    for gradient, reference, name in zip(gradients, plain, ("q", "k", "v"), strict=True):
        assert torch.equal(gradient, reference)
        if is_addressable(torch.empty_like(changed[name])):
            assert gradient.stride() == torch.empty_like(changed[name]).stride()


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 1, 1), (2, 3, 1, 1), (1, 1, 9, 1), (2, 3, 9, HEAD_DIM)])
def test_an_expanded_gradient(shape: tuple[int, ...]) -> None:
    q, k, v, _ = tensors(2, 3, 3, 9, 9)
    o, lse = forward(q, k, v, False)
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16().expand(q.shape)
    gradients = backward(kernel(), q, k, v, o, dout, lse, 0.125)
    references = backward(kernel(), q, k, v, o, dout.contiguous(), lse, 0.125)
    assert all(torch.equal(*pair) for pair in zip(gradients, references, strict=True))


def test_packed_qkv_views() -> None:
    packed = torch.randn(2, 9, 3, 4, HEAD_DIM, generator=torch.Generator().manual_seed(3)).bfloat16()
    q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
    o, lse = forward(q, k, v, True)
    gradients = backward(kernel(causal=True), q, k, v, o, q, lse, 0.125)
    assert_close(gradients, expected(q, k, v, q, True))


def test_strides_of_size_one_dimensions_do_not_matter() -> None:
    q, k, v, dout = tensors(1, 1, 1, 5, 5)
    o, lse = forward(q, k, v, False)
    odd = q.as_strided(q.shape, (3, 0, HEAD_DIM, 1))
    assert is_addressable(odd)
    gradients = backward(kernel(), odd, k, v, o, dout, lse, 0.125)
    assert_close(gradients, expected(q, k, v, dout, False))


@pytest.mark.parametrize("sizes", [(0, 2, 2, 5, 5), (1, 0, 1, 5, 5), (1, 2, 2, 0, 5), (1, 2, 2, 5, 0), (1, 2, 2, 0, 0)])
def test_empty_inputs_give_empty_or_zero_gradients(sizes: tuple[int, int, int, int, int]) -> None:
    q, k, v, dout = tensors(*sizes)
    gradients = backward(kernel(), q, k, v, torch.zeros_like(q), dout, torch.zeros(q.shape[:3]), 0.125)
    for gradient, tensor in zip(gradients, (q, k, v), strict=True):
        assert gradient.shape == tensor.shape
        assert not gradient.any()


def test_info() -> None:
    info = kernel("fp16", True).info
    assert (info.dtype, info.head_dim, info.mask, info.config) == ("fp16", HEAD_DIM, "causal", "stub")


def test_workspace_bytes() -> None:
    assert kernel().workspace_bytes(2, 4, 2, 10, 99) == 2 * 4 * 10 * (HEAD_DIM + 2) * 4
    with pytest.raises(KernelError, match="too large"):
        kernel().workspace_bytes(1, 1, 1, 2**21, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"q": t["q"].half()}, "q is torch.float16"),
        (lambda t: {"dout": t["dout"][..., :32]}, "dout has shape"),
        (lambda t: {"k": t["k"][..., :32]}, "does not go with"),
        (lambda t: {"k": t["k"].repeat(1, 2, 1, 1)}, "does not go with"),
        (lambda t: {"v": t["v"][:, :, :3]}, "v has shape"),
        (lambda t: {"lse": t["lse"].double()}, "lse must be float32"),
        (lambda t: {"q": t["q"][0]}, "q has 3"),
        (lambda t: {"v": t["v"].to("meta")}, "v is on meta"),
        (lambda t: {"dk": torch.empty(2, 2, 5, HEAD_DIM * 2).bfloat16()[..., ::2]}, "dk has strides"),
        (lambda t: {"workspace": torch.empty(8, dtype=torch.uint8)}, "workspace must hold"),
    ],
)
def test_what_a_kernel_does_not_take(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], message: str
) -> None:
    q, k, v, dout = tensors(2, 2, 2, 5, 5)
    o, lse = forward(q, k, v, False)
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "o": o,
        "dout": dout,
        "lse": lse,
        "dq": q.clone(),
        "dk": k.clone(),
        "dv": v.clone(),
    }
    with pytest.raises(KernelError, match=message):
        kernel().launch(**{**arguments, **change(arguments)}, scale=1.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_must_be_positive(scale: float) -> None:
    q = torch.zeros(1, 1, 4, HEAD_DIM).bfloat16()
    with pytest.raises(KernelError, match=f"scale is {scale}"):
        backward(kernel(), q, q, q, q, q, torch.zeros(1, 1, 4), scale)


def test_head_dim_of_another_kernel() -> None:
    q = torch.zeros(1, 1, 4, 32).bfloat16()
    with pytest.raises(KernelError, match="head_dim is 32"):
        backward(kernel(), q, q, q, q, q, torch.zeros(1, 1, 4), 1.0)


def test_a_failed_launch_says_so() -> None:
    q, k, v, dout = tensors(1, 1, 1, 5, 5)
    failing = Kernel.load(stub_library(head_dim=HEAD_DIM, fault="ERROR_CODE"))
    with pytest.raises(KernelError, match="stub: unspecified launch failure"):
        backward(failing, q, k, v, q, dout, torch.zeros(1, 1, 5), 1.0)


def test_what_is_not_a_kernel(tmp_path: Path) -> None:
    missing, text = tmp_path / "missing.so", tmp_path / "text.so"
    text.write_text("not a library")
    for path in (missing, text):
        with pytest.raises(KernelError, match=f"cannot load the kernel {path}"):
            Kernel.load(path)
    with pytest.raises(KernelError, match="version 7 of the kernel interface"):
        Kernel.load(stub_library(head_dim=HEAD_DIM, abi_version=7))
