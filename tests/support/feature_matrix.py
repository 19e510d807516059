"""Thousands of problems that a kernel must compute, ordered by the kernel that computes them, so that compiles are few.

A product of families, head_dims, masks and features gives the kernels; lengths that do not fill tiles, grouped heads,
limits of windows, layouts and contents give each of them its cases.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from covering import all_representatives
from once import once

from bwdtune.gen.device import HOST, Device
from bwdtune.gen.families import FAMILIES, Config, MmaConfig
from bwdtune.gen.problem import Problem
from bwdtune.gen.space import refusal
from bwdtune.runtime.verification.cases import Case
from bwdtune.runtime.verification.inputs import INPUTS

HEAD_DIMS = (8, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 200, 256)

MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": True, "bottom_right": True},
    {"window_left": 1},
    {"window_left": 1, "bottom_right": True},
)
"""The limits of a window are its cases' own."""

FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"softcap": True},
    {"varlen": True},
    {"deterministic": True},
    {"varlen": True, "deterministic": True},
    {"softcap": True, "varlen": True, "deterministic": True},
    {"lse_grad": True},
    {"sink": True},
    {"softcap": True, "deterministic": True, "lse_grad": True, "sink": True},
    {"varlen": True, "lse_grad": True, "sink": True},
    {"varlen": True, "alibi": True},
    {"alibi": True, "bias": "B_H_S", "bias_grad": True},
    {"bias": "1_H_S", "bias_dtype": "fp32", "bias_grad": True},
    {"softcap": True, "deterministic": True, "bias": "B_1_1", "bias_grad": True},
)
ALL_FEATURES_AT = (40, 64, 128)  # head_dims

HEAD_DIM_PAIRS = ((192, 128), (128, 64), (64, 128), (136, 72))
"""Of q and k, and of v."""

LENGTHS = (
    (1, 1),
    (1, 129),
    (129, 1),
    (17, 17),
    (127, 127),
    (129, 129),
    (256, 3),
    (3, 256),
    (256, 512),
    (512, 256),
    (333, 333),
    (64, 64),
    (200, 77),
    (130, 385),
    (385, 130),
    (640, 641),
    (17, 250),
    (320, 320),
)
PACKED = (
    ((1, 1), (0, 3), (5, 0)),
    ((17, 129), (129, 17), (64, 64)),
    ((0, 0), (333, 333), (1, 200), (200, 1)),
    ((128, 128),) * 3,
    ((127, 129), (1, 1), (0, 64), (250, 3)),
    ((64, 0), (0, 64), (33, 70)),
)
HEADS = ((2, 2), (4, 2), (4, 1))
WINDOWS = ((70, 37), (1, 1), (129, -1), (-1, 20), (0, 5), (40, 0), (300, 300))


@dataclass(frozen=True)
class Kernel:
    """One kernel and what it is checked on.

    Attributes:
        family: Whose it is.
        problem: Its kind.
        cases: Problems of that kind.
    """

    family: str
    problem: Problem
    cases: tuple[Case, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.family}_{self.problem.kernel_spec}"

    def config(self, device: Device) -> Config:
        """One of the family's valid configurations: any, but always the same one."""
        config = _any_config(self.family, self.problem, device)
        assert config, f"the {self.family} family has no configuration for {self.problem.kernel_spec}"
        return config


@functools.cache
def _representatives(family: str) -> tuple[Config, ...]:
    return tuple(config for config in all_representatives() if config.family == family)


@functools.cache
def _any_config(family: str, problem: Problem, device: Device) -> Config | None:
    found = _drawn_for_the_host() if device == HOST else {}
    return found[family, problem] if (family, problem) in found else _draw(family, problem, device)


@once
def _drawn_for_the_host() -> dict[tuple[str, Problem], Config | None]:
    """What `matrix` asks for, and then who runs its kernels on the host target."""
    found: dict[tuple[str, Problem], Config | None] = {}
    for (family, config_type), problem in itertools.product(FAMILIES.items(), _problems()):
        if set(problem.required_features) <= config_type.features:
            for one in (_plain(problem), problem):
                if (family, one) not in found:
                    found[family, one] = _draw(family, one, HOST)
                if found[family, one] is None:
                    break
    return found


def _draw(family: str, problem: Problem, device: Device) -> Config | None:
    drawn, configs = random.Random(problem.kernel_spec), _representatives(family)
    # Most problems are served by many: a few draws find one. Where they do not, all are asked.
    candidates = itertools.chain(drawn.choices(configs, k=1000), configs)
    valid = next((config for config in candidates if refusal(problem, config, device) is None), None)
    return valid and _with_ungated_drawn(valid, drawn)


def _with_ungated_drawn(config: Config, drawn: random.Random) -> Config:
    """The same with any values of the parameters that no arithmetic depends on."""
    while True:
        ungated = sorted(name for name, one in config.parameters.items() if not one.affects_validity)
        values = {name: drawn.choice(config.choices[name]) for name in ungated}
        changed = replace(config, **values)
        if changed.contradiction is None:
            return changed


@functools.cache
def _problems() -> tuple[Problem, ...]:
    """The kinds, in a fixed order."""
    kinds = [
        (head_dim, mask, features)
        for head_dim, mask, features in itertools.product(HEAD_DIMS, MASKS, FEATURES)
        if not features or head_dim in ALL_FEATURES_AT
    ]
    # Each pair with each mask; neighbours have other features.
    pairs = itertools.product(HEAD_DIM_PAIRS, MASKS)
    kinds += [
        (head_dim, mask, {**FEATURES[number * 5 % len(FEATURES)], "value_head_dim": head_dim_v})
        for number, ((head_dim, head_dim_v), mask) in enumerate(pairs)
    ]
    return tuple(
        # With a group, so that kernels that split it are among those drawn; cases have groups and none.
        Problem(("bf16", "fp16")[number % 2], 1, 2, 1, 256, 256, head_dim, **mask, **features)
        for number, (head_dim, mask, features) in enumerate(kinds)
    )


@functools.cache
def matrix() -> tuple[Kernel, ...]:
    """All of them, in a fixed order: of the mma family, which has all features, and of the others what is not plain."""
    return tuple(
        Kernel(family, problem, tuple(_cases(problem)))
        for family, config_type in FAMILIES.items()
        for problem in _problems()
        if _is_checked(family, config_type, problem)
    )


def _is_checked(family: str, config_type: type[Config], problem: Problem) -> bool:
    if family == MmaConfig.family and not problem.value_head_dim:
        return True
    return bool(
        (problem.required_features or problem.head_dim not in ALL_FEATURES_AT)
        and set(problem.required_features) <= config_type.features
        and _any_config(family, _plain(problem), HOST)
        and _any_config(family, problem, HOST)
    )


def _plain(problem: Problem) -> Problem:
    return Problem("bf16", 1, 2, 1, 256, 256, problem.head_dim, value_head_dim=problem.value_head_dim)


def sample() -> tuple[Kernel, ...]:
    """Few of them, in which each feature of each family occurs."""
    kernels = matrix()
    # A stride that is prime to the numbers of masks and of features walks through all of both.
    chosen = list(kernels[::19])
    seen = {(kernel.family, feature) for kernel in chosen for feature in kernel.problem.required_features}
    for kernel in kernels:
        features = {(kernel.family, feature) for feature in kernel.problem.required_features}
        if not features <= seen:
            chosen.append(kernel)
            seen |= features
    return tuple(chosen)


def _cases(problem: Problem) -> Iterator[Case]:
    lengths = PACKED * 3 if problem.varlen else LENGTHS
    # Not in step with each other, so that over the kernels each meets each.
    for number, one in enumerate(lengths, sum(problem.kernel_spec.encode())):
        heads_q, heads_kv = HEADS[number % len(HEADS)]
        left, right = WINDOWS[number % len(WINDOWS)] if problem.mask == "window" else (-1, -1)
        sequences = one if problem.varlen else ()
        seqlen_q, seqlen_kv = (max(part) for part in zip(*(sequences or [one]), strict=True))
        sized = replace(
            problem,
            batch=len(sequences) or 1 + number % 2,
            heads_q=heads_q,
            heads_kv=heads_kv,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            window_left=left,
            window_right=right,
        )
        yield Case(
            sized,
            tuple(INPUTS)[number // 2 % len(INPUTS)],
            heads_inside=number % 5 < 2,
            scale_factor=0.5 if number % 7 == 0 else 1.0,
            lengths=sequences,
        )
