"""v of another head_dim than q and k, on the CPU: by operator and Python, with stub kernels and without."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import efficient_on_cpu  # noqa: F401  # CUDA's memory-efficient attention, on the CPU
import pytest
import torch
from exact_attention import Tensors, assert_near, assert_right, exact
from operator_kernels import Kernels, leaves
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from ways_to_gradients import WAYS

import bwdtune
from bwdtune.gen.problem import Problem
from bwdtune.runtime import attention as attention_module
from bwdtune.runtime import forwards, sdpa, torch_attention
from bwdtune.runtime.features import PLAIN, Features
from bwdtune.runtime.kernel import Kernel, KernelError
from bwdtune.runtime.operator import overrides
from bwdtune.runtime.operator.aten import CUDA_BACKWARDS

kernel_or_none = pytest.mark.parametrize("none", ["", "nothing is stored"], ids=["kernel", "PyTorch"])


def inputs_of(*sizes: int, head_dims: tuple[int, int] = (48, 32)) -> Tensors:
    head_dim, head_dim_v = head_dims
    return leaves(*sizes, head_dim=head_dim, head_dim_v=head_dim_v)


@kernel_or_none
@pytest.mark.parametrize(
    ("head_dims", "sizes", "mask"),
    [
        ((48, 32), (2, 4, 2, 17, 40), {"is_causal": True}),
        ((32, 48), (2, 4, 2, 17, 40), {"window_size": (5, 3)}),
        ((32, 48), (2, 4, 1, 1, 36), {"softcap": 2.0}),
    ],
)
def test_gradients(
    ours: Kernels, head_dims: tuple[int, int], sizes: tuple[int, ...], mask: dict[str, Any], none: str
) -> None:
    """More columns than q and k, or fewer.

    XunhaoLai/native-sparse-attention-triton #27: dq lacked columns of v past those of q. pytorch/pytorch #128348 and
    #129579: refused with an error of a library's. apple/coreai-torch #117: one query, and o had the columns of q.
    """
    ours.none = none

    def attention(*inputs: torch.Tensor) -> Any:
        return bwdtune.attention(*inputs, enable_gqa=True, return_lse=True, **mask)

    inputs = inputs_of(*sizes, head_dims=head_dims)
    assert_right(attention, functools.partial(exact, **mask), inputs, True)
    assert [(problem.head_dim, problem.head_dim_v) for problem in ours.asked] == [head_dims]


@kernel_or_none
def test_what_is_added_to_scores(ours: Kernels, none: str) -> None:
    """A bias, sinks and slopes."""
    ours.none = none
    bias = torch.linspace(-2, 2, 4 * 20 * 20).reshape(1, 4, 20, 20).sin().bfloat16().requires_grad_()
    inputs = (*inputs_of(2, 4, 4, 20, 20), torch.linspace(-1, 3, 4).requires_grad_(), bias)
    slopes = torch.tensor([0.5, 0.1, 0.05, 0.01])

    def attention(*inputs: torch.Tensor, reference: Any = bwdtune.attention, **options: Any) -> Any:
        return reference(*inputs[:3], sink=inputs[3], bias=inputs[4], alibi_slopes=slopes, is_causal=True, **options)

    assert_right(
        functools.partial(attention, return_lse=True), functools.partial(attention, reference=exact), inputs, True
    )


STARTS = torch.tensor([0, 9, 9, 29, 33], dtype=torch.int32)


@kernel_or_none
def test_packed_sequences(ours: Kernels, none: str) -> None:
    ours.none = none
    inputs = tuple(
        tensor.detach()[0].transpose(0, 1).contiguous().requires_grad_() for tensor in inputs_of(1, 4, 2, 33, 33)
    )

    def attention(*inputs: torch.Tensor) -> Any:
        found = bwdtune.attention_varlen(*inputs, STARTS, STARTS, 20, 20, is_causal=True, enable_gqa=True)
        also = bwdtune.flash_attn.flash_attn_varlen_func(*inputs, STARTS, STARTS, 20, 20, causal=True)
        assert torch.equal(found, also)
        return found

    def reference(*inputs: torch.Tensor) -> Tensors:
        parts = [
            exact(*(tensor[slice(*rows)].transpose(0, 1)[None] for tensor in inputs), is_causal=True)[0]
            for rows in itertools.pairwise(STARTS.tolist())
        ]
        return (torch.cat(parts, 2)[0].transpose(0, 1),)

    assert_right(attention, reference, inputs, False)


@pytest.mark.parametrize("way", ["torch.compile", "torch.func"])
def test_ways_to_a_gradient(ours: Kernels, way: str) -> None:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return bwdtune.attention(q, k, v, is_causal=True).float().square().sum()

    inputs = inputs_of(2, 2, 2, 17, 17)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    right = torch.autograd.grad(exact(*wide, is_causal=True)[0].square().sum(), wide)
    for found, expected in zip(WAYS[way](loss, *inputs), right, strict=True):
        assert_near(found, expected)


@pytest.mark.usefixtures("kernels")
def test_flops() -> None:
    """Each product counts with the columns that it has."""
    with FlopCounterMode(display=False) as counter:
        torch.ops.bwdtune.attention(*inputs_of(2, 2, 2, 17, 17), True, forward="math")[0].sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 2 * 17 * 17 * ((48 + 32) + (3 * 48 + 2 * 32))


def test_explain_knows_the_problem(ours: Kernels) -> None:
    q, k, v = inputs_of(1, 2, 2, 9, 9)
    problem = Problem("bf16", 1, 2, 2, 9, 9, 48, causal=True, value_head_dim=32)
    assert attention_module.problem_of(q, k, v, is_causal=True) == problem
    bwdtune.attention(q, k, v, is_causal=True).sum().backward()
    assert ours.asked == [problem]


@pytest.mark.parametrize("native", [True, False], ids=["operator", "Python"])
def test_enable_takes_it(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """PyTorch's memory-efficient attention has such heads, too."""
    monkeypatch.setattr(sdpa, "ATEN_BACKWARDS", [(CUDA_BACKWARDS[2], "CPU")])
    if not native:
        if not overrides.PythonOverrides.possible():
            pytest.skip("PyTorch does not hand out its implementations")
        monkeypatch.setattr(sdpa, "_overriding", overrides.load)
        monkeypatch.setattr(sdpa._Enabled, "overriding", None)
    q, k, v = inputs_of(2, 2, 2, 17, 40)
    with bwdtune.enabled():
        output, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
        found = torch.autograd.grad(output.sum(), (q, k, v))
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    for ours_, right in zip(found, torch.autograd.grad(exact(*wide, is_causal=True)[0].sum(), wide), strict=True):
        assert_near(ours_, right)
    assert [(problem.head_dim, problem.head_dim_v) for problem in kernels.asked] == [(48, 32)]


def choice(
    columns: tuple[int, int], features: Features = PLAIN, *, causal: bool = True, keys: int = 128, kernel: bool = True
) -> str:
    """Of the forward on a GPU."""
    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, 4, rows, size, dtype=torch.bfloat16, device="cuda")
            for rows, size in ((128, columns[0]), (keys, columns[0]), (keys, columns[1]))
        )
        return forwards.choose(q, k, v, causal, 0.125, features, enable_gqa=False, kernel=kernel)


def test_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's dispatcher never takes FlashAttention, which with columns of zeros is faster than all but cuDNN."""
    for default, name in ((0, forwards.FLASH), (2, forwards.FLASH), (3, forwards.CUDNN)):
        monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, default=default, **options: default)
        assert choice((192, 128)) == name
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *given, **options: 2)
    assert choice((192, 128), kernel=False) == forwards.EFFICIENT
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert choice((192, 128)) == forwards.EFFICIENT
    assert choice((192, 128), keys=140) == forwards.EFFICIENT
    assert choice((192, 128), Features((5, 3)), causal=False) == forwards.FLASH_WINDOW
    assert choice((192, 128), Features(softcap=2.0)) == forwards.MATH
    for columns in ((576, 512), (64, 264), (64, 60)):
        assert choice(columns) == forwards.MATH


def test_a_forward_of_one_head_dim_saves_nothing_wide() -> None:
    """But what its output is a part of: a backward makes zeros anew."""
    q, k, v = (tensor.detach() for tensor in inputs_of(2, 2, 2, 17, 17))
    result = torch_attention.forward(q, k, v, True, 0.1)
    assert [tensor.shape[-1] for tensor in result.saved[:4]] == [48, 48, 32, 32]


def test_a_kernel_takes_its_own_head_dims_alone(kernels: Kernels) -> None:
    problem = Problem("bf16", 1, 2, 2, 9, 9, 48, causal=True, value_head_dim=32)
    kernel = kernels.choose(problem, 0).kernel
    assert isinstance(kernel, Kernel)
    assert (kernel.info.head_dim, kernel.info.head_dim_v) == (48, 32)
    q, k, v = (tensor.detach() for tensor in inputs_of(1, 2, 2, 9, 9))
    lse = torch.zeros(1, 2, 9)
    with pytest.raises(KernelError, match=r"v has shape \(1, 2, 9, 48\): it must be \(1, 2, 9, 32\)"):
        kernel.launch(q, k, k, q, q, lse, q, k, v, scale=1.0)
    with pytest.raises(KernelError, match=r"o has shape \(1, 2, 9, 48\): it must be \(1, 2, 9, 32\)"):
        kernel.launch(q, k, v, q, q, lse, q, k, v, scale=1.0)


def test_v_without_columns_is_no_input(ours: Kernels) -> None:
    q, k, v = inputs_of(1, 2, 2, 9, 9)
    assert attention_module.problem_of(q, k, v[..., :0]) == "the input is empty"


def test_values_of_other_rows_are_refused(ours: Kernels) -> None:
    q, k, v = inputs_of(1, 2, 2, 9, 9)
    with pytest.raises(ValueError, match="the shapes are"):
        bwdtune.attention(q, k, v[:, :, 1:], return_lse=True)


def test_the_operator_is_what_its_schema_says(kernels: Kernels) -> None:
    q, k, v = inputs_of(2, 2, 2, 17, 17)
    torch.library.opcheck(torch.ops.bwdtune.attention.default, (q, k, v, True), {"forward": "math"})
