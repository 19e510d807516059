"""What the compiler makes of the kernels that tests judge by its figures, on record: `tests/templates/compiled.jsonl`.

The same text, compiled by the same nvcc with the same options, is the same machine code with the same registers. So a
text that is on record is judged by the recorded figures, and compiled only if it is in the sample; any other text is
compiled. `make record` writes the record anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bwdtune.gen.build.toolchain import find_nvcc

PATH = Path(__file__).resolve().parents[1] / "templates" / "compiled.jsonl"
SAMPLE = 10  # one of so many that are on record is compiled all the same
_KEY_DIGITS = 16

Figures = dict[str, Any]


def key_of(*parts: str) -> str:
    """A name for what decides a compile: text, target, options, compiler."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_DIGITS]


def is_sampled(key: str) -> bool:
    return int(key, 16) % SAMPLE == 0


class Record:
    """Figures of compiles by one version of nvcc, and which of them this process has asked for.

    Attributes:
        asked: Name and figures, by key, of what was asked for.
        compiled: The keys of those among them that were not on record.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = (), toolkit: str = "") -> None:
        self._figures: dict[str, Figures] = {}
        head, *entries = [*lines] or [{}]
        if head.get("nvcc") == toolkit:
            self._figures = {entry["key"]: entry["figures"] for entry in entries}
        self.asked: dict[str, tuple[str, Figures]] = {}
        self.compiled: set[str] = set()

    def answers(self, key: str) -> bool:
        """Whether this need not be compiled."""
        return key in self._figures and not is_sampled(key)

    def judge(self, key: str, name: str, compiled: Figures | None) -> Figures:
        """The figures to judge a kernel by.

        Args:
            key: See `key_of`.
            name: For people who read the record.
            compiled: What was found by compiling; None where the record `answers`.
        """
        if compiled is None:
            compiled = self._figures[key]
        elif key not in self._figures:
            self.compiled.add(key)
        else:
            recorded = self._figures[key]
            assert compiled == recorded, f"{name} is on record as {recorded}, but compiles to {compiled}: `make record`"
        self.asked[key] = (name, compiled)
        return compiled


def written(asked: Mapping[str, tuple[str, Figures]], toolkit: str) -> str:
    """The content of the file, from which what no test asked for is gone."""
    entries = sorted((name, key, figures) for key, (name, figures) in asked.items())
    lines = [{"nvcc": toolkit}, *({"kernel": name, "key": key, "figures": figures} for name, key, figures in entries)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def read(text: str, toolkit: str) -> Record:
    """The record in a file's content, which is of no use to another toolkit than its own."""
    return Record(map(json.loads, text.splitlines()), toolkit)


@functools.cache
def record() -> Record:
    """The one that is beside the tests, as this process uses it."""
    return read(PATH.read_text(), find_nvcc().version)
