"""Documents of several lengths in one batch without padding: `attention_varlen`.

python examples/packed_sequences.py
"""

from __future__ import annotations

import torch

import bwdtune

HEADS, HEADS_KV, HEAD_DIM = 8, 2, 64


def main(lengths: tuple[int, ...] = (100, 17, 240, 3)) -> float:
    """The largest relative difference between the packed batch's gradients and those of each document alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    total = sum(lengths)
    q, k, v = (
        torch.randn(total, heads, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, HEADS_KV, HEADS_KV)
    )
    # Where each document begins, and the end of the last. One tensor for both says that the lengths are the same.
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    longest = max(lengths)
    output = bwdtune.attention_varlen(q, k, v, starts, starts, longest, longest, is_causal=True, enable_gqa=True)
    packed = torch.autograd.grad(output.float().square().sum(), (q, k, v))

    difference, at = 0.0, 0
    for length in lengths:
        one = [tensor[at : at + length].detach().transpose(0, 1)[None].requires_grad_() for tensor in (q, k, v)]
        output = bwdtune.attention(one[0], one[1], one[2], is_causal=True, enable_gqa=True)
        for alone, together in zip(torch.autograd.grad(output.float().square().sum(), one), packed, strict=True):
            there = together[at : at + length].transpose(0, 1)[None]
            difference = max(difference, float((there - alone).norm() / alone.norm()))
        at += length
    return difference


if __name__ == "__main__":
    print(f"the gradients of packed documents and of each alone differ by {main():.2%} at most")
