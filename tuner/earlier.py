"""What an earlier version makes of a problem and a configuration: its text, for comparison with today's.

The earlier version runs in a process of its own, with nothing but its own modules, so that today's do not matter to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..gen.errors import BwdtuneError, UsageError
from ..gen.families import Config
from ..gen.problem import Problem
from ..gen.render import Source, render

_REPOSITORY = Path(__file__).resolve().parent.parent
_LONGEST_RENDERING_S = 300

# Runs in the earlier version. Configurations come by the names that they are stored under, which every version reads.
_PROGRAM = """
import json, sys
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
try:
    from bwdtune.gen.families import config_from_dict
except ImportError:
    from bwdtune.gen.config import config_from_dict
for line in sys.stdin:
    asked = json.loads(line)
    options = {"emulate": asked["emulate"]} if asked["emulate"] else {}
    source = render(Problem(**asked["problem"]), config_from_dict(asked["config"]), **options)
    print(json.dumps({"text": source.text, "hash": source.hash}), flush=True)
"""

Asked = tuple[Problem, Config, str | None]
"""A problem, a configuration, and the card that is emulated, if any."""


class Earlier:
    """An earlier version's templates. Make one with `earlier`."""

    def __init__(self, parent: Path, name: str) -> None:
        """
        Args:
            parent: The folder that holds the version as the package ``bwdtune``.
            name: The version's, for people.
        """
        self._parent = parent
        self.name = name

    def render(self, asked: Sequence[Asked]) -> list[Source]:
        """Renders all of them.

        Raises:
            BwdtuneError: The earlier version cannot, with its own reason.
        """
        lines = [
            json.dumps({"problem": _stated(problem), "config": config.to_stored(), "emulate": emulate})
            for problem, config, emulate in asked
        ]
        answer = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input="\n".join(lines),
            env={**os.environ, "PYTHONPATH": str(self._parent), "PYTHONSAFEPATH": "1"},
            cwd=self._parent,
            text=True,
            capture_output=True,
            timeout=_LONGEST_RENDERING_S,
        )
        if answer.returncode:
            reason = (answer.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise BwdtuneError(f"{self.name} does not render: {reason}")
        texts = [json.loads(line)["text"] for line in answer.stdout.splitlines()]
        return [
            Source(problem.kernel_spec, config, text, emulate, emulate is not None)
            for (problem, config, emulate), text in zip(asked, texts, strict=True)
        ]


def _stated(problem: Problem) -> dict[str, Any]:
    """What of a problem is not a default's: an earlier version does not know what has come since."""
    defaults = {one.name: one.default for one in fields(problem)}
    return {name: value for name, value in problem.to_stored().items() if value != defaults[name]}


def render_today(asked: Sequence[Asked]) -> list[Source]:
    """The same of this version."""
    return [render(problem, config, emulate=emulate) for problem, config, emulate in asked]


@contextlib.contextmanager
def earlier(version: str) -> Iterator[Earlier]:
    """An earlier version: a commit of the repository that this package lies in, or a folder that holds the package.

    Args:
        version: What git takes for a commit, or a folder with ``gen`` and ``templates`` in it.

    Raises:
        UsageError: It is neither.
    """
    with tempfile.TemporaryDirectory(prefix="bwdtune-earlier-") as folder:
        package = Path(folder) / "bwdtune"
        given = Path(version).expanduser()
        if (given / "gen").is_dir() and (given / "templates").is_dir():
            package.symlink_to(given.resolve(), target_is_directory=True)
        else:
            _check_out(version, package)
        yield Earlier(Path(folder), version)


def _check_out(commit: str, package: Path) -> None:
    command = ["git", "-C", str(_REPOSITORY), "archive", "--format=tar", commit]
    try:
        archive = subprocess.run(command, capture_output=True)
    except OSError:
        raise UsageError(f"{commit} is no folder with the package in it, and git is not installed") from None
    if archive.returncode:
        reason = archive.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UsageError(
            f"{commit} is neither a commit of {_REPOSITORY} nor a folder with the package in it"
            + "".join(f" ({line.removeprefix('fatal: ')})" for line in reason)
        )
    package.mkdir()
    subprocess.run(["tar", "-x", "-C", str(package)], input=archive.stdout, check=True)
