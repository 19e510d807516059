"""Chooses the kernel that computes a problem on this GPU.

`choose` decides by arithmetic on what is known already. Reading the database, rendering, compiling and loading happen
in a background thread (`choices`), unless `prepare` or `warmup` did it before. The rule of choice is in `selection`;
docs/dispatch.md describes all of it.
"""

from .choices import choose, discard, forget, prepare, subscribe
from .records import Choice

__all__ = ["Choice", "choose", "discard", "forget", "prepare", "subscribe"]
