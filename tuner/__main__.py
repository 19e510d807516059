"""``tuner``, which is ``python -m bwdtune.tuner`` too."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs the command line, of which loading alone takes long enough to be interrupted; returns the exit status."""
    try:
        from .cli import main as run
    except KeyboardInterrupt:
        print("tuner: interrupted", file=sys.stderr)
        return 130
    status = run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: another Ctrl-C would only change how it seems to end
    return status


if __name__ == "__main__":
    sys.exit(main())
