"""A CPU in the place of the GPU, and winners in the database."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from operator_kernels import Kernels

from bwdtune.db.records import Environment, GpuKey, MeasurementRecord, VariantRecord, VerificationRecord
from bwdtune.db.store import Store
from bwdtune.gen.device import HOST, Device
from bwdtune.gen.families import PRESETS, Config
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render, template_hash
from bwdtune.runtime import attention as attention_module
from bwdtune.runtime import dispatch, gpu
from bwdtune.runtime.dispatch import notices
from bwdtune.runtime.forwards import operators
from bwdtune.runtime.operator import native

StoreWinner = Callable[..., None]


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test stored, another must not see; nor what was said. Kernels are compiled in the call that asks."""
    monkeypatch.setenv("BWDTUNE_ON_MISS", "wait")
    dispatch.forget()
    notices.forget()
    yield
    dispatch.forget()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Dispatch to the CPU: winners for it are compiled as plain C++, and launched by Python as without the operator."""
    monkeypatch.setattr(gpu, "current_device", lambda index: HOST)
    monkeypatch.setattr(attention_module, "_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(operators, "ready", lambda: False)
    return HOST


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """The operator on the CPU, with a right kernel for every problem."""
    monkeypatch.setattr(native, "DEVICE_TYPES", ["cpu"])
    found = Kernels()
    monkeypatch.setattr(dispatch, "choose", found.choose)
    yield found
    found.native.forget()


@pytest.fixture(params=["operator", "Python"])
def ours(kernels: Kernels, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Kernels:
    """The CPU in the place of a GPU; through the operator, or as where that cannot be built."""
    monkeypatch.setattr(attention_module, "_DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(operators, "ready", lambda: request.param == "operator")
    return kernels


@pytest.fixture
def store_winner() -> StoreWinner:
    """Stores a winner as a search does."""

    def store(
        problem: Problem,
        config: Config = PRESETS["v2"],
        *,
        device: Device = HOST,
        key: GpuKey | None = None,
        limits: str | None = None,
        source_hash: str = "",
    ) -> None:
        opened = Store.open()
        try:
            environment = Environment(key or gpu.gpu_key(device), device.arch, "580", "13.0", "2.9")
            variant = VariantRecord(
                config, source_hash or render(problem, config).hash, template_hash(config.family), device.arch, "13.0"
            )
            variant_id = opened.record_variant(problem, variant)
            verification = opened.record_verification(problem, variant_id, VerificationRecord(True, 0.003))
            time = MeasurementRecord(environment, "policy", 2.0, 1.9, 2.1, 20, limits=limits)
            measurement = opened.record_measurement(problem, variant_id, time)
            assert opened.set_winner(problem, environment, limits, measurement, verification)
        finally:
            opened.close()

    return store
