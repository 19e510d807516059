"""Builds that are only measured: another card's pace, and cycles counted in the kernel."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from compiled_code import libraries

from bwdtune.gen.build.jobs import build_one
from bwdtune.gen.build.toolchain import find_nvcc
from bwdtune.gen.device import H200, HOST
from bwdtune.gen.emulation import emulation
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render
from bwdtune.runtime.gpu import current_device
from bwdtune.runtime.kernel import Kernel
from bwdtune.runtime.verification.verifier import Verifier
from bwdtune.tuner.lab.gpu_client import Worker
from bwdtune.tuner.lab.timing import SEARCH_POLICY
from bwdtune.tuner.search.gates import EMULATED_SPILL_BOUND_BYTES
from bwdtune.tuner.search.tensor_activity import tensor_activity

pytestmark = pytest.mark.slow

SEED = Problem.parse("8_16_4096_128", causal=True)
SMALL = Problem.parse("1_2_256_64", causal=True)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_emulated_presets_spill_little(dtype: str) -> None:
    """v1 is left out, which spills as it is. v2 uses all registers, and the spare accumulators are eight more."""
    problem = Problem.parse("8_16_4096_128", dtype=dtype, causal=True)
    names = ("v2", "v3")
    sources = [render(problem, PRESETS[name], emulate="sm_120") for name in names]
    for name, library in zip(names, libraries(sources, H200.arch), strict=True):
        assert library.resources.spill_bytes <= (0 if name == "v3" else EMULATED_SPILL_BOUND_BYTES)
        assert library.info["counts_cycles"]


@pytest.mark.compiled
def test_counting_cycles_takes_no_register_of_the_kernel() -> None:
    sources = [render(SEED, PRESETS["v2"], cycles=cycles) for cycles in (False, True)]
    plain, probed = libraries(sources, H200.arch)
    assert probed.resources.spill_bytes == plain.resources.spill_bytes == 0


def test_each_mma_has_its_dummies(tmp_path: Path) -> None:
    """In PTX; that ptxas keeps them is seen on a card alone, by the pace."""
    counts = []
    for emulate in (None, "sm_120"):
        source = tmp_path / "kernel.cu"
        source.write_text(render(SMALL, PRESETS["v3"], emulate=emulate).text)
        command = [find_nvcc().nvcc, "-ptx", "-std=c++17", "-arch=compute_90a", "-o", tmp_path / "kernel.ptx", source]
        subprocess.run(command, check=True, capture_output=True)
        ptx = (tmp_path / "kernel.ptx").read_text()
        counts.append([len(re.findall(rf"mma\.sync\S*\.{kind}\s", ptx)) for kind in ("bf16.f32", "f16.f16.f16.f16")])
    (real, none), (still_real, dummies) = counts
    assert none == 0
    assert still_real == real
    assert dummies == 4 * real


@pytest.mark.parametrize("build_of", [{"emulate": "sm_120"}, {"cycles": True}], ids=["emulated", "counting"])
def test_the_results_are_right_and_the_cycles_are_there(build_of: dict) -> None:
    library = build_one(render(SMALL, PRESETS["v3"], **build_of), HOST.arch).library
    assert library
    kernel = Kernel.load(library)
    verdict = Verifier("cpu").verify(SMALL, kernel)
    assert verdict.passed, verdict.reason

    q = torch.randn(SMALL.batch, SMALL.heads_q, SMALL.seqlen_q, SMALL.head_dim).bfloat16()
    lse = torch.zeros(q.shape[:3])
    workspace = torch.full((kernel.workspace_bytes(1, 2, 2, 256, 256) + 64,), 0xFF, dtype=torch.uint8)
    launch = kernel.prepare(q, q, q, q, q, lse, *map(torch.empty_like, (q, q, q)), scale=0.1, workspace=workspace)
    counts = []
    for _ in range(2):
        launch()
        counts.append(launch.cycles())
    assert all(0 < count < 60e9 for count in counts), "nanoseconds here"
    assert counts[0] != counts[1]


def test_a_kernel_that_is_used_counts_nothing() -> None:
    library = build_one(render(SMALL, PRESETS["v3"]), HOST.arch).library
    assert library
    assert not Kernel.load(library).counts_cycles


@pytest.mark.gpu
def test_an_h200_keeps_a_5090s_pace() -> None:
    """The dummies are there, as ptxas and the card see them: v3 takes two to three times as many cycles."""
    device = current_device()
    if device.clocks_per_mma is None or device.arch != H200.arch:
        pytest.skip(f"{device.name} emulates nothing")
    counted = {}
    with Worker() as worker:
        for emulate in (None, "sm_120"):
            source = render(SEED, PRESETS["v3"], emulate=emulate, card=device, cycles=True)
            variant = build_one(source, device.arch)
            assert worker.verify(SEED, variant).passed
            counted[emulate] = worker.time(SEED, [variant], (), SEARCH_POLICY).cycles[PRESETS["v3"].id].median
    assert counted["sm_120"] > 1.8 * counted[None]
    pace = emulation("sm_120", device)
    activity = tensor_activity(
        SEED, PRESETS["v3"], device, cycles=counted["sm_120"], clocks_per_mma=pace.clocks_per_mma
    )
    assert 0.65 < activity < 0.9
