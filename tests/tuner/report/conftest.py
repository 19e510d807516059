from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from report_databases import make_hostile, search_all_ways, search_on_a_hostile_card

from bwdtune.tuner.cli import main

_DATABASES = {
    "searched": ("team.sqlite", (search_all_ways,)),
    "hostile": ("<b>h.sqlite", (search_on_a_hostile_card, make_hostile)),
}


def _shared(factory: pytest.TempPathFactory) -> Path:
    """A folder for what takes seconds to make: the first worker that needs it makes it for all of them."""
    folder = factory.getbasetemp()
    shared = (folder.parent if folder.name.startswith("popen-") else folder) / "reported"
    shared.mkdir(exist_ok=True)
    return shared


def _database(factory: pytest.TempPathFactory, name: str) -> Path:
    shared, (file, steps) = _shared(factory), _DATABASES[name]
    with FileLock(shared / f"{name}.lock"):
        if not (shared / file).exists():
            for step in steps:
                step(shared / f"unfinished {name}")
            (shared / f"unfinished {name}").rename(shared / file)
    return shared / file


@pytest.fixture
def searched(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a database: see `report_databases.search_all_ways`."""
    return Path(shutil.copy(_database(tmp_path_factory, "searched"), tmp_path))


@pytest.fixture
def report(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The page of a database of `_DATABASES`, made with the command's options."""

    def made(name: str, *options: str) -> Path:
        output = _shared(tmp_path_factory) / f"{name}{''.join(options)}.html"
        database = _database(tmp_path_factory, name)
        with FileLock(f"{output}.lock"):
            if not output.exists():
                assert main(["report", "--db", str(database), "--output", str(output), *options]) == 0
        return output

    return made
