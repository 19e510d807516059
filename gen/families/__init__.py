"""The kernel families: one file for each, with all that Python knows of it."""

from .base import Config, Contradiction, Estimate, Parameter, Phase, TileWork, ceil_div
from .mma import MmaConfig
from .mmat import TransposedMmaConfig
from .presets import PRESETS, parse_config, preset_name, short_form
from .registry import FAMILIES, config_from_dict
from .wgmma import WgmmaConfig

__all__ = [
    "FAMILIES",
    "PRESETS",
    "Config",
    "Contradiction",
    "Estimate",
    "MmaConfig",
    "Parameter",
    "Phase",
    "TileWork",
    "TransposedMmaConfig",
    "WgmmaConfig",
    "ceil_div",
    "config_from_dict",
    "parse_config",
    "preset_name",
    "short_form",
]
