"""The log-sum-exp as a second output, and sinks, on the CPU: by operator and Python, with stub kernels and without."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch
from exact_attention import assert_near, assert_right, exact
from operator_kernels import Kernels, leaves
from torch.library import opcheck
from ways_to_gradients import WAYS

import bwdtune
from bwdtune.gen.problem import Problem
from bwdtune.runtime import attention as attention_module
from bwdtune.runtime.forwards import operators
from bwdtune.runtime.kernel import KernelError, backward

ops = torch.ops.bwdtune
Tensors = tuple[torch.Tensor, ...]

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, bottom-right": {"is_causal": True, "alignment": "bottom-right"},
    "window": {"window_size": (5, 3)},
    "causal window": {"window_size": (5, -1), "is_causal": True},
    "window that some see nothing in": {"window_size": (3, 0), "alignment": "bottom-right"},
    "capped": {"is_causal": True, "softcap": 2.0},
    "deterministic": {"is_causal": True, "deterministic": True},
}
BOTH = (True, True)
CASES = [*((mask, *BOTH) for mask in MASKS), ("causal", True, False), ("window that some see nothing in", False, True)]
cases = pytest.mark.parametrize(("mask", "return_lse", "with_sink"), CASES)
"""Of each mask both, and each alone."""


def sinks(heads: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 4, heads).to(dtype).requires_grad_()


@cases
@pytest.mark.parametrize("none", ["", "nothing is stored"], ids=["kernel", "PyTorch"])
def test_gradients(ours: Kernels, mask: str, return_lse: bool, with_sink: bool, none: str) -> None:
    ours.none = none
    options = {"enable_gqa": True, "return_lse": return_lse, **MASKS[mask]}
    reference = functools.partial(exact, **MASKS[mask])

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None = None) -> Any:
        return bwdtune.attention(q, k, v, sink=sink, **options)

    for sizes in ((2, 4, 2, 17, 40), (1, 4, 1, 33, 20)):
        inputs: Tensors = leaves(*sizes, head_dim=32)
        assert_right(attention, reference, (*inputs, sinks(4)) if with_sink else inputs, return_lse)
    assert [(problem.lse_grad, problem.sink) for problem in ours.asked] == [(return_lse, with_sink)] * 2


STARTS, OTHER_STARTS = (torch.tensor(starts, dtype=torch.int32) for starts in ([0, 9, 9, 29, 33], [0, 12, 17, 17, 40]))
"""One sequence has no queries, one no keys."""


@cases
@pytest.mark.parametrize("none", ["", "nothing is stored"], ids=["kernel", "PyTorch"])
def test_packed_sequences(ours: Kernels, mask: str, return_lse: bool, with_sink: bool, none: str) -> None:
    ours.none = none
    options = {"alignment": "top-left", **MASKS[mask]}
    inputs: Tensors = tuple(
        tensor.detach()[0].transpose(0, 1).contiguous().requires_grad_() for tensor in leaves(1, 4, 2, 33, 40)
    )
    if with_sink:
        inputs = (*inputs, sinks(4, torch.bfloat16))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None = None) -> Any:
        lengths = (STARTS, OTHER_STARTS, 20, 23)
        return bwdtune.attention_varlen(q, k, v, *lengths, enable_gqa=True, sink=sink, return_lse=return_lse, **options)

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None = None) -> Tensors:
        pairs = zip(itertools.pairwise(STARTS.tolist()), itertools.pairwise(OTHER_STARTS.tolist()), strict=True)
        results = [
            exact(
                *(t.transpose(0, 1)[None] for t in (q[slice(*rows)], k[slice(*keys)], v[slice(*keys)])), sink, **options
            )
            for rows, keys in pairs
        ]
        outputs, lses = zip(*results, strict=True)
        return torch.cat(outputs, 2)[0].transpose(0, 1), torch.cat(lses, 2)[0]

    assert_right(attention, reference, inputs, return_lse)


# ---- one part of the keys after another ----


def merged(*parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """As ring attention merges what it has for parts of the keys."""
    outputs, lses = zip(*parts, strict=True)
    lse = functools.reduce(torch.logaddexp, lses)
    output = sum(out.float() * torch.exp(part - lse)[..., None] for out, part in zip(outputs, lses, strict=True))
    return output.to(outputs[0].dtype), lse


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("none", ["", "nothing is stored"], ids=["kernel", "PyTorch"])
def test_halves_that_are_merged_have_the_gradients_of_the_whole(ours: Kernels, none: str, with_sink: bool) -> None:
    ours.none = none
    inputs: Tensors = leaves(2, 4, 2, 30, 40, head_dim=32)
    if with_sink:
        inputs = (*inputs, sinks(4))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None = None) -> Any:
        call = functools.partial(bwdtune.attention, q, enable_gqa=True, return_lse=True)
        return merged(call(k[:, :, :23], v[:, :, :23], sink=sink), call(k[:, :, 23:], v[:, :, 23:]))

    assert_right(attention, exact, inputs, True)


def test_keys_that_are_seen_by_none_change_nothing(ours: Kernels) -> None:
    """Of a causal mask's later keys, whose log-sum-exp is minus infinity."""
    inputs: Tensors = leaves(1, 2, 2, 20, 20, head_dim=32)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        early = bwdtune.attention(q, k[:, :, :12], v[:, :, :12], is_causal=True, return_lse=True)
        # The last keys from the last queries' point of view: bottom-right.
        late = bwdtune.attention(
            q, k[:, :, 12:], v[:, :, 12:], is_causal=True, alignment="bottom-right", return_lse=True
        )
        return merged(early, late)

    assert_right(attention, functools.partial(exact, is_causal=True), inputs, True)


def test_a_merged_log_sum_exp_is_taken_as_it_is(kernels: Kernels) -> None:
    """Ring attention's backward: each part of the keys with the output and the log-sum-exp of all of them."""
    q, k, v = (tensor.detach() for tensor in leaves(2, 4, 2, 30, 40, head_dim=32))
    output, lse = ops.attention(q, k, v, enable_gqa=True, forward="math")
    dout = torch.randn_like(output)
    rest = (None, None, False, 32**-0.5, -1, -1, False, 0.0, None, "math", *[None] * 4, False)
    whole = ops.backward(dout, q, k, v, output, lse, *rest)
    halves = [
        ops.backward(dout, q, k[:, :, part], v[:, :, part], output, lse, *rest) for part in (slice(23), slice(23, 40))
    ]
    assert_near(halves[0][0].float() + halves[1][0], whole[0].double())
    for gradient in (1, 2):
        assert torch.equal(torch.cat([half[gradient] for half in halves], 2), whole[gradient])
    assert kernels.launches == 3


# ---- which gradients flow ----


def test_a_log_sum_exp_that_nothing_depends_on_costs_nothing(ours: Kernels) -> None:
    """The operator has a plain problem's kernel."""
    output, lse = bwdtune.attention(*leaves(1, 2, 2, 9, 9), return_lse=True)
    assert lse.requires_grad
    output.sum().backward()
    by_operator = operators.ready()
    assert [problem.lse_grad for problem in ours.asked] == [not by_operator]


@pytest.mark.parametrize("none", ["", "nothing is stored"], ids=["kernel", "PyTorch"])
def test_the_gradient_of_the_log_sum_exp_alone(ours: Kernels, none: str) -> None:
    ours.none = none
    q, k, v = leaves(1, 2, 2, 19, 30, head_dim=32)
    _, lse = bwdtune.attention(q, k, v, return_lse=True)
    found = torch.autograd.grad(lse.square().sum(), (q, k, v))
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    right = torch.autograd.grad(exact(*wide)[1].square().sum(), wide[:2])
    assert_near(found[0], right[0])
    assert_near(found[1], right[1])
    assert not found[2].any()


def test_only_sinks_need_a_gradient(ours: Kernels) -> None:
    q, k, v = (tensor.detach() for tensor in leaves(1, 2, 2, 19, 19, head_dim=32))
    sink = sinks(2)
    output = bwdtune.attention(q, k, v, sink=sink)
    (found,) = torch.autograd.grad(output.float().square().sum(), sink)
    wide = sink.detach().double().requires_grad_()
    output_exact, _ = exact(q.double(), k.double(), v.double(), wide)
    assert_near(found, torch.autograd.grad(output_exact.square().sum(), wide)[0])


def test_without_gradients_there_is_only_a_forward(ours: Kernels) -> None:
    q, k, v = leaves(1, 2, 2, 19, 30, head_dim=32)
    sink = sinks(2)
    with torch.no_grad():
        found = bwdtune.attention(q, k, v, sink=sink, return_lse=True, window_size=(3, 2))
        right = exact(q.double(), k.double(), v.double(), sink.double(), window_size=(3, 2))
    for ours_, theirs in zip(found, right, strict=True):
        assert not ours_.requires_grad
        assert_near(ours_, theirs)
    assert not ours.asked


@pytest.mark.parametrize("value", [-math.inf, -1e4, 1e4])
def test_sinks_that_take_nothing_or_everything(ours: Kernels, value: float) -> None:
    q, k, v = leaves(1, 2, 2, 19, 9, head_dim=32)
    sink = torch.full((2,), value).requires_grad_()
    options = {"is_causal": True, "alignment": "bottom-right"}
    output, lse = bwdtune.attention(q, k, v, sink=sink, return_lse=True, **options)
    plain, plain_lse = bwdtune.attention(q, k, v, return_lse=True, **options)
    if value < 0:
        assert torch.equal(output, plain)
        assert torch.equal(lse, plain_lse if value == -math.inf else plain_lse.clamp(min=value))
    else:
        assert not output.any()
        assert (lse == value).all()
    gradients = torch.autograd.grad(output.float().square().sum(), (q, k, v, sink))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert not gradients[3].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-5, 1.0, 3e4])
def test_gradients_of_any_size_flow_into_the_log_sum_exp(ours: Kernels, dtype: torch.dtype, size: float) -> None:
    """Where PyTorch's backward takes a kernel's place, they go through 16-bit values."""
    ours.none = "nothing is stored"
    q, k, v = leaves(1, 2, 2, 19, 30, head_dim=32, dtype=dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    _, lse = bwdtune.attention(q, k, v, return_lse=True)
    upstream = torch.randn(lse.shape, generator=torch.Generator().manual_seed(3)) * size
    found = torch.autograd.grad(lse, (q, k), upstream)
    right = torch.autograd.grad(exact(*wide)[1], wide[:2], upstream.double())
    for ours_, theirs in zip(found, right, strict=True):
        # fp16 has no smaller numbers.
        assert (ours_.double() - theirs).norm() <= 0.01 * theirs.norm() + (2.0**-24 * 40 if size < 1 else 0)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "alignment": "bottom-right", "softcap": 2.0}], ids=str)
def test_gradcheck(options: dict[str, Any]) -> None:
    q, k, v = (
        torch.randn(1, heads, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(heads))
        for heads, length in ((2, 5), (1, 4), (1, 4))
    )

    def attention(*inputs: torch.Tensor) -> Any:
        output, lse = bwdtune.attention(*inputs[:3], enable_gqa=True, sink=inputs[3], return_lse=True, **options)
        return output, lse

    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    assert torch.autograd.gradcheck(attention, (*inputs, sinks(2, torch.float64)))


# ---- other ways to a gradient ----


def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    output, lse = bwdtune.attention(q, k, v, is_causal=True, enable_gqa=True, sink=sink, return_lse=True)
    return output.float().square().sum() + lse.square().sum()


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_a_gradient(ours: Kernels, way: str) -> None:
    inputs = (*leaves(1, 4, 2, 20, 20, head_dim=32), sinks(4))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    output, lse = exact(*wide, is_causal=True)
    right = torch.autograd.grad(output.square().sum() + lse.square().sum(), wide)
    for found, theirs in zip(WAYS[way](loss, *inputs), right, strict=True):
        assert_near(found, theirs)


@pytest.mark.parametrize("with_sink", [False, True])
def test_gradients_of_several_losses_at_once(ours: Kernels, with_sink: bool) -> None:
    inputs = (*leaves(1, 4, 2, 20, 20, head_dim=32), *((sinks(4),) if with_sink else ()))
    output, lse = bwdtune.attention(
        *inputs[:3], is_causal=True, enable_gqa=True, return_lse=True, sink=inputs[3] if with_sink else None
    )
    upstream = (torch.randn(3, *output.shape).bfloat16(), torch.randn(3, *lse.shape))

    def gradient(*gradients: torch.Tensor, **options: Any) -> Tensors:
        return torch.autograd.grad((output, lse), inputs, gradients, retain_graph=True, **options)

    batched = [torch.func.vmap(gradient)(*upstream)]
    if operators.ready():  # PyTorch has no such thing for functions of Python
        batched.append(gradient(*upstream, is_grads_batched=True))
    for i in range(3):
        for both, one in itertools.product(batched, [gradient(*(one[i] for one in upstream))]):
            assert all(torch.equal(several[i], single) for several, single in zip(both, one, strict=True))


def test_a_gradient_of_the_gradient_is_refused(ours: Kernels) -> None:
    inputs = (*leaves(1, 4, 2, 20, 20, head_dim=32), sinks(4))
    for gradient in torch.autograd.grad(loss(*inputs), inputs, create_graph=True):
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            gradient.square().sum().backward(retain_graph=True)


def test_opcheck(kernels: Kernels) -> None:
    q, k, v = leaves(1, 4, 2, 20, 20)
    opcheck(ops.attention.default, (q, k, v, True, None, True), {"forward": "cpu", "sink": sinks(4)})
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    sink = sinks(4).detach()
    output, lse = ops.attention(q, k, v, True, None, True, forward="cpu", sink=sink)
    mask = (True, 0.125, -1, -1, False, 0.0, None, "cpu")
    saved = (torch.randn_like(output), q, k, v, output, lse, None, None)
    opcheck(ops.backward.default, (*saved, *mask, torch.randn_like(lse), sink, None, None, False))


# ---- arguments ----


@pytest.mark.parametrize(
    ("sink", "reason"),
    [
        (torch.zeros(3), r"torch.float32 \(3,\): it must be a score for each query head"),
        (torch.zeros(4, 1), "it must be a score for each query head"),
        (torch.zeros(4, dtype=torch.int64), "torch.int64"),
    ],
)
def test_sinks_that_make_no_sense(sink: torch.Tensor, reason: str) -> None:
    q, k, v = leaves(1, 4, 2, 9, 9)
    with pytest.raises(ValueError, match=reason):
        bwdtune.attention(q, k, v, enable_gqa=True, sink=sink)


def test_what_is_no_attention_is_refused_where_pytorchs_function_would_not_be_asked() -> None:
    with pytest.raises(ValueError, match="4 query heads do not go with 2"):
        bwdtune.attention(*leaves(1, 4, 2, 9, 9), return_lse=True)


def test_a_kernel_says_what_it_misses(kernels: Kernels) -> None:
    q, k, v = (tensor.detach() for tensor in leaves(1, 2, 2, 9, 9))
    output, lse = ops.attention(q, k, v, forward="cpu")
    problem = Problem("bf16", 1, 2, 2, 9, 9, 64)
    plain = kernels.choose(problem, 0).kernel
    with_sinks = kernels.choose(Problem("bf16", 1, 2, 2, 9, 9, 64, lse_grad=True, sink=True), 0).kernel
    assert plain
    assert with_sinks
    run = functools.partial(backward, q=q, k=k, v=v, o=output, dout=output, lse=lse, scale=0.125)
    with pytest.raises(KernelError, match="dlse is given, and this kernel has none"):
        run(plain, dlse=lse)
    with pytest.raises(KernelError, match="sink is given"):
        run(plain, sink=torch.zeros(2))
    with pytest.raises(KernelError, match="sink is missing"):
        run(with_sinks, dlse=lse)
    with pytest.raises(KernelError, match=r"dlse must be float32 of shape \(1, 2, 9\)"):
        run(with_sinks, dlse=lse[:, :1], sink=torch.zeros(2))
    assert not run(with_sinks, sink=torch.full((2,), -math.inf))[3].any()


def test_explain_knows_the_problem(ours: Kernels) -> None:
    problem = attention_module.problem_of(*leaves(1, 2, 2, 9, 9), sink=sinks(2), return_lse=True)
    assert problem == Problem("bf16", 1, 2, 2, 9, 9, 64, lse_grad=True, sink=True)
    assert problem.kernel_spec == "bf16_d64_full_lse_sink"
    assert problem.options == ("--shape", "1_2_9_64", "--lse-grad", "--sink", "--dtype", "bf16")
