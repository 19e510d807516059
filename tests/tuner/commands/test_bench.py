from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from rich.console import Console

from bwdtune.db.records import Environment, GpuKey, MeasurementRecord, VariantRecord, VerificationRecord
from bwdtune.db.store import Store
from bwdtune.gen.build.jobs import CompiledResources, Variant
from bwdtune.gen.build.jobs import build as real_build
from bwdtune.gen.build.toolchain import find_nvcc
from bwdtune.gen.device import H200, HOST, RTX_5090, Device
from bwdtune.gen.errors import UsageError
from bwdtune.gen.families import FAMILIES, PRESETS, Config, MmaConfig
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import Source, render, template_hash
from bwdtune.runtime.gpu import current_device, environment
from bwdtune.tuner.commands import bench as module
from bwdtune.tuner.commands.bench import DEFAULT_KERNELS, BenchReport, bench
from bwdtune.tuner.lab.gpu_client import Worker
from bwdtune.tuner.lab.protocol import CandidateError
from bwdtune.tuner.lab.timing import BENCH_POLICY, Cycles, Policy, Timing, Timings

SEED = Problem.parse("8_16_4096_128", causal=True)
ENVIRONMENT = Environment(GpuKey("NVIDIA H200", "9.0"), "sm_90a", "580.65.06", "13.0.88", "2.11.0")
V1, V2, V3 = (PRESETS[name] for name in ("v1", "v2", "v3"))
SPECIAL = replace(V3, dq_vector=4)
TIMES_MS = {"cudnn": 9.5079, "fa": 8.5584, V1.id: 10.3287, V2.id: 9.5374, V3.id: 8.5866, SPECIAL.id: 8.5}
GOOD = VerificationRecord(True, 0.0025)


@dataclass
class FakeWorker:
    """Answers from tables, and keeps what it was asked to time."""

    verdicts: dict[str, VerificationRecord | CandidateError] = field(default_factory=dict)
    crashing: dict[str, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    races: list[list[str]] = field(default_factory=list)

    def verify(self, problem: Problem, variant: Variant) -> VerificationRecord:
        verdict = self.verdicts.get(variant.source.config.id, GOOD)
        if isinstance(verdict, CandidateError):
            raise verdict
        return verdict

    def verify_at(self, problem: Problem, variant: Variant) -> VerificationRecord:
        return replace(GOOD, max_error=0.002)

    def time(self, problem: Problem, variants: Sequence[Variant], peers: Sequence[str], policy: Policy) -> Timings:
        assert policy == BENCH_POLICY
        names = [*(variant.source.config.id for variant in variants), *peers]
        self.races.append(names)
        for name, reason in self.crashing.items():
            if name in names:
                raise CandidateError(reason, name)
        present = {name: TIMES_MS[name] for name in names if name not in self.unavailable}
        timings = {name: Timing(ms, ms * 0.99, ms * 1.01, 40) for name, ms in present.items()}
        probed = [variant.source.config.id for variant in variants if variant.source.probed]
        cycles = {
            name: Cycles(TIMES_MS[name] * 3e6, TIMES_MS[name] * 2.9e6, TIMES_MS[name] * 3.1e6, 30) for name in probed
        }
        return Timings(timings, 1700.0, "the GPU is busy", self.unavailable, cycles)


@pytest.fixture(autouse=True)
def compiled(monkeypatch) -> list[Config]:
    """Stands in for the compiler; v1 spills. Returns what was compiled."""
    configs: list[Config] = []

    def build(sources, arch, cache=None):
        configs.extend(source.config for source in sources)
        return [variant(source, arch) for source in sources]

    def variant(source: Source, arch: str) -> Variant:
        spills = source.config == V1 or (source.config.to_dict().get("stages") == 3 and arch == RTX_5090.arch)
        figures = CompiledResources(255, 40 if spills else 0, 0, 0, 1)
        return Variant(source, arch, None, "key", "13.0.88", figures, "ok", "", None, 5.0, False)

    monkeypatch.setattr(module, "build", build)
    return configs


@pytest.fixture
def store(tmp_path) -> Callable[[], AbstractContextManager[Store]]:
    """A database in which a variation of v3 has won."""
    path = tmp_path / "bwdtune.sqlite"
    with closing(Store.open(path)) as store:
        for config, ms in ((V2, 9.5), (SPECIAL, 8.5)):
            record = VariantRecord(config, render(SEED, config).hash, template_hash(config.family), "sm_90a", "13.0.88")
            variant_id = store.record_variant(SEED, record)
            verification_id = store.record_verification(SEED, variant_id, GOOD)
            measurement = MeasurementRecord(ENVIRONMENT, "race", ms, ms, ms, 40)
            measurement_id = store.record_measurement(SEED, variant_id, measurement)
            store.set_winner(SEED, ENVIRONMENT, None, measurement_id, verification_id)
    return lambda: closing(Store.open(path, read_only=True))


def no_store() -> AbstractContextManager[Store]:
    return closing(Store.open(read_only=True))


def run(kernels: Sequence[str], worker: FakeWorker | None = None, open_store=no_store, **options) -> BenchReport:
    options = {"device": H200, "environment": ENVIRONMENT, "command_line": "tuner bench", **options}
    return bench(SEED, kernels, worker=worker or FakeWorker(), open_store=open_store, **options)


def shown(report: BenchReport) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(report.table())
    return capture.get()


def test_the_write_ups_table():
    other = replace(ENVIRONMENT, gpu=GpuKey(RTX_5090.name, "12.0"), arch="sm_120a")
    report = run(["cudnn", "fa", "v1", "v2", "v3"], device=RTX_5090, environment=other)
    expected = {  # TFLOPS and % of peak, as the write-up has them
        "cudnn": (144.55, 69.00),
        "fa": (160.59, 76.65),
        "v1": (133.07, 63.52),
        "v2": (144.10, 68.78),
        "v3": (160.06, 76.40),
    }
    rows = report.to_dict()["rows"]
    assert [row["kernel"] for row in rows] == list(expected)
    for row in rows:
        tflops, percent = expected[row["kernel"]]
        assert row["tflops"] == pytest.approx(tflops, abs=0.01)
        assert row["percent_of_peak"] == pytest.approx(percent, abs=0.01)
    text = shown(report)
    for cell in ("F.sdpa() (cuDNN)", "F.sdpa() (Flash Attention)", "8.5866 ms", "160.06", "76.40%", "0.00250"):
        assert cell in text


def test_json_keeps_its_names():
    report = run(["cudnn", "v3"], command_line="tuner bench --shape 8_16_4096_128 --causal").to_dict()
    head = {key: report[key] for key in ("gpu", "driver", "torch", "nvcc", "shape", "causal", "dtype")}
    assert head == {
        "gpu": "NVIDIA H200",
        "driver": "580.65.06",
        "torch": "2.11.0",
        "nvcc": "13.0.88",
        "shape": "8_16_4096_128",
        "causal": True,
        "dtype": "bf16",
    }
    assert (report["limits"], report["emulate"]) == (None, None)
    assert report["command"] == "tuner bench --shape 8_16_4096_128 --causal"
    assert report["notices"] == ["the GPU is busy"]
    peer, ours = report["rows"]
    assert (peer["kernel"], peer["config"], peer["family"], peer["max_error"]) == ("cudnn", None, None, None)
    assert (ours["kernel"], ours["config"], ours["family"]) == ("v3", V3.id, "mma")
    assert (ours["ms"], ours["max_error"]) == (8.5866, 0.0025)
    json.dumps(report, allow_nan=False)


def test_all_are_raced_in_one_run():
    worker = FakeWorker()
    run(["cudnn", "v3", "fa", "v1"], worker)
    assert worker.races == [[V3.id, V1.id, "cudnn", "fa"]]


def test_stored_kernels_are_looked_up(store):
    rows = run(["best", "mma", "v3"], open_store=store).rows
    assert [row.config for row in rows] == [SPECIAL, SPECIAL, V3]
    assert [row.ms for row in rows] == [8.5, 8.5, 8.5866]


def test_another_cards_results_do_not_count(store):
    other = replace(ENVIRONMENT, gpu=GpuKey("NVIDIA H100 80GB HBM3", "9.0"))
    best, family, preset = run(["best", "mma", "v3"], open_store=store, environment=other).rows
    for row in (best, family):
        assert row.config is None
        assert row.ms is None
        assert "run tuner search" in row.note
    assert preset.ms == 8.5866


def test_without_a_database_the_others_are_timed():
    best, preset = run(["best", "v3"]).rows
    assert best.ms is None
    assert best.note
    assert preset.ms == 8.5866


def test_a_peer_that_does_not_run_has_its_reason():
    report = run(["cudnn", "v3"], FakeWorker(unavailable={"cudnn": "RuntimeError: No available kernel"}))
    assert report.rows[0].ms is None
    assert report.rows[0].note == "RuntimeError: No available kernel"
    assert report.rows[1].ms == 8.5866
    assert "No available kernel" in shown(report)


@pytest.mark.parametrize(
    ("verdict", "note"),
    [
        (VerificationRecord(False, 0.4, reason="the relative error of dq is 0.4"), "wrong: the relative error of dq"),
        (CandidateError("its process died of SIGSEGV", V2.id), "died of SIGSEGV"),
    ],
    ids=["wrong", "crash"],
)
def test_what_fails_verification_is_not_timed(verdict, note):
    worker = FakeWorker({V2.id: verdict})
    rows = run(["v2", "v3"], worker).rows
    assert note in rows[0].note
    assert rows[0].ms is None
    assert worker.races == [[V3.id]]


def test_an_infinite_error_is_still_json():
    report = run(["v2"], FakeWorker({V2.id: VerificationRecord(False, math.inf, reason="not finite")}))
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_crash_in_the_race_costs_one_row():
    worker = FakeWorker(crashing={V1.id: "an illegal memory access"})
    rows = run(["v1", "v3", "fa"], worker).rows
    assert rows[0].note == "an illegal memory access"
    assert [row.ms for row in rows] == [None, 8.5866, 8.5584]
    assert len(worker.races) == 2


def test_a_crash_of_nobody_known_ends_the_race():
    worker = FakeWorker()
    worker.time = lambda *_: (_ for _ in ()).throw(CandidateError("it hung: no answer in 120 s"))
    rows = run(["v1", "fa"], worker).rows
    assert [row.note for row in rows] == ["it hung: no answer in 120 s"] * 2


def test_what_does_not_fit_is_refused_before_it_is_compiled(compiled):
    wide = replace(V2, stages=3)
    rows = run([wide.id, "v3"], limits="sm_120").rows
    assert "shared memory" in rows[0].note
    assert rows[1].ms == 8.5866
    assert compiled == [V3]


def test_limits_are_told_unless_they_are_the_cards_own():
    assert run(["v3"], limits="sm_120").to_dict()["limits"] == "sm_120"
    other = replace(ENVIRONMENT, gpu=GpuKey(RTX_5090.name, "12.0"), arch="sm_120a")
    assert run(["v3"], limits="sm_120", device=RTX_5090, environment=other).limits is None


def test_what_does_not_compile_has_its_reason(monkeypatch):
    def build(sources, arch, cache=None):
        error = "ptxas ran out of registers"
        return [Variant(source, arch, None, "", "", None, "failed", error, None, 1.0, False) for source in sources]

    monkeypatch.setattr(module, "build", build)
    worker = FakeWorker()
    rows = run(["v2"], worker).rows
    assert "ran out of registers" in rows[0].note
    assert worker.races == []


def test_a_kernel_that_is_named_twice_has_one_row():
    assert [row.kernel for row in run(["v3", "v3", V3.id]).rows] == ["v3", V3.id]


@pytest.mark.parametrize(
    ("kernels", "options", "message"),
    [
        (["v9"], {}, r"unknown kernel 'v9': use default, cudnn, fa, v1, v2, v3, .*best, mma"),
        (["v3"], {"direction": "sideways"}, "unknown direction 'sideways': use backward, forward or both"),
        (["v3"], {"limits": "sm_75"}, "unknown limits 'sm_75'"),
        ([], {}, "no kernel is named"),
    ],
)
def test_wrong_use_is_one_line_before_anything_runs(compiled, kernels, options, message):
    worker = FakeWorker()
    with pytest.raises(UsageError, match=message) as caught:
        run(kernels, worker, **options)
    assert "\n" not in str(caught.value)
    assert not compiled
    assert not worker.races


def test_default_kernels_are_known():
    assert [row.kernel for row in run(DEFAULT_KERNELS).rows] == list(DEFAULT_KERNELS)


def real(device: Device, worker: Worker, toolkit: str) -> BenchReport:
    return bench(
        Problem.parse("1_2_96_64", causal=True),
        ["fa", "cudnn", "v3"],
        device,
        environment=environment(device, toolkit),
        worker=worker,
        open_store=no_store,
        command_line="tuner bench",
    )


@pytest.mark.slow
def test_a_real_worker_on_the_cpu(monkeypatch):
    monkeypatch.setattr(module, "build", real_build)
    with Worker("cpu") as worker:
        *peers, ours = real(HOST, worker, "g++").rows
    assert all("GPU only" in peer.note for peer in peers)
    assert ours.ms > 0
    assert ours.max_error < 0.02  # the case whose scores lie far below zero, where dQ all but cancels


@pytest.mark.slow
def test_cycles_of_a_real_worker_on_the_cpu(monkeypatch):
    monkeypatch.setattr(module, "build", real_build)
    problem = Problem.parse("1_2_65_64", causal=True)
    with Worker("cpu") as worker:
        report = bench(
            problem,
            ["v3"],
            HOST,
            environment=environment(HOST, "g++"),
            worker=worker,
            open_store=no_store,
            command_line="tuner bench",
            emulate="sm_120",
        )
    (row,) = report.rows
    assert row.note == ""
    assert row.cycles > 0
    assert row.counted.low <= row.cycles <= row.counted.high


# Another card's pace


@pytest.fixture
def emulated_store(store) -> Callable[[], AbstractContextManager[Store]]:
    """The same database, with emulated results beside: there v3 is best, and of its relation v2."""
    with store() as opened:
        path = opened.url.database
    with closing(Store.open(path)) as opened:
        for config, cycles in ((V2, 27e6), (V3, 25.5e6)):
            source = render(SEED, config, emulate="sm_120")
            record = VariantRecord(config, source.hash, template_hash(config.family), "sm_90a", "13.0.88")
            variant_id = opened.record_variant(SEED, record)
            verification_id = opened.record_verification(SEED, variant_id, GOOD)
            measurement = MeasurementRecord(
                ENVIRONMENT, "race", 1.0, 1.0, 1.0, 40, limits="sm_120", kind="emulated", cycles=cycles
            )
            measurement_id = opened.record_measurement(SEED, variant_id, measurement)
            opened.set_emulated_best(SEED, ENVIRONMENT, "sm_120", measurement_id, verification_id)
    return lambda: closing(Store.open(path, read_only=True))


def test_emulated_rows_have_cycles_and_no_time(emulated_store):
    report = run(["v2", "best", "mma"], open_store=emulated_store, emulate="sm_120")
    shown_as = report.to_dict()
    assert (shown_as["emulate"], shown_as["limits"]) == ("sm_120", "sm_120")
    assert [row["config"] for row in shown_as["rows"]] == [V2.id, V3.id, V3.id]
    for row in shown_as["rows"]:
        assert row["emulate"] == "sm_120"
        assert row["ms"] is row["tflops"] is row["percent_of_peak"] is None
        assert row["cycles"] == TIMES_MS[row["config"]] * 3e6
        assert 0 < row["tensor_activity"] < 1
    assert shown_as["rows"][1]["tensor_activity"] == pytest.approx(19.62 / 25.76, abs=1e-3)
    text = shown(report)
    for part in ("emulated: at the pace of sm_120", "best (emulated)", "25.760", "76.2%"):
        assert part in text
    json.dumps(shown_as, allow_nan=False)


def test_a_winner_is_not_the_best_emulated_one(store):
    best, family = run(["best", "mma"], open_store=store, emulate="sm_120").rows
    for row in (best, family):
        assert row.config is None
        assert "tuner search --emulate sm_120" in row.note


def test_the_best_emulated_one_is_no_winner(emulated_store):
    best, family = run(["best", "mma"], open_store=emulated_store, limits="sm_120").rows
    assert best.config is family.config is None


def test_what_spills_on_the_emulated_card_is_not_raced():
    spilling = replace(V3, stages=3)
    worker = FakeWorker()
    dropped, preset = run([spilling.id, "v1"], worker, emulate="sm_120").rows
    assert "sm_120a: 40 bytes of registers a thread are spilled" in dropped.note
    assert preset.cycles, "a preset is a point of reference"
    assert worker.races == [[V1.id]]


def test_nothing_is_emulated_on_the_card_itself():
    other = replace(ENVIRONMENT, gpu=GpuKey(RTX_5090.name, "12.0"), arch="sm_120a")
    report = run(["v3"], device=RTX_5090, environment=other, emulate="sm_120")
    assert (report.emulate, report.limits) == (None, None)
    assert report.rows[0].ms
    assert report.rows[0].cycles is None


def test_cycles_are_counted_where_they_are_asked_for():
    report = run(["v3", "cudnn"], cycles=True)
    ours, peer = report.to_dict()["rows"]
    assert (ours["ms"], ours["cycles"]) == (8.5866, 8.5866 * 3e6)
    assert ours["tensor_activity"] == pytest.approx(340_787_200 * 6.08 / (132 * 4 * 8.5866 * 3e6))
    assert (peer["cycles"], peer["tensor_activity"]) == (None, None)
    assert report.to_dict()["emulate"] is None
    assert any("count their cycles" in notice for notice in report.notices)
    assert "Mcycles" in shown(report)
    assert "Mcycles" not in shown(run(["v3", "cudnn"]))


@pytest.mark.parametrize(
    ("kernels", "options", "message"),
    [
        (["v1"], {"emulate": "sm_121"}, "unknown card to emulate 'sm_121': use sm_120"),
        (["v1"], {"emulate": "rtx_pro_6000", "device": RTX_5090}, "not twice as fast"),
        (["fa"], {"emulate": "sm_120"}, "fa is PyTorch's"),
        (["v1"], {"emulate": "sm_120", "device": replace(H200, clocks_per_mma=None)}, "is not known"),
    ],
)
def test_what_cannot_be_emulated_is_refused(compiled, kernels, options, message):
    with pytest.raises(UsageError, match=message):
        run(kernels, **options)
    assert not compiled


# Families


def test_families_of_one_group_have_one_name(store, monkeypatch):
    """A second template for the same instruction: its configurations are of the same group."""

    @dataclass(frozen=True, order=True)
    class Other(MmaConfig):
        family: ClassVar[str] = "mma2"
        group: ClassVar[str] = "mma"

    other = Other(block_q=64, block_kv=64, warps_per_row_group=4)
    monkeypatch.setitem(FAMILIES, "mma2", Other)
    monkeypatch.setattr(module, "GROUPS", (*module.GROUPS, "mma2"))
    monkeypatch.setitem(TIMES_MS, other.id, 7.0)
    with store() as opened:
        path = opened.url.database
    with closing(Store.open(path)) as opened:
        variant_id = opened.record_variant(
            SEED, VariantRecord(other, "source", template_hash("mma"), "sm_90a", "13.0.88")
        )
        opened.record_verification(SEED, variant_id, GOOD)
        opened.record_measurement(SEED, variant_id, MeasurementRecord(ENVIRONMENT, "race", 7.0, 7.0, 7.0, 40))
    with closing(Store.open(path, read_only=True)) as opened:
        found = module._stored(SEED, ["best", "mma", "mma2"], ENVIRONMENT, None, opened)
    assert found == {"best": SPECIAL, "mma": other, "mma2": other}


@pytest.mark.gpu
def test_a_real_race_on_the_gpu(monkeypatch):
    monkeypatch.setattr(module, "build", real_build)
    with Worker() as worker:
        *peers, ours = real(current_device(), worker, find_nvcc().version).rows
    assert ours.ms > 0
    assert ours.max_error < 0.02  # the case whose scores lie far below zero, where dQ all but cancels
    assert all((peer.ms is None) == bool(peer.note) for peer in peers)
