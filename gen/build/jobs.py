"""Compiles sources into shared libraries, with ptxas' figures, in a content-addressed cache.

The cache holds one entry (a directory, see `compile_step`) for each key. The key is a hash of the source's text, the
flags, the target and the compiler's version. Entries appear complete and are never changed. A failure or a time-out is
an entry too, so it is paid for only once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..cached import cached_property
from ..errors import BwdtuneError, UsageError
from ..paths import CACHE_VARIABLE, cache_dir, writable_cache_dir
from . import compile_step
from .compile_step import CompiledResources, Job, Record, decides, read_record
from .limits import job_limit
from .toolchain import Compiler, HostCompiler, ToolchainError, find_compiler

if TYPE_CHECKING:
    from ..render import Source

__all__ = [
    "BuildError",
    "Built",
    "CompileError",
    "CompiledResources",
    "Variant",
    "adopt",
    "build",
    "build_one",
    "build_to_send",
    "find_built",
    "job_limit",
]

DEFAULT_TIMEOUT_S = 120.0
MAIN_KERNEL = "backward_kernel"
_ABANDONED_AFTER_S = 24 * 3600.0
_STOP_TIMEOUT_S = 10.0
_RUNTIME = "runtime.o"  # of all libraries of the target host
_OUTPUT_FILE = "build.log"  # of ninja, or of a compile step that does not even begin
_OTHER_CACHE = f"choose another with --cache or {CACHE_VARIABLE}, or have its owner share it"
_log = logging.getLogger(__name__)


class BuildError(BwdtuneError):
    """Nothing can be compiled: no ninja, no space, no place to write to."""


class CompileError(BwdtuneError):
    """One source was not compiled."""


@dataclass(frozen=True)
class Variant:
    """A source that was compiled for a target, or was not.

    Attributes:
        source: What was compiled.
        arch: The target.
        library: The shared library; None unless ``status`` is ``ok``.
        key: Its name in the cache.
        toolchain: The compiler's version: ``13.0.88`` for nvcc, ``g++ 12.2.0`` for the target ``host``.
        resources: Of the main kernel; None where nothing was compiled, or for ``host``.
        status: ``ok``, ``failed`` or ``timeout``.
        error: One line: the first error, how the compiler ended, a hint where there is one. Empty for ``ok``.
        log: All that the compiler said, with the command.
        seconds: The compile took so long, now or when it was done.
        cached: It was not compiled by this call.
        kernels: Of every kernel, by name.
        lasting: The same build would end the same way. Not so where the machine failed it: no space, no memory.
    """

    source: Source
    arch: str
    library: Path | None
    key: str
    toolchain: str
    resources: CompiledResources | None
    status: str
    error: str
    log: Path | None
    seconds: float
    cached: bool
    kernels: dict[str, CompiledResources] = field(default_factory=dict)
    lasting: bool = True

    @cached_property
    def machine_code(self) -> str | None:
        """What tells this kernel from another: the hash of its machine code, read from the library.

        None where nothing was compiled, and for ``host``, which has no machine code of a GPU.

        Raises:
            MachineCodeError: The library was damaged or removed since.
        """
        from .machine_code import machine_code  # only here: the library that reads ELF files takes a while to load

        return machine_code(self.library) if self.library else None


def build(
    sources: Sequence[Source],
    arch: str,
    *,
    cache: Path | None = None,
    jobs: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_done: Callable[[Variant], None] | None = None,
) -> list[Variant]:
    """Compiles sources, several at once, and takes from the cache what is there.

    One that fails, or takes too long, costs the others nothing. What the calling thread raises meanwhile (Ctrl-C, an
    error in ``on_done``) ends all compilers before it goes on; so does the end of this process, however it comes.

    Args:
        sources: What to compile.
        arch: The target, such as ``sm_120a``, or ``host``.
        cache: The cache directory; see `paths.cache_dir`.
        jobs: Compiles at once; see `job_limit` for the default.
        timeout_s: Limit of a compile.
        on_done: Called in this thread with each variant, as soon as it is there.

    Returns:
        The variants, in the order of the sources.

    Raises:
        ToolchainError: No compiler, or not for this target, and not all of the sources are in the cache.
        CacheError: The cache cannot be written, and not all of the sources are in it.
        UsageError: ``jobs`` or ``MAX_JOBS`` is no positive number.
        BuildError: ninja is missing or does not run.
    """
    if jobs is not None and jobs < 1:
        raise UsageError(f"jobs is {jobs}: it must be at least 1")
    entries = cache_dir(cache) / "kernels"
    try:
        compiler = find_compiler(arch)
    except ToolchainError:
        ready = [find_built(source, arch, cache=cache) for source in sources]
        variants = [found[0] for found in ready if found]
        if len(variants) < len(sources):
            raise
        for variant in variants:
            _tell(on_done, variant)
        return variants

    keys = [_key(source, arch, compiler) for source in sources]
    found: dict[str, Variant] = {}
    missing: dict[str, Source] = {}
    for key, source in zip(keys, sources, strict=True):
        if key in found or key in missing:
            continue
        record = read_record(entries / key)
        if record and decides(record, timeout_s):
            found[key] = _variant(source, arch, entries / key, record, cached=True)
            _tell(on_done, found[key])
        else:
            missing[key] = source
    if missing:
        limit = min(jobs or job_limit(os.environ), len(missing))
        building = _build_missing(missing, arch, compiler, writable_cache_dir(cache), limit, timeout_s)
        with contextlib.closing(building):  # at once where on_done raises: an exception in flight would keep it open
            for variant in building:
                found[variant.key] = variant
                _tell(on_done, variant)
    return [found[key] for key in keys]


def build_one(source: Source, arch: str, *, cache: Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Variant:
    """Compiles one source; see `build`.

    Raises:
        CompileError: It was not compiled.
    """
    (variant,) = build([source], arch, cache=cache, timeout_s=timeout_s)
    if variant.status != "ok":
        log = f" (log: {variant.log})" if variant.log else ""
        raise CompileError(f"{source.name} was not compiled for {arch}: {variant.error}{log}")
    return variant


def _key(source: Source, arch: str, compiler: Compiler) -> str:
    digest = _digest(source.text, *compiler.flags(arch), arch, compiler.version, compiler.fingerprint)
    return f"{source.hash}-{arch}-{digest}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def find_built(source: Source, arch: str, *, cache: Path | None = None) -> list[Variant]:
    """A source's libraries that are in the cache, one for each compiler that has made one; the newest first.

    Unlike `build` it needs no compiler, and starts no process to ask one for its version.
    """
    entries = cache_dir(cache) / "kernels"
    ready = [(path, read_record(path)) for path in entries.glob(f"{source.hash}-{arch}-*")]
    usable = [(path.stat().st_mtime, path, record) for path, record in ready if record and record.status == "ok"]
    newest_first = sorted(usable, key=lambda item: item[:2], reverse=True)
    return [_variant(source, arch, path, record, cached=True) for _, path, record in newest_first]


@dataclass(frozen=True)
class Built:
    """A variant on its way to another machine.

    Attributes:
        variant: As it is where it was compiled.
        files: The content of its entry in the cache there, by file name.
    """

    variant: Variant
    files: Mapping[str, bytes]


def build_to_send(source: Source, arch: str) -> Built:
    """Compiles a source, or takes it from this machine's cache, for another machine.

    Raises:
        BwdtuneError: As `build`.
    """
    (variant,) = build([source], arch, jobs=1)
    entry = cache_dir() / "kernels" / variant.key
    files = {path.name: path.read_bytes() for path in entry.iterdir()} if entry.is_dir() else {}
    return Built(variant, files)


def adopt(built: Built, *, cache: Path | None = None) -> Variant:
    """Keeps what another machine has compiled, as if that had been here.

    Args:
        built: What `build_to_send` made there.
        cache: The cache directory; see `paths.cache_dir`.

    Raises:
        BuildError: The cache cannot be written.
        CompileError: It is not whole.
    """
    variant, here = built.variant, writable_cache_dir(cache)
    entry = here / "kernels" / variant.key
    if not built.files:  # a failure that did not even leave an entry
        return replace(variant, library=None, log=None)
    if read_record(entry) is None:
        with _directory(here / "work") as work:
            draft = work / "entry"
            draft.mkdir()
            for name, content in built.files.items():
                (draft / Path(name).name).write_bytes(content)
            entry.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                entry.rename(work / "replaced")
            try:
                draft.rename(entry)
            except OSError as error:
                if read_record(entry) is None:  # else another process was quicker
                    raise BuildError(
                        f"cannot write to the cache directory {here} ({error.strerror}): {_OTHER_CACHE}"
                    ) from None
    record = read_record(entry)
    if record is None:
        raise CompileError(f"{variant.source.name} arrived damaged from another machine: try again")
    return _variant(variant.source, variant.arch, entry, record, cached=False)


def _variant(source: Source, arch: str, entry: Path, record: Record, *, cached: bool) -> Variant:
    log = entry / compile_step.LOG_FILE
    return Variant(
        source=source,
        arch=arch,
        library=entry / record.library if record.library else None,
        key=entry.name,
        toolchain=record.toolchain,
        resources=next((figures for name, figures in record.kernels.items() if MAIN_KERNEL in name), None),
        status=record.status,
        error=record.error,
        log=log if log.exists() else None,
        seconds=record.seconds,
        cached=cached,
        kernels=record.kernels,
        lasting=record.lasting,
    )


def _tell(on_done: Callable[[Variant], None] | None, variant: Variant) -> None:
    if on_done:
        on_done(variant)


def _build_missing(
    missing: dict[str, Source], arch: str, compiler: Compiler, cache: Path, jobs: int, timeout_s: float
) -> Generator[Variant, None, None]:
    """Yields each variant when it is there."""
    _remove_abandoned(cache / "work")
    with _directory(cache / "work") as work, _directory(None) as scratch:

        def job(index: int, key: str, directory: Path, command: list[str], result: str) -> Job:
            return Job(
                number=index,
                directory=str(directory),
                entry=str(cache / "kernels" / key),
                lock=str(cache / "locks" / f"{key}.lock"),
                command=command,
                library=result,
                scratch=str(scratch),
                timeout_s=timeout_s,
                toolchain=compiler.version,
            )

        def kernel_job(index: int, attempt: int) -> Job:
            key, source = kernels[index]
            directory = work / f"{index}.{attempt}"
            directory.mkdir()
            name, library = f"{source.name}.cu", f"{source.name}.so"
            (directory / name).write_text(source.text, encoding="utf-8")
            return job(index, key, directory, _command(compiler, arch, name, library, scratch, runtime), library)

        kernels, runtime = list(missing.items()), None
        if isinstance(compiler, HostCompiler):
            runtime, failure = _runtime(compiler, cache, job, work, timeout_s)
            if failure:
                for key, source in kernels:
                    yield replace(_variant(source, arch, runtime.parent, failure, cached=False), key=key)
                return
        for index, record in _run_twice(range(len(kernels)), kernel_job, work, jobs):
            key, source = kernels[index]
            yield _variant(source, arch, cache / "kernels" / key, record, cached=False)


def _runtime(
    compiler: HostCompiler, cache: Path, job: Callable[..., Job], work: Path, timeout_s: float
) -> tuple[Path, Record | None]:
    """What all libraries of the target ``host`` are linked with, made once a cache; and how that failed, if it did."""
    key = f"runtime-{_digest(compiler.version, compiler.fingerprint)}"
    record = read_record(cache / "kernels" / key)
    if record is None or not decides(record, timeout_s):

        def runtime_job(index: int, attempt: int) -> Job:
            directory = work / f"runtime.{attempt}"
            directory.mkdir()
            return job(index, key, directory, compiler.runtime_command(_RUNTIME), _RUNTIME)

        ((_, record),) = _run_twice([0], runtime_job, work, 1)
    return cache / "kernels" / key / _RUNTIME, record if record.status != "ok" else None


def _run_twice(
    indices: Iterable[int], job: Callable[[int, int], Job], work: Path, jobs: int
) -> Generator[tuple[int, Record], None, None]:
    """Runs jobs, made by index and attempt. What was killed, or never reported, runs again, alone.

    It may have been too much for the memory beside others.
    """
    pending = list(indices)
    for attempt in (1, 2):
        try:
            batch = [job(index, attempt) for index in pending]
        except OSError as error:
            cache = work.parent.parent
            raise BuildError(
                f"cannot write to the cache directory {cache} ({error.strerror}): {_OTHER_CACHE}"
            ) from None
        with contextlib.closing(_run(batch, work, jobs if attempt == 1 else 1)) as reports:
            for index, record in reports:
                if not (record.killed and attempt == 1):
                    pending.remove(index)
                    yield index, record
        if not pending:
            return
    for one in batch:
        reason = "the compile was killed twice, the second time with no other beside it: is memory short?"
        yield one.number, Record("failed", reason, False, True, "", "", one.timeout_s, 0.0, one.toolchain, {})


def _command(
    compiler: Compiler, arch: str, source: str, library: str, scratch: Path, runtime: Path | None
) -> list[str]:
    """The compiler's command line, to be run in the directory of the source."""
    if isinstance(compiler, HostCompiler):
        return compiler.command(arch, source, library, runtime=runtime)
    if _plain(compiler.nvcc):
        return compiler.command(arch, source, library)
    # nvcc pastes the path that it was called by into shell commands: where that breaks them, it is called by a link.
    link = scratch / "toolkit"
    with contextlib.suppress(FileExistsError):
        link.symlink_to(compiler.nvcc.parent.parent)
    return compiler.command(arch, source, library, nvcc=link / compiler.nvcc.parent.name / compiler.nvcc.name)


def _run(batch: list[Job], work: Path, jobs: int) -> Generator[tuple[int, Record], None, None]:
    """Runs the jobs and yields each one's index and record when it is done; nothing for one whose process died.

    Several are ninja's to schedule. One alone, which is what a search builds at a time, needs no scheduler.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, contextlib.ExitStack() as stack:
        with theirs:
            for job in batch:
                (work / f"{job.number}.json").write_text(json.dumps(job._asdict()), encoding="utf-8")
            if len(batch) == 1:
                command = compile_step.command(f"{batch[0].number}.json", theirs.fileno())
            else:
                _write_ninja_file(batch, work, theirs.fileno())
                command = [str(_find_ninja()), "-k0", f"-j{jobs}"]  # -k0: the failure of one does not end the others
            running = stack.enter_context(_running(command, work, theirs.fileno()))
        started, left = False, len(batch)
        # The socket ends when nobody holds its other end any more, neither ninja nor a compile: one has died then.
        while left and (message := ours.recv(1 << 20)):
            report = json.loads(message)
            started = True
            if report["event"] == "done":
                left -= 1
                yield report["index"], Record.from_dict(report["record"])
            elif report["event"] == "waiting":
                _log.warning(
                    "waiting for %s, which is compiling the same kernel (lock: %s)", report["owner"], report["lock"]
                )
        running.wait()
        if not started:
            said = compile_step.first_error((work / _OUTPUT_FILE).read_text(encoding="utf-8", errors="replace"))
            raise BuildError(f"{Path(command[0]).name} does not run the compiles: {said}")


def _write_ninja_file(batch: list[Job], work: Path, descriptor: int) -> None:
    """Files are named by numbers, relative to ``work``."""
    lines = ["rule compile", "  command = $step"]
    for job in batch:
        step = shlex.join(compile_step.command(f"{job.number}.json", descriptor)).replace("$", "$$")
        lines += [f"build {job.number}: compile {job.number}.json", f"  step = {step}"]
    (work / "build.ninja").write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _running(command: list[str], work: Path, descriptor: int) -> Iterator[subprocess.Popen[bytes]]:
    """Ninja or a compile step, in a session of its own: Ctrl-C is for this process, which then ends it.

    Where Ctrl-C comes while it is being started, the socket that this process then closes ends it.
    """
    with (work / _OUTPUT_FILE).open("wb") as output:
        try:
            running = subprocess.Popen(
                command,
                cwd=work,
                # Hints are found by English messages. make's job server is not asked: the number of jobs is decided.
                env={**_without(os.environ, "MAKEFLAGS", "NINJA_STATUS"), "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(descriptor,),
                start_new_session=True,
            )
        except OSError as error:
            raise BuildError(f"{Path(command[0]).name} does not run: {error}") from None
    try:
        yield running
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGINT)  # ninja passes it on to the compiles, which end their compilers
            try:
                running.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()


def _find_ninja() -> Path:
    """The program of the pip package, else of ``PATH``."""
    with contextlib.suppress(ImportError):
        import ninja  # only here: nothing else of it is used

        program = Path(ninja.BIN_DIR, "ninja")
        if os.access(program, os.X_OK):
            return program
    found = shutil.which("ninja")
    if not found:
        raise BuildError("ninja is not found: pip install ninja")
    return Path(found).absolute()


def _without(variables: os._Environ[str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def _plain(path: Path) -> bool:
    """Whether a path stays one word in a shell command without quotes."""
    return re.fullmatch(r"[A-Za-z0-9_./+@%=,-]+", str(path)) is not None


@contextlib.contextmanager
def _directory(parent: Path | None) -> Iterator[Path]:
    """A private directory for the time of the block, in ``parent``; with None, a temporary one whose path is plain."""
    advice = _OTHER_CACHE
    if parent is None:
        advice = "set TMPDIR to a directory that can be written"
        usual = Path(tempfile.gettempdir()).absolute()
        parent = usual if _plain(usual) else Path("/tmp")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(dir=parent, prefix="bwdtune-"))
    except OSError as error:
        raise BuildError(f"cannot make a directory in {parent} ({error.strerror}): {advice}") from None
    try:
        yield path
    finally:
        # What was built is elsewhere by now: a failure here is not one of the build.
        shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(work: Path) -> None:
    """Removes what processes that were killed have left, a day later."""
    with contextlib.suppress(OSError):
        for path in list(work.iterdir()):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                    shutil.rmtree(path, ignore_errors=True)
