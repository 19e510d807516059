"""One compile: under a lock, with a time limit, in a private directory that is renamed into place when it is complete.

`command` starts one process for each compile, which runs `main`. It therefore imports only the standard library, and of
that little: dataclasses, pathlib, socket, subprocess and tempfile take longer than the rest of it. It shares only the
file system with others: several processes may build into one cache.

What it publishes, by one rename, is an entry: the source, the library, the compiler's output and a `Record` of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import select
import shlex
import signal
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

RECORD_FILE = "variant.json"
LOG_FILE = "compile.log"
_ANNOUNCED_WAIT_S = 3.0  # a wait for another process that is longer than this is told
_POLL_S = 0.05
_LONGEST_LINE = 200
_LITTLE_SPACE_BYTES = 1 << 20
_ELF_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_ELF_OBJECT, _ELF_SHARED = 1, 3  # ET_REL, ET_DYN
_ELF_HEADER = struct.Struct("<6s10xH22xQ10xHH2x")  # e_ident, e_type, e_shoff, e_shentsize, e_shnum


class CompiledResources(NamedTuple):
    """What ptxas says of one kernel (``-Xptxas -v``).

    Attributes:
        registers: A thread.
        spill_bytes: A thread's spill stores and loads, together.
        stack_bytes: A thread's stack frame.
        shared_memory_bytes: A block's static shared memory; what a launch asks for comes on top.
        barriers: Named barriers of a block.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_memory_bytes: int
    barriers: int


class Job(NamedTuple):
    """What ninja's process is told: a JSON file.

    Attributes:
        number: Which its reports carry.
        directory: Private, holds the source already; becomes the entry.
        entry: Where it is published.
        lock: The lock file of that entry.
        command: The compiler's, run in ``directory``.
        library: File name of what it makes.
        scratch: Where the compiler's own temporary files go: a path that survives the shell commands that nvcc writes.
        timeout_s: Limit of the compile, not of a wait for the lock.
        toolchain: The compiler's version, to be recorded.
    """

    number: int
    directory: str
    entry: str
    lock: str
    command: list[str]
    library: str
    scratch: str
    timeout_s: float
    toolchain: str


class Record(NamedTuple):
    """How a compile went.

    Attributes:
        status: ``ok``, ``failed`` or ``timeout``.
        error: One line; empty for ``ok``.
        lasting: Whether the same compile would go the same way again. Not so where the machine failed it: no space, a
            missing header, a compiler that was killed.
        killed: Whether the compiler was killed from outside (as when memory runs out): worth a second try.
        library: File name in the entry; empty where there is none.
        library_sha256: Of its content: a file with another is no result.
        timeout_s: The limit that it ran under.
        seconds: How long it took.
        toolchain: The compiler's version.
        kernels: Name of each kernel to its `CompiledResources`.
    """

    status: str
    error: str
    lasting: bool
    killed: bool
    library: str
    library_sha256: str
    timeout_s: float
    seconds: float
    toolchain: str
    kernels: dict[str, CompiledResources]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        kernels = {name: CompiledResources(**figures) for name, figures in values.pop("kernels").items()}
        return cls(**values, kernels=kernels)

    def to_dict(self) -> dict[str, Any]:
        return self._asdict() | {"kernels": {name: figures._asdict() for name, figures in self.kernels.items()}}


class Stopped(Exception):
    """The build that this compile is part of is to end."""


class Orphaned(Stopped):
    """The process that this compile was for has ended."""


def command(job_file: str, descriptor: int) -> list[str]:
    """The command that compiles what a `Job` says.

    A script would be compiled anew each time: this is a module, whose bytecode the importing process has left. With
    ``-B`` the step itself leaves nothing.

    Args:
        job_file: The job, as JSON.
        descriptor: The socket of the build that the process is part of, for its reports.
    """
    run = "import sys; sys.path.append(sys.argv[1]); import compile_step; sys.exit(compile_step.main(*sys.argv[2:]))"
    return [sys.executable, "-ISB", "-c", run, os.path.dirname(os.path.realpath(__file__)), job_file, str(descriptor)]


def read_record(entry: str | os.PathLike[str]) -> Record | None:
    """The record of an entry that is whole; None where there is none, or a part of it was lost or replaced."""
    try:
        with open(os.path.join(entry, RECORD_FILE), encoding="utf-8") as file:
            record = Record.from_dict(json.load(file))
        whole = record.status != "ok" or _sha256(os.path.join(entry, record.library)) == record.library_sha256
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return record if whole else None


def decides(record: Record | None, timeout_s: float) -> bool:
    """Whether a record answers for a new compile under that limit: a time-out does up to the limit it ran under."""
    return record is not None and record.lasting and (record.status != "timeout" or record.timeout_s >= timeout_s)


def parse_ptxas(text: str) -> dict[str, CompiledResources]:
    """The figures of each kernel in the output of ``-Xptxas -v``, by the kernel's unmangled name."""
    kernels: dict[str, CompiledResources] = {}
    parts = re.split(r"Compiling entry function '([^']+)' for '[^']+'", text)
    for mangled, figures in zip(parts[1::2], parts[2::2], strict=True):
        # Functions that were not inlined have properties of their own, before or after the kernel's.
        own = re.search(
            rf"Function properties for {re.escape(mangled)}\s+"
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
            figures,
        )
        used = re.search(r"Used (\d+) registers.*", figures)
        if own and used:
            barriers = re.search(r"used (\d+) barriers", used[0])
            shared = re.search(r"(\d+) bytes smem", used[0])
            kernels[_unmangled(mangled)] = CompiledResources(
                registers=int(used[1]),
                spill_bytes=int(own[2]) + int(own[3]),
                stack_bytes=int(own[1]),
                shared_memory_bytes=int(shared[1]) if shared else 0,
                barriers=int(barriers[1]) if barriers else 0,
            )
    return kernels


def _unmangled(name: str) -> str:
    """The last identifier of a mangled name (``_ZN7bwdtune15backward_kernelEPf``); an ``extern "C"`` one as it is."""
    start = re.match(r"_ZN?L?", name)
    rest, last = (name[start.end() :], name) if start else ("", name)
    while length := re.match(r"L?(\d+)", rest):
        end = length.end() + int(length[1])
        last, rest = rest[length.end() : end], rest[end:]
    return last


_ERROR_LINE = re.compile(
    r"\berror\s*:|\berror #|\bfatal\b|\bptxas error\b|undefined reference|cannot find -l|not found$|died due to signal|"
    r"Killed|No space left on device",
)
_SERIALIZED_WGMMA = re.compile(r".*wgmma\.mma_async instructions are serialized.*")
"""Of ptxas (C7510 to C7514), where it cannot keep track of an accumulator: right, but too slow to be of any use."""

_HINTS = (
    (r"No space left on device", "no space left: free some, or move the cache (BWDTUNE_CACHE) or TMPDIR"),
    (r"unsupported GNU version", "this g++ is newer than nvcc takes: install an older one and set NVCC_CCBIN to it"),
    (r"fatal error: \S+: No such file|cannot open source", "a header is missing: the toolkit is not complete"),
    (r"cannot find -lcuda", "a library is missing: the toolkit is not complete"),
    (r"(gcc|g\+\+|cc1plus): .*not found|Failed to preprocess host compiler", "install g++: nvcc needs it"),
)
"""Failures of the machine, not of the source."""


def first_error(log: str) -> str:
    """The line of a compiler's output that says what went wrong; the last one where none says so."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else "the compiler said nothing"
    line = next((line for line in lines if _ERROR_LINE.search(line)), last)
    return line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…"


def _hint(log: str, directories: list[str]) -> str | None:
    for pattern, hint in _HINTS:
        if re.search(pattern, log):
            return hint
    free = ((path, os.statvfs(path)) for path in directories)
    full = [path for path, space in free if space.f_bavail * space.f_frsize < _LITTLE_SPACE_BYTES]
    return f"no space left in {full[0]}" if full else None


def _signal_of(exit_status: int, log: str) -> int:
    """The signal that ended the compiler, or a part of it that it then reports on; 0 where none did."""
    if exit_status < 0:
        return -exit_status
    reported = re.search(r"died due to signal (\d+)", log)
    if reported:
        return int(reported[1])
    part = re.search(r"error: (.+) signal terminated program\b", log)  # gcc's words; the signal has the system's
    if part:
        return next((number for number in signal.Signals if signal.strsignal(number) == part[1]), 0)
    return exit_status - 128 if 128 < exit_status < 128 + signal.NSIG else 0  # as a shell that nvcc ran reports it


def _failure(job: Job, exit_status: int, log: str, seconds: float) -> Record:
    number = _signal_of(exit_status, log)
    killed = number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    if number:
        names = {member.value: member.name for member in signal.Signals}
        ended = f"the compiler was ended by {names.get(number, f'signal {number}')}"
        hint = "is memory short? lower MAX_JOBS" if number == signal.SIGKILL else None
    else:
        ended = f"exit status {exit_status}"
        hint = _hint(log, [job.directory, job.scratch])
    error = "; ".join(filter(None, (first_error(log), ended, hint)))
    return _failed(job, "failed", error, seconds, lasting=not number and not hint, killed=killed)


def _failed(job: Job, status: str, error: str, seconds: float, *, lasting: bool, killed: bool = False) -> Record:
    return Record(
        status=status,
        error=error,
        lasting=lasting,
        killed=killed,
        library="",
        library_sha256="",
        timeout_s=job.timeout_s,
        seconds=round(seconds, 3),
        toolchain=job.toolchain,
        kernels={},
    )


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _is_whole_library(path: str) -> bool:
    """Whether a library, or an object, has all its sections: of a compiler that is cut off a part may be left."""
    with open(path, "rb") as file:
        header = file.read(_ELF_HEADER.size)
        if len(header) < _ELF_HEADER.size:
            return False
        magic, kind, sections_offset, section_bytes, sections = _ELF_HEADER.unpack(header)
        known = magic == _ELF_MAGIC and kind in (_ELF_OBJECT, _ELF_SHARED)
        return known and sections_offset + section_bytes * sections <= file.seek(0, os.SEEK_END)


class _Build:
    """The build that this process works for.

    At the other end of a socket, whose descriptor this takes, it hears reports, and its end is noticed. Signals that
    are to stop this process are noticed in the same place and nowhere else: an exception out of a handler might come
    while the compiler is being started, and leave it running.
    """

    def __init__(self, connection: int) -> None:
        os.set_inheritable(connection, False)  # what a compiler leaves running would keep it open
        self._connection = connection
        self._signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)  # Python writes to the wakeup pipe
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def report(self, **message: object) -> None:
        try:
            os.write(self._connection, json.dumps(message).encode())  # of a socket that keeps messages apart
        except OSError:
            raise Orphaned from None

    def wait(self, seconds: float) -> None:
        """Sleeps.

        Raises:
            Stopped: A signal came.
            Orphaned: The build has ended, however it did: its end of the socket is then closed.
        """
        ready, _, _ = select.select([self._connection, self._signals], [], [], seconds)
        if self._signals in ready:
            raise Stopped
        if ready:
            raise Orphaned


@contextlib.contextmanager
def _locked(job: Job, build: _Build) -> Iterator[None]:
    """Holds the entry's lock. It is the operating system's and dies with its holder; the file itself means nothing."""
    os.makedirs(os.path.dirname(job.lock), exist_ok=True)
    descriptor = os.open(job.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        announce_at = time.monotonic() + _ANNOUNCED_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    break  # a file system without locks: publishing is atomic all the same, the work may be done twice
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                    raise
            if time.monotonic() >= announce_at:
                owner = os.pread(descriptor, 100, 0).decode(errors="replace").strip()
                build.report(event="waiting", index=job.number, lock=job.lock, owner=owner or "an unknown process")
                announce_at = float("inf")
            build.wait(_POLL_S)
        with contextlib.suppress(OSError):  # only to be told to others
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _scratch(parent: str) -> Iterator[str]:
    """A directory of this process for the time of the block."""
    path = os.path.join(parent, str(os.getpid()))
    os.mkdir(path)
    try:
        yield path
    finally:
        try:
            os.rmdir(path)
        except OSError:  # a compiler that was ended has left something
            _remove(path)


def _remove(directory: str) -> None:
    import shutil  # only here: it takes longer to import than most compiles need of it

    shutil.rmtree(directory, ignore_errors=True)


def _start(command: list[str], environment: dict[str, str], output: int) -> int:
    """Starts a program in this process's directory, in a session of its own; its number."""
    return os.posix_spawnp(
        command[0],
        command,
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
            (os.POSIX_SPAWN_DUP2, output, 2),
        ],
        setsid=True,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores
    )


def _compile(job: Job, build: _Build) -> Record:
    """Runs the compiler in a session of its own, so that all that it started can be ended with it."""
    started = time.monotonic()
    os.chdir(job.directory)
    with _scratch(job.scratch) as scratch, open(LOG_FILE, "w+b") as output:
        try:
            compiler = _start(job.command, {**os.environ, "TMPDIR": scratch}, output.fileno())
        except OSError as error:
            return _failed(job, "failed", f"{job.command[0]} does not run: {error.strerror}", 0, lasting=False)
        ended, status = 0, 0
        try:
            while time.monotonic() - started < job.timeout_s:
                ended, status = os.waitpid(compiler, os.WNOHANG)
                if ended:
                    break
                build.wait(_POLL_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(compiler, signal.SIGKILL)  # also what a compiler that has ended left running
            if not ended:
                _, status = os.waitpid(compiler, 0)
        exit_status = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - started
        output.seek(0)
        log = output.read().decode(errors="replace")
    with open(LOG_FILE, "w", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(job.command)}\n{log}")

    library = os.path.join(job.directory, job.library)
    if not ended:
        return _failed(job, "timeout", f"not compiled within {job.timeout_s:g} s", seconds, lasting=True)
    if exit_status or not os.path.isfile(library):
        return _failure(job, exit_status, log, seconds)
    if not _is_whole_library(library):
        part = (
            f"the compiler said it was done, but left a library that is not whole: {os.path.getsize(library):,} bytes"
        )
        hint = _hint(log, [job.directory, job.scratch])
        return _failed(job, "failed", "; ".join(filter(None, (part, hint))), seconds, lasting=False)
    if serialized := _SERIALIZED_WGMMA.search(log):
        return _failed(job, "failed", serialized[0].strip(), seconds, lasting=True)
    return Record(
        status="ok",
        error="",
        lasting=True,
        killed=False,
        library=job.library,
        library_sha256=_sha256(library),
        timeout_s=job.timeout_s,
        seconds=round(seconds, 3),
        toolchain=job.toolchain,
        kernels=parse_ptxas(log),
    )


def _publish(job: Job, record: Record) -> None:
    """Makes the private directory the entry, whole, in place of one that decides nothing."""
    with open(os.path.join(job.directory, RECORD_FILE), "w", encoding="utf-8") as file:
        file.write(json.dumps(record.to_dict()))
    os.makedirs(os.path.dirname(job.entry), exist_ok=True)
    for delay_s in (0.0, 0.1, 0.5, 2.0):
        time.sleep(delay_s)  # a network file system may say "busy" for a while
        try:
            with contextlib.suppress(FileNotFoundError):
                os.rename(job.entry, f"{job.directory}.replaced{delay_s}")
            os.rename(job.directory, job.entry)
            return
        except OSError as error:
            failure = error
    raise failure


def _run(job: Job, build: _Build) -> Record:
    """The record of an entry that is there or was made: looking, compiling and publishing happen under one lock."""
    started = time.monotonic()
    try:
        with _locked(job, build):
            record = read_record(job.entry)
            if record is None or not decides(record, job.timeout_s):
                record = _compile(job, build)
                _publish(job, record)
            return record
    except OSError as error:
        hints = {
            errno.ENOSPC: "; free some, or move the cache (BWDTUNE_CACHE) or TMPDIR",
            errno.EACCES: "; choose another cache with --cache or BWDTUNE_CACHE, or have its owner share it",
        }
        hint = hints.get(error.errno or 0, "")
        where = f" ({error.filename})" if error.filename else ""
        message = f"cannot write what was compiled: {error.strerror}{where}{hint}"
        return _failed(job, "failed", message, time.monotonic() - started, lasting=False)


def main(job_file: str, descriptor: str) -> int:
    """The process. Exit status: 0 compiled, 1 not compiled, 130 stopped."""
    try:
        with open(job_file, encoding="utf-8") as file:
            job = Job(**json.load(file))
        build = _Build(int(descriptor))
        build.report(event="started", index=job.number)
        record = _run(job, build)
        build.report(event="done", index=job.number, record=record.to_dict())
    except Orphaned:
        # Nobody else is left to do it. Other compiles of the same build may be at it too.
        for directory in (os.path.dirname(job.directory), job.scratch):
            _remove(directory)
        return 130
    except Stopped:
        return 130
    return 0 if record.status == "ok" else 1
