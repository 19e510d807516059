"""The GPUs and CPUs of a Ray cluster: a bench is an actor with a GPU, a compile is a task on any node with a free core.

Ray places and starts the processes, and reports when one is gone. Nodes need no common file system: compiled kernels
travel as bytes, through Ray's object store.
"""

from __future__ import annotations

import logging
import platform
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...db.records import Environment, VerificationRecord
from ...gen.build.jobs import Built, Variant, adopt, build_to_send, find_built
from ...gen.build.toolchain import find_compiler
from ...gen.device import Device
from ...gen.errors import BwdtuneError, UsageError
from ...gen.problem import Problem
from ...gen.render import Source
from ...runtime.gpu import current_device, environment, gpu_uuid, power_limit_w
from .gpu_client import Worker
from .gpu_lock import gpu_lock
from .protocol import Bench, CandidateError, WorkerError
from .timing import Policy, Timings

if TYPE_CHECKING:
    from types import ModuleType

CONNECTION_LIMIT_S = 10.0
FIRST_GPU_LIMIT_S = 600.0  # a cluster may still be starting, or at work for others
OTHER_GPUS_LIMIT_S = 30.0  # after the first
_POLL_S = 0.5

_log = logging.getLogger(__name__)


class ClusterError(BwdtuneError):
    """There is no cluster, or none that a search can use."""


@dataclass(frozen=True)
class Card:
    """A GPU of a cluster, as its node describes it.

    Attributes:
        host: The node's name.
        uuid: The GPU's.
        device: Its limits.
        environment: Where it measures; the same on all that measure for one search.
        version: Of this package there.
        power_limit_w: What it may draw at most, where that is known.
    """

    host: str
    uuid: str
    device: Device
    environment: Environment
    version: str = __version__
    power_limit_w: float | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.host} {self.uuid}"


OpenBench = Callable[[], AbstractContextManager[tuple[Bench, Card]]]
"""Opens the bench of the GPU that Ray has given to a process."""


@contextmanager
def open_gpu() -> Iterator[tuple[Bench, Card]]:
    """The GPU that this process sees first."""
    device, uuid = current_device(), gpu_uuid(0)
    with gpu_lock(uuid, _log.warning), Worker() as worker:
        where = environment(device, find_compiler(device.arch).version)
        yield worker, Card(platform.node(), uuid, device, where, power_limit_w=power_limit_w(0))


@dataclass(frozen=True)
class Cluster:
    """What a search needs of a cluster.

    Attributes:
        cards: All of one kind.
        benches: One a card, by its name.
        builder: Compiles on any node.
        compilers: How many compiles run at once.
    """

    cards: tuple[Card, ...]
    benches: Mapping[str, Bench]
    builder: Callable[[Source, str], Variant]
    compilers: int


@contextmanager
def cluster(
    address: str,
    notice: Callable[[str], None],
    *,
    cache: Path | None = None,
    open_bench: OpenBench = open_gpu,
    compile_on_node: Callable[[Source, str], Built] = build_to_send,
) -> Iterator[Cluster]:
    """Takes all GPUs that are free on a Ray cluster, until it is left.

    Args:
        address: As `ray.init` takes it: ``auto`` for the cluster of this machine, ``HOST:6379``.
        notice: Is told what it waits for, and what is left out.
        cache: Where this process keeps what was compiled; None for the usual place.
        open_bench: Run on a node, in a process that has a GPU.
        compile_on_node: Run on any node.

    Raises:
        UsageError: Ray is not installed.
        ClusterError: There is no cluster, it has no GPU, or none becomes free.
    """
    ray = _ray()
    with ExitStack() as stack:
        if not ray.is_initialized():
            _connect(ray, address)
            stack.callback(ray.shutdown)
        actor_type = ray.remote(num_cpus=1, num_gpus=1, max_restarts=0)(_GpuProcess)
        count = int(ray.cluster_resources().get("GPU", 0))
        if not count:
            raise ClusterError(f"the Ray cluster at {address} has no GPU")
        actors = [actor_type.remote(open_bench) for _ in range(count)]
        for actor in actors:
            stack.callback(ray.kill, actor)
        joined = _join(ray, actors, notice)
        send = _Sender(ray)
        yield Cluster(
            tuple(card for _, card in joined),
            {card.name: ClusterBench(ray, actor, send) for actor, card in joined},
            _Compiler(ray, joined[0][1].environment.toolkit, cache, compile_on_node),
            max(1, int(ray.cluster_resources().get("CPU", 0))),
        )


def _ray() -> ModuleType:
    try:
        import ray
    except ImportError:
        raise UsageError("--ray needs Ray: pip install 'bwdtune[ray]'") from None
    return ray


def _connect(ray: Any, address: str) -> None:
    _refuse_unreachable(address)  # Ray itself tries for minutes
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _no_cluster(address, _one_line(error)) from None


def _refuse_unreachable(address: str) -> None:
    named = re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)
    if not named:
        return
    try:
        socket.create_connection((named[1], int(named[2])), timeout=CONNECTION_LIMIT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from None


def _no_cluster(address: str, reason: str) -> ClusterError:
    return ClusterError(f"no Ray cluster answers at {address} ({reason}): start one with `ray start --head`")


def _join(ray: Any, actors: Sequence[Any], notice: Callable[[str], None]) -> list[tuple[Any, Card]]:
    """The actors that have a GPU, of one kind and one version: all that have it soon after the first."""
    asked = {actor.about.remote(): actor for actor in actors}
    joined: list[tuple[Any, Card]] = []
    told, deadline = False, time.monotonic() + FIRST_GPU_LIMIT_S
    while asked and time.monotonic() < deadline:
        ready, _ = ray.wait(list(asked), timeout=_POLL_S)
        for answer in ready:
            actor = asked.pop(answer)
            try:
                card = _get(ray, answer)
            except BwdtuneError as error:
                notice(f"a GPU of the cluster is left out: {error}")
                continue
            if reason := _unlike(card, joined[0][1] if joined else card):
                notice(f"{card.name} is left out: {reason}")
                continue
            if not joined:
                deadline = time.monotonic() + OTHER_GPUS_LIMIT_S
            joined.append((actor, card))
        if not (ready or joined or told):
            told = True
            notice("waiting for a GPU of the Ray cluster")
    if not joined:
        raise ClusterError("no GPU of the Ray cluster can be used: see above, or `ray status`")
    if asked:
        notice(f"{len(asked)} GPUs of the Ray cluster are in use by others, and left out")
    return joined


def _unlike(card: Card, first: Card) -> str:
    """Why times of two cards cannot be compared; empty where they can."""
    if card.version != __version__:
        return f"it has bwdtune {card.version}, and this is {__version__}"
    if card.environment != first.environment:
        ours, its = vars(first.environment), vars(card.environment)
        differ = ", ".join(f"{name} {its[name]} for {ours[name]}" for name in ours if its[name] != ours[name])
        return f"it is not like {first.name}: {differ}"
    return ""


class _GpuProcess:
    """The actor: owns a GPU, and answers one request at a time."""

    def __init__(self, open_bench: OpenBench) -> None:
        self._stack = ExitStack()
        self._bench, self._card = self._stack.enter_context(open_bench())
        self._libraries = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bwdtune-")))

    def about(self) -> tuple[Card | None, BwdtuneError | None]:
        return self._card, None

    def ask(
        self, method: str, problem: Problem, variants: Sequence[Variant], rest: Sequence[Any], *libraries: bytes
    ) -> tuple[Any, BwdtuneError | None]:
        """What a method of the bench returns, and the error that it raises: Ray would wrap that."""
        here = [self._placed(variant, library) for variant, library in zip(variants, libraries, strict=True)]
        given = here[0] if method != "time" else here
        try:
            return getattr(self._bench, method)(problem, given, *rest), None
        except (CandidateError, WorkerError) as error:
            return None, error

    def _placed(self, variant: Variant, library: bytes) -> Variant:
        path = self._libraries / f"{variant.key}.so"
        if not path.exists():
            path.write_bytes(library)
        return replace(variant, library=path)


class ClusterBench:
    """The bench of an actor. See `gpu_client.Worker`, which does the work on the node.

    Args:
        ray: The module.
        actor: A `_GpuProcess`.
        send: Puts libraries into the object store.
    """

    def __init__(self, ray: Any, actor: Any, send: _Sender) -> None:
        self._ray, self._actor, self._send = ray, actor, send

    def verify(self, problem: Problem, variant: Variant) -> VerificationRecord:
        found: VerificationRecord = self._ask("verify", problem, [variant])
        return found

    def verify_at(self, problem: Problem, variant: Variant) -> VerificationRecord:
        found: VerificationRecord = self._ask("verify_at", problem, [variant])
        return found

    def time(self, problem: Problem, variants: Sequence[Variant], peers: Sequence[str], policy: Policy) -> Timings:
        found: Timings = self._ask("time", problem, variants, tuple(peers), policy)
        return found

    def _ask(self, method: str, problem: Problem, variants: Sequence[Variant], *rest: Any) -> Any:
        libraries = [self._send(variant) for variant in variants]
        return _get(self._ray, self._actor.ask.remote(method, problem, list(variants), rest, *libraries))


class _Sender:
    """Puts each library into Ray's object store once; nodes that ask for it again have it."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._sent: dict[str, Any] = {}

    def __call__(self, variant: Variant) -> Any:
        if variant.library is None:
            raise CandidateError(f"it was not compiled: {variant.error}", variant.source.config.id)
        if variant.key not in self._sent:
            self._sent[variant.key] = self._ray.put(variant.library.read_bytes())
        return self._sent[variant.key]


class _Compiler:
    """Compiles in tasks, and keeps what they send in the cache of this process: the winner is used from there."""

    def __init__(
        self, ray: Any, toolkit: str, cache: Path | None, compile_on_node: Callable[[Source, str], Built]
    ) -> None:
        self._ray, self._toolkit, self._cache = ray, toolkit, cache
        # A task whose node dies is given to another one, by Ray.
        task = ray.remote(num_cpus=1, max_retries=3, scheduling_strategy="SPREAD")(_answered)
        self._start = lambda source, arch: task.remote(compile_on_node, source, arch)

    def __call__(self, source: Source, arch: str) -> Variant:
        for variant in find_built(source, arch, cache=self._cache):
            if variant.toolchain == self._toolkit:
                return variant
        try:
            built = _get(self._ray, self._start(source, arch))
        except WorkerError as lost:  # of every node that tried: no reason to end the search, nor to believe it for ever
            built = Built(_uncompiled(source, arch, self._toolkit, str(lost)), {})
        return adopt(built, cache=self._cache)


def _uncompiled(source: Source, arch: str, toolkit: str, error: str) -> Variant:
    return Variant(
        source=source,
        arch=arch,
        library=None,
        key="",
        toolchain=toolkit,
        resources=None,
        status="failed",
        error=error,
        log=None,
        seconds=0.0,
        cached=False,
        lasting=False,
    )


def _answered(do: Callable[..., Any], *arguments: Any) -> tuple[Any, BwdtuneError | None]:
    try:
        return do(*arguments), None
    except BwdtuneError as error:
        return None, error


def _get(ray: Any, answer: Any) -> Any:
    """What was answered.

    Raises:
        BwdtuneError: What the node raised.
        WorkerError: The process, its node or the cluster is gone.
    """
    try:
        value, error = ray.get(answer)
    except ray.exceptions.RayError as lost:
        raise WorkerError(_one_line(lost)) from None
    if error is not None:
        raise error
    return value


def _one_line(error: BaseException) -> str:
    """The first line of what Ray says, and the last, which names the cause where there is a traceback."""
    text = re.sub("\x1b\\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
