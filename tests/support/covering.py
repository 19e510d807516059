"""Configurations to test with: the presets that a problem has, and few that together have every parameter's values."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator

import numpy as np
from once import once

from bwdtune.gen.device import Device
from bwdtune.gen.families import PRESETS, Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.space import refusal, representatives, valid_configs


@functools.cache
def all_representatives() -> tuple[Config, ...]:
    """Those of all families, made once: there are tens of thousands."""
    return tuple(representatives())


def valid_presets(problem: Problem, device: Device) -> dict[str, Config]:
    """The presets that can serve the problem on the device: not each is for every card, mask and head_dim."""
    return {name: config for name, config in PRESETS.items() if refusal(problem, config, device) is None}


@once
def covering_configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    """Few valid configurations in which each value of each parameter that a family's valid ones have occurs."""
    return covering(valid_configs(problem, device), together=1)


def covering(configs: Iterable[Config], *, together: int) -> tuple[Config, ...]:
    """Few of these, chosen greedily, in which so many values as occur together in one of a family do so again."""
    families: dict[str, list[Config]] = {}
    for config in dict.fromkeys(configs):
        families.setdefault(config.family, []).append(config)
    return tuple(chosen for alike in families.values() for chosen in _covering_family(alike, together))


def _covering_family(configs: list[Config], together: int) -> Iterator[Config]:
    """Chosen among hundreds of thousands, so in arrays."""
    values = np.array([[*vars(config).values()] for config in configs])
    choices = [np.unique(column, return_inverse=True) for column in values.T]
    # Of each combination of parameters the number of the values that each configuration has, and which are missing.
    combinations = []
    for group in itertools.combinations(choices, together):
        number = np.zeros(len(configs), dtype=np.int64)
        for found, places in group:
            number = number * len(found) + places
        missing = np.zeros(math.prod(len(found) for found, _ in group), dtype=np.uint8)
        missing[number] = 1
        combinations.append((number.astype(np.uint16), missing))
    assert all(len(missing) <= 2**16 for _, missing in combinations)
    while combinations:
        new = np.zeros(len(configs), dtype=np.uint16)
        for number, missing in combinations:
            new += missing[number]
        best = int(np.argmax(new))
        for number, missing in combinations:
            missing[number[best]] = 0
        combinations = [(number, missing) for number, missing in combinations if missing.any()]
        yield configs[best]
