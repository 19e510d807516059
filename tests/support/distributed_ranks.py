"""A rank of distributed training steps, without and with `enable`: ``distributed_ranks.py RANK RANKS STORE WAY…``.

On CPUs the ranks talk through gloo; on GPUs, one for each rank, through NCCL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from operator_kernels import Kernels, stub
from torch import distributed, nn

import bwdtune
from bwdtune.gen.build.jobs import build
from bwdtune.gen.families import MmaConfig
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime import dispatch, sdpa
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import Kernel
from bwdtune.runtime.operator import native
from bwdtune.runtime.operator.aten import CPU_BACKWARD

HEAD_DIM = 64
CONFIG = MmaConfig(32, 64, 2, stages=2, k_in_registers=False, v_in_registers=False)
Gradients = list[torch.Tensor]


class Layer(nn.Module):
    """Causal attention between two linear layers."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(heads * HEAD_DIM, 3 * heads * HEAD_DIM)
        self.out = nn.Linear(heads * HEAD_DIM, heads * HEAD_DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def trained(device: torch.device, wrap: Callable[[nn.Module], nn.Module]) -> Gradients:
    """The gradients of a batch that is another one on each rank."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(Layer(2), Layer(2)).to(device, torch.bfloat16))
    torch.manual_seed(1 + distributed.get_rank())
    x = torch.randn(2, 70, 2 * HEAD_DIM).to(device, torch.bfloat16)
    model(x).float().square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [getattr(one, "full_tensor", lambda one=one: one)() for one in gradients]


def ddp(device: torch.device) -> Gradients:
    return trained(device, lambda model: nn.parallel.DistributedDataParallel(model))


def fsdp2(device: torch.device) -> Gradients:
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.init_device_mesh(device.type, (distributed.get_world_size(),))

    def wrap(model: nn.Module) -> nn.Module:
        for layer in model.children():
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return trained(device, wrap)


def context_parallel(device: torch.device) -> Gradients:
    """Ring attention: each rank has a part of the sequence, and the backward is given a merged log-sum-exp."""
    from torch.distributed.tensor.experimental import context_parallel as parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = distributed.init_device_mesh(device.type, (distributed.get_world_size(),))
    set_rotate_method("allgather")
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 512, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(3)]
    with parallel(mesh, buffers=inputs, buffer_seq_dims=[2, 2, 2]), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        return list(torch.autograd.grad(out.float().square().sum(), leaves))


WAYS: dict[str, Callable[[torch.device], Gradients]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "context_parallel": context_parallel,
}


def main(rank: int, ranks: int, store: str, ways: list[str]) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=distributed.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=300),
    )
    try:
        kernels = _kernels(on_gpu)
        for way in ways:
            expected = WAYS[way](device)
            before = kernels.launches
            with bwdtune.enabled():
                found = WAYS[way](device)
            assert kernels.launches > before, (way, kernels.launches - before, kernels.fallbacks)
            assert not kernels.fallbacks, (way, kernels.fallbacks)
            for ours, pytorchs in zip(found, expected, strict=True):
                assert (ours.float() - pytorchs.float()).norm() <= 0.02 * pytorchs.float().norm(), way
    finally:
        distributed.destroy_process_group()


def _kernels(on_gpu: bool) -> Kernels:
    if on_gpu:
        built: dict[str, Kernel] = {}

        def kernel_for(problem: Problem) -> Kernel:
            if problem.kernel_spec not in built:
                (variant,) = build([render(problem, CONFIG)], current_device().arch)
                assert variant.library, variant.error
                built[problem.kernel_spec] = Kernel.load(variant.library)
            return built[problem.kernel_spec]

        kernels = Kernels(kernel_for)
    else:
        native.DEVICE_TYPES = ["cpu"]
        sdpa.ATEN_BACKWARDS = [(CPU_BACKWARD, "CPU")]
        kernels = Kernels(stub)
    choose: Any = kernels.choose
    dispatch.choose = choose
    return kernels


if __name__ == "__main__":
    rank, ranks, store, *ways = sys.argv[1:]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(int(rank), int(ranks), store, ways)
