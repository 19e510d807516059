"""How long kernels take where no GPU is: light to import, for stand-ins in processes of their own."""

from __future__ import annotations

from bwdtune.gen.families import PRESETS, Config, MmaConfig

PEER_MS = {"default": 5.0, "fa": 5.5, "cudnn": 5.0}


def cost_ms(config: Config) -> float:
    """A landscape with one minimum, and no two equal presets. It lies in the mma family: all of another are slow."""
    if not isinstance(config, MmaConfig):
        return 30.0 + list(PRESETS.values()).index(config) if config in PRESETS.values() else 40.0
    cost = 6.0 + abs(config.block_q - 64) / 32 + abs(config.stages - 2) / 2 + abs(config.warps_per_row_group - 2)
    return cost + 0.1 * config.dq_vector + 0.05 * config.min_blocks_per_sm
