"""Which winner computes a problem, and what happens where there is none."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cxx_shim import CxxShim
from subscriber import Told

from bwdtune.db.records import Environment, GpuKey
from bwdtune.db.shipped import Shipped, write_shipped
from bwdtune.db.store import Store
from bwdtune.gen.device import HOST, Device
from bwdtune.gen.errors import UsageError
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime import dispatch, gpu
from bwdtune.runtime.dispatch import builds, choices, choose
from bwdtune.runtime.dispatch.choices import dispatcher
from bwdtune.runtime.dispatch.records import Cause
from bwdtune.runtime.dispatch.statistics import stats
from bwdtune.runtime.dispatch.warming import warmup
from bwdtune.runtime.gpu import NoGpuError
from bwdtune.runtime.kernel import Kernel, KernelError

PROBLEM = Problem.parse("2_4_128_64", causal=True)


def chosen_config(problem: Problem = PROBLEM) -> str:
    choice = choose(problem, 0)
    assert choice.kernel, choice.reason
    assert choice.row
    assert choice.row.config.id in choice.kernel.path.stem
    return choice.row.config.id


def test_the_problems_own_winner(host: Device, store_winner: Callable[..., None]) -> None:
    store_winner(PROBLEM, PRESETS["v2"])
    assert chosen_config() == PRESETS["v2"].id
    assert choose(PROBLEM, 0).reason == "the winner of 2_4_128_64 bf16 causal"


def test_no_database_is_no_winner_and_none_is_made(host: Device) -> None:
    choice = choose(PROBLEM, 0)
    assert choice.kernel is None
    assert choice.reason.startswith("no winner is stored for 2_4_128_64 bf16 causal or one like it on host CPU")
    assert not Path(os.environ["BWDTUNE_DB"]).exists()


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("2_4_150_64", "v1"),
        ("2_4_2048_64", "v2"),
        ("64_4_150_64", "v1"),
        ("2_1_100_64", "v1"),
        ("2_4_1_900_64", "v2"),
        ("1_8_128_64", "v1"),
    ],
)
def test_the_nearest_winner(host: Device, store_winner: Callable[..., None], asked: str, nearest: str) -> None:
    store_winner(PROBLEM, PRESETS["v1"])
    store_winner(Problem.parse("2_4_1024_64", causal=True), PRESETS["v2"])
    assert chosen_config(Problem.parse(asked, causal=True)) == PRESETS[nearest].id


@pytest.mark.parametrize(
    "other",
    [
        Problem.parse("2_4_128_64", causal=False),
        Problem.parse("2_4_128_64", causal=True, dtype="fp16"),
        Problem.parse("2_4_128_128", causal=True),
    ],
)
def test_a_winner_for_another_kind_of_problem_is_never_used(
    host: Device, store_winner: Callable[..., None], other: Problem
) -> None:
    store_winner(other, PRESETS["v1"])
    assert choose(PROBLEM, 0).kernel is None


@pytest.mark.parametrize("key", [GpuKey("another card", "host"), GpuKey(HOST.name, "9.0")])
def test_a_winner_of_another_gpu_is_never_used(host: Device, store_winner: Callable[..., None], key: GpuKey) -> None:
    store_winner(PROBLEM, key=key)
    assert choose(PROBLEM, 0).kernel is None


def test_each_gpu_has_its_own_winner(store_winner: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is asked for first, and however often."""
    cards = [HOST, replace(HOST, name="another card")]
    monkeypatch.setattr(gpu, "current_device", lambda index: cards[index])
    for card, preset in zip(cards, ("v1", "v2"), strict=True):
        store_winner(PROBLEM, PRESETS[preset], device=card)
    found = {}
    for index in (1, 0, 1):
        row = choose(PROBLEM, index).row
        assert row
        found[index] = row.config.id
    assert found == {0: PRESETS["v1"].id, 1: PRESETS["v2"].id}


def test_a_winner_without_limits_comes_first(host: Device, store_winner: Callable[..., None]) -> None:
    store_winner(PROBLEM, PRESETS["v1"], limits="sm_120")
    assert chosen_config() == PRESETS["v1"].id
    store_winner(PROBLEM, PRESETS["v2"])
    assert chosen_config() == PRESETS["v1"].id
    dispatch.forget()
    assert chosen_config() == PRESETS["v2"].id


def test_a_winner_whose_templates_have_changed_is_passed_over(host: Device, store_winner: Callable[..., None]) -> None:
    store_winner(PROBLEM, PRESETS["v1"], source_hash="0" * 16)
    choice = choose(PROBLEM, 0)
    assert choice.kernel is None
    assert choice.reason == (
        "the winner of 2_4_128_64 bf16 causal cannot be used: its text has changed since it was verified, and its "
        "machine code is not known: search again"
    )
    store_winner(Problem.parse("2_4_256_64", causal=True), PRESETS["v2"])
    dispatch.forget()
    assert chosen_config() == PRESETS["v2"].id


def test_a_winner_that_does_not_fit_the_device(
    host: Device, store_winner: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_winner(PROBLEM)
    monkeypatch.setattr(gpu, "current_device", lambda index: replace(HOST, shared_memory_per_block_bytes=1000))
    assert "bytes of shared memory" in choose(PROBLEM, 0).reason


def test_a_winner_that_splits_groups_serves_grouped_heads(host: Device, store_winner: Callable[..., None]) -> None:
    split = replace(PRESETS["v3"], split_gqa_heads=True)
    store_winner(Problem.parse("2_4_1_128_64", causal=True), split)
    assert chosen_config(Problem.parse("2_4_2_300_64", causal=True)) == split.id
    assert choose(PROBLEM, 0).reason.endswith("cannot be used: a group is one query head: there is nothing to split")
    store_winner(Problem.parse("1_4_128_64", causal=True), PRESETS["v2"])
    dispatch.forget()
    assert chosen_config() == PRESETS["v2"].id


def test_sizes_that_the_kernel_cannot_count(
    host: Device, store_winner: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_winner(PROBLEM)

    def refuse(kernel: Kernel, *sizes: object) -> int:
        raise KernelError("more than 2^31 tiles")

    monkeypatch.setattr(Kernel, "workspace_bytes", refuse)
    choice = choose(PROBLEM, 0)
    assert choice.kernel is None
    assert choice.reason == "the winner of 2_4_128_64 bf16 causal cannot be used: more than 2^31 tiles"


@pytest.mark.parametrize("content", [b"not a database", os.urandom(5000), b"SQLite format 3\0" + bytes(200)])
def test_a_broken_database_is_a_reason(host: Device, content: bytes) -> None:
    path = Path(os.environ["BWDTUNE_DB"])
    path.write_bytes(content)
    choice = choose(PROBLEM, 0)
    assert choice.kernel is None
    assert str(path) in choice.reason
    assert choose(Problem.parse("1_1_1_64"), 0).reason == choice.reason
    assert path.read_bytes() == content


def test_a_database_that_is_a_directory(host: Device) -> None:
    Path(os.environ["BWDTUNE_DB"]).mkdir()
    assert choose(PROBLEM, 0).kernel is None


def test_no_gpu_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> Device:
        raise NoGpuError("the driver shows no GPU")

    monkeypatch.setattr(gpu, "current_device", fail)
    assert choose(PROBLEM, 0).reason == "the driver shows no GPU"


def test_no_compiler_is_a_reason(
    host: Device, store_winner: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store_winner(PROBLEM)
    monkeypatch.setenv("BWDTUNE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    choice = choose(PROBLEM, 0)
    assert choice.kernel is None
    assert "cannot be used" in choice.reason


def test_threads_share_one_lookup_and_one_compile(
    host: Device, store_winner: Callable[..., None], monkeypatch: pytest.MonkeyPatch, compiler: CxxShim
) -> None:
    store_winner(PROBLEM)
    opened = []
    open_store = Store.open
    monkeypatch.setattr(
        Store, "open", lambda *where, **options: opened.append(options) or open_store(*where, **options)
    )
    problems = [PROBLEM, Problem.parse("2_4_100_64", causal=True)] * 8
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda problem: choose(problem, 0), problems))
    assert len({choice.kernel for choice in found}) == 1
    assert len(compiler.compiled) == 1
    assert opened == [{"read_only": True}]


def test_a_fork_while_another_thread_looks_up(host: Device, store_winner: Callable[..., None]) -> None:
    store_winner(PROBLEM)
    chosen_config()
    with dispatcher._changed:
        child = os.fork()
        if not child:
            status = 1
            try:
                threading.Timer(20, os._exit, [2]).start()
                status = int(choose(Problem.parse("2_4_100_64", causal=True), 0).kernel is None)
            finally:
                os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_what_users_send_to_other_processes_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(choose)) is choose


def test_the_import_loads_no_database_and_no_optimiser() -> None:
    code = (
        "import sys, bwdtune; bwdtune.attention; print(*{'sqlalchemy', 'optuna', 'alembic', 'rich'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


class TestShipped:
    """What this version ships comes after what is stored."""

    ROW = Shipped(
        problem=PROBLEM,
        config=PRESETS["v1"],
        gpu=GpuKey(HOST.name, "host"),
        kind="measured",
        environment=Environment(GpuKey(HOST.name, "host"), "host", "580", "13.0", "2.13"),
        policy="race",
        date="2026-01-01",
        command="tuner search",
        ms=1.0,
        cycles=None,
        max_error=2e-3,
        source_hash=render(PROBLEM, PRESETS["v1"]).hash,
        template_hash="templates",
    )

    def test_it_computes_where_nothing_is_stored(self, host: Device) -> None:
        write_shipped([self.ROW])
        assert chosen_config() == PRESETS["v1"].id
        reason = choose(PROBLEM, 0).reason
        assert reason == (
            "the configuration that is shipped for 2_4_128_64 bf16 causal on host CPU (measured on host CPU)"
        )

    def test_a_users_winner_of_the_same_problem_comes_first(
        self, host: Device, store_winner: Callable[..., None]
    ) -> None:
        write_shipped([self.ROW])
        store_winner(PROBLEM, PRESETS["v2"])
        assert chosen_config() == PRESETS["v2"].id

    def test_what_is_shipped_for_this_problem_comes_before_a_users_winner_of_another(
        self, host: Device, store_winner: Callable[..., None]
    ) -> None:
        write_shipped([self.ROW])
        store_winner(Problem.parse("2_4_150_64", causal=True), PRESETS["v2"])
        assert chosen_config() == PRESETS["v1"].id
        assert chosen_config(Problem.parse("2_4_149_64", causal=True)) == PRESETS["v2"].id

    def test_it_stands_in_for_a_winner_that_cannot_be_used(
        self, host: Device, store_winner: Callable[..., None]
    ) -> None:
        write_shipped([self.ROW])
        store_winner(PROBLEM, PRESETS["v2"], source_hash="of yesterday")
        assert chosen_config() == PRESETS["v1"].id

    def test_an_emulated_one_says_so(self, host: Device) -> None:
        write_shipped([replace(self.ROW, kind="emulated", ms=None, cycles=2e7)])
        assert choose(PROBLEM, 0).kernel
        assert "(emulated on host CPU, not measured)" in choose(PROBLEM, 0).reason

    def test_the_same_model_comes_first_then_the_nearest_problem(self, host: Device) -> None:
        far = Problem.parse("2_4_4096_64", causal=True)
        write_shipped(
            [
                replace(self.ROW, gpu=GpuKey("another CPU", "host"), config=PRESETS["v3"], source_hash="unused"),
                replace(self.ROW, problem=far, config=PRESETS["v2"], source_hash=render(far, PRESETS["v2"]).hash),
                self.ROW,
            ]
        )
        assert chosen_config() == PRESETS["v1"].id

    @pytest.mark.parametrize(
        "changes",
        [
            {"gpu": GpuKey("NVIDIA H200", "9.0")},
            {"problem": Problem.parse("2_4_128_64")},
            {"source_hash": "of yesterday"},
            {"config": replace(PRESETS["v1"], block_q=16)},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_it_counts_only_where_it_is_valid(self, host: Device, changes: dict) -> None:
        write_shipped([replace(self.ROW, **changes)])
        assert choose(PROBLEM, 0).kernel is None


@pytest.mark.usefixtures("host", "in_background")
class TestInTheBackground:
    """By default nothing is read, compiled or loaded in the call; PyTorch's backward serves until it is done."""

    def test_a_kernel_is_built_and_subscribers_are_told(
        self, store_winner: Callable[..., None], compiler: CxxShim, told: Told, caplog: pytest.LogCaptureFixture
    ) -> None:
        store_winner(PROBLEM)
        compiler.hold()
        first = choose(PROBLEM, 0)
        assert (first.kernel, first.final, first.cause) == (None, False, Cause.READING)
        compiler.release()
        (last,) = told.wait_for()
        assert last
        assert last.kernel
        assert last.final
        assert told.calls == [(PROBLEM, 0, last)]
        assert choose(PROBLEM, 0) is last
        (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert "is being compiled in the background" in line
        assert "`tuner prebuild --shape 2_4_128_64 --causal --dtype bf16` or bwdtune.warmup(...)" in line

    def test_while_it_is_built_the_choice_is_pytorchs_and_says_so(
        self, store_winner: Callable[..., None], compiler: CxxShim, told: Told
    ) -> None:
        store_winner(PROBLEM)
        compiler.hold()
        dispatcher.prepare(wait=True)
        dispatcher.wait_until((PROBLEM, 0), lambda choice: choice.cause == Cause.BUILDING)
        for length in (128, 100, 90):
            choice = choose(Problem.parse(f"2_4_{length}_64", causal=True), 0)
            assert (choice.kernel, choice.final, choice.cause) == (None, False, Cause.BUILDING)
            assert choice.reason == "the winner of 2_4_128_64 bf16 causal is being built"
        compiler.release()
        found = told.wait_for(3)
        assert len({choice.kernel for choice in found if choice}) == 1
        assert len(compiler.compiled) == 1

    def test_a_library_in_the_cache_is_found_without_a_compiler(
        self,
        store_winner: Callable[..., None],
        compiler: CxxShim,
        told: Told,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        store_winner(PROBLEM)
        warmup(PROBLEM)
        dispatch.forget()
        told.calls.clear()
        monkeypatch.setenv("CXX", "/missing")
        monkeypatch.setattr(subprocess, "Popen", None)  # no process is started
        choose(PROBLEM, 0)
        (choice,) = told.wait_for()
        assert choice
        assert choice.kernel, choice.reason
        assert not caplog.records

    def test_what_is_ready_does_not_wait_for_a_compile(
        self, store_winner: Callable[..., None], compiler: CxxShim, told: Told
    ) -> None:
        other = Problem.parse("2_4_128_64")
        compiler.add(other)
        store_winner(PROBLEM)
        store_winner(other)
        warmup(other)
        dispatch.forget()
        told.calls.clear()
        compiler.hold()
        dispatcher.prepare(wait=True)
        dispatcher.wait_until((PROBLEM, 0), lambda choice: choice.cause == Cause.BUILDING)
        choose(other, 0)
        told.wait_for()
        assert told.calls[0][0] == other
        compiler.release()
        told.wait_for(2)

    def test_a_row_that_does_not_compile_gives_way_to_the_next(
        self, store_winner: Callable[..., None], compiler: CxxShim, told: Told
    ) -> None:
        """A second row of another kind of kernel: the stand-in has no stub for the first."""
        store_winner(PROBLEM, PRESETS["v1"], source_hash="0" * 16)
        store_winner(Problem.parse("2_4_150_64", causal=True), PRESETS["v2"])
        choose(PROBLEM, 0)
        (choice,) = told.wait_for()
        assert choice
        assert choice.row
        assert choice.row.config == PRESETS["v2"]

    def test_a_compile_that_fails_is_pytorchs_and_one_line(
        self, store_winner: Callable[..., None], told: Told, caplog: pytest.LogCaptureFixture
    ) -> None:
        without_stub = Problem.parse("2_4_128_64")
        store_winner(without_stub)
        choose(without_stub, 0)
        (choice,) = told.wait_for()
        assert choice
        assert (choice.kernel, choice.final, choice.cause) == (None, True, Cause.UNUSABLE)
        assert "was not compiled for host" in choice.reason
        lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(lines) == 2  # that it is being compiled, and what came of it
        assert stats().failed == (choice.reason.split("cannot be used: ")[1],)

    def test_a_template_that_fails_is_pytorchs(
        self, store_winner: Callable[..., None], told: Told, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store_winner(PROBLEM)

        def fail(problem: Problem, config: object) -> None:
            raise ValueError("an undefined name")

        monkeypatch.setattr(builds, "render", fail)
        choose(PROBLEM, 0)
        (choice,) = told.wait_for()
        assert choice
        assert choice.reason.endswith("cannot be used: it does not render: ValueError: an undefined name")

    def test_without_sqlalchemy_what_is_shipped_serves(
        self, told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_shipped([TestShipped.ROW])
        monkeypatch.setitem(sys.modules, "bwdtune.db.store", None)
        choose(PROBLEM, 0)
        (choice,) = told.wait_for()
        assert choice
        assert choice.kernel, choice.reason
        (line,) = (message for message in caplog.messages if "stored winners do not count" in message)
        assert "the database cannot be read" in line

    def test_under_capture_nothing_is_waited_for(
        self, store_winner: Callable[..., None], compiler: CxxShim, told: Told, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("BWDTUNE_ON_MISS", "wait")
        store_winner(PROBLEM)
        compiler.hold()
        assert choose(PROBLEM, 0, capturing=True).kernel is None
        compiler.release()
        told.wait_for()
        assert choose(PROBLEM, 0, capturing=True).kernel

    def test_a_hundred_new_lengths_cost_no_compile(
        self, store_winner: Callable[..., None], compiler: CxxShim, caplog: pytest.LogCaptureFixture
    ) -> None:
        store_winner(PROBLEM)
        warmup(PROBLEM)
        kernels = {choose(Problem.parse(f"2_4_{length}_64", causal=True), 0).kernel for length in range(100, 300)}
        assert len(kernels) == 1
        assert None not in kernels
        assert len(compiler.compiled) == 1
        assert not caplog.records

    def test_two_hundred_lengths_without_a_kernel_are_one_line(self, caplog: pytest.LogCaptureFixture) -> None:
        dispatcher.prepare(wait=True)
        for length in range(100, 300):
            assert choose(Problem.parse(f"2_4_{length}_64", causal=True), 0).final
        assert len(caplog.records) == 1

    def test_what_is_remembered_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choices, "_MOST_CHOICES", 20)
        dispatcher.prepare(wait=True)
        for length in range(100, 150):
            choose(Problem.parse(f"2_4_{length}_64", causal=True), 0)
            assert len(dispatcher._choices) <= 20

    def test_warnings_are_bounded(self, caplog: pytest.LogCaptureFixture) -> None:
        """A line for each kind of problem, and not without end."""
        dispatcher.prepare(wait=True)
        for head_dim in range(8, 264, 8):
            for dtype, causal in itertools.product(("bf16", "fp16"), (False, True)):
                choose(Problem.parse(f"2_4_128_{head_dim}", dtype=dtype, causal=causal), 0)
        assert 64 < len(caplog.records) < 70
        assert "there will be no more" in caplog.messages[-1]

    def test_a_subscriber_that_fails_costs_the_others_nothing(
        self, store_winner: Callable[..., None], told: Told
    ) -> None:
        def fail(*told: object) -> None:
            raise ValueError("a fault of the subscriber's")

        store_winner(PROBLEM)
        dispatcher._subscribers.append(fail)
        choose(PROBLEM, 0)
        told.wait_for()
        dispatch.forget()
        choose(PROBLEM, 0)
        choice = told.wait_for(3)[-1]
        assert choice
        assert choice.kernel

    def test_to_forget_is_told(self, told: Told) -> None:
        dispatch.forget()
        assert told.calls == [(None, None, None)]

    def test_a_build_that_ends_after_forget_changes_nothing(
        self, store_winner: Callable[..., None], compiler: CxxShim, told: Told
    ) -> None:
        store_winner(PROBLEM)
        compiler.hold()
        dispatcher.prepare(wait=True)
        dispatcher.wait_until((PROBLEM, 0), lambda choice: choice.cause == Cause.BUILDING)
        dispatch.forget()
        compiler.release()
        choose(PROBLEM, 0)
        choice = told.wait_for(2)[-1]
        assert choice
        assert choice.kernel

    def test_a_kernel_whose_launch_failed_is_not_chosen_again(
        self, store_winner: Callable[..., None], told: Told
    ) -> None:
        store_winner(PROBLEM)
        warmup(PROBLEM)
        kernel = choose(PROBLEM, 0).kernel
        assert kernel
        told.calls.clear()
        dispatch.discard(kernel, "its launch failed: out of resources")
        choice = choose(PROBLEM, 0)
        assert choice.kernel is None
        assert choice.reason.endswith("cannot be used: its launch failed: out of resources")
        assert told.calls == [(PROBLEM, 0, choice)]

    def test_a_child_of_a_process_that_builds_builds_for_itself(
        self, store_winner: Callable[..., None], compiler: CxxShim, told: Told
    ) -> None:
        store_winner(PROBLEM)
        compiler.hold()
        dispatcher.prepare(wait=True)
        dispatcher.wait_until((PROBLEM, 0), lambda choice: choice.cause == Cause.BUILDING)
        child = os.fork()
        if not child:
            status = 1
            try:
                threading.Timer(50, os._exit, [2]).start()
                os.environ["BWDTUNE_ON_MISS"] = "wait"
                status = int(choose(PROBLEM, 0).kernel is None)
            finally:
                os._exit(status)
        compiler.release()
        assert os.waitpid(child, 0)[1] == 0
        told.wait_for()
        assert len(compiler.compiled) == 1


@pytest.mark.parametrize("value", ["later", "WAIT"])
def test_a_variable_that_means_nothing(
    host: Device, monkeypatch: pytest.MonkeyPatch, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused where one asks for it, and never within a step."""
    monkeypatch.setenv("BWDTUNE_ON_MISS", value)
    line = f"BWDTUNE_ON_MISS is {value!r}: set it to pytorch or wait, or unset it"
    with pytest.raises(UsageError, match=line):
        dispatch.prepare()
    for _ in range(2):
        assert choose(PROBLEM, 0).kernel is None
    assert [record.getMessage() for record in caplog.records] == [line]


def test_processes_on_one_empty_cache_compile_a_kernel_once(
    host: Device, store_winner: Callable[..., None], compiler: CxxShim
) -> None:
    store_winner(PROBLEM)
    ranks = []
    for _ in range(4):
        rank = os.fork()
        if not rank:
            status = 1
            try:
                threading.Timer(90, os._exit, [2]).start()
                status = int(choose(PROBLEM, 0).kernel is None)
            finally:
                os._exit(status)
        ranks.append(rank)
    assert [os.waitpid(rank, 0)[1] for rank in ranks] == [0] * 4
    assert len(compiler.compiled) == 1
