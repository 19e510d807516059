"""How a command says what it found: JSON for programs, tables and lines for people, one line for an error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleRenderable

_PLAIN_WIDTH = 240  # of tables that go to a file or a pipe, where nothing should be cut


def print_result(data: Any, parts: Sequence[ConsoleRenderable | str], as_json: bool) -> None:
    """Prints JSON, or tables and lines for people.

    Args:
        data: For programs. A number that JSON does not have, such as the error of a gradient that is not finite, is
            printed as null.
        parts: For people.
        as_json: Which of the two.
    """
    if as_json:
        print(json.dumps(_without_infinities(data), indent=2, allow_nan=False))
        return
    shown = console()
    for part in parts:
        if isinstance(part, str):
            shown.print(part, markup=False, highlight=False, soft_wrap=True)
        else:
            shown.print(part)


def console(stderr: bool = False) -> Console:
    """Where tables go: as wide as the terminal, or wide enough for every column."""
    from rich.console import Console

    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=_PLAIN_WIDTH)


def say(text: str) -> None:
    """A line for people, beside the result: on standard error."""
    console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def complain(message: str) -> None:
    """One line on standard error."""
    print(f"tuner: {' '.join(message.split())}", file=sys.stderr)


def print_error(message: str, exit_status: int) -> None:
    """Why there is no result, for programs that asked for JSON."""
    print(json.dumps({"error": " ".join(message.split()), "exit_status": exit_status}, indent=2))


def _without_infinities(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _without_infinities(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_infinities(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
