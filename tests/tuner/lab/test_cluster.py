"""What a search takes of a cluster, and what becomes of what is lost there: with a stand-in for Ray."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cluster import LIBRARY, compile_here
from search_fakes import ENVIRONMENT, PROBLEM, FakeBench

import bwdtune
from bwdtune.gen.build.jobs import Built
from bwdtune.gen.device import H200
from bwdtune.gen.errors import UsageError
from bwdtune.gen.families import PRESETS
from bwdtune.gen.render import render
from bwdtune.tuner.lab import cluster as module
from bwdtune.tuner.lab.cluster import Card, ClusterError, cluster
from bwdtune.tuner.lab.protocol import CandidateError, WorkerError
from bwdtune.tuner.lab.timing import SEARCH_POLICY

SOURCE = render(PROBLEM, PRESETS["v1"])
CARD = Card("a", "GPU-1", H200, ENVIRONMENT)


class LostError(Exception):
    pass


class FakeRay:
    """Runs what it is given when it is asked for the answer.

    Attributes:
        gpus: How many the cluster has.
        dead: Why nothing answers any more.
    """

    exceptions = SimpleNamespace(RayError=LostError)

    def __init__(self, gpus: int) -> None:
        self.gpus, self.dead, self.put_count, self.killed = gpus, "", 0, 0

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 6.0, **({"GPU": float(self.gpus)} if self.gpus else {})}

    def remote(self, **options: Any) -> Any:
        def decorate(what: Any) -> Any:
            if not isinstance(what, type):
                return SimpleNamespace(remote=lambda *given: lambda: what(*given))
            return SimpleNamespace(remote=lambda *given: self._actor(what, given))

        return decorate

    def _actor(self, kind: type, given: tuple[Any, ...]) -> Any:
        made: list[Any] = []

        def method(name: str) -> Any:
            def call(*arguments: Any) -> Any:
                if not made:
                    made.append(kind(*given))
                return getattr(made[0], name)(*arguments)

            return SimpleNamespace(remote=lambda *arguments: lambda: call(*arguments))

        return SimpleNamespace(about=method("about"), ask=method("ask"))

    def wait(self, answers: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return answers[:1], answers[1:]

    def get(self, answer: Any) -> Any:
        if self.dead:
            raise LostError(self.dead)
        return answer()

    def put(self, value: bytes) -> bytes:
        self.put_count += 1
        return value

    def kill(self, actor: Any) -> None:
        self.killed += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    found = FakeRay(gpus=3)
    monkeypatch.setattr(module, "_ray", lambda: found)
    return found


def opener(*cards: Card) -> Any:
    """Opens the cards, one after the other."""
    left = list(cards)

    @contextmanager
    def open_bench():
        card = left.pop(0)
        yield FakeBench(crashing=lambda config: config == PRESETS["v2"]), card

    return open_bench


@contextmanager
def taken(ray: FakeRay, tmp_path: Path, *cards: Card, notices: list[str] | None = None):
    ray.gpus = len(cards)
    (tmp_path / "nodes").mkdir()
    with cluster(
        "auto",
        (notices if notices is not None else []).append,
        cache=tmp_path / "cache",
        open_bench=opener(*cards),
        compile_on_node=lambda source, arch: compile_here(str(tmp_path / "nodes"), source, arch),
    ) as found:
        yield found


@pytest.fixture(autouse=True)
def _on_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fake_cluster.node", lambda: "this")


def test_ray_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'bwdtune\[ray\]'"), cluster("auto", print):
        pass


def test_a_cluster_without_gpus(ray: FakeRay) -> None:
    ray.gpus = 0
    with pytest.raises(ClusterError, match="the Ray cluster at auto has no GPU"), cluster("auto", print):
        pass


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (replace(CARD, version="0.0.1"), f"it has bwdtune 0.0.1, and this is {bwdtune.__version__}"),
        (
            replace(CARD, environment=replace(ENVIRONMENT, driver="1.2")),
            f"it is not like a GPU-1: driver 1.2 for {ENVIRONMENT.driver}",
        ),
    ],
)
def test_cards_that_are_not_like_the_first_are_left_out(ray: FakeRay, tmp_path: Path, other: Card, reason: str) -> None:
    notices: list[str] = []
    other, third = replace(other, host="b", uuid="GPU-2"), replace(CARD, host="c", uuid="GPU-3")
    with taken(ray, tmp_path, CARD, other, third, notices=notices) as found:
        assert list(found.benches) == ["a GPU-1", "c GPU-3"]
        assert found.compilers == 6
    assert notices == [f"b GPU-2 is left out: {reason}"]
    assert ray.killed == 3, "all are given back"


def test_gpus_that_others_use_are_not_waited_for(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OTHER_GPUS_LIMIT_S", 0.0)
    notices: list[str] = []
    with taken(ray, tmp_path, CARD, CARD, notices=notices) as found:
        assert len(found.cards) == 1
    assert notices == ["1 GPUs of the Ray cluster are in use by others, and left out"]


def test_none_of_the_gpus_can_be_used(ray: FakeRay, tmp_path: Path) -> None:
    ray.dead = "The actor died\nTraceback\nRuntimeError: no driver"
    notices: list[str] = []
    with pytest.raises(ClusterError, match="no GPU"), taken(ray, tmp_path, CARD, notices=notices):
        pass
    assert notices == ["a GPU of the cluster is left out: The actor died … RuntimeError: no driver"]


def test_what_a_node_compiles_is_kept_here_and_runs_on_another(ray: FakeRay, tmp_path: Path) -> None:
    with taken(ray, tmp_path, CARD) as found:
        variant = found.builder(SOURCE, "sm_90a")
        assert variant.library
        assert variant.library.read_bytes() == LIBRARY
        (bench,) = found.benches.values()
        assert bench.verify(PROBLEM, variant).passed
        assert bench.verify_at(PROBLEM, variant).passed
        assert set(bench.time(PROBLEM, [variant], ["fa"], SEARCH_POLICY)) == {PRESETS["v1"].id, "fa"}
        assert ray.put_count == 1, "it is sent once"
        for path in (tmp_path / "nodes").iterdir():
            path.unlink()
        assert found.builder(SOURCE, "sm_90a").library == variant.library
        assert not list((tmp_path / "nodes").iterdir()), "nor compiled again"


def test_a_candidates_fault_is_no_loss_of_the_bench(ray: FakeRay, tmp_path: Path) -> None:
    with taken(ray, tmp_path, CARD) as found:
        variant = found.builder(render(PROBLEM, PRESETS["v2"]), "sm_90a")
        (bench,) = found.benches.values()
        with pytest.raises(CandidateError, match="SIGSEGV") as error:
            bench.time(PROBLEM, [variant], [], SEARCH_POLICY)
        assert error.value.candidate == PRESETS["v2"].id


def test_a_node_that_is_gone_is_a_lost_bench_and_fails_no_compile_for_ever(ray: FakeRay, tmp_path: Path) -> None:
    with taken(ray, tmp_path, CARD) as found:
        variant = found.builder(SOURCE, "sm_90a")
        ray.dead = "The node has died"
        (bench,) = found.benches.values()
        with pytest.raises(WorkerError, match="The node has died"):
            bench.verify(PROBLEM, variant)
        failed = found.builder(render(PROBLEM, PRESETS["v2"]), "sm_90a")
        assert (failed.status, failed.error, failed.lasting) == ("failed", "The node has died", False)
        with pytest.raises(CandidateError, match="it was not compiled: The node has died"):
            bench.verify(PROBLEM, failed)


def test_an_unusable_compiler_of_a_node_ends_the_search(ray: FakeRay, tmp_path: Path) -> None:
    def compile_on_node(source: object, arch: str) -> Built:
        raise UsageError("nvcc is not found")

    with (
        cluster(
            "auto", print, cache=tmp_path, open_bench=opener(CARD, CARD, CARD), compile_on_node=compile_on_node
        ) as found,
        pytest.raises(UsageError, match="nvcc is not found"),
    ):
        found.builder(SOURCE, "sm_90a")
