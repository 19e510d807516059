"""A stand-in for nvcc: a shell script that runs its "source" as shell code, so that a test says what it does."""

from __future__ import annotations

import shlex
import struct
import sys
from pathlib import Path

import pytest

from bwdtune.gen.families import PRESETS
from bwdtune.gen.render import Source

SUCCEED = 'cp "$library" "$out"'
LIBRARY = struct.pack("<6s10xH44xH", b"\x7fELF\x02\x01", 3, 0)
"""A shared object as far as its header says: without sections."""
ODD_NAMES = ["a space", "a'quote", 'a"double', "a$HOME", "a:colon", "a;semi&and", "ünïcode", "a`tick", "50%#x"]

_SCRIPT = """#!/bin/sh
case "$1" in
    --version) echo "Cuda compilation tools, release {release}, V{version}"; exit ;;
    --list-gpu-arch) printf 'compute_%s\\n' {archs}; exit ;;
    --dryrun) exit ;;
esac
for word; do
    [ "$previous" = -o ] && out=$word
    case $word in *.cu) src=$word ;; esac
    previous=$word
done
echo "$src" >> {compiled}
library={library}
. "./$src"
"""


class NvccShim:
    """A toolkit folder with nothing but an nvcc.

    Attributes:
        home: What CUDA_HOME may be set to.
        nvcc: The program.
    """

    def __init__(self, home: Path, *, version: str = "13.0.88", archs: tuple[int, ...] = (90, 120)) -> None:
        self.home = home
        self.nvcc = home / "bin" / "nvcc"
        self._compiled = home / "compiled"
        self.nvcc.parent.mkdir(parents=True)
        (home / "library").write_bytes(LIBRARY)
        self.nvcc.write_text(
            _SCRIPT.format(
                release=".".join(version.split(".")[:2]),
                version=version,
                archs=" ".join(map(str, archs)),
                compiled=shlex.quote(str(self._compiled)),
                library=shlex.quote(str(home / "library")),
            )
        )
        self.nvcc.chmod(0o755)

    @property
    def compiled(self) -> int:
        """How many compiles were started."""
        return len(self._compiled.read_text().splitlines()) if self._compiled.exists() else 0


def source(text: str, name: str = "test") -> Source:
    """What looks like a rendered kernel."""
    return Source(name, PRESETS["v2"], text)


def without_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the nvcc wheels of this Python, where it has any."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not any(Path(entry).glob("nvidia/cu*/bin/nvcc"))])
