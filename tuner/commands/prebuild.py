"""``tuner prebuild``: compiles what dispatch will choose, so that no training step has to wait or do without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...gen.device import Device, device_for_arch
from ...gen.errors import BwdtuneError, UsageError
from ...gen.families import short_form
from ...gen.problem import Problem
from .cards import gpu_here
from .model_config import problems_of_model
from .options import ArchOption, CacheOption, DatabaseOption, JsonOption, for_shapes
from .output import print_result

if TYPE_CHECKING:
    from rich.table import Table

    from ...runtime.dispatch.warming import Warmed


@for_shapes
def command(
    described: Callable[[str], Problem],
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="B_H_S_D, or B_HQ_HKV_S_D for grouped queries; may be repeated."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", help="A Hugging Face config.json (or its folder): the attention of its layers."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="With --model: sequences.")] = 1,
    length: Annotated[int | None, typer.Option("--length", help="With --model: their length.")] = None,
    arch: ArchOption = None,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Compile the kernels that will be chosen for shapes or a model, and PyTorch's operator for them.

    Training then finds them in the cache from its first step on. With --arch it needs no GPU; a kernel whose machine
    code differs from what was timed, as by another nvcc, is then verified where it is first used.
    Exit status 1: a kernel that would be chosen cannot be made.
    """
    problems = [described(shape) for shape in shapes or ()]
    if model is not None:
        if length is None:
            raise UsageError("--model says nothing of lengths: give --length, and --batch")
        problems += problems_of_model(model, batch, length, described)
    if not problems:
        raise UsageError("nothing to build: give --shape, or --model with --length")
    device = gpu_here() if arch is None else device_for_arch(arch)
    found = prebuild(list(dict.fromkeys(problems)), device, database=database, cache=cache)
    print_result(found.to_dict(), [found.table(), *found.notes()], as_json)
    return 1 if found.failed else 0


@dataclass(frozen=True)
class Prebuilt:
    """What there is after all has been built.

    Attributes:
        device: The card that kernels were chosen for.
        problems: One for each problem.
        operator: How the C++ operator was had: ``built`` or ``there``; empty where it cannot be.
        operator_error: Why not.
        database_error: Why the database cannot be read, where that is so.
    """

    device: Device
    problems: tuple[Warmed, ...]
    operator: str
    operator_error: str = ""
    database_error: str = ""

    @property
    def failed(self) -> bool:
        """Whether something that would be used cannot be had."""
        from ...runtime.dispatch.records import Cause

        return not self.operator or any(one.choice.cause == Cause.UNUSABLE for one in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``tuner prebuild --json``."""
        return {
            "device": self.device.name,
            "arch": self.device.arch,
            "operator": self.operator or None,
            "operator_error": self.operator_error or None,
            "database_error": self.database_error or None,
            "problems": [_to_dict(one) for one in self.problems],
        }

    def table(self) -> Table:
        """One row a problem."""
        from rich.table import Table

        table = Table(title=f"kernels for {self.device.name} ({self.device.arch})")
        for heading in ("problem", "kernel", "state", "why"):
            table.add_column(heading, overflow="fold")
        for one in self.problems:
            row = one.choice.row
            table.add_row(
                one.problem.label,
                short_form(row.config) if row else "PyTorch",
                one.state if one.choice.kernel else "compiled" if row else "-",
                one.choice.reason,
            )
        return table

    def notes(self) -> list[str]:
        """What a table of problems does not say."""
        operator = self.operator or f"cannot be had: {self.operator_error}"
        trouble = [f"stored winners do not count: {self.database_error}"] if self.database_error else []
        return [f"the C++ operator: {operator}", *trouble]


def prebuild(
    problems: Sequence[Problem], device: Device, *, database: str | None = None, cache: Path | None = None
) -> Prebuilt:
    """Builds into the cache what dispatch chooses for problems on a card, and the operator for this PyTorch.

    Args:
        problems: The problems.
        device: The card, which need not be here.
        database: A path or a URL; None for the default.
        cache: The cache directory; None for the default.

    Raises:
        DatabaseError: A database that was named cannot be read.
        UsageError: ``MAX_JOBS`` is no positive number.
    """
    from ...runtime.dispatch.rows import read_rows
    from ...runtime.dispatch.warming import build_for

    if database is not None:
        from ...db.store import Store

        with closing(Store.open(database, read_only=True)):
            pass  # what was named must be there
    known = read_rows(database)
    warmed, _ = build_for(problems, device, known, cache=cache)
    operator, error = _build_operator(cache)
    return Prebuilt(device, warmed, operator, error, known.trouble)


def _build_operator(cache: Path | None) -> tuple[str, str]:
    from ...runtime.operator import build

    try:
        there = build.is_built(cache)
        build.library(cache)
    except BwdtuneError as error:
        return "", str(error)
    return "there" if there else "built", ""


def _to_dict(one: Warmed) -> dict[str, Any]:
    kernel, row = one.choice.kernel, one.choice.row
    return {
        **one.problem.to_dict(),
        "config": row.config.id if row else None,
        "library": str(kernel.path) if kernel else None,
        "compile_seconds": one.seconds,
        "cause": one.choice.cause or None,
        "reason": one.choice.reason,
    }
