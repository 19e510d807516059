"""Whether two sources are the same machine code: by their PTX, and where that differs by their cubins."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from bwdtune.gen.build.machine_code import machine_code
from bwdtune.gen.build.toolchain import find_nvcc
from bwdtune.gen.render import Source

# What nvcc calls the anonymous namespace: by the file's name and content.
_ANONYMOUS = re.compile(r"\d*_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}")


def same_machine_code(a: Source, b: Source, arch: str, folder: Path) -> bool:
    """Compares two sources as the nvcc that is here compiles them for a target.

    The same PTX is the same machine code, which takes a second or two to find out. Where it is another one, a name may
    have changed, or the order of two statements: ptxas decides, in ten seconds or more.
    """
    if a.text == b.text or _ptx(a, arch, folder) == _ptx(b, arch, folder):
        return True
    return machine_code(_compiled(a, arch, folder, "cubin")) == machine_code(_compiled(b, arch, folder, "cubin"))


def _ptx(source: Source, arch: str, folder: Path) -> str:
    return _ANONYMOUS.sub("", _compiled(source, arch, folder, "ptx").read_text())


def _compiled(source: Source, arch: str, folder: Path, kind: str) -> Path:
    nvcc = find_nvcc()
    of_libraries = {"-shared", "-Xcompiler", "-fPIC"}
    flags = [flag for flag in nvcc.flags(arch) if flag not in of_libraries]
    (folder / "kernel.cu").write_text(source.text)
    result = folder / f"{source.hash}.{kind}"
    command = [str(nvcc.nvcc), *flags, f"-{kind}", "kernel.cu", "-o", result.name]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return result
