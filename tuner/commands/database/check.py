"""``tuner db check``: whether a database is whole, and its winners are kernels that can be had here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....db.errors import DatabaseError
from ....db.records import EmulatedBest, Winner
from ....gen.build.jobs import Variant, build
from ....gen.build.toolchain import ToolchainError, find_compiler
from ....gen.device import device_for_arch
from ....gen.errors import BwdtuneError
from ....gen.render import Source, render
from ..options import CacheOption, DatabaseOption, JsonOption
from ..output import print_result, say

if TYPE_CHECKING:
    from ....db.store import Store


def command(
    quick: Annotated[
        bool, typer.Option("--quick", help="Compile nothing: do not ask whether the winners can be made here.")
    ] = False,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check a database: its file, its references, its rows, and whether this compiler makes its winners.

    Nothing of it is changed. One line a fault, and then the exit status is 1.
    """
    found = faults(database, quick=quick, cache=cache)
    print_result({"faults": found}, found or ["no fault was found"], as_json)
    return 1 if found else 0


def faults(database: str | None, *, quick: bool, cache: Path | None = None) -> list[str]:
    """What is wrong with a database, a line each.

    Args:
        database: A path or a URL; None for the usual place.
        quick: Compile nothing.
        cache: Where what is compiled is kept.
    """
    from ....db import integrity
    from ....db.store import Store

    found: list[str] = []
    try:
        with closing(Store.open(database, read_only=True)) as store:
            found += integrity.faults(store)
            if not quick:
                found += _other_kernels(store, cache)
    except DatabaseError as error:
        found.append(str(error))
    return found


def _other_kernels(store: Store, cache: Path | None) -> Iterator[str]:
    """Winners whose machine code this compiler does not make of this version's text."""
    bests: list[Winner | EmulatedBest] = [*store.winners(), *store.emulated_bests()]
    for arch in sorted({best.environment.arch for best in bests}):
        wanted = [best for best in bests if best.environment.arch == arch]
        try:
            find_compiler(arch)
            sources = {id(best): _source(best) for best in wanted}
            say(f"compiling {len(wanted)} kernels for {arch}")
            built = _built([source for source in sources.values() if isinstance(source, Source)], arch, cache)
        except ToolchainError as error:
            yield f"{len(wanted)} winners for {arch} cannot be made here: {error}"
            continue
        for best in wanted:
            source = sources[id(best)]
            reason = source if isinstance(source, str) else _objection(best, built[source.hash])
            if reason:
                yield f"{best.config.id}, best for {best.problem.label} on {best.environment.gpu.name}: {reason}"


def _source(best: Winner | EmulatedBest) -> Source | str:
    emulate = best.target if isinstance(best, EmulatedBest) else None
    try:
        return render(best.problem, best.config, emulate=emulate, card=device_for_arch(best.environment.arch))
    except BwdtuneError as error:
        return f"it does not render: {error}"


def _built(sources: Sequence[Source], arch: str, cache: Path | None) -> dict[str, Variant]:
    unique = list({source.hash: source for source in sources}.values())
    return {variant.source.hash: variant for variant in build(unique, arch, cache=cache)}


def _objection(best: Winner | EmulatedBest, variant: Variant) -> str:
    from ....runtime.dispatch.identity import Identity, Standing  # takes torch with it

    if not variant.library:
        return f"it does not compile here: {variant.error}"
    timed = best.environment
    standing = Identity(best.source_hash, best.machine_code, timed.toolkit, timed.arch).standing(variant)
    if standing is Standing.OTHER:
        return "this version makes another kernel of it than the one that was timed: search again"
    if standing is Standing.UNPROVEN:
        return (
            f"nvcc {variant.toolchain} makes other machine code of it than nvcc {timed.toolkit}, with which "
            "it was timed: it is verified once before it is used, and has another's time until it is searched again"
        )
    return ""
