"""The command ``tuner``: puts the commands together, runs one, and turns its errors into lines and exit statuses."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from ..gen.errors import BwdtuneError
from .commands import bench, export, inspect, list, prebuild, profile, roofline, search, ship, show, verify
from .commands.output import complain

# typer has used click, and holds a copy of it since: its public exceptions lead to the base class of either.
_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="tuner",
    help="Generates, checks, times and keeps CUDA attention-backward kernels.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _module in (search, list, show, bench, verify, inspect, profile, roofline, export, prebuild, ship):
    app.command(_module.__name__.rpartition(".")[2])(_module.command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 for a failure, 2 for wrong use, 130 for an interrupt."""
    warnings.showwarning = _show_warning
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the caller has closed it
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    try:
        given = [*(sys.argv[1:] if arguments is None else arguments)]
        status = app(args=given or ["--help"], standalone_mode=False)
    except BwdtuneError as error:
        return _failed(str(error), error.exit_status)
    except _ClickException as error:
        return _failed(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        return _failed("interrupted", search.INTERRUPTED)
    except BrokenPipeError:  # `tuner list | head`: whoever read has enough
        sys.stdout = None
        return 1
    except OSError as error:
        return _failed(str(error), 1)
    return status if isinstance(status, int) else 0


def _failed(message: str, status: int) -> int:
    complain(message)
    return status


def _show_warning(message: Warning | str, *unused: Any, **also_unused: Any) -> None:
    complain(f"warning: {message}")
