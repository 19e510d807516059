"""Biases with their gradient, and ALiBi, on the CPU: by operator and Python, with stub kernels and without."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import efficient_on_cpu  # noqa: F401  # CUDA's memory-efficient attention, on the CPU
import pytest
import torch
import torch.nn.functional as F
from exact_attention import Tensors, assert_near, assert_right, exact
from operator_kernels import Kernels, leaves
from stub_kernels import stub_library
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from ways_to_gradients import WAYS

import bwdtune
from bwdtune.gen.build.jobs import build_one
from bwdtune.gen.device import HOST
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime import attention as attention_module
from bwdtune.runtime import dispatch, forwards, sdpa
from bwdtune.runtime.dispatch import Choice
from bwdtune.runtime.features import PLAIN, Features, Sequences
from bwdtune.runtime.forwards import linear_bias, operators
from bwdtune.runtime.kernel import Kernel
from bwdtune.runtime.operator.aten import CUDA_BACKWARDS

ops = torch.ops.bwdtune

KERNEL_OR_NONE = pytest.mark.parametrize("none", ["", "nothing is stored"], ids=["kernel", "PyTorch"])

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, bottom-right": {"is_causal": True, "alignment": "bottom-right"},
    "window": {"window_size": (5, 3)},
    "window that some see nothing in": {"window_size": (3, 0), "alignment": "bottom-right"},
    "capped": {"is_causal": True, "softcap": 2.0},
    "deterministic": {"deterministic": True},
}
CASES = [
    ("full", "1_H_S", torch.bfloat16),
    ("causal", "B_H_S", torch.float32),
    ("causal, bottom-right", "B_1_1", torch.bfloat16),
    ("window", "1_1_S", torch.float16),
    ("window that some see nothing in", "1_H_1", torch.float32),
    ("deterministic", "1_1_1", torch.bfloat16),
]


def bias_for(
    q: torch.Tensor, k: torch.Tensor, pattern: str = "1_H_S", dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    sizes = (1 if part == "1" else size for part, size in zip(pattern.split("_"), q.shape[:3], strict=True))
    generator = torch.Generator().manual_seed(len(pattern))
    return (2 * torch.randn(*sizes, k.shape[2], generator=generator)).to(dtype).requires_grad_()


def slopes(heads: int) -> torch.Tensor:
    return torch.exp2(-torch.arange(1, heads + 1) * 8 / heads)


@KERNEL_OR_NONE
@pytest.mark.parametrize(("mask", "pattern", "dtype"), CASES)
def test_gradients(ours: Kernels, mask: str, pattern: str, dtype: torch.dtype, none: str) -> None:
    ours.none = none

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> Any:
        return bwdtune.attention(q, k, v, enable_gqa=True, bias=bias, **MASKS[mask])

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> Tensors:
        return exact(q, k, v, bias=bias, **MASKS[mask])

    for sizes in ((2, 4, 2, 17, 40), (2, 4, 1, 33, 20)):
        q, k, v = leaves(*sizes, head_dim=32)
        assert_right(attention, reference, (q, k, v, bias_for(q, k, pattern, dtype)), False)
    assert [(problem.bias, problem.bias_dtype, problem.bias_grad) for problem in ours.asked] == [
        (pattern, {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype], True)
    ] * 2


@KERNEL_OR_NONE
@pytest.mark.parametrize("mask", ["full", "capped"])
def test_alibi(ours: Kernels, mask: str, none: str) -> None:
    ours.none = none
    given = slopes(4) if mask != "full" else torch.stack([slopes(4), slopes(4) * 0.3])
    options = {"alibi_slopes": given, **MASKS[mask]}
    attention = functools.partial(bwdtune.attention, enable_gqa=True, **options)
    for sizes in ((2, 4, 2, 17, 40), (2, 4, 1, 33, 20)):
        assert_right(attention, functools.partial(exact, **options), leaves(*sizes, head_dim=32), False)
    assert all(problem.alibi and not problem.bias for problem in ours.asked)
    assert len(ours.asked) == 2


@KERNEL_OR_NONE
def test_with_all_the_rest(ours: Kernels, none: str) -> None:
    """Sinks, a gradient of the log-sum-exp, a cap, a window and slopes beside a bias."""
    ours.none = none
    rest: dict[str, Any] = {"alibi_slopes": slopes(4), "window_size": (9, 2), "softcap": 3.0}

    def attention(*inputs: torch.Tensor) -> Any:
        q, k, v, sink, bias = inputs
        return bwdtune.attention(q, k, v, enable_gqa=True, return_lse=True, sink=sink, bias=bias, **rest)

    def reference(*inputs: torch.Tensor) -> Tensors:
        q, k, v, sink, bias = inputs
        return exact(q, k, v, sink, bias=bias, **rest)

    q, k, v = leaves(2, 4, 2, 17, 40, head_dim=32)
    sink = torch.linspace(-1, 4, 4).requires_grad_()
    assert_right(attention, reference, (q, k, v, sink, bias_for(q, k, "B_H_1")), True)


@KERNEL_OR_NONE
@pytest.mark.parametrize("each", [False, True], ids=["per head", "per sequence and head"])
@pytest.mark.parametrize("mask", ["full", "causal, bottom-right"])
def test_alibi_of_packed_sequences(ours: Kernels, mask: str, each: bool, none: str) -> None:
    ours.none = none
    starts, other_starts = (torch.tensor(s, dtype=torch.int32) for s in ([0, 9, 9, 29, 33], [0, 12, 17, 17, 40]))
    given = slopes(4) * (torch.linspace(0.5, 2, 4)[:, None] if each else 1.0)
    options = {"alignment": "top-left", **MASKS[mask]}
    q, k, v = (t.detach()[0].transpose(0, 1).contiguous().requires_grad_() for t in leaves(1, 4, 2, 33, 40))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        lengths = (starts, other_starts, 20, 23)
        return bwdtune.attention_varlen(q, k, v, *lengths, enable_gqa=True, alibi_slopes=given, **options)

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        pairs = zip(itertools.pairwise(starts.tolist()), itertools.pairwise(other_starts.tolist()), strict=True)
        results = [
            exact(
                *(t.transpose(0, 1)[None] for t in (q[slice(*rows)], k[slice(*keys)], v[slice(*keys)])),
                alibi_slopes=given[number] if each else given,
                **options,
            )[0]
            for number, (rows, keys) in enumerate(pairs)
        ]
        return (torch.cat(results, 2)[0].transpose(0, 1),)

    assert_right(attention, reference, (q, k, v), False)
    assert [(problem.alibi, problem.varlen) for problem in ours.asked] == [(True, True)]


def test_the_last_queries_alone_are_as_among_all(ours: Kernels) -> None:
    """Dao-AILab/flash-attention #907: in decoding with a cache, ALiBi was counted from another place."""
    ours.none = "nothing is stored"
    q, k, v = leaves(2, 4, 2, 30, 30, head_dim=32)
    options = {"alibi_slopes": slopes(4), "is_causal": True, "enable_gqa": True}
    whole = bwdtune.attention(q, k, v, **options)
    for count in (1, 5):
        last = bwdtune.attention(q[:, :, -count:], k, v, alignment="bottom-right", **options)
        assert_near(last, whole[:, :, -count:].double())


def test_slopes_are_trained_by_a_bias_that_is_made_of_them(ours: Kernels) -> None:
    """Dao-AILab/flash-attention #1977: they had no gradient, and nobody said so."""
    ours.none = "nothing is stored"
    q, k, v = (tensor.detach() for tensor in leaves(1, 4, 2, 30, 30, head_dim=32))
    given = slopes(4).requires_grad_()
    distances = (torch.arange(30)[:, None] - torch.arange(30)).abs()
    output = bwdtune.attention(q, k, v, enable_gqa=True, bias=-given[:, None, None] * distances)
    (found,) = torch.autograd.grad(output.float().square().sum(), given)
    wide = given.detach().double().requires_grad_()
    right = exact(q.double(), k.double(), v.double(), bias=-wide[:, None, None] * distances)[0].square().sum()
    assert_near(found, torch.autograd.grad(right, wide)[0])


# ---- shapes ----


@pytest.mark.parametrize(
    ("shape", "pattern"),
    [
        ((40,), "1_1_1"),
        ((17, 40), "1_1_S"),
        ((4, 17, 40), "1_H_S"),
        ((4, 1, 1), "1_H_1"),
        ((2, 1, 17, 1), "B_1_S"),
        ((), "1_1_1"),
    ],
)
def test_what_broadcasts_to_the_scores_is_a_bias(ours: Kernels, shape: tuple[int, ...], pattern: str) -> None:
    q, k, v = leaves(2, 4, 2, 17, 40, head_dim=32)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def attention(*inputs: torch.Tensor) -> Any:
        return bwdtune.attention(*inputs[:3], enable_gqa=True, bias=inputs[3], return_lse=True)

    def reference(*inputs: torch.Tensor) -> Tensors:
        return exact(*inputs[:3], bias=inputs[3])

    ours.none = "nothing is stored"
    assert_right(attention, reference, (q, k, v, bias), True)
    assert [problem.bias for problem in ours.asked] == [pattern]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda bias: bias.mT.contiguous().mT,
    "heads last, as an embedding gives it": lambda bias: bias.movedim(1, -1).contiguous().movedim(-1, 1),
    "a slice of wider rows": lambda bias: F.pad(bias, (3, 5))[..., 3:-5],
    "expanded": lambda bias: bias[:1].expand(bias.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(ours: Kernels, layout: str) -> None:
    q, k, v = leaves(2, 4, 2, 17, 40, head_dim=32)
    bias = LAYOUTS[layout](bias_for(q, k, "B_H_S", torch.float32).detach()).requires_grad_()

    def attention(*inputs: torch.Tensor) -> Any:
        return bwdtune.attention(*inputs[:3], is_causal=True, enable_gqa=True, bias=inputs[3])

    def reference(*inputs: torch.Tensor) -> Tensors:
        return exact(*inputs[:3], bias=inputs[3], is_causal=True)

    assert_right(attention, reference, (q, k, v, bias), False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bias": torch.zeros(9, 9, dtype=torch.bool)}, "bias is a boolean mask, which has PyTorch's attention"),
        ({"bias": torch.zeros(9, 9, dtype=torch.int32)}, r"bias is torch.int32 \(9, 9\): it must be floating"),
        ({"bias": torch.zeros(8, 9)}, r"broadcast to the scores, \(1, 4, 9, 9\)"),
        ({"bias": torch.zeros(2, 1, 9, 9)}, "broadcast to the scores"),
        ({"bias": torch.zeros(1, 1, 1, 9, 9)}, "broadcast to the scores"),
        ({"bias": torch.zeros(9, 9, device="meta")}, "bias on meta: they must be on one device"),
        ({"alibi_slopes": torch.zeros(3)}, r"a slope for each query head, \(4\) or \(1, 4\)"),
        ({"alibi_slopes": torch.zeros(2, 4)}, "a slope for each query head"),
        ({"alibi_slopes": torch.zeros(4, dtype=torch.int64)}, "alibi_slopes is torch.int64"),
        ({"alibi_slopes": torch.zeros(4, requires_grad=True)}, "requires a gradient, and has none: detach it"),
    ],
)
def test_what_makes_no_sense(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        bwdtune.attention(*leaves(1, 4, 4, 9, 9), **options)


# ---- values ----


@KERNEL_OR_NONE
@pytest.mark.parametrize("least", [-math.inf, torch.finfo(torch.bfloat16).min])
def test_a_bias_that_masks(ours: Kernels, least: float, none: str) -> None:
    """Single keys, all keys of a query, and with a causal mask all that a query would see of them."""
    ours.none = none
    q, k, v = leaves(1, 2, 2, 20, 20, head_dim=32)
    bias = bias_for(q, k, "B_1_S").detach()
    bias[..., 5:9, 3] = least
    bias[..., 7, :] = least
    bias[..., 12, :13] = least
    bias.requires_grad_()

    def attention(*inputs: torch.Tensor) -> Any:
        return bwdtune.attention(*inputs[:3], bias=inputs[3], is_causal=True, return_lse=True)

    def reference(*inputs: torch.Tensor) -> Tensors:
        return exact(*inputs[:3], bias=inputs[3], is_causal=True)

    assert_right(attention, reference, (q, k, v, bias), True)
    output, _ = attention(q, k, v, bias)
    dq, *_, dbias = torch.autograd.grad(output.float().square().sum(), (q, k, v, bias))
    for row in (7, 12):
        assert not output[:, :, row].any()
        assert not dq[:, :, row].any()
        assert not dbias[:, :, row].any()


@pytest.mark.parametrize("preset", ["v2", "t128", "w64"])
def test_the_kernels_of_each_family_with_a_bias_that_masks(monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    """As they are on the CPU: of a key, of all keys of a query, and by the least numbers of fp32 as well."""

    def host_kernel(problem: Problem, *_: Any, **__: Any) -> Choice:
        library = build_one(render(problem, PRESETS[preset]), HOST.arch).library
        assert library
        return Choice(Kernel.load(library), "a test's")

    monkeypatch.setattr(attention_module, "_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(operators, "ready", lambda: False)
    monkeypatch.setattr(dispatch, "choose", host_kernel)
    q, k, v = leaves(2, 2, 1, 40, 70)
    bias = bias_for(q, k, "1_H_S", torch.float32).detach()
    for row, least in ((7, -math.inf), (9, torch.finfo(torch.float32).min)):
        bias[..., row, :] = least
        bias[..., row + 10, 3:9] = least
        bias[:, 0, row + 20, : row + 21] = least  # all that a causal mask leaves
    options = {"is_causal": True, "alibi_slopes": slopes(2)}

    def attention(*inputs: torch.Tensor) -> Any:
        return bwdtune.attention(*inputs[:3], enable_gqa=True, bias=inputs[3], **options)

    def reference(*inputs: torch.Tensor) -> Tensors:
        return exact(*inputs[:3], bias=inputs[3], **options)

    assert_right(attention, reference, (q, k, v, bias.requires_grad_()), False)


def test_what_pytorch_computes_has_no_nan_where_all_is_masked() -> None:
    """As alone, without a kernel: PyTorch's own function."""
    inputs = leaves(1, 2, 2, 20, 20, head_dim=32)
    bias = torch.zeros(20, 20, dtype=torch.bfloat16).index_fill(0, torch.tensor([3]), -math.inf)
    output = bwdtune.attention(*inputs, bias=bias)
    assert not output[:, :, 3].any()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), inputs))


def test_a_mask_has_no_gradient_and_none_is_computed(ours: Kernels) -> None:
    ours.none = "nothing is stored"
    q, k, v = leaves(1, 2, 2, 9, 9)
    bias = bias_for(q, k).detach()
    bwdtune.attention(q, k, v, bias=bias).sum().backward()
    assert [(problem.bias, problem.bias_grad) for problem in ours.asked] == [("B_H_S", False)]
    assert bias.grad is None


def test_a_mask_that_was_expanded_is_what_it_was(ours: Kernels) -> None:
    ours.none = "nothing is stored"
    q, k, v = leaves(2, 2, 2, 9, 9)
    mask = torch.zeros(1, 1, 1, 9).expand(2, 2, 9, 9)
    bwdtune.attention(q, k, v, bias=mask).sum().backward()
    bwdtune.attention(q, k, v, bias=mask.clone().requires_grad_()).sum().backward()
    assert [problem.bias for problem in ours.asked] == ["1_1_1", "B_H_S"]


@KERNEL_OR_NONE
def test_only_the_bias_needs_a_gradient(ours: Kernels, none: str) -> None:
    """pytorch/pytorch #148476: the log-sum-exp was not saved, and the backward read a null pointer."""
    ours.none = none
    q, k, v = (tensor.detach() for tensor in leaves(1, 2, 2, 19, 19, head_dim=32))
    bias = bias_for(q, k)
    (found,) = torch.autograd.grad(bwdtune.attention(q, k, v, bias=bias).float().square().sum(), bias)
    wide = bias.detach().double().requires_grad_()
    right = exact(q.double(), k.double(), v.double(), bias=wide)[0].square().sum()
    assert_near(found, torch.autograd.grad(right, wide)[0])


def test_without_gradients_there_is_only_a_forward(ours: Kernels) -> None:
    q, k, v = leaves(1, 2, 2, 19, 30, head_dim=32)
    bias = bias_for(q, k)
    for options in ({}, {"is_causal": True}, {"alibi_slopes": slopes(2)}):
        with torch.no_grad():
            found = bwdtune.attention(q, k, v, bias=bias, **options)
            assert_near(found, exact(q.double(), k.double(), v.double(), bias=bias.double(), **options)[0])
        assert not found.requires_grad
    assert not ours.asked


def test_a_kernel_that_fails_is_pytorchs_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python launches it; to the operator it is as one that there is none of."""
    monkeypatch.setattr(attention_module, "_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(operators, "ready", lambda: False)
    kind = {"bias": "1_H_S", "bias_dtype": "bf16", "bias_grad": True, "alibi": True}
    broken = Kernel.load(stub_library(head_dim=32, fault="ERROR_CODE", **kind))  # type: ignore[arg-type]
    monkeypatch.setattr(dispatch, "choose", lambda *_, **__: Choice(broken, "a stub"))
    monkeypatch.setattr(dispatch, "discard", lambda *_: None)
    q, k, v = leaves(2, 2, 2, 19, 30, head_dim=32)

    def attention(*inputs: torch.Tensor) -> Any:
        return bwdtune.attention(*inputs[:3], bias=inputs[3], alibi_slopes=slopes(2))

    def reference(*inputs: torch.Tensor) -> Tensors:
        return exact(*inputs[:3], bias=inputs[3], alibi_slopes=slopes(2))

    assert_right(attention, reference, (q, k, v, bias_for(q, k)), False)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "softcap": 2.0, "alibi_slopes": slopes(2)}], ids=str)
def test_gradcheck(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 2, 5, 4), (2, 1, 4, 4), (2, 1, 4, 4), (1, 2, 1, 4))
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]

    def attention(*inputs: torch.Tensor) -> Any:
        return bwdtune.attention(*inputs[:3], enable_gqa=True, bias=inputs[3], return_lse=True, **options)

    assert torch.autograd.gradcheck(attention, inputs)


# ---- other ways to a gradient ----


def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    output = bwdtune.attention(q, k, v, is_causal=True, enable_gqa=True, bias=bias, alibi_slopes=slopes(4))
    return output.float().square().sum()


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_a_gradient(ours: Kernels, way: str) -> None:
    q, k, v = leaves(1, 4, 2, 20, 20, head_dim=32)
    inputs = (q, k, v, bias_for(q, k, "B_1_S"))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output, _ = exact(*wide[:3], bias=wide[3], alibi_slopes=slopes(4), is_causal=True)
    right = torch.autograd.grad(output.square().sum(), wide)
    for found, theirs in zip(WAYS[way](loss, *inputs), right, strict=True):
        assert_near(found, theirs)
    assert all((problem.bias, problem.alibi) == ("B_1_S", True) for problem in ours.asked)


def test_gradients_of_several_losses_at_once(ours: Kernels) -> None:
    q, k, v = leaves(2, 4, 2, 20, 20, head_dim=32)
    inputs = (q, k, v, bias_for(q, k, "B_1_S"))
    output = bwdtune.attention(q, k, v, is_causal=True, enable_gqa=True, bias=inputs[3], alibi_slopes=slopes(4))
    upstream = torch.randn(3, *output.shape).bfloat16()

    def gradient(upstream: torch.Tensor) -> Tensors:
        return torch.autograd.grad(output, inputs, upstream, retain_graph=True)

    batched = torch.func.vmap(gradient)(upstream)
    for i in range(3):
        assert all(torch.equal(several[i], one) for several, one in zip(batched, gradient(upstream[i]), strict=True))


def test_a_gradient_of_the_gradient_is_refused(ours: Kernels) -> None:
    q, k, v = leaves(1, 4, 2, 20, 20, head_dim=32)
    inputs = (q, k, v, bias_for(q, k, "B_1_S"))
    for gradient in torch.autograd.grad(loss(*inputs), inputs, create_graph=True):
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            gradient.square().sum().backward(retain_graph=True)


def test_opcheck(kernels: Kernels) -> None:
    kernels.none = "nothing is stored"
    q, k, v = leaves(1, 4, 2, 20, 20)
    bias = bias_for(q, k, "1_H_1")
    opcheck(ops.attention.default, (q, k, v, True, None, True), {"forward": "efficient", "bias": bias})
    q, k, v, bias = (tensor.detach() for tensor in (q, k, v, bias))
    output, lse = ops.attention(q, k, v, True, None, True, forward="math", bias=bias, alibi_slopes=slopes(4))
    mask = (True, 0.125, -1, -1, False, 0.0, None, "math")
    saved = (torch.randn_like(output), q, k, v, output, lse, None, None)
    utils = ("test_schema", "test_faketensor")
    opcheck(ops.backward.default, (*saved, *mask, None, None, bias, slopes(4), True), test_utils=utils)


# ---- PyTorch's memory-efficient attention ----


@pytest.mark.parametrize(
    ("mask", "pattern", "keys", "none"),
    [
        ("full", "B_1_1", 43, "nothing is stored"),
        ("causal", "1_H_S", 40, "nothing is stored"),
        ("causal", "1_H_S", 43, ""),
        ("causal, bottom-right", "B_1_1", 43, "nothing is stored"),
        ("window that some see nothing in", "1_H_S", 40, "nothing is stored"),
    ],
)
def test_the_memory_efficient_forward(
    ours: Kernels, monkeypatch: pytest.MonkeyPatch, mask: str, pattern: str, keys: int, none: str
) -> None:
    """A bias in its rows' alignment, with the masks that it has not; and what it leaves undone in the gradient.

    facebookresearch/xformers #813: rows of 43 keys were refused.
    """
    ours.none = none
    monkeypatch.setattr(forwards, "by_mask", lambda *_: forwards.EFFICIENT)

    def attention(*inputs: torch.Tensor) -> Any:
        options = {"enable_gqa": True, "return_lse": True, **MASKS[mask]}
        return bwdtune.attention(*inputs[:3], bias=inputs[3], **options)

    def reference(*inputs: torch.Tensor) -> Tensors:
        return exact(*inputs[:3], bias=inputs[3], **MASKS[mask])

    q, k, v = leaves(2, 4, 2, 17, keys, head_dim=32)
    bias = bias_for(q, k, pattern)
    if bias.shape[2] > 1:
        bias.data[:, 0, 5] = bias.data[:, 1, 6, :7] = -math.inf
    else:
        bias.data[..., : keys // 2] = -math.inf
    assert_right(attention, reference, (q, k, v, bias), True)


def choice(
    features: Features = PLAIN,
    dtype: torch.dtype | None = torch.bfloat16,
    *,
    batch: int = 2,
    keys: int = 128,
    head_dim: int = 64,
    causal: bool = True,
    scale: float = 0.125,
) -> str:
    """Of the forward on a GPU."""
    with FakeTensorMode():
        q = torch.empty(batch, 4, 128, head_dim, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(batch, 4, keys, head_dim, dtype=torch.bfloat16, device="cuda")
        return forwards.choose(q, k, k, causal, scale, features, enable_gqa=False, kernel=True, bias_dtype=dtype)


def test_the_forward_of_a_bias_is_the_memory_efficient_one() -> None:
    assert choice() == forwards.EFFICIENT
    assert choice(Features((5, 0), True)) == forwards.EFFICIENT
    assert choice(Features(softcap=3.0)) == forwards.MATH
    assert choice(dtype=torch.float32) == forwards.MATH
    assert choice(batch=70_000) == forwards.MATH


def test_the_forward_of_slopes_is_the_masks_with_more_columns() -> None:
    """As far as no key past the diagonal is seen."""
    given = slopes(4)
    assert choice(Features(alibi_slopes=given), None) == forwards.ALIBI
    assert choice(Features((5, -1), alibi_slopes=given), None) == forwards.ALIBI
    assert choice(Features((5, -1), True, alibi_slopes=given), None) == forwards.ALIBI
    assert choice(Features((5, -1), alibi_slopes=given), None, keys=140) == forwards.MATH
    assert choice(Features(alibi_slopes=given), None, causal=False) == forwards.MATH
    assert choice(Features((5, 3), alibi_slopes=given), None, causal=False) == forwards.MATH
    assert choice(Features(softcap=3.0, alibi_slopes=given), None) == forwards.MATH
    assert choice(Features(alibi_slopes=given)) == forwards.MATH, "a bias, too"
    assert choice(Features(alibi_slopes=given), None, head_dim=256) == forwards.MATH
    assert choice(Features(alibi_slopes=given), None, scale=1e-3) == forwards.MATH


@KERNEL_OR_NONE
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float16, 0.002)])
def test_slopes_as_columns_are_as_exact_as_the_inputs(
    ours: Kernels, dtype: torch.dtype, tolerance: float, none: str
) -> None:
    """At a length whose places are no 16-bit numbers, with sinks and a gradient of the log-sum-exp."""
    ours.none = none
    q, k, v = (tensor.detach().requires_grad_() for tensor in leaves(2, 2, 1, 600, 600, dtype=dtype))
    inputs = (q, k, v, torch.tensor([0.5, 1.0]).requires_grad_())
    options: dict[str, Any] = {"is_causal": True, "alibi_slopes": torch.tensor([0.7, 0.003])}
    results = bwdtune.attention(*inputs[:3], enable_gqa=True, sink=inputs[3], return_lse=True, **options)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    right = exact(*wide, **options)
    generator = torch.Generator().manual_seed(5)
    upstream = [torch.randn(result.shape, generator=generator).to(result.dtype) for result in results]
    found = torch.autograd.grad(results, inputs, upstream)
    expected = torch.autograd.grad(right, wide, [one.double() for one in upstream])
    for ours_, theirs in zip((*results, *found), (*right, *expected), strict=True):
        assert (ours_.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(3, 70_000, 1), (40, 90, 2), (300, 300, 1)], ids=str)
def test_columns_of_slopes(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Their products with the row's term, at head_dim 64's scale; of long sequences, and of a batch's own slopes."""
    rows, keys, batch = sizes
    given = slopes(4)[None] * torch.linspace(1, 0.4, batch)[:, None]
    q, k = torch.zeros(batch, 4, rows, 64, dtype=dtype), torch.zeros(batch, 1, keys, 64, dtype=dtype)
    wide_q, wide_k, terms = linear_bias.extended(q, k, 0.125, Features(alibi_slopes=given))
    assert wide_q.shape[3] == wide_k.shape[3] == 64 + linear_bias.COLUMNS
    assert wide_q.dtype == wide_k.dtype == dtype
    found = wide_q.double() @ wide_k.double().mT * 0.125 + terms.double()[..., None]
    distances = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    right = -given.double()[..., None, None] * distances
    seen = (distances >= 0) & (right > -30)  # what counts in a softmax
    assert ((found - right) * seen).abs().max() < 1e-3


def test_columns_of_slopes_of_packed_sequences() -> None:
    starts, other_starts = (torch.tensor(s, dtype=torch.int32) for s in ([0, 9, 9, 29, 33], [0, 12, 17, 37, 41]))
    given = slopes(4) * torch.linspace(0.5, 2, 4)[:, None]
    features = Features(sequences=Sequences(starts, other_starts, 20, 20), alibi_slopes=given)
    q, k = torch.zeros(1, 4, 35, 8, dtype=torch.bfloat16), torch.zeros(1, 2, 41, 8, dtype=torch.bfloat16)
    wide_q, wide_k, terms = linear_bias.extended(q, k, 0.3, features)
    found = (wide_q.double() @ wide_k.double().repeat_interleave(2, 1).mT * 0.3 + terms.double()[..., None])[0]
    for number, (rows, keys) in enumerate(features.sequences.slices() if features.sequences else ()):
        lengths = rows.stop - rows.start, keys.stop - keys.start
        distances = torch.arange(lengths[0])[:, None] + lengths[1] - lengths[0] - torch.arange(lengths[1])
        right = -given[number, :, None, None] * distances
        assert torch.allclose(found[:, rows, keys], right.double(), atol=1e-3)


# ---- under PyTorch's function ----


@pytest.fixture
def enabled(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """PyTorch's memory-efficient attention has our backward."""
    monkeypatch.setattr(sdpa, "ATEN_BACKWARDS", [(CUDA_BACKWARDS[2], "CPU")])
    with bwdtune.enabled():
        yield kernels


def efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, causal: bool) -> torch.Tensor:
    """As `F.scaled_dot_product_attention` calls it: a bias is padded and expanded there."""
    keys = bias.shape[-1]
    padded = F.pad(bias, (0, -keys % 16))[..., :keys] if keys % 16 else bias
    expanded = padded.expand(*q.shape[:3], keys)
    output, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, expanded, True, 0.0, causal)
    return output


@pytest.mark.parametrize(("keys", "causal", "wanted"), [(48, True, True), (43, True, True), (43, False, False)])
def test_enable_takes_a_bias(enabled: Kernels, keys: int, causal: bool, wanted: bool) -> None:
    q, k, v = leaves(2, 2, 2, 17, keys)
    bias = bias_for(q, k)
    inputs = (q, k, v, bias) if wanted else (q, k, v)
    found = torch.autograd.grad(efficient(q, k, v, bias if wanted else bias.detach(), causal).sum(), inputs)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, bias)]
    right = torch.autograd.grad(exact(*wide[:3], bias=wide[3], is_causal=causal)[0].sum(), wide[: len(inputs)])
    for ours, theirs in zip(found, right, strict=True):
        assert_near(ours, theirs)
    # A gradient is that of the expanded bias, which PyTorch sums; without one the kernel reads what there is.
    pattern = "B_H_S" if wanted else "1_H_S"
    assert [(problem.bias, problem.bias_grad) for problem in enabled.asked] == [(pattern, wanted)]
    assert enabled.launches == 1


def test_enable_keeps_the_strides_that_compiled_code_expects(enabled: Kernels) -> None:
    torch._dynamo.reset()
    q, k, v = leaves(2, 2, 2, 17, 43)
    inputs = (q, k, v, bias_for(q, k))
    found = [
        torch.autograd.grad(run(*inputs, True).sum(), inputs)
        for run in (efficient, torch.compile(efficient, backend="aot_eager", fullgraph=True))
    ]
    assert all(map(torch.equal, *found))
    assert enabled.launches == 2


# ---- dispatch ----


def test_explain_knows_the_problem(ours: Kernels) -> None:
    q, k, v = leaves(1, 2, 2, 9, 9)
    problem = attention_module.problem_of(q, k, v, bias=bias_for(q, k)[0, :1].float(), alibi_slopes=slopes(2))
    assert problem == Problem("bf16", 1, 2, 2, 9, 9, 64, alibi=True, bias="B_1_S", bias_dtype="fp32", bias_grad=True)


def test_the_operator_asks_for_the_same_problem(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_module, "_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(operators, "ready", lambda: True)
    for dtype, pattern in itertools.product((torch.bfloat16, torch.float16, torch.float32), ("B_1_S", "1_H_1")):
        q, k, v = leaves(2, 2, 2, 9, 9)
        kernels.none = "nothing is stored"
        bwdtune.attention(q, k, v, bias=(bias := bias_for(q, k, pattern, dtype))).sum().backward()
        assert kernels.asked[-1] == attention_module.problem_of(q, k, v, bias=bias)
