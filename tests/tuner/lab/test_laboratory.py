"""Which GPUs measure, and that each has a process of its own that sees it alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bwdtune.gen.device import H200, RTX_5090
from bwdtune.gen.errors import UsageError
from bwdtune.runtime.gpu import NoGpuError
from bwdtune.tuner.lab import laboratory
from bwdtune.tuner.lab.gpu_client import _run
from bwdtune.tuner.lab.laboratory import selected_gpus, workers_of

CARDS = [H200, replace(H200, sm_count=130), RTX_5090, H200]


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one card that is another."""

    def current_device(index: int):
        if index >= len(CARDS):
            raise NoGpuError(f"there is no GPU {index}: the driver shows {len(CARDS)}")
        return CARDS[index]

    monkeypatch.setattr(laboratory, "gpu_count", lambda: len(CARDS))
    monkeypatch.setattr(laboratory, "current_device", current_device)
    monkeypatch.setattr(laboratory, "gpu_uuid", lambda index: f"GPU-{9 - index}")


def test_all_are_those_of_one_kind_with_the_first() -> None:
    notices: list[str] = []
    assert selected_gpus("all", notices.append) == [0, 1, 3]
    assert notices == ["GPU 2 is a NVIDIA GeForce RTX 5090, GPU 0 a NVIDIA H200: it is left out"]


@pytest.mark.parametrize(("text", "indices"), [("0", [0]), ("3,0,3", [3, 0]), ("2", [2])])
def test_gpus_are_named_by_number(text: str, indices: list[int]) -> None:
    assert selected_gpus(text, pytest.fail) == indices


@pytest.mark.parametrize("text", ["", "some", "0,", "0;1", "-1", "0-2", "٣"])
def test_what_names_no_gpus(text: str) -> None:
    with pytest.raises(UsageError, match="write all, or their numbers, such as 0,1,3"):
        selected_gpus(text, pytest.fail)


def test_cards_of_several_kinds_are_refused() -> None:
    with pytest.raises(UsageError, match=r"GPU 2 is a .*5090, GPU 1 a .*H200: times of different cards"):
        selected_gpus("1,2", pytest.fail)


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(NoGpuError, match="there is no GPU 7"):
        selected_gpus("0,7", pytest.fail)


def test_a_process_each_and_a_lock_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The locks are taken in one order, whatever that of the GPUs is: no two searches wait for each other."""
    locked: list[str] = []
    lock = laboratory.gpu_lock

    def recording(uuid, notice):
        locked.append(uuid)
        return lock(uuid, notice, tmp_path)

    monkeypatch.setattr(laboratory, "gpu_lock", recording)
    with workers_of([0, 3], pytest.fail) as workers:
        assert {name: worker._gpu for name, worker in workers.items()} == {"GPU 0": "GPU-9", "GPU 3": "GPU-6"}
        assert locked == ["GPU-6", "GPU-9"]
        assert {path.name for path in tmp_path.glob("*.holder")} == {f"bwdtune-{uuid}.holder" for uuid in locked}
    assert not list(tmp_path.glob("*.holder"))


def test_a_process_sees_its_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from bwdtune.tuner.lab import gpu_worker

    seen = []
    monkeypatch.setattr(gpu_worker, "main", lambda *rest: seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    _run(None, "cuda:0", None, "log")  # type: ignore[arg-type]
    _run(None, "cuda:0", "GPU-9", "log")  # type: ignore[arg-type]
    assert seen == ["0,1", "GPU-9"]
