"""The C++ side as a library in the cache: built once for a PyTorch, by the host compiler alone.

As kernels are: addressed by content, under a lock that dies with its holder, published by a rename.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ...gen.errors import BwdtuneError
from ...gen.paths import cache_dir, writable_cache_dir

_SOURCES = Path(__file__).parent / "source"
_INTERFACE = Path(__file__).parents[2] / "templates" / "common"
_TORCH = Path(torch.__file__).parent
_LIBRARY = "bwdtune_operator.so"
_LOG = "log.txt"
_TIME_LIMIT_S = 600
_LIBRARIES = ("torch", "torch_cpu", "c10")


class OperatorBuildError(BwdtuneError):
    """The operator's library cannot be built here."""


def library(cache: Path | None = None) -> Path:
    """The library for this PyTorch, built into the cache on first use (about half a minute).

    Args:
        cache: The cache directory; see `gen.paths.cache_dir`.

    Raises:
        OperatorBuildError: There is no C++ compiler, PyTorch came without its headers, or the compiler failed.
    """
    compiler = _compiler()
    key = _key(compiler)
    ready = cache_dir(cache) / "operator" / key / _LIBRARY
    if ready.exists():
        return ready
    if not compiler:
        raise OperatorBuildError("there is no C++ compiler (g++, or the one that CXX names)")
    try:
        return _build(compiler, writable_cache_dir(cache), key)
    except OSError as error:
        raise OperatorBuildError(f"cannot write the operator's library: {error}") from error


def is_built(cache: Path | None = None) -> bool:
    """Whether the cache has the library for this PyTorch."""
    return (cache_dir(cache) / "operator" / _key(_compiler()) / _LIBRARY).exists()


def obstacle(cache: Path | None = None) -> str:
    """What of a build is missing here, found without one; empty where the library is there, or can be expected."""
    if is_built(cache):
        return ""
    if not _compiler():
        return "there is no C++ compiler: install g++, or name one in CXX"
    if not (_TORCH / "include").is_dir():
        return f"PyTorch {torch.__version__} came without its headers ({_TORCH / 'include'}): install one of its wheels"
    return ""


def discard(library: Path) -> None:
    """Removes a library that does not load: it is built again when it is asked for."""
    shutil.rmtree(library.parent, ignore_errors=True)


def _build(compiler: list[str], cache: Path, key: str) -> Path:
    # What a killed build leaves among the works is removed by the kernels' builds, a day later.
    entries, works = cache / "operator", cache / "work"
    for directory in (entries, works):
        directory.mkdir(parents=True, exist_ok=True)
    ready = entries / key / _LIBRARY
    with FileLock(entries / f"{key}.lock"), tempfile.TemporaryDirectory(dir=works, prefix="bwdtune-") as work:
        if not ready.exists():  # else another process was faster
            made = Path(work, "entry")
            made.mkdir()
            _compile(compiler, made, log=entries / f"{key}.log")
            try:
                made.replace(ready.parent)
            except OSError:
                if not ready.exists():
                    raise
    return ready


def _compile(compiler: list[str], directory: Path, log: Path) -> None:
    command = [*compiler, *_flags(), str(_SOURCES / "operator.cpp"), "-o", str(directory / _LIBRARY)]
    command += [f"-L{_TORCH / 'lib'}", *(f"-l{name}" for name in _LIBRARIES)]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "timeout": _TIME_LIMIT_S}
    with (directory / _LOG).open("wb") as output:
        try:
            status = subprocess.run(command, stdout=output, **options).returncode
        except subprocess.TimeoutExpired:
            raise OperatorBuildError(f"{compiler[0]} took more than {_TIME_LIMIT_S} s for the operator") from None
    if status:
        text = (directory / _LOG).read_text(errors="replace")
        log.write_text(text)
        said = next((line for line in text.splitlines() if "error" in line), f"exit status {status}")
        raise OperatorBuildError(f"{compiler[0]} does not compile the operator: {said.strip()} (log: {log})")


def _flags() -> list[str]:
    standard = "c++20" if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10) else "c++17"
    return [
        f"-std={standard}",
        "-O2",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{_INTERFACE}",
        f"-isystem{_TORCH / 'include'}",
        f"-isystem{_TORCH / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
    ]


def _compiler() -> list[str] | None:
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named)
    found = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    return [found] if found else None


def _key(compiler: list[str] | None) -> str:
    """Of the source, PyTorch with its ABI, and the machine; any compiler builds what this PyTorch can load."""
    parts = [path.read_text() for path in sorted(_SOURCES.iterdir())]
    parts += [(_INTERFACE / "interface.h").read_text(), torch.__version__, torch.version.git_version or ""]
    parts += [str(torch._C._GLIBCXX_USE_CXX11_ABI), platform.machine()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
