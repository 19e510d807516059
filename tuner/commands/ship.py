"""``tuner ship``: from a database to the table of configurations that a version ships."""

from __future__ import annotations

import shlex
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...db.records import EMULATED, MEASURED, EmulatedBest, Winner
from ...db.shipped import Shipped, write_shipped
from ...gen.device import device_for_arch
from ...gen.emulation import EMULATED_CARDS
from ...gen.problem import Problem
from ...gen.render import render
from ...runtime.gpu import gpu_key
from .options import DatabaseOption, JsonOption
from .output import print_result
from .tables import shipped_table, shipped_to_dict

if TYPE_CHECKING:
    from ...db.store import Store


def command(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write. Default: the package's own table.")
    ] = None,
    interrupted: Annotated[
        bool, typer.Option("--interrupted", help="Ship the best of interrupted searches, too.")
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the table of shipped configurations from a database: its winners, and its best emulated ones.

    For whoever makes a version of this program. The table is written anew: nothing it held before is kept.
    """
    from ...db.store import Store

    with closing(Store.open(database, read_only=True)) as store:
        written = ship(store, output, interrupted=interrupted)
    data = {
        "file": str(written.path),
        "rows": [shipped_to_dict(row) for row in written.rows],
        "left_out": list(written.left_out),
    }
    print_result(data, [shipped_table(written.rows), *written.left_out, f"written to {written.path}"], as_json)


@dataclass(frozen=True)
class ShippedTable:
    """What was written.

    Attributes:
        path: Where.
        rows: What is shipped.
        left_out: What is stored and not shipped, each with the reason, in one line.
    """

    path: Path
    rows: tuple[Shipped, ...]
    left_out: tuple[str, ...]


def ship(store: Store, path: Path | None = None, *, interrupted: bool = False) -> ShippedTable:
    """Writes the table from a database's winners on their own cards, and its best emulated configurations.

    Left out are winners that kept to another card's limits, the best of interrupted searches unless they are asked for,
    and those whose source is not what today's templates make.

    Args:
        store: The database.
        path: The table; None for the package's own.
        interrupted: Whether the best of interrupted searches is good enough: verified and timed it was, too.
    """
    rows, left_out = [], []
    for winner in store.winners():
        reason = _why_not(winner, render(winner.problem, winner.config).hash, interrupted)
        if winner.limits:
            reason = f"it kept to the limits of {winner.limits}"
        if reason:
            left_out.append(f"{winner.problem.label} on {winner.environment.gpu.name} is left out: {reason}")
        else:
            rows.append(_measured(winner))
    for best in store.emulated_bests():
        card = device_for_arch(best.environment.arch)
        reason = _why_not(best, render(best.problem, best.config, emulate=best.target, card=card).hash, interrupted)
        if reason:
            left_out.append(f"{best.problem.label} emulated for {best.target} is left out: {reason}")
        else:
            rows.append(_emulated(best))
    return ShippedTable(write_shipped(rows, path), tuple(rows), tuple(left_out))


def _why_not(best: Winner | EmulatedBest, source_hash: str, interrupted: bool) -> str:
    if best.partial and not interrupted:
        return "its search was interrupted"
    if best.source_hash != source_hash:
        return "the templates have changed since: search again"
    return ""


def _measured(winner: Winner) -> Shipped:
    return Shipped(
        problem=winner.problem,
        config=winner.config,
        gpu=winner.environment.gpu,
        kind=MEASURED,
        environment=winner.environment,
        policy=winner.policy,
        date=winner.created_at.isoformat(timespec="seconds"),
        command=_command(winner.problem),
        ms=winner.median_ms,
        cycles=None,
        max_error=winner.max_error,
        source_hash=winner.source_hash,
        template_hash=winner.template_hash,
    )


def _emulated(best: EmulatedBest) -> Shipped:
    return Shipped(
        problem=best.problem,
        config=best.config,
        gpu=gpu_key(EMULATED_CARDS[best.target]),
        kind=EMULATED,
        environment=best.environment,
        policy=best.policy,
        date=best.created_at.isoformat(timespec="seconds"),
        command=_command(best.problem, "--emulate", best.target),
        ms=None,
        cycles=best.cycles,
        max_error=best.max_error,
        source_hash=render(best.problem, best.config).hash,
        template_hash=best.template_hash,
    )


def _command(problem: Problem, *options: str) -> str:
    return shlex.join(["tuner", "search", *problem.options, *options])
