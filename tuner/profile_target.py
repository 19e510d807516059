"""The program that ncu runs for ``tuner profile``: one backward between the profiler's start and stop.

    python -m bwdtune.tuner.profile_target LIBRARY PROBLEM

LIBRARY is a compiled kernel, PROBLEM a JSON object of `Problem`'s fields.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ..gen.problem import Problem
from ..runtime.kernel import Kernel, backward
