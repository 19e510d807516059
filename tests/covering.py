"""Few configurations that together have every value of every parameter."""

from __future__ import annotations

from bwdtune.gen.config import Config
from bwdtune.gen.device import Device
from bwdtune.gen.problem import Problem
from bwdtune.gen.space import valid_configs


def covering_configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    """Valid configurations, chosen greedily, until each value that occurs in the space occurs among them."""
    valid = [(config, frozenset(config.to_dict().items())) for config in valid_configs(problem, device)]
    open_values = frozenset().union(*(values for _, values in valid))
    chosen = []
    while open_values:
        config, values = max(valid, key=lambda entry: len(entry[1] & open_values))
        chosen.append(config)
        open_values -= values
    return tuple(chosen)
