"""The third gate: small problems of the kind first, then the problem's own sizes."""

from __future__ import annotations

from ...db.records import VerificationRecord
from ...gen.build.jobs import Variant
from ...gen.problem import Problem
from .protocol import Bench


def verify_fully(
    bench: Bench, problem: Problem, variant: Variant, *, small: bool = True, full_size: bool = True
) -> tuple[VerificationRecord, ...]:
    """Verifies a variant at both kinds of size; what is wrong at the first is not run at the second.

    Args:
        bench: Runs it.
        problem: What it computes.
        variant: What is verified.
        small: Whether the small problems are still to be checked.
        full_size: Whether the problem's own sizes are, for which a CPU is too slow.

    Returns:
        The verdicts, in order: all passed but the last, perhaps.

    Raises:
        CandidateError: The variant crashed or hung.
        WorkerError: Nothing can be verified.
    """
    verdicts = [bench.verify(problem, variant)] if small else []
    if full_size and all(verdict.passed for verdict in verdicts):
        verdicts.append(bench.verify_at(problem, variant))
    return tuple(verdicts)
