"""A kernel by the name that people type: a preset, a configuration's id, or ``best`` for the stored winner."""

from __future__ import annotations

from contextlib import closing

from ...db.records import Winner
from ...gen.device import Device, device_for_arch
from ...gen.errors import BwdtuneError, UsageError
from ...gen.families import Config, parse_config, short_form
from ...gen.problem import Problem
from ...gen.space import refusal
from ...runtime.gpu import NoGpuError, current_device, gpu_key

BEST = "best"


def named_config(
    name: str, problem: Problem, database: str | None, *, limits: str | None = None, arch: str | None = None
) -> Config:
    """The configuration of a name.

    Args:
        name: As it was typed.
        problem: Whose winner ``best`` is.
        database: Where winners are, as the option says.
        limits: The limits that ``best`` was searched under.
        arch: The compile target that it was found for; None for any.

    Raises:
        UsageError: It names nothing.
        BwdtuneError: There is no winner, or the database cannot be read.
    """
    if name == BEST:
        return stored_winner(problem, database, limits=limits, arch=arch).config
    return parse_config(name)


def require_valid(problem: Problem, config: Config, device: Device) -> None:
    """Refuses a configuration that cannot compute a problem on a device.

    Raises:
        UsageError: With the reason.
    """
    reason = refusal(problem, config, device)
    if reason is not None:
        raise UsageError(f"{short_form(config)} is impossible for {problem.label} on {device.arch}: {reason}")


def stored_winner(
    problem: Problem, database: str | None, *, limits: str | None = None, arch: str | None = None
) -> Winner:
    """The winner for a problem: of the GPU that is here where it has one, else the only one there is.

    Args:
        problem: The problem.
        database: As the option says.
        limits: The limits that it was searched under.
        arch: Of this compile target only; None for any.

    Raises:
        UsageError: There are several, of several cards.
        BwdtuneError: There is none, or the database cannot be read.
    """
    from ...db.store import Store

    target = None if arch is None else device_for_arch(arch).arch
    with closing(Store.open(database, read_only=True)) as store:
        found = [
            winner
            for winner in store.show(problem).winners
            if winner.limits == limits and target in (None, winner.environment.arch)
        ]
    try:
        here = gpu_key(current_device())
        found = [winner for winner in found if winner.environment.gpu == here] or found
    except NoGpuError:
        pass
    asked = f"{problem.label}{f' within the limits of {limits}' if limits else ''}{f' on {arch}' if arch else ''}"
    if not found:
        raise BwdtuneError(f"there is no winner for {asked}: run `tuner search` first, or choose one with --kernel")
    if len(found) > 1:
        cards = ", ".join(f"{winner.environment.gpu.name} ({winner.environment.arch})" for winner in found)
        raise UsageError(f"there are winners for {asked} on several cards, {cards}: choose with --arch")
    return found[0]
