from __future__ import annotations

import json

import pytest
from rich.console import Console

from bwdtune.gen.device import HOST, RTX_5090, device_for_arch
from bwdtune.gen.errors import UsageError
from bwdtune.gen.problem import Problem
from bwdtune.runtime.gpu import NoGpuError
from bwdtune.tuner.commands.cards import described_card
from bwdtune.tuner.roofline import roofline

SEED = Problem.parse("8_16_4096_128", causal=True)


def rendered(table) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_it_is_the_appendix_c_of_the_write_up():
    result = roofline(SEED, RTX_5090)
    assert result.flops == 5 * 8 * 16 * 4096**2 * 128
    assert result.flops / 1e12 == pytest.approx(1.374, abs=5e-4)
    assert result.read_bytes / 1e6 == pytest.approx(673, abs=0.5)
    assert result.write_bytes / 1e6 == pytest.approx(403, abs=0.5)
    assert result.compute_ms == pytest.approx(6.56, abs=5e-3)
    assert result.memory_ms == pytest.approx(0.60, abs=5e-3)
    assert (result.bound, result.bound_ms) == ("compute", result.compute_ms)


def test_json_keeps_its_names():
    result = json.loads(json.dumps(roofline(SEED, RTX_5090).to_dict()))
    assert result["device"] == "NVIDIA GeForce RTX 5090"
    assert (result["shape"], result["causal"], result["dtype"]) == ("8_16_4096_128", True, "bf16")
    assert {"flops", "read_bytes", "write_bytes", "compute_ms", "memory_ms", "bound"} <= set(result)


def test_table_shows_the_write_ups_figures():
    text = rendered(roofline(SEED, RTX_5090).table())
    for figure in ("1.374 TFLOPs", "673.2 MB read", "402.7 MB written", "6.56 ms", "0.60 ms", "compute-bound"):
        assert figure in text


def test_full_mask_doubles_the_work_and_not_the_traffic():
    full = roofline(Problem.parse("8_16_4096_128"), RTX_5090)
    causal = roofline(SEED, RTX_5090)
    assert full.flops == 2 * causal.flops
    assert full.memory_ms == causal.memory_ms


def test_a_short_problem_is_bound_by_memory():
    result = roofline(Problem.parse("8_16_16_128"), RTX_5090)
    assert (result.bound, result.bound_ms) == ("memory", result.memory_ms)


def test_the_host_has_no_roofline():
    with pytest.raises(UsageError, match="no stated peak"):
        roofline(SEED, HOST)


def test_device_is_the_arch_then_the_gpu_then_the_5090(monkeypatch):
    assert described_card("sm_90a") is device_for_arch("sm_90a")
    monkeypatch.setattr("bwdtune.tuner.commands.cards.current_device", lambda: device_for_arch("sm_90a"))
    assert described_card(None).arch == "sm_90a"

    def no_gpu():
        raise NoGpuError("no GPU")

    monkeypatch.setattr("bwdtune.tuner.commands.cards.current_device", no_gpu)
    assert described_card(None) is RTX_5090
    with pytest.raises(UsageError, match="unknown arch"):
        described_card("sm_75")
