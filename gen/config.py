"""One point of the search space: the tuned parameters of a kernel family, and the presets."""

from __future__ import annotations

import re
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar

from .errors import UsageError

MMA_ROWS = 16  # m of mma.m16n8k16
MMA_COLUMNS = 8  # n
MMA_DEPTH = 16  # k


@dataclass(frozen=True, order=True)
class MmaConfig:
    """A point of the ``mma`` family (``templates/backward_mma.cu.j2``). All tuning: none of it changes the result.

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
        dq_vector: Floats a thread adds to dQ by one ``red.global``: 1, 2 or 4.
        unroll_dq: Unroll the loop over keys of dQ = dS K. A loop keeps fewer operands in flight, and so in registers.
    """

    family: ClassVar[str] = "mma"
    group: ClassVar[str] = "mma"
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
    }

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

    def __post_init__(self) -> None:
        for name, allowed in self.choices.items():
            value = getattr(self, name)
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise UsageError(f"{name} is {value!r}: it must be one of {', '.join(map(str, allowed))}")

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

    @property
    def id(self) -> str:
        """A readable name that `parse_config` takes back, such as ``mma_q64_kv64_w4_s1_sw128_k1_v1_b1_r2``."""
        return "_".join([self.family, *(f"{_ABBREVIATIONS[f.name]}{int(getattr(self, f.name))}" for f in fields(self))])

    def to_dict(self) -> dict[str, Any]:
        """The parameters by name, with the family: what is stored."""
        return {"family": self.family, **asdict(self)}


_ABBREVIATIONS = {
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
}

Config = MmaConfig
"""Any family's configuration: a union, once there is a second family."""

FAMILIES: dict[str, type[Config]] = {MmaConfig.family: MmaConfig}

PRESETS: dict[str, Config] = {
    "v1": MmaConfig(block_q=64, block_kv=64, warps_per_row_group=4, stages=1),
    "v2": MmaConfig(block_q=64, block_kv=64, warps_per_row_group=2, stages=1, unroll_dq=False),
    "v3": MmaConfig(block_q=32, block_kv=64, warps_per_row_group=4, stages=2),
}
"""The three kernels of the public write-up this project starts from. v2 needs the loop for dQ to fit its registers."""


def config_from_dict(values: dict[str, Any]) -> Config:
    """The configuration that `to_dict` wrote. Nothing of it is trusted: every field is checked.

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
    needed = {field.name for field in fields(config_type) if field.default is MISSING}
    if not needed <= set(values) <= known:
        wrong = ", ".join(sorted((set(values) - known) | (needed - set(values))))
        raise UsageError(f"a stored {family} configuration has unknown or missing parameters: {wrong}")
    return config_type(**values)


def parse_config(text: str) -> Config:
    """A preset's name (``v1``, ``v2``, ``v3``) or a configuration's id.

    Raises:
        UsageError: Neither of them, with what would be.
    """
    if text in PRESETS:
        return PRESETS[text]
    family, _, rest = text.partition("_")
    if family in FAMILIES:
        pairs = [re.fullmatch(r"([a-z]+)(\d+)", part) for part in rest.split("_")]
        found = {match[1]: int(match[2]) for match in pairs if match}
        if all(pairs) and list(found) == list(_ABBREVIATIONS.values()):
            choices = FAMILIES[family].choices
            values: dict[str, Any] = {
                name: bool(found[short]) if isinstance(choices[name][0], bool) else found[short]
                for name, short in _ABBREVIATIONS.items()
            }
            return FAMILIES[family](**values)
    raise UsageError(f"unknown configuration {text!r}: use {', '.join(PRESETS)} or an id such as {PRESETS['v2'].id}")


def preset_name(config: Config) -> str | None:
    """``v1``, ``v2`` or ``v3`` where the configuration is one of them."""
    return next((name for name, preset in PRESETS.items() if preset == config), None)
