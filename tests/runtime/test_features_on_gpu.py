"""Windows, alignments, caps and packed sequences on a GPU: PyTorch's forwards of them, and dispatch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_gpu import assert_as_in_mathematics, assert_near, draw

import bwdtune
from bwdtune.gen.build.jobs import build_one
from bwdtune.gen.families import PRESETS, MmaConfig
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime import forwards, torch_attention
from bwdtune.runtime.features import Features, Sequences
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import Kernel, backward

pytestmark = pytest.mark.gpu

HEAD_DIM = 64
MASKS: dict[str, tuple[bool, Features]] = {
    "causal, bottom-right": (True, Features(bottom_right=True)),
    "window": (False, Features(window=(50, 30))),
    "window, bottom-right": (False, Features(window=(50, 30), bottom_right=True)),
    "causal window": (True, Features(window=(50, -1))),
    "left": (False, Features(window=(60, -1))),
    "right": (False, Features(window=(-1, 4), bottom_right=True)),
    "capped": (True, Features(softcap=2.0)),
}


@pytest.mark.parametrize("lengths", [(300, 300), (200, 300), (300, 200), (1, 300), (300, 1)])
@pytest.mark.parametrize("mask", MASKS)
def test_pytorchs_forwards(mask: str, lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    causal, features = MASKS[mask]
    q, k, v = draw(2, 4, lengths[0], HEAD_DIM), draw(2, 2, lengths[1], HEAD_DIM), draw(2, 2, lengths[1], HEAD_DIM)
    assert_as_in_mathematics(q, k, v, causal, features)


LENGTHS = [(100, 300), (0, 5), (200, 200), (7, 0), (1, 1)]


def sequences(lengths: list[tuple[int, int]]) -> Sequences:
    starts_q, starts_kv = (
        torch.tensor(list(itertools.accumulate(part, initial=0)), dtype=torch.int32, device="cuda")
        for part in zip(*lengths, strict=True)
    )
    return Sequences(starts_q, starts_kv, *(max(part) for part in zip(*lengths, strict=True)))


@pytest.mark.parametrize("mask", MASKS)
def test_pytorchs_forwards_of_packed_sequences(mask: str) -> None:
    torch.manual_seed(0)
    causal, features = MASKS[mask]
    features = Features(features.window, features.bottom_right, features.softcap, sequences(LENGTHS))
    rows, keys = (sum(part) for part in zip(*LENGTHS, strict=True))
    q, k, v = draw(1, 4, rows, HEAD_DIM), draw(1, 2, keys, HEAD_DIM), draw(1, 2, keys, HEAD_DIM)
    assert_as_in_mathematics(q, k, v, causal, features)


SINKS = torch.linspace(-1, 5, 4)


def assert_row_features_as_in_mathematics(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, features: Features, name: str | None = None
) -> None:
    """With sinks, and with gradients of output and log-sum-exp, by PyTorch's own backward."""
    sink = SINKS.to("cuda")
    forward = torch_attention.forward(q, k, v, causal, 0.125, features, name, sink)
    exact = torch_attention.forward(q, k, v, causal, 0.125, features, forwards.MATH, sink)
    assert_near(forward.output, exact.output)
    assert_near(forward.lse, exact.lse)
    dout, dlse = torch.randn_like(q), torch.randn_like(exact.lse)
    for ours, theirs in zip(forward.backward(dout, dlse), exact.backward(dout, dlse), strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("lengths", [(300, 300), (200, 300), (300, 200), (1, 300)])
@pytest.mark.parametrize("mask", MASKS)
def test_pytorchs_forwards_with_sinks(mask: str, lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    causal, features = MASKS[mask]
    q, k, v = draw(2, 4, lengths[0], HEAD_DIM), draw(2, 2, lengths[1], HEAD_DIM), draw(2, 2, lengths[1], HEAD_DIM)
    assert_row_features_as_in_mathematics(q, k, v, causal, features)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
def test_each_of_pytorchs_plain_forwards_with_sinks(name: str, causal: bool) -> None:
    """They differ in the form of their log-sum-exp. 290 rows are padded to 320 by one of them."""
    torch.manual_seed(0)
    q, k, v = (draw(2, 4, 290, HEAD_DIM) for _ in range(3))
    assert_row_features_as_in_mathematics(q, k, v, causal, Features(), name)


@pytest.mark.parametrize("mask", MASKS)
def test_pytorchs_forwards_of_packed_sequences_with_sinks(mask: str) -> None:
    torch.manual_seed(0)
    causal, features = MASKS[mask]
    features = Features(features.window, features.bottom_right, features.softcap, sequences(LENGTHS))
    rows, keys = (sum(part) for part in zip(*LENGTHS, strict=True))
    q, k, v = draw(1, 4, rows, HEAD_DIM), draw(1, 2, keys, HEAD_DIM), draw(1, 2, keys, HEAD_DIM)
    assert_row_features_as_in_mathematics(q, k, v, causal, features)


def kernel(problem: Problem) -> Kernel:
    config = MmaConfig(32, 64, 2, stages=2, k_in_registers=False, v_in_registers=False)
    variant = build_one(render(problem, config), current_device().arch)
    assert variant.library
    return Kernel.load(variant.library)


def test_what_lies_between_sequences_does_not_matter() -> None:
    """Rows behind a sequence's end are in its last tile: infinities there must not reach it."""
    problem = Problem("bf16", 2, 2, 2, 100, 100, HEAD_DIM, causal=True, varlen=True)
    torch.manual_seed(0)
    q, k, v, dout = (draw(1, 2, 200, HEAD_DIM) for _ in range(4))
    features = Features(sequences=sequences([(100, 100), (70, 70)]))
    forward = torch_attention.forward(q, k, v, True, 0.125, features)
    expected = backward(kernel(problem), q, k, v, forward.output, dout, forward.lse, 0.125, features)
    for tensor in (q, k, v, dout):
        tensor[:, :, 170:] = float("nan")
    found = backward(kernel(problem), q, k, v, forward.output, dout, forward.lse, 0.125, features)
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours[:, :, :170], theirs[:, :, :170])


@pytest.mark.parametrize("features", [{}, {"deterministic": True}], ids=["", "deterministic"])
def test_packed_sequences_past_two_to_the_31_elements(features: dict[str, bool]) -> None:
    """The last sequence is as right as alone."""
    count, length, heads = 2049, 512, 32
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("less than 60 GiB of free memory")
    problem = Problem("bf16", count, heads, heads, length, length, HEAD_DIM, causal=True, varlen=True, **features)
    starts = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
    packed = Features(sequences=Sequences(starts, starts, length, length))
    q, k, v, dout = (draw(count * length, heads, HEAD_DIM).transpose(0, 1)[None] for _ in range(4))
    assert q.numel() > 2**31
    forward = torch_attention.forward(q, k, v, True, 0.125, packed)
    found = backward(kernel(problem), q, k, v, forward.output, dout, forward.lse, 0.125, packed)
    last = [tensor[:, :, -length:] for tensor in (q, k, v, dout)]
    alone = torch_attention.forward(*last[:3], True, 0.125)
    for ours, theirs in zip(found, alone.backward(last[3].contiguous()), strict=True):
        assert_near(ours[:, :, -length:], theirs)


def test_lengths_that_do_not_fit_are_named_where_looking_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (draw(200, 2, HEAD_DIM) for _ in range(3))
    fitting, falling, too_long = (
        torch.tensor(starts, dtype=torch.int32, device="cuda")
        for starts in ([0, 100, 200], [0, 100, 60], [0, 100, 300])
    )
    for asked in ("1", "0"):
        monkeypatch.setenv("BWDTUNE_CHECK_LENGTHS", asked)
        for starts, longest, said in (
            (falling, 100, "never decrease"),
            (too_long, 200, "end within the 200 rows"),
            (fitting, 99, "max_seqlen_q is 99, and a sequence has 100 rows"),
        ):
            with pytest.raises(ValueError, match=said) if asked == "1" else contextlib.nullcontext():
                bwdtune.attention_varlen(q, k, v, starts, starts, longest, longest, is_causal=True)
            torch.cuda.synchronize()


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (100, 0)},
    "bottom-right": {"is_causal": True, "alignment": "bottom-right"},
    "capped": {"is_causal": True, "softcap": 3.0},
    "deterministic": {"is_causal": True, "deterministic": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_uses_the_winner(
    store_winner: Callable[..., None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {
        "window": {"causal": True, "window_left": 100},
        "bottom-right": {"causal": True, "bottom_right": True},
        "capped": {"causal": True, "softcap": True},
        "deterministic": {"causal": True, "deterministic": True},
    }[name]
    store_winner(Problem("bf16", 2, 4, 2, 200, 300, HEAD_DIM, **fields), PRESETS["v3"], device=current_device())
    torch.manual_seed(0)
    inputs = [draw(2, 4, 200, HEAD_DIM), draw(2, 2, 300, HEAD_DIM), draw(2, 2, 300, HEAD_DIM)]
    for tensor in inputs:
        tensor.requires_grad_()
    output = bwdtune.attention(*inputs, enable_gqa=True, **OPTIONS[name])
    dout = torch.randn_like(output)
    found = torch.autograd.grad(output, inputs, dout)
    assert not [record for record in caplog.records if record.name == "bwdtune"]
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    reference = bwdtune.attention(*wide, enable_gqa=True, **OPTIONS[name])
    for ours, theirs in zip(found, torch.autograd.grad(reference, wide, dout.float()), strict=True):
        assert_near(ours, theirs)


def textbook(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    s = q @ k.mT * HEAD_DIM**-0.5
    if sink is not None:
        s = torch.cat([s, sink[:, None, None].expand(*s.shape[:3], 1)], -1)
    return s.softmax(-1)[..., : k.shape[2]] @ v, s.logsumexp(-1)


def merged(*parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """As ring attention merges what it has for parts of the keys."""
    (first, first_lse), (second, second_lse) = parts
    lse = torch.logaddexp(first_lse, second_lse)
    weights = ((part - lse).exp()[..., None] for part in (first_lse, second_lse))
    return first.float() * next(weights) + second.float() * next(weights), lse


@pytest.mark.parametrize(
    "found_for", ["the problem", "the plain problem", ""], ids=lambda found_for: found_for or "none"
)
def test_halves_that_are_merged_have_the_gradients_of_the_whole(
    store_winner: Callable[..., None], found_for: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an odd length, with sinks and without; the plain problem's winner is verified before it serves."""
    halves = (slice(0, 101), slice(101, 333))
    for keys, features in zip(halves, ({"lse_grad": True, "sink": True}, {"lse_grad": True}), strict=True):
        problem = Problem("bf16", 2, 4, 4, 333, keys.stop - keys.start, HEAD_DIM, **features)
        if found_for:
            stored = problem if found_for == "the problem" else problem.without_row_features
            store_winner(stored, PRESETS["v3"], device=current_device())
    torch.manual_seed(0)
    q, k, v = (draw(2, 4, 333, HEAD_DIM).requires_grad_() for _ in range(3))
    sink = SINKS.to("cuda").requires_grad_()
    before = bwdtune.stats(reset=True)
    output, lse = merged(
        bwdtune.attention(q, k[:, :, halves[0]], v[:, :, halves[0]], sink=sink, return_lse=True),
        bwdtune.attention(q, k[:, :, halves[1]], v[:, :, halves[1]], return_lse=True),
    )
    dout, dlse = torch.randn_like(output), torch.randn_like(lse)
    inputs = (q, k, v, sink)
    found = torch.autograd.grad((output, lse), inputs, (dout, dlse))
    assert sum(bwdtune.stats().launches.values()) == (2 if found_for else 0), (before, caplog.text)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad(textbook(*wide), wide, (dout.double(), dlse.double()))
    for ours, theirs in zip(found, expected, strict=True):
        assert_near(ours, theirs)
