"""The configurations that this version ships: what dispatch falls back to where a user has no winner.

The table is a file of the package, which `tuner ship` writes from a database. A row says where it comes from. None of
them is trusted more than a row of a database: a configuration is checked when it is read, and dispatch uses it only
where its kernel is the one that the row is about, by its machine code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..gen.errors import BwdtuneError
from ..gen.families import Config, config_from_dict
from ..gen.problem import Problem
from .errors import InvalidRecord
from .records import EMULATED, MEASURED, Environment, GpuKey

TABLE = Path(__file__).with_name("shipped.json")
FORMAT = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Race:
    """A kernel of ours beside PyTorch's backward kernels, in one interleaved run.

    Attributes:
        ms: Our median time.
        peers: The median times of PyTorch's: ``cudnn``, ``flash``, ….
        default: Which of them PyTorch takes by default for the problem; empty where that was not looked at.
        source: Where it is recorded: a file of ``benchmarks/results``, or the search whose winner it is.
    """

    ms: float
    peers: Mapping[str, float]
    default: str
    source: str

    def __post_init__(self) -> None:
        if not all(isinstance(time, (int, float)) and time > 0 for time in (self.ms, *self.peers.values())):
            raise InvalidRecord(f"no times: {self.ms} ms beside {dict(self.peers)}")
        if self.default and self.default not in self.peers:
            raise InvalidRecord(f"PyTorch's default is {self.default!r}, which was not timed")

    @property
    def default_ms(self) -> float | None:
        """The time of PyTorch's default."""
        return self.peers.get(self.default)

    @property
    def advantage(self) -> float | None:
        """How many times as fast as PyTorch's default ours was; None where that is not known."""
        return self.default_ms / self.ms if self.default_ms else None


@dataclass(frozen=True)
class Shipped:
    """A configuration that is shipped, and where it comes from.

    Attributes:
        problem: What it was found for.
        config: The configuration, checked.
        gpu: The card that it is for.
        kind: ``measured`` on that card, or ``emulated`` on another one.
        environment: Where it was measured or emulated.
        policy: How it was timed.
        date: When, as ISO 8601, UTC.
        command: What finds such a one again.
        ms: Median time, of a measured one.
        cycles: Median cycles, of an emulated one.
        max_error: Largest relative L2 error of its verification.
        source_hash: Hash of its source. An emulated one was verified and run with dummy mma in it, this is the source
            without.
        template_hash: Hash of its family's templates that the source came from.
        machine_code: Hash of the kernel's machine code, as ``environment.toolkit`` makes it for the GPU's target.
        race: How it did beside PyTorch's kernels; None where it was not raced with them.
    """

    problem: Problem
    config: Config
    gpu: GpuKey
    kind: str
    environment: Environment
    policy: str
    date: str
    command: str
    ms: float | None
    cycles: float | None
    max_error: float
    source_hash: str
    template_hash: str
    machine_code: str | None = None
    race: Race | None = None

    @property
    def origin(self) -> str:
        """Where it comes from, in a few words."""
        where = self.environment.gpu.name
        return f"measured on {where}" if self.kind == MEASURED else f"emulated on {where}, not measured"


def read_shipped(path: Path | None = None) -> tuple[Shipped, ...]:
    """The rows of a table, by default of this version's.

    One that makes no sense is passed over, with a line in the log.
    """
    path = path or TABLE
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        rows = list(table["rows"]) if table["format"] == FORMAT else []
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.warning("the table of shipped configurations %s cannot be read: %s", path, error)
        return ()
    found = []
    for row in rows:
        try:
            found.append(_from_dict(row))
        except (BwdtuneError, TypeError, ValueError, KeyError) as error:
            _log.warning("a row of %s is passed over: %s", path, error)
    return tuple(found)


def write_shipped(rows: Sequence[Shipped], path: Path | None = None) -> Path:
    """Writes a table, by default this version's, in place of what was there: all of it, or nothing.

    Raises:
        OSError: It cannot be written; the table is as it was.
    """
    path = (path or TABLE).resolve()  # behind a link, the file itself is replaced
    table = {"format": FORMAT, "rows": [shipped_to_dict(row) for row in rows]}
    text = json.dumps(table, indent=2, allow_nan=False) + "\n"
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    return path


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def shipped_to_dict(row: Shipped) -> dict[str, Any]:
    """A row as JSON."""
    return {**asdict(row), "problem": row.problem.to_stored(), "config": row.config.to_stored()}


def _from_dict(row: dict[str, Any]) -> Shipped:
    environment = dict(row["environment"])
    environment["gpu"] = GpuKey(**environment["gpu"])
    shipped = Shipped(
        **{
            **row,
            "problem": Problem(**row["problem"]),
            "config": config_from_dict(row["config"]),
            "gpu": GpuKey(**row["gpu"]),
            "environment": Environment(**environment),
            "race": Race(**row["race"]) if row.get("race") else None,
        }
    )
    if shipped.kind not in (MEASURED, EMULATED):
        raise ValueError(f"its kind is {shipped.kind!r}")
    if (shipped.ms if shipped.kind == MEASURED else shipped.cycles) is None:
        raise ValueError(f"it is {shipped.kind} and says not how fast")
    return shipped
