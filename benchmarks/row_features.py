"""What sinks and a gradient of the log-sum-exp cost: one configuration's kernels with and without them, side by side.

    python benchmarks/row_features.py --shape 8_16_4096_128 --causal --config w64 > row_features.json

The kernels are verified on small problems, and then run in the same interleaved rounds on a cold L2, as `tuner bench`
has them; each is told how many times as long as the plain one it takes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import torch

from bwdtune.gen.build.jobs import build
from bwdtune.gen.families import parse_config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import Kernel
from bwdtune.runtime.verification.cases import Case
from bwdtune.runtime.verification.inputs import make_inputs
from bwdtune.runtime.verification.verifier import Verifier
from bwdtune.tuner.lab.stopwatch import Timed, time_kernels
from bwdtune.tuner.lab.timing import BENCH_POLICY

PLAIN = "plain"
FEATURES = {
    PLAIN: {},
    "lse_grad": {"lse_grad": True},
    "sink": {"sink": True},
    "both": {"lse_grad": True, "sink": True},
}


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8_16_4096_128")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--config", default="w64", help="a preset, or a configuration's id")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    device, config = current_device(), parse_config(options.config)
    plain = Problem.parse(options.shape, dtype=options.dtype, causal=options.causal)
    problems = {name: replace(plain, **features) for name, features in FEATURES.items()}
    variants = build([render(problem, config) for problem in problems.values()], device.arch)
    verifier, kernels = Verifier("cuda"), {}
    for (name, problem), variant in zip(problems.items(), variants, strict=True):
        assert variant.library, variant.error
        kernels[name] = Kernel.load(variant.library)
        verified = verifier.verify(problem, kernels[name])
        assert verified.passed, verified.reason
    timings = time_kernels(
        {name: timed(problem, kernels[name]) for name, problem in problems.items()}, BENCH_POLICY, torch.device("cuda")
    )
    found = {
        "problem": plain.to_dict(),
        "config": config.id,
        "gpu": device.name,
        "policy": BENCH_POLICY.id,
        "torch": torch.__version__,
        "kernels": [
            {
                "name": name,
                "median_ms": timing.median_ms,
                "low_ms": timing.low_ms,
                "high_ms": timing.high_ms,
                "samples": timing.samples,
                "ratio": timings.ratio(name, PLAIN).to_dict(),
            }
            for name, timing in timings.items()
        ],
        "notice": timings.notice,
    }
    print(json.dumps(found, indent=2))


def timed(problem: Problem, kernel: Kernel) -> Timed:
    """A kernel with inputs and outputs of its own."""
    inputs = make_inputs(Case(problem, "normal"), torch.device("cuda"))
    launch = kernel.prepare(
        **inputs.read(),
        **inputs.outputs(),
        scale=problem.softmax_scale,
        features=inputs.features,
    )
    return Timed(launch)


if __name__ == "__main__":
    main()
