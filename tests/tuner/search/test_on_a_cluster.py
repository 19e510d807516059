"""A search on a Ray cluster of three nodes: one of them is killed under it."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cluster
import pytest
from fake_cluster import compile_here, open_card
from fake_gpus import ran_on
from landscape import PEER_MS
from search_fakes import ENVIRONMENT, Told, run_search

from bwdtune.tuner.lab.cluster import ClusterError, cluster

NODES = 3
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Any, list[Any]]]:
    """A cluster of three nodes on this machine, with a GPU each, as Ray believes."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install .[ray]")
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("RAY_USAGE_STATS_ENABLED", "0")
        environ.setenv("RAY_AUTH_MODE", "disabled")  # else Ray leaves a token in the home
        environ.setenv("PYTHONPATH", str(Path(fake_cluster.__file__).parent))  # of the nodes' processes
        from ray.cluster_utils import Cluster

        room = {"num_cpus": 2, "num_gpus": 1, "object_store_memory": 80 * 2**20}
        quick = {"health_check_period_ms": 500}  # else a node is missed after a quarter of a minute
        head = {**room, "include_dashboard": False, "_system_config": quick}
        found = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield found, [found.head_node, *(found.add_node(**room) for _ in range(NODES - 1))]
        finally:
            found.shutdown()


@pytest.mark.slow
@pytest.mark.ray
def test_a_node_that_is_killed_costs_the_candidate_in_flight(nodes: tuple[Any, list[Any]], tmp_path: Path) -> None:
    running, (_, _, victim) = nodes
    cards, cache = tmp_path / "cards", tmp_path / "cache"
    cards.mkdir()
    card = cards / victim.node_id
    told = Told()

    class Killing(Told):
        """Kills the node when its card is at work, and not before some candidates are decided."""

        def update(self, status) -> None:
            if status.counts.decided == 3 and victim in running.list_all_nodes():
                deadline = time.monotonic() + LIMIT_S
                while not card.with_suffix(".held").exists():
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                running.remove_node(victim, allow_graceful=False)

        def notice(self, text: str) -> None:
            told.notice(text)

    (card.with_suffix(".holds")).touch()
    with cluster(
        running.address,
        told.notice,
        cache=cache,
        open_bench=functools.partial(open_card, str(cards)),
        compile_on_node=functools.partial(compile_here, str(cards)),
    ) as found:
        assert len(found.benches) == NODES
        assert {one.environment for one in found.cards} == {ENVIRONMENT}
        result = run_search(
            tmp_path / "results.sqlite",
            benches=found.benches,
            builder=found.builder,
            compilers=found.compilers,
            progress=Killing(),
            trials=14,
        )
    assert (result.status, result.counts.failed, result.counts.measured) == ("complete", 0, 14)
    (lost,) = (notice for notice in told.notices if "is lost" in notice)
    assert victim.node_id[:8] in lost
    ran = {
        one.uuid: [names[0] for names in ran_on(str(cards / one.uuid)) if not set(PEER_MS) <= set(names)]
        for one in found.cards
    }
    (in_flight,) = ran.pop(victim.node_id)
    assert in_flight in [name for names in ran.values() for name in names]
    assert all(ran.values())
    compiled_on = {path.read_text() for path in cards.glob("*.compiled")}
    assert len(compiled_on) > 1, "compiles are spread"
    assert list(cache.glob("kernels/*/kernel.so")), "the winner can be used from here"


@pytest.mark.slow
@pytest.mark.ray
def test_where_no_cluster_is() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install .[ray]")
    with pytest.raises(ClusterError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"), cluster("127.0.0.1:1", print):
        pass
