"""Which kernel computes a problem here.

`choose` answers by arithmetic on what is known already; reading the database, rendering, compiling and loading happen
in a background thread (`choices`), unless `prepare` or `warmup` has done it before. The rule of choice is in
`selection`, and docs/dispatch.md describes all of it.
"""

from .choices import choose, discard, forget, prepare, subscribe
from .records import Choice

__all__ = ["Choice", "choose", "discard", "forget", "prepare", "subscribe"]
