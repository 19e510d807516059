"""Training on several processes: data parallel, sharded, and with a sequence in parts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import distributed_ranks
import pytest
import torch


@pytest.mark.slow
def test_on_cpus(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the ranks take the GPU where there is one")
    run_ranks(["ddp", "fsdp2"], 2, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("way", distributed_ranks.WAYS)
def test_on_gpus(way: str, count: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    run_ranks([way], count, tmp_path)


def run_ranks(ways: list[str], count: int, tmp_path: Path) -> None:
    """Fails where a rank does: its gradients are not PyTorch's, or not our kernel's."""
    command = [sys.executable, distributed_ranks.__file__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(tmp_path / "store"), *ways],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * count, "\n".join(said)
