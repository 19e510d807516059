"""From rows to a choice: the first row whose kernel can be made."""

from __future__ import annotations

import enum
from collections.abc import Callable

from ...gen.device import Device
from ...gen.errors import BwdtuneError
from ...gen.problem import Problem
from ..kernel import Kernel
from .builds import Build
from .identity import Unproven
from .records import Cause, Choice, Row
from .rows import Rows
from .selection import Refusal, candidates


class Progress(enum.Enum):
    """Of a kernel that is not there yet."""

    SOUGHT = "is being looked for in the cache"
    BUILT = "is being built"


_CAUSES = {Progress.SOUGHT: Cause.LOADING, Progress.BUILT: Cause.BUILDING}
State = Kernel | str | Progress
"""Of a row's kernel: there, why it is not, or on its way."""


def resolve(problem: Problem, device: Device, known: Rows, state_of: Callable[[Build, Row], State]) -> Choice:
    """The choice for a problem.

    A row whose kernel is on its way, or has to be verified where there is a GPU, is waited for, though that of a later
    one may be there: what is chosen must not depend on what is built.

    Args:
        problem: What is to be computed.
        device: The GPU.
        known: The rows.
        state_of: Says what there is of a kernel, and begins to make it where nobody has.
    """
    reason, cause = known.trouble, Cause.NOTHING_STORED
    for row in candidates(problem, device, known):
        if isinstance(row, Refusal):
            if not reason or row.cause == Cause.SLOWER:
                reason, cause = row.reason, row.cause
            continue
        state = state_of(Build.of(row, problem, device.arch), row)
        if isinstance(state, Progress):
            return Choice(None, f"{row.name} {state.value}", final=False, cause=_CAUSES[state], row=row)
        if isinstance(state, Unproven):
            return Choice(None, state, cause=Cause.UNPROVEN, row=row)
        if isinstance(state, Kernel):
            objection = _size_objection(state, problem)
            if objection is None:
                return Choice(state, row.name, row=row)
            state = objection
        if not reason:
            reason, cause = f"{row.name} cannot be used: {state}", Cause.UNUSABLE
    return Choice(None, reason, cause=cause)


def _size_objection(kernel: Kernel, problem: Problem) -> str | None:
    """Why a kernel cannot count these sizes."""
    try:
        kernel.workspace_bytes(
            problem.batch, problem.heads_q, problem.heads_kv, problem.seqlen_q, problem.seqlen_kv, problem.positions
        )
    except BwdtuneError as error:
        return str(error)
    return None
