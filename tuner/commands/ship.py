"""``tuner ship``: from a database to the table of configurations that a version ships."""

from __future__ import annotations

import shlex
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...db import shipped
from ...db.records import EMULATED, MEASURED, EmulatedBest, Winner
from ...db.shipped import Race, Shipped, read_shipped, write_shipped
from ...gen.device import device_for_arch
from ...gen.emulation import EMULATED_CARDS
from ...gen.errors import BwdtuneError
from ...gen.problem import Problem
from ...gen.render import Source, render, template_hash
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
    add: Annotated[
        bool,
        typer.Option("--add", help="Keep the rows of problems and cards that the database has nothing to ship of."),
    ] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the table of shipped configurations from a database: its winners, and its best emulated ones.

    For whoever makes a version of this program. Without --add the table is written anew.
    """
    from ...db.store import Store

    with closing(Store.open(database, read_only=True)) as store:
        written = ship(store, output, interrupted=interrupted, add=add)
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


def ship(store: Store, path: Path | None = None, *, interrupted: bool = False, add: bool = False) -> ShippedTable:
    """Writes the table from a database's winners on their own cards, and its best emulated configurations.

    Left out are winners that kept to another card's limits, the best of interrupted searches unless they are asked for,
    and those whose kernel is not known to be what today's templates make: by its source, or where the text has changed
    by its machine code (`carry`).

    Args:
        store: The database.
        path: The table; None for the package's own.
        interrupted: Whether the best of interrupted searches is good enough: verified and timed it was, too.
        add: Whether the table keeps its rows of problems and cards that the database has nothing to ship of.

    Raises:
        BwdtuneError: There is nothing to ship, or the table cannot be written. It is as it was.
    """
    rows: list[Shipped] = []
    left_out: list[str] = []
    for winner in store.winners():
        source = render(winner.problem, winner.config)
        reason = _why_not(store, winner, source, interrupted)
        if winner.limits:
            reason = f"it kept to the limits of {winner.limits}"
        if reason:
            left_out.append(f"{winner.problem.label} on {winner.environment.gpu.name} is left out: {reason}")
        else:
            rows.append(_measured(winner, source))
    for best in store.emulated_bests():
        card = device_for_arch(best.environment.arch)
        slowed = render(best.problem, best.config, emulate=best.target, card=card)
        reason = _why_not(store, best, slowed, interrupted)
        if reason:
            left_out.append(f"{best.problem.label} emulated for {best.target} is left out: {reason}")
        else:
            rows.append(_emulated(store, best))
    path = path or shipped.TABLE
    if not rows:
        reasons = "".join(f"; {reason}" for reason in left_out)
        raise BwdtuneError(f"there is nothing to ship, and {path} is left as it was{reasons or ': run `tuner search`'}")
    if add:
        replaced = {(row.problem, row.gpu, row.kind) for row in rows}
        rows[:0] = [row for row in read_shipped(path) if (row.problem, row.gpu, row.kind) not in replaced]
    try:
        return ShippedTable(write_shipped(rows, path), tuple(rows), tuple(left_out))
    except OSError as error:
        raise BwdtuneError(f"{path} cannot be written and is left as it was: {error.strerror}") from None


def _why_not(store: Store, best: Winner | EmulatedBest, source: Source, interrupted: bool) -> str:
    if best.partial and not interrupted:
        return "its search was interrupted"
    if best.source_hash == source.hash:
        return ""
    before, today = (
        store.find_variant(
            best.problem,
            best.config,
            source_hash=source_hash,
            arch=best.environment.arch,
            toolchain=best.environment.toolkit,
        )
        for source_hash in (best.source_hash, source.hash)
    )
    if before and today and before.machine_code and before.machine_code == today.machine_code:
        return ""
    return "its text has changed since: `tuner carry` says whether its machine code has, else search again"


def _measured(winner: Winner, source: Source) -> Shipped:
    race = None
    if winner.default_kernel and winner.default_ms:
        peers = {winner.default_kernel: winner.default_ms}
        race = Race(winner.median_ms, peers, winner.default_kernel, "the race that it won")
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
        source_hash=source.hash,
        template_hash=template_hash(winner.config.family),
        machine_code=winner.machine_code,
        race=race,
    )


def _emulated(store: Store, best: EmulatedBest) -> Shipped:
    card, source = EMULATED_CARDS[best.target], render(best.problem, best.config)
    built = store.find_variant(
        best.problem,
        best.config,
        source_hash=source.hash,
        arch=card.arch,
        toolchain=best.environment.toolkit,
    )
    return Shipped(
        problem=best.problem,
        config=best.config,
        gpu=gpu_key(card),
        kind=EMULATED,
        environment=best.environment,
        policy=best.policy,
        date=best.created_at.isoformat(timespec="seconds"),
        command=_command(best.problem, "--emulate", best.target),
        ms=None,
        cycles=best.cycles,
        max_error=best.max_error,
        source_hash=source.hash,
        template_hash=template_hash(best.config.family),
        machine_code=built.machine_code if built else None,
    )


def _command(problem: Problem, *options: str) -> str:
    return shlex.join(["tuner", "search", *problem.options, *options])
