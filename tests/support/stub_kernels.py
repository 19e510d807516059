"""Kernels for a CPU without a template: `stub_kernel.cpp`, right or wrong in one way.

It is compiled once, for all processes of all tests: a copy of that library is told what to compute.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from bwdtune.gen.paths import writable_cache_dir
from bwdtune.gen.problem import BIAS, FLAGS, Problem

_SOURCE = Path(__file__).parent / "stub_kernel.cpp"
_INTERFACE = Path(__file__).resolve().parents[2] / "templates" / "common" / "interface.h"
_SETTINGS = b"settings of a stub kernel"
_SETTINGS_BYTES = 512


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bwdtune-stub-")


@functools.cache
def _compiled() -> bytes:
    """The library with no settings yet."""
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-std=c++17", "-O3", "-ffast-math", "-fno-finite-math-only", "-shared", "-fPIC"]
    command += [f"-I{_INTERFACE.parent}", str(_SOURCE)]
    content = "\0".join([*command, _SOURCE.read_text(), _INTERFACE.read_text()])
    kept = writable_cache_dir() / "stubs" / f"{hashlib.sha256(content.encode()).hexdigest()}.so"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            made = Path(folder) / kept.name
            subprocess.run([*command, "-o", str(made)], check=True)
            made.replace(kept)
    return kept.read_bytes()


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
    """A shared library of the kernels' interface.

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
    settings = {
        "DTYPE": dtype,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v or head_dim,
        "MASK": mask or ("causal" if causal else "full"),
        **{flag.upper(): int(flags.get(flag, False)) for flag in FLAGS},
        "FAULT": fault,
        "ABI_VERSION": abi_version,
        "BIAS": bias,
        "BIAS_DTYPE": bias_dtype,
    }
    text = "".join(f" {name}={value}" for name, value in settings.items()) + " "
    library = Path(_directory().name) / f"{'_'.join(map(str, settings.values()))}.so"
    if not library.exists():  # else it may be loaded
        before, unset, after = _compiled().partition(_SETTINGS)
        assert unset
        told = text.encode().ljust(_SETTINGS_BYTES, b"\0")
        library.write_bytes(before + told + after[_SETTINGS_BYTES - len(unset) :])
    return library
