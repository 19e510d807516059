"""Predicts a configuration's time on a card by arithmetic alone: good for an order of candidates, not for their times.

A tile of scores costs each unit of an SM a number of cycles: tensor cores, shared memory, the units that compute P and
dS, and the L2 in which dQ is summed. The units work side by side, but never perfectly: a tile takes a norm of their
cycles, between the largest and the sum. What nothing overlaps is added: the drain of a barrier, the wait for a load, a
block's start and end. `tests/tuner/search/test_cost_model.py` compares it with measurements; docs/cost_model.md says
how good it is.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ...gen.build.jobs import CompiledResources
from ...gen.device import Device
from ...gen.emulation import emulation
from ...gen.families import FAMILIES, Config, Phase, TileWork, ceil_div
from ...gen.problem import ACCUMULATOR_BYTES, Problem
from .tensor_activity import MMA_PRODUCTS, query_tiles_met

# What the hardware does in a clock of an SM: NVIDIA's programming guide, and what this project has measured on an H200.
_SHARED_BYTES = 128
_EXPONENTIALS = 16
_LANES = 128
_ADDS = {1: 1.9, 2: 3.6, 4: 3.9}  # floats into L2 by the vector: 448, 876 and 945 G/s over 132 SMs at 1.83 GHz
_BULK_ADDS = 3.9
_BIAS_VECTOR = 2  # floats of dBias that a thread adds at once
_TILE_BYTES = 64  # from L2

_FRAGMENT_WAVEFRONTS = 512 / _SHARED_BYTES  # of an ldmatrix.x4 or stmatrix.x4
_SCORE_LANES = 6  # operations on a score besides its exponential: scale, L, delta, product, and half a packing twice
_CAP_LANES = 4  # of a softcap, besides one more exponential's time

# What prototypes of these kernels have shown on an H200.
_UNSTAGGERED = 1.03  # where both warps of a scheduler do the same at the same time: 1 to 5 percent
_UNFOLDED_CYCLES = 150.0  # of 64 queries, whose statistics the threads of wgmma read themselves

# Fitted to benchmarks/results.
_OVERLAP = 2.0  # exponent of the norm where a scheduler has two warps or more; with one it is 1, the sum
_ASYNCHRONOUS_OVERLAP = 4.0  # of wgmma and bulk copies
_DRAIN_CYCLES = 350.0  # of a barrier of all warps: the last one ends, and all begin again
_WARPGROUP_BARRIER_CYCLES = 175.0  # of both computing warpgroups, whose wgmma go on meanwhile
_ADDING_CYCLES = 200.0  # of 64 queries, whose dQ the threads of wgmma add themselves
_CONVERTED_BYTES_NS = 3.3  # of dQ in fp32, by an SM's one converting warp
_DELTA_BYTES_NS = 10.0  # of O and dO, by an SM's one warp that computes delta
_ROWS_IN_FLIGHT = {1: 1.0, 2: 0.8, 4: 0.65}  # what reading O and dO takes, by the rows that a thread loads at once
_LOAD_NS = 600.0  # of a tile that lies in L2, besides its bytes
_BLOCK_NS = 1700.0  # of a block's start and end, besides its bytes
_LAUNCHES_NS = 10_000.0  # of the three kernels
_REGISTERS_OVER_ESTIMATE = 1.25  # what ptxas takes, where it has not been asked

# In the order of proposals.
_ALIKE = 0.002  # so near are predicted times that mean the same
_REPEATED = 0.05  # so much slower each further one counts


@dataclass(frozen=True)
class Prediction:
    """What a configuration is predicted to take.

    Attributes:
        ms: All three kernels; of an emulated one it means nothing.
        cycles: Of the main kernel on the longest SM.
    """

    ms: float
    cycles: float


def ranked(problem: Problem, configs: Sequence[Config], device: Device, *, emulate: str | None = None) -> list[Config]:
    """Valid configurations in the order in which they are worth a try: by their predicted times, alike ones apart.

    Dozens that differ in what the model does not see have the same time. Each further one counts as some percent
    slower, so that the first few are not all of a kind.
    """
    met: Counter[int] = Counter()
    costs = []
    for prediction in _predict_all(problem, configs, device, emulate):
        cost = prediction.cycles if emulate else prediction.ms
        kind = round(math.log(cost) / _ALIKE)
        costs.append(cost * (1 + _REPEATED * met[kind]))
        met[kind] += 1
    return [configs[place] for place in sorted(range(len(configs)), key=costs.__getitem__)]


def _predict_all(
    problem: Problem, configs: Sequence[Config], device: Device, emulate: str | None
) -> Iterator[Prediction]:
    """`predict` of each: of a hundred thousand, a few thousand differ in what it sees."""
    needs = {
        name: itemgetter(*(parameter for parameter, one in family.parameters.items() if one.affects_validity))
        for name, family in FAMILIES.items()
    }
    blocks: dict[tuple[Any, ...], int] = {}
    predictions: dict[tuple[Any, ...], Prediction] = {}
    for config in configs:
        needing = (config.family, needs[config.family](vars(config)))
        if needing not in blocks:
            blocks[needing] = _resident_blocks(problem, config, device, None)
        work = config.tile_work(problem)
        seen = (work, blocks[needing], config.threads, config.block_q, config.block_kv)
        if seen not in predictions:
            predictions[seen] = _predict(problem, config, device, work, blocks[needing], 0, emulate)
        yield predictions[seen]


@dataclass(frozen=True)
class _Load:
    """Cycles that each unit of an SM works for one tile of scores.

    Attributes:
        tensor: The tensor cores.
        shared: Shared memory.
        cores: What computes P and dS.
    """

    tensor: float = 0.0
    shared: float = 0.0
    cores: float = 0.0

    def __add__(self, other: _Load) -> _Load:
        return _Load(self.tensor + other.tensor, self.shared + other.shared, self.cores + other.cores)

    def cycles(self, overlap: float) -> float:
        """Of all units together."""
        return _norm(overlap, self.tensor, self.shared, self.cores)


def predict(
    problem: Problem,
    config: Config,
    device: Device,
    resources: CompiledResources | None = None,
    *,
    emulate: str | None = None,
) -> Prediction:
    """How long a valid configuration takes, as far as arithmetic tells.

    Args:
        problem: What is computed.
        config: A configuration that is valid for it on the device.
        device: The card.
        resources: What the compiler made of it; None estimates the registers, and takes it to spill nothing.
        emulate: The card whose pace it is slowed to: a key of `gen.emulation.EMULATED_CARDS`.
    """
    blocks = _resident_blocks(problem, config, device, resources)
    spill_bytes = resources.spill_bytes if resources else 0
    return _predict(problem, config, device, config.tile_work(problem), blocks, spill_bytes, emulate)


def _predict(
    problem: Problem,
    config: Config,
    device: Device,
    work: TileWork,
    blocks: int,
    spill_bytes: int,
    emulate: str | None,
) -> Prediction:
    """The same, with ``blocks`` on an SM at a time. Of the configuration, its tile and its threads alone are seen."""
    clock_ghz = device.boost_clock_ghz
    sm = _Sm(
        blocks=blocks,
        warps=blocks * config.threads // 32,
        mma_clocks=_mma_clocks(device, emulate),
        peak_flops=_peak_flops(device),
        clock_ghz=clock_ghz,
        spills=_Load(shared=spill_bytes * config.threads / _SHARED_BYTES),
    )
    # Nobody waits for what is added to dQ, until there is more of it than L2 takes.
    adds_per_clock = _ADDS[work.dq_vector] if work.dq_vector else _BULK_ADDS
    adding = config.block_q * problem.head_dim / work.blocks / adds_per_clock
    if problem.bias_is_summed and not problem.deterministic and problem.bias_shape[2] > 1:
        adding += config.block_q * config.block_kv / work.blocks / _ADDS[_BIAS_VECTOR]
    tile = _norm(_ASYNCHRONOUS_OVERLAP, _tile_cycles(problem, config, work, sm), adding)
    # K, V, dK and dV of a block.
    key_tile_bytes = 2 * config.block_kv * (problem.head_dim + problem.head_dim_v) * problem.element_bytes / work.blocks
    block = clock_ghz * (_BLOCK_NS + key_tile_bytes * device.sm_count / device.bandwidth_tb_s / 1000)
    block -= work.skipped_tiles * tile
    cycles = _grid_cycles(problem, config, device.sm_count // work.blocks, blocks, tile, block)
    if work.one_warp_converts:
        converted = problem.query_elements * ACCUMULATOR_BYTES / device.sm_count / _CONVERTED_BYTES_NS * clock_ghz
        cycles = _norm(_OVERLAP, cycles, converted)
    if work.computes_delta:
        read = _delta_bytes(problem) / device.sm_count / _DELTA_BYTES_NS * clock_ghz
        cycles = _norm(_OVERLAP, cycles, read)
    passes_ms = _passes_ms(problem, device, work)
    if problem.bias:
        bias_bytes, summed_bytes = _bias_bytes(problem)
        cycles = _norm(_OVERLAP, cycles, bias_bytes / device.bandwidth_tb_s / 1000 * clock_ghz)
        passes_ms += summed_bytes / device.bandwidth_tb_s / 1e9
    return Prediction(cycles / clock_ghz / 1e6 + passes_ms, cycles)


@dataclass(frozen=True)
class _Sm:
    """An SM and the kernel on it.

    Attributes:
        blocks: That it has at a time.
        warps: Of all of them.
        mma_clocks: Of a sub-partition for an ``mma.sync``, with its dummies if another card is emulated.
        peak_flops: Of all its tensor cores in a clock.
        clock_ghz: Its clock.
        spills: What a tile spills.
    """

    blocks: int
    warps: int
    mma_clocks: float
    peak_flops: float
    clock_ghz: float
    spills: _Load

    @property
    def cycles_per_mma(self) -> float:
        """Of the sub-partitions that have warps."""
        return self.mma_clocks / min(Device.sub_partitions_per_sm, self.warps)

    @property
    def overlap(self) -> float:
        """Exponent of the norm: more warps a scheduler cover each other's waits."""
        return min(max(self.warps / Device.sub_partitions_per_sm, 1.0), _OVERLAP)

    def load_cycles(self, problem: Problem, block_q: int) -> float:
        """Until Q and dO have arrived."""
        columns = problem.head_dim + problem.head_dim_v
        return _LOAD_NS * self.clock_ghz + block_q * columns * problem.element_bytes / _TILE_BYTES


def _tile_cycles(problem: Problem, config: Config, work: TileWork, sm: _Sm) -> float:
    """Of an SM, for one tile of scores."""
    phases = [_load(problem, config, work, phase, sm) for phase in work.phases]
    overlap = _ASYNCHRONOUS_OVERLAP if work.asynchronous else sm.overlap
    side_by_side = functools.reduce(_Load.__add__, phases, sm.spills).cycles(overlap)
    if work.block_barriers:
        alone = sum(phase.cycles(overlap) for phase in phases) + sm.spills.shared + work.block_barriers * _DRAIN_CYCLES
        alone += _wait_for_load(problem, config, work, sm, alone)
        # Barriers keep the phases of one block apart, but not from those of another.
        return side_by_side + (alone - side_by_side) / sm.blocks
    cycles = side_by_side
    if work.in_step and sm.blocks == 1 and sm.warps > Device.sub_partitions_per_sm:
        cycles *= _UNSTAGGERED
    cycles += _wait_for_load(problem, config, work, sm, cycles)
    cycles += _UNFOLDED_CYCLES * work.statistics_rows / 64
    cycles += _ADDING_CYCLES * work.added_rows / 64
    return cycles + work.warpgroup_barriers * _WARPGROUP_BARRIER_CYCLES


def _load(problem: Problem, config: Config, work: TileWork, phase: Phase, sm: _Sm) -> _Load:
    """Of each unit."""
    scores = config.block_q * config.block_kv // work.blocks
    if work.asynchronous:
        tensor = 2 * scores * phase.products / sm.peak_flops
    else:
        tensor = scores * phase.products / MMA_PRODUCTS * sm.cycles_per_mma
    shared = phase.fragments * _FRAGMENT_WAVEFRONTS + phase.shared_bytes / _SHARED_BYTES + phase.copied_rows
    return _Load(tensor, shared, _score_cycles(problem, scores) if phase.computes_scores else 0.0)


def _wait_for_load(problem: Problem, config: Config, work: TileWork, sm: _Sm, tile_cycles: float) -> float:
    """Cycles until Q and dO are there, which other tiles do not cover."""
    if work.tiles_ahead is None:
        return 0.0
    return max(sm.load_cycles(problem, config.block_q) - work.tiles_ahead * tile_cycles, 0.0)


def _norm(exponent: float, *cycles: float) -> float:
    return float(sum(part**exponent for part in cycles) ** (1 / exponent))


def _score_cycles(problem: Problem, scores: int) -> float:
    lanes = _SCORE_LANES + problem.softcap * _CAP_LANES
    return scores * (lanes / _LANES + (1 + problem.softcap) / _EXPONENTIALS)


def _mma_clocks(device: Device, emulate: str | None) -> float:
    """Of a sub-partition; at the card's stated peak where nobody has measured it."""
    if emulate:
        return emulation(emulate, device).clocks_per_mma
    return device.clocks_per_mma or 2 * MMA_PRODUCTS * device.sub_partitions_per_sm / _peak_flops(device)


def _peak_flops(device: Device) -> float:
    """Of an SM in a clock."""
    return device.peak_tflops * 1000 / device.boost_clock_ghz / device.sm_count


def _resident_blocks(problem: Problem, config: Config, device: Device, resources: CompiledResources | None) -> int:
    if config.divides_registers:
        return 1
    needs = config.estimate(problem)
    if resources:
        used = needs.compiled(resources.registers, resources.shared_memory_bytes)
    else:
        registers = math.ceil(needs.registers * _REGISTERS_OVER_ESTIMATE)
        used = needs.compiled(min(registers, config.register_limit(device)), 0)
    return max(device.blocks_per_sm(**vars(used)), 1)


@functools.lru_cache(maxsize=64)
def _grid(problem: Problem, block_q: int, block_kv: int) -> tuple[int, int, int, int]:
    """Of the main kernel's blocks: their number, their tiles of scores in all, and the fewest and the most of one."""
    blocks = tiles = 0
    shortest, longest = math.inf, 0
    group = problem.heads_q // problem.heads_kv
    for (seqlen_q, seqlen_kv), count in Counter(problem.lengths).items():
        met = query_tiles_met(problem, block_q, block_kv, seqlen_q, seqlen_kv)
        blocks += count * problem.heads_kv * len(met)
        tiles += count * problem.heads_q * sum(met)
        shortest, longest = min(shortest, group * min(met, default=0)), max(longest, group * max(met, default=0))
    return blocks, tiles, int(min(shortest, longest)), longest


def _grid_cycles(problem: Problem, config: Config, sm_count: int, resident: int, tile: float, block: float) -> float:
    """Of the longest SM: its share of all tiles and blocks, and what is left to do where it does not divide evenly.

    Blocks with the most tiles start first where a mask makes them differ: the last ones are the shortest.
    """
    blocks, tiles, shortest, longest = _grid(problem, config.block_q, config.block_kv)
    places = sm_count * resident
    share = (tiles * tile + blocks * block / resident) / sm_count  # another block's tiles cover a start and an end
    unfilled = ceil_div(blocks, places) - blocks / places
    return max(share + unfilled * (shortest * tile * resident + block), longest * tile * resident + block)


def _bias_bytes(problem: Problem) -> tuple[int, int]:
    """What a bias and its gradient are to DRAM: in the main kernel, and in the passes that clear and sum."""
    if not problem.bias_grad:
        return problem.bias_bytes, 0
    if not problem.bias_is_summed:
        return 2 * problem.bias_bytes, 0
    if problem.deterministic:
        scores = problem.heads_q * problem.query_key_pairs * problem.element_bytes
        return problem.bias_bytes + scores, scores + problem.bias_bytes
    sums = math.prod(problem.bias_shape) * ACCUMULATOR_BYTES
    return problem.bias_bytes, 2 * sums + problem.bias_bytes


def _delta_bytes(problem: Problem) -> int:
    """What delta is computed from: O and dO."""
    return problem.output_elements * 2 * problem.element_bytes


def _passes_ms(problem: Problem, device: Device, work: TileWork) -> float:
    """Before and after: delta is computed and dQ's accumulator cleared; it is read and dQ written. DRAM bounds both.

    What the main kernel does itself is left out.
    """
    moved = 0.0 if work.computes_delta else _delta_bytes(problem) * _ROWS_IN_FLIGHT[work.preprocess_rows]
    if not work.converts_dq:
        moved += problem.query_elements * (problem.element_bytes + 2 * ACCUMULATOR_BYTES)
    return moved / device.bandwidth_tb_s / 1e9 + _LAUNCHES_NS / 1e6
