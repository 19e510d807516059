"""How a bench examines a candidate: the third gate, then a time beside the reference kernel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...db.records import VerificationRecord
from ...gen.build.jobs import Variant
from ...gen.problem import Problem
from .protocol import Bench, CandidateError
from .timing import Policy, Timings


@dataclass(frozen=True)
class Report:
    """What came of an examination.

    Attributes:
        verification: The third gate's verdict; None where the candidate did not get so far.
        timings: Its times, and those of the reference if that ran beside it; None where it has none.
        error: How the candidate failed to run.
        reference_fell: The reference crashed beside it.
        verify_s: The part of the time that went into the verification.
        total_s: All of it.
    """

    verification: VerificationRecord | None = None
    timings: Timings | None = None
    error: CandidateError | None = None
    reference_fell: bool = False
    verify_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True)
class Examination:
    """Verifies a candidate and times it.

    Cards of one name differ, and the clock of each falls under load: what compares candidates is the ratio to a
    reference that runs beside each of them, on the same card in the same rounds.

    Attributes:
        problem: What is computed.
        variant: The candidate.
        reference: What it runs beside; None for the first, and where clocks do not matter.
        policy: How it is timed.
        peers: PyTorch's kernels that run beside it.
        alone: It is timed with nothing beside it first, which could be to blame.
    """

    problem: Problem
    variant: Variant
    reference: Variant | None
    policy: Policy
    peers: Sequence[str] = ()
    alone: bool = False

    def __call__(self, bench: Bench) -> Report:
        """Does it.

        Raises:
            WorkerError: Nothing can be verified or timed there.
        """
        begin = time.perf_counter()
        report = self._verified(bench)
        verify_s = time.perf_counter() - begin
        if report.verification and report.verification.passed:
            try:
                timings, fell = self._timed(bench)
                report = replace(report, timings=timings, reference_fell=fell)
            except CandidateError as error:
                report = replace(report, error=error)
        return replace(report, verify_s=verify_s, total_s=time.perf_counter() - begin)

    def _verified(self, bench: Bench) -> Report:
        try:
            return Report(bench.verify(self.problem, self.variant))
        except CandidateError as error:
            return Report(error=error)

    def _timed(self, bench: Bench) -> tuple[Timings, bool]:
        """The times, and whether the reference crashed. A noisy timing is repeated before it counts."""
        if self.reference is None:
            return self._repeated(bench, self.variant), False
        alone = self._time(bench, self.variant) if self.alone else None
        try:
            return self._repeated(bench, self.variant, self.reference), False
        except CandidateError as error:
            if error.candidate != self.reference.source.config.id:
                if alone is None or not error.fault.maybe_from_outside:
                    raise
                return alone, False
        # The reference may have been struck by what this candidate left behind.
        return alone or self._time(bench, self.variant), True

    def _repeated(self, bench: Bench, *variants: Variant) -> Timings:
        timings = self._time(bench, *variants)
        return self._time(bench, *variants) if timings.notice else timings

    def _time(self, bench: Bench, *variants: Variant) -> Timings:
        return bench.time(self.problem, variants, self.peers, self.policy)
