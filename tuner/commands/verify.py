"""One configuration's gradients against fp64, beside PyTorch's own: ``tuner verify``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...db.records import VerificationRecord
from ...gen.build.jobs import build_one
from ...gen.device import HOST_ARCH, Device
from ...gen.errors import UsageError
from ...gen.families import Config, short_form
from ...gen.problem import Problem
from ...gen.render import render
from ...gen.space import refusal
from ..lab.gpu_client import CandidateError, Worker

if TYPE_CHECKING:
    from rich.table import Table

_GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Check:
    """What the third gate says of a configuration.

    Attributes:
        problem: The problem.
        config: The configuration.
        device: Where it ran.
        records: Of the small cases, and on a GPU of the problem's own sizes.
    """

    problem: Problem
    config: Config
    device: Device
    records: tuple[VerificationRecord, ...]

    @property
    def passed(self) -> bool:
        return all(record.passed for record in self.records)

    @property
    def reason(self) -> str:
        """Why it did not pass."""
        return next((record.reason for record in self.records if not record.passed), "")

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``tuner verify --json``."""
        return {
            **self.problem.to_dict(),
            "config": self.config.id,
            "arch": self.device.arch,
            "device": self.device.name,
            "passed": self.passed,
            "reason": self.reason,
            "max_error": max(record.max_error for record in self.records),
            "errors": {case: errors for record in self.records for case, errors in record.errors.items()},
        }

    def table(self) -> Table:
        """Relative L2 errors, each beside PyTorch's on the same input."""
        from rich.table import Table

        table = Table(title=f"{short_form(self.config)} on {self.device.name}: relative errors, and PyTorch's")
        table.add_column("case")
        for gradient in _GRADIENTS:
            table.add_column(gradient, justify="right")
            table.add_column("PyTorch", justify="right")
        for record in self.records:
            for case, errors in record.errors.items():
                names = [name for gradient in _GRADIENTS for name in (gradient, f"torch_{gradient}")]
                table.add_row(case, *(f"{errors[name]:.2e}" if name in errors else "-" for name in names))
        return table


def check(problem: Problem, config: Config, device: Device, *, cache: Path | None = None) -> Check:
    """Compiles a configuration and verifies it, on a GPU at the problem's own sizes too. Stores nothing.

    Args:
        problem: Its dtype, head_dim, mask and group of heads count; on a GPU its sizes too.
        config: What is checked.
        device: The current GPU, or `gen.device.HOST`.
        cache: Where builds are kept; None for the usual place.

    Raises:
        UsageError: The configuration is impossible for this problem and device.
        BwdtuneError: It does not compile, or nothing can be verified here.
    """
    reason = refusal(problem, config, device)
    if reason is not None:
        raise UsageError(f"{short_form(config)} is impossible for {problem.label} on {device.arch}: {reason}")
    variant = build_one(render(problem, config), device.arch, cache=cache)
    on_host = device.arch == HOST_ARCH
    with Worker("cpu" if on_host else "cuda:0") as worker:
        checks = [worker.verify] if on_host else [worker.verify, worker.verify_at]
        records = []
        for run in checks:
            try:
                records.append(run(problem, variant))
            except CandidateError as error:
                records.append(VerificationRecord(False, float("inf"), {}, str(error)))
    return Check(problem, config, device, tuple(records))
