"""The table of all parameters in docs/parameters.md."""

from __future__ import annotations

from .base import Config, Parameter
from .presets import PRESETS, short_form
from .registry import FAMILIES

_HEAD = """\
# Parameters

What the search tunes, of each family of kernels. None of it changes what is computed, only how fast. This page is
printed by `python -m bwdtune.gen.families` from the declarations in `gen/families/`.

A configuration is written as a preset and what differs from it: `tuner inspect --config "w64conv skip_masked=1"`. The
letters are those of an id: `{short}` is `{id}`.
A parameter that has been renamed is stored under its first name, and may be written so.
"""


def page() -> str:
    """All families' parameters, as Markdown."""
    example = PRESETS["v3"]
    parts = [_HEAD.format(id=example.id, short=short_form(example))]
    for name, config_type in FAMILIES.items():
        presets = ", ".join(f"`{preset}`" for preset, config in PRESETS.items() if config.family == name)
        parts.append(f"## {name}\n\nPresets: {presets}.\n\n{_table(config_type)}")
    return "\n".join(parts)


def _table(config_type: type[Config]) -> str:
    rows = ["| parameter | in ids | values | default | |", "| --- | --- | --- | --- | --- |"]
    rows += [_row(one) for one in config_type.parameters.values()]
    return "\n".join(rows) + "\n"


def _row(one: Parameter) -> str:
    values = ", ".join(str(int(value)) for value in one.choices)
    default = "" if one.default is None else str(int(one.default))
    formerly = "" if one.stored == one.name else f" Stored as `{one.stored}`."
    return f"| `{one.name}` | {one.short} | {values} | {default} | {one.meaning}{formerly} |"
