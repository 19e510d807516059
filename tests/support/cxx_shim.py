"""A stand-in for the C++ compiler of the target ``host``: it hands out stub kernels, at once or when it is let to."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest import mock

from stub_kernels import stub_for

from bwdtune.gen.problem import Problem

_SCRIPT = """#!/bin/sh
case "$1" in --version) echo "g++ (a stand-in) 1.0.0"; exit ;; esac
for word; do
    [ "$previous" = -o ] && out=$word
    case $word in *.cu) source=$word ;; */runtime.cpp) exec g++ -c -x c++ /dev/null -o runtime.o ;; esac
    previous=$word
done
echo "$source" >> {home}/compiled
[ -p {home}/gate ] && read -r line < {home}/gate
for stub in {home}/*.so; do
    kind=${{stub##*/}}
    case $source in *_"${{kind%.so}}".cu) cp "$stub" "$out"; exit ;; esac
done
echo "error: $source has no stub"
exit 1
"""


class CxxShim:
    """A compiler that makes kernels of the kinds it was given; others do not compile.

    Attributes:
        program: What ``CXX`` may be set to.
    """

    def __init__(self, home: Path) -> None:
        home.mkdir()
        self._home = home
        self.program = home / "c++"
        self.program.write_text(_SCRIPT.format(home=home))
        self.program.chmod(0o755)

    def add(self, problem: Problem) -> None:
        """Has it compile kernels of a problem's kind."""
        with mock.patch.dict(os.environ):
            os.environ.pop("CXX", None)  # a stub is compiled by a real one
            stub = stub_for(problem)
        shutil.copy(stub, self._home / f"{problem.kernel_spec}.so")

    @property
    def compiled(self) -> list[str]:
        """The files that it was given, in order."""
        log = self._home / "compiled"
        return log.read_text().splitlines() if log.exists() else []

    def hold(self) -> None:
        """Compiles wait from now on."""
        os.mkfifo(self._home / "gate")

    def release(self) -> None:
        """Waits for a compile that waits, and lets it go on; later ones do not wait."""
        with (self._home / "gate").open("w") as gate:
            (self._home / "gate").unlink()
            gate.write("go\n")
