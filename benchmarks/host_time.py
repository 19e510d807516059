"""What the host pays for one backward, where the GPU's part is short: microseconds of a `torch.autograd.grad` call.

    python benchmarks/host_time.py > benchmarks/results/host_time.json

PyTorch's default, its flash attention, the same two with `bwdtune.enable()`, and bwdtune's own differentiable operator,
interleaved; each figure is the median of rounds. The kernel is a preset: its speed does not count here.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import bwdtune
from bwdtune.gen.build.jobs import build_one
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime import dispatch, operator
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import Kernel

SHAPE = "1_8_256_64"
PRESET = "t64"
ROUNDS, CALLS = 15, 400


def main() -> None:
    """Prints JSON."""
    problem = Problem.parse(SHAPE, causal=True)
    variant = build_one(render(problem, PRESETS[PRESET]), current_device().arch)
    assert variant.library
    choice = dispatch.Choice(Kernel.load(variant.library), "a preset")
    dispatch.choose = lambda *_, **__: choice  # type: ignore[assignment]
    operator.load()
    inputs = [
        torch.randn(problem.batch, problem.heads_q, problem.seqlen_q, problem.head_dim, device="cuda")
        .bfloat16()
        .requires_grad_()
        for _ in range(3)
    ]

    def pytorch(*backends: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(list(backends)):
            return F.scaled_dot_product_attention(*inputs, is_causal=True)

    own, _ = torch.ops.bwdtune.attention(*inputs, is_causal=True, forward="cudnn")
    default, flash = F.scaled_dot_product_attention(*inputs, is_causal=True), pytorch(SDPBackend.FLASH_ATTENTION)
    dout = torch.randn_like(default)
    calls: dict[str, tuple[torch.Tensor, bool]] = {
        "default": (default, False),
        "flash": (flash, False),
        "default, enabled": (default, True),
        "flash, enabled": (flash, True),
        "bwdtune.attention's operator": (own, False),
    }

    def once(output: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(output, inputs, dout, retain_graph=True)

    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(ROUNDS + 2):
        for name, (output, on) in calls.items():
            (bwdtune.enable if on else bwdtune.disable)()
            call = once(output)
            call()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            elapsed = time.perf_counter() - begin
            torch.cuda.synchronize()
            if round_number >= 2:
                times[name].append(elapsed / CALLS * 1e6)
    bwdtune.disable()
    report = {
        "shape": f"{SHAPE} causal",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "default_backward": default.grad_fn.name() if default.grad_fn else "",
        "microseconds": {name: round(statistics.median(taken), 1) for name, taken in times.items()},
        "spread": {name: [round(min(taken), 1), round(max(taken), 1)] for name, taken in times.items()},
        "counters": operator.counters(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
