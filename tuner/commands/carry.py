"""``tuner carry``: winners of an earlier version's text become today's, where both are the same machine code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...db.records import EmulatedBest, Winner
from ...db.shipped import Shipped, read_shipped, write_shipped
from ...gen.build.jobs import Variant, build
from ...gen.build.toolchain import find_compiler
from ...gen.errors import BwdtuneError
from ...gen.families import Config, short_form
from ...gen.problem import Problem
from ...gen.render import Source, template_hash
from ..earlier import Asked, Earlier, earlier, render_today
from ..text_table import Column, TextTable
from .options import CacheOption, DatabaseOption, JsonOption
from .output import print_result

if TYPE_CHECKING:
    from ...db.store import Store


def command(
    version: Annotated[
        str | None,
        typer.Argument(
            metavar="[VERSION]",
            help="The version that measured: a commit of this repository, or a folder with the package in it. Needed "
            "for what names no machine code.",
            show_default=False,
        ),
    ] = None,
    shipped: Annotated[
        bool, typer.Option("--shipped", help="Carry the table of shipped configurations, not the database.")
    ] = False,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Compare the machine code that was measured with that of today's text, and keep the kernels that are the same.

    For maintainers, before a release, and for databases that are older than the hashes of machine code. Needs the nvcc
    that the winners were measured with, but no GPU. Exit status 1: some kernels are different today.
    """
    from ...db.store import Store

    with earlier(version) if version else nullcontext() as before:
        if shipped:
            found = carry_shipped(before, cache=cache)
        else:
            with closing(Store.open(database)) as store:
                found = carry_stored(before, store, cache=cache)
    table = TextTable(
        "kernels that were measured", [Column("problem"), Column("configuration"), Column("target"), Column("today")]
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
        machine_code: Hash of its machine code, where that is known.
    """

    problem: Problem
    config: Config
    emulate: str | None
    arch: str
    toolkit: str
    source_hash: str
    machine_code: str | None = None

    @property
    def asked(self) -> Asked:
        """What renders it."""
        return self.problem, self.config, self.emulate


@dataclass(frozen=True)
class Comparison:
    """A kernel and today's text of it, compiled by the same nvcc.

    Attributes:
        measured: The kernel.
        before: The machine code that was measured; None where it could not be had.
        today: Today's source.
        same: Whether today's machine code is the same.
        note: Why it is not, or why that is not known; empty where it is.
    """

    measured: Measured
    before: str | None
    today: Source
    same: bool
    note: str


def compare(kernels: Sequence[Measured], version: Earlier | None, *, cache: Path | None = None) -> list[Comparison]:
    """Compares the machine code that was measured with that of today's text.

    Where a row does not name the former, the text that was measured is compiled once more.

    Args:
        kernels: What was measured.
        version: The version that it was measured with; None where all name their machine code.
        cache: The cache directory; see `gen.paths.cache_dir`.

    Raises:
        BwdtuneError: The earlier version does not render, or there is no compiler.
    """
    today = dict(zip(kernels, render_today([kernel.asked for kernel in kernels]), strict=True))
    unnamed = [kernel for kernel in kernels if kernel.machine_code is None]
    before = dict(zip(unnamed, version.render([kernel.asked for kernel in unnamed]), strict=True)) if version else {}
    reasons = {kernel: reason for kernel in kernels if (reason := _not_comparable(kernel, before, version))}
    built: dict[tuple[str, str], Variant] = {}
    for arch in dict.fromkeys(kernel.arch for kernel in kernels):
        wanted = [kernel for kernel in kernels if kernel.arch == arch and kernel not in reasons]
        texts = [text[kernel] for kernel in wanted for text in (before, today) if kernel in text]
        sources = list({source.hash: source for source in texts}.values())
        built |= {(variant.source.hash, arch): variant for variant in build(sources, arch, cache=cache)}
    found = []
    for kernel in kernels:
        if kernel in reasons:
            found.append(Comparison(kernel, kernel.machine_code, today[kernel], False, reasons[kernel]))
        else:
            measured = built[before[kernel].hash, kernel.arch] if kernel in before else None
            found.append(_compared(kernel, measured, built[today[kernel].hash, kernel.arch]))
    return found


def _not_comparable(kernel: Measured, before: Mapping[Measured, Source], version: Earlier | None) -> str:
    if kernel.machine_code is None and version is None:
        return "its machine code is not known: name the VERSION that it was measured with"
    if version and kernel in before and before[kernel].hash != kernel.source_hash:
        return f"{version.name} makes another text of it than the one that was measured"
    present = find_compiler(kernel.arch).version
    if present != kernel.toolkit:
        return f"it was measured as nvcc {kernel.toolkit} compiles it, and this is {present}: set CUDA_HOME to that one"
    return ""


def _compared(kernel: Measured, before: Variant | None, today: Variant) -> Comparison:
    for variant, when in ((before, "the text that was measured"), (today, "today's text")):
        if variant and not variant.library:
            note = f"{when} does not compile: {variant.error}"
            return Comparison(kernel, kernel.machine_code, today.source, False, note)
    code = before.machine_code if before else kernel.machine_code
    same = code is not None and code == today.machine_code
    note = "" if same else "today's text is another machine code: search again"
    return Comparison(kernel, code, today.source, same, note)


def carry_shipped(version: Earlier | None, path: Path | None = None, *, cache: Path | None = None) -> list[Comparison]:
    """Carries the rows of a shipped table over, and names the machine code of each.

    A row whose machine code is another today keeps the hash of its text, and is used no more.

    Args:
        version: The version that the table is of; None where all rows name their machine code.
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


def carry_stored(version: Earlier | None, store: Store, *, cache: Path | None = None) -> list[Comparison]:
    """Carries a database's winners and best emulated configurations over: names their machine code, and stores today's
    text as another one of the same kernel.

    Args:
        version: The version that stored them; None where all name their machine code.
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
            machine_code=best.machine_code,
        )


def _of_shipped(row: Shipped) -> Measured:
    # What an emulated row is about is the kernel without dummy mma, for the card that was emulated.
    toolkit = row.environment.toolkit
    return Measured(row.problem, row.config, None, row.gpu.arch, toolkit, row.source_hash, row.machine_code)


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
