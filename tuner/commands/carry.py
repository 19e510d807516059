"""``tuner carry``: winners of an earlier version's text become today's, where both are the same machine code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...db.records import EMULATED, EmulatedBest, Winner
from ...db.shipped import Shipped, read_shipped, write_shipped
from ...gen.build.jobs import Variant, build
from ...gen.build.toolchain import find_compiler
from ...gen.emulation import EMULATED_CARDS
from ...gen.errors import BwdtuneError
from ...gen.families import Config, short_form
from ...gen.problem import Problem
from ...gen.render import Source, template_hash
from ...runtime.gpu import gpu_key
from ..earlier import Earlier, earlier, render_today
from ..text_table import Column, TextTable
from .options import CacheOption, DatabaseOption, JsonOption
from .output import print_result

if TYPE_CHECKING:
    from ...db.store import Store


def command(
    version: Annotated[
        str,
        typer.Argument(
            metavar="VERSION",
            help="The version that measured: a commit of this repository, or a folder with the package in it.",
        ),
    ],
    shipped: Annotated[
        bool, typer.Option("--shipped", help="Carry the table of shipped configurations, not the database.")
    ] = False,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Compare the machine code of winners' earlier text with today's, and keep those that are the same kernel.

    For whoever makes a version of this program, and for a database of before kernels were known by their machine code.
    Needs the nvcc that the winners were measured with, and no GPU. Exit status 1: some kernels are others today.
    """
    from ...db.store import Store

    with earlier(version) as before:
        if shipped:
            found = carry_shipped(before, cache=cache)
        else:
            with closing(Store.open(database)) as store:
                found = carry_stored(before, store, cache=cache)
    table = TextTable(
        f"kernels of {version}", [Column("problem"), Column("configuration"), Column("target"), Column("today")]
    )
    for one in found:
        measured = one.measured
        table.add_row(
            measured.problem.label, short_form(measured.config), measured.arch, one.note or f"the same, {one.before}"
        )
    print_result([_to_dict(one) for one in found], [table if found else "nothing is stored"], as_json)
    return 0 if all(one.same for one in found) else 1


@dataclass(frozen=True)
class Measured:
    """A kernel that was verified and timed, as a row names it.

    Attributes:
        problem: What it computes.
        config: Its configuration.
        emulate: The card whose pace it kept to, if any.
        arch: The target that it was compiled for.
        toolkit: The nvcc that compiled it.
        source_hash: Hash of its text.
    """

    problem: Problem
    config: Config
    emulate: str | None
    arch: str
    toolkit: str
    source_hash: str


@dataclass(frozen=True)
class Comparison:
    """The two texts of a kernel, compiled by the same nvcc.

    Attributes:
        measured: The kernel.
        before: The machine code of the text that was measured; None where it could not be had.
        today: Today's source.
        same: Whether today's machine code is the same.
        note: Why it is not, or why that is not known; empty where it is.
    """

    measured: Measured
    before: str | None
    today: Source
    same: bool
    note: str


def compare(kernels: Sequence[Measured], version: Earlier, *, cache: Path | None = None) -> list[Comparison]:
    """Compiles the text that was measured and today's, and compares the machine code.

    Args:
        kernels: What was measured.
        version: The version that it was measured with.
        cache: The cache directory; see `gen.paths.cache_dir`.

    Raises:
        BwdtuneError: The earlier version does not render, or there is no compiler.
    """
    asked = [(kernel.problem, kernel.config, kernel.emulate) for kernel in kernels]
    pairs = list(zip(kernels, version.render(asked), render_today(asked), strict=True))
    reasons = {kernel: reason for kernel, before, _ in pairs if (reason := _not_comparable(kernel, before, version))}
    built: dict[tuple[str, str], Variant] = {}
    for arch in dict.fromkeys(kernel.arch for kernel in kernels):
        wanted = [(before, today) for kernel, before, today in pairs if kernel.arch == arch and kernel not in reasons]
        sources = list({source.hash: source for pair in wanted for source in pair}.values())
        built |= {(variant.source.hash, arch): variant for variant in build(sources, arch, cache=cache)}
    found = []
    for kernel, before, today in pairs:
        if kernel in reasons:
            found.append(Comparison(kernel, None, today, False, reasons[kernel]))
        else:
            variants = built[before.hash, kernel.arch], built[today.hash, kernel.arch]
            found.append(_compared(kernel, *variants))
    return found


def _not_comparable(kernel: Measured, before: Source, version: Earlier) -> str:
    if before.hash != kernel.source_hash:
        return f"{version.name} makes another text of it than the one that was measured"
    present = find_compiler(kernel.arch).version
    if present != kernel.toolkit:
        return f"it was measured as nvcc {kernel.toolkit} compiles it, and this is {present}: set CUDA_HOME to that one"
    return ""


def _compared(kernel: Measured, before: Variant, today: Variant) -> Comparison:
    for variant, when in ((before, "the text that was measured"), (today, "today's text")):
        if not variant.library:
            return Comparison(kernel, None, today.source, False, f"{when} does not compile: {variant.error}")
    same = before.machine_code is not None and before.machine_code == today.machine_code
    note = "" if same else "today's text is another machine code: search again"
    return Comparison(kernel, before.machine_code, today.source, same, note)


def carry_shipped(version: Earlier, path: Path | None = None, *, cache: Path | None = None) -> list[Comparison]:
    """Carries the rows of a shipped table over, and names the machine code of each.

    A row whose machine code is another today keeps the hash of its text, and is used no more.

    Args:
        version: The version that the table is of.
        path: The table; None for the package's own.
        cache: The cache directory.

    Raises:
        BwdtuneError: As `compare`, or the table cannot be written.
    """
    rows = read_shipped(path)
    found = compare([_of_shipped(row) for row in rows], version, cache=cache)
    carried = []
    for row, one in zip(rows, found, strict=True):
        if one.before:
            row = replace(row, machine_code=one.before)
        if one.same:
            row = replace(row, source_hash=one.today.hash, template_hash=template_hash(row.config.family))
        carried.append(row)
    if carried != list(rows):
        try:
            write_shipped(carried, path)
        except OSError as error:
            raise BwdtuneError(f"the table cannot be written and is as it was: {error.strerror}") from None
    return found


def carry_stored(version: Earlier, store: Store, *, cache: Path | None = None) -> list[Comparison]:
    """Carries a database's winners and best emulated configurations over: names their machine code, and stores today's
    text as another one of the same kernel.

    Args:
        version: The version that stored them.
        store: The database.
        cache: The cache directory.

    Raises:
        BwdtuneError: As `compare`, or the database cannot be written.
    """
    found = compare(list(dict.fromkeys(_stored(store))), version, cache=cache)
    for one in found:
        kernel = one.measured
        record = store.find_variant(
            kernel.problem,
            kernel.config,
            source_hash=kernel.source_hash,
            arch=kernel.arch,
            toolchain=kernel.toolkit,
        )
        if one.before is None or record is None:
            continue
        record = replace(record, machine_code=one.before)
        store.record_variant(kernel.problem, record)
        if one.same and one.today.hash != kernel.source_hash:
            today = replace(record, source_hash=one.today.hash, template_hash=template_hash(kernel.config.family))
            store.record_variant(kernel.problem, today)
    return found


def _stored(store: Store) -> Iterator[Measured]:
    bests: list[Winner | EmulatedBest] = [*store.winners(), *store.emulated_bests()]
    for best in bests:
        yield Measured(
            problem=best.problem,
            config=best.config,
            emulate=best.target if isinstance(best, EmulatedBest) else None,
            arch=best.environment.arch,
            toolkit=best.environment.toolkit,
            source_hash=best.source_hash,
        )


def _of_shipped(row: Shipped) -> Measured:
    # What an emulated row is about is the kernel without dummy mma, for the card that was emulated.
    cards = {gpu_key(card): card for card in EMULATED_CARDS.values()}
    arch = cards[row.gpu].arch if row.kind == EMULATED else row.environment.arch
    return Measured(row.problem, row.config, None, arch, row.environment.toolkit, row.source_hash)


def _to_dict(one: Comparison) -> dict[str, Any]:
    return {
        "problem": one.measured.problem.label,
        "config": one.measured.config.id,
        "arch": one.measured.arch,
        "toolkit": one.measured.toolkit,
        "machine_code": one.before,
        "same": one.same,
        "note": one.note,
    }
