"""``tuner verify``: one configuration's gradients against fp64, beside PyTorch's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...db.records import VerificationRecord
from ...gen.build.jobs import build_one
from ...gen.device import HOST, HOST_ARCH, Device, device_for_arch
from ...gen.errors import UsageError
from ...gen.families import Config, short_form
from ...gen.problem import Problem
from ...gen.render import render
from ..lab.gate import verify_fully
from ..lab.gpu_client import Worker
from ..lab.protocol import CandidateError
from .cards import gpu_here
from .kernels import named_config, require_valid
from .options import CacheOption, DatabaseOption, JsonOption, KernelOption, LimitsOption, for_problem
from .output import print_result

if TYPE_CHECKING:
    from rich.table import Table

_GRADIENTS = ("dq", "dk", "dv")


@for_problem()
def command(
    problem: Problem,
    kernel: KernelOption,
    arch: Annotated[str | None, typer.Option("--arch", help="host runs it on the CPU. Default: the GPU's.")] = None,
    limits: LimitsOption = None,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check one kernel's gradients against fp64, and print its errors beside PyTorch's."""
    config = named_config(kernel, problem, database, limits=limits)
    target = None if arch is None else device_for_arch(arch)
    device = HOST if target is HOST else gpu_here()
    if target and target.arch != device.arch:
        raise UsageError(f"the GPU here is {device.name} ({device.arch}): what is compiled for {arch} cannot run")
    checked = check(problem, config, device, cache=cache)
    verdict = f"{short_form(config)} {'passed' if checked.passed else f'FAILED: {checked.reason}'}"
    print_result(checked.to_dict(), [checked.table(), verdict], as_json)
    return 0 if checked.passed else 1


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
        names = [name for gradient in _GRADIENTS for name in (gradient, f"torch_{gradient}")]
        if self.problem.bias_grad:
            table.add_column("dbias", justify="right")
            table.add_column("PyTorch", justify="right")
            names += ["dbias", "torch_dbias"]
        if self.problem.sink:
            table.add_column("dsink", justify="right")
            names.append("dsink")
        for record in self.records:
            for case, errors in record.errors.items():
                table.add_row(case, *(f"{errors[name]:.2e}" if name in errors else "-" for name in names))
        return table


def check(problem: Problem, config: Config, device: Device, *, cache: Path | None = None) -> Check:
    """Compiles a configuration and verifies it, on a GPU at the problem's own sizes too. Stores nothing.

    Args:
        problem: Its dtype, head_dims, mask and group of heads count; on a GPU its sizes too.
        config: What is checked.
        device: The current GPU, or `gen.device.HOST`.
        cache: Where builds are kept; None for the usual place.

    Raises:
        UsageError: The configuration is impossible for this problem and device.
        BwdtuneError: It does not compile, or nothing can be verified here.
    """
    require_valid(problem, config, device)
    variant = build_one(render(problem, config), device.arch, cache=cache)
    on_host = device.arch == HOST_ARCH
    with Worker("cpu" if on_host else "cuda:0") as worker:
        try:
            records = verify_fully(worker, problem, variant, full_size=not on_host)
        except CandidateError as error:
            records = (VerificationRecord(False, float("inf"), {}, str(error)),)
    return Check(problem, config, device, records)
