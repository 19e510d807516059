"""Configurations as rows of small integers: the family, then the index of each parameter's value among its choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...gen.families import FAMILIES, Config

Places = NDArray[np.int8]
Indices = NDArray[np.int64]


@cache
def choices() -> dict[str, list[Any]]:
    """Every choice that a family declares, by the parameter's stored name: a column each.

    The choices of one problem's valid configurations would be fewer, but a change in what is valid would then clash
    with the choices that a study has stored.
    """
    found: dict[str, list[Any]] = {"family": list(FAMILIES)}
    for family in FAMILIES.values():
        for one in family.parameters.values():
            found[one.stored] = list(dict.fromkeys([*found.get(one.stored, []), *one.choices]))
    return found


@cache
def columns(family: str) -> Indices:
    """The columns of a family's own parameters."""
    names = list(choices())
    return np.array([names.index(one.stored) for one in FAMILIES[family].parameters.values()])


def places(configs: Sequence[Config]) -> Places:
    """A row for each: what its family does not have is at its first choice.

    There may be hundreds of thousands, and a search waits for this: values are looked up a column at a time.
    """
    found = np.zeros((len(configs), len(choices())), dtype=np.int8)
    members: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        members.setdefault(config.family, []).append(index)
    for code, (name, family) in enumerate(FAMILIES.items()):
        if name not in members:
            continue
        rows, values_of = np.array(members[name]), attrgetter(*family.choices)
        values = np.array([values_of(configs[index]) for index in members[name]], dtype=np.int64)
        found[rows, 0] = code
        for column, one, given in zip(columns(name), family.parameters.values(), values.T, strict=True):
            known = np.array(choices()[one.stored], dtype=np.int64)
            order = np.argsort(known)
            found[rows, column] = order[np.searchsorted(known[order], given)]
    return found


def sizes(family: str) -> list[int]:
    """How many choices each parameter of a family has."""
    every = list(choices().values())
    return [len(every[column]) for column in columns(family)]


def one_hot(family: str, rows: Places) -> NDArray[np.float64]:
    """Of a family's rows a 1 for the choice of each parameter, one parameter after another, else 0."""
    counts = sizes(family)
    starts = np.cumsum([0, *counts[:-1]])
    found = np.zeros((len(rows), sum(counts)))
    found[np.arange(len(rows))[:, None], rows[:, columns(family)] + starts] = 1.0
    return found


def places_of(values: Mapping[str, Any]) -> list[int]:
    """The row of values by stored name, all of them."""
    return [table[values[name]] for name, table in _tables().items()]


@cache
def _tables() -> dict[str, dict[Any, int]]:
    return {name: {value: place for place, value in enumerate(known)} for name, known in choices().items()}


class Space:
    """The configurations of a search, and their rows.

    Attributes:
        configs: Each once, in the order in which they came.
        index: The place of each in `configs`.
        places: Their rows.
    """

    def __init__(self, configs: Sequence[Config]) -> None:
        self.index = {config: index for index, config in enumerate(dict.fromkeys(configs))}
        self.configs = tuple(self.index)
        self.places = places(self.configs)

    def members(self, family: str) -> Indices:
        """The indices of a family's configurations."""
        return np.flatnonzero(self.places[:, 0] == list(FAMILIES).index(family))

    def neighbours(self, row: Places) -> NDArray[np.bool_]:
        """Of each configuration whether it differs from a row in one parameter, within the family."""
        differs = self.places != row
        found: NDArray[np.bool_] = ~differs[:, 0] & (differs.sum(axis=1) == 1)
        return found
