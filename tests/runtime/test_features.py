"""What `attention` takes beyond PyTorch's function: windows, alignments, caps, packed sequences, the same bits.

A CPU in the place of the GPU, as in `test_attention`.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stub_kernels import stub_for

import bwdtune
from bwdtune.gen.device import Device
from bwdtune.gen.problem import Problem, visible_range
from bwdtune.runtime import dispatch
from bwdtune.runtime.dispatch import Choice
from bwdtune.runtime.kernel import Kernel, KernelError
from bwdtune.runtime.torch_attention import as_bottom_right

HEAD_DIM = 32
SIZES = [(1, 2, 2, 40, 40), (2, 4, 2, 17, 40), (1, 2, 1, 40, 17), (1, 1, 1, 1, 9), (1, 1, 1, 9, 1), (1, 1, 1, 3, 70)]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, bottom-right": {"is_causal": True, "alignment": "bottom-right"},
    "window": {"window_size": (5, 3)},
    "window, bottom-right": {"window_size": (5, 3), "alignment": "bottom-right"},
    "causal window": {"window_size": (5, -1), "is_causal": True},
    "left": {"window_size": (6, -1), "alignment": "bottom-right"},
    "right": {"window_size": (-1, 4)},
    "itself": {"window_size": (0, 0)},
}


@pytest.fixture
def problems(host: Device, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Every problem has a right kernel; the problems that kernels were asked for."""
    asked: list[Problem] = []

    def choose(problem: Problem, device_index: int, *, capturing: bool = False) -> Choice:
        asked.append(problem)
        return Choice(Kernel.load(stub_for(problem)), "a stub")

    monkeypatch.setattr(dispatch, "choose", choose)
    return asked


@pytest.fixture
def no_kernels(host: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "choose", lambda *asked, **options: Choice(None, "nothing is stored"))


def leaves(batch: int, heads_q: int, heads_kv: int, seqlen_q: int, seqlen_kv: int, **how: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(batch + heads_q + seqlen_q)
    shapes = [(heads_q, seqlen_q), (heads_kv, seqlen_kv), (heads_kv, seqlen_kv)]
    dtype = how.get("dtype", torch.bfloat16)
    return [
        torch.randn(batch, heads, seqlen, HEAD_DIM, generator=generator).to(dtype).requires_grad_()
        for heads, seqlen in shapes
    ]


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alignment: str = "top-left",
    softcap: float = 0.0,
    scale: float = HEAD_DIM**-0.5,
) -> torch.Tensor:
    """The textbook's attention in fp64, from boolean masks."""
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    seqlen_q, seqlen_kv = q.shape[2], k.shape[2]
    place = torch.arange(seqlen_q)[:, None] + (seqlen_kv - seqlen_q if alignment == "bottom-right" else 0)
    keys = torch.arange(seqlen_kv)
    seen = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool)
    if is_causal or window_size[1] >= 0:
        seen &= keys <= place + (0 if is_causal else window_size[1])
    if window_size[0] >= 0:
        seen &= keys >= place - window_size[0]
    s = q @ k.mT * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    p = s.masked_fill(~seen, -1e300).softmax(-1) * seen
    return p @ v


def assert_right(output: torch.Tensor, inputs: list[torch.Tensor], reference: torch.Tensor, exact_inputs: Any) -> None:
    dout = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).to(output.dtype)
    assert torch.allclose(output.double(), reference, atol=0.03)
    found = torch.autograd.grad(output, inputs, dout)
    for gradient, right in zip(found, torch.autograd.grad(reference, exact_inputs, dout.double()), strict=True):
        assert (gradient.double() - right).norm() <= 0.01 * right.norm() + 1e-5


def doubled(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in inputs]


@pytest.mark.parametrize("softcap", [0.0, 1.5], ids=["", "capped"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients(problems: list[Problem], sizes: tuple[int, ...], mask: str, softcap: float) -> None:
    inputs = leaves(*sizes)
    output = bwdtune.attention(*inputs, **MASKS[mask], softcap=softcap, enable_gqa=True)
    wide = doubled(inputs)
    assert_right(output, inputs, exact(*wide, **MASKS[mask], softcap=softcap), wide)
    assert len(problems) == 1


@pytest.mark.parametrize("mask", MASKS)
def test_without_a_kernel_the_gradients_are_pytorchs(no_kernels: None, mask: str) -> None:
    inputs = leaves(2, 4, 2, 17, 40)
    output = bwdtune.attention(*inputs, **MASKS[mask], softcap=3.0, enable_gqa=True, deterministic=True)
    wide = doubled(inputs)
    assert_right(output, inputs, exact(*wide, **MASKS[mask], softcap=3.0), wide)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_a_scale_that_is_not_positive(problems: list[Problem], mask: str, scale: float) -> None:
    inputs = leaves(1, 2, 2, 17, 40)
    output = bwdtune.attention(*inputs, **MASKS[mask], softcap=2.0, scale=scale)
    wide = doubled(inputs)
    assert_right(output, inputs, exact(*wide, **MASKS[mask], softcap=2.0, scale=scale), wide)
    output = bwdtune.attention(*inputs, **MASKS[mask], scale=scale, deterministic=True)
    assert_right(output, inputs, exact(*wide, **MASKS[mask], scale=scale), wide)
    assert not problems, "no kernel takes it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_and_dimensions_have_masks_too(no_kernels: None, dtype: torch.dtype) -> None:
    inputs = leaves(1, 2, 2, 9, 12, dtype=dtype)
    output = bwdtune.attention(*inputs, window_size=(3, 1))
    assert output.dtype == dtype
    wide = doubled(inputs)
    assert_right(output, inputs, exact(*wide, window_size=(3, 1)), wide)


def test_without_gradients_there_is_only_a_forward(problems: list[Problem]) -> None:
    inputs = leaves(1, 2, 2, 9, 12)
    with torch.no_grad():
        output = bwdtune.attention(*inputs, window_size=(3, 1))
    assert not output.requires_grad
    assert torch.allclose(output.double(), exact(*doubled(inputs), window_size=(3, 1)), atol=0.03)
    assert not problems


SAME: list[tuple[tuple[int, int], dict[str, Any], dict[str, Any]]] = [
    ((40, 40), {"is_causal": True, "alignment": "bottom-right"}, {"causal": True}),
    ((40, 40), {"window_size": (-1, 0)}, {"causal": True}),
    ((40, 40), {"window_size": (39, 39)}, {}),
    ((40, 40), {"window_size": (38, 39)}, {"window_left": 38}),
    ((40, 40), {"window_size": (100, 0)}, {"causal": True}),
    ((40, 40), {"window_size": (5, 0), "is_causal": True}, {"causal": True, "window_left": 5}),
    ((40, 40), {"window_size": (5, 7), "is_causal": True}, {"causal": True, "window_left": 5}),
    ((1, 40), {"is_causal": True, "alignment": "bottom-right"}, {}),
    ((1, 40), {"is_causal": True}, {"causal": True}),
    ((40, 20), {"is_causal": True, "alignment": "bottom-right"}, {"causal": True, "bottom_right": True}),
    ((40, 20), {"alignment": "bottom-right"}, {}),
]


@pytest.mark.parametrize(("lengths", "options", "fields"), SAME)
def test_the_same_mask_is_the_same_problem(
    problems: list[Problem], lengths: tuple[int, int], options: dict[str, Any], fields: dict[str, Any]
) -> None:
    bwdtune.attention(*leaves(1, 1, 1, *lengths), **options)
    assert problems == [Problem("bf16", 1, 1, 1, *lengths, HEAD_DIM, **fields)]


@given(
    seqlen_q=st.integers(1, 12),
    more_keys=st.integers(0, 12),
    left=st.integers(-1, 14),
    right=st.integers(-1, 14),
)
def test_a_window_can_be_aligned_the_other_way(seqlen_q: int, more_keys: int, left: int, right: int) -> None:
    def seen(sizes: tuple[int, int], limits: tuple[int, int], bottom_right: bool) -> set[tuple[int, int]]:
        low, high = visible_range(*sizes, *limits, bottom_right)
        return {(i, j) for i in range(sizes[0]) for j in range(sizes[1]) if i + low <= j <= i + high}

    seqlen_kv = seqlen_q + more_keys
    keys, *limits = as_bottom_right(seqlen_q, seqlen_kv, left, right)
    assert (keys >= 1, min(limits) >= -1) == (True, True)
    assert seen((seqlen_q, keys), (limits[0], limits[1]), True) == seen((seqlen_q, seqlen_kv), (left, right), False)


# ---- arguments ----

NONSENSE: dict[str, dict[str, Any]] = {
    "alignment is 'centre'": {"alignment": "centre"},
    "window_size is": {"window_size": (-2, 0)},
    "softcap is -1": {"softcap": -1.0},
    "softcap is nan": {"softcap": math.nan},
    "softcap is inf": {"softcap": math.inf},
    "window_size is .1,.: it must be two": {"window_size": (1,)},
    "window_size is .1, 2, 3.: it must be two": {"window_size": (1, 2, 3)},
    "window_size is .1.5, 0.: it must be two": {"window_size": (1.5, 0)},
}


@pytest.mark.parametrize("said", NONSENSE)
def test_nonsense_is_named(problems: list[Problem], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bwdtune.attention(*leaves(1, 1, 1, 9, 9), **NONSENSE[said])


def test_impossible_shapes_are_named(problems: list[Problem]) -> None:
    q, k, v = leaves(1, 3, 2, 9, 9)
    with pytest.raises(ValueError, match="3 query heads do not go with 2"):
        bwdtune.attention(q, k, v, window_size=(1, 1), enable_gqa=True)
    with pytest.raises(ValueError, match="dimensions, not four"):
        bwdtune.attention(q[0], k[0], v[0], window_size=(1, 1))


# ---- the same bits each time ----


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_problems_are_their_own(problems: list[Problem]) -> None:
    for asked in (None, False, True):
        bwdtune.attention(*leaves(1, 1, 1, 9, 9), deterministic=asked)
    assert [problem.deterministic for problem in problems] == [False, False, True]


@pytest.mark.usefixtures("_deterministic")
def test_pytorchs_mode_asks_for_them(problems: list[Problem]) -> None:
    for asked in (None, False, True):
        bwdtune.attention(*leaves(1, 1, 1, 9, 9), deterministic=asked)
    assert [problem.deterministic for problem in problems] == [True, False, True]


def test_without_a_kernel_pytorch_is_told(no_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = leaves(1, 1, 1, 9, 9)
    output = bwdtune.attention(*inputs, deterministic=True)
    modes = []
    used = torch.use_deterministic_algorithms
    monkeypatch.setattr(
        torch, "use_deterministic_algorithms", lambda mode, **options: (modes.append(mode), used(mode, **options))
    )
    output.sum().backward()
    assert modes == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()


# ---- packed sequences ----

LENGTHS = [(9, 12), (0, 5), (20, 20), (7, 0), (1, 1), (30, 8)]


def packed(
    lengths: list[tuple[int, int]], heads_q: int = 2, heads_kv: int = 1
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    starts_q, starts_kv = (
        torch.tensor(list(itertools.accumulate(part, initial=0)), dtype=torch.int32)
        for part in zip(*lengths, strict=True)
    )
    q, k, v = leaves(1, heads_q, heads_kv, int(starts_q[-1]), int(starts_kv[-1]))
    inputs = [tensor.detach()[0].transpose(0, 1).contiguous().requires_grad_() for tensor in (q, k, v)]
    longest = [max(part) for part in zip(*lengths, strict=True)]
    sizes = {"cu_seqlens_q": starts_q, "cu_seqlens_kv": starts_kv}
    return inputs, {**sizes, "max_seqlen_q": longest[0], "max_seqlen_kv": longest[1], "enable_gqa": True}


def exact_packed(inputs: list[torch.Tensor], lengths: list[tuple[int, int]], **options: Any) -> torch.Tensor:
    q, k, v = inputs
    outputs, at_q, at_kv = [], 0, 0
    for seqlen_q, seqlen_kv in lengths:
        one = [q[at_q : at_q + seqlen_q], *(tensor[at_kv : at_kv + seqlen_kv] for tensor in (k, v))]
        if seqlen_kv:
            outputs.append(exact(*(tensor.transpose(0, 1)[None] for tensor in one), **options)[0].transpose(0, 1))
        else:
            outputs.append(torch.zeros_like(one[0]))
        at_q, at_kv = at_q + seqlen_q, at_kv + seqlen_kv
    return torch.cat(outputs)


@pytest.mark.parametrize("softcap", [0.0, 1.5], ids=["", "capped"])
@pytest.mark.parametrize("mask", MASKS)
def test_packed_sequences(problems: list[Problem], mask: str, softcap: float) -> None:
    inputs, sizes = packed(LENGTHS)
    options = {"alignment": "top-left", **MASKS[mask], "softcap": softcap}
    output = bwdtune.attention_varlen(*inputs, **sizes, **options)
    assert output.shape == inputs[0].shape
    wide = doubled(inputs)
    assert_right(output, inputs, exact_packed(wide, LENGTHS, **options), wide)
    (problem,) = problems
    assert (problem.varlen, problem.batch, problem.seqlen_q, problem.seqlen_kv) == (True, 6, 30, 20)


def test_packed_sequences_without_a_kernel(no_kernels: None) -> None:
    inputs, sizes = packed(LENGTHS)
    output = bwdtune.attention_varlen(*inputs, **sizes, is_causal=True)
    wide = doubled(inputs)
    assert_right(output, inputs, exact_packed(wide, LENGTHS, is_causal=True, alignment="bottom-right"), wide)


def test_sequences_of_equal_lengths_have_one_alignment(problems: list[Problem]) -> None:
    inputs, sizes = packed([(9, 9), (4, 4)])
    sizes["cu_seqlens_kv"] = sizes["cu_seqlens_q"]
    bwdtune.attention_varlen(*inputs, **sizes, is_causal=True).sum().backward()
    (problem,) = problems
    assert not problem.bottom_right


def test_rows_outside_of_all_sequences_have_no_gradient(problems: list[Problem]) -> None:
    inputs, sizes = packed([(9, 9), (4, 4)])
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        sizes[name] = sizes[name].clamp(max=11)
    bwdtune.attention_varlen(*inputs, **sizes).sum().backward()
    for tensor in inputs:
        assert tensor.grad is not None
        assert tensor.grad[:11].any()
        assert not tensor.grad[11:].any()


@pytest.mark.parametrize("lengths", [[(0, 0)], [(0, 4), (0, 4)], [(4, 0)]])
def test_sequences_without_rows(problems: list[Problem], lengths: list[tuple[int, int]]) -> None:
    inputs, sizes = packed(lengths)
    output = bwdtune.attention_varlen(*inputs, **sizes)
    assert output.shape == inputs[0].shape
    assert not output.any()
    for gradient, tensor in zip(torch.autograd.grad(output.sum(), inputs), inputs, strict=True):
        assert gradient.shape == tensor.shape
        assert not gradient.any()
    assert not problems


WRONG_PACKED: dict[str, Callable[[list[torch.Tensor], dict[str, Any]], Any]] = {
    "must be int32": lambda inputs, sizes: sizes.update(cu_seqlens_q=sizes["cu_seqlens_q"].long()),
    "has 7 values and cu_seqlens_kv 6": lambda inputs, sizes: sizes.update(cu_seqlens_kv=sizes["cu_seqlens_kv"][:-1]),
    "2 query heads do not go with 1": lambda inputs, sizes: sizes.update(enable_gqa=False),
    "dimensions: they must be": lambda inputs, sizes: inputs.__setitem__(0, inputs[0][None]),
    "they must be on one device": lambda inputs, sizes: inputs.__setitem__(0, inputs[0].to("meta")),
}


@pytest.mark.parametrize("said", WRONG_PACKED)
def test_wrong_packed_arguments_are_named(problems: list[Problem], said: str) -> None:
    inputs, sizes = packed(LENGTHS)
    WRONG_PACKED[said](inputs, sizes)
    with pytest.raises(ValueError, match=said):
        bwdtune.attention_varlen(*inputs, **sizes)


# ---- from the database ----


def test_a_winner_is_of_its_kind(
    host: Device, store_winner: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The real template, with the nearest window's winner."""
    for window in (4, 20):
        store_winner(Problem("bf16", 1, 2, 2, 40, 60, 64, causal=True, window_left=window, bottom_right=True))
    inputs = [tensor.detach().repeat(1, 1, 1, 2).requires_grad_() for tensor in leaves(1, 2, 2, 40, 60)]
    options: dict[str, Any] = {"is_causal": True, "window_size": (6, -1), "alignment": "bottom-right"}
    output = bwdtune.attention(*inputs, **options)
    assert not [record for record in caplog.records if record.name == "bwdtune"]
    wide = doubled(inputs)
    assert_right(output, inputs, exact(*wide, **options, scale=64**-0.5), wide)
    chosen = dispatch.choose(Problem("bf16", 1, 2, 2, 40, 60, 64, causal=True, window_left=6, bottom_right=True), 0)
    assert "window 4,0" in chosen.reason
    for other in ({"deterministic": True}, {"softcap": 2.0}, {"alignment": "top-left"}):
        with caplog.at_level(logging.WARNING, "bwdtune"):
            bwdtune.attention(*inputs, **{**options, **other})
        assert "no winner is stored" in caplog.records[-1].getMessage()
        caplog.clear()


def test_a_kernel_takes_only_what_it_was_made_for(host: Device) -> None:
    from bwdtune.runtime.features import Features
    from bwdtune.runtime.kernel import backward

    q, k, v = (tensor.detach() for tensor in leaves(1, 1, 1, 9, 9))
    lse = torch.zeros(q.shape[:3])
    problem = Problem("bf16", 1, 1, 1, 9, 9, HEAD_DIM)
    kernels = {
        "plain": Kernel.load(stub_for(problem)),
        "capped": Kernel.load(stub_for(Problem("bf16", 1, 1, 1, 9, 9, HEAD_DIM, softcap=True))),
        "packed": Kernel.load(stub_for(Problem("bf16", 1, 1, 1, 9, 9, HEAD_DIM, varlen=True))),
        "aligned": Kernel.load(stub_for(Problem("bf16", 1, 1, 1, 9, 9, HEAD_DIM, causal=True, bottom_right=True))),
    }
    wrong = [
        ("plain", Features(window=(1, 1)), "this kernel's mask is full"),
        ("plain", Features(softcap=1.0), "this kernel has none"),
        ("capped", Features(), "this kernel needs one"),
        ("packed", Features(), "packed sequences only"),
        ("aligned", Features(), "aligned bottom-right"),
    ]
    for name, features, said in wrong:
        with pytest.raises(KernelError, match=said):
            backward(kernels[name], q, k, v, q, q, lse, 1.0, features)


def test_windows_former_name(problems: list[Problem]) -> None:
    inputs = leaves(1, 2, 2, 9, 12)
    assert torch.equal(bwdtune.attention(*inputs, window=(3, 1)), bwdtune.attention(*inputs, window_size=(3, 1)))
    with pytest.raises(ValueError, match="its former name"):
        bwdtune.attention(*inputs, window=(3, 1), window_size=(3, 1))


LENGTHS_THAT_DO_NOT_FIT: dict[str, dict[str, Any]] = {
    "max_seqlen_q is 29, and a sequence has 30 rows": {"max_seqlen_q": 29},
    "max_seqlen_kv is 8": {"max_seqlen_kv": 8},
    "cu_seqlens_q must begin with 0": {"cu_seqlens_q": [1, 9, 9, 29, 36, 37, 67]},
    "cu_seqlens_kv must begin with 0, never decrease": {"cu_seqlens_kv": [0, 12, 5, 37, 37, 38, 46]},
    "and end within the 67 rows": {"cu_seqlens_q": [0, 9, 9, 29, 36, 37, 68]},
}


@pytest.mark.parametrize("said", LENGTHS_THAT_DO_NOT_FIT)
def test_lengths_that_do_not_fit_are_named_where_looking_is_free(said: str) -> None:
    inputs, sizes = packed(LENGTHS)
    wrong = LENGTHS_THAT_DO_NOT_FIT[said]
    sizes.update(
        {name: torch.tensor(value, dtype=torch.int32) if name[0] == "c" else value for name, value in wrong.items()}
    )
    with pytest.raises(ValueError, match=said):
        bwdtune.attention_varlen(*inputs, **sizes)
