"""The command line: what it prints, its exit status, and one line for each kind of bad input."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from covering import valid_presets
from nvcc_shim import NvccShim, without_wheels
from search_fakes import PROBLEM, FakeBuilder, run_search

import bwdtune
from bwdtune.db.errors import DatabaseLocked
from bwdtune.db.records import Winner
from bwdtune.db.store import Store
from bwdtune.gen.device import H200, RTX_5090
from bwdtune.gen.families import PRESETS, short_form
from bwdtune.gen.problem import Problem
from bwdtune.runtime.gpu import current_device
from bwdtune.tuner.cli import main
from bwdtune.tuner.commands.search import _seconds
from bwdtune.tuner.tune import searched_card

SHAPE = ["--shape", PROBLEM.shape, "--causal"]
SMALL = ["--shape", "1_1_128_64", "--arch", "sm_120a"]
needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "results.sqlite"


def run(*arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which sees no GPU."""
    return subprocess.run(
        [sys.executable, "-m", "bwdtune.tuner", *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error, with nothing on standard output."""
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("tuner: ")
    assert errors.count("\n") == 1
    return errors


@pytest.mark.parametrize(
    ("arguments", "status", "names"),
    [
        (["search"], 2, "--shape"),
        (["search", "--shape", "8_16_4096"], 2, "8_16_4096"),
        (["search", "--shape", "8_16_x_128"], 2, "8_16_x_128"),
        (["search", "--shape", "0_16_4096_128"], 2, "batch is 0"),
        (["search", "--shape", "8_16_3_4096_128"], 2, "16 query heads"),
        (["search", "--shape", "8_16_4096_128", "--dtype", "fp8"], 2, "fp8"),
        (["search", "--shape", "8_16_4096_128", "--sampler", "grid"], 2, "grid"),
        (["search", "--shape", "8_16_4096_128", "--arch", "sm_80"], 2, "sm_80"),
        (["search", "--shape", "8_16_4096_128", "--arch", "host"], 2, "host"),
        (["search", "--shape", "8_16_4096_128", "--arch", ""], 2, "unknown arch ''"),
        (["search", "--shape", "8_16_4096_128", "--limits", "sm_100"], 2, "sm_100"),
        (["search", "--shape", "8_16_4096_128", "--trials", "0"], 2, "trials is 0"),
        (["search", "--shape", "8_16_4096_128", "--trials", "many"], 2, "--trials"),
        (["search", "--shape", "8_16_4096_128", "--time", "-5"], 2, "time is -5"),
        (["search", "--shape", "8_16_4096_128", "--time", "inf"], 2, "time is inf"),
        (["search", "--shape", "8_16_4096_128", "--seed", "-1"], 2, "seed is -1"),
        (["search", "--shape", "8_16_4096_100", "--arch", "sm_120a"], 2, "head_dim 100"),
        (["search", "--shape", "8_16_4096_128", "--fast"], 2, "--fast"),
        (["verify", "--shape", "8_16_4096_128", "--config", "v9"], 2, "v9"),
        (["verify", "--shape", "8_16_4096_128", "--config", "mma_q7_kv64"], 2, "mma_q7_kv64"),
        (["verify", "--shape", "8_16_4096_128", "--config", "v2", "--arch", "sm_70"], 2, "sm_70"),
        (["bench", "--shape", "8_16_4096_128", "--kernel", "triton"], 2, "triton"),
        (["bench", "--shape", "8_16_4096_128", "--direction", "sideways"], 2, "sideways"),
        (["bench", "--shape", "8_16_4096_128", "--direction", "both", "--kernel", "v3"], 2, "unknown call 'v3'"),
        (["bench", "--shape", "8_16_4096_128", "--direction", "both", "--cycles"], 2, "are for --direction backward"),
        (["profile", "--shape", "8_16_4096_128", "--kernel", "v9"], 2, "v9"),
        (["roofline", "--shape", "8_16_4096_128", "--arch", "tpu"], 2, "tpu"),
        (["inspect", "--config", "v2", "--arch", "sm_10"], 2, "sm_10"),
        (["show", "--shape", "8-16-4096-128"], 2, "8-16-4096-128"),
        (["show", "--shape", "8_16_4096_128", "--window", "512"], 2, "malformed window '512'"),
        (["show", "--shape", "8_16_4096_128", "--window", "512,-2"], 2, "malformed window '512,-2'"),
        (["show", "--shape", "8_16_4096_128", "--causal", "--window", "9,9"], 2, "window_right is 9"),
        (["show", "--shape", "8_16_4096_128", "--bias", "1_16_4096"], 2, "malformed bias '1_16_4096'"),
        (["show", "--shape", "8_16_4096_128", "--bias", "1_16_4096_1"], 2, "only ones are broadcast"),
        (["show", "--shape", "8_16_4096_128", "--bias-grad"], 2, "ask for one, too"),
        (["show", "--shape", "8_16_4096_128", "--causal", "--alignment", "left"], 2, "unknown alignment 'left'"),
        (["show", "--shape", "8_16_4096_128", "--alignment", "bottom-right"], 2, "no diagonal"),
        (["export", "--config", "v3", "--arch", "sm_120a"], 2, "--output"),
        (["export", "--config", "v3", "--arch", "", "--output", "/nowhere"], 2, "unknown arch ''"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], database: Path, arguments: list[str], status: int, names: str
) -> None:
    takes_database = arguments[0] in ("search", "bench", "show") and len(arguments) > 1
    assert main([*arguments, *(["--db", str(database)] if takes_database else [])]) == status
    assert names in complaint(capsys)
    assert not database.exists(), "nothing was begun"


@pytest.mark.parametrize(
    "arguments",
    [
        ["search", "--json", "--dtype", "fp32", "--shape", "1_1_64_64"],
        ["search", "--json"],
        ["list", "--json", "--db", "/nowhere/x.db"],
        ["export", "--json", "--shape", "1_1_64_64", "-o", "/nowhere"],
    ],
    ids=" ".join,
)
def test_an_error_is_json_too_where_json_was_asked_for(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    status = main(arguments)
    output, errors = capsys.readouterr()
    assert status in (1, 2)
    assert json.loads(output) == {"error": errors.removeprefix("tuner: ").strip(), "exit_status": status}


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"bwdtune {bwdtune.__version__}\n"


@pytest.mark.parametrize("arguments", [["-h"], ["search", "-h"], ["verify", "-h"]])
def test_help_has_a_short_name(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["verify", "inspect", "profile", "export", "bench"])
def test_kernel_and_config_are_the_same_option(capsys: pytest.CaptureFixture[str], command: str) -> None:
    for option in ("--kernel", "--config"):
        assert main([command, "--shape", "8_16_4096_128", option, "v9", *(["-o", "x"] if command == "export" else [])])
        assert "v9" in complaint(capsys)


@pytest.mark.parametrize("command", ["verify", "inspect", "export"])
def test_best_is_the_stored_winner(capsys: pytest.CaptureFixture[str], database: Path, command: str) -> None:
    with closing(Store.open(database)):
        pass
    output = ["-o", "/nowhere"] if command == "export" else []
    assert main([command, *SHAPE, "--kernel", "best", "--db", str(database), *output]) == 1
    assert "there is no winner for 8_16_4096_128" in complaint(capsys)


@pytest.mark.parametrize(
    ("duration", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5h", 5400), (".5 m", 30), (None, None)]
)
def test_durations(duration: str | None, seconds: float | None) -> None:
    assert _seconds(duration) == seconds


@pytest.mark.parametrize("width", [80, 120])
def test_no_terminal_cuts_a_shape_or_a_configuration(searched: Path, width: int) -> None:
    """In a pseudo-terminal, as people see it."""
    winner = _winner(searched)
    script = shlex.join([sys.executable, "-m", "bwdtune.tuner", "list", "--db", str(searched)])
    shown = subprocess.run(
        ["script", "-qec", f"stty cols {width}; {script}", "/dev/null"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TERM": "xterm"},
    ).stdout
    assert winner.problem.shape in shown
    assert short_form(winner.config) in shown
    assert "…" not in shown


def test_the_options_of_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--window", "512,0", "--alignment", "bottom-right", "--softcap", "--varlen", "--deterministic"]
    assert main(["roofline", "--shape", "2_4_2_1000x3000_72", "--arch", "sm_90a", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = {
        "shape": "2_4_2_1000x3000_72",
        "causal": True,
        "window_left": 512,
        "window_right": -1,
        "bottom_right": True,
        "softcap": True,
        "varlen": True,
        "deterministic": True,
    }
    assert {name: found[name] for name in expected} == expected


def test_lengths_that_are_read_or_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shape's S is a bound: the longest is known."""
    file = tmp_path / "lengths"
    file.write_text("100\n 40, 7\n")
    for given, shape, stated in (
        (f"@{file}", "3_2_100x200_64", "100,40,7"),
        ("lognormal:30", "3_2_77x154_64", "lognormal:30"),
    ):
        command = [
            "roofline",
            "--shape",
            "3_2_1000x2000_64",
            "--arch",
            "sm_90a",
            "--varlen",
            "--lengths",
            given,
            "--json",
        ]
        assert main(command) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["shape"], found["lengths"]) == (shape, stated)
    assert main([*command[:-2], f"@{tmp_path / 'none'}"]) == 2
    assert "cannot read lengths" in capsys.readouterr().err


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that a search has filled. To be copied, not changed."""
    path = tmp_path_factory.mktemp("searched") / "results.sqlite"
    run_search(path, trials=12, builder=FakeBuilder(broken=lambda config: config.family != "mma"))
    return path


def _text(path: Path, searched: Path) -> None:
    path.write_text("these are notes, not results\n")


def _damaged(path: Path, searched: Path) -> None:
    content = bytearray(searched.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)


def _foreign(path: Path, searched: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table alembic_version (version_num text)")
        connection.execute("create table runs (id integer)")
        connection.commit()


def _newer(path: Path, searched: Path) -> None:
    shutil.copy(searched, path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("update bwdtune_schema_version set version_num = '9999'")
        connection.commit()


def _directory(path: Path, searched: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [_text, _damaged, _foreign, _newer, _directory])
@pytest.mark.parametrize("command", [["list"], ["show", *SHAPE], ["search", *SMALL]], ids=lambda command: command[0])
def test_a_database_that_is_none_is_one_line_and_left_alone(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    database: Path,
    searched: Path,
    make,
    command: list[str],
) -> None:
    shim = NvccShim(tmp_path / "toolkit")
    monkeypatch.setenv("CUDA_HOME", str(shim.home))
    make(database, searched)
    before = database.read_bytes() if database.is_file() else None
    capsys.readouterr()
    assert main([*command, "--db", str(database)]) in (1, 2)
    assert database.name in complaint(capsys)
    assert (database.read_bytes() if database.is_file() else None) == before
    assert shim.compiled == 0


def test_a_locked_database_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*unused: object, **also_unused: object) -> Store:
        raise DatabaseLocked("results.sqlite", "database is locked")

    monkeypatch.setattr(Store, "open", locked)
    assert main(["list"]) == 1
    assert "locked" in complaint(capsys)


def test_no_database_is_one_line(capsys: pytest.CaptureFixture[str], database: Path) -> None:
    assert main(["list", "--db", str(database)]) == 1
    assert "tuner search" in complaint(capsys)


@needs_nvcc
def test_a_cache_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str], database: Path) -> None:
    assert main(["search", *SMALL, "--cache", "/proc/kernels", "--db", str(database)]) == 1
    assert "/proc/kernels" in complaint(capsys)
    assert not database.exists()


@pytest.mark.parametrize(("version", "archs"), [("12.2.140", (90, 120)), ("12.8.61", (90,))])
def test_an_nvcc_that_will_not_do_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    database: Path,
    version: str,
    archs: tuple[int, ...],
) -> None:
    shim = NvccShim(tmp_path / "toolkit", version=version, archs=archs)
    monkeypatch.setenv("CUDA_HOME", str(shim.home))
    assert main(["search", *SMALL, "--db", str(database)]) == 1
    assert version in complaint(capsys)
    assert not database.exists()
    assert shim.compiled == 0


def test_a_missing_nvcc_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    without_wheels(monkeypatch)
    assert main(["search", *SMALL]) == 1
    assert "nvcc" in complaint(capsys)


def test_a_survey_that_finds_nothing_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, database: Path
) -> None:
    shim = NvccShim(tmp_path / "toolkit")  # for which no kernel is a source
    monkeypatch.setenv("CUDA_HOME", str(shim.home))
    monkeypatch.setenv("NVCC_CCBIN", "g++")
    arguments = ["--trials", "2", "--db", str(database), "--cache", str(tmp_path / "cache"), "--json"]
    assert main(["search", *SMALL, *arguments]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], len(found["failures"])) == ([], 2)
    assert shim.compiled == 2


def test_complaints_go_nowhere_where_standard_error_is_closed() -> None:
    command = shlex.join([sys.executable, "-m", "bwdtune.tuner", "nonsense"])
    done = subprocess.run(["sh", "-c", f"{command} 2>&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


def test_an_interrupt_while_it_loads_is_one_line() -> None:
    code = """
import sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from bwdtune.tuner.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "tuner: interrupted\n")


def test_ctrl_c_once_more_does_not_change_how_it_ended() -> None:
    code = """
import os, signal, sys
from bwdtune.tuner import __main__, cli
cli.main = lambda: 130
status = __main__.main()
os.kill(os.getpid(), signal.SIGINT)
sys.exit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", *SHAPE, "--config", "v2"],
        ["bench", *SHAPE],
        ["profile", *SHAPE, "--kernel", "v3"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_needs_a_gpu_says_so(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("tuner: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["search", "--help"], ["search", "--shape", "x"], ["nonsense"]])
def test_help_and_complaints_do_not_wait_for_heavy_imports(arguments: list[str]) -> None:
    code = (
        "import sys; from bwdtune.tuner.cli import main; main(sys.argv[1:]); "
        "print([name for name in ('torch', 'optuna', 'sqlalchemy', 'numpy', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    for command in ("search", "verify", "list", "show", "bench", "roofline", "inspect", "profile", "export"):
        assert command in text


def test_list_and_show_tell_what_a_search_stored(capsys: pytest.CaptureFixture[str], searched: Path) -> None:
    database = ["--db", str(searched)]
    assert main(["list", *database, "--json"]) == 0
    (winner,) = json.loads(capsys.readouterr().out)
    assert winner["config"] == _winner(searched).config.id
    assert winner["ms"] == _winner(searched).median_ms
    assert {"gpu", "driver", "torch", "nvcc", "shape", "causal", "dtype", "limits", "max_error", "partial"} <= set(
        winner
    )

    assert main(["show", *SHAPE, *database, "--json"]) == 0
    history = json.loads(capsys.readouterr().out)
    assert [found["config"] for found in history["winners"]] == [winner["config"]]
    assert {measurement["config"] for measurement in history["measurements"]} >= {PRESETS["v2"].id}
    assert {failure["gate"] for failure in history["failures"]} == {"compiler"}
    (search,) = history["searches"]
    assert (search["status"], search["gpu"]) == ("complete", winner["gpu"])
    assert {measurement["search"] for measurement in history["measurements"]} == {search["search"]}

    for arguments in (["list"], ["show", *SHAPE]):
        assert main([*arguments, *database]) == 0
        text = capsys.readouterr().out
        assert short_form(_winner(searched).config) in text
        assert ("complete after" in text) == (arguments[0] == "show")
    assert main(["show", "--shape", "1_1_64_64", *database]) == 0
    assert "nothing is stored" in capsys.readouterr().out


def _winner(database: Path) -> Winner:
    with closing(Store.open(database, read_only=True)) as store:
        (winner,) = store.winners()
    return winner


def test_export_takes_the_stored_winner(capsys: pytest.CaptureFixture[str], searched: Path, tmp_path: Path) -> None:
    arguments = ["export", *SHAPE, "--db", str(searched)]
    assert main([*arguments, "-o", str(tmp_path / "out"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["config"] == _winner(searched).config.id
    assert written["arch"] == "sm_90a"
    assert (tmp_path / "out" / written["files"][0]).exists()

    assert main([*arguments, "-o", str(tmp_path / "other"), "--arch", "sm_120a"]) == 1
    assert "no winner" in complaint(capsys)


def test_roofline_of_the_write_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["roofline", *SHAPE, "--arch", "sm_120", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["compute_ms"] == pytest.approx(6.56, abs=0.01)
    assert data["memory_ms"] == pytest.approx(0.60, abs=0.01)


@needs_nvcc
@pytest.mark.slow
def test_a_search_without_a_gpu_verifies_on_the_cpu_and_predicts(tmp_path: Path, database: Path) -> None:
    arguments = ["search", *SMALL, "--seed", "1", "--db", str(database), "--trials"]
    done = run(*arguments, "4", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["status"] == "predicted"
    assert data["counts"]["verified"] == 4
    assert data["winner"] is None
    assert {row["kernel"] for row in data["rows"]} >= {"v1", "v2", "v3", "t64"}
    assert all(row["registers"] > 0 and row["predicted_ms"] > 0 and row["ms"] is None for row in data["rows"])
    assert all(0 < row["max_error"] < 0.02 for row in data["rows"])
    assert "4/4" in done.stderr, "it told how it went, in plain lines"

    done = run(*arguments, "1")
    assert done.returncode == 0
    assert {"v2", "t64"} <= set(done.stdout.split())
    assert "nothing was timed, and no winner is stored" in done.stdout
    with closing(Store.open(database)) as store:
        assert store.winners() == []


@needs_nvcc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("begun", ["compiling for", "searching 0/200"])
def test_an_interrupted_command_says_so_at_once_and_ends_with_130(
    tmp_path: Path, database: Path, begun: str, number: signal.Signals
) -> None:
    """Before the first candidate, while hundreds of thousands are ranked, and while it compiles."""
    command = [sys.executable, "-m", "bwdtune.tuner", "search", "--shape", "1_1_128_64", "--db", str(database)]
    process = subprocess.Popen(
        [*command, "--trials", "200", "--cache", str(tmp_path / "cache")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert process.stderr
    for line in process.stderr:
        if line.startswith(begun):
            break
    process.send_signal(number)
    said = process.stderr.readline() + process.stderr.readline()
    output, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in output + errors
    assert any(text in said + errors for text in ("stopping, and keeping what was found", "interrupted"))
    if begun != "compiling for":
        assert "no winner is stored" in output


@pytest.mark.slow
def test_verify_on_the_host_prints_the_errors_beside_pytorchs(capsys: pytest.CaptureFixture[str]) -> None:
    if not shutil.which("g++"):
        pytest.skip("no host compiler")
    arguments = [
        "verify",
        "--shape",
        "1_1_64_16",
        "--config",
        "mma_q16_kv32_w1_s1_sw32_k0_v0_b1_r1_u0",
        "--arch",
        "host",
    ]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is True
    assert all({"dq", "dk", "dv", "torch_dq", "torch_dk", "torch_dv"} == set(case) for case in data["errors"].values())


@pytest.mark.gpu
def test_search_bench_and_export_on_the_gpu(tmp_path: Path, database: Path) -> None:
    shape = ["--shape", "2_4_1024_64", "--causal", "--db", str(database)]
    arguments = ["search", *shape, "--trials", "8", "--seed", "0", "--json"]
    command = [sys.executable, "-m", "bwdtune.tuner"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    timed = {row["kernel"]: row["ms"] for row in found["rows"] if row["ms"]}
    presets = valid_presets(Problem.parse("2_4_1024_64", causal=True), current_device())
    assert {"default", "fa", "cudnn", *presets} <= set(timed)
    assert any("PyTorch's default, " in note for note in found["notes"])
    assert found["winner"]["ms"] <= min(timed[name] for name in presets)
    assert found["winner"]["max_error"] < 0.05

    done = subprocess.run(
        [*command, "bench", *shape, "--kernel", "best", "--kernel", "v2", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["kernel"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["best"]["config"] == found["winner"]["config"]
    assert main(["export", *shape, "-o", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("arch", "expected"), [(None, "here"), ("sm_90a", "here"), ("sm_90", "here"), ("sm_120", RTX_5090.name)]
)
def test_the_gpu_is_searched_for_where_its_arch_is_meant(arch: str | None, expected: str) -> None:
    assert searched_card(arch, replace(H200, name="here")).name == expected


def test_without_a_gpu_the_write_ups_card_is_searched_for() -> None:
    assert searched_card(None, None) == RTX_5090
