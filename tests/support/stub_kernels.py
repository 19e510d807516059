"""Kernels for a CPU without a template: compiled from `stub_kernel.cpp`, right or wrong in one way."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

from bwdtune.gen.problem import BIAS, FLAGS, Problem

_SOURCE = Path(__file__).parent / "stub_kernel.cpp"
_HEADERS = Path(__file__).resolve().parents[2] / "templates" / "common"


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bwdtune-stub-")


def stub_for(problem: Problem) -> Path:
    """A right kernel for this kind of problem."""
    asked = {name: getattr(problem, name) for name in (*FLAGS, *BIAS)}
    asked |= {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v, "mask": problem.mask}
    return stub_library(dtype=problem.dtype, **asked)


@functools.cache
def stub_library(
    *,
    dtype: str = "bf16",
    head_dim: int = 64,
    head_dim_v: int = 0,
    causal: bool = False,
    mask: str = "",
    fault: str = "NONE",
    abi_version: int = 6,
    bias: str = "",
    bias_dtype: str = "",
    **flags: bool,
) -> Path:
    """A shared library of the kernels' interface, compiled once in a test run.

    Args:
        dtype: ``bf16`` or ``fp16``.
        head_dim: D.
        head_dim_v: Of v and o; D where it is 0.
        causal: The mask, where `mask` does not name it.
        mask: ``full``, ``causal`` or ``window``.
        fault: A name of `stub_kernel.cpp`.
        abi_version: What it says of itself.
        bias: Of `gen.problem.Problem`.
        bias_dtype: Its element type.
        **flags: Of `gen.problem.FLAGS`.
    """
    defines = {
        "BF16": int(dtype == "bf16"),
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v or head_dim,
        "MASK": f"BWDTUNE_MASK_{(mask or ('causal' if causal else 'full')).upper()}",
        **{flag.upper(): int(flags.get(flag, False)) for flag in FLAGS},
        "FAULT": fault,
        "ABI_VERSION": abi_version,
        "BIAS": f'"{bias}"',
        "BIAS_DTYPE": f'"{bias_dtype}"',
    }
    name = "_".join(str(value) for value in defines.values()).replace('"', "")
    library = Path(_directory().name) / f"{name}.so"
    subprocess.run(
        [
            os.environ.get("CXX", "g++"),
            "-std=c++17",
            "-O3",
            "-march=native",
            "-ffast-math",
            "-fno-finite-math-only",
            "-shared",
            "-fPIC",
            f"-I{_HEADERS}",
            *(f"-D{key}={value}" for key, value in defines.items()),
            str(_SOURCE),
            "-o",
            str(library),
        ],
        check=True,
    )
    return library
