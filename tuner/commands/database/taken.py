"""What ``import`` and ``merge`` share: the taking over, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ....gen.families import short_form
from ...text_table import Column, TextTable
from ..output import print_result, say

if TYPE_CHECKING:
    from ....db.blocks import Block
    from ....db.store import Store
    from ...handover import Handover

TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Take its verdicts and times for those of this database: winners win without a verification here.",
    ),
]


def take_over(store: Store, blocks: Sequence[Block], *, trust: bool, cache: Path | None, as_json: bool) -> int:
    """Takes blocks over and says what became of them; returns the exit status.

    Args:
        store: Takes them.
        blocks: Of another database.
        trust: See `TrustOption`.
        cache: Where what is compiled for a verification is kept.
        as_json: Whether to say it in JSON.
    """
    from ...handover import GpuExaminer, hand_over

    with ExitStack() as stack:
        examine = None if trust else stack.enter_context(GpuExaminer(say, cache=cache))
        handover = hand_over(store, blocks, examine)
    lines = [
        f"{len(blocks)} problems; new here: {handover.searches} searches, {handover.measurements} measurements",
        *handover.conflicts,
    ]
    parts: list[TextTable | str] = [_table(handover)] if handover.settled else []
    print_result(_to_dict(handover, len(blocks)), [*parts, *lines], as_json)
    return 0 if all(one.fate.settled for one in handover.settled) and not handover.conflicts else 1


def _table(handover: Handover) -> TextTable:
    table = TextTable(
        "winners that were handed over",
        [
            Column("problem"),
            Column("GPU", optional=2),
            Column("limits", optional=3),
            Column("configuration", folds=True),
            Column("what became of it"),
            Column("why", folds=True),
        ],
    )
    for one in handover.settled:
        record = one.contender.timed.record
        table.add_row(
            one.contender.problem.label,
            record.environment.gpu.name,
            record.limits or "-",
            short_form(one.contender.kernel.variant.config),
            one.fate.value,
            one.reason,
        )
    return table


def _to_dict(handover: Handover, problems: int) -> dict[str, Any]:
    return {
        "problems": problems,
        "new_searches": handover.searches,
        "new_measurements": handover.measurements,
        "winners": [
            {
                **one.contender.problem.to_dict(),
                "gpu": one.contender.timed.record.environment.gpu.name,
                "limits": one.contender.timed.record.limits,
                "config": one.contender.kernel.variant.config.id,
                "fate": one.fate.name.lower(),
                "reason": one.reason,
            }
            for one in handover.settled
        ],
        "conflicts": handover.conflicts,
    }
