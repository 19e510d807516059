"""``tuner export``: a kernel as plain CUDA, with its C header, a build and a self-checking example."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ... import __version__
from ...db.records import Winner
from ...gen.build.jobs import build_one
from ...gen.device import HOST_ARCH, device_for_arch
from ...gen.errors import BwdtuneError, UsageError
from ...gen.families import Config, preset_name
from ...gen.problem import Problem
from ...gen.render import TEMPLATES, Source, environment, render
from .cards import described_card
from .kernels import BEST, named_config, require_valid, stored_winner
from .options import EXAMPLE_SHAPE, NAMED_KERNEL, ArchOption, DatabaseOption, JsonOption, LimitsOption, for_problem
from .output import print_result

HEADER = "bwdtune_backward.h"
MANIFEST = "bwdtune.json"
_RENDERED = ("README.md", "CMakeLists.txt", "example.cu")
_ELEMENTS = {
    "bf16": {
        "element_header": "cuda_bf16.h",
        "element_type": "__nv_bfloat16",
        "from_float": "__float2bfloat16",
        "to_float": "__bfloat162float",
        "tolerance": "0.01",
    },
    "fp16": {
        "element_header": "cuda_fp16.h",
        "element_type": "__half",
        "from_float": "__float2half",
        "to_float": "__half2float",
        "tolerance": "0.002",
    },
    "fp32": {"element_header": "", "element_type": "float", "from_float": "", "to_float": ""},
}
"""The example's C++ names of each dtype, and the relative L2 error it allows; the last one is a bias' alone."""


@for_problem(EXAMPLE_SHAPE)
def command(
    problem: Problem,
    output: Annotated[Path, typer.Option("-o", "--output", help="The directory to write.")],
    kernel: Annotated[str, typer.Option("--kernel", "--config", help=f"{NAMED_KERNEL}.")] = BEST,
    arch: ArchOption = None,
    limits: LimitsOption = None,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a kernel as plain CUDA: source, header, CMake file, example and README."""
    if kernel == BEST:
        written = export_winner(stored_winner(problem, database, limits=limits, arch=arch), output)
    else:
        config = named_config(kernel, problem, database)
        written = export_config(problem, config, described_card(arch).arch, output)
    print_result(
        written.to_dict(), [f"{written.config} for {written.arch}: {written.directory}", *written.files], as_json
    )


class ExportError(BwdtuneError):
    """What was asked for cannot be exported, or the directory cannot take it."""


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        directory: Where.
        files: Their names, the manifest last.
        config: The exported configuration's id.
        arch: The compile target of the build line.
        source_hash: Of the ``.cu`` file.
        measurement: Its provenance by name, or None where it was not measured.
    """

    directory: Path
    files: tuple[str, ...]
    config: str
    arch: str
    source_hash: str
    measurement: Mapping[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``tuner export --json``."""
        return {**asdict(self), "directory": str(self.directory), "files": list(self.files)}


def export_winner(winner: Winner, directory: Path) -> Export:
    """Exports a stored winner, byte for byte as it was timed.

    Where its text has changed since, today's text of the same machine code.

    Args:
        winner: From the database.
        directory: Made where it is missing; an earlier export in it is replaced.

    Raises:
        ExportError: Today's text is another kernel than the winner, or is not known to be the same; or the directory
            cannot be written.
    """
    source = render(winner.problem, winner.config)
    if source.hash != winner.source_hash and not _is_machine_code_of(winner, source):
        raise ExportError(
            f"the templates have changed since {winner.config.id} won (its source was {winner.source_hash}, "
            f"and is {source.hash}): run tuner search again, or export what they give now, unmeasured, with --config"
        )
    where = winner.environment
    measurement = {
        "shape": winner.problem.shape,
        "gpu": where.gpu.name,
        "compute_capability": where.gpu.capability,
        "driver": where.driver,
        "nvcc": where.toolkit,
        "torch": where.torch,
        "limits": winner.limits,
        "median_ms": winner.median_ms,
        "low_ms": winner.low_ms,
        "high_ms": winner.high_ms,
        "tflops": winner.problem.flops / winner.median_ms / 1e9,
        "max_error": winner.max_error,
        "policy": winner.policy,
        "measured": f"{winner.created_at.isoformat(timespec='seconds')} UTC",
    }
    return _write(winner.problem, source, where.arch, measurement, directory)


def _is_machine_code_of(winner: Winner, source: Source) -> bool:
    """Whether a text compiles, here and now, to the kernel that won."""
    if winner.machine_code is None:
        return False
    try:
        return build_one(source, winner.environment.arch).machine_code == winner.machine_code
    except BwdtuneError:  # no compiler, or not that one
        return False


def export_config(problem: Problem, config: Config, arch: str, directory: Path) -> Export:
    """Exports a configuration that was chosen by hand. Needs no GPU, no compiler and no database.

    Args:
        problem: Its dtype, head_dims and mask count; the sizes do not.
        config: The configuration.
        arch: The compile target of the build lines.
        directory: As for `export_winner`.

    Raises:
        UsageError: The configuration is impossible for that problem and target, or the target is not a GPU's.
        ExportError: The directory cannot be written.
    """
    device = device_for_arch(arch)
    if device.arch == HOST_ARCH:
        raise UsageError("an export is CUDA source: choose a GPU's arch, such as sm_120a")
    require_valid(problem, config, device)
    return _write(problem, render(problem, config), device.arch, None, directory)


def _write(
    problem: Problem, source: Source, arch: str, measurement: Mapping[str, Any] | None, directory: Path
) -> Export:
    files = _contents(problem, source, arch, measurement)
    manifest = {
        "config": source.config.id,
        "parameters": source.config.to_dict(),
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        **problem.features,
        "arch": arch,
        "source_hash": source.hash,
        "measurement": measurement,
        "files": {name: _digest(content) for name, content in files.items()},
    }
    manifest_bytes = (json.dumps(manifest, indent=2) + "\n").encode()
    try:
        _replace_export(directory, {**files, MANIFEST: manifest_bytes})
    except OSError as error:
        raise ExportError(f"cannot write to {error.filename or directory}: {error.strerror}") from None
    return Export(directory, (*files, MANIFEST), source.config.id, arch, source.hash, measurement)


def _contents(problem: Problem, source: Source, arch: str, measurement: Mapping[str, Any] | None) -> dict[str, bytes]:
    """The files by name. A pure function of its arguments and the templates: no time, no machine."""
    gencode = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
    names = {
        "version": __version__,
        "name": source.name,
        "source_file": f"{source.name}.cu",
        "source_hash": source.hash,
        "problem": problem,
        "features": problem.kernel_spec_label,
        "dtype": problem.dtype,
        "config": source.config,
        "preset": preset_name(source.config),
        "arch": arch,
        "gencode": gencode,
        "nvcc_flags": f"-O3 -std=c++17 {gencode}",
        "measurement": measurement,
        **_ELEMENTS[problem.dtype],
        "bias_element": _ELEMENTS[problem.bias_dtype] if problem.bias else None,
    }
    header = (TEMPLATES / "common" / "interface.h").read_text(encoding="utf-8")
    files = {f"{source.name}.cu": source.text, HEADER: header}
    for name in _RENDERED:
        files[name] = environment().get_template(f"export/{name}.j2").render(names)
    return {name: text.encode() for name, text in files.items()}


def _replace_export(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files where no other's are lost: into a new or empty directory, or over an unchanged earlier export.

    Raises:
        ExportError: The directory holds files that are not of an earlier export, or one that was changed since.
        OSError: The file system refuses.
    """
    directory.mkdir(parents=True, exist_ok=True)
    earlier = _earlier_files(directory)
    if earlier is None and any(directory.iterdir()):
        raise ExportError(f"{directory} is not empty and holds no earlier export: choose another directory")
    earlier = earlier or {}
    for name in {*files, *earlier} - {MANIFEST}:
        path = directory / name
        if path.exists() and _digest(path.read_bytes()) not in (earlier.get(name), _digest(files.get(name, b""))):
            raise ExportError(f"{path} was changed since it was exported: move it away, or choose another directory")
    for name in sorted(set(earlier) - set(files)):
        (directory / name).unlink(missing_ok=True)
    for name, content in files.items():
        _write_whole(directory / name, content)


def _earlier_files(directory: Path) -> dict[str, str] | None:
    """Name and digest of each file of an earlier export, as its manifest lists them; None where there is none."""
    try:
        files = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    # A manifest is only a file: names that lead out of the directory are not taken from it.
    if isinstance(files, dict) and all(os.path.basename(name) == name for name in files):
        return files
    return None


def _write_whole(path: Path, content: bytes) -> None:
    """Writes a file under another name and renames it: nobody reads, and no interruption leaves, half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
