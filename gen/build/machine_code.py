"""The machine code of a library, as a hash: what tells one kernel from another.

A kernel is what the GPU executes, not the text that it was compiled from. The hash covers, for every kernel of the
cubin, what decides its execution:

- ``.text.*``: the instructions,
- ``.nv.info*``: registers, stack, threads, the layout of the parameters, barriers, …,
- ``.nv.constant*``, ``.nv.global*``: constants, and the space of the parameters,
- ``.nv.shared*``: static shared memory,
- the relocations of these.

It covers no names. A section is known by what it is for, a symbol by where it lies, and the order of kernels does not
matter: renamed kernels and variables, comments, and code that generates the same instructions leave the hash alone.
Debug information, the notes of the toolkit's version, and Blackwell's intermediate form (``.nv.merc*``,
``.nv.capmerc*``, which no GPU executes) are left out too.

The launcher is host code, which every C++ compiler translates in its own way, and is not covered.

As a script (``python -m bwdtune.gen.build.machine_code LIBRARY …``) it prints the hash of each library.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import Symbol, SymbolTableSection

from ..errors import BwdtuneError

_HASH_DIGITS = 16
_FATBIN_SECTION = ".nv_fatbin"
_ELF_MAGIC = b"\x7fELF"
_TEXT = ".text"
_COVERED = re.compile(r"\.(?:text|nv\.(?:info|constant\d+|global|shared))(?:\.|$)")

_SYMBOL_ATTRIBUTES = frozenset({0x0A, 0x11, 0x12, 0x23, 0x2F})
"""Attributes of ``.nv.info`` whose value begins with the index of a symbol: PARAM_CBANK, FRAME_SIZE, MIN_STACK_SIZE,
MAX_STACK_SIZE and REGCOUNT, in the words of ``cuobjdump -elf``."""
_SIZED_FORMAT = 4  # a size in bytes follows, then the value; in all other formats there are two bytes of value


class MachineCodeError(BwdtuneError):
    """The file is not a whole library."""


def machine_code(library: Path) -> str | None:
    """The hash of the machine code of a library's kernels: the first 16 hexadecimal digits of a SHA-256.

    Args:
        library: What `jobs.build` made for a GPU target; or a cubin, of which it is the same hash.

    Returns:
        The hash; None where there is no cubin to be read: in a build for the target ``host``, which has no machine code
        of a GPU, and where nvcc has compressed it (`toolchain.Toolchain.command` asks it not to).

    Raises:
        MachineCodeError: It cannot be read, or is no library.
    """
    try:
        kernels = sorted(digest for cubin in _cubins(library.read_bytes()) for digest in _kernels(cubin))
    except OSError as error:
        raise MachineCodeError(f"{library} cannot be read: {error.strerror}") from None
    except (ELFError, struct.error, AttributeError, IndexError, UnicodeDecodeError) as error:
        raise MachineCodeError(f"{library} is damaged ({error}): remove it, it is then compiled again") from None
    return hashlib.sha256(b"".join(kernels)).hexdigest()[:_HASH_DIGITS] if kernels else None


def _cubins(file: bytes) -> Iterator[ELFFile]:
    """The cubins of a library's fat binary. They lie in it as they are, between headers that are documented nowhere."""
    elf = ELFFile(io.BytesIO(file))
    if elf["e_machine"] == "EM_CUDA":
        yield elf
        return
    fatbin = elf.get_section_by_name(_FATBIN_SECTION)
    images = fatbin.data() if fatbin else b""
    start = images.find(_ELF_MAGIC)
    while start >= 0:
        cubin = ELFFile(io.BytesIO(images[start:]))
        if cubin["e_machine"] == "EM_CUDA":
            yield cubin
        start = images.find(_ELF_MAGIC, start + 1)


def _kernels(cubin: ELFFile) -> list[bytes]:
    """A digest of each kernel, and where there is a kernel, one of what belongs to none of them."""
    parts: dict[str, list[bytes]] = defaultdict(list)
    names = _Names(cubin)
    for section in cubin.iter_sections():
        if isinstance(section, RelocationSection):
            target = cubin.get_section(section["sh_info"])
            if _COVERED.match(target.name):
                purpose, kernel = names.split(target.name)
                parts[kernel] += (_digest("relocation", purpose, *entry) for entry in _relocations(section, names))
        elif section.name == ".nv.info":
            for attribute, value, kernel in _attributes(section.data(), names):
                parts[kernel].append(_digest(section.name, attribute, value))
        elif _COVERED.match(section.name):
            purpose, kernel = names.split(section.name)
            content: object = section.data()
            if purpose == ".nv.info":
                content = [(attribute, value) for attribute, value, _ in _attributes(section.data(), names)]
            header = [section[name] for name in ("sh_type", "sh_flags", "sh_size", "sh_addralign")]
            parts[kernel].append(_digest(purpose, *header, content))
    return [_digest(*sorted(found)) for found in parts.values()] if names.kernels else []


class _Names:
    """What the names in a cubin mean, without the names.

    Attributes:
        kernels: The names of the kernels.
    """

    def __init__(self, cubin: ELFFile) -> None:
        self._cubin = cubin
        symbols = cubin.get_section_by_name(".symtab")
        if not isinstance(symbols, SymbolTableSection):
            raise ELFError("a cubin without symbols")
        self._symbols = symbols
        prefix = f"{_TEXT}."
        texts = (section.name for section in cubin.iter_sections())
        self.kernels = frozenset(name.removeprefix(prefix) for name in texts if name.startswith(prefix))

    def split(self, section: str) -> tuple[str, str]:
        """What a section is for (``.text``), and the name of its kernel; an empty one where it is of no kernel."""
        kernel = next((kernel for kernel in self.kernels if section.endswith(f".{kernel}")), "")
        return section.removesuffix(f".{kernel}"), kernel

    def symbol(self, index: int) -> tuple[object, str]:
        """Where a symbol lies (one of another file: its name), and the name of its kernel."""
        symbol: Symbol = self._symbols.get_symbol(index)
        section = symbol["st_shndx"]
        if not isinstance(section, int):
            return symbol.name, ""
        purpose, kernel = self.split(self._cubin.get_section(section).name)
        return (purpose, symbol["st_value"], symbol["st_size"]), kernel


def _attributes(data: bytes, names: _Names) -> Iterator[tuple[int, object, str]]:
    """The attributes of a section ``.nv.info*``: which, its value, and the kernel that its value names, if any."""
    position = 0
    while position < len(data):
        layout, attribute, size = struct.unpack_from("<BBH", data, position)
        position += 4
        if layout != _SIZED_FORMAT:
            yield attribute, size, ""
            continue
        value = data[position : position + size]
        position += size
        if attribute in _SYMBOL_ATTRIBUTES:
            place, kernel = names.symbol(struct.unpack_from("<I", value)[0])
            yield attribute, (place, value[4:]), kernel
        else:
            yield attribute, value, ""


def _relocations(section: RelocationSection, names: _Names) -> Iterator[tuple[object, ...]]:
    for entry in section.iter_relocations():
        addend = entry["r_addend"] if entry.is_RELA() else None
        yield entry["r_offset"], entry["r_info_type"], names.symbol(entry["r_info_sym"])[0], addend


def _digest(*values: object) -> bytes:
    return hashlib.sha256(repr(values).encode()).digest()


if __name__ == "__main__":
    for path in sys.argv[1:]:
        try:
            print(machine_code(Path(path)) or "no cubin", path)
        except MachineCodeError as error:
            sys.exit(str(error))
