"""Takes over what another database has to hand on: what was measured there, and what is to win here.

It is idempotent: the same blocks once more change nothing. Nothing of them counts before its kernel was verified here,
unless whoever takes them over trusts them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ..gen.problem import Problem
from . import rows
from .blocks import Block, Kernel, Timed
from .models import (
    ConfigurationRow,
    MeasurementRow,
    ProblemRow,
    SearchRow,
    VariantRow,
    VerificationRow,
)
from .records import RUNNING, StoredSearch

if TYPE_CHECKING:
    from .store import Store


@dataclass(frozen=True)
class Contender:
    """What wins elsewhere, and is stored here.

    Attributes:
        problem: The problem.
        kernel: What won.
        timed: The measurement that it won by.
        variant_id: The kernel's id here.
        measurement_id: The measurement's.
        verification_id: A passing verification of it here, or one that is trusted; None where there is none.
    """

    problem: Problem
    kernel: Kernel
    timed: Timed
    variant_id: int
    measurement_id: int
    verification_id: int | None


@dataclass(frozen=True)
class Adopted:
    """What came of a block.

    Attributes:
        searches: How many searches were not known.
        measurements: How many measurements were not known.
        contenders: What won there.
        conflicts: What contradicts this database and was left out, a line each.
    """

    searches: int
    measurements: int
    contenders: tuple[Contender, ...]
    conflicts: tuple[str, ...]


def adopt(store: Store, block: Block, *, trusted: bool) -> Adopted:
    """Stores what another database has measured of a problem, in one transaction. Nothing wins by that alone.

    Args:
        store: Takes it.
        block: What there is.
        trusted: Its verdicts and times are taken for ones of this database; else they are claims.
    """
    return store.transaction(lambda session: _Adoption(session, block, trusted).done())


class _Adoption:
    """One block in one transaction."""

    def __init__(self, session: Session, block: Block, trusted: bool) -> None:
        self._session, self._block, self._trusted = session, block, trusted
        self._conflicts: list[str] = []

    def done(self) -> Adopted:
        self._problem_id = self._id_of(ProblemRow, rows.identity_of(self._block.problem), {})
        searches = {search.uid: self._search(search) for search in self._block.searches}
        ids = {uid: search_id for uid, (search_id, _) in searches.items()}
        contenders, measurements = [], 0
        for kernel in self._block.kernels:
            variant_id = self._variant(kernel)
            if variant_id is None:
                continue
            verification_id, counts = self._verdict(kernel, variant_id)
            for timed in kernel.timed:
                measurement_id, new = self._measurement(timed, variant_id, ids, counts)
                measurements += new
                if timed.wins:
                    contenders.append(
                        Contender(self._block.problem, kernel, timed, variant_id, measurement_id, verification_id)
                    )
        new_searches = sum(new for _, new in searches.values())
        return Adopted(new_searches, measurements, tuple(contenders), tuple(self._conflicts))

    def _search(self, search: StoredSearch) -> tuple[int, bool]:
        """Its id here, and whether it was not known."""
        row = self._session.scalars(sa.select(SearchRow).where(SearchRow.uid == search.uid)).one_or_none()
        new = row is None
        if row is None:
            columns = rows.search_columns(search.record)
            row = SearchRow(
                uid=search.uid, problem_id=self._problem_id, **columns, started_at=_stored(search.started_at)
            )
            self._session.add(row)
        if new or row.status == RUNNING:  # it has ended since it was taken over
            row.ended_at = _stored(search.ended_at) if search.ended_at else None
            row.status, row.decided, row.error = search.status, search.decided, search.error
        self._session.flush()
        return row.id, new

    def _variant(self, kernel: Kernel) -> int | None:
        """Its id here; None where this database knows better."""
        variant = kernel.variant
        columns = rows.config_columns(variant.config)
        configuration_id = self._id_of(ConfigurationRow, {"name": columns.pop("name")}, columns)
        identity = {
            "configuration_id": configuration_id,
            **rows.kind_of(self._block.problem),
            "source_hash": variant.source_hash,
            "arch": variant.arch,
            "toolchain": variant.toolchain,
        }
        row = self._session.scalars(sa.select(VariantRow).where(*rows.equal(VariantRow, **identity))).one_or_none()
        if row is None:
            return self._id_of(VariantRow, identity, {**rows.outcome_columns(variant), "created_at": _now()})
        if row.status != "ok":
            self._conflict(kernel, f"it did not compile here ({row.error or row.status})")
            return None
        if row.machine_code and variant.machine_code and row.machine_code != variant.machine_code:
            self._conflict(kernel, "the same compiler makes other machine code of the same source here")
            return None
        return row.id

    def _verdict(self, kernel: Kernel, variant_id: int) -> tuple[int | None, bool]:
        """A passing verification's id, and whether the kernel's measurements count."""
        about = {"problem_id": self._problem_id, "variant_id": variant_id}
        newest = self._session.scalars(
            sa.select(VerificationRow)
            .where(*rows.equal(VerificationRow, **about))
            .order_by(VerificationRow.id.desc())
            .limit(1)
        ).first()
        if newest is not None and not newest.passed:
            self._conflict(kernel, f"its gradients were wrong here ({newest.reason})")
            return None, False
        if newest is not None:
            return newest.id, self._trusted
        if not (self._trusted and kernel.verification):
            return None, self._trusted
        return _add_verdict(self._session, about, kernel), True

    def _measurement(
        self, timed: Timed, variant_id: int, searches: Mapping[str, int], counts: bool
    ) -> tuple[int, bool]:
        """Its id here, and whether it was not known."""
        identity = {
            "problem_id": self._problem_id,
            "variant_id": variant_id,
            **rows.measurement_columns(timed.record),
            "created_at": _stored(timed.created_at),
        }
        same = [
            getattr(MeasurementRow, name).is_(None) if value is None else getattr(MeasurementRow, name) == value
            for name, value in identity.items()
        ]
        row = self._session.scalars(sa.select(MeasurementRow).where(*same)).first()
        new = row is None
        if row is None:
            search_id = searches[timed.search] if timed.search else None
            row = MeasurementRow(**identity, search_id=search_id, trusted=counts)
            self._session.add(row)
        row.trusted = row.trusted or counts
        self._session.flush()
        return row.id, new

    def _id_of(self, row_type: Any, identity: Mapping[str, Any], others: Mapping[str, Any]) -> int:
        """The id of the row with this identity, which is added where there is none."""
        row = self._session.scalars(sa.select(row_type).where(*rows.equal(row_type, **identity))).one_or_none()
        if row is None:
            row = row_type(**identity, **others)
            self._session.add(row)
            self._session.flush()
        return int(row.id)

    def _conflict(self, kernel: Kernel, reason: str) -> None:
        self._conflicts.append(f"{self._block.problem.label}: {kernel.variant.config.id} is left out: {reason}")


def trust_verdict(store: Store, contender: Contender) -> int:
    """Stores the verdict that a kernel passed elsewhere with, and returns its id.

    For one of which another compiler's machine code was verified here: see docs/identity.md.
    """

    def work(session: Session) -> int:
        row = session.get(MeasurementRow, contender.measurement_id)
        assert row, "it was adopted"
        return _add_verdict(session, {"problem_id": row.problem_id, "variant_id": row.variant_id}, contender.kernel)

    return store.transaction(work)


def _add_verdict(session: Session, about: Mapping[str, int], kernel: Kernel) -> int:
    assert kernel.verification, "there is one"
    row = VerificationRow(**about, **rows.verdict_columns(kernel.verification), created_at=_now())
    session.add(row)
    session.flush()
    return row.id


def _now() -> datetime:
    return datetime.now(timezone.utc).replace(tzinfo=None)


def _stored(moment: datetime) -> datetime:
    """As the database has it: UTC, without saying so."""
    return moment.astimezone(timezone.utc).replace(tzinfo=None)
