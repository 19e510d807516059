"""Finds the compilers: nvcc (CUDA_HOME, PATH, the pip wheels), and g++ or clang++ for kernels as plain C++.

As a script (``python -m bwdtune.gen.build.toolchain``) it prints which nvcc is used. It ends with status 1 if there is
none, which tells the set-up to install the nvcc wheels.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..device import HOST_ARCH
from ..errors import BwdtuneError

OLDEST_RELEASE = (12, 8)  # the first that knows sm_120
INSTALL_HINT = (
    "install a CUDA toolkit (12.8 or newer) and set CUDA_HOME, "
    'or run: pip install "cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==13.0.*"'
)

_HOST_HEADERS = Path(__file__).resolve().parents[2] / "templates" / "host"
_RUNTIME_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-fno-exceptions")
# Kernels use nothing of the C++ library, which takes the linker longer than the kernel does.
_HOST_LIBRARIES = ("-nodefaultlibs", "-lm", "-lgcc", "-lc")
_QUERY_TIMEOUT_S = 60
_log = logging.getLogger(__name__)


class ToolchainError(BwdtuneError):
    """No compiler that can be used: missing, too old, broken, or one that does not know the target."""


@dataclass(frozen=True)
class Toolchain:
    """An nvcc, as that very nvcc describes itself.

    Attributes:
        nvcc: The program.
        version: Such as ``13.0.88``.
        release: Such as ``(13, 0)``.
        archs: The targets it compiles for, without suffixes: ``sm_90``, ``sm_120``, …
        root: The toolkit's folder, with ``bin`` and, for the wheels, ``include`` and ``lib`` in it.
    """

    nvcc: Path
    version: str
    release: tuple[int, int]
    archs: frozenset[str]
    root: Path

    @property
    def fingerprint(self) -> str:
        """What decides the result beside source, flags and version: variables by which nvcc lets people add options."""
        return "\0".join(os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"))

    def takes(self, arch: str) -> bool:
        """Whether this nvcc compiles for a target, such as ``sm_120a``."""
        match = re.fullmatch(r"(sm_\d+)[af]?", arch)
        return match is not None and match[1] in self.archs

    def check_arch(self, arch: str) -> None:
        """Refuses a target before anything is compiled.

        Raises:
            ToolchainError: This nvcc does not compile for it.
        """
        if not self.takes(arch):
            known = ", ".join(sorted(self.archs, key=lambda name: int(name[3:])))
            raise ToolchainError(
                f"nvcc {self.version} ({self.nvcc}) does not compile for {arch!r}, only for {known}: "
                "install a toolkit that does, or choose another --arch"
            )

    def flags(self, arch: str) -> tuple[str, ...]:
        """The options that decide the result. Exported kernels are built with the same."""
        gencode = f"arch={arch.replace('sm_', 'compute_')},code={arch}"
        return ("-O3", "-std=c++17", "-gencode", gencode, "-Xptxas", "-v", "-shared", "-Xcompiler", "-fPIC")

    def command(self, arch: str, source: str, library: str, *, nvcc: Path | None = None) -> list[str]:
        """The command line.

        Args:
            arch: The target.
            source: File name; relative, since nvcc pastes names into shell commands of its own.
            library: File name of the result.
            nvcc: Another path to the same program (see `build`).
        """
        nvcc = nvcc or self.nvcc
        # nvcc looks in lib64, but the pip wheels have lib.
        libraries = nvcc.parent.parent / "lib"
        search = [f"-L{libraries}"] if (libraries / "libcudart_static.a").exists() else []
        # The cubin is read from the library again (see `machine_code`), also where a release of nvcc would compress it.
        return [str(nvcc), *self.flags(arch), "-no-compress", *search, source, "-o", library]


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler for the target ``host``: the same kernel text against ``templates/host``.

    Attributes:
        program: The command, with arguments where ``CXX`` has some.
        version: Its name and version, such as ``g++ 12.2.0``.
    """

    program: tuple[str, ...]
    version: str

    @property
    def fingerprint(self) -> str:
        """The contents of the headers that stand in for CUDA's, which the source names but does not hold."""
        digest = hashlib.sha256("\0".join((*_RUNTIME_FLAGS, *_HOST_LIBRARIES)).encode())
        for path in sorted(_HOST_HEADERS.rglob("*")):
            if path.is_file():
                digest.update(f"{path.relative_to(_HOST_HEADERS)}\0".encode() + path.read_bytes() + b"\0")
        return digest.hexdigest()

    def flags(self, arch: str) -> tuple[str, ...]:
        """The options that decide the result. To optimise a kernel takes longer than that spares its verification."""
        return ("-std=c++20", "-O0", "-fno-exceptions", "-DBWDTUNE_HOST", "-shared", "-fPIC", "-pthread")

    def command(self, arch: str, source: str, library: str, *, runtime: Path | None = None) -> list[str]:
        """The command line; see `Toolchain.command`.

        Args:
            arch: The target.
            source: File name.
            library: File name of the result.
            runtime: What `runtime_command` made, to be linked; without it, that is compiled once more.
        """
        linked = ["-DBWDTUNE_HOST_LINKED", "-x", "none", str(runtime)] if runtime else []
        inputs = [*linked[:1], "-x", "c++", source, *linked[1:]]
        # It has read the C library's names in half the time, which for so small a library is most of it.
        libraries = [*_HOST_LIBRARIES, *(["-fuse-ld=gold"] if shutil.which("ld.gold") else [])]
        return [*self.program, *self.flags(arch), "-I", str(_HOST_HEADERS), *inputs, *libraries, "-o", library]

    def runtime_command(self, result: str) -> list[str]:
        """The command line that compiles what is the same in all libraries: what the instructions do on a CPU."""
        return [*self.program, *_RUNTIME_FLAGS, "-c", str(_HOST_HEADERS / "runtime.cpp"), "-o", result]


Compiler = Toolchain | HostCompiler


def find_compiler(arch: str) -> Compiler:
    """The compiler for a target, which it is known to take.

    Raises:
        ToolchainError: There is none.
    """
    if arch == HOST_ARCH:
        return find_host_compiler()
    compiler = find_nvcc()
    compiler.check_arch(arch)
    if not os.environ.get("NVCC_CCBIN") and not shutil.which("g++"):
        raise ToolchainError("nvcc needs a C++ compiler, and g++ is not on PATH: install it, or name one in NVCC_CCBIN")
    _check_host_compiler(compiler.nvcc, os.environ.get("PATH"), os.environ.get("NVCC_CCBIN"), compiler.fingerprint)
    driver = driver_release()
    if driver and driver[0] < compiler.release[0]:  # it may be for another machine, so this is no error
        torch = sys.modules.get("torch")
        built = f"; PyTorch is for {torch.version.cuda}" if torch else ""
        _warn_once(
            f"nvcc {compiler.version} ({compiler.nvcc}) makes kernels for CUDA {compiler.release[0]}, which this "
            f"machine's driver (CUDA {driver[0]}.{driver[1]}{built}) does not load: "
            f"update the driver, or set CUDA_HOME to a toolkit for CUDA {driver[0]} (12.8 or newer)"
        )
    return compiler


def find_nvcc() -> Toolchain:
    """The nvcc to use: of ``CUDA_HOME``, else of ``PATH``, else of the pip wheels.

    What ``CUDA_HOME`` holds is used or refused, never passed over in silence. An nvcc on ``PATH`` that is too old gives
    way to the wheels.

    Raises:
        ToolchainError: None is found, or it is too old or broken.
    """
    home = os.environ.get("CUDA_HOME", "")
    if home:
        nvcc = Path(home).expanduser().absolute() / "bin" / "nvcc"
        if os.access(nvcc, os.X_OK):
            return _usable(nvcc)
        _warn_once(f"CUDA_HOME is {home}, where there is no bin/nvcc: looking on PATH and among the pip wheels")

    on_path = shutil.which("nvcc")
    wheels = _wheel_nvcc()
    if on_path:
        try:
            return _usable(Path(on_path).absolute())
        except ToolchainError as error:
            if not wheels:
                raise
            _warn_once(f"{error}; using {wheels} instead")
    if wheels:
        return _usable(wheels)
    raise ToolchainError(f"nvcc is not found by CUDA_HOME, on PATH or among the pip wheels: {INSTALL_HINT}")


def find_host_compiler() -> HostCompiler:
    """The C++ compiler to use: ``CXX``, else g++, else clang++.

    Raises:
        ToolchainError: None is found, or it does not answer.
    """
    chosen = os.environ.get("CXX", "")
    try:
        candidates = [tuple(shlex.split(chosen))] if chosen else [("g++",), ("clang++",)]
    except ValueError as error:  # a quote that is not closed
        raise ToolchainError(f"CXX is {chosen!r}, which is no command ({error}): correct or unset it") from None
    for program in candidates:
        if program and shutil.which(program[0]):
            return _describe_host_compiler(program)
    raise ToolchainError(
        f"the C++ compiler {chosen!r} that CXX names is not found: correct or unset it"
        if chosen
        else "no C++ compiler is found: install g++ or clang++, or name one in CXX"
    )


def cuobjdump() -> Path | None:
    """The disassembler: beside the nvcc in use, else on ``PATH``."""
    try:
        beside = find_nvcc().root / "bin" / "cuobjdump"
    except ToolchainError:
        beside = None
    if beside and os.access(beside, os.X_OK):
        return beside
    found = shutil.which("cuobjdump")
    return Path(found).absolute() if found else None


def _wheel_nvcc() -> Path | None:
    """nvcc of NVIDIA's wheels, which all unpack into one folder of site-packages: ``nvidia/cu13``, or a later one."""
    found = (nvcc for entry in sys.path for nvcc in Path(entry or ".").absolute().glob("nvidia/cu[0-9]*/bin/nvcc"))
    return max(found, key=lambda nvcc: int(re.sub(r"\D", "", nvcc.parts[-3])), default=None)


def _usable(nvcc: Path) -> Toolchain:
    try:
        stamp = nvcc.stat().st_mtime_ns  # another toolkit may take the path over while this process lives
    except OSError as error:
        raise ToolchainError(f"{nvcc} cannot be read ({error.strerror}): {INSTALL_HINT}") from None
    toolchain = _describe_nvcc(nvcc, stamp)
    if toolchain.release < OLDEST_RELEASE:
        raise ToolchainError(f"nvcc {toolchain.version} ({nvcc}) is too old: {INSTALL_HINT}")
    return toolchain


@cache
def _describe_nvcc(nvcc: Path, stamp: int) -> Toolchain:
    text = _ask([str(nvcc), "--version"])
    version = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", text)
    if not version:
        raise ToolchainError(f"{nvcc} does not say its version (nvcc --version): {INSTALL_HINT}")
    release = (int(version[1]), int(version[2]))
    numbers = re.findall(r"\bcompute_(\d+)\b", _ask([str(nvcc), "--list-gpu-arch"]))
    # The program may be a script that calls a toolkit elsewhere; only nvcc knows where.
    top = re.search(r"^#\$ TOP=(.+)$", _ask([str(nvcc), "--dryrun", "-x", "cu", os.devnull], check=False), re.MULTILINE)
    root = Path(top[1].strip()).resolve() if top else nvcc.parent.parent
    return Toolchain(nvcc, version[0].removeprefix("V"), release, frozenset(f"sm_{number}" for number in numbers), root)


@cache
def _check_host_compiler(nvcc: Path, *choosing: str | None) -> None:
    """Has nvcc ask its C++ compiler what it is, which it does before each compile.

    Args:
        nvcc: The program.
        choosing: Variables that decide which C++ compiler it takes.

    Raises:
        ToolchainError: It cannot be used.
    """
    try:
        _ask([str(nvcc), "--dryrun", "-x", "cu", os.devnull])
    except ToolchainError as error:
        raise ToolchainError(
            f"nvcc cannot use its C++ compiler ({error}): repair g++, or name another in NVCC_CCBIN"
        ) from None


@cache
def _describe_host_compiler(program: tuple[str, ...]) -> HostCompiler:
    text = _ask([*program, "--version"])
    version = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    name = next((word for word in ("clang", "g++") if word in text.split("\n", 1)[0]), Path(program[0]).name)
    return HostCompiler(program, f"{name} {version[0]}" if version else text.split("\n", 1)[0][:60])


def _ask(command: list[str], *, check: bool = True) -> str:
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_QUERY_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{command[0]} does not run: {error}") from None
    text = answer.stdout.decode(errors="replace")
    if check and answer.returncode:
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
        raise ToolchainError(f"{shlex.join(command)} fails with exit status {answer.returncode}: {last}")
    return text


@cache
def driver_release() -> tuple[int, int] | None:
    """The CUDA release that the driver is for; None without a driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)


if __name__ == "__main__":
    try:
        found = find_nvcc()
    except ToolchainError as error:
        print(error)
        sys.exit(1)
    print(f"nvcc {found.version}: {found.nvcc}")
