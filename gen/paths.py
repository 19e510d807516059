"""The places outside the package that are written to: the cache of compiled kernels, and the database."""

from __future__ import annotations

import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .errors import BwdtuneError

CACHE_VARIABLE = "BWDTUNE_CACHE"
DATABASE_VARIABLE = "BWDTUNE_DB"
_DATABASE_FILE = "bwdtune.sqlite"


class CacheError(BwdtuneError):
    """The cache directory that was asked for cannot be written."""


def cache_dir(option: Path | None = None) -> Path:
    """The directory to look for compiled kernels in, which may be read-only.

    The order is: ``option``, ``BWDTUNE_CACHE``, ``XDG_CACHE_HOME/bwdtune``, ``HOME/.cache/bwdtune``, and where none of
    them is there or can be made, a private directory under the system's temporary one (with a warning).
    """
    explicit = _explicit_cache_dir(option)
    if explicit:
        return explicit
    # os.path.isdir, unlike Path.is_dir, takes "forbidden" for "no".
    usable = (path for path in _default_cache_dirs() if os.path.isdir(path) or _can_be_written(path))
    return next(usable, None) or _private_dir()


def writable_cache_dir(option: Path | None = None) -> Path:
    """The directory to put compiled kernels into, made where it is missing. The same order as `cache_dir`.

    Raises:
        CacheError: ``option`` or ``BWDTUNE_CACHE`` names a directory that cannot be written. A default is passed over.
    """
    explicit = _explicit_cache_dir(option)
    if explicit:
        try:
            _make_writable(explicit)
        except OSError as error:
            raise CacheError(
                f"cannot write to the cache directory {explicit} ({error.strerror}): "
                f"choose another with --cache or {CACHE_VARIABLE}"
            ) from None
        return explicit
    return next(filter(_can_be_written, _default_cache_dirs()), None) or _private_dir()


def default_database() -> Path | str:
    """The database to use where none is named.

    Returns:
        ``BWDTUNE_DB`` as a path (or as it stands, where it is a database URL), else a file in the user's data, and
        where there is none and none can be made, one in a private directory (with a warning).
    """
    value = os.environ.get(DATABASE_VARIABLE)
    if value:
        return value if "://" in value else _absolute(value)

    import platformdirs  # only here: most callers name a database or a cache

    try:
        directory = platformdirs.user_data_path("bwdtune", appauthor=False)
    except RuntimeError:  # neither HOME nor an entry in the password file
        directory = Path()
    # Older releases then give "~" back as it is, which is a folder of the current directory.
    usable = directory.is_absolute() and (os.path.exists(directory / _DATABASE_FILE) or _could_be_written(directory))
    return (directory if usable else _private_dir()) / _DATABASE_FILE


def _explicit_cache_dir(option: Path | None) -> Path | None:
    value = option or os.environ.get(CACHE_VARIABLE)
    return _absolute(value) if value else None


def _absolute(path: str | Path) -> Path:
    return Path(os.path.expanduser(path)).absolute()  # unlike Path.expanduser it lives without a home


def _default_cache_dirs() -> Iterator[Path]:
    for variable, below in (("XDG_CACHE_HOME", "bwdtune"), ("HOME", ".cache/bwdtune")):
        value = os.environ.get(variable, "")
        # A relative one would follow the current directory; the XDG specification says to ignore it.
        if Path(value).is_absolute():
            yield Path(value, below)


def _make_writable(path: Path) -> None:
    """Raises OSError where no file can be made: permission bits do not tell (root, read-only mounts)."""
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        pass


def _can_be_written(path: Path) -> bool:
    try:
        _make_writable(path)
    except OSError:
        return False
    return True


def _could_be_written(path: Path) -> bool:
    """Whether files could be made in a directory that need not be there yet. Nothing is left there."""
    there = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    try:
        with tempfile.TemporaryFile(dir=there):
            return True
    except OSError:
        return False


@cache
def _private_dir() -> Path:
    """A directory of this user alone. The same for all its processes, unless somebody else holds that name."""
    path = Path(tempfile.gettempdir()).absolute() / f"bwdtune-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        # Compiled code is loaded from here, so a directory that others made or can write to will not do.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="bwdtune-"))
    warnings.warn(
        f"no home or cache directory can be written: using {path}, which may not outlive this machine's next start; "
        f"set {CACHE_VARIABLE} and {DATABASE_VARIABLE} to keep what is built and measured",
        stacklevel=2,
    )
    return path
