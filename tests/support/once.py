"""What takes seconds to compute, and follows from the text of package and tests: once for all processes."""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from filelock import FileLock

from bwdtune import gen
from bwdtune.gen.paths import cache_dir

P = ParamSpec("P")
R = TypeVar("R")

_SOURCES = (Path(gen.__file__).parent, Path(__file__).parent)


def once(function: Callable[P, R]) -> Callable[P, R]:
    """Like `functools.cache`, for all of a run's processes and for later runs, until the text changes.

    Arguments must have a ``repr`` that tells them apart, and the result must be what pickle takes.
    """

    @functools.cache
    @functools.wraps(function)
    def found(*arguments: P.args, **options: P.kwargs) -> R:
        name = repr((function.__qualname__, arguments, options))
        key = hashlib.sha256(f"{_text()}\0{name}".encode()).hexdigest()
        kept = cache_dir() / "once" / key
        kept.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{kept}.lock"):
            if not kept.exists():
                draft = kept.with_suffix(".draft")
                draft.write_bytes(pickle.dumps(function(*arguments, **options)))
                draft.replace(kept)
        return pickle.loads(kept.read_bytes())

    return found


@functools.cache
def _text() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for folder in _SOURCES for path in folder.rglob("*.py")):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
