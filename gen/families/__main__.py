"""Prints docs/parameters.md: ``python -m bwdtune.gen.families > docs/parameters.md``."""

from __future__ import annotations

from .table import page

print(page(), end="")
