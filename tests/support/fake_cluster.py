"""A Ray cluster of several nodes on one machine, whose GPUs are processes of `fake_gpus`, one a node."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import markupsafe._speedups
from fake_gpus import FakeGpu, make_card
from search_fakes import ENVIRONMENT, FakeBuilder

from bwdtune.gen.build.compile_step import RECORD_FILE, Record
from bwdtune.gen.build.jobs import Built
from bwdtune.gen.device import H200
from bwdtune.gen.render import Source
from bwdtune.tuner.lab.cluster import Card
from bwdtune.tuner.lab.protocol import Bench

LIBRARY = Path(markupsafe._speedups.__file__).read_bytes()
"""Of nothing that a GPU could run, but a library."""


def node() -> str:
    """The id of the node that this process is on."""
    import ray

    return ray.get_runtime_context().get_node_id()


@contextmanager
def open_card(folder: str) -> Iterator[tuple[Bench, Card]]:
    """A card of this node, in a folder that all of them share to tell the test what they run."""
    with FakeGpu(gpu=make_card(Path(folder), node())) as bench:
        yield bench, Card(node()[:8], node(), H200, ENVIRONMENT)


def compile_here(folder: str, source: Source, arch: str) -> Built:
    """Compiles nothing, and notes on which node that was."""
    (Path(folder) / f"{source.name}.{arch}.compiled").write_text(node())
    variant = FakeBuilder(machine_code=lambda _: None)(source, arch)
    record = Record(
        status="ok",
        error="",
        lasting=True,
        killed=False,
        library="kernel.so",
        library_sha256=hashlib.sha256(LIBRARY).hexdigest(),
        timeout_s=120.0,
        seconds=1.0,
        toolchain=variant.toolchain,
        kernels={"backward_kernel": variant.resources} if variant.resources else {},
    )
    variant = replace(variant, key=f"{source.hash}-{arch}-{variant.toolchain}")  # as a real one's begins
    return Built(variant, {"kernel.so": LIBRARY, RECORD_FILE: json.dumps(record.to_dict()).encode()})
