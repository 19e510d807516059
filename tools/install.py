"""Installs packages into this Python's environment: ``install.py ARGUMENT ...``, as for ``pip install``.

With uv, which takes a sixth of pip's time. uv does not read pip's settings (an index of a company's own, say), so they
are handed to it. pip does it where uv is not installed, has no option for one of pip's settings, or fails.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
"""uv's options for those of pip that have values; several are separated by spaces."""
OF_NO_CONSEQUENCE = {
    "break-system-packages",
    "cache-dir",
    "default-timeout",
    "disable-pip-version-check",
    "no-cache-dir",
    "no-color",
    "no-compile",
    "no-input",
    "no-warn-script-location",
    "prefer-binary",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "timeout",
    "user-agent",
    "verbose",
}


def settings(listing: str) -> dict[str, str]:
    """pip's settings for installations, by option; a variable counts for more than a file.

    Args:
        listing: What ``pip config list`` prints.
    """
    found: dict[str, str] = {}
    lines = [line.partition("=") for line in listing.splitlines() if "=" in line]
    for section in ("global", "install", ":env:"):
        for name, _, value in lines:
            of, _, option = name.rpartition(".")
            if of == section:
                found[option] = str(ast.literal_eval(value))
    return found


def uv_options(settings: dict[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """What makes uv look where pip would: options, and variables of its environment. None if nothing does."""
    # Of several indexes pip takes the best match, wherever it is.
    options, variables = ["--index-strategy", "unsafe-best-match"], {}
    for name, value in settings.items():
        if name in OPTIONS:
            options += [word for part in value.split() for word in (OPTIONS[name], part)]
        elif name == "cert":
            variables["SSL_CERT_FILE"] = value
        elif name not in OF_NO_CONSEQUENCE:
            return None
    return options, variables


def main(arguments: list[str]) -> int:
    if importlib.util.find_spec("uv"):
        listing = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
        if handed := uv_options(settings(listing)):
            options, variables = handed
            command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *options, *arguments]
            if subprocess.run(command, env={**os.environ, **variables}).returncode == 0:
                return 0
            print("uv could not install this: trying pip", file=sys.stderr)
    return subprocess.run([*PIP, "install", "--no-compile", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
