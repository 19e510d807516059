"""Verifies one library and prints the verdict as JSON: see `verdicts.verify`, which starts this.

``python -m bwdtune.runtime.verification LIBRARY PROBLEM DEVICE``; the problem is JSON, the device CUDA's ordinal, or
``cpu`` for a library of the target ``host``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from ...gen.problem import WINDOW, Problem
from ..kernel import Kernel, KernelError
from .verifier import Verifier

_GROUPS = (1, 2)  # query heads of a key head
_WIDE = 4096


def main(library: str, problem: str, device: str) -> int:
    """The script. Exit status: 0 where there is a verdict, 1 where there is none."""
    kind = Problem(**json.loads(problem))
    if kind.mask == WINDOW:  # its limits are arguments, and those of the small problems are no larger
        kind = replace(kind, window_left=_WIDE, window_right=_WIDE)
    verifier = Verifier(f"cuda:{device}" if device.isdecimal() else device)
    torch.set_grad_enabled(False)
    reason = ""
    try:
        kernel = Kernel.load(Path(library))
        for group in _GROUPS:
            verification = verifier.verify(replace(kind, heads_q=group, heads_kv=1), kernel)
            reason = reason or verification.reason
    except torch.OutOfMemoryError:
        print("the GPU has no memory to spare", file=sys.stderr)
        return 1
    except (KernelError, RuntimeError) as error:  # an illegal access, a trap: whatever the GPU says of the kernel
        reason = str(error).splitlines()[0]
    print(json.dumps({"passed": not reason, "reason": reason}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
