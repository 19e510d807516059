"""v of another head_dim than q and k on a GPU: PyTorch's forwards, and dispatch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from on_gpu import assert_as_in_mathematics, assert_near, draw

import bwdtune
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.runtime import forwards
from bwdtune.runtime.features import PLAIN, Features, Sequences
from bwdtune.runtime.gpu import current_device

pytestmark = pytest.mark.gpu

HEAD_DIMS = [(192, 128), (128, 64), (64, 128)]
MASKS: dict[str, tuple[bool, Features]] = {
    "full": (False, PLAIN),
    "causal": (True, PLAIN),
    "causal, bottom-right": (True, Features(bottom_right=True)),
    "window": (False, Features(window=(50, 30))),
}


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_pytorchs_forwards(mask: str, head_dims: tuple[int, int]) -> None:
    torch.manual_seed(0)
    causal, features = MASKS[mask]
    q, k, v = draw(2, 4, 200, head_dims[0]), draw(2, 2, 300, head_dims[0]), draw(2, 2, 300, head_dims[1])
    assert_as_in_mathematics(q, k, v, causal, features)


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_plain_forwards(name: str, head_dims: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q, k, v = draw(2, 4, 290, head_dims[0]), draw(2, 2, 290, head_dims[0]), draw(2, 2, 290, head_dims[1])
    assert_as_in_mathematics(q, k, v, True, PLAIN, name)


@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_pytorchs_forward_of_packed_sequences(head_dims: tuple[int, int]) -> None:
    torch.manual_seed(0)
    starts = torch.tensor([0, 90, 90, 290], dtype=torch.int32, device="cuda")
    features = Features(sequences=Sequences(starts, starts, 200, 200))
    q, k, v = draw(1, 4, 290, head_dims[0]), draw(1, 2, 290, head_dims[0]), draw(1, 2, 290, head_dims[1])
    assert_as_in_mathematics(q, k, v, True, features)


@pytest.mark.parametrize("way", ["call", "compiled", "dynamic", "packed", "enabled"])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_attention_uses_the_winner(
    store_winner: Callable[..., None], head_dims: tuple[int, int], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    varlen = way == "packed"
    problem = Problem("bf16", 2, 4, 4, 256, 256, head_dims[0], causal=True, varlen=varlen, value_head_dim=head_dims[1])
    store_winner(problem, PRESETS["w64split" if max(head_dims) > 128 else "w64"], device=current_device())
    inputs = [draw(2, 4, 256, columns).requires_grad_() for columns in (head_dims[0], *head_dims)]
    starts = torch.tensor([0, 256, 512], dtype=torch.int32, device="cuda")

    def packed(*tensors: torch.Tensor) -> torch.Tensor:
        rows = (tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors)
        output = bwdtune.attention_varlen(*rows, starts, starts, 256, 256, is_causal=True)
        return output.unflatten(0, (2, 256)).transpose(1, 2)

    def whole(*tensors: torch.Tensor) -> torch.Tensor:
        return bwdtune.attention(*tensors, is_causal=True)

    calls: dict[str, Callable[..., torch.Tensor]] = {
        "call": whole,
        "compiled": torch.compile(whole),
        "dynamic": torch.compile(whole, dynamic=True),
        "packed": packed,
        "enabled": lambda *tensors: F.scaled_dot_product_attention(*tensors, is_causal=True),
    }
    dout = draw(2, 4, 256, head_dims[1])
    bwdtune.stats(reset=True)
    with bwdtune.enabled():
        found = torch.autograd.grad(calls[way](*inputs), inputs, dout)
    assert sum(bwdtune.stats().launches.values()) == 1
    assert not [record for record in caplog.records if record.name == "bwdtune"]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    reference = F.scaled_dot_product_attention(*wide, is_causal=True)
    for ours, theirs in zip(found, torch.autograd.grad(reference, wide, dout.double()), strict=True):
        assert_near(ours, theirs)


def test_the_forward_where_ours_is_the_backward() -> None:
    """cuDNN's, where PyTorch takes that; else FlashAttention's."""
    q, k, v = draw(2, 4, 256, 192), draw(2, 4, 256, 192), draw(2, 4, 256, 128)
    for kernel, others in ((True, (forwards.CUDNN, forwards.FLASH)), (False, (forwards.CUDNN, forwards.EFFICIENT))):
        assert forwards.choose(q, k, v, True, 0.1, PLAIN, enable_gqa=False, kernel=kernel) in others
