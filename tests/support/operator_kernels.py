"""The operator on the CPU with stub kernels: what was asked for, launched and left to PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from stub_kernels import stub_for

from bwdtune.gen.problem import Problem
from bwdtune.runtime import operator
from bwdtune.runtime.dispatch import Choice
from bwdtune.runtime.kernel import Kernel


def stub(problem: Problem) -> Kernel:
    """A right kernel."""
    return Kernel.load(stub_for(problem))


class Kernels:
    """Stands in for `dispatch.choose`: every problem has a right kernel, unless `none` says why there is none.

    Attributes:
        asked: The problems that a kernel was asked for.
        capturing: For each whether a CUDA graph was being captured.
        none: Why no problem has a kernel.
    """

    def __init__(self, kernel_for: Callable[[Problem], Kernel] = stub) -> None:
        self.asked: list[Problem] = []
        self.capturing: list[bool] = []
        self.none = ""
        self._kernel_for = kernel_for
        self.native = operator.load()
        self.native.forget()
        self._launches = Counter(self.native.launches())
        self._fallbacks = Counter(self.native.fallbacks())

    def choose(self, problem: Problem, device_index: int, *, capturing: bool = False) -> Choice:
        """See `dispatch.choose`."""
        self.asked.append(problem)
        self.capturing.append(capturing)
        return Choice(None, self.none) if self.none else Choice(self._kernel_for(problem), "a test's")

    @property
    def launches(self) -> int:
        """How many there were of kernels of ours."""
        return (Counter(self.native.launches()) - self._launches).total()

    @property
    def fallbacks(self) -> dict[str, int]:
        """How often PyTorch's backward ran, by reason."""
        return dict(Counter(self.native.fallbacks()) - self._fallbacks)


def leaves(
    *sizes: int, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, head_dim_v: int = 0, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of B, Hq, Hkv, Sq, Skv, each of which needs a gradient; the same at each call.

    v has `head_dim_v` columns; as many as q and k where that is 0.
    """
    batch, heads_q, heads_kv, seqlen_q, seqlen_kv = sizes
    generator = torch.Generator(device).manual_seed(sum(sizes))
    queries, keys = (heads_q, seqlen_q), (heads_kv, seqlen_kv)
    shapes = [(*queries, head_dim), (*keys, head_dim), (*keys, head_dim_v or head_dim)]
    q, k, v = (
        torch.randn(batch, *shape, generator=generator, device=device).to(dtype).requires_grad_() for shape in shapes
    )
    return q, k, v
