"""Winners are carried over to another text of the same machine code, and to no other."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from search_fakes import ENVIRONMENT, PROBLEM, FakeBuilder, run_search

from bwdtune.db.shipped import Shipped, read_shipped, write_shipped
from bwdtune.db.store import Store
from bwdtune.gen.build.jobs import Variant
from bwdtune.gen.families import PRESETS
from bwdtune.gen.render import Source, render, template_hash
from bwdtune.tuner.cli import main
from bwdtune.tuner.commands import carry as module
from bwdtune.tuner.commands.ship import ship
from bwdtune.tuner.earlier import Asked

V1 = PRESETS["v1"]


class Before:
    """A version whose text had one line more: a comment, or code."""

    name = "v0"

    def __init__(self, line: str) -> None:
        self.line = line

    def render(self, asked: Sequence[Asked]) -> list[Source]:
        sources = [render(problem, config, emulate=emulate) for problem, config, emulate in asked]
        return [replace(source, text=source.text + self.line) for source in sources]


COMMENT, CODE = Before("// a comment\n"), Before("int more;\n")


@pytest.fixture(autouse=True)
def builder(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    """A compiler whose machine code is a text without its comments."""
    builder = FakeBuilder(machine_code=lambda source: source.text.replace("// a comment\n", "")[-40:])

    def build(sources: Sequence[Source], arch: str, *, cache: Path | None = None) -> list[Variant]:
        return [builder(source, arch) for source in sources]

    monkeypatch.setattr(module, "build", build)
    monkeypatch.setattr(module, "find_compiler", lambda arch: SimpleNamespace(version=ENVIRONMENT.toolkit))
    return builder


def row_of(version: Before, **changes: Any) -> Shipped:
    """A row as that version shipped it."""
    (source,) = version.render([(PROBLEM, V1, None)])
    row = Shipped(
        problem=PROBLEM,
        config=V1,
        gpu=ENVIRONMENT.gpu,
        kind="measured",
        environment=ENVIRONMENT,
        policy="race",
        date="2026-01-01T00:00:00+00:00",
        command="tuner search",
        ms=7.0,
        cycles=None,
        max_error=2e-3,
        source_hash=source.hash,
        template_hash="of v0",
    )
    return replace(row, **changes)


class TestShipped:
    @pytest.fixture
    def table(self, tmp_path: Path) -> Path:
        return tmp_path / "table.json"

    def test_the_same_machine_code_is_todays(self, table: Path) -> None:
        write_shipped([row_of(COMMENT)], table)
        (found,) = module.carry_shipped(COMMENT, table)
        assert found.same
        (row,) = read_shipped(table)
        assert (row.source_hash, row.template_hash) == (render(PROBLEM, V1).hash, template_hash("mma"))
        assert row.machine_code == found.before
        assert (row.ms, row.environment) == (7.0, ENVIRONMENT)

    def test_other_machine_code_is_not(self, table: Path) -> None:
        before = row_of(CODE)
        write_shipped([before], table)
        (found,) = module.carry_shipped(CODE, table)
        assert not found.same
        assert "another machine code" in found.note
        assert read_shipped(table) == (replace(before, machine_code=found.before),)

    def test_what_that_version_did_not_measure_is_left_alone(self, table: Path, builder: FakeBuilder) -> None:
        before = row_of(COMMENT)
        write_shipped([before], table)
        (found,) = module.carry_shipped(CODE, table)
        assert found.note == "v0 makes another text of it than the one that was measured"
        assert read_shipped(table) == (before,)
        assert not builder.compiled

    def test_what_names_its_machine_code_needs_no_version(self, table: Path, builder: FakeBuilder) -> None:
        code = builder.machine_code(render(PROBLEM, V1))
        write_shipped([row_of(COMMENT, machine_code=code), row_of(CODE, machine_code="another")], table)
        assert [one.same for one in module.carry_shipped(None, table)] == [True, False]
        same, other = read_shipped(table)
        assert (same.source_hash, same.machine_code) == (render(PROBLEM, V1).hash, code)
        assert other == row_of(CODE, machine_code="another")
        assert len(builder.compiled) == 1, "today's text alone"

    def test_what_does_not_name_it_needs_one(self, table: Path, builder: FakeBuilder) -> None:
        write_shipped([row_of(COMMENT)], table)
        (found,) = module.carry_shipped(None, table)
        assert "name the VERSION" in found.note
        assert not builder.compiled

    def test_another_nvcc_says_nothing(self, table: Path, builder: FakeBuilder) -> None:
        before = row_of(COMMENT, environment=replace(ENVIRONMENT, toolkit="12.8.93"))
        write_shipped([before], table)
        (found,) = module.carry_shipped(COMMENT, table)
        assert "as nvcc 12.8.93 compiles it, and this is 13.0.88" in found.note
        assert read_shipped(table) == (before,)
        assert not builder.compiled

    def test_what_does_not_compile_says_so(self, table: Path, builder: FakeBuilder) -> None:
        builder.broken = lambda config: True
        write_shipped([row_of(COMMENT)], table)
        (found,) = module.carry_shipped(COMMENT, table)
        assert "does not compile: error: expected a ';'" in found.note


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database that an earlier version searched into, before kernels were known by their machine code."""
    from bwdtune.tuner.search import candidates

    def before(*arguments: Any, **options: Any) -> Source:
        source = render(*arguments, **options)
        return replace(source, text=source.text + COMMENT.line)

    path = tmp_path / "results.sqlite"
    with monkeypatch.context() as patch:
        patch.setattr(candidates, "render", before)
        run_search(path, builder=FakeBuilder(machine_code=lambda source: None), trials=3)
    return path


def test_a_databases_winners_are_carried_over(stored: Path, tmp_path: Path) -> None:
    with closing(Store.open(stored)) as store:
        (before,) = store.winners()
        (found,) = module.carry_stored(COMMENT, store)
        assert found.same
        (winner,) = store.winners()
        assert winner.machine_code == found.before
        assert (winner.config, winner.median_ms, winner.source_hash) == (
            before.config,
            before.median_ms,
            before.source_hash,
        )
        (row,) = ship(store, tmp_path / "table.json").rows
    assert (row.source_hash, row.machine_code) == (render(PROBLEM, winner.config).hash, winner.machine_code)


@pytest.mark.parametrize(("version", "status"), [(COMMENT, 0), (CODE, 1)], ids=["same", "other"])
def test_the_command(
    stored: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: Before,
    status: int,
) -> None:
    @contextmanager
    def earlier(name: str) -> Iterator[Before]:
        assert name == "v0"
        yield version

    monkeypatch.setattr(module, "earlier", earlier)
    assert main(["carry", "v0", "--db", str(stored), "--json"]) == status
    (one,) = json.loads(capsys.readouterr().out)
    assert one["same"] is (status == 0)


@pytest.mark.parametrize("version", ["no-such-commit", "/nowhere"])
def test_what_is_no_version_is_one_line(version: str, stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["carry", version, "--db", str(stored)]) == 2
    said = capsys.readouterr().err.strip()
    assert version in said
    assert "\n" not in said
