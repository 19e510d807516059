"""Families by name, and configurations from their stored or written form."""

from __future__ import annotations

import re
from typing import Any

from ..errors import UsageError
from .base import Config
from .mma import MmaConfig
from .mmat import TransposedMmaConfig
from .wgmma import WgmmaConfig

FAMILIES: dict[str, type[Config]] = {one.family: one for one in (MmaConfig, TransposedMmaConfig, WgmmaConfig)}


def config_from_dict(values: dict[str, Any]) -> Config:
    """The configuration that `Config.to_stored` or `Config.to_dict` wrote. Nothing of it is trusted.

    A parameter may stand under its name or under the one it is stored by. One that was added later is missing in what
    was stored before: its default is what kernels did until then.

    Raises:
        UsageError: An unknown family, an unknown or missing parameter, or a value outside its choices.
    """
    values = dict(values)
    family = values.pop("family", None)
    if family not in FAMILIES:
        raise UsageError(f"unknown kernel family {family!r}: known are {', '.join(FAMILIES)}")
    config_type = FAMILIES[family]
    names = {alias: name for name, one in config_type.parameters.items() for alias in (name, one.stored)}
    unknown = values.keys() - names.keys()
    found = {names[alias]: value for alias, value in values.items() if alias not in unknown}
    missing = _needed(config_type) - found.keys()
    twice = {alias for alias in values if alias not in unknown and alias != names[alias] and names[alias] in values}
    if wrong := unknown | missing | twice:
        raise UsageError(
            f"a stored {family} configuration has unknown or missing parameters: {', '.join(sorted(wrong))}"
        )
    return config_type.of(found)


def parse_id(text: str) -> Config | None:
    """The configuration of an id; None where the text is none.

    A parameter with a default may be missing, as in an id that was written before it was added.
    """
    family, _, rest = text.partition("_")
    config_type = FAMILIES.get(family)
    if not config_type:
        return None
    pairs = [re.fullmatch(r"([a-z]+)(\d+)", part) for part in rest.split("_")]
    stated = {match[1]: int(match[2]) for match in pairs if match}
    found = {name: one for name, one in config_type.parameters.items() if one.short in stated}
    # All of them are parameters, each once and in its place.
    in_order = [match and match[1] for match in pairs] == [one.short for one in found.values()]
    if not in_order or not _needed(config_type) <= found.keys():
        return None
    return config_type.of({name: one.value_of(stated[one.short]) for name, one in found.items()})


def _needed(config_type: type[Config]) -> set[str]:
    return {name for name, one in config_type.parameters.items() if one.default is None}
