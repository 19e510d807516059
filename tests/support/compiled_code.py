"""What nvcc makes of a kernel's device code, without that of its launcher, which takes as long again."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bwdtune.gen.build.compile_step import CompiledResources, parse_ptxas
from bwdtune.gen.build.jobs import MAIN_KERNEL
from bwdtune.gen.build.machine_code import machine_code
from bwdtune.gen.build.toolchain import find_nvcc
from bwdtune.gen.device import Device
from bwdtune.gen.families import Config
from bwdtune.gen.paths import cache_dir
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source, render

# What nvcc calls the anonymous namespace: by the file's name and content.
_ANONYMOUS = re.compile(r"\d*_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}")


@dataclass(frozen=True)
class DeviceCode:
    """A kernel's device code.

    Attributes:
        log: What the compiler said.
        resources: Of the main kernel.
        machine_code: Its hash.
    """

    log: str
    resources: CompiledResources
    machine_code: str


def device_code(problem: Problem, config: Config, device: Device) -> DeviceCode:
    """Compiles a kernel's device code, or takes what the compiler said of it from the cache of all tests.

    That a block has as many threads as arithmetic says is asserted in its text, as its shared memory is anyway.
    """
    source = render(problem, config)
    assert "static_assert(SHARED_MEMORY_BYTES == " in source.text
    text = f"{source.text}\nstatic_assert(NUM_THREADS == {config.estimate(problem).threads});\n"
    nvcc = find_nvcc()
    content = "\0".join((text, device.arch, nvcc.version, nvcc.fingerprint, *nvcc.flags(device.arch)))
    kept = cache_dir(None) / "device_code" / hashlib.sha256(content.encode()).hexdigest()
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            compiled = _compile(text, device.arch, Path(folder), "cubin")
            found = json.dumps({"log": compiled.log, "machine_code": machine_code(compiled.result)})
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
            file.write(found)
        Path(file.name).replace(kept)
    found = json.loads(kept.read_text())
    assert "wgmma.mma_async instructions are serialized" not in found["log"]
    (resources,) = (figures for name, figures in parse_ptxas(found["log"]).items() if MAIN_KERNEL in name)
    return DeviceCode(found["log"], resources, found["machine_code"])


def same_machine_code(a: Source, b: Source, arch: str, folder: Path) -> bool:
    """Compares two sources as the nvcc that is here compiles them for a target.

    The same PTX is the same machine code, which takes a second or two to find out. Where it is another one, a name may
    have changed, or the order of two statements: ptxas decides, in ten seconds or more.
    """
    if a.text == b.text or _ptx(a, arch, folder) == _ptx(b, arch, folder):
        return True
    cubins = (_compile(source.text, arch, folder, "cubin").result for source in (a, b))
    return len(set(map(machine_code, cubins))) == 1


def _ptx(source: Source, arch: str, folder: Path) -> str:
    return _ANONYMOUS.sub("", _compile(source.text, arch, folder, "ptx").result.read_text())


@dataclass(frozen=True)
class _Compiled:
    result: Path
    log: str


def _compile(text: str, arch: str, folder: Path, kind: str) -> _Compiled:
    nvcc = find_nvcc()
    of_libraries = {"-shared", "-Xcompiler", "-fPIC"}
    flags = [flag for flag in nvcc.flags(arch) if flag not in of_libraries]
    (folder / "kernel.cu").write_text(text)
    result = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.{kind}"
    command = [str(nvcc.nvcc), *flags, f"-{kind}", "kernel.cu", "-o", result.name]
    done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return _Compiled(result, done.stdout)
