"""A search in Python, in one call: what ``tuner search`` does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..db.records import Environment
from ..db.store import Store
from ..gen.build.jobs import build
from ..gen.build.toolchain import find_compiler
from ..gen.device import H200, HOST_ARCH, RTX_5090, Device, device_for_arch
from ..gen.emulation import EMULATED_CARDS
from ..gen.errors import UsageError
from ..gen.paths import writable_cache_dir
from ..gen.problem import Problem
from ..gen.space import valid_configs
from ..runtime.gpu import NoGpuError, current_device, environment, gpu_uuid, power_limit_w
from .lab.cluster import cluster
from .lab.laboratory import ALL_GPUS, laboratory, selected_gpus, workers_of
from .lab.protocol import Bench
from .lab.timing import TimingStyle
from .search.options import DEFAULT_TRIALS, SearchOptions
from .search.progress import Progress, Silent
from .search.provenance import Machine
from .search.result import SearchResult
from .search.search import search

_log = logging.getLogger(__name__)


def tune(
    problem: Problem | str,
    *,
    trials: int = DEFAULT_TRIALS,
    time_s: float | None = None,
    sampler: str = SearchOptions.sampler,
    seed: int | None = None,
    limits: str | None = None,
    emulate: str | None = None,
    timing: str = "",
    without_head_start: bool = False,
    min_gain: float = SearchOptions.min_gain,
    gpus: str | None = None,
    ray: str | None = None,
    arch: str | None = None,
    database: str | Path | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    **described: Any,
) -> SearchResult:
    """Searches for the fastest correct kernel for a problem, and stores it as the winner.

    Without a GPU nothing is timed: candidates are compiled, checked on the CPU, and ordered by predicted time.

        bwdtune.tune("8_16_4096_128", causal=True, trials=30)

    Args:
        problem: The problem, or its shape: ``B_H_S_D``, or ``B_HQ_HKV_S_D`` for grouped queries.
        trials: How many candidates to decide.
        time_s: Begin no candidate after so many seconds.
        sampler: One of `search.options.SAMPLERS`.
        seed: Makes the sampler's choices repeatable.
        limits: Keep to another card's limits, such as ``sm_120``.
        emulate: Slow the GPU to another card's pace, and rank by cycles.
        timing: How kernels are timed: words of `lab.timing.TIMING_STYLES` between commas.
        without_head_start: Withhold presets, shipped configurations and what won in the database.
        min_gain: End when the trials that are left are expected to gain less (0.001: 0.1 %); 0 tries them all.
        gpus: Measure on several GPUs at once: ``all`` of this machine, or their numbers, such as ``0,1,3``; None for
            the first alone.
        ray: Measure on all free GPUs of a Ray cluster, and compile on all its nodes: its address, as `ray.init` takes
            it, such as ``auto`` or ``HOST:6379``.
        arch: The compile target; None for the GPU's.
        database: Where results go: a path or an SQLAlchemy URL; None for the usual place.
        cache: Where compiled kernels are kept; None for the usual place.
        progress: Is told how it goes.
        **described: Of a shape, the rest of `Problem.parse`: ``dtype``, ``causal``, ``window_left``, …

    Returns:
        What was found: the winner, the race that it won, and what was refused or failed.

    Raises:
        UsageError: The problem or an option is impossible.
        BwdtuneError: The compiler, the cache, the database or the GPU cannot be used at all.
    """
    options = SearchOptions(
        sampler=sampler,
        seed=seed,
        trials=trials,
        time_s=time_s,
        limits=limits,
        emulate=emulate,
        timing=TimingStyle.parse(timing),
        without_head_start=without_head_start,
        min_gain=min_gain,
    )
    if isinstance(problem, str):
        problem = Problem.parse(problem, **described)
    elif described:
        raise UsageError(f"{', '.join(described)}: only a shape is described so, not a Problem")
    return run_search(
        problem,
        options,
        gpus=gpus,
        ray=ray,
        arch=arch,
        database=database,
        cache=cache,
        progress=progress or Silent(),
    )


def run_search(
    problem: Problem,
    options: SearchOptions,
    *,
    gpus: str | None = None,
    ray: str | None = None,
    arch: str | None,
    database: str | Path | None,
    cache: Path | None,
    progress: Progress,
    notice: Callable[[str], None] = _log.info,
) -> SearchResult:
    """A search with all that it needs found here: card, compiler, cache, database.

    Args:
        problem: What is to be computed.
        options: See `SearchOptions`.
        gpus: See `tune`.
        ray: See `tune`.
        arch: The compile target; None for the GPU's.
        database: A path or a URL; None for the usual place.
        cache: Where builds are kept; None for the usual place.
        progress: Is told how it goes.
        notice: Is told what a person should know before it begins.

    Raises:
        UsageError: The problem, the target or an option is impossible.
        BwdtuneError: The compiler, the cache, the database or the GPU cannot be used at all.
    """
    if ray is not None:
        if gpus not in (None, ALL_GPUS):
            raise UsageError("--gpus numbers GPUs of this machine, --ray takes all that are free: leave one out")
        return _search_on_cluster(problem, options, ray, arch, database, cache, progress, notice)
    gpu, why_not = None, ""
    indices = selected_gpus(gpus, notice) if gpus else []
    try:
        gpu = current_device(indices[0] if indices else None)
    except NoGpuError as error:
        why_not = str(error)
    device = searched_card(H200.arch if arch is None and options.emulate and gpu is None else arch, gpu)
    if device.arch == HOST_ARCH:
        raise UsageError(f"a search is for a GPU: use --arch {RTX_5090.arch}, and `tuner verify --arch {HOST_ARCH}`")
    if indices and device is not gpu:
        raise UsageError(f"--gpus measures on GPUs of this machine, which are not {device.arch}: leave one of them out")
    options = _fitting(problem, options, device)
    toolkit = find_compiler(device.arch).version
    if options.within:
        find_compiler(EMULATED_CARDS[options.within].arch)
    writable_cache_dir(cache)
    if device is not gpu and arch is None:
        notice(f"compiling for {device.name}, since {why_not}")
    with closing(Store.open(database)) as store, ExitStack() as stack:
        benches: Mapping[str, Bench]
        where: Environment | None
        if indices:
            benches, where = stack.enter_context(workers_of(indices, notice)), environment(device, toolkit)
        else:
            worker, where = stack.enter_context(laboratory(device if device is gpu else None, toolkit, notice))
            benches = {"the GPU" if where else "the CPU": worker}
        return search(
            problem,
            device,
            store,
            options,
            builder=lambda source, target: build([source], target, cache=cache, jobs=1)[0],
            progress=progress,
            benches=benches,
            environment=where,
            machine=Machine(toolkit, *_cards(indices or [0])) if where else Machine(toolkit),
        )


def _search_on_cluster(
    problem: Problem,
    options: SearchOptions,
    address: str,
    arch: str | None,
    database: str | Path | None,
    cache: Path | None,
    progress: Progress,
    notice: Callable[[str], None],
) -> SearchResult:
    """A search that proposes and learns here, and has all else done by nodes: here no GPU and no compiler is needed.

    Args:
        address: Of the Ray cluster.
        problem: As all others, see `run_search`.
    """
    writable_cache_dir(cache)
    with closing(Store.open(database)) as store, cluster(address, notice, cache=cache) as found:
        first = found.cards[0]
        if arch not in (None, first.device.arch):
            raise UsageError(f"--ray measures on the cluster's GPUs, which are not {arch}: leave one of them out")
        limits_w = [card.power_limit_w for card in found.cards if card.power_limit_w is not None]
        return search(
            problem,
            first.device,
            store,
            _fitting(problem, options, first.device),
            builder=found.builder,
            progress=progress,
            benches=found.benches,
            environment=first.environment,
            machine=Machine(
                first.environment.toolkit,
                ",".join(card.uuid for card in found.cards),
                min(limits_w, default=None),
                compilers=found.compilers,
            ),
        )


def _fitting(problem: Problem, options: SearchOptions, device: Device) -> SearchOptions:
    """The options as they are on a card: its own limits are no limits to keep to, and it need not emulate itself.

    Raises:
        UsageError: No configuration is valid.
    """
    if options.limits and EMULATED_CARDS[options.limits].arch == device.arch:
        options = replace(options, limits=None)
    if options.emulate and EMULATED_CARDS[options.emulate].name == device.name:
        options = replace(options, emulate=None)
    valid_configs(problem, EMULATED_CARDS[options.within] if options.within else device)
    return options


def _cards(indices: Sequence[int]) -> tuple[str, float | None]:
    """The cards that measure, and the least that one of them may draw."""
    limits = [limit for index in indices if (limit := power_limit_w(index)) is not None]
    return ",".join(map(gpu_uuid, indices)), min(limits, default=None)


def searched_card(arch: str | None, gpu: Device | None) -> Device:
    """The card that a search is for: the GPU where it is meant, else the card that stands for the arch."""
    if gpu and arch in (None, gpu.arch):
        return gpu
    device = device_for_arch(RTX_5090.arch if arch is None else arch)
    return gpu if gpu and gpu.arch == device.arch else device
