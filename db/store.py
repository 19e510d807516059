"""The store of what was built, checked and timed, and of which won."""

from __future__ import annotations

import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ..gen import paths
from ..gen.device import Device, device_for_arch
from ..gen.errors import BwdtuneError
from ..gen.families import Config
from ..gen.problem import Problem
from ..gen.render import render
from . import connect, migrate, rows
from .errors import (
    CorruptDatabase,
    DatabaseError,
    DatabaseLocked,
    DatabaseUnavailable,
    InvalidRecord,
    NotAWinner,
    ReadOnlyDatabase,
)
from .models import (
    Base,
    BestRow,
    ClaimRow,
    ConfigurationRow,
    EmulatedBestRow,
    MeasurementRow,
    ProblemRow,
    SearchRow,
    VariantRow,
    VerificationRow,
    WinnerRow,
)
from .records import (
    EMULATED,
    MEASURED,
    RUNNING,
    EmulatedBest,
    Environment,
    GpuKey,
    Holder,
    MeasuredConfig,
    MeasurementRecord,
    ProblemHistory,
    SearchRecord,
    StoredMeasurement,
    StoredSearch,
    VariantRecord,
    VerificationRecord,
    Winner,
)

if TYPE_CHECKING:
    import optuna

_ATTEMPTS = 3
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_R = TypeVar("_R", bound=Base)


class Store:
    """A database of results. Make one with `Store.open`.

    It may be shared by threads, goes through a fork (each process has connections of its own) and can be pickled. As
    ever in Python, a fork while another thread is in the middle of a call may leave a lock locked in the child.

    Attributes:
        url: What is open; for SQLite its `database` is an absolute path.
        read_only: Whether it was opened for reading only.
    """

    def __init__(self, url: sa.URL, read_only: bool) -> None:
        self.url = url
        self.read_only = read_only
        # By process: a connection must not be used, nor closed, on the other side of a fork. No lock guards it, since a
        # fork may come while another thread holds that.
        self._engines: dict[int, sa.Engine] = {}

    @classmethod
    def open(cls, database: str | Path | None = None, *, read_only: bool = False) -> Store:
        """Opens a database, makes a new one, or upgrades an older one (an SQLite file is copied beside itself first).

        Args:
            database: A path, or an SQLAlchemy URL; by default `gen.paths.default_database`.
            read_only: Neither make nor change anything. Works on files and file systems that cannot be written.

        Raises:
            DatabaseError: One subclass a cause: missing, foreign, newer, damaged, locked, read-only, ... The database
                is as it was.
        """
        store = cls(connect.database_url(paths.default_database() if database is None else database), read_only)
        migrate.prepare(store.url, read_only=read_only)
        return store

    def __reduce__(self) -> tuple[type[Store], tuple[sa.URL, bool]]:
        return Store, (self.url, self.read_only)

    def close(self) -> None:
        """Closes this process's connections; the next call opens new ones.

        SQLite's log is folded into the file, so that the file alone, copied, has all that was stored.
        """
        engine = self._engines.pop(os.getpid(), None)
        if engine is None:
            return
        engine.dispose()
        path = connect.sqlite_path(self.url)
        if path and not self.read_only:
            connect.fold_log(path)

    def optuna_storage(self) -> optuna.storages.RDBStorage:
        """Optuna's storage in the same database.

        Raises:
            DatabaseError: It cannot be written, or its Optuna tables are of another version of Optuna.
        """
        import optuna

        from .trials import TrialStorage

        self._refuse_read_only()
        path = connect.sqlite_path(self.url)
        if path:
            # The URL only names the dialect: Optuna takes a string, in which a path with ? or % or {} would be another.
            url, options = "sqlite://", connect.sqlite_options(path, "rw", True, "IMMEDIATE")
        else:
            url = self.url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
            options = {"pool_pre_ping": True}

        def make() -> optuna.storages.RDBStorage:
            try:
                return TrialStorage(url, options)
            except optuna.exceptions.StorageInternalError as error:
                raise error.__cause__ or error from None
            except RuntimeError as error:
                raise DatabaseUnavailable(
                    connect.describe(self.url), f"its Optuna tables do not fit Optuna {optuna.__version__}: {error}"
                ) from None

        # Two that make Optuna's tables at once run into each other.
        return self._retry(make, DatabaseUnavailable)

    def recorded_studies(self) -> optuna.storages.RDBStorage | None:
        """Optuna's storage for reading alone, also of a database that cannot be written; None where no study was made.

        Raises:
            DatabaseError: It cannot be read, or its Optuna tables are of another version of Optuna.
        """
        import optuna

        with connect.errors_of(self.url):
            if not sa.inspect(self._engine()).has_table("version_info"):
                return None
        path = connect.sqlite_path(self.url)
        try:
            if path:
                options = connect.sqlite_options(path, "ro", True)
                return optuna.storages.RDBStorage("sqlite://", engine_kwargs=options, skip_table_creation=True)
            return self.optuna_storage()
        except (RuntimeError, optuna.exceptions.StorageInternalError, sa.exc.SQLAlchemyError) as error:
            detail = " ".join(str(error.__cause__ or error).split())
            raise DatabaseUnavailable(
                connect.describe(self.url), f"its Optuna tables do not fit Optuna {optuna.__version__}: {detail}"
            ) from None

    @staticmethod
    def study_name(
        problem: Problem, device: Device, limits: str | None, space_hash: str, *, emulate: str | None = None
    ) -> str:
        """The name of the Optuna study of a search: a changed space or template is another study."""
        kept_to = f" emulating {emulate}" if emulate else f" limits {limits}" if limits else ""
        return f"{problem.label} on {device.name} ({device.arch}){kept_to} space {space_hash}"

    # Searches

    def begin_search(self, search: SearchRecord) -> int:
        """Stores a search that begins.

        Returns:
            Its id, for the methods below and `record_measurement`.
        """
        uid = uuid.uuid4().hex  # the same when the transaction is tried again

        def work(session: Session) -> int:
            problem = _upsert(session, ProblemRow, rows.identity_of(search.problem), {})
            row = SearchRow(
                uid=uid,
                problem_id=problem.id,
                **rows.search_columns(search),
                started_at=_now(),
                status=RUNNING,
                decided=0,
                error="",
            )
            session.add(row)
            session.flush()
            return row.id

        return self.transaction(work)

    def update_search(self, search_id: int, *, decided: int) -> None:
        """Stores how many candidates a search has decided so far."""
        self.transaction(
            lambda session: session.execute(
                sa.update(SearchRow).where(SearchRow.id == search_id).values(decided=decided)
            )
        )

    def end_search(self, search_id: int, *, status: str, decided: int, error: str = "") -> None:
        """Stores how a search has ended.

        Args:
            search_id: Of `begin_search`.
            status: As in `StoredSearch`; not ``running``.
            decided: Candidates decided.
            error: Why it failed.
        """
        values = {"status": status, "decided": decided, "error": error, "ended_at": _now()}
        self.transaction(
            lambda session: session.execute(sa.update(SearchRow).where(SearchRow.id == search_id).values(**values))
        )

    def searches(self, problem: Problem | None = None) -> list[StoredSearch]:
        """All of them, or those for one problem; oldest first."""
        conditions = rows.equal(ProblemRow, **rows.identity_of(problem)) if problem else []
        return self._read(rows.select_searches(*conditions), rows.stored_search)

    # What was built, checked and timed

    def record_variant(self, problem: Problem, variant: VariantRecord) -> int:
        """Stores the outcome of a compilation, in place of an earlier one of the same source, target and compiler.

        Args:
            problem: Gives the kind (dtype, head_dim, mask); the sizes do not matter.
            variant: What came of it.

        Returns:
            The variant's id, for the methods below.
        """

        def work(session: Session) -> int:
            columns = rows.config_columns(variant.config)
            configuration = _upsert(session, ConfigurationRow, {"name": columns.pop("name")}, columns)
            identity = {
                "configuration_id": configuration.id,
                **rows.kind_of(problem),
                "source_hash": variant.source_hash,
                "arch": variant.arch,
                "toolchain": variant.toolchain,
            }
            return _upsert(session, VariantRow, identity, {**rows.outcome_columns(variant), "created_at": _now()}).id

        return self.transaction(work)

    def find_variant(
        self, problem: Problem, config: Config, *, source_hash: str, arch: str, toolchain: str
    ) -> VariantRecord | None:
        """The remembered outcome of compiling a configuration, failures and time-outs included."""
        conditions = [
            *rows.equal(ConfigurationRow, name=rows.config_name(config)),
            *rows.equal(VariantRow, **rows.kind_of(problem), source_hash=source_hash, arch=arch, toolchain=toolchain),
        ]
        return next(iter(self._read(rows.select_variants(*conditions), rows.variant_record)), None)

    def variants(self, problem: Problem, arch: str, *, newest: int | None = None) -> list[VariantRecord]:
        """What was compiled for a target of kernels that compute a problem, failures included; oldest first.

        Args:
            problem: Gives the kind.
            arch: The target.
            newest: At most so many, the last ones.
        """
        conditions = rows.equal(VariantRow, **rows.kind_of(problem), arch=arch)
        if newest is not None:
            last = sa.select(VariantRow.id).where(*conditions).order_by(VariantRow.id.desc()).limit(newest)
            conditions = [VariantRow.id.in_(last.subquery().select())]
        return self._read(rows.select_variants(*conditions), rows.variant_record)

    def verdicts(self, problem: Problem, arch: str) -> list[tuple[VariantRecord, VerificationRecord]]:
        """What was verified at a problem of a target's variants, with each verdict; oldest first."""
        conditions = [*rows.equal(ProblemRow, **rows.identity_of(problem)), *rows.equal(VariantRow, arch=arch)]
        return self._read(rows.select_verdicts(*conditions), rows.judged_variant)

    def record_verification(self, problem: Problem, variant_id: int, verification: VerificationRecord) -> int:
        """Stores a verdict. One that is no pass ends the variant's wins at this problem.

        Returns:
            Its id, for `set_winner`.
        """

        def work(session: Session) -> int:
            about = {"problem_id": _problem_id(session, problem, variant_id), "variant_id": variant_id}
            row = VerificationRow(**about, **rows.verdict_columns(verification), created_at=_now())
            session.add(row)
            session.flush()
            if not verification.passed:
                for best in (WinnerRow, EmulatedBestRow):
                    session.execute(sa.delete(best).where(*rows.equal(best, **about)))
            return row.id

        return self.transaction(work)

    def record_measurement(
        self,
        problem: Problem,
        variant_id: int,
        measurement: MeasurementRecord,
        search_id: int | None = None,
        *,
        trusted: bool = True,
    ) -> int:
        """Stores a timing.

        Args:
            problem: What was computed.
            variant_id: What was timed.
            measurement: The times.
            search_id: The search that took them, of `begin_search`.
            trusted: As in `StoredMeasurement`.

        Returns:
            Its id, for `set_winner`.
        """

        def work(session: Session) -> int:
            problem_id = _problem_id(session, problem, variant_id)
            arch = session.scalars(sa.select(VariantRow.arch).where(VariantRow.id == variant_id)).one()
            if arch != measurement.environment.arch:
                raise InvalidRecord(f"a variant for {arch} was not measured as {measurement.environment.arch}")
            row = MeasurementRow(
                problem_id=problem_id,
                variant_id=variant_id,
                **rows.measurement_columns(measurement),
                created_at=_now(),
                search_id=search_id,
                trusted=trusted,
            )
            session.add(row)
            session.flush()
            return row.id

        return self.transaction(work)

    def measurement_for(
        self,
        problem: Problem,
        config: Config,
        environment: Environment,
        limits: str | None = None,
        *,
        policy: str,
        source_hash: str,
        machine_code: str | None = None,
        kind: str = MEASURED,
    ) -> StoredMeasurement | None:
        """The newest measurement of the same thing, verified, under the same conditions, so that it is not repeated.

        The same is what has this source, or this machine code: other text may come to the same kernel.
        """
        same = [VariantRow.source_hash == source_hash]
        if machine_code:
            same.append(VariantRow.machine_code == machine_code)
        conditions = [
            *rows.equal(ProblemRow, **rows.identity_of(problem)),
            *rows.equal(ConfigurationRow, name=rows.config_name(config)),
            *rows.equal(VariantRow, arch=environment.arch),
            sa.or_(*same),
            *rows.equal(MeasurementRow, kind=kind, **rows.condition_columns(environment, policy, limits)),
            MeasurementRow.trusted.is_(True),
        ]
        found = self._read(rows.select_measurements(*conditions), rows.stored_measurement)
        return max((one for one in found if one.verified), key=lambda one: one.id, default=None)

    # Which won

    def set_winner(
        self,
        problem: Problem,
        environment: Environment,
        limits: str | None,
        measurement_id: int,
        verification_id: int,
        partial: bool = False,
    ) -> bool:
        """Proposes a winner; the better of it and the present one stays, in whatever order processes come.

        The present winner counts with its newest measurement under the challenger's conditions (policy and toolkit),
        of the kernel that this version makes of its configuration. A race that includes it and stores its time thus
        decides between them. Where it has none, the two cannot be compared, and the challenger wins, which can be built
        and timed today. One of an interrupted search does not replace that of a whole one so easily, unless this
        version makes another kernel of the present winner's configuration: then it can no longer be used.

        Args:
            problem: The problem.
            environment: Where it was measured.
            limits: As in the measurement.
            measurement_id: The time it wins by.
            verification_id: A passing verification of the same variant at the same problem.
            partial: Whether the search was interrupted.

        Returns:
            Whether it is the winner now.

        Raises:
            NotAWinner: It was not verified, not measured, or the ids belong to something else.
        """

        return self._set_best(
            WinnerRow, MEASURED, problem, environment.gpu, limits, measurement_id, verification_id, partial
        )

    def set_emulated_best(
        self,
        problem: Problem,
        environment: Environment,
        target: str,
        measurement_id: int,
        verification_id: int,
        partial: bool = False,
    ) -> bool:
        """Proposes the best configuration of an emulated card, as `set_winner` does a winner; cycles decide.

        Args:
            problem: The problem.
            environment: Where it ran.
            target: The card that was emulated.
            measurement_id: The emulated measurement it is best by.
            verification_id: A passing verification of the same variant at the same problem.
            partial: Whether the search was interrupted.

        Returns:
            Whether it is the best now.

        Raises:
            NotAWinner: It was not verified, not emulated, or the ids belong to something else.
        """
        return self._set_best(
            EmulatedBestRow, EMULATED, problem, environment.gpu, target, measurement_id, verification_id, partial
        )

    def adopt_best(
        self, problem: Problem, record: MeasurementRecord, measurement_id: int, verification_id: int, partial: bool
    ) -> None:
        """Makes what another database handed over the winner, or the best emulated one, whatever stands there now.

        Its measurement counts from now on. Whether it is the better one, `adoption.compare` says.

        Args:
            problem: The problem.
            record: The measurement.
            measurement_id: Its id.
            verification_id: A passing verification of the same variant at the same problem.
            partial: Whether its search was interrupted.

        Raises:
            NotAWinner: It was not verified, or the ids belong to something else.
        """
        best = EmulatedBestRow if record.kind == EMULATED else WinnerRow
        gpu, limits = record.environment.gpu, record.limits
        self._set_best(best, record.kind, problem, gpu, limits, measurement_id, verification_id, partial, adopt=True)

    def _set_best(
        self,
        best: type[BestRow],
        kind: str,
        problem: Problem,
        gpu: GpuKey,
        limits: str | None,
        measurement_id: int,
        verification_id: int,
        partial: bool,
        *,
        adopt: bool = False,
    ) -> bool:
        def work(session: Session) -> bool:
            measurement = session.get(MeasurementRow, measurement_id)
            verification = session.get(VerificationRow, verification_id)
            if measurement is None or verification is None:
                raise NotAWinner("a winner needs a stored measurement and a stored verification")
            key = {
                "problem_id": _problem_id(session, problem, measurement.variant_id),
                **rows.card_columns(gpu, limits),
            }
            measurement.trusted = measurement.trusted or adopt
            _check_eligible(session, key, measurement, verification, kind)
            present = session.scalars(sa.select(best).where(*rows.equal(best, **key)).with_for_update()).one_or_none()
            if present and not adopt and not _beats(session, measurement, partial, present, problem):
                return False
            row = present or best(**key)
            row.variant_id = measurement.variant_id
            row.measurement_id, row.measurement_kind = measurement.id, measurement.kind
            row.verification_id, row.verification_passed = verification.id, verification.passed
            row.partial = partial
            row.created_at = measurement.created_at if adopt else _now()
            session.add(row)
            return True

        return self.transaction(work)

    def winner(self, problem: Problem, gpu: GpuKey, limits: str | None = None) -> Winner | None:
        """The winner for a problem on a kind of card, or None. This is the lookup at run time: it only reads.

        Raises:
            DatabaseError: It cannot be read; but one that is locked is only logged.
        """
        conditions = [
            *rows.equal(ProblemRow, **rows.identity_of(problem)),
            *rows.equal(WinnerRow, **rows.card_columns(gpu, limits)),
        ]
        try:
            return next(iter(self._read(rows.select_winners(*conditions), rows.winner_record)), None)
        except DatabaseLocked as error:
            _log.warning("%s; going on without its winner", error)
            return None

    def winners(self) -> list[Winner]:
        """All of them, by problem, card and limits."""
        return self._read(rows.select_winners(), rows.winner_record)

    def emulated_best(self, problem: Problem, gpu: GpuKey, target: str) -> EmulatedBest | None:
        """The best configuration for a problem on a card that `gpu` stood for, or None."""
        conditions = [
            *rows.equal(ProblemRow, **rows.identity_of(problem)),
            *rows.equal(EmulatedBestRow, **rows.card_columns(gpu, target)),
        ]
        return next(iter(self._read(rows.select_emulated_bests(*conditions), rows.emulated_best)), None)

    def emulated_bests(self) -> list[EmulatedBest]:
        """All of them, by problem, card and the card that was emulated."""
        return self._read(rows.select_emulated_bests(), rows.emulated_best)

    def measurements(self, problem: Problem | None = None) -> list[StoredMeasurement]:
        """All of them, or those of one problem; fastest first."""
        conditions = rows.equal(ProblemRow, **rows.identity_of(problem)) if problem else []
        return self._read(rows.select_measurements(*conditions), rows.stored_measurement)

    def outcomes(self, problems: Sequence[Problem], *, newest: int) -> list[MeasuredConfig]:
        """What was measured of some problems, on any card and under any conditions; the newest first.

        Args:
            problems: The problems.
            newest: At most so many.
        """
        identities = [sa.and_(*rows.equal(ProblemRow, **rows.identity_of(problem))) for problem in problems]
        if not identities:
            return []
        return self._read(rows.select_outcomes(sa.or_(*identities), newest=newest), rows.measured_config)

    def problems(self) -> list[Problem]:
        """All that anything was found or looked for about, in the order in which that began."""
        return self._read(sa.select(ProblemRow).order_by(ProblemRow.id), rows.problem_of)

    def show(self, problem: Problem) -> ProblemHistory:
        """All that is known of a problem."""
        this = rows.equal(ProblemRow, **rows.identity_of(problem))
        failed = [*rows.equal(VariantRow, **rows.kind_of(problem)), VariantRow.status != "ok"]
        return ProblemHistory(
            problem=problem,
            winners=tuple(self._read(rows.select_winners(*this), rows.winner_record)),
            measurements=tuple(self.measurements(problem)),
            rejected=tuple(
                self._read(rows.select_verdicts(*this, sa.not_(VerificationRow.passed)), rows.judged_variant)
            ),
            failures=tuple(self._read(rows.select_variants(*failed), rows.variant_record)),
            searches=tuple(self.searches(problem)),
        )

    # Who is about to measure what

    def claim(self, scope: str, subject: str, holder: Holder, lifetime_s: float) -> bool:
        """Claims something for a search, or says that another one has it.

        A claim of a search that has ended without a word is void: at once where its process was one of this machine,
        else when it expires.

        Args:
            scope: What claims are about: 64 characters at most.
            subject: What is claimed within it.
            holder: The search. What it has already it may claim again.
            lifetime_s: The claim expires after so long, if it is not renewed.
        """

        def work(session: Session) -> bool:
            about = rows.equal(ClaimRow, scope=scope, subject=subject)
            row = session.scalars(sa.select(ClaimRow).where(*about).with_for_update()).one_or_none()
            if row and row.holder != holder.id and row.expires_at > _now() and not _has_ended(row, holder):
                return False
            row = row or ClaimRow(scope=scope, subject=subject)
            row.holder, row.host, row.process = holder.id, holder.host, holder.process
            row.expires_at = _now() + timedelta(seconds=lifetime_s)
            session.add(row)
            return True

        return self.transaction(work)

    def release(self, scope: str, holder: Holder) -> None:
        """Gives up all claims of a search."""
        about = rows.equal(ClaimRow, scope=scope, holder=holder.id)
        self.transaction(lambda session: session.execute(sa.delete(ClaimRow).where(*about)))

    def renew(self, scope: str, holder: Holder, lifetime_s: float) -> None:
        """Has all claims of a search last so long from now on."""
        about = rows.equal(ClaimRow, scope=scope, holder=holder.id)
        until = _now() + timedelta(seconds=lifetime_s)
        self.transaction(lambda session: session.execute(sa.update(ClaimRow).where(*about).values(expires_at=until)))

    # The database

    def transaction(self, work: Callable[[Session], _T]) -> _T:
        """Runs `work` in one short transaction, which writes; again where another process came between.

        Raises:
            DatabaseError: It cannot be written.
            InvalidRecord: The database refuses a row.
        """
        self._refuse_read_only()
        engine = self._engine().execution_options(sqlite_begin="BEGIN IMMEDIATE")

        def transaction() -> _T:
            with Session(engine) as session, session.begin():
                return work(session)

        return self._retry(transaction)

    def _engine(self) -> sa.Engine:
        process = os.getpid()
        engine = self._engines.get(process)
        if engine is None:
            engine = self._engines.setdefault(process, connect.make_engine(self.url, "ro" if self.read_only else "rw"))
        return engine

    def _read(self, statement: sa.Executable, convert: Callable[..., _T]) -> list[_T]:
        """Runs a query; a row that does not pass the checks is logged and left out."""
        database = connect.describe(self.url)
        with connect.errors_of(self.url), Session(self._engine()) as session:
            try:
                found = session.execute(statement).all()
            except ValueError as error:  # in SQLite a column may hold anything
                raise CorruptDatabase(database, str(error)) from None
            records = []
            for row in found:
                try:
                    records.append(convert(*row))
                except (BwdtuneError, TypeError, ValueError) as error:
                    _log.warning("%s: passed over a row: %s", database, error)
            return records

    def _refuse_read_only(self) -> None:
        if self.read_only:
            raise ReadOnlyDatabase(connect.describe(self.url), "it was opened for reading only")

    def _retry(self, work: Callable[[], _T], *errors: type[DatabaseError]) -> _T:
        """Tries a few times: after a lock, a clash of rows, and those `errors` that another process may have caused."""
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                with connect.errors_of(self.url):
                    return work()
            except (sa.exc.IntegrityError, sa.exc.DataError) as error:
                if last:
                    raise InvalidRecord(f"{connect.describe(self.url)} refuses a row: {error.orig}") from error
            except DatabaseError as error:
                if last or not isinstance(error, (DatabaseLocked, *errors)):
                    raise
            time.sleep(random.uniform(0.05, 0.1) * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


def _now() -> datetime:
    return datetime.now(timezone.utc).replace(tzinfo=None)


def _has_ended(claim: ClaimRow, holder: Holder) -> bool:
    """Whether the process that has a claim is known to be no more: it ran on the machine of another one that asks."""
    if claim.host != holder.host:
        return False
    try:
        os.kill(claim.process, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        pass
    return False


def _upsert(session: Session, row_type: type[_R], identity: dict[str, Any], values: dict[str, Any]) -> _R:
    """Adds the row of an identity, or gives the present one these values."""
    row = session.scalars(sa.select(row_type).where(*rows.equal(row_type, **identity))).one_or_none()
    if row is None:
        row = row_type(**identity)
        session.add(row)
    for name, value in values.items():
        setattr(row, name, value)
    session.flush()
    return row


def _problem_id(session: Session, problem: Problem, variant_id: int) -> int:
    """The problem's row. Refuses a variant of another kind of problem, such as a causal kernel for a full mask."""
    variant = session.get(VariantRow, variant_id)
    if variant is None:
        raise InvalidRecord(f"there is no variant {variant_id}")
    kind = rows.kind_of(problem)
    if any(getattr(variant, name) != value for name, value in kind.items()):
        raise InvalidRecord(
            f"variant {variant_id} does not compute {problem.label}: it is of another dtype, head_dim, mask or feature"
        )
    return _upsert(session, ProblemRow, rows.identity_of(problem), {}).id


def _check_eligible(
    session: Session, key: dict[str, Any], measurement: MeasurementRow, verification: VerificationRow, kind: str
) -> None:
    """Refuses a measurement that must not win, in words; the schema refuses most of this too.

    Raises:
        NotAWinner: With the reason.
    """
    variant_id, problem_id = measurement.variant_id, key["problem_id"]
    newest = sa.select(VerificationRow.passed).where(
        *rows.equal(VerificationRow, problem_id=problem_id, variant_id=variant_id)
    )
    reasons = {
        "its measurement is of another problem, card or limits": any(
            getattr(measurement, name) != value for name, value in key.items()
        ),
        f"it was {measurement.kind}, not {kind}": measurement.kind != kind,
        "another database claims it, and its kernel was not verified here": not measurement.trusted,
        "its verification is of another problem or variant": (verification.problem_id, verification.variant_id)
        != (problem_id, variant_id),
        "it did not pass verification": not verification.passed
        or not session.scalars(newest.order_by(VerificationRow.id.desc()).limit(1)).first(),
        "its compilation failed": session.scalars(
            sa.select(VariantRow.status != "ok").where(VariantRow.id == variant_id)
        ).one(),
    }
    for reason, applies in reasons.items():
        if applies:
            raise NotAWinner(f"this cannot be the winner: {reason}")


def _beats(session: Session, challenger: MeasurementRow, partial: bool, present: BestRow, problem: Problem) -> bool:
    """Whether a measurement is better than the present winner; see `Store.set_winner`.

    Of emulated ones cycles decide.
    """
    column = MeasurementRow.cycles if challenger.kind == EMULATED else MeasurementRow.median_ms
    mine = session.get(VariantRow, challenger.variant_id)
    its = session.get(VariantRow, present.variant_id)
    configuration = session.get(ConfigurationRow, its.configuration_id) if its else None
    if mine is None or its is None or configuration is None:
        raise AssertionError("the schema's foreign keys see to that")
    try:
        config = rows.config_of(configuration)
    except InvalidRecord:
        return True  # no lookup would hand it out
    emulate = present.limits if challenger.kind == EMULATED else None
    todays = _variants_of_today(session, its, problem, config, emulate)
    yields = present.partial or not partial or its.id not in todays
    if mine.configuration_id == its.configuration_id:
        return yields and challenger.id >= present.measurement_id  # the same one, with its newest time
    its_best = session.scalars(
        sa.select(column)
        .where(
            MeasurementRow.variant_id.in_(todays),
            MeasurementRow.trusted.is_(True),
            *rows.equal(
                MeasurementRow,
                **{
                    name: getattr(challenger, name)
                    for name in ("problem_id", "gpu_name", "gpu_capability", "limits", "kind", "policy", "toolkit")
                },
            ),
        )
        .order_by(MeasurementRow.id.desc())
        .limit(1)
    ).first()
    mine_best = challenger.cycles if challenger.kind == EMULATED else challenger.median_ms
    if its_best is None or mine_best is None:
        return yields
    return mine_best < its_best


def _variants_of_today(
    session: Session, variant: VariantRow, problem: Problem, config: Config, emulate: str | None
) -> set[int]:
    """The stored variants of a configuration that are the kernel which this version makes of it.

    That is what has the source that it renders to, and what has the machine code of such a one.
    """
    try:
        source_hash = render(problem, config, emulate=emulate, card=device_for_arch(variant.arch)).hash
    except BwdtuneError:
        return set()  # a configuration, or a target, that this version makes no kernel of
    alike = rows.equal(
        VariantRow, configuration_id=variant.configuration_id, arch=variant.arch, **rows.kind_of(problem)
    )
    variants = session.scalars(sa.select(VariantRow).where(*alike)).all()
    codes = {one.machine_code for one in variants if one.source_hash == source_hash and one.machine_code}
    return {one.id for one in variants if one.source_hash == source_hash or one.machine_code in codes}
