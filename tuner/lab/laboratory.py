"""The process that verifies and times, and where it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...db.records import Environment
from ...gen.device import Device
from ...runtime.gpu import environment, gpu_uuid
from .gpu_client import Worker
from .gpu_lock import gpu_lock


@contextmanager
def laboratory(
    gpu: Device | None, toolkit: str, notice: Callable[[str], None]
) -> Iterator[tuple[Worker, Environment | None]]:
    """The process that owns the GPU, and where it measures; without a GPU, one that verifies on the CPU.

    While it is open no other laboratory measures on that GPU: others wait.

    Args:
        gpu: The current GPU, or None.
        toolkit: The version of nvcc.
        notice: Is told whom it waits for.
    """
    if gpu is None:
        with Worker("cpu") as worker:
            yield worker, None
        return
    with gpu_lock(gpu_uuid(0), notice), Worker() as worker:
        yield worker, environment(gpu, toolkit)
