"""Starts the processes that verify and time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from ...db.records import Environment
from ...gen.device import Device
from ...gen.errors import UsageError
from ...runtime.gpu import current_device, environment, gpu_count, gpu_key, gpu_uuid
from .gpu_client import Worker
from .gpu_lock import gpu_lock

ALL_GPUS = "all"


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


def selected_gpus(gpus: str, notice: Callable[[str], None]) -> list[int]:
    """The GPUs of this machine that a person means, by CUDA's numbers (`CUDA_VISIBLE_DEVICES` applies).

    Args:
        gpus: ``all`` that are of one kind with the first, or numbers between commas.
        notice: Is told what is left out.

    Raises:
        UsageError: It says neither, or names GPUs of several kinds.
        NoGpuError: There is no such GPU.
    """
    if gpus == ALL_GPUS:
        indices = list(range(gpu_count()))
    elif re.fullmatch(r"\d+(,\d+)*", gpus, re.ASCII):
        indices = list(dict.fromkeys(map(int, gpus.split(","))))
    else:
        raise UsageError(f"cannot use GPUs {gpus!r}: write all, or their numbers, such as 0,1,3")
    keys = {index: gpu_key(current_device(index)) for index in indices}
    alike = [index for index in indices if keys[index] == keys[indices[0]]]
    for index in indices:
        if index not in alike:
            other = f"GPU {index} is a {keys[index].name}, GPU {indices[0]} a {keys[indices[0]].name}"
            if gpus != ALL_GPUS:
                raise UsageError(f"{other}: times of different cards cannot be compared")
            notice(f"{other}: it is left out")
    return alike


@contextmanager
def workers_of(indices: Sequence[int], notice: Callable[[str], None]) -> Iterator[dict[str, Worker]]:
    """A process for each of several GPUs of this machine, by a name for people; each sees its GPU alone.

    While they are open nobody else measures on these GPUs: others wait.

    Args:
        indices: The GPUs, by CUDA's numbers.
        notice: Is told whom it waits for.
    """
    uuids = {index: gpu_uuid(index) for index in indices}
    with ExitStack() as stack:
        for uuid in sorted(uuids.values()):  # in one order, so that no two searches wait for each other
            stack.enter_context(gpu_lock(uuid, notice))
        yield {f"GPU {index}": stack.enter_context(Worker(gpu=uuid)) for index, uuid in uuids.items()}
