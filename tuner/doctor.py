"""What this machine has of what kernels need, and what to do about the rest: ``tuner doctor``."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..db.errors import NoDatabase, OlderDatabase
from ..db.shipped import TABLE, read_shipped
from ..gen import paths
from ..gen.build.limits import job_limit
from ..gen.build.toolchain import INSTALL_HINT, ToolchainError, driver_release, find_host_compiler, find_nvcc
from ..gen.device import RTX_5090, Device, alike
from ..gen.errors import BwdtuneError
from ..runtime import gpu

if TYPE_CHECKING:
    from ..db.store import Store

_OLDEST_TORCH = (2, 6)
_LITTLE_SPACE_BYTES = 2**30
_LARGE_LOG_BYTES = 2**20


class Status(Enum):
    """Of something that kernels need."""

    OK = "ok"
    WARN = "warn"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """Something that kernels need.

    Attributes:
        name: What.
        status: Whether it is there. With a warning all works, though less of it than could.
        text: What was found, in one line.
        advice: What to do; empty where there is nothing.
    """

    name: str
    status: Status
    text: str
    advice: str = ""


def examine(database: str | None = None, cache: Path | None = None) -> list[Finding]:
    """Everything, whatever is missing of it. Compiles nothing, and changes nothing but for making the cache directory.

    Args:
        database: A path or a URL; None for the usual place.
        cache: The cache directory; None for the usual place.
    """
    device, found = _gpu()
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("driver", lambda: _driver(device)),
        ("nvcc", lambda: _nvcc(device)),
        ("C++ compiler", _cxx),
        ("PyTorch", lambda: _torch(device)),
        ("operator", lambda: _operator(cache)),
        ("database", lambda: _database(database, device)),
        ("cache", lambda: _cache(cache)),
        ("shipped table", lambda: _shipped(device)),
        ("settings", _settings),
    )
    findings = [Finding("bwdtune", Status.OK, f"{__version__} in {Path(__file__).parents[1]}"), found]
    for name, check in checks:
        try:
            findings += check()
        except Exception as error:  # whatever it is, the others are told all the same
            findings.append(Finding(name, Status.FAULT, f"{type(error).__name__}: {' '.join(str(error).split())}"))
    return findings


def _gpu() -> tuple[Device | None, Finding]:
    try:
        device = gpu.current_device()
        uuid, limit_w, processes = gpu.gpu_uuid(0), gpu.power_limit_w(0), gpu.compute_processes(0)
    except gpu.NoGpuError as error:
        advice = "kernels are generated, compiled and checked on the CPU, and nothing is timed"
        return None, Finding("GPU", Status.WARN, str(error), advice)
    except BwdtuneError as error:
        return None, Finding("GPU", Status.FAULT, str(error), "use a GPU of compute capability 9.0 or newer")
    power = f", at most {limit_w:.0f} W" if limit_w else ""
    text = f"{device.name} ({device.arch}, {uuid}), {device.sm_count} SMs{power}"
    if processes:
        advice = "measure when it is idle: times beside other work are not worth much"
        return device, Finding("GPU", Status.WARN, f"{text}; {processes} processes compute on it", advice)
    return device, Finding("GPU", Status.OK, text)


def _driver(device: Device | None) -> Iterator[Finding]:
    release, driver = driver_release(), gpu.driver_version()
    if release is None:
        advice = "install NVIDIA's driver" if device else "none is needed without a GPU"
        yield Finding("driver", Status.FAULT if device else Status.OK, "there is none", advice)
        return
    text = f"{driver}, for CUDA {release[0]}.{release[1]}"
    if device and gpu.gpu_state(0).clock_mhz is None:
        yield Finding("driver", Status.WARN, f"{text}; it tells no clocks (NVML)", "timings come without their clock")
    else:
        yield Finding("driver", Status.OK, text)


def _nvcc(device: Device | None) -> Iterator[Finding]:
    try:
        nvcc = find_nvcc()
        nvcc.check_arch((device or RTX_5090).arch)
    except ToolchainError as error:
        yield Finding("nvcc", Status.FAULT, str(error), "" if INSTALL_HINT in str(error) else INSTALL_HINT)
        return
    text, release = f"{nvcc.version} ({nvcc.nvcc})", driver_release()
    if device and release and release[0] < nvcc.release[0]:
        advice = f"update the driver, or set CUDA_HOME to a toolkit for CUDA {release[0]} (12.8 or newer)"
        yield Finding("nvcc", Status.FAULT, f"{text}: the driver does not load what it makes", advice)
    else:
        yield Finding("nvcc", Status.OK, text)


def _cxx() -> Iterator[Finding]:
    """For nvcc, for the operator, and for kernels on the CPU."""
    try:
        found = find_host_compiler()
    except ToolchainError as error:
        yield Finding("C++ compiler", Status.FAULT, str(error))
        return
    text = f"{found.version} ({shutil.which(found.program[0])})"
    if not os.environ.get("NVCC_CCBIN") and not shutil.which("g++"):
        advice = "install g++, or name one in NVCC_CCBIN"
        yield Finding("C++ compiler", Status.FAULT, f"{text}; nvcc needs g++, which is not on PATH", advice)
    else:
        yield Finding("C++ compiler", Status.OK, text)


def _torch(device: Device | None) -> Iterator[Finding]:
    install = f"install PyTorch {_OLDEST_TORCH[0]}.{_OLDEST_TORCH[1]} or newer"
    try:
        found = version("torch")
        import torch
    except PackageNotFoundError:
        yield Finding("PyTorch", Status.FAULT, "it is not installed", install)
        return
    except (ImportError, OSError) as error:
        yield Finding("PyTorch", Status.FAULT, f"{found} cannot be imported: {_one_line(error)}", "install it anew")
        return
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < _OLDEST_TORCH:
        yield Finding("PyTorch", Status.FAULT, f"{found} is too old", install)
        return
    text = f"{found}, for CUDA {torch.version.cuda}" if torch.version.cuda else f"{found}, built without CUDA"
    if device is None or torch.cuda.is_available():
        yield Finding("PyTorch", Status.OK, text)
    elif torch.version.cuda is None:
        yield Finding("PyTorch", Status.FAULT, text, "install a build for this GPU and driver")
    else:
        release = driver_release()
        driver = f", and the driver is for {release[0]}.{release[1]}" if release else ""
        yield Finding("PyTorch", Status.FAULT, f"{text}, sees no GPU{driver}", "install a build for this driver")


def _operator(cache: Path | None) -> Iterator[Finding]:
    """The C++ side of `enable`."""
    from ..runtime.operator import build

    if build.is_built(cache):
        yield Finding("operator", Status.OK, "built for this PyTorch")
    elif reason := build.obstacle(cache):
        advice = "until then Python serves, more slowly, and torch.compile does not"
        yield Finding("operator", Status.FAULT, f"it cannot be built: {reason}", advice)
    else:
        yield Finding(
            "operator", Status.OK, "not built yet: the first use or `tuner prebuild` builds it (half a minute)"
        )


def _database(database: str | None, device: Device | None) -> Iterator[Finding]:
    from ..db import connect
    from ..db.store import Store

    name = "database"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        url = connect.database_url(paths.default_database() if database is None else database)
    where, path = connect.describe(url), connect.sqlite_path(url)
    try:
        with closing(Store.open(database, read_only=True)) as store:
            text = f"{where}: {_contents(store, device)}"
    except NoDatabase:
        yield from _no_database(where, path)
        return
    except OlderDatabase as error:
        yield Finding(name, Status.WARN, str(error), "dispatch does not read it until then")
        return
    except BwdtuneError as error:
        yield Finding(name, Status.FAULT, str(error))
        return
    if caught:
        yield Finding(name, Status.WARN, text, _one_line(caught[0].message))
        return
    if path and (network := connect.network_file_system(path)):
        advice = "keep to one process at a time, or use a database server"
        yield Finding(name, Status.WARN, f"{text}; on a network file system ({network})", advice)
        return
    if path and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        yield Finding(name, Status.WARN, f"{text}; it can only be read", "make it writable, or name another with --db")
        return
    log = path.with_name(f"{path.name}-wal") if path else None
    if log and log.exists() and log.stat().st_size > _LARGE_LOG_BYTES:
        size = f"{log.stat().st_size / 2**20:.0f} MiB of it are in {log.name}"
        yield Finding(name, Status.WARN, f"{text}; {size}", "copy both files, or end what has it open")
        return
    yield Finding(name, Status.OK, text)


def _contents(store: Store, device: Device | None) -> str:
    winners, searches = store.winners(), store.searches()
    here = sum(winner.environment.gpu == gpu.gpu_key(device) for winner in winners) if device else 0
    of_here = f" ({here} for this GPU)" if device else ""
    return f"{len(winners)} winners{of_here}, {len(searches)} searches"


def _no_database(where: str, path: Path | None) -> Iterator[Finding]:
    parent = next((one for one in path.parents if one.exists()), None) if path else None
    if parent and not os.access(parent, os.W_OK):
        advice = "name another file with --db or BWDTUNE_DB"
        yield Finding("database", Status.FAULT, f"{where} is not there, and {parent} cannot be written", advice)
    else:
        yield Finding("database", Status.OK, f"{where} is not there yet: the first search makes it")


def _cache(cache: Path | None) -> Iterator[Finding]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            directory = paths.writable_cache_dir(cache)
        except paths.CacheError as error:
            yield Finding("cache", Status.FAULT, str(error))
            return
    kernels = sum(1 for one in (directory / "kernels").glob("*") if one.is_dir())
    size = sum(one.stat().st_size for one in directory.rglob("*") if one.is_file() and not one.is_symlink())
    free = shutil.disk_usage(directory).free
    text = f"{directory}: {kernels} kernels, {size / 2**20:,.0f} MiB; {free / 2**30:,.1f} GiB are free"
    if caught:
        yield Finding("cache", Status.WARN, text, _one_line(caught[0].message))
    elif free < _LITTLE_SPACE_BYTES:
        yield Finding("cache", Status.WARN, text, "make room: a search compiles dozens of kernels")
    else:
        yield Finding("cache", Status.OK, text)


def _shipped(device: Device | None) -> Iterator[Finding]:
    rows = read_shipped()
    if not rows:
        yield Finding("shipped table", Status.FAULT, f"{TABLE} has no row that can be read", "install bwdtune anew")
        return
    kin = alike(gpu.gpu_key(device).capability) if device else ()
    here = f", {sum(row.gpu.capability in kin for row in rows)} for such a GPU" if device else ""
    yield Finding("shipped table", Status.OK, f"{len(rows)} configurations{here}")


def _settings() -> Iterator[Finding]:
    from ..runtime.dispatch.choices import ON_MISS_VARIABLE, on_miss

    for check in (on_miss, lambda: job_limit(os.environ)):
        try:
            check()
        except BwdtuneError as error:
            yield Finding("settings", Status.FAULT, str(error))
    names = (ON_MISS_VARIABLE, "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "MAX_JOBS", "CXX")
    given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    yield Finding("settings", Status.OK, ", ".join(given) or "all are as they are by default")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
