"""One point of the search space: the tuned parameters of a kernel family, and the presets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from .errors import UsageError
from .problem import FEATURES

MMA_ROWS = 16  # m of mma.m16n8k16
MMA_COLUMNS = 8  # n
MMA_DEPTH = 16  # k
CONVERTED_ROWS = 32  # of dQ, that the warp which converts it beside other work takes at a time
STAGGERED_WARPS = 8  # two for each of an SM's sub-partitions, which a block's warps go round


@dataclass(frozen=True)
class Contradiction:
    """Values of some parameters that do not go together, whatever the problem and the device.

    Attributes:
        parameters: Whose values.
        holds: Whether such values, in that order, contradict each other.
        reason: Why they do; a parameter's name in braces stands for its value.
    """

    parameters: tuple[str, ...]
    holds: Callable[..., bool]
    reason: str

    def among(self, values: Mapping[str, Any]) -> bool:
        """Whether it is found among the values of these parameters and perhaps others."""
        return self.holds(*(values[name] for name in self.parameters))


@dataclass(frozen=True, order=True)
class _Parameters:
    """What the families' configurations share: dataclasses of integers and booleans, each one of declared choices.

    Attributes:
        family: Its name.
        group: What people call it together with its kin.
        features: What of `Problem.asked` its template has.
        abbreviations: Of the parameters, as an id has them.
        later: Parameters that came when configurations were already stored: at its default, such a one is neither in an
            id nor stored. What was there before thus keeps its id, and with it its source, in which that stands.
        choices: Of the parameters.
        ungated: Parameters that no arithmetic depends on: configurations that differ in these alone are valid together,
            unless they contradict themselves.
        contradictions: What does not go together.
    """

    family: ClassVar[str]
    group: ClassVar[str]
    features: ClassVar[frozenset[str]]
    abbreviations: ClassVar[dict[str, str]]
    later: ClassVar[frozenset[str]] = frozenset()
    choices: ClassVar[dict[str, tuple[int | bool, ...]]]
    ungated: ClassVar[frozenset[str]] = frozenset()
    contradictions: ClassVar[tuple[Contradiction, ...]] = ()

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            value = getattr(self, name)
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise UsageError(f"{name} is {value!r}: it must be one of {', '.join(map(str, allowed))}")

    @classmethod
    def of_choices(cls, values: dict[str, Any]) -> Any:
        """A configuration of values that were taken from `choices`: a whole space of them need not be checked again."""
        config = object.__new__(cls)
        config.__dict__.update(values)
        return config

    @property
    def contradiction(self) -> str | None:
        """Why its values do not go together, whatever the problem and the device; None where they do."""
        values = vars(self)
        found = next((one for one in self.contradictions if one.among(values)), None)
        return found.reason.format(**values) if found else None

    @property
    def id(self) -> str:
        """A readable name that `parse_config` takes back, such as ``mma_q64_kv64_w4_s1_sw128_k1_v1_b1_r2_u1``."""
        return "_".join([self.family, *(f"{self.abbreviations[name]}{int(value)}" for name, value in self._stated())])

    def to_dict(self) -> dict[str, Any]:
        """The parameters by name, with the family."""
        return {"family": self.family, **vars(self)}

    def to_stored(self) -> dict[str, Any]:
        """The same as it is stored: without what is not in an id either. `config_from_dict` takes both back."""
        return {"family": self.family, **dict(self._stated())}

    def _stated(self) -> list[tuple[str, int | bool]]:
        """The parameters with their values, but for later ones at their default."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return [
            (field.name, value) for field, value in values if field.name not in self.later or value != field.default
        ]


@dataclass(frozen=True, order=True)
class MmaConfig(_Parameters):
    """A point of the ``mma`` family (``templates/mma/backward.cu.j2``). All tuning: none of it changes the result.

    Attributes:
        block_q: Rows of a Q/dO tile (B_r).
        block_kv: Rows of a K/V tile (B_c); one thread block owns one.
        warps_per_row_group: Warps that share 16 rows of S; with ``block_q`` it gives ``num_warps``.
        stages: Q/dO tiles in shared memory: 1 loads after use, 2 and 3 load ahead.
        swizzle: Bytes of a shared-memory panel's row that TMA and ldmatrix permute: 128, 64 or 32; 0 is none
            (panels of 16 bytes, which need no permutation to be free of bank conflicts).
        k_in_registers: Keep this warp's K fragments of S = QK^T in registers, or read them again for each tile.
        v_in_registers: The same for V in dP = dO V^T.
        min_blocks_per_sm: Second argument of ``__launch_bounds__``: caps the registers so that as many blocks fit.
        dq_vector: Floats a thread adds to dQ by one ``red.global``: 1, 2 or 4. To dK and dV too, where they are sums.
        unroll_dq: Unroll the loop over keys of dQ = dS K. A loop keeps fewer operands in flight, and so in registers.
        split_group: Give each query head of a group blocks of its own, whose dK and dV are added up in global memory;
            else a block goes over the heads of the group, one after another.
    """

    family: ClassVar[str] = "mma"
    group: ClassVar[str] = "mma"
    features: ClassVar[frozenset[str]] = frozenset(FEATURES)
    abbreviations: ClassVar[dict[str, str]] = {
        "block_q": "q",
        "block_kv": "kv",
        "warps_per_row_group": "w",
        "stages": "s",
        "swizzle": "sw",
        "k_in_registers": "k",
        "v_in_registers": "v",
        "min_blocks_per_sm": "b",
        "dq_vector": "r",
        "unroll_dq": "u",
        "split_group": "g",
    }
    later: ClassVar[frozenset[str]] = frozenset({"split_group"})
    choices: ClassVar[dict[str, tuple[int | bool, ...]]] = {
        "block_q": (16, 32, 64, 128),
        "block_kv": (32, 64, 128),
        "warps_per_row_group": (1, 2, 4, 8),
        "stages": (1, 2, 3),
        "swizzle": (128, 64, 32, 0),
        "k_in_registers": (False, True),
        "v_in_registers": (False, True),
        "min_blocks_per_sm": (1, 2, 3),
        "dq_vector": (1, 2, 4),
        "unroll_dq": (False, True),
        "split_group": (False, True),
    }
    ungated: ClassVar[frozenset[str]] = frozenset({"dq_vector", "unroll_dq"})

    block_q: int
    block_kv: int
    warps_per_row_group: int
    stages: int = 1
    swizzle: int = 128
    k_in_registers: bool = True
    v_in_registers: bool = True
    min_blocks_per_sm: int = 1
    dq_vector: int = 2
    unroll_dq: bool = True
    split_group: bool = False

    @property
    def row_groups(self) -> int:
        """Groups of 16 query rows in a tile."""
        return self.block_q // MMA_ROWS

    @property
    def num_warps(self) -> int:
        return self.row_groups * self.warps_per_row_group

    @property
    def threads(self) -> int:
        return 32 * self.num_warps


@dataclass(frozen=True, order=True)
class TransposedMmaConfig(_Parameters):
    """A point of the ``mmat`` family (``templates/mmat/backward.cu.j2``): ``mma.sync`` with scores computed transposed.

    Attributes:
        block_q: Rows of a Q/dO tile (B_r).
        block_kv: Rows of a K/V tile (B_c); one thread block owns one.
        num_warps: Warps of a block.
        query_groups: Groups of warps that divide a tile's queries; the warps of a group divide its keys.
        exchange: With two query groups, hand P and dS over in shared memory, so that a warp sums dK and dV over all
            queries and for half of the columns; else each group sums over its own queries, added up at the end.
        dq_row_warps: Warps that divide the queries of dQ = dS K; the others divide its columns.
        q_stages: Q tiles in shared memory.
        do_stages: dO tiles in shared memory; 1 loads after use.
        k_in_registers: Keep this warp's K fragments of S^T = K Q^T in registers, or read them again for each tile.
        v_in_registers: The same for V in dP^T = V dO^T; V then needs no shared memory of its own.
        p_first: Compute P before dP, packed to 16 bits: half the registers while dP is computed, and dS is made of
            the rounded P.
        p_in_fp16: With P first, it is fp16 that P is rounded to until dS is made of it, also where the elements are
            bf16: dS is then as exact as without P first.
        dv_first: Compute dV before dP as well.
        staggered: The second of the two warps of an SM sub-partition begins a tile when the first has issued S.
        min_blocks_per_sm: Second argument of ``__launch_bounds__``.
        head_group: Heads whose blocks are scheduled together, to share the L2.
        p_fp16_period: Of so many blocks of 16 queries, one is held as ``p_in_fp16`` says. The others spare the
            conversions, and their dS is made of a P that is rounded as the elements are.
        dq_vector: Floats a thread adds to dQ by one ``red.global``: 1, 2 or 4.
        dq_bulk: Each warp stages its part of dQ in shared memory, from where one thread adds it by
            ``cp.reduce.async.bulk``; else threads add theirs from registers.
    """

    family: ClassVar[str] = "mmat"
    group: ClassVar[str] = "mma"
    features: ClassVar[frozenset[str]] = frozenset(FEATURES)
    abbreviations: ClassVar[dict[str, str]] = {
        "block_q": "q",
        "block_kv": "kv",
        "num_warps": "w",
        "query_groups": "g",
        "exchange": "x",
        "dq_row_warps": "r",
        "q_stages": "s",
        "do_stages": "o",
        "k_in_registers": "k",
        "v_in_registers": "v",
        "p_first": "p",
        "p_in_fp16": "f",
        "dv_first": "d",
        "staggered": "t",
        "min_blocks_per_sm": "b",
        "head_group": "h",
        "p_fp16_period": "e",
        "dq_vector": "a",
        "dq_bulk": "u",
    }
    later: ClassVar[frozenset[str]] = frozenset({"p_fp16_period", "dq_vector", "dq_bulk"})
    choices: ClassVar[dict[str, tuple[int | bool, ...]]] = {
        "block_q": (32, 64, 96, 128),
        "block_kv": (64, 128),
        "num_warps": (4, 8),
        "query_groups": (1, 2),
        "exchange": (False, True),
        "dq_row_warps": (1, 2, 4),
        "q_stages": (2, 3),
        "do_stages": (1, 2, 3),
        "k_in_registers": (False, True),
        "v_in_registers": (False, True),
        "p_first": (False, True),
        "p_in_fp16": (False, True),
        "dv_first": (False, True),
        "staggered": (False, True),
        "min_blocks_per_sm": (1, 2),
        "head_group": (2, 4, 8),
        "p_fp16_period": (1, 2, 4),
        "dq_vector": (1, 2, 4),
        "dq_bulk": (False, True),
    }
    ungated: ClassVar[frozenset[str]] = frozenset(
        {"p_in_fp16", "p_fp16_period", "staggered", "head_group", "dq_vector"}
    )
    contradictions: ClassVar[tuple[Contradiction, ...]] = (
        Contradiction(
            ("query_groups", "exchange"),
            lambda groups, exchange: exchange and groups == 1,
            "an exchange is between query groups: there is one",
        ),
        Contradiction(
            ("p_first", "dv_first"),
            lambda p_first, dv_first: dv_first and not p_first,
            "dV before dP needs P before dP",
        ),
        Contradiction(
            ("p_first", "p_in_fp16"),
            lambda p_first, p_in_fp16: p_in_fp16 and not p_first,
            "P in fp16 needs P before dP",
        ),
        Contradiction(
            ("p_first", "p_in_fp16"),
            lambda p_first, p_in_fp16: p_first and not p_in_fp16,
            "dS of a P that is rounded to bf16 has 1.22 times the error of PyTorch's: hold it in fp16",
        ),
        Contradiction(
            ("p_in_fp16", "p_fp16_period"),
            lambda p_in_fp16, period: period > 1 and not p_in_fp16,
            "a period is of blocks of P in fp16",
        ),
        Contradiction(
            ("block_q", "query_groups", "p_fp16_period"),
            lambda queries, groups, period: period > queries // groups // MMA_DEPTH,
            "of {block_q} queries in {query_groups} parts, a warp has fewer than {p_fp16_period} blocks of 16",
        ),
        Contradiction(
            ("num_warps", "staggered"),
            lambda warps, staggered: staggered and warps != STAGGERED_WARPS,
            f"staggered warps are pairs, one a sub-partition: {{num_warps}} are not {STAGGERED_WARPS}",
        ),
        Contradiction(
            ("dq_vector", "dq_bulk"),
            lambda vector, bulk: bulk and vector != 4,
            "dQ is added in bulk, and not by vectors of {dq_vector}",
        ),
    )

    block_q: int
    block_kv: int
    num_warps: int
    query_groups: int = 1
    exchange: bool = False
    dq_row_warps: int = 2
    q_stages: int = 2
    do_stages: int = 1
    k_in_registers: bool = False
    v_in_registers: bool = False
    p_first: bool = False
    p_in_fp16: bool = False
    dv_first: bool = False
    staggered: bool = False
    min_blocks_per_sm: int = 1
    head_group: int = 4
    p_fp16_period: int = 1
    dq_vector: int = 4
    dq_bulk: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    @property
    def exchanges(self) -> bool:
        """Whether query groups hand P and dS to each other."""
        return self.query_groups > 1 and self.exchange

    @property
    def exchanges_p_first(self) -> bool:
        """Whether they hand over P before there is dS, for dV: apart from it, and behind barriers of its own."""
        return self.exchanges and self.dv_first

    @property
    def splits_k(self) -> bool:
        """Whether query groups have parts of dK and dV, to be added up."""
        return self.query_groups > 1 and not self.exchange

    @property
    def ds_parts(self) -> int:
        """Parts of the keys whose dS dQ waits for, one after another: a warp's own first, those that are late last.

        With an exchange, those who exchange are a part. Else more than two cost registers that are not there.
        """
        groups = self.num_warps // self.query_groups
        return groups if self.exchanges else min(groups, 2)


@dataclass(frozen=True, order=True)
class WgmmaConfig(_Parameters):
    """A point of the ``wgmma`` family (``templates/wgmma/backward.cu.j2``): warpgroups of Hopper, 128 keys an item.

    Attributes:
        block_q: Rows of a Q/dO tile (B_r).
        fold_statistics: The log-sum-exp and delta enter S and dP as a product more, of 16-bit terms and constants, and
            need neither loads nor additions of the computing threads; else they are read from shared memory.
        lag_dq: Compute dQ one tile late, when the other warpgroup's half of dS has long arrived; else both warpgroups
            meet in each tile.
        v_fragments: Steps of 16 along head_dim for which V is kept in registers: they spare shared memory's bandwidth.
        resync: The warps of a warpgroup meet before they stage dQ.
        skip_masked: A warpgroup whose half of the first tile the mask leaves nothing of computes its share of dQ alone
            there.
        copies: Copies of the computing code: one for both warpgroups, or one each.
        head_group: Heads whose items are taken together, to share the L2.
        store_first: The first key tile that meets a query tile stores its part of dQ, and the others wait until it has;
            else all of them add to what was cleared before.
        dq_bulk: dQ is staged in shared memory, from where one thread adds it by ``cp.reduce.async.bulk``; else the
            computing threads add it themselves, by ``red.global`` of four floats.
        convert_dq: A warp converts dQ of heads whose items are done, beside the items of later ones, and clears its
            place for heads that are later still; else two other kernels clear all of it before and convert it after.
    """

    family: ClassVar[str] = "wgmma"
    group: ClassVar[str] = "wgmma"
    features: ClassVar[frozenset[str]] = frozenset({"window", "bottom_right", "softcap", "deterministic"})
    abbreviations: ClassVar[dict[str, str]] = {
        "block_q": "q",
        "fold_statistics": "f",
        "lag_dq": "l",
        "v_fragments": "v",
        "resync": "r",
        "skip_masked": "m",
        "copies": "c",
        "head_group": "h",
        "store_first": "s",
        "dq_bulk": "u",
        "convert_dq": "d",
    }
    later: ClassVar[frozenset[str]] = frozenset({"store_first", "dq_bulk", "convert_dq"})
    choices: ClassVar[dict[str, tuple[int | bool, ...]]] = {
        "block_q": (64, 80, 128),
        "fold_statistics": (False, True),
        "lag_dq": (False, True),
        "v_fragments": (0, 1, 2, 3, 4, 5),
        "resync": (False, True),
        "skip_masked": (False, True),
        "copies": (1, 2),
        "head_group": (4, 8, 16),
        "store_first": (False, True),
        "dq_bulk": (True, False),
        "convert_dq": (False, True),
    }
    ungated: ClassVar[frozenset[str]] = frozenset({"lag_dq", "resync", "copies", "head_group"})
    threads: ClassVar[int] = 384
    contradictions: ClassVar[tuple[Contradiction, ...]] = (
        Contradiction(
            ("block_q", "fold_statistics"),
            lambda block_q, fold_statistics: fold_statistics and block_q % 64 != 0,
            "the statistics that are folded into S lie in rows of 64 queries: a tile has {block_q}",
        ),
        Contradiction(
            ("store_first", "dq_bulk"),
            lambda store_first, dq_bulk: store_first and not dq_bulk,
            "what the first key tile stores, and who adds to it, waits in the thread that copies dQ in bulk",
        ),
        Contradiction(
            ("dq_bulk", "convert_dq"),
            lambda dq_bulk, convert_dq: convert_dq and not dq_bulk,
            "that all of dQ is in memory is known of bulk copies alone",
        ),
        Contradiction(
            ("block_q", "convert_dq"),
            lambda block_q, convert_dq: convert_dq and block_q % CONVERTED_ROWS != 0,
            f"dQ is converted by {CONVERTED_ROWS} rows at a time: a tile has {{block_q}}",
        ),
        Contradiction(
            ("store_first", "convert_dq"),
            lambda store_first, convert_dq: store_first and convert_dq,
            "dQ's place is cleared where it is converted: nothing is left for the first key tile to store",
        ),
    )
    block_kv: ClassVar[int] = 128

    block_q: int = 64
    fold_statistics: bool = True
    lag_dq: bool = False
    v_fragments: int = 0
    resync: bool = False
    skip_masked: bool = False
    copies: int = 1
    head_group: int = 8
    store_first: bool = False
    dq_bulk: bool = True
    convert_dq: bool = False


Config = MmaConfig | TransposedMmaConfig | WgmmaConfig
"""Any family's configuration."""

FAMILIES: dict[str, type[Config]] = {
    MmaConfig.family: MmaConfig,
    TransposedMmaConfig.family: TransposedMmaConfig,
    WgmmaConfig.family: WgmmaConfig,
}

PRESETS: dict[str, Config] = {
    "v1": MmaConfig(block_q=64, block_kv=64, warps_per_row_group=4, stages=1),
    "v2": MmaConfig(block_q=64, block_kv=64, warps_per_row_group=2, stages=1, unroll_dq=False),
    "v3": MmaConfig(block_q=32, block_kv=64, warps_per_row_group=4, stages=2),
    "t64": TransposedMmaConfig(
        block_q=64, block_kv=128, num_warps=8, v_in_registers=True, p_first=True, p_in_fp16=True, staggered=True
    ),
    "t128": TransposedMmaConfig(
        block_q=128,
        block_kv=128,
        num_warps=8,
        query_groups=2,
        exchange=True,
        dq_row_warps=4,
        p_first=True,
        p_in_fp16=True,
        dv_first=True,
        staggered=True,
    ),
    "w64": WgmmaConfig(v_fragments=3),
    "w64lag": WgmmaConfig(lag_dq=True, v_fragments=3, resync=True, skip_masked=True),
    "w64first": WgmmaConfig(lag_dq=True, v_fragments=3, store_first=True),
    "w64conv": WgmmaConfig(lag_dq=True, v_fragments=3, convert_dq=True),
    "w128": WgmmaConfig(block_q=128, lag_dq=True),
}
"""v1, v2 and v3 are the three kernels of the public write-up this project starts from; v2 needs the loop for dQ to fit
its registers. t64 and t128 are the transposed kernels for 99 KiB and for 227 KiB of shared memory, those with a w are
for Hopper: w64first for short sequences and deterministic gradients, w64conv, whose dQ needs no kernel of its own, for
long ones, w128 for head_dims up to 64."""


def config_from_dict(values: dict[str, Any]) -> Config:
    """The configuration that `to_stored` or `to_dict` wrote. Nothing of it is trusted: every field is checked.

    A parameter that was added later is missing in what was stored before: its default is what kernels did until then.

    Raises:
        UsageError: An unknown family, an unknown or missing parameter, or a value outside its choices.
    """
    values = dict(values)
    family = values.pop("family", None)
    if family not in FAMILIES:
        raise UsageError(f"unknown kernel family {family!r}: known are {', '.join(FAMILIES)}")
    config_type = FAMILIES[family]
    known = {field.name for field in fields(config_type)}
    needed = _needed(config_type)
    if not needed <= set(values) <= known:
        wrong = ", ".join(sorted((set(values) - known) | (needed - set(values))))
        raise UsageError(f"a stored {family} configuration has unknown or missing parameters: {wrong}")
    return config_type(**values)


def _needed(config_type: type[Config]) -> set[str]:
    """The parameters without a default."""
    return {field.name for field in fields(config_type) if field.default is MISSING}


def parse_config(text: str) -> Config:
    """A preset's name, such as ``v2``, or a configuration's id.

    A parameter with a default may be missing, as in an id that was written before it was added.

    Raises:
        UsageError: Neither of them, with what would be.
    """
    if text in PRESETS:
        return PRESETS[text]
    family, _, rest = text.partition("_")
    if config_type := FAMILIES.get(family):
        pairs = [re.fullmatch(r"([a-z]+)(\d+)", part) for part in rest.split("_")]
        stated = {match[1]: int(match[2]) for match in pairs if match}
        names = {name: short for name, short in config_type.abbreviations.items() if short in stated}
        # All of them are parameters, each once and in its place.
        if [match and match[1] for match in pairs] == list(names.values()) and _needed(config_type) <= names.keys():
            values: dict[str, Any] = {name: stated[short] for name, short in names.items()}
            for name, value in values.items():
                if isinstance(config_type.choices[name][0], bool) and value in (0, 1):
                    values[name] = bool(value)
            return config_type(**values)
    raise UsageError(f"unknown configuration {text!r}: use {', '.join(PRESETS)} or an id such as {PRESETS['v2'].id}")


def preset_name(config: Config) -> str | None:
    """The name of the preset that the configuration is, if it is one."""
    return next((name for name, preset in PRESETS.items() if preset == config), None)
