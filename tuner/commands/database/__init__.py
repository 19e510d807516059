"""``tuner db``: the database as a thing to hand round. A file a command; `COMMANDS` has them by name."""

from __future__ import annotations

from . import check, export, import_, merge

HELP = "Hand a database on, take one over, check one."
COMMANDS = {"export": export, "import": import_, "merge": merge, "check": check}
