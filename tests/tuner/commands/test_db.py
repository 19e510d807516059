"""`tuner db`: databases are handed on, and what they hand over wins nothing unseen."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from search_fakes import ENVIRONMENT, PROBLEM, FakeBench, FakeBuilder

from bwdtune.db.models import SCHEMA
from bwdtune.db.records import EMULATED, MeasurementRecord, SearchRecord, VerificationRecord
from bwdtune.db.store import Store
from bwdtune.gen.build.jobs import Variant
from bwdtune.gen.build.toolchain import ToolchainError, find_compiler
from bwdtune.gen.device import H200, HOST
from bwdtune.gen.families import PRESETS, Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source, render
from bwdtune.tuner import handover as module
from bwdtune.tuner.cli import main
from bwdtune.tuner.commands.database import check as checking
from bwdtune.tuner.lab.protocol import CandidateError
from bwdtune.tuner.search.search_store import variant_record

FIXTURES = Path(__file__).parents[2] / "db" / "fixtures"
H200_HERE = replace(ENVIRONMENT, gpu=replace(ENVIRONMENT.gpu, name=H200.name))
SHAPE = [word for word in PROBLEM.options if word != "--dtype"][:-1]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be copied: making a database takes a while."""
    path = tmp_path_factory.mktemp("empty") / "empty.sqlite"
    Store.open(path).close()
    return path


@pytest.fixture(scope="module")
def with_winner(empty: Path) -> Path:
    """To be copied, too."""
    path = empty.with_name("with_winner.sqlite")
    shutil.copy(empty, path)
    store_winner(path)
    return path


@pytest.fixture
def theirs(tmp_path: Path, empty: Path) -> Path:
    return Path(shutil.copy(empty, tmp_path / "theirs.sqlite"))


@pytest.fixture
def ours(tmp_path: Path, empty: Path) -> Path:
    return Path(shutil.copy(empty, tmp_path / "ours.sqlite"))


@dataclass
class Gpu:
    """A machine with an H200: what its compiler makes, and what its GPU says of that."""

    builder: FakeBuilder = field(default_factory=FakeBuilder)
    bench: FakeBench = field(default_factory=FakeBench)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def build(sources: list[Source], arch: str, *, cache: Path | None = None) -> list[Variant]:
            return [self.builder(source, arch) for source in sources]

        bench = self.bench

        class Worker:
            def __init__(self, device: str) -> None:
                assert device == "cuda:1"

            def __enter__(self) -> FakeBench:
                return bench

            def __exit__(self, *unused: object) -> None: ...

        monkeypatch.setattr(module, "build", build)
        monkeypatch.setattr(module, "Worker", Worker)
        monkeypatch.setattr(module, "usable_gpus", lambda: iter([(0, replace(H200, name="another")), (1, H200)]))
        monkeypatch.setattr(module, "gpu_uuid", lambda index: f"GPU-test-{index}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    found.install(monkeypatch)
    return found


def store_winner(
    path: Path,
    config: Config = PRESETS["v2"],
    median_ms: float = 4.0,
    *,
    problem: Problem = PROBLEM,
    variant: Variant | None = None,
    partial: bool = False,
    card: str = "GPU-theirs",
    **changes: Any,
) -> None:
    """What a search leaves in a database."""
    variant = variant or FakeBuilder()(render(problem, config), H200.arch)
    environment = changes.get("environment", H200_HERE)
    search = SearchRecord(
        problem=problem,
        study="",
        arch=variant.arch,
        sampler="tpe",
        seed=0,
        options={},
        host="their host",
        gpu=environment.gpu,
        gpu_uuid=card,
        driver=environment.driver,
        power_limit_w=None,
        bwdtune="0.1.0",
        toolkit=environment.toolkit,
        torch=environment.torch,
        optuna="4.0.0",
    )
    record = MeasurementRecord(environment, "race-1", median_ms, median_ms - 0.01, median_ms + 0.01, 30)
    record = replace(record, **changes)
    with closing(Store.open(path)) as store:
        search_id = store.begin_search(search)
        variant_id = store.record_variant(problem, variant_record(problem, variant))
        verdict = store.record_verification(problem, variant_id, VerificationRecord(True, 2e-3))
        measurement = store.record_measurement(problem, variant_id, record, search_id)
        store.set_winner(problem, record.environment, record.limits, measurement, verdict, partial)
        store.end_search(search_id, status="complete", decided=1)


def built(machine_code: str | None, toolkit: str = ENVIRONMENT.toolkit, **changes: Any) -> Variant:
    """A kernel as a compiler made it."""
    source = render(changes.get("problem", PROBLEM), changes.get("config", PRESETS["v2"]))
    variant = replace(FakeBuilder()(source, changes.get("arch", H200.arch)), toolchain=toolkit)
    variant.__dict__["machine_code"] = machine_code  # which is read from a library else
    return variant


def winners(path: Path) -> dict[Problem, Config]:
    with closing(Store.open(path, read_only=True)) as store:
        return {winner.problem: winner.config for winner in store.winners()}


def content(path: Path) -> list[Any]:
    """All that is stored, but for when a row was written."""
    with closing(sqlite3.connect(path)) as connection:
        tables = ("problems", "configurations", "variants", "searches", "measurements", "verifications", "winners")
        return [connection.execute(f"SELECT * FROM {table} ORDER BY id").fetchall() for table in tables]


def export(path: Path, to: Path, *options: str) -> Path:
    assert main(["db", "export", "--db", str(path), "-o", str(to), *options]) == 0
    return to


def hand_over(command: str, source: Path, ours: Path, *options: str) -> int:
    """By a file or from the database itself."""
    given = source if command == "merge" else export(source, source.with_suffix(".json"))
    return main(["db", command, str(given), "--db", str(ours), *options])


BOTH_WAYS = pytest.mark.parametrize("command", ["import", "merge"])


class TestExport:
    def test_it_goes_to_standard_output(self, theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
        store_winner(theirs)
        assert main(["db", "export", "--db", str(theirs)]) == 0
        (block,) = json.loads(capsys.readouterr().out)["problems"]
        assert Problem(**block["problem"]) == PROBLEM
        ((measurement,),) = [kernel["measurements"] for kernel in block["kernels"]]
        assert (measurement["median_ms"], measurement["wins"]) == (4.0, "whole")
        assert block["searches"][0]["uid"] == measurement["search"]

    def test_problems_can_be_selected(self, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        store_winner(theirs)
        store_winner(theirs, problem=replace(PROBLEM, batch=1))
        found = json.loads(export(theirs, tmp_path / "x.json", *SHAPE).read_text())
        assert [Problem(**block["problem"]) for block in found["problems"]] == [PROBLEM]
        assert main(["db", "export", "--db", str(theirs), "--shape", "1_1_64_64"]) == 1
        assert "nothing is stored about 1_1_64_64" in capsys.readouterr().err

    def test_a_file_that_cannot_be_written(self, theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
        store_winner(theirs)
        assert main(["db", "export", "--db", str(theirs), "-o", "/nowhere/x.json"]) == 1
        assert "/nowhere/x.json cannot be written" in capsys.readouterr().err

    @pytest.mark.parametrize("schema", [1, int(SCHEMA)])
    def test_what_was_taken_over_is_exported_the_same(
        self, schema: int, ours: Path, theirs: Path, tmp_path: Path
    ) -> None:
        """From a database, which may be an old one, and by the file once more."""
        path = FIXTURES / f"schema_{schema}.sqlite"
        before = path.read_bytes()
        assert main(["db", "merge", str(path), "--db", str(ours), "--trust"]) == 0
        assert path.read_bytes() == before, "it is only read"
        first = export(ours, tmp_path / "first.json")
        assert main(["db", "import", str(first), "--db", str(theirs), "--trust"]) == 0
        assert export(theirs, tmp_path / "again.json").read_text() == first.read_text()
        assert winners(theirs) == winners(ours) != {}


class TestTakingOver:
    @BOTH_WAYS
    def test_nothing_wins_that_cannot_be_verified_here(
        self, theirs: Path, ours: Path, command: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store_winner(theirs)
        assert hand_over(command, theirs, ours) == 1
        assert f"no {H200.name} is here to verify it on" in capsys.readouterr().out
        assert winners(ours) == {}
        with closing(Store.open(ours)) as store:
            (claimed,) = store.measurements(PROBLEM)
            assert not claimed.trusted
            assert claimed.verification is None
        assert main(["show", *SHAPE, "--db", str(ours)]) == 0
        assert "claimed" in capsys.readouterr().out

    @BOTH_WAYS
    def test_what_is_verified_here_wins(self, theirs: Path, ours: Path, command: str, gpu: Gpu) -> None:
        store_winner(theirs)
        assert hand_over(command, theirs, ours) == 0
        assert winners(ours) == {PROBLEM: PRESETS["v2"]}
        assert gpu.bench.verified == [PRESETS["v2"]]
        with closing(Store.open(ours)) as store:
            (stored,) = store.measurements(PROBLEM)
            assert stored.valid
            (search,) = store.searches(PROBLEM)
            assert (search.id, search.record.host) == (stored.search_id, "their host")

    @BOTH_WAYS
    @pytest.mark.parametrize("trust", [False, True])
    def test_once_more_it_changes_nothing(
        self, theirs: Path, ours: Path, command: str, trust: bool, gpu: Gpu, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store_winner(theirs)
        store_winner(theirs, PRESETS["v1"], 5.0, problem=replace(PROBLEM, batch=1), partial=True)
        options = ["--trust"] if trust else []
        assert hand_over(command, theirs, ours, *options) == 0
        before, verified = content(ours), len(gpu.bench.verified)
        capsys.readouterr()
        assert hand_over(command, theirs, ours, *options, "--json") == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["new_searches"], said["new_measurements"]) == (0, 0)
        assert {winner["fate"] for winner in said["winners"]} == {"known"}
        assert content(ours) == before
        assert len(gpu.bench.verified) == verified == (0 if trust else 2)

    def test_all_of_it_is_in_the_one_file(self, theirs: Path, ours: Path, tmp_path: Path) -> None:
        store_winner(theirs)
        assert hand_over("import", theirs, ours, "--trust") == 0
        shutil.copy(ours, tmp_path / "copy.sqlite")
        assert winners(tmp_path / "copy.sqlite") == {PROBLEM: PRESETS["v2"]}

    def test_what_is_trusted_needs_no_gpu(self, theirs: Path, ours: Path) -> None:
        store_winner(theirs, partial=True)
        assert hand_over("import", theirs, ours) == 1
        assert hand_over("import", theirs, ours, "--trust") == 0, "what was only claimed before counts from now on"
        assert winners(ours) == {PROBLEM: PRESETS["v2"]}
        with closing(Store.open(ours)) as store:
            assert store.winners()[0].partial
            assert [one.valid for one in store.measurements(PROBLEM)] == [True]

    def test_a_kernel_that_is_wrong_here_does_not_win(
        self, theirs: Path, ours: Path, gpu: Gpu, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store_winner(theirs)
        gpu.bench.wrong = lambda config: True
        assert hand_over("import", theirs, ours) == 1
        assert "its gradients are wrong here" in capsys.readouterr().out
        assert winners(ours) == {}
        assert hand_over("import", theirs, ours, "--trust") == 1, "what was seen here counts for more"
        assert "its gradients were wrong here" in capsys.readouterr().out
        assert winners(ours) == {}

    def test_one_that_ends_the_process_does_not_win(
        self, theirs: Path, ours: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def verify(*unused: object) -> None:
            raise CandidateError("an illegal memory access")

        store_winner(theirs)
        monkeypatch.setattr(gpu.bench, "verify", verify)
        assert hand_over("import", theirs, ours) == 1
        assert "an illegal memory access" in capsys.readouterr().out
        assert winners(ours) == {}

    @pytest.mark.parametrize(("toolkit", "wins"), [(ENVIRONMENT.toolkit, False), ("12.8.93", True)])
    def test_other_machine_code_than_the_one_that_was_timed(
        self, theirs: Path, ours: Path, gpu: Gpu, toolkit: str, wins: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Another compiler's is verified and wins, as it would be used; the same compiler's is another kernel."""
        store_winner(theirs, variant=built("theirs", toolkit), environment=replace(H200_HERE, toolkit=toolkit))
        assert hand_over("import", theirs, ours) == (0 if wins else 1)
        assert (winners(ours) == {PROBLEM: PRESETS["v2"]}) == wins
        assert len(gpu.bench.verified) == wins
        assert wins or "another kernel" in capsys.readouterr().out

    def test_one_that_does_not_compile_here(
        self, theirs: Path, ours: Path, gpu: Gpu, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store_winner(theirs)
        gpu.builder.broken = lambda config: True
        assert hand_over("import", theirs, ours) == 1
        assert "it does not compile here" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("their_ms", "fate"),
        [(3.0, "wins"), (5.0, "kept"), (4.0, "kept")],
    )
    def test_of_two_winners_the_better_one_stays(
        self,
        theirs: Path,
        ours: Path,
        gpu: Gpu,
        their_ms: float,
        fate: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        beside = {"default_ms": 6.0, "default_kernel": "cudnn"}
        store_winner(ours, PRESETS["v1"], 4.0, **beside)
        store_winner(theirs, PRESETS["v2"], their_ms, **beside)
        capsys.readouterr()
        assert hand_over("import", theirs, ours, "--json") == 0
        (said,) = json.loads(capsys.readouterr().out)["winners"]
        assert said["fate"] == fate
        assert winners(ours) == {PROBLEM: PRESETS["v2" if fate == "wins" else "v1"]}
        assert bool(gpu.bench.verified) == (fate == "wins"), "what does not win is not compiled"

    def test_what_does_not_compare_is_told(
        self, theirs: Path, ours: Path, gpu: Gpu, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store_winner(ours, PRESETS["v1"], 4.0, card="GPU-ours")
        store_winner(theirs, PRESETS["v2"], 3.0)
        assert hand_over("merge", theirs, ours, "--trust") == 1
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "conflict" in text
        assert f"--kernel best --kernel {PRESETS['v2'].id}" in text
        assert winners(ours) == {PROBLEM: PRESETS["v1"]}

    def test_the_same_kernel_is_no_conflict(self, theirs: Path, ours: Path) -> None:
        store_winner(ours, card="GPU-ours", partial=True)
        store_winner(theirs, median_ms=9.0)
        assert hand_over("merge", theirs, ours, "--trust") == 0
        with closing(Store.open(ours)) as store:
            (winner,) = store.winners()
            assert (winner.median_ms, winner.partial) == (9.0, False), "a whole search's in place of half of one"
        store_winner(theirs, median_ms=1.0)
        assert hand_over("merge", theirs, ours, "--trust") == 0
        with closing(Store.open(ours)) as store:
            assert store.winners()[0].median_ms == 9.0

    def test_other_machine_code_of_the_same_source_is_left_out(
        self, theirs: Path, ours: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store_winner(ours)
        store_winner(theirs, median_ms=1.0, variant=built("theirs"))
        assert hand_over("merge", theirs, ours, "--trust") == 1
        assert "other machine code" in capsys.readouterr().out
        with closing(Store.open(ours)) as store:
            assert [one.record.median_ms for one in store.measurements()] == [4.0]

    @pytest.mark.slow
    def test_it_is_really_verified(self, theirs: Path, ours: Path, tmp_path: Path) -> None:
        """On the CPU, by the real compiler and the real process: a kernel, and a row that another kernel hides in."""
        if not shutil.which("g++"):
            pytest.skip("no host compiler")
        problem = Problem.parse("1_1_64_16", causal=True)
        toolkit = find_compiler(HOST.arch).version
        environment = replace(
            ENVIRONMENT, gpu=replace(ENVIRONMENT.gpu, name=HOST.name), arch=HOST.arch, toolkit=toolkit
        )
        for config, batch in ((PRESETS["v1"], 1), (PRESETS["v2"], 2)):
            at = replace(problem, batch=batch)
            variant = built(None, toolkit, problem=at, config=config, arch=HOST.arch)
            store_winner(theirs, config, problem=at, variant=variant, environment=environment)
        file = export(theirs, tmp_path / "x.json")
        v2 = render(problem, PRESETS["v2"]).hash
        file.write_text(file.read_text().replace(v2, "0123456789abcdef"))
        assert main(["db", "import", str(file), "--db", str(ours)]) == 1
        assert winners(ours) == {problem: PRESETS["v1"]}


class TestRefusals:
    """Nothing is stored of what is refused."""

    @pytest.mark.parametrize(
        ("was", "becomes", "said"),
        [
            ('"block_q": 64', '"block_q": "64; asm"', "config"),
            ('"block_q": 64', '"block_q": 1' + "0" * 5000, "not JSON"),
            ('"median_ms": 4.0', '"median_ms": NaN', "NaN"),
            ('"their host"', '"<script>"', "host"),
            ('"version": 1', '"version": 9', "version is 9"),
            ("{", "", "not JSON"),
        ],
    )
    def test_a_file_that_was_tampered_with(
        self,
        theirs: Path,
        ours: Path,
        tmp_path: Path,
        was: str,
        becomes: str,
        said: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        store_winner(theirs)
        file = export(theirs, tmp_path / "x.json")
        assert was in file.read_text()
        file.write_text(file.read_text().replace(was, becomes, 1))
        before = content(ours)
        capsys.readouterr()
        assert main(["db", "import", str(file), "--db", str(ours), "--trust"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(file) in line
        assert said in line
        assert content(ours) == before

    def test_a_file_that_is_not_there(self, ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["db", "import", "/nowhere.json", "--db", str(ours)]) == 1
        assert "/nowhere.json cannot be read" in capsys.readouterr().err

    def test_a_database_with_itself(self, ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
        store_winner(ours)
        assert main(["db", "merge", str(ours), "--db", str(ours)]) == 2
        assert "is the database itself" in capsys.readouterr().err

    def test_a_database_with_markup_in_it(self, theirs: Path, ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
        store_winner(theirs)
        with closing(sqlite3.connect(theirs)) as connection:
            connection.execute("UPDATE searches SET host = '<script>'")
            connection.commit()
        assert main(["db", "merge", str(theirs), "--db", str(ours), "--trust"]) == 1
        assert "host" in capsys.readouterr().err
        assert winners(ours) == {}

    @pytest.mark.parametrize("what", ["text", "missing", "foreign"])
    def test_what_is_no_database_of_ours(
        self, theirs: Path, ours: Path, what: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        theirs.unlink()
        if what == "text":
            theirs.write_text("these are notes, not results\n")
        elif what == "foreign":
            with closing(sqlite3.connect(theirs)) as connection:
                connection.execute("CREATE TABLE runs (id INTEGER)")
                connection.commit()
        assert main(["db", "merge", str(theirs), "--db", str(ours)]) == 1
        assert str(theirs) in capsys.readouterr().err


def _execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def _overwrite(path: Path, at: int, with_: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(with_)] = with_
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no database": (lambda path: path.write_text("these are notes, not results\n"), "is not a database"),
    "missing": (lambda path: path.unlink(), "no such file"),
    "pages": (lambda path: _overwrite(path, 8192, b"\xff" * 4096), "damaged"),
    "a reference": (
        lambda path: _execute(path, "DELETE FROM variants"),
        "refers to a row of variants that is not there",
    ),
    "parameters": (
        lambda path: _execute(path, "UPDATE configurations SET parameters = '{'"),
        "are of no configuration",
    ),
    "a parameter": (
        lambda path: _execute(path, """UPDATE configurations SET parameters = replace(parameters, '64', '63')"""),
        "block_q is 63",
    ),
    "a time": (lambda path: _execute(path, "UPDATE measurements SET median_ms = 99"), "outside its interval"),
    "a text for a time": (lambda path: _execute(path, "UPDATE measurements SET median_ms = 'fast'"), "measurement"),
    "a date": (lambda path: _execute(path, "UPDATE winners SET created_at = 'yesterday'"), "yesterday"),
    "a verdict": (lambda path: _execute(path, "UPDATE verifications SET errors = '{'"), "a verdict"),
    "a problem": (lambda path: _execute(path, "UPDATE problems SET dtype = 'fp32'"), "unknown dtype 'fp32'"),
    "an older schema": (
        lambda path: shutil.copy(FIXTURES / "schema_1.sqlite", path),
        "older schema",
    ),
    "a newer schema": (
        lambda path: _execute(path, "UPDATE bwdtune_schema_version SET version_num = '0999'"),
        "newer bwdtune",
    ),
}


class TestCheck:
    @pytest.fixture(autouse=True)
    def builder(self, monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
        builder = FakeBuilder()

        def build(sources: list[Source], arch: str, *, cache: Path | None = None) -> list[Variant]:
            return [builder(source, arch) for source in sources]

        monkeypatch.setattr(checking, "build", build)
        monkeypatch.setattr(checking, "find_compiler", lambda arch: None)
        return builder

    def faults(self, path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
        """What is found, which the exit status says, too."""
        capsys.readouterr()
        status = main(["db", "check", "--db", str(path), "--json", *options])
        found: list[str] = json.loads(capsys.readouterr().out)["faults"]
        assert status == (1 if found else 0)
        return found

    @pytest.fixture
    def ours(self, tmp_path: Path, with_winner: Path) -> Path:
        return Path(shutil.copy(with_winner, tmp_path / "ours.sqlite"))

    def test_what_is_whole_has_none_and_is_left_alone(self, ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = ours.read_bytes()
        assert self.faults(ours, capsys) == []
        assert ours.read_bytes() == before

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_damage_is_named(self, ours: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
        do, said = DAMAGES[damage]
        do(ours)
        found = self.faults(ours, capsys)
        assert any(said in fault for fault in found), found
        assert all(fault.isprintable() for fault in found)

    def test_people_get_a_line_for_each(self, ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["db", "check", "--db", str(ours)]) == 0
        assert capsys.readouterr().out == "no fault was found\n"
        _execute(ours, "DELETE FROM variants")
        found = self.faults(ours, capsys)
        assert main(["db", "check", "--db", str(ours)]) == 1
        assert capsys.readouterr().out.splitlines() == found

    def test_a_configuration_is_named_once(self, ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
        _execute(ours, "UPDATE configurations SET parameters = '[]'")
        (found,) = self.faults(ours, capsys)
        assert found.startswith("a kernel (row 1 of variants) cannot be read")

    @pytest.mark.parametrize("toolkit", [ENVIRONMENT.toolkit, "12.8.93"])
    def test_a_winner_that_is_not_made_here(
        self, theirs: Path, builder: FakeBuilder, toolkit: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        environment = replace(H200_HERE, toolkit=toolkit)
        store_winner(theirs, variant=built("theirs", toolkit), environment=environment)
        (found,) = self.faults(theirs, capsys)
        assert ("another kernel" if toolkit == ENVIRONMENT.toolkit else f"than nvcc {toolkit}") in found
        assert self.faults(theirs, capsys, "--quick") == []
        builder.broken = lambda config: True
        (found,) = self.faults(theirs, capsys)
        assert "does not compile here" in found

    def test_an_emulated_one_of_other_text_is_known_by_its_machine_code(
        self, theirs: Path, builder: FakeBuilder, capsys: pytest.CaptureFixture[str]
    ) -> None:
        builder.machine_code = lambda source: "the same"
        source = render(PROBLEM, PRESETS["v2"], emulate="sm_120", card=H200)
        variant = replace(FakeBuilder()(replace(source, text=source.text + "// longer"), H200.arch))
        variant.__dict__["machine_code"] = "the same"
        with closing(Store.open(theirs)) as store:
            variant_id = store.record_variant(PROBLEM, variant_record(PROBLEM, variant))
            verdict = store.record_verification(PROBLEM, variant_id, VerificationRecord(True, 2e-3))
            record = MeasurementRecord(
                H200_HERE, "race-1", 9.0, 8.9, 9.1, 30, limits="sm_120", kind=EMULATED, cycles=2e7
            )
            measurement = store.record_measurement(PROBLEM, variant_id, record)
            store.set_emulated_best(PROBLEM, H200_HERE, "sm_120", measurement, verdict)
        assert self.faults(theirs, capsys) == []
        builder.machine_code = lambda source: "another"
        (found,) = self.faults(theirs, capsys)
        assert "another kernel" in found

    def test_without_a_compiler(
        self, ours: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def none(arch: str) -> None:
            raise ToolchainError("there is no nvcc")

        monkeypatch.setattr(checking, "find_compiler", none)
        (found,) = self.faults(ours, capsys)
        assert found == f"1 winners for {H200.arch} cannot be made here: there is no nvcc"
