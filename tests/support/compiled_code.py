"""What nvcc makes of a kernel: compiled, or as it is on record (`compile_record`)."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import compile_record
from compile_record import Figures

from bwdtune.gen.build.compile_step import CompiledResources, parse_ptxas
from bwdtune.gen.build.jobs import MAIN_KERNEL, Variant, build
from bwdtune.gen.build.machine_code import machine_code
from bwdtune.gen.build.toolchain import find_nvcc
from bwdtune.gen.device import Device
from bwdtune.gen.families import Config
from bwdtune.gen.paths import cache_dir
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source, render
from bwdtune.runtime.kernel import Kernel

# What nvcc calls the anonymous namespace: by the file's name and content.
_ANONYMOUS = re.compile(r"\d*_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}")
_SERIALIZED = "wgmma.mma_async instructions are serialized"


@dataclass(frozen=True)
class Compiled:
    """A kernel as nvcc has compiled it.

    Attributes:
        resources: Of the main kernel.
        complaints: The compiler's warnings, and what ptxas says of serialized wgmma.
        machine_code: Its hash.
        info: What a library says of itself, `KernelInfo` and whether it counts cycles; empty where only device code was
            compiled.
    """

    resources: CompiledResources
    complaints: list[str]
    machine_code: str
    info: dict[str, Any]


def device_code(problem: Problem, config: Config, device: Device) -> Compiled:
    """A kernel's device code, without that of its launcher, which takes as long again to compile.

    That a block has as many threads as arithmetic says is asserted in its text, as its shared memory is anyway.
    """
    source = render(problem, config)
    assert "static_assert(SHARED_MEMORY_BYTES == " in source.text
    text = f"{source.text}\nstatic_assert(NUM_THREADS == {config.estimate(problem).threads});\n"
    key = _key(text, device.arch)
    record = compile_record.record()
    figures = None if record.answers(key) else _device_code(text, device.arch, key)
    found = _compiled(record.judge(key, f"{device.arch} {source.name}", figures))
    assert not any(_SERIALIZED in line for line in found.complaints), found.complaints
    return found


def libraries(sources: Sequence[Source], arch: str) -> list[Compiled]:
    """Kernels as libraries, built as they are for use."""
    record = compile_record.record()
    keys = [_key("library", source.text, arch) for source in sources]
    missing = [source for key, source in zip(keys, sources, strict=True) if not record.answers(key)]
    figures = {variant.source: _of_library(variant) for variant in build(missing, arch)} if missing else {}
    return [
        _compiled(record.judge(key, f"{arch} {source.name}.so", figures.get(source)))
        for key, source in zip(keys, sources, strict=True)
    ]


def _key(*parts: str) -> str:
    nvcc, arch = find_nvcc(), parts[-1]
    return compile_record.key_of(*parts, nvcc.version, nvcc.fingerprint, *nvcc.flags(arch))


def _compiled(figures: Figures) -> Compiled:
    return Compiled(**{**figures, "resources": CompiledResources(**figures["resources"])})


def _figures(compiled: Compiled) -> Figures:
    return {**vars(compiled), "resources": compiled.resources._asdict()}


def _device_code(text: str, arch: str, key: str) -> Figures:
    """Compiles, or takes what the compiler made of the text from the cache of all tests."""
    kept = cache_dir(None) / "device_code" / key
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            compiled = _compile(text, arch, Path(folder), "cubin")
            found = json.dumps({"log": compiled.log, "machine_code": machine_code(compiled.result)})
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
            file.write(found)
        Path(file.name).replace(kept)
    found = json.loads(kept.read_text())
    (resources,) = (figures for name, figures in parse_ptxas(found["log"]).items() if MAIN_KERNEL in name)
    return _figures(Compiled(resources, _complaints(found["log"]), found["machine_code"], {}))


def _of_library(variant: Variant) -> Figures:
    assert variant.status == "ok", variant.error
    assert variant.resources
    assert variant.library
    assert variant.machine_code
    assert variant.log
    kernel = Kernel.load(variant.library)
    info = {**asdict(kernel.info), "counts_cycles": kernel.counts_cycles}
    return _figures(Compiled(variant.resources, _complaints(variant.log.read_text()), variant.machine_code, info))


def _complaints(log: str) -> list[str]:
    return [_ANONYMOUS.sub("", line) for line in log.splitlines() if "warning #" in line or _SERIALIZED in line]


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
