"""Biases and ALiBi on a GPU: PyTorch's memory-efficient forward, dispatch, and PyTorch's function under `enable`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from on_gpu import assert_near, draw

import bwdtune
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.runtime import forwards, torch_attention
from bwdtune.runtime.features import Features, Sequences
from bwdtune.runtime.gpu import current_device

pytestmark = pytest.mark.gpu

HEAD_DIM = 64
MASKS: dict[str, tuple[bool, Features]] = {
    "full": (False, Features()),
    "causal": (True, Features()),
    "causal, bottom-right": (True, Features(bottom_right=True)),
    "window": (False, Features(window=(50, 30))),
    "window that some see nothing in": (True, Features(window=(20, -1), bottom_right=True)),
}
OPTIONS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"is_causal": True}}


@pytest.mark.parametrize("pattern", ["1_H_S", "B_1_1", "B_H_S"])
@pytest.mark.parametrize("lengths", [(300, 300), (200, 303), (303, 200)])
@pytest.mark.parametrize("mask", MASKS)
def test_the_memory_efficient_forward_is_as_elementary_operations(
    mask: str, lengths: tuple[int, int], pattern: str
) -> None:
    """Output, log-sum-exp and gradients; of a query that sees no key, all are zero or infinite."""
    torch.manual_seed(0)
    causal, features = MASKS[mask]
    rows, keys = lengths
    q, k, v = draw(2, 4, rows, HEAD_DIM), draw(2, 2, keys, HEAD_DIM), draw(2, 2, keys, HEAD_DIM)
    sizes = (1 if part == "1" else size for part, size in zip(pattern.split("_"), q.shape[:3], strict=True))
    bias = draw(*sizes, keys)
    bias[..., 3 if bias.shape[2] > 1 else 0, : keys // 2] = -math.inf
    if bias.shape[2] > 1:
        bias[:, :, 100] = -math.inf
    assert forwards.by_mask(q, k, v, causal, 0.125, features, bias.dtype) == forwards.EFFICIENT
    found, exact = (
        torch_attention.forward(q, k, v, causal, 0.125, features, name, bias=bias, bias_grad=True)
        for name in (forwards.EFFICIENT, forwards.MATH)
    )
    assert_near(found.output, exact.output)
    assert_near(found.lse, exact.lse)
    dout = torch.randn_like(q)
    for ours, theirs in zip(found.backward(dout), exact.backward(dout), strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", ["causal, bottom-right", "window that some see nothing in"])
def test_slopes_as_columns_are_as_elementary_operations(mask: str, packed: bool) -> None:
    torch.manual_seed(0)
    causal, features = MASKS[mask]
    starts, other_starts = (
        torch.tensor(places, dtype=torch.int32, device="cuda") for places in ([0, 90, 90, 290], [0, 150, 155, 355])
    )
    sequences = Sequences(starts, other_starts, 200, 200) if packed else None
    slopes = torch.linspace(0.01, 0.5, 4, device="cuda") * (torch.ones(3, 1, device="cuda") if packed else 1.0)
    features = Features(features.window, features.bottom_right, 0.0, sequences, slopes)
    batch = 1 if packed else 2
    q, k, v = draw(batch, 4, 290, HEAD_DIM), draw(batch, 2, 355, HEAD_DIM), draw(batch, 2, 355, HEAD_DIM)
    assert forwards.by_mask(q, k, v, causal, 0.125, features) == forwards.ALIBI
    found, exact = (
        torch_attention.forward(q, k, v, causal, 0.125, features, name) for name in (forwards.ALIBI, forwards.MATH)
    )
    assert_near(found.output, exact.output)
    assert_near(found.lse.abs(), exact.lse.abs())
    dout = torch.randn_like(q)
    for ours, theirs in zip(found.backward(dout), exact.backward(dout), strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("mask", OPTIONS)
@pytest.mark.parametrize("kind", ["bias", "bias of fp32", "mask", "ALiBi"])
def test_attention_uses_the_winner(
    store_winner: Callable[..., None], kind: str, mask: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    inputs = [draw(2, 4, 200, HEAD_DIM), draw(2, 2, 300, HEAD_DIM), draw(2, 2, 300, HEAD_DIM)]
    fields: dict[str, Any] = {"alibi": True}
    given: dict[str, Any] = {"alibi_slopes": torch.linspace(0.01, 0.5, 4, device="cuda")}
    if kind != "ALiBi":
        bias = draw(1, 4, 200, 300).to(torch.float32 if kind == "bias of fp32" else torch.bfloat16)
        fields = {
            "bias": "1_H_S",
            "bias_dtype": "fp32" if kind == "bias of fp32" else "bf16",
            "bias_grad": kind != "mask",
        }
        given = {"bias": bias.requires_grad_(kind != "mask")}
        inputs += [bias] if kind != "mask" else []
    problem = Problem("bf16", 2, 4, 2, 200, 300, HEAD_DIM, causal=mask == "causal", **fields)
    store_winner(problem, PRESETS["v3"], device=current_device())
    for tensor in inputs:
        tensor.requires_grad_()
    options = {"enable_gqa": True, **OPTIONS[mask]}
    output = bwdtune.attention(*inputs[:3], **given, **options)
    dout = torch.randn_like(output)
    found = torch.autograd.grad(output, inputs, dout)
    assert not [record for record in caplog.records if record.name == "bwdtune"]
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    given = {name: wide[3] if len(wide) > 3 else tensor.float() for name, tensor in given.items()}
    reference = bwdtune.attention(*wide[:3], **given, **options)
    for ours, theirs in zip(found, torch.autograd.grad(reference, wide, dout.float()), strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wanted", [True, False], ids=["bias", "mask"])
@pytest.mark.parametrize("keys", [320, 303])
def test_pytorchs_function_has_the_winner_as_its_backward(
    store_winner: Callable[..., None], keys: int, wanted: bool, compiled: bool
) -> None:
    """A bias that requires a gradient, whose rows PyTorch pads; and a boolean mask, of which it makes floats."""
    torch.manual_seed(0)
    inputs = [draw(2, 4, 200, HEAD_DIM), draw(2, 4, keys, HEAD_DIM), draw(2, 4, keys, HEAD_DIM)]
    fields = {"bias": "B_H_S" if wanted else "B_1_1", "bias_dtype": "bf16", "bias_grad": wanted}
    store_winner(Problem("bf16", 2, 4, 4, 200, keys, HEAD_DIM, **fields), PRESETS["v3"], device=current_device())
    places = torch.arange(keys, device="cuda") < torch.tensor([keys, keys // 2], device="cuda")[:, None]
    mask = draw(1, 4, 200, keys) if wanted else places[:, None, None]
    inputs += [mask] if wanted else []
    for tensor in inputs:
        tensor.requires_grad_()

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        given = inputs[3] if wanted else mask
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
            return F.scaled_dot_product_attention(*inputs[:3], attn_mask=given).float().square().sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    bwdtune.stats(reset=True)
    with bwdtune.enabled():
        run = torch.compile(loss) if compiled else loss
        found = torch.autograd.grad(run(*inputs), inputs)
    assert sum(bwdtune.stats().launches.values()) == 1
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.stride() == theirs.stride()
        assert_near(ours, theirs)
