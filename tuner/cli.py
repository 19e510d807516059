"""The command ``tuner``: puts the commands together, runs one, and turns its errors into lines and exit statuses."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer

from .. import __version__
from ..gen.errors import BwdtuneError
from .commands import (
    bench,
    carry,
    database,
    doctor,
    export,
    inspect,
    list,
    prebuild,
    profile,
    replay,
    report,
    roofline,
    search,
    ship,
    show,
    verify,
)
from .commands.output import complain, print_error

# typer has used click, and holds a copy of it since: its public exceptions lead to the base class of either.
_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class _Interrupted(BwdtuneError):
    """Ctrl-C or SIGTERM ended a command that had nothing to tell."""

    exit_status = search.INTERRUPTED


def _interruptible(command: Callable[..., Any]) -> Callable[..., Any]:
    """Has a command's interrupt reach `main`: typer ends a KeyboardInterrupt itself, without a word."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt:
            raise _Interrupted("interrupted") from None

    return run


app = typer.Typer(
    name="tuner",
    help="Generates, checks, times and keeps CUDA attention-backward kernels.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module in (
    search,
    list,
    show,
    report,
    bench,
    verify,
    inspect,
    profile,
    roofline,
    export,
    prebuild,
    replay,
    doctor,
    ship,
    carry,
):
    app.command(_module.__name__.rpartition(".")[2])(_interruptible(_module.command))
_database = typer.Typer(help=database.HELP, context_settings={"help_option_names": ["-h", "--help"]})
for _name, _command in database.COMMANDS.items():
    _database.command(_name)(_interruptible(_command.command))
app.add_typer(_database, name="db")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"bwdtune {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 for a failure, 2 for wrong use, 130 for an interrupt.

    An error is one line on standard error. Where JSON was asked for, standard output has it too, as an object with the
    keys ``error`` and ``exit_status``, unless the command has printed its own result by then.
    """
    warnings.showwarning = _show_warning
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the caller has closed it
            setattr(sys, stream, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    try:
        with _terminated_like_interrupted():
            status = app(args=given or ["--help"], standalone_mode=False)
    except BwdtuneError as error:
        message, status = str(error), error.exit_status
    except _ClickException as error:
        message, status = error.format_message(), 2
    except (KeyboardInterrupt, typer.Abort):
        message, status = "interrupted", search.INTERRUPTED
    except BrokenPipeError:  # `tuner list | head`: whoever read has enough
        sys.stdout = None
        return 1
    except OSError as error:
        message, status = str(error), 1
    else:
        return status if isinstance(status, int) else 0
    complain(message)
    if "--json" in given:
        print_error(message, status)
    return status


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Has SIGTERM end the command as Ctrl-C does: with a line, and whatever it has to put away."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show_warning(message: Warning | str, *unused: Any, **also_unused: Any) -> None:
    complain(f"warning: {message}")
