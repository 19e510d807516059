"""The search space: the valid configurations for a problem on a device, and the reason for each invalid one."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from .device import Device
from .errors import UsageError
from .families import FAMILIES, Config, Contradiction
from .problem import VALUE_HEAD_DIM, Problem

_LARGEST_HEAD_DIM = 256
_HEAD_DIM_STEP = 8  # 16 bytes: TMA's strides are multiples of that
_SPACE_HASH_DIGITS = 12
_FEATURE_NAMES = {VALUE_HEAD_DIM: "head_dim of v's own"}  # those that are not called as the option is


def refusal(problem: Problem, config: Config, device: Device) -> str | None:
    """Why `config` cannot serve `problem` on `device`, in words; None where it can, as far as arithmetic tells."""
    return (
        head_dim_refusal(problem)
        or _threads_refusal(config, device)
        or config.contradiction
        or _feature_refusal(problem, type(config))
        or _own_refusal(problem, config, device)
    )


def _threads_refusal(config: Config, device: Device) -> str | None:
    if config.threads > device.max_threads_per_block:
        return f"{config.threads} threads: a block has at most {device.max_threads_per_block}"
    return None


def _own_refusal(problem: Problem, config: Config, device: Device) -> str | None:
    """What its family says to a configuration that does not contradict itself, and what it takes too much of."""
    if reason := config.refusal(problem, device):
        return reason
    needs = config.estimate(problem)
    if needs.shared_memory_bytes > device.shared_memory_per_block_bytes:
        return (
            f"{needs.shared_memory_bytes:,} bytes of shared memory: a block of {device.name} has at most "
            f"{device.shared_memory_per_block_bytes:,}"
        )
    if config.divides_registers:
        return None  # one block, and the family itself says what each of its warpgroups has
    blocks, registers = config.min_blocks_per_sm, config.register_limit(device)
    if needs.registers > registers:
        return (
            f"about {needs.registers} registers a thread: {blocks} block{'s' if blocks > 1 else ''} of "
            f"{config.threads} threads leave {registers}"
        )
    fitting = device.blocks_per_sm(**vars(needs))
    if fitting < blocks:
        return f"{blocks} blocks an SM are asked for, {fitting} fit by threads and shared memory"
    return None


def _feature_refusal(problem: Problem, family: type[Config]) -> str | None:
    """What a problem asks for that the family's template does not have."""
    required = problem.required_features
    lacking = [name for name in required if name not in family.features]
    if not lacking:
        return None
    others = [name for name, other in FAMILIES.items() if set(required) <= other.features]
    named = " and no ".join(_FEATURE_NAMES.get(name, name.replace("_", "-")) for name in lacking)
    who = f"the {' and '.join(others)} kernels do" if others else "no kernels do"
    return f"the {family.family} kernels have no {named}: {who}"


def head_dim_refusal(problem: Problem) -> str | None:
    """Why no configuration takes these head_dims, in words; None where some may."""
    for name in ("head_dim", "head_dim_v"):
        size = getattr(problem, name)
        if size % _HEAD_DIM_STEP or size > _LARGEST_HEAD_DIM:
            return f"{name} {size}: the kernels take multiples of {_HEAD_DIM_STEP} up to {_LARGEST_HEAD_DIM}"
    return None


def _alike(family: type[Config]) -> Iterator[tuple[int, Iterator[Config]]]:
    """Every point of a family that does not contradict itself, in a fixed order, in sets that are valid together.

    Yields:
        The number of those that differ in ungated parameters alone, one or more, and they themselves, which are made
        as they are taken.
    """
    gated = [name for name, one in family.parameters.items() if one.affects_validity]
    ungated = [name for name, one in family.parameters.items() if not one.affects_validity]
    names = [*gated, *ungated]
    in_order = itemgetter(*map(names.index, family.choices))
    of_gated = [one for one in family.contradictions if set(ungated).isdisjoint(one.parameters)]
    of_both = [one for one in family.contradictions if one not in of_gated]
    places = [place for place, name in enumerate(gated) if any(name in one.parameters for one in of_both)]
    others: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}  # values of those ungated, by those at `places`

    def config(point: tuple[Any, ...], other: tuple[Any, ...]) -> Config:
        return family.of_choices(dict(zip(family.choices, in_order(point + other), strict=True)))

    for point in _without_contradictions(family, gated, of_gated):
        key = tuple(point[place] for place in places)
        if key not in others:
            values = dict(zip(gated, point, strict=True))
            others[key] = [
                other
                for other in itertools.product(*(family.choices[name] for name in ungated))
                if not any(one.among(values | dict(zip(ungated, other, strict=True))) for one in of_both)
            ]
        yield len(others[key]), map(functools.partial(config, point), others[key])


def _without_contradictions(
    family: type[Config], names: list[str], contradictions: list[Contradiction]
) -> list[tuple[Any, ...]]:
    """All values of some parameters, in order: one parameter after another, so that few are made that contradict."""
    points: list[tuple[Any, ...]] = [()]
    for number, name in enumerate(names, 1):
        points = [(*point, value) for point in points for value in family.choices[name]]
        for one in contradictions:
            if name in one.parameters and set(one.parameters) <= set(names[:number]):
                values = itemgetter(*map(names.index, one.parameters))
                points = [point for point in points if not one.holds(*values(point))]
    return points


def all_configs() -> Iterator[Config]:
    """Every point of every family that does not contradict itself, valid or not, in a fixed order."""
    for family in FAMILIES.values():
        for _, configs in _alike(family):
            yield from configs


def representatives() -> Iterator[Config]:
    """One point of each set of every family that is valid, or refused, as a whole; in a fixed order.

    They answer whether a problem has a valid configuration at a fraction of `all_configs`' cost. A set's points differ
    in their family's `ungated` parameters alone.
    """
    for family in FAMILIES.values():
        for _, configs in _alike(family):
            yield next(configs)


@functools.lru_cache(maxsize=8)
def _judged(problem: Problem, device: Device) -> tuple[tuple[Config, ...], Counter[str]]:
    """Every point, in one pass: the valid ones, and how many others are refused for which reason.

    There are hundreds of thousands, and a search waits for this: one of those alike is judged, and of what is refused
    no other configuration is made.
    """
    valid: list[Config] = []
    refused: Counter[str] = Counter()
    of_head_dim = head_dim_refusal(problem)
    for family in FAMILIES.values():
        of_features = _feature_refusal(problem, family)
        for number, configs in _alike(family):
            first = next(configs)
            reason = of_head_dim or _threads_refusal(first, device) or of_features
            reason = reason or _own_refusal(problem, first, device)
            if reason is None:
                valid.append(first)
                valid.extend(configs)
            else:
                refused[reason] += number
    return tuple(valid), refused


def valid_configs(problem: Problem, device: Device) -> tuple[Config, ...]:
    """The points that arithmetic admits, in a fixed order.

    Raises:
        UsageError: There is none, with the reason.
    """
    if reason := head_dim_refusal(problem):
        raise UsageError(reason)
    found, refused = _judged(problem, device)
    if not found:
        ((reason, _),) = refused.most_common(1)
        raise UsageError(f"no configuration fits {problem.label} on {device.name}; most often {reason}")
    return found


def refusals(problem: Problem, device: Device) -> Counter[str]:
    """The reasons for which arithmetic refuses points, with their numbers."""
    return _judged(problem, device)[1]


def space_hash() -> str:
    """Changes where the parameters or their choices do: a study of another space cannot go on."""
    parameters = {
        family: {one.stored: one.choices for one in config_type.parameters.values()}
        for family, config_type in FAMILIES.items()
    }
    text = json.dumps(parameters, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_SPACE_HASH_DIGITS]
