"""``tuner doctor``: what is wrong with this machine, and what a problem misses."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...gen.device import device_for_arch
from ...gen.errors import BwdtuneError
from ...gen.families import short_form
from ...gen.problem import Problem
from ..text_table import Column, TextTable
from .cards import described_card
from .options import ArchOption, CacheOption, DatabaseOption, JsonOption, for_shapes
from .output import print_result

if TYPE_CHECKING:
    from ...runtime.dispatch.diagnosis import Diagnosis, Difference, Nearby
    from ..doctor import Finding


@for_shapes
def command(
    described: Callable[[str], Problem],
    shape: Annotated[
        str | None,
        typer.Option("--shape", help="Which kernel such a problem gets, and what it misses: B_H_S_D, or B_HQ_HKV_S_D."),
    ] = None,
    arch: ArchOption = None,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check this machine for what kernels need, and say what to do about what is missing.

    With --shape, also say which kernel such a problem gets here, or on the card of --arch, which stored and shipped
    rows are nearest, and in what each of them differs. Compiles nothing, and needs no GPU.
    Exit status 1: something is wrong.
    """
    from ..doctor import Status, examine

    problem = described(shape) if shape is not None else None
    if arch is not None:
        device_for_arch(arch)
    findings = examine(database, cache)
    diagnosis, tables = None, []
    if problem is not None:
        diagnosis, found = _diagnosis(problem, arch, database, cache)
        findings.append(found)
        tables = [_nearby_table(diagnosis)] if diagnosis and diagnosis.nearby else []
    shown = TextTable(
        "", [Column("what"), Column("state"), Column("found", folds=True), Column("what to do", folds=True)]
    )
    for one in findings:
        shown.add_row(one.name, one.status.value, one.text, one.advice)
    data = {
        "findings": [{**asdict(one), "status": one.status.value} for one in findings],
        "kernel": _to_dict(diagnosis) if diagnosis else None,
    }
    print_result(data, [shown, *tables], as_json)
    return 1 if any(one.status is Status.FAULT for one in findings) else 0


def _diagnosis(
    problem: Problem, arch: str | None, database: str | None, cache: Path | None
) -> tuple[Diagnosis | None, Finding]:
    from ..doctor import Finding, Status

    try:
        from ...runtime.dispatch.diagnosis import diagnose
        from ...runtime.dispatch.rows import read_rows

        diagnosis = diagnose(problem, described_card(arch), read_rows(database), cache=cache)
    except (ImportError, OSError, BwdtuneError) as error:  # no PyTorch, or a GPU that no kernel runs on
        return None, Finding("kernel", Status.FAULT, f"none can be looked up: {' '.join(str(error).split())}")
    return diagnosis, _finding(diagnosis)


def _finding(diagnosis: Diagnosis) -> Finding:
    from ...runtime.dispatch.records import Cause
    from ..doctor import Finding, Status

    choice, problem = diagnosis.choice, diagnosis.problem
    where = f"{problem.label} on {diagnosis.device.name}"
    search = shlex.join(["tuner", "search", *problem.options])
    if choice.kernel:
        return Finding("kernel", Status.OK, f"{where}: {choice.kernel.path.stem}, {choice.reason}")
    if choice.row and (not choice.final or choice.cause == Cause.UNPROVEN):
        text = f"{where}: {short_form(choice.row.config)}, {choice.row.name}; it is yet to be compiled, or verified"
        prebuild = shlex.join(["tuner", "prebuild", *problem.options])
        return Finding("kernel", Status.WARN, text, f"`{prebuild}`; else PyTorch's backward serves until it is built")
    status = Status.FAULT if choice.cause == Cause.UNUSABLE else Status.WARN
    advice = "" if choice.cause == Cause.SLOWER else f"`{search}`"
    return Finding("kernel", status, f"{where}: PyTorch's backward, since {choice.reason}", advice)


def _nearby_table(diagnosis: Diagnosis) -> TextTable:
    table = TextTable(
        f"the rows nearest to {diagnosis.problem.label} on {diagnosis.device.name}",
        [
            Column("problem"),
            Column("configuration", folds=True, optional=1),
            Column("where", optional=1),
            Column("what excludes it", folds=True),
            Column("what else differs", folds=True),
        ],
    )
    for one in diagnosis.nearby:
        excluding = [_said(difference) for difference in one.differences if difference.excludes]
        table.add_row(
            one.row.problem.label,
            short_form(one.row.config),
            "shipped" if one.row.shipped else "stored",
            "; ".join([*excluding, *filter(None, [one.obstacle])]) or "nothing",
            "; ".join(_said(difference) for difference in one.differences if not difference.excludes),
        )
    return table


def _said(difference: Difference) -> str:
    return f"{difference.name}: {difference.stored}, not {difference.here}"


def _to_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    choice = diagnosis.choice
    return {
        **diagnosis.problem.to_dict(),
        "gpu": diagnosis.device.name,
        "arch": diagnosis.device.arch,
        "library": str(choice.kernel.path) if choice.kernel else None,
        "config": choice.row.config.id if choice.row else None,
        "cause": choice.cause or None,
        "reason": choice.reason,
        "nearby": [_nearby_to_dict(one) for one in diagnosis.nearby],
    }


def _nearby_to_dict(one: Nearby) -> dict[str, Any]:
    return {
        **one.row.problem.to_dict(),
        "config": one.row.config.id,
        "gpu": one.row.gpu.name,
        "shipped": one.row.shipped,
        "limits": one.row.limits,
        "differences": [asdict(difference) for difference in one.differences],
        "obstacle": one.obstacle or None,
    }
