"""Configurations to test with: the presets that a problem has, and few that together have every parameter's values."""

from __future__ import annotations

from bwdtune.gen.config import PRESETS, Config
from bwdtune.gen.device import Device
from bwdtune.gen.problem import Problem
from bwdtune.gen.space import refusal, valid_configs


def valid_presets(problem: Problem, device: Device) -> dict[str, Config]:
    """The presets that can serve the problem on the device: not each is for every card, mask and head_dim."""
    return {name: config for name, config in PRESETS.items() if refusal(problem, config, device) is None}


def covering_configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    """Valid configurations, chosen greedily, until each value that occurs in the space occurs among them."""
    valid = [
        (config, frozenset((config.family, *item) for item in config.to_dict().items()))
        for config in valid_configs(problem, device)
    ]
    open_values = frozenset().union(*(values for _, values in valid))
    chosen = []
    while open_values:
        config, values = max(valid, key=lambda entry: len(entry[1] & open_values))
        chosen.append(config)
        open_values -= values
    return tuple(chosen)
