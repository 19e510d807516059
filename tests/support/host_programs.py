"""Small programs against `templates/host`, compiled as `gen.build` compiles kernels."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

from bwdtune.gen.build.toolchain import find_host_compiler


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bwdtune-host-")


@functools.cache
def load(source: Path) -> ctypes.CDLL:
    """A program's library, compiled once in a test run; a warning of the compiler's is an error here."""
    library = Path(_directory().name) / f"{source.stem}.so"
    command = find_host_compiler().command("host", str(source), str(library))
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi"]
    subprocess.run([command[0], *warnings, *command[1:]], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.error_text.restype = ctypes.c_char_p
    return loaded
