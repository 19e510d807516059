"""Configurations to test with: the presets that a problem has, and few that together have every parameter's values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from bwdtune.gen.config import PRESETS, Config
from bwdtune.gen.device import Device
from bwdtune.gen.problem import Problem
from bwdtune.gen.space import refusal, valid_configs


def valid_presets(problem: Problem, device: Device) -> dict[str, Config]:
    """The presets that can serve the problem on the device: not each is for every card, mask and head_dim."""
    return {name: config for name, config in PRESETS.items() if refusal(problem, config, device) is None}


def covering_configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    """Few valid configurations in which each value of each parameter that a family's valid ones have occurs."""
    return covering(valid_configs(problem, device), together=1)


def covering(configs: Iterable[Config], *, together: int) -> tuple[Config, ...]:
    """Few of these, chosen greedily, in which so many values as occur together in one of a family do so again."""
    bits: dict[object, int] = {}

    def combinations(config: Config) -> int:
        """A set, one bit for each."""
        found = itertools.combinations(vars(config).items(), together)
        return sum(1 << bits.setdefault((config.family, values), len(bits)) for values in found)

    having = {config: combinations(config) for config in configs}
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        chosen.append(max(having, key=lambda config: (having[config] & missing).bit_count()))
        missing &= ~having[chosen[-1]]
    return tuple(chosen)
