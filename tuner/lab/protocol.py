"""The messages between the process that owns the GPU and its client, and the interface that a search uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...db.records import VerificationRecord
from ...gen.build.jobs import Variant
from ...gen.errors import BwdtuneError
from ...gen.problem import Problem
from .timing import Policy, Timings


class Bench(Protocol):
    """Verifies and times variants. `gpu_client.Worker` is the real one, and documents these."""

    def verify(self, problem: Problem, variant: Variant) -> VerificationRecord: ...

    def verify_at(self, problem: Problem, variant: Variant) -> VerificationRecord: ...

    def time(self, problem: Problem, variants: Sequence[Variant], peers: Sequence[str], policy: Policy) -> Timings: ...


@dataclass(frozen=True)
class Fault:
    """How a candidate failed to run.

    Attributes:
        kind: ``error`` that it reported, ``crash`` of its process, ``killed`` from outside (SIGKILL, such as that of an
            OOM killer), or ``hang``.
        signal: The signal's name, where one ended the process.
        log: The end of what the process had printed.
    """

    kind: str = "error"
    signal: str = ""
    log: str = ""

    @property
    def maybe_from_outside(self) -> bool:
        """Whether another process, or a busy machine, may be to blame."""
        return self.kind in ("killed", "hang")


class CandidateError(BwdtuneError):
    """A candidate crashed, hung or was refused by the GPU; the others can go on.

    Attributes:
        candidate: The configuration's id, where it is known which of several it was.
        fault: How it failed.
    """

    def __init__(self, reason: str, candidate: str | None = None, fault: Fault | None = None) -> None:
        super().__init__(reason)
        self.candidate, self.fault = candidate, fault or Fault()


class WorkerError(BwdtuneError):
    """The process does not start, or the GPU cannot run the problem: no candidate's fault."""


@dataclass(frozen=True)
class Request:
    """What the child is asked for: a method of its bench, and the arguments."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Running:
    """Said by the child before its answer: a kernel runs for the first time, or (None) all of them have run."""

    name: str | None


@dataclass(frozen=True)
class Answer:
    """What the child replies to a request.

    Attributes:
        result: What was asked for.
        failure: One line: why the candidate failed.
        sick: The device no longer works for the child, which must be replaced.
        fatal: One line: why no candidate can succeed.
        candidate: Whose failure it is, where that is known.
    """

    result: Any = None
    failure: str = ""
    sick: bool = False
    fatal: str = ""
    candidate: str | None = None
