"""The program that ncu runs for ``tuner profile``: one backward between the profiler's start and its stop.

    python -m bwdtune.tuner.commands.profile_target LIBRARY PROBLEM

LIBRARY is a compiled kernel, PROBLEM a JSON object of `Problem`'s fields.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ...gen.problem import Problem
from ...runtime.kernel import Kernel
from ...runtime.verification.cases import Case
from ...runtime.verification.inputs import make_inputs


def main(library: str, problem_json: str) -> None:
    """Launches the kernel twice on the first GPU; the second time is the profiler's."""
    problem = Problem(**json.loads(problem_json))
    inputs = make_inputs(Case(problem, "normal"), torch.device("cuda"))
    launch = Kernel.load(Path(library)).prepare(
        **inputs.read(),
        **inputs.outputs(),
        scale=problem.softmax_scale,
        features=inputs.features,
    )
    launch()  # loads the module, which is not the kernel's time
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    launch()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
