"""A small language model, trained for a few steps with our backward under PyTorch's attention.

python examples/training_step.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import bwdtune

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 256, 128, 2, 128, 4


class Layer(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def main(steps: int = 20) -> list[float]:
    """The loss of each step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, VOCABULARY)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    text = torch.randint(0, VOCABULARY, (BATCH, LENGTH // 2), device=device).repeat(1, 3)[:, : LENGTH + 1]
    losses = []
    with bwdtune.enabled():
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16):
                loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


if __name__ == "__main__":
    for step, loss in enumerate(main()):
        print(f"step {step:2}: loss {loss:.4f}")
    print(bwdtune.stats())
