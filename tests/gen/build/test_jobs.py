"""The build, mostly with a stand-in for nvcc whose sources are shell code; at the end with real compilers."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nvcc_shim import LIBRARY, ODD_NAMES, SUCCEED, NvccShim, source, without_wheels

from bwdtune.gen import paths
from bwdtune.gen.build import compile_step
from bwdtune.gen.build.compile_step import parse_ptxas
from bwdtune.gen.build.jobs import (
    BuildError,
    CompiledResources,
    CompileError,
    Variant,
    adopt,
    build,
    build_one,
    build_to_send,
)
from bwdtune.gen.build.toolchain import ToolchainError, find_compiler
from bwdtune.gen.errors import BwdtuneError, UsageError

ARCH = "sm_90a"


@pytest.fixture
def nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NvccShim:
    shim = NvccShim(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(shim.home))
    monkeypatch.setenv("NVCC_CCBIN", "g++")  # never started, so it need not be there
    for name in ("MAX_JOBS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return shim


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def _wait_for(condition: Callable[[], object]) -> None:
    """Polls what another process does; pytest's own limit ends a wait in vain."""
    while not condition():
        time.sleep(0.02)


def _alive(pid_file: Path) -> bool:
    process = Path("/proc", pid_file.read_text().strip())
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # A zombie is dead: nobody here collects it.
        return b") Z " not in (process / "stat").read_bytes()
    return False


def _files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


class TestResults:
    def test_they_come_in_the_order_of_the_sources(self, nvcc: NvccShim, cache: Path) -> None:
        sources = [source(f"{SUCCEED} # {number}", f"k{number}") for number in range(5)]
        variants = build(sources, ARCH, cache=cache)
        assert [variant.source for variant in variants] == sources
        for variant in variants:
            assert variant.status == "ok"
            assert variant.library
            assert variant.library.read_bytes() == LIBRARY
            assert (variant.arch, variant.toolchain, variant.error) == (ARCH, "13.0.88", "")
            assert not variant.cached

    def test_no_sources_are_no_variants(self, nvcc: NvccShim, cache: Path) -> None:
        assert build([], ARCH, cache=cache) == []

    def test_each_is_told_when_it_is_done(self, nvcc: NvccShim, cache: Path, tmp_path: Path) -> None:
        """The slow one waits for the callback of the quick ones, so telling them all at the end would never end."""
        gate = tmp_path / "gate"
        slow = source(f"while [ ! -e '{gate}' ]; do sleep 0.05; done; {SUCCEED}", "slow")
        quick = [source(f"{SUCCEED} # {number}", f"quick{number}") for number in range(3)]
        told: list[str] = []

        def on_done(variant: Variant) -> None:
            assert threading.current_thread() is threading.main_thread()
            told.append(variant.source.kernel_spec)
            if len(told) == len(quick):
                gate.touch()

        build([slow, *quick], ARCH, cache=cache, jobs=2, on_done=on_done)
        assert told[-1] == "slow"
        assert set(told) == {"slow", "quick0", "quick1", "quick2"}

    def test_what_is_cached_is_not_compiled_again(self, nvcc: NvccShim, cache: Path) -> None:
        first = build_one(source(SUCCEED), ARCH, cache=cache)
        told: list[Variant] = []
        (second,) = build([source(SUCCEED)], ARCH, cache=cache, on_done=told.append)
        assert nvcc.compiled == 1
        assert second.cached
        assert told == [second]
        assert (second.library, second.seconds) == (first.library, first.seconds)

    def test_the_same_source_twice_is_one_compile(self, nvcc: NvccShim, cache: Path) -> None:
        told: list[Variant] = []
        first, second = build([source(SUCCEED), source(SUCCEED)], ARCH, cache=cache, on_done=told.append)
        assert first == second
        assert nvcc.compiled == len(told) == 1

    def test_the_figures_of_ptxas_are_kept(self, nvcc: NvccShim, cache: Path, tmp_path: Path) -> None:
        (tmp_path / "ptxas").write_text(PTXAS)
        text = f"cat '{tmp_path}/ptxas' >&2; {SUCCEED}"
        for _ in range(2):  # compiled, then from the cache
            variant = build_one(source(text), ARCH, cache=cache)
            assert variant.resources == CompiledResources(255, 68, 48, 1024, 3)
            assert set(variant.kernels) == {"backward_kernel", "preprocess_kernel", "plain"}

    @pytest.mark.parametrize(
        "change",
        ["text", "arch", "version", "variable"],
    )
    def test_the_key_is_of_all_that_matters(
        self, nvcc: NvccShim, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: str
    ) -> None:
        build_one(source(SUCCEED), ARCH, cache=cache)
        text, arch = SUCCEED, ARCH
        if change == "text":
            text += " "
        elif change == "arch":
            arch = "sm_120a"
        elif change == "version":
            monkeypatch.setenv("CUDA_HOME", str(NvccShim(tmp_path / "other", version="13.0.89").home))
        else:
            monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
        assert not build_one(source(text), arch, cache=cache).cached


class TestFailures:
    def test_one_that_fails_costs_the_others_nothing(self, nvcc: NvccShim, cache: Path) -> None:
        bad = source('echo "$src(7): error: identifier \\"x\\" is undefined" >&2; exit 2', "bad")
        crash = source("kill -SEGV $$", "crash")
        good = [source(f"{SUCCEED} # {number}", f"good{number}") for number in range(3)]
        variants = build([bad, good[0], crash, good[1], good[2]], ARCH, cache=cache)
        assert [variant.status for variant in variants] == ["failed", "ok", "failed", "ok", "ok"]
        assert 'error: identifier "x" is undefined; exit status 2' in variants[0].error
        assert "SIGSEGV" in variants[2].error
        assert variants[0].library is None
        assert variants[0].log
        log = variants[0].log.read_text()
        assert "identifier" in log
        assert "-gencode" in log.splitlines()[0], "the log begins with the command"

    def test_the_first_error_is_found_among_warnings(self, nvcc: NvccShim, cache: Path) -> None:
        text = """
            i=0
            while [ $i -lt 3000 ]; do echo "k.cu($i): warning #177-D: variable is never referenced"; i=$((i+1)); done
            echo "k.cu(9): error: expected a ';'"
            echo "1 error detected in the compilation of k.cu."
            exit 1
        """
        (variant,) = build([source(text)], ARCH, cache=cache)
        assert variant.error == "k.cu(9): error: expected a ';'; exit status 1"
        assert variant.log
        assert len(variant.log.read_text().splitlines()) > 3000

    @pytest.mark.parametrize(
        ("said", "hint"),
        [
            ("k.cu:1:10: fatal error: cuda_bf16.h: No such file or directory", "header is missing"),
            ('k.cu(1): error: cannot open source file "cuda_bf16.h"', "header is missing"),
            ("host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions later than 15", "NVCC_CCBIN"),
            ("nvcc fatal   : Failed to preprocess host compiler properties.", "install g++"),
            ("sh: 1: g++: not found", "install g++"),
            ("/usr/bin/ld: cannot find -lcudart_static: No such file or directory", "library is missing"),
            ("fatal error: error writing to /tmp/x.s: No space left on device", "no space left"),
        ],
    )
    def test_what_the_machine_lacks_is_hinted_at_and_not_remembered(
        self, nvcc: NvccShim, cache: Path, said: str, hint: str
    ) -> None:
        text = f"[ -e '{nvcc.home}/mended' ] || {{ echo '{said}' >&2; exit 1; }}; {SUCCEED}"
        (variant,) = build([source(text)], ARCH, cache=cache)
        assert said in variant.error
        assert hint in variant.error
        (nvcc.home / "mended").touch()
        assert build_one(source(text), ARCH, cache=cache).status == "ok"

    def test_a_failure_is_remembered(self, nvcc: NvccShim, cache: Path) -> None:
        bad = source("echo 'error: no'; exit 1")
        (first,) = build([bad], ARCH, cache=cache)
        (second,) = build([bad], ARCH, cache=cache)
        assert nvcc.compiled == 1
        assert (second.status, second.error, second.log) == ("failed", first.error, first.log)
        assert second.cached

    def test_one_source_that_fails_is_one_line(self, nvcc: NvccShim, cache: Path) -> None:
        with pytest.raises(
            CompileError, match=r"was not compiled for sm_90a: error: no; exit status 1 \(log: "
        ) as caught:
            build_one(source("echo 'error: no'; exit 1"), ARCH, cache=cache)
        assert "\n" not in str(caught.value)

    def test_a_compiler_that_makes_nothing_has_failed(self, nvcc: NvccShim, cache: Path) -> None:
        (variant,) = build([source("echo done")], ARCH, cache=cache)
        assert variant.status == "failed"

    @pytest.mark.parametrize(
        "content", [b"", b"library\n", LIBRARY[:40], LIBRARY[:40] + struct.pack("<Q10xHH2x", 4096, 64, 20)]
    )
    def test_a_library_that_was_cut_off_is_no_success(
        self, nvcc: NvccShim, cache: Path, tmp_path: Path, content: bytes
    ) -> None:
        (tmp_path / "part").write_bytes(content)
        text = f"[ -e '{nvcc.home}/mended' ] || {{ cp '{tmp_path}/part' \"$out\"; exit 0; }}; {SUCCEED}"
        (variant,) = build([source(text)], ARCH, cache=cache)
        assert (variant.status, variant.lasting) == ("failed", False)
        assert f"a library that is not whole: {len(content)} bytes" in variant.error
        (nvcc.home / "mended").touch()
        assert build_one(source(text), ARCH, cache=cache).status == "ok"

    def test_a_time_limit_ends_all_that_the_compiler_started(self, nvcc: NvccShim, cache: Path, tmp_path: Path) -> None:
        pid = tmp_path / "pid"
        slow = source(f"sleep 600 & echo $! > '{pid}'; wait")
        (variant,) = build([slow], ARCH, cache=cache, timeout_s=2)
        assert variant.status == "timeout"
        assert variant.error == "not compiled within 2 s"
        assert not _alive(pid)

    def test_a_time_out_is_remembered_up_to_its_limit(self, nvcc: NvccShim, cache: Path) -> None:
        slow = source(f"sleep 1; {SUCCEED}")
        for _ in range(2):
            (variant,) = build([slow], ARCH, cache=cache, timeout_s=0.3)
            assert variant.status == "timeout"
        assert nvcc.compiled == 1
        (variant,) = build([slow], ARCH, cache=cache)
        assert variant.status == "ok"
        (variant,) = build([slow], ARCH, cache=cache, timeout_s=0.3)
        assert variant.status == "ok", "what is ready takes no time"

    @pytest.mark.parametrize(
        "death",
        [
            "kill -9 $$",
            "exit 137",
            "echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\"; exit 9",
            "echo 'g++: fatal error: Killed signal terminated program cc1plus'; exit 1",
            "kill -9 $PPID; sleep 0.2",
        ],
    )
    def test_what_was_killed_is_tried_again_alone(
        self, nvcc: NvccShim, cache: Path, tmp_path: Path, death: str
    ) -> None:
        """Each notes when it starts and ends; the second try must not overlap with anything."""
        notes = tmp_path / "notes"
        good = source(f"echo + >> '{notes}'; sleep 0.5; echo - >> '{notes}'; {SUCCEED}")
        again = source(
            f"if [ ! -e '{tmp_path}/tried' ]; then touch '{tmp_path}/tried'; {death}; exit 1; fi;"
            f"echo begin >> '{notes}'; sleep 0.2; echo end >> '{notes}'; {SUCCEED}"
        )
        told: list[Variant] = []
        variants = build([again, good], ARCH, cache=cache, jobs=2, on_done=told.append)
        assert [variant.status for variant in variants] == ["ok", "ok"]
        assert notes.read_text().split() == ["+", "-", "begin", "end"]
        assert len(told) == 2

    def test_a_limit_that_ended_a_part_of_the_compiler_is_not_remembered(self, nvcc: NvccShim, cache: Path) -> None:
        said = "g++: internal compiler error: File size limit exceeded signal terminated program cc1plus"
        text = f"[ -e '{nvcc.home}/mended' ] || {{ echo '{said}'; exit 4; }}; {SUCCEED}"
        (variant,) = build([source(text)], ARCH, cache=cache)
        assert (variant.status, variant.lasting) == ("failed", False)
        assert "SIGXFSZ" in variant.error
        (nvcc.home / "mended").touch()
        assert build_one(source(text), ARCH, cache=cache).status == "ok"

    @pytest.mark.parametrize("death", ["kill -9 $$", "kill -9 $PPID; sleep 0.2; exit 1"])
    def test_what_is_killed_twice_has_failed_but_is_not_remembered(
        self, nvcc: NvccShim, cache: Path, death: str
    ) -> None:
        text = f"[ -e '{nvcc.home}/mended' ] || {{ {death}; }}; {SUCCEED}"
        (variant,) = build([source(text)], ARCH, cache=cache)
        assert variant.status == "failed"
        assert "memory short" in variant.error
        assert nvcc.compiled == 2
        (nvcc.home / "mended").touch()
        assert build_one(source(text), ARCH, cache=cache).status == "ok"


class TestToAnotherMachine:
    @pytest.fixture
    def there(self, nvcc: NvccShim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "there"))
        return tmp_path / "there"

    def test_what_is_compiled_there_can_be_used_here(self, there: Path, cache: Path) -> None:
        built = build_to_send(source(SUCCEED), ARCH)
        variant = adopt(built, cache=cache)
        assert variant.library
        assert variant.library.is_relative_to(cache)
        assert variant.library.read_bytes() == built.variant.library.read_bytes()
        assert (variant.status, variant.resources, variant.toolchain) == (
            built.variant.status,
            built.variant.resources,
            built.variant.toolchain,
        )
        assert build([source(SUCCEED)], ARCH, cache=cache)[0].cached, "and is not compiled here"
        written = variant.library.stat().st_mtime_ns
        assert adopt(built, cache=cache) == variant
        assert variant.library.stat().st_mtime_ns == written, "what is there already stays"

    def test_a_failure_is_known_here_too(self, there: Path, cache: Path) -> None:
        variant = adopt(build_to_send(source("echo 'error: no'; exit 1"), ARCH), cache=cache)
        assert (variant.status, variant.library) == ("failed", None)
        assert "error: no" in variant.error

    def test_what_arrives_damaged_is_refused(self, there: Path, cache: Path) -> None:
        built = build_to_send(source(SUCCEED), ARCH)
        files = {name: content[:-1] for name, content in built.files.items()}
        with pytest.raises(CompileError, match="arrived damaged"):
            adopt(dataclasses.replace(built, files=files), cache=cache)
        assert adopt(built, cache=cache).library, "it does not stand in the way"

    def test_nothing_is_written_outside_of_the_entry(self, there: Path, cache: Path) -> None:
        built = build_to_send(source(SUCCEED), ARCH)
        adopt(dataclasses.replace(built, files={**built.files, "../../stray": b""}), cache=cache)
        assert [path.parent.parent.name for path in cache.rglob("stray")] == ["kernels"]


def test_serialized_wgmma_is_a_failure(nvcc: NvccShim, cache: Path) -> None:
    said = (
        "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the function 'backward_kernel'"
    )
    (variant,) = build([source(f'echo "{said}"; {SUCCEED}')], ARCH, cache=cache)
    assert (variant.status, variant.error, variant.library) == ("failed", said, None)


class TestRefusals:
    @pytest.mark.parametrize("jobs", [0, -1])
    def test_jobs_must_be_positive(self, nvcc: NvccShim, cache: Path, jobs: int) -> None:
        with pytest.raises(UsageError, match="jobs"):
            build([source(SUCCEED)], ARCH, cache=cache, jobs=jobs)

    @pytest.mark.parametrize("value", ["0", "-1", "abc"])
    def test_nonsense_in_max_jobs_compiles_nothing(
        self, nvcc: NvccShim, cache: Path, monkeypatch: pytest.MonkeyPatch, value: str
    ) -> None:
        monkeypatch.setenv("MAX_JOBS", value)
        with pytest.raises(UsageError, match="MAX_JOBS"):
            build([source(SUCCEED)], ARCH, cache=cache)
        assert nvcc.compiled == 0

    def test_max_jobs_bounds_what_runs_at_once(
        self, nvcc: NvccShim, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("MAX_JOBS", "1")
        monkeypatch.setenv("MAKEFLAGS", "-j8 --jobserver-auth=fifo:/nowhere")
        notes = tmp_path / "notes"
        text = f"echo + >> '{notes}'; sleep 0.2; echo - >> '{notes}'; {SUCCEED}"
        build([source(f"{text} # {number}") for number in range(3)], ARCH, cache=cache)
        assert notes.read_text().split() == ["+", "-"] * 3

    def test_an_unknown_target_compiles_nothing(self, nvcc: NvccShim, cache: Path) -> None:
        with pytest.raises(ToolchainError, match="sm_70"):
            build([source(SUCCEED)], "sm_70", cache=cache)
        assert nvcc.compiled == 0

    def test_a_cache_that_cannot_be_written_compiles_nothing(self, nvcc: NvccShim, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(BwdtuneError, match="cannot write to the cache directory"):
            build([source(SUCCEED)], ARCH, cache=tmp_path / "file")
        assert nvcc.compiled == 0

    def test_without_ninja_there_is_one_line(
        self, nvcc: NvccShim, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "ninja", None)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(BuildError, match="pip install ninja"):
            build([source(f"{SUCCEED} # {number}") for number in range(2)], ARCH, cache=cache)

    def test_a_broken_ninja_is_told(
        self, nvcc: NvccShim, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "ninja").write_text("#!/bin/sh\necho 'ninja: fatal: cannot fly' >&2; exit 1\n")
        (tmp_path / "ninja").chmod(0o755)
        monkeypatch.setitem(sys.modules, "ninja", None)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        with pytest.raises(BuildError, match="ninja: fatal: cannot fly"):
            build([source(f"{SUCCEED} # {number}") for number in range(2)], ARCH, cache=cache)

    def test_one_source_needs_no_ninja(
        self, nvcc: NvccShim, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "ninja", None)
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        assert build_one(source(SUCCEED), ARCH, cache=cache).status == "ok"


class TestTheCache:
    def test_only_entries_and_locks_stay(self, nvcc: NvccShim, cache: Path) -> None:
        variant = build_one(source(SUCCEED), ARCH, cache=cache)
        name = variant.source.name
        assert _files(cache) == {
            "kernels",
            f"kernels/{variant.key}",
            *(f"kernels/{variant.key}/{file}" for file in (f"{name}.cu", f"{name}.so", "compile.log", "variant.json")),
            "locks",
            f"locks/{variant.key}.lock",
            "work",
        }

    @pytest.mark.parametrize(
        "damage", ["record", "library", "library_gone", "library_of_junk", "entry_of_nothing", "foreign_record"]
    )
    def test_a_damaged_entry_is_built_again(self, nvcc: NvccShim, cache: Path, damage: str) -> None:
        variant = build_one(source(SUCCEED), ARCH, cache=cache)
        assert variant.library
        record = variant.library.with_name("variant.json")
        if damage == "record":
            record.write_text(record.read_text()[:40])
        elif damage == "foreign_record":
            record.write_text(json.dumps({"status": "ok", "library": "../../etc"}))
        elif damage == "library":
            variant.library.write_text("li")
        elif damage == "library_of_junk":
            variant.library.write_bytes(bytes(len(LIBRARY)))
        elif damage == "library_gone":
            variant.library.unlink()
        else:
            for file in variant.library.parent.iterdir():
                file.unlink()
        again = build_one(source(SUCCEED), ARCH, cache=cache)
        assert not again.cached
        assert again.library
        assert again.library.read_bytes() == LIBRARY

    def test_what_killed_builds_left_is_removed_a_day_later(self, nvcc: NvccShim, cache: Path) -> None:
        old, new = cache / "work" / "bwdtune-old", cache / "work" / "bwdtune-new"
        for directory in (old, new):
            (directory / "1.1").mkdir(parents=True)
        os.utime(old, (0, 0))
        build_one(source(SUCCEED), ARCH, cache=cache)
        assert not old.exists()
        assert new.exists()

    def test_it_serves_without_a_compiler(
        self, nvcc: NvccShim, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        variant = build_one(source(SUCCEED), ARCH, cache=cache)
        monkeypatch.delenv("CUDA_HOME")
        monkeypatch.setenv("PATH", str(tmp_path))
        without_wheels(monkeypatch)
        assert build_one(source(SUCCEED), ARCH, cache=cache).library == variant.library
        with pytest.raises(ToolchainError, match="nvcc is not found"):
            build([source(SUCCEED), source("another")], ARCH, cache=cache)

    def test_a_read_only_cache_serves(self, nvcc: NvccShim) -> None:
        with tempfile.TemporaryDirectory() as parent, _readable_by_all(nvcc.home):
            cache = Path(parent) / "cache"
            variant = build_one(source(SUCCEED), ARCH, cache=cache)
            with _read_only(Path(parent)):
                assert build_one(source(SUCCEED), ARCH, cache=cache).library == variant.library
                with pytest.raises(BwdtuneError, match="cannot write to the cache directory"):
                    build_one(source("another"), ARCH, cache=cache)

    @pytest.mark.parametrize("closed", ["work", "kernels", "locks"])
    def test_a_cache_that_another_user_made_says_the_way_out(self, nvcc: NvccShim, tmp_path: Path, closed: str) -> None:
        build_one(source(SUCCEED), ARCH, cache=tmp_path / "other")  # loads what nobody may not be able to read
        with tempfile.TemporaryDirectory() as parent, _readable_by_all(nvcc.home):
            cache = Path(parent)
            for name in ("work", "kernels", "locks"):
                (cache / name).mkdir()
                (cache / name).chmod(0o555 if name == closed else 0o777)
            cache.chmod(0o777)
            with _as_nobody():
                startable = os.access(sys.executable, os.X_OK, effective_ids=True)
            if closed != "work" and not startable:
                pytest.skip("nobody may run this Python")
            with _as_nobody(), pytest.raises(CompileError if closed != "work" else BuildError) as refused:
                build_one(source(SUCCEED), ARCH, cache=cache)
        assert "Permission denied" in str(refused.value)
        assert "choose another" in str(refused.value)
        assert "--cache or BWDTUNE_CACHE" in str(refused.value)

    def test_a_read_only_home_is_passed_over(
        self, nvcc: NvccShim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        paths._private_dir.cache_clear()
        for name in ("BWDTUNE_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", "/proc/nowhere")
        with pytest.warns(UserWarning, match="BWDTUNE_CACHE"):
            variant = build_one(source(SUCCEED), ARCH)
        assert build_one(source(SUCCEED), ARCH).cached
        assert variant.library
        assert variant.library.is_relative_to(tmp_path)
        paths._private_dir.cache_clear()

    def test_a_full_disk_is_told_and_not_remembered(self, nvcc: NvccShim, tmp_path: Path) -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)], capture_output=True)
        if mounted.returncode:
            pytest.skip("no right to mount a small file system")
        try:
            big = source(f'head -c 1000000 /dev/zero > "$out" || exit 1; {SUCCEED}')
            (variant,) = build([big], ARCH, cache=disk)
            assert variant.status == "failed"
            assert "no space left" in variant.error.lower()
            assert "\n" not in variant.error
            (variant,) = build([big], ARCH, cache=disk)
            assert not variant.cached
        finally:
            subprocess.run(["umount", str(disk)], check=True)


@contextlib.contextmanager
def _readable_by_all(directory: Path) -> Iterator[None]:
    """pytest's directories are the user's alone; root gives up its rights in `_read_only`."""
    closed = [path for path in directory.parents if path.owner() == directory.owner() and path != Path("/")]
    modes = {path: path.stat().st_mode for path in closed}
    for path in closed:
        path.chmod(modes[path] | 0o055)
    try:
        yield
    finally:
        for path in closed:
            path.chmod(modes[path])


@contextlib.contextmanager
def _read_only(directory: Path) -> Iterator[None]:
    directory.chmod(0o555)
    for path in directory.rglob("*"):
        path.chmod(0o555)
    try:
        with _as_nobody():
            yield
    finally:
        for path in [directory, *directory.rglob("*")]:
            path.chmod(0o755)


@contextlib.contextmanager
def _as_nobody() -> Iterator[None]:
    """Permissions do not bind root."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


class TestPaths:
    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_every_path_may_be_odd(
        self, nvcc: NvccShim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
    ) -> None:
        """The toolkit's, the cache's, the current, the temporary, the package's and the Python's."""
        odd = tmp_path / name
        odd.mkdir()
        shim = NvccShim(odd / "cuda")
        (odd / "python").symlink_to(sys.executable)
        (odd / "compile_step.py").write_bytes(Path(compile_step.__file__).read_bytes())
        monkeypatch.setenv("CUDA_HOME", str(shim.home))
        monkeypatch.chdir(odd)
        monkeypatch.setattr(tempfile, "tempdir", str(odd))
        monkeypatch.setattr(sys, "executable", str(odd / "python"))
        monkeypatch.setattr(compile_step, "__file__", str(odd / "compile_step.py"))
        sources = [source(f"{SUCCEED} # {number}") for number in range(2)]
        assert [variant.status for variant in build(sources, ARCH, cache=Path("cache"))] == ["ok", "ok"]
        assert shim.compiled == 2
        assert sorted(path.name for path in odd.iterdir()) == ["cache", "compile_step.py", "cuda", "python"]


BUILD = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from nvcc_shim import LIBRARY, source
from bwdtune.gen.build.jobs import build
try:
    (variant,) = build([source(Path(sys.argv[2]).read_text())], "sm_90a", cache=Path(sys.argv[1]))
    print(variant.status, variant.cached, variant.library.read_bytes() == LIBRARY if variant.library else variant.error)
except KeyboardInterrupt:
    sys.exit(130)
"""


SLOW_START = """
import os, sys, time
from bwdtune.gen.build import compile_step

def slow_spawn(*arguments, spawn=os.posix_spawnp, **options):
    process = spawn(*arguments, **options)
    time.sleep(1)
    return process

os.posix_spawnp = slow_spawn
sys.exit(compile_step.main(*sys.argv[1:]))
"""


class TestOtherProcesses:
    @staticmethod
    def start(cache: Path, text: str, tmp_path: Path) -> subprocess.Popen[str]:
        """A process that builds one source, in a session of its own."""
        (tmp_path / "source").write_text(text)
        script = BUILD.format(tests=str(Path(__file__).parents[2] / "support"))
        return subprocess.Popen(
            [sys.executable, "-c", script, str(cache), str(tmp_path / "source")],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def test_eight_at_once_compile_once(self, nvcc: NvccShim, cache: Path, tmp_path: Path) -> None:
        builders = [self.start(cache, f"sleep 1; {SUCCEED}", tmp_path) for _ in range(8)]
        answers = [builder.communicate()[0].split() for builder in builders]
        assert [answer[0] for answer in answers] == ["ok"] * 8
        assert {answer[2] for answer in answers} == {"True"}
        assert nvcc.compiled == 1

    @pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    def test_the_end_of_a_build_ends_its_compilers_and_the_next_one_builds(
        self, nvcc: NvccShim, cache: Path, tmp_path: Path, ending: signal.Signals
    ) -> None:
        pid, mended = tmp_path / "pid", tmp_path / "mended"
        text = f"[ -e '{mended}' ] || {{ echo half > \"$out\"; echo $$ > '{pid}'; sleep 600; }}; {SUCCEED}"
        builder = self.start(cache, text, tmp_path)
        _wait_for(lambda: pid.exists() and pid.read_text())
        builder.send_signal(ending)
        assert builder.wait() == (130 if ending == signal.SIGINT else -ending)
        _wait_for(lambda: not _alive(pid))
        mended.touch()
        variant = build_one(source(text), ARCH, cache=cache)
        assert variant.library
        assert variant.library.read_bytes() == LIBRARY

    @pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
    def test_a_compiler_that_is_just_being_started_is_ended_too(self, tmp_path: Path, ending: signal.Signals) -> None:
        """The signal comes when the compiler runs and what has started it has not returned yet."""
        pid = tmp_path / "pid"
        (tmp_path / "entry").mkdir()
        job = compile_step.Job(
            number=0,
            directory=str(tmp_path / "entry"),
            entry=str(tmp_path / "kernels" / "key"),
            lock=str(tmp_path / "lock"),
            command=["sh", "-c", f"echo $$ > '{pid}'; exec sleep 600"],
            library="library.so",
            scratch=str(tmp_path),
            timeout_s=30.0,
            toolchain="13.0.88",
        )
        (tmp_path / "job.json").write_text(json.dumps(job._asdict()))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            step = subprocess.Popen(
                [sys.executable, "-c", SLOW_START, str(tmp_path / "job.json"), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
            _wait_for(lambda: pid.exists() and pid.read_text())
            step.send_signal(ending)
            assert step.wait(30) == 130
        assert not _alive(pid)

    @pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_no_private_files_stay(
        self, nvcc: NvccShim, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals
    ) -> None:
        """However a build ends: a search that is interrupted does not wait for its compilers either."""
        (tmp_path / "tmp").mkdir()
        monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
        builder = self.start(cache, f"touch '{tmp_path}/started'; sleep 600", tmp_path)
        _wait_for((tmp_path / "started").exists)
        assert list((cache / "work").iterdir()), "the test looks at the right place"
        assert list((tmp_path / "tmp").iterdir()), "the test looks at the right place"
        builder.send_signal(ending)
        builder.wait()
        _wait_for(lambda: not list((cache / "work").iterdir()))
        _wait_for(lambda: not list((tmp_path / "tmp").iterdir()))

    def test_a_lock_file_without_a_holder_is_no_lock(self, nvcc: NvccShim, cache: Path) -> None:
        variant = build_one(source(SUCCEED), ARCH, cache=cache)
        assert variant.library
        for file in variant.library.parent.iterdir():
            file.unlink()
        lock = cache / "locks" / f"{variant.key}.lock"
        lock.write_text("process 1 on another-host")
        os.utime(lock, (0, 0))
        assert build_one(source(SUCCEED), ARCH, cache=cache).status == "ok"

    def test_a_long_wait_is_told(
        self, nvcc: NvccShim, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        text = f"touch '{tmp_path}/started'; while [ ! -e '{tmp_path}/gate' ]; do sleep 0.05; done; {SUCCEED}"
        builder = self.start(cache, text, tmp_path)
        _wait_for((tmp_path / "started").exists)

        class _Opener(logging.Handler):
            """The other build goes on when the message has come."""

            def emit(self, record: logging.LogRecord) -> None:
                (tmp_path / "gate").touch()

        logger = logging.getLogger("bwdtune.gen.build.jobs")
        opener = _Opener()
        logger.addHandler(opener)
        try:
            variant = build_one(source(text), ARCH, cache=cache)
        finally:
            logger.removeHandler(opener)
        assert builder.communicate()[0].split()[:2] == ["ok", "False"]
        assert variant.status == "ok"
        assert nvcc.compiled == 1
        assert str(cache / "locks" / variant.key) in caplog.text
        assert f"on {os.uname().nodename}" in caplog.text

    def test_a_file_system_without_locks_will_do(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(descriptor: int, operation: int) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)
        job = compile_step.Job(0, "", "", str(cache / "lock"), [], "", "", 1, "")
        with compile_step._locked(job, build=None):  # type: ignore[arg-type]
            pass

    def test_what_the_callback_raises_ends_the_compilers(self, nvcc: NvccShim, cache: Path, tmp_path: Path) -> None:
        pid = tmp_path / "pid"
        slow = source(f"echo $$ > '{pid}'; sleep 600")
        quick = source(f"while [ ! -s '{pid}' ]; do sleep 0.05; done; {SUCCEED}")

        def on_done(variant: Variant) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError) as caught:  # held, with its frames, as an error in flight is
            build([slow, quick], ARCH, cache=cache, jobs=2, on_done=on_done)
        assert caught
        assert not _alive(pid)

    def test_builds_may_run_in_threads(self, nvcc: NvccShim, cache: Path) -> None:
        found: list[Variant] = []

        def work(number: int) -> None:
            found.extend(build([source(f"{SUCCEED} # {number % 2}")], ARCH, cache=cache))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [variant.status for variant in found] == ["ok"] * 4
        assert nvcc.compiled == 2


PTXAS = """\
ptxas info    : 0 bytes gmem, 24 bytes cmem[4]
ptxas info    : Compiling entry function '_ZN7bwdtune36_GLOBAL__N__9a8b7c6d_4_k_cu_0123456715backward_kernelE17bwdtune_arguments' for 'sm_120a'
ptxas info    : Function properties for _ZN7bwdtune36_GLOBAL__N__9a8b7c6d_4_k_cu_0123456715backward_kernelE17bwdtune_arguments
    48 bytes stack frame, 44 bytes spill stores, 24 bytes spill loads
ptxas info    : Function properties for _Z6helperPf
    16 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 3 barriers, 48 bytes cumulative stack size, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 913.427 ms
ptxas info    : Compiling entry function '_Z17preprocess_kernelPfS_' for 'sm_120a'
ptxas info    : Function properties for _Z17preprocess_kernelPfS_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, 380 bytes cmem[0]
ptxas info    : Compiling entry function 'plain' for 'sm_120a'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""  # noqa: E501 - as ptxas writes it


def test_ptxas_figures_are_of_the_kernels_themselves() -> None:
    assert parse_ptxas(PTXAS) == {
        "backward_kernel": CompiledResources(255, 68, 48, 1024, 3),
        "preprocess_kernel": CompiledResources(40, 0, 0, 0, 0),
        "plain": CompiledResources(8, 0, 0, 0, 0),
    }
    assert parse_ptxas("") == {}


KERNEL = """
#include <cuda_runtime.h>
namespace {
__global__ void backward_kernel(float* values) {
    __shared__ float tile[64];
    tile[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    values[threadIdx.x] = tile[63 - threadIdx.x];
}
}
extern "C" int answer() { return 42; }
extern "C" int launch(float* values) {
    cudaLaunchConfig_t config{};
    config.gridDim = 1;
    config.blockDim = 64;
    return cudaLaunchKernelEx(&config, backward_kernel, values);
}
"""


def _need_compiler(arch: str) -> None:
    try:
        find_compiler(arch)
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_a_real_nvcc(cache: Path, arch: str) -> None:
    _need_compiler(arch)
    broken = KERNEL.replace("63 - threadIdx.x", "63 - oops")
    good, bad = build([source(KERNEL, "good"), source(broken, "bad")], arch, cache=cache)
    assert good.status == "ok", good.error
    assert good.resources
    assert good.resources.shared_memory_bytes == 256
    assert good.resources.spill_bytes == 0
    assert 0 < good.resources.registers < 64
    assert good.resources.barriers == 1
    assert good.library
    assert ctypes.CDLL(str(good.library)).answer() == 42
    assert bad.status == "failed"
    assert 'error: identifier "oops" is undefined; exit status' in bad.error


def test_a_real_nvcc_under_an_odd_path(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _need_compiler("sm_90a")
    compiler = find_compiler("sm_90a")
    odd = tmp_path / 'it\'s a $HOME: "odd" path'
    odd.mkdir()
    (odd / "cuda").symlink_to(compiler.root)  # type: ignore[union-attr]
    monkeypatch.setenv("CUDA_HOME", str(odd / "cuda"))
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    monkeypatch.setenv("TMPDIR", str(odd))
    assert build_one(source(KERNEL), "sm_90a", cache=odd / "cache").library


def test_a_real_host_compiler() -> None:
    """In the cache of all tests, where what all libraries are linked with is compiled once."""
    _need_compiler("host")
    text = '#ifndef BWDTUNE_HOST\n#error\n#endif\n#include <concepts>\nextern "C" int answer() { return 42; }\n'
    variant = build_one(source(text), "host")
    assert variant.resources is None
    assert variant.library
    assert ctypes.CDLL(str(variant.library)).answer() == 42
    (bad,) = build([source("oops")], "host")
    assert "error: 'oops' does not name a type" in bad.error


class TestRuntimeOfHostLibraries:
    """A C++ compiler that notes what it is given, and makes of each an object or a library, or fails."""

    @pytest.fixture
    def compiled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
        (tmp_path / "library").write_bytes(LIBRARY)
        program, log = tmp_path / "c++", tmp_path / "compiled"
        program.write_text(
            f"""#!/bin/sh
case "$1" in --version) echo "g++ (a stand-in) 1.0.0"; exit ;; esac
case "$*" in
    *-c*/runtime.cpp*) echo runtime >> {log}; [ -e {tmp_path}/broken ] && echo "error: no such luck" && exit 1 ;;
    *BWDTUNE_HOST_LINKED*runtime.o*) echo kernel >> {log} ;;
esac
for word; do
    [ "$previous" = -o ] && cp {tmp_path}/library "$word"
    previous=$word
done
"""
        )
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))
        return lambda: log.read_text().split() if log.exists() else []

    def test_it_is_compiled_once(self, cache: Path, compiled: Callable[[], list[str]]) -> None:
        variants = build([source("1", "one"), source("2", "two")], "host", cache=cache)
        assert [variant.status for variant in variants] == ["ok", "ok"]
        assert compiled() == ["runtime", "kernel", "kernel"]
        assert build_one(source("3"), "host", cache=cache).library
        assert compiled() == ["runtime", *["kernel"] * 3]

    def test_where_it_does_not_compile_no_kernel_does(
        self, cache: Path, compiled: Callable[[], list[str]], tmp_path: Path
    ) -> None:
        (tmp_path / "broken").touch()
        variants = build([source("1", "one"), source("2", "two")], "host", cache=cache)
        assert [variant.source.kernel_spec for variant in variants] == ["one", "two"]
        assert {variant.error for variant in variants} == {"error: no such luck; exit status 1"}
        assert compiled() == ["runtime"]
