"""Reads the rows to choose from: the stored winners, and what this version ships."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...db.shipped import Shipped, read_shipped
from ...gen.cached import cached_property
from ...gen.errors import BwdtuneError
from ...gen.problem import OF_ROWS, Problem
from .records import Row

if TYPE_CHECKING:
    from ...db.records import Winner


@dataclass(frozen=True)
class Rows:
    """All rows, and why there may be too few.

    Attributes:
        rows: Stored winners, then shipped ones.
        trouble: Why the database cannot be read; empty where it can, or where there is none.
    """

    rows: tuple[Row, ...]
    trouble: str = ""

    def of_kind(self, problem: Problem) -> Sequence[Row]:
        """The rows of a problem's kind, in an order that does not depend on the database's: stored ones first, and
        those that were found without another card's limits.

        After them those of the kind whose main kernel is the same: what the other adds to rows costs next to nothing.
        """
        own = self._by_kind.get(problem.kernel_spec, ())
        features: dict[str, Any] = {name: getattr(problem, name) for name in OF_ROWS}
        if not any(features.values()):
            return own
        others = self._by_kind.get(problem.without_row_features.kernel_spec, ())
        return [*own, *(replace(row, problem=replace(row.problem, **features), stands_in=True) for row in others)]

    @cached_property
    def _by_kind(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: (row.shipped, row.limits or "", row.problem, row.config.id)):
            found.setdefault(row.problem.kernel_spec, []).append(row)
        return found


def read_rows(database: str | Path | None = None) -> Rows:
    """Opens the database for reading only. Trouble with it is a reason, never an exception.

    Args:
        database: A path or a URL; by default `gen.paths.default_database`.
    """
    winners, trouble = _read_winners(database)
    return Rows((*map(_of_winner, winners), *map(_of_shipped, read_shipped())), trouble)


def _read_winners(database: str | Path | None) -> tuple[list[Winner], str]:
    try:
        from ...db.errors import NoDatabase
        from ...db.store import Store  # SQLAlchemy is loaded by those who need it
    except ImportError as error:
        return [], f"the database cannot be read: {error}"
    try:
        store = Store.open(database, read_only=True)
        try:
            return store.winners(), ""
        finally:
            store.close()
    except NoDatabase:  # as good as an empty one
        return [], ""
    except (BwdtuneError, OSError) as error:
        return [], str(error)
    except Exception as error:  # of a driver or a server: whatever it is, training goes on without the database
        return [], f"the database cannot be read: {type(error).__name__}: {error}"


def _of_winner(winner: Winner) -> Row:
    return Row(
        problem=winner.problem,
        config=winner.config,
        source_hash=winner.source_hash,
        gpu=winner.environment.gpu,
        ms=winner.median_ms,
        default_ms=winner.default_ms,
        default_kernel=winner.default_kernel,
        limits=winner.limits,
        machine_code=winner.machine_code,
        toolkit=winner.environment.toolkit,
    )


def _of_shipped(row: Shipped) -> Row:
    return Row(
        problem=row.problem,
        config=row.config,
        source_hash=row.source_hash,
        gpu=row.gpu,
        ms=row.race.ms if row.race else row.ms,  # beside PyTorch's, where that ran
        default_ms=row.race.default_ms if row.race else None,
        default_kernel=row.race.default or None if row.race else None,
        shipped=True,
        origin=row.origin,
        machine_code=row.machine_code,
        toolkit=row.environment.toolkit,
    )
