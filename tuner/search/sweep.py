"""A sweep: a file with what compiler and card made of many configurations of one problem, for samplers to replay."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...gen.device import Device, device_for_arch
from ...gen.errors import BwdtuneError, UsageError
from ...gen.families import Config, config_from_dict
from ...gen.problem import Problem
from .cost_model import predict

if TYPE_CHECKING:
    from ...db.records import ProblemHistory

_FORMAT = 1
_STRATA = 10


@dataclass(frozen=True)
class SweepRow:
    """One configuration of a sweep.

    Attributes:
        config: The configuration.
        registers: A thread's, by ptxas; None where nothing was compiled.
        spill_bytes: What ptxas spilled, in bytes a thread; None where nothing was compiled.
        ms: Its median time; None where the compiler gate refused it or it failed.
        reference_ms: The median time of the sweep's reference kernel, interleaved with it.
        reason: Why there is no time; empty where there is one.
    """

    config: Config
    registers: int | None = None
    spill_bytes: int | None = None
    ms: float | None = None
    reference_ms: float | None = None
    reason: str = ""

    @property
    def cost(self) -> float | None:
        """Its time in units of the reference kernel's beside it, which a falling clock does not change."""
        return self.ms / self.reference_ms if self.ms and self.reference_ms else self.ms


@dataclass(frozen=True)
class Sweep:
    """What was found of many configurations of one problem.

    Attributes:
        problem: What was computed.
        device: The card that they were timed on.
        rows: The configurations.
        provenance: How it was made: GPU, driver, toolkit, torch, date, command line.
    """

    problem: Problem
    device: Device
    rows: tuple[SweepRow, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def limits(self) -> str | None:
        """The card whose limits it kept to, or None."""
        found = self.provenance.get("limits")
        return None if found is None else str(found)

    @property
    def timed(self) -> tuple[SweepRow, ...]:
        """The rows that have a time."""
        return tuple(row for row in self.rows if row.cost is not None)

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """Reads a sweep's file.

        Raises:
            UsageError: It is not one.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != _FORMAT:
                raise UsageError(f"{path} has format {data['format']}: this version reads {_FORMAT}")
            problem = Problem.parse(data["shape"], dtype=data["dtype"], **data["features"])
            rows = tuple(_row(values) for values in data["rows"])
            return cls(problem, device_for_arch(data["arch"]), rows, data["provenance"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is no sweep: {type(error).__name__}: {error}") from None

    def write(self, path: Path) -> None:
        """Writes the sweep, a row a line."""
        problem = self.problem
        head = {
            "format": _FORMAT,
            "shape": problem.shape,
            "dtype": problem.dtype,
            "features": problem.features,
            "arch": self.device.arch,
            "provenance": dict(self.provenance),
        }
        lines = ",\n".join(json.dumps(_to_dict(row)) for row in self.rows)
        path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def sweep_of(history: ProblemHistory) -> Sweep:
    """What a database has measured of a problem, on the card that it knows most of it from.

    Raises:
        UsageError: Nothing is measured.
    """
    by_arch: dict[str, list[SweepRow]] = {}
    for one in history.measurements:
        if one.record.median_ms is not None:
            variant = one.variant
            row = SweepRow(variant.config, variant.registers, variant.spill_bytes, one.record.median_ms)
            by_arch.setdefault(variant.arch, []).append(row)
    if not by_arch:
        raise UsageError(f"nothing is measured of {history.problem.label} there: run `tuner search` first")
    arch = max(by_arch, key=lambda arch: len(by_arch[arch]))
    failed = [
        SweepRow(one.config, one.registers, one.spill_bytes, reason=one.error or one.status)
        for one in history.failures
        if one.arch == arch
    ]
    return Sweep(history.problem, device_for_arch(arch), merged([*failed, *by_arch[arch]]))


def stratified(problem: Problem, configs: Sequence[Config], device: Device, count: int, seed: int) -> list[Config]:
    """Configurations spread evenly over the families, and in each over the deciles of the predicted time.

    Args:
        problem: What is computed.
        configs: The valid configurations.
        device: The card that times are predicted for.
        count: How many to draw; fewer where there are not as many.
        seed: Of the draw.
    """
    random = np.random.default_rng(seed)
    by_family: dict[str, list[Config]] = {}
    for config in configs:
        by_family.setdefault(config.family, []).append(config)
    strata: list[list[Config]] = []
    for members in by_family.values():
        members.sort(key=lambda config: predict(problem, config, device).cycles)
        strata += [list(part) for part in np.array_split(np.array(members, dtype=object), _STRATA) if len(part)]
    for stratum in strata:
        random.shuffle(stratum)
    drawn: list[Config] = []
    while strata and len(drawn) < count:  # round after round, so that small strata give all they have
        for stratum in strata:
            drawn.append(stratum.pop())
        strata = [stratum for stratum in strata if stratum]
    return drawn[:count]


def _to_dict(row: SweepRow) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in ("registers", "spill_bytes", "ms", "reference_ms", "reason")}
    return {
        "config": row.config.to_stored(),
        **{name: value for name, value in values.items() if value not in (None, "")},
    }


def _row(values: Mapping[str, Any]) -> SweepRow:
    try:
        config = config_from_dict(values["config"])
    except BwdtuneError as error:
        raise ValueError(str(error)) from None
    return SweepRow(config, **{name: value for name, value in values.items() if name != "config"})


def merged(rows: Iterable[SweepRow]) -> tuple[SweepRow, ...]:
    """One row a configuration: the last one that has a time, else the last."""
    found: dict[Config, SweepRow] = {}
    for row in rows:
        if row.config not in found or row.cost is not None:
            found[row.config] = row
    return tuple(found.values())
