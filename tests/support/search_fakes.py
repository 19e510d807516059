"""Stand-ins for the compiler and for the process that owns the GPU, so that a search runs anywhere in seconds.

Run as a script it searches slowly, for tests that interrupt it: ``search_fakes.py DATABASE TRIALS DELAY_S [PACE]``.
PACE is how many times as long as elsewhere a kernel takes on its card.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

from landscape import PEER_MS, cost_ms

from bwdtune.db.records import Environment, GpuKey, VerificationRecord
from bwdtune.db.store import Store
from bwdtune.gen.build.jobs import CompiledResources, Variant
from bwdtune.gen.device import H200, Device
from bwdtune.gen.errors import UsageError
from bwdtune.gen.families import PRESETS, Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source
from bwdtune.gen.space import head_dim_refusal, refusal, representatives
from bwdtune.runtime.gpu import GpuState
from bwdtune.tuner.lab.protocol import CandidateError
from bwdtune.tuner.lab.timing import Cycles, Policy, Timing, Timings
from bwdtune.tuner.search import candidates
from bwdtune.tuner.search.options import SearchOptions
from bwdtune.tuner.search.progress import Progress, Status
from bwdtune.tuner.search.provenance import Machine
from bwdtune.tuner.search.result import SearchResult
from bwdtune.tuner.search.search import search

PROBLEM = Problem.parse("8_16_4096_128", causal=True)
TOOLKIT = "13.0.88"
ENVIRONMENT = Environment(GpuKey(H200.name, "9.0"), "sm_90a", "580.65.06", TOOLKIT, "2.11.0")

TINY_PROBLEM = Problem.parse("1_1_64_64")
TINY = replace(
    H200,
    name="a card on which few configurations fit",
    shared_memory_per_block_bytes=16_400,
    shared_memory_per_sm_bytes=17_424,
    registers_per_sm=6000,
)


_STEPS = {"mma": 5, "mmat": 40, "wgmma": 1}


@functools.cache
def _points() -> tuple[Config, ...]:
    """Some points of each family, all presets among them."""
    met: Counter[str] = Counter()
    points = dict.fromkeys(PRESETS.values())
    for config in representatives():
        if met[config.family] % _STEPS[config.family] == 0:
            points[config] = None
        met[config.family] += 1
    return tuple(points)


@functools.lru_cache(maxsize=32)
def space(problem: Problem, device: Device) -> tuple[Config, ...]:
    """The valid ones of some hundred configurations: a search over a hundred thousand takes seconds to begin."""
    if reason := head_dim_refusal(problem):
        raise UsageError(reason)
    points = representatives() if device == TINY else _points()
    return tuple(config for config in points if refusal(problem, config, device) is None)


@functools.lru_cache(maxsize=32)
def _refusals(problem: Problem, device: Device) -> Counter[str]:
    return Counter(filter(None, (refusal(problem, config, device) for config in _points())))


@functools.cache
def _kept(render: Callable[..., Source]) -> Callable[..., Source]:
    """What renders a source once for all searches of a process: most of them begin with the same ones."""
    return functools.lru_cache(maxsize=256)(render)


def parameter(config: Config, name: str) -> int | None:
    """Its value of a parameter that its family may not have."""
    value: int | None = config.to_dict().get(name)
    return value


@dataclass
class FakeBuilder:
    """Compiles nothing.

    Attributes:
        broken: Configurations that do not compile.
        spills: Bytes that a configuration spills for a target.
        lasting: Whether what does not compile never will.
        registers: A thread's registers for a target, with dummy mma in it or not.
        static_bytes: A block's static shared memory.
        machine_code: What the hash of a source's machine code is.
        compiled: What it was asked for: configuration and target.
        sources: The sources of it, and the target.
    """

    broken: Callable[[Config], bool] = lambda config: False
    spills: Callable[[Config, str], int] = lambda config, arch: 0
    lasting: bool = True
    registers: Callable[[Source, str], int] = lambda source, arch: 168
    machine_code: Callable[[Source], str | None] = lambda source: f"code of {source.hash}"
    static_bytes: Callable[[Source], int] = lambda source: 0
    compiled: list[tuple[Config, str]] = field(default_factory=list)
    sources: list[tuple[Source, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, source: Source, arch: str) -> Variant:
        with self._lock:
            self.compiled.append((source.config, arch))
            self.sources.append((source, arch))
        ok = not self.broken(source.config)
        variant = Variant(
            source=source,
            arch=arch,
            library=Path("/nowhere") / f"{source.name}.so" if ok else None,
            key=source.name,
            toolchain=TOOLKIT,
            resources=CompiledResources(
                self.registers(source, arch), self.spills(source.config, arch), 0, self.static_bytes(source), 1
            )
            if ok
            else None,
            status="ok" if ok else "failed",
            error="" if ok else "error: expected a ';'",
            log=None,
            seconds=1.0,
            cached=False,
            lasting=ok or self.lasting,
        )
        variant.__dict__["machine_code"] = self.machine_code(source) if ok else None
        return variant


@dataclass
class FakeBench:
    """Verifies and times from a landscape; where nothing is timed, it stands in for the CPU.

    Attributes:
        cost: A configuration's time in ms.
        cycles: What a build that counts its cycles counts.
        wrong: Configurations whose gradients are wrong.
        wrong_at_size: Those that are wrong at the problem's own sizes only.
        crashing: Those that crash when they are timed.
        delay_s: How long a timing takes.
        verified: What was verified at small sizes.
        timed: What was timed together, by name.
    """

    cost: Callable[[Config], float] = cost_ms
    cycles: Callable[[Config], float] = lambda config: 1e6 * cost_ms(config)
    wrong: Callable[[Config], bool] = lambda config: False
    wrong_at_size: Callable[[Config], bool] = lambda config: False
    crashing: Callable[[Config], bool] = lambda config: False
    delay_s: float = 0.0
    verified: list[Config] = field(default_factory=list)
    timed: list[list[str]] = field(default_factory=list)

    def verify(self, problem: Problem, variant: Variant) -> VerificationRecord:
        self.verified.append(variant.source.config)
        return self._verdict(self.wrong(variant.source.config))

    def verify_at(self, problem: Problem, variant: Variant) -> VerificationRecord:
        return self._verdict(self.wrong(variant.source.config) or self.wrong_at_size(variant.source.config))

    def time(self, problem: Problem, variants: Sequence[Variant], peers: Sequence[str], policy: Policy) -> Timings:
        time.sleep(self.delay_s)
        configs = [variant.source.config for variant in variants]
        self.timed.append([*(config.id for config in configs), *peers])
        for config in configs:
            if self.crashing(config):
                raise CandidateError("its process died of SIGSEGV", config.id)
        times_ms = {config.id: self.cost(config) for config in configs} | {peer: PEER_MS[peer] for peer in peers}
        timings = {name: Timing(ms, ms * 0.99, ms * 1.01, 20) for name, ms in times_ms.items()}
        counts = {
            variant.source.config.id: self.cycles(variant.source.config)
            for variant in variants
            if variant.source.probed
        }
        cycles = {name: Cycles(count, count * 0.99, count * 1.01, 10) for name, count in counts.items()}
        return Timings(
            timings,
            state=GpuState(clock_mhz=1700.0),
            cycles=cycles,
            default_kernel="cudnn" if "default" in peers else None,
        )

    @property
    def tried(self) -> list[str]:
        """What was timed as a candidate, in this order: the first of each timing that is no race with all peers."""
        return [names[0] for names in self.timed if not set(PEER_MS) <= set(names)]

    @staticmethod
    def _verdict(wrong: bool) -> VerificationRecord:
        errors = {"normal": {"dq": 0.5 if wrong else 0.002, "torch_dq": 0.002}}
        return VerificationRecord(not wrong, 0.5 if wrong else 0.002, errors, "dq is off" if wrong else "")


@dataclass
class Told:
    """A progress that remembers what it was told."""

    statuses: list[Status] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, status: Status) -> None:
        self.statuses.append(status)

    def notice(self, text: str) -> None:
        self.notices.append(text)


@functools.cache
def _empty_database() -> bytes:
    """As a search that stores nothing leaves it: to make all tables takes longer than many a search here."""
    with tempfile.TemporaryDirectory() as folder, closing(Store.open(Path(folder) / "empty.sqlite")) as store:
        store.optuna_storage().engine.dispose()
        store.close()
        return (Path(folder) / "empty.sqlite").read_bytes()


def run_search(
    database: Path | str,
    *,
    problem: Problem = PROBLEM,
    device=H200,
    builder: FakeBuilder | None = None,
    bench: FakeBench | None = None,
    benches: dict[str, FakeBench] | None = None,
    environment: Environment | None = ENVIRONMENT,
    progress: Progress | None = None,
    measured: bool = True,
    compilers: int | None = None,
    **options,
) -> SearchResult:
    """A search with stand-ins; ``options`` are those of `SearchOptions`.

    What is not measured is verified on the CPU where a bench is given, else nowhere.
    """
    environment = replace(environment, gpu=GpuKey(device.name, "9.0")) if environment else None
    bench = bench or (FakeBench() if measured else None)
    if isinstance(database, Path) and not database.exists():
        database.write_bytes(_empty_database())
    with (
        closing(Store.open(database)) as store,
        mock.patch("bwdtune.tuner.search.candidates.valid_configs", space),
        mock.patch("bwdtune.tuner.search.candidates.refusals", _refusals),
        mock.patch("bwdtune.tuner.search.candidates.render", _kept(candidates.render)),
    ):
        return search(
            problem,
            device,
            store,
            # The stand-ins' times have nothing to do with the cost model, which the learned sampler begins with.
            SearchOptions(**{"seed": 0, "trials": 12, "sampler": "tpe", **options}),
            builder=builder or FakeBuilder(),
            progress=progress or Told(),
            benches=benches or ({"GPU 0": bench} if bench else {}),
            environment=environment if measured else None,
            machine=Machine(TOOLKIT, compilers=compilers),
        )


class _Announcing(Told):
    """Says on standard output when a candidate is decided, so that the test knows when to interrupt."""

    def update(self, status: Status) -> None:
        print(f"decided {status.counts.decided}", flush=True)

    def notice(self, text: str) -> None:
        print(f"notice {text}", flush=True)


if __name__ == "__main__":
    database, count, delay_s, *rest = sys.argv[1:]
    pace = float(rest[0]) if rest else 1.0
    bench = FakeBench(cost=lambda config: pace * cost_ms(config), delay_s=float(delay_s))
    result = run_search(database, trials=int(count), bench=bench, progress=_Announcing())
    print(result.status, result.winner.config.id if result.winner and result.winner.config else None, flush=True)
    sys.exit(130 if result.interrupted else 0)
