"""``tuner inspect``: what the compiler made of one kernel, beside the estimate."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...gen.build.jobs import CompiledResources, Variant, build_one
from ...gen.build.toolchain import cuobjdump
from ...gen.device import HOST_ARCH, Device
from ...gen.errors import BwdtuneError, UsageError
from ...gen.families import Config, preset_name, short_form
from ...gen.families.base import Estimate
from ...gen.problem import Problem
from ...gen.render import render
from .cards import described_card
from .kernels import named_config, require_valid
from .options import (
    EXAMPLE_SHAPE,
    ArchOption,
    CacheOption,
    DatabaseOption,
    JsonOption,
    KernelOption,
    LimitsOption,
    for_problem,
)
from .output import print_result

if TYPE_CHECKING:
    from rich.table import Table


@for_problem(EXAMPLE_SHAPE)
def command(
    problem: Problem,
    kernel: KernelOption,
    arch: ArchOption = None,
    limits: LimitsOption = None,
    database: DatabaseOption = None,
    cache: CacheOption = None,
    source: Annotated[bool, typer.Option("--source", help="Print the generated source.")] = False,
    machine_code: Annotated[bool, typer.Option("--sass", help="Print the machine code (needs cuobjdump).")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compile a kernel and print what the compiler made of it: registers, spills, shared memory, occupancy."""
    config = named_config(kernel, problem, database, limits=limits, arch=arch)
    found = inspect(problem, config, described_card(arch), cache=cache)
    if source:
        print(found.variant.source.text)
    elif machine_code:
        assert found.variant.library, "a variant that was inspected was compiled"
        print(sass(found.variant.library))
    else:
        print_result(found.to_dict(), [found.table(), found.kernels_table()], as_json)


@dataclass(frozen=True)
class Inspection:
    """A compiled configuration's resources.

    Attributes:
        config: The configuration.
        problem: Its dtype, head_dims and mask count; the sizes do not.
        device: The card whose limits give the occupancy.
        variant: The build, with the source and the library.
        threads: Threads of a block of the main kernel.
        shared_memory_bytes: Shared memory of such a block, as it is launched.
        resources: ptxas' figures for the main kernel.
        estimate: What arithmetic foretold of it.
        blocks_per_sm: Blocks that fit on an SM together.
        occupancy: Resident warps as a part of the SM's most, 0 to 1.
    """

    config: Config
    problem: Problem
    device: Device
    variant: Variant
    threads: int
    shared_memory_bytes: int
    resources: CompiledResources
    estimate: Estimate
    blocks_per_sm: int
    occupancy: float

    def to_dict(self) -> dict[str, Any]:
        """The JSON of ``tuner inspect --json``."""
        return {
            "config": self.config.id,
            "preset": preset_name(self.config),
            "parameters": self.config.to_dict(),
            "dtype": self.problem.dtype,
            "head_dim": self.problem.head_dim,
            "head_dim_v": self.problem.head_dim_v,
            **self.problem.features,
            "device": self.device.name,
            "arch": self.device.arch,
            "nvcc": self.variant.toolchain,
            "source_hash": self.variant.source.hash,
            "registers": self.resources.registers,
            "spill_bytes": self.resources.spill_bytes,
            "stack_bytes": self.resources.stack_bytes,
            "shared_memory_bytes": self.shared_memory_bytes,
            "threads": self.threads,
            "blocks_per_sm": self.blocks_per_sm,
            "occupancy": self.occupancy,
            "estimate": asdict(self.estimate),
            "kernels": {name: figures._asdict() for name, figures in self.variant.kernels.items()},
        }

    def table(self) -> Table:
        """The main kernel's figures beside the estimate."""
        from rich.table import Table

        name = short_form(self.config)
        kind = f"{self.problem.dtype}, head_dim {self.problem.head_dims}, {self.problem.kernel_spec_label}"
        table = Table(title=f"{name}, {kind}, {self.device.arch}")
        table.add_column("main kernel")
        table.add_column("compiled", justify="right")
        table.add_column("estimated", justify="right")
        table.add_column("limit", justify="right")
        device, estimated = self.device, self.estimate
        table.add_row("threads", f"{self.threads:,}", f"{estimated.threads:,}", f"{device.max_threads_per_block:,}")
        table.add_row(
            "registers a thread",
            f"{self.resources.registers:,}",
            f"{estimated.registers:,}",
            f"{device.max_registers_per_thread:,}",
        )
        table.add_row("spills, bytes", f"{self.resources.spill_bytes:,}", "", "")
        table.add_row("stack, bytes", f"{self.resources.stack_bytes:,}", "", "")
        table.add_row(
            "shared memory, bytes",
            f"{self.shared_memory_bytes:,}",
            f"{estimated.shared_memory_bytes:,}",
            f"{device.shared_memory_per_block_bytes:,}",
        )
        table.add_row("blocks an SM", f"{self.blocks_per_sm}", "", "")
        table.add_row("occupancy", f"{self.occupancy:.1%}", "", "")
        return table

    def kernels_table(self) -> Table:
        """ptxas' figures for each kernel of the library."""
        from rich.table import Table

        table = Table(title=f"ptxas, nvcc {self.variant.toolchain}")
        table.add_column("kernel")
        for heading in ("registers", "spills, bytes", "stack, bytes", "static shared memory, bytes", "barriers"):
            table.add_column(heading, justify="right")
        for name, figures in self.variant.kernels.items():
            numbers = (
                figures.registers,
                figures.spill_bytes,
                figures.stack_bytes,
                figures.shared_memory_bytes,
                figures.barriers,
            )
            table.add_row(name, *(f"{number:,}" for number in numbers))
        return table


def inspect(problem: Problem, config: Config, device: Device, *, cache: Path | None = None) -> Inspection:
    """Compiles a configuration and reads what it takes. Needs nvcc, and no GPU.

    Args:
        problem: Its dtype, head_dims and mask select the kernel.
        config: What to compile.
        device: The target, and the limits that the occupancy refers to.
        cache: Where builds are kept; None for the usual place.

    Raises:
        UsageError: The configuration is impossible for this problem and device, or the target is the host CPU.
        BwdtuneError: It does not compile, or no compiler was found.
    """
    if device.arch == HOST_ARCH:
        raise UsageError("a build for the host CPU has no registers or occupancy: choose a GPU's arch, such as sm_120a")
    from ...runtime.kernel import Kernel  # loads PyTorch

    require_valid(problem, config, device)
    variant = build_one(render(problem, config), device.arch, cache=cache)
    if variant.library is None or variant.resources is None:
        raise BwdtuneError(f"{config.id}: the build reports no ptxas figures; its log is {variant.log}")
    info = Kernel.load(variant.library).info
    resources = variant.resources
    use = {
        "threads": info.threads,
        "registers": resources.registers,
        "shared_memory_bytes": info.shared_memory_bytes + resources.shared_memory_bytes,
    }
    return Inspection(
        config=config,
        problem=problem,
        device=device,
        variant=variant,
        threads=info.threads,
        shared_memory_bytes=info.shared_memory_bytes,
        resources=resources,
        estimate=config.estimate(problem),
        blocks_per_sm=device.blocks_per_sm(**use),
        occupancy=device.occupancy(**use),
    )


def sass(library: Path) -> str:
    """The machine code of a compiled library, as cuobjdump prints it.

    Raises:
        BwdtuneError: cuobjdump was not found, or failed.
    """
    program = cuobjdump()
    if program is None:
        raise BwdtuneError("cuobjdump is neither beside nvcc nor on PATH: install the full CUDA toolkit for --sass")
    result = subprocess.run([program, "-sass", library], capture_output=True, text=True, check=False)
    if result.returncode:
        message = next(iter(result.stderr.strip().splitlines()), f"exit status {result.returncode}")
        raise BwdtuneError(f"{program} failed: {message}")
    return result.stdout
