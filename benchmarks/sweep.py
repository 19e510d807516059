"""Records a sweep: compiles and times configurations drawn from a problem's space, for `tuner replay`.

    python benchmarks/sweep.py --shape 8_16_4096_128 --causal -o benchmarks/sweeps/h200_8_16_4096_128_causal.json

The configurations are spread over the families and the deciles of the predicted time; presets and shipped rows are
among them only by chance. Each is timed interleaved with one reference kernel. Nothing is verified: a sweep says how
fast kernels are, and none of it is a winner. Sweeps of one kind of problem share compiled kernels: several `--shape`
may be given. With `--limits`, the configurations keep to that card's limits and must compile for it without spills.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from bwdtune.gen.build.jobs import Variant, build
from bwdtune.gen.build.limits import job_limit
from bwdtune.gen.device import Device
from bwdtune.gen.emulation import EMULATED_CARDS
from bwdtune.gen.families import PRESETS, Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.gen.space import refusal, valid_configs
from bwdtune.runtime.gpu import current_device, environment
from bwdtune.tuner.lab.gpu_client import CandidateError, Worker
from bwdtune.tuner.lab.timing import Policy
from bwdtune.tuner.search.gates import SPILL_BOUND_BYTES
from bwdtune.tuner.search.sweep import Sweep, SweepRow, stratified

POLICY = Policy(warmup_ms=1, budget_ms=30, min_samples=5, max_samples=15)


class _TimeIsUp(Exception):
    pass


def main() -> int:
    options = _arguments()
    start = time.monotonic()
    device = current_device()
    space = EMULATED_CARDS[options.limits] if options.limits else device
    problems = [Problem.parse(shape, dtype=options.dtype, causal=options.causal) for shape in options.shape]
    if len({problem.kernel_spec for problem in problems}) != 1:
        sys.exit("the shapes must be of one kind, so that they share compiled kernels")
    configs = stratified(problems[0], valid_configs(problems[0], space), device, options.count, options.seed)
    variants = _compile(problems[0], configs, device.arch, options, start)
    within = _compile(problems[0], configs, space.arch, options, start) if options.limits else variants
    if options.compile_only:
        return 0
    with Worker() as worker:
        for problem, output in zip(problems, options.output, strict=True):
            rows = _time(worker, problem, configs, variants, within, device)
            if not rows:
                sys.exit(f"nothing of {problem.label} was timed")
            toolkit = next(iter(variants.values())).toolchain
            where = environment(device, toolkit)
            provenance = {
                "gpu": where.gpu.name,
                "driver": where.driver,
                "torch": where.torch,
                "nvcc": where.toolkit,
                "limits": options.limits,
                "policy": POLICY.id,
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "command": " ".join(["python", *sys.argv]),
            }
            output.parent.mkdir(parents=True, exist_ok=True)
            Sweep(problem, device, tuple(rows), provenance).write(output)
            print(f"{output}: {len(rows)} configurations, {sum(row.ms is not None for row in rows)} of them timed")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", required=True, help="B_H_S_D; may be repeated")
    parser.add_argument("-o", "--output", action="append", type=Path, default=[], help="the file of each shape")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--limits", choices=sorted(EMULATED_CARDS))
    parser.add_argument("--count", type=int, default=420, help="configurations to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--jobs", type=int, default=job_limit(os.environ), help="compiles at once")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no compile later than this")
    parser.add_argument("--compile-only", action="store_true", help="fill the cache, time nothing")
    options = parser.parse_args()
    if not options.compile_only and len(options.output) != len(options.shape):
        parser.error("name one output a shape")
    return options


def _compile(
    problem: Problem, configs: list[Config], arch: str, options: argparse.Namespace, start: float
) -> dict[Config, Variant]:
    """What the compiler makes of the configurations within the time."""
    found: dict[Config, Variant] = {}

    def note(variant: Variant) -> None:
        found[variant.source.config] = variant
        if time.monotonic() - start > options.seconds:
            raise _TimeIsUp

    try:
        build(
            [render(problem, config) for config in configs], arch, cache=options.cache, jobs=options.jobs, on_done=note
        )
    except _TimeIsUp:
        print(f"the time is up: {len(found)} of {len(configs)} are compiled for {arch}")
    return found


def _time(
    worker: Worker,
    problem: Problem,
    configs: list[Config],
    variants: dict[Config, Variant],
    within: dict[Config, Variant],
    device: Device,
) -> list[SweepRow]:
    reference = next(
        variants[config]
        for config in [*PRESETS.values(), *configs]
        if config in variants and variants[config].library and refusal(problem, config, device) is None
    )
    rows = []
    for config in configs:
        if config not in variants or config not in within:
            continue  # there was no time to compile it
        variant, of_limits = variants[config], within[config]
        registers = of_limits.resources.registers if of_limits.resources else None
        spilled = of_limits.resources.spill_bytes if of_limits.resources else None
        bound = SPILL_BOUND_BYTES if of_limits is variant else 0
        if not variant.library or not of_limits.library:
            rows.append(SweepRow(config, registers, spilled, reason=variant.error or of_limits.error))
        elif spilled is not None and spilled > bound:
            rows.append(SweepRow(config, registers, spilled, reason=f"{spilled} bytes are spilled"))
        else:
            try:
                timings = worker.time(problem, [variant, reference], (), POLICY)
            except CandidateError as error:
                rows.append(SweepRow(config, registers, spilled, reason=str(error)))
                continue
            ms, beside = timings[config.id].median_ms, timings[reference.source.config.id].median_ms
            rows.append(SweepRow(config, registers, spilled, round(ms, 5), round(beside, 5)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
