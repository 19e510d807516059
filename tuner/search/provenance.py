"""Where and with what a search runs, as stored with the search."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

from ... import __version__
from ...db.records import Environment, SearchRecord
from ...gen.problem import Problem
from .options import SearchOptions


@dataclass(frozen=True)
class Machine:
    """What a search does not know of the machine that it runs on.

    Attributes:
        toolkit: The version of nvcc.
        gpu_uuid: Which card measures, where one does; of several, between commas.
        power_limit_w: What it may draw at most, where that is known; of several the least.
        host: The machine's name.
        compilers: Compiles at once; None for as many as this machine takes.
    """

    toolkit: str = ""
    gpu_uuid: str | None = None
    power_limit_w: float | None = None
    host: str = field(default_factory=platform.node)
    compilers: int | None = None


def search_record(
    problem: Problem,
    options: SearchOptions,
    machine: Machine,
    environment: Environment | None,
    *,
    arch: str,
    seed: int,
    study: str,
) -> SearchRecord:
    """A search as it begins.

    Args:
        problem: What it searches for.
        options: What was chosen.
        machine: Where it runs.
        environment: Where it measures; None where it does not.
        arch: The compile target.
        seed: The one that is used, chosen or drawn.
        study: The name of the study that has its trials; empty where there is none.
    """
    chosen = asdict(options)
    return SearchRecord(
        problem=problem,
        study=study,
        arch=arch,
        sampler=chosen.pop("sampler"),
        seed=seed,
        options={name: value for name, value in chosen.items() if name != "seed"},
        host=machine.host,
        gpu=environment.gpu if environment else None,
        gpu_uuid=machine.gpu_uuid if environment else None,
        driver=environment.driver if environment else None,
        power_limit_w=machine.power_limit_w if environment else None,
        bwdtune=__version__,
        toolkit=environment.toolkit if environment else machine.toolkit,
        torch=environment.torch if environment else _version("torch"),
        optuna=_version("optuna"),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
