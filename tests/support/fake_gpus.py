"""GPU processes without a GPU: real ones that can be killed, whose cards differ in pace, and which keep what they ran.

A card is a file in a folder: ``FOLDER/NAME`` holds its pace, how many times as long as on the first card kernels take.
``FOLDER/NAME.dies`` has the process die at its next timing, ``FOLDER/NAME.holds`` has it wait for ever there, and
``FOLDER/NAME.gone`` has the card be no more to be found.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from landscape import PEER_MS, cost_ms

from bwdtune.db.records import VerificationRecord
from bwdtune.gen.families import parse_config
from bwdtune.tuner.lab.gpu_client import Worker
from bwdtune.tuner.lab.protocol import Answer, Request, Running
from bwdtune.tuner.lab.timing import Timing, Timings

ROUNDS = 40


class FakeGpu(Worker):
    """A worker whose process is a stand-in. Its GPU is the card's file."""

    @staticmethod
    def main(connection: Connection, device: str, gpu: str | None, log: str) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        card = Path(str(gpu))
        if card.with_suffix(".gone").exists():
            connection.send(Answer(fatal="the GPU has fallen off the bus"))
            return
        connection.send(Answer())
        while True:
            try:
                request: Request = connection.recv()
            except EOFError:
                return
            connection.send(Answer(result=_answer(card, connection, request)))


def make_card(folder: Path, name: str, pace: float = 1.0) -> str:
    """A card's file."""
    (folder / name).write_text(str(pace))
    return str(folder / name)


def ran_on(card: str) -> list[list[str]]:
    """What was timed together on a card, in order."""
    ran = Path(card).with_suffix(".ran")
    return [line.split("|") for line in ran.read_text().splitlines()] if ran.exists() else []


def _answer(card: Path, connection: Connection, request: Request) -> Any:
    _, libraries, *rest = request.arguments
    if request.method != "time":
        return VerificationRecord(True, 0.002, {"normal": {"dq": 0.002, "torch_dq": 0.002}})
    peers = rest[0]
    connection.send(Running(next(iter(libraries), None)))
    with card.with_suffix(".ran").open("a") as ran:
        ran.write("|".join([*libraries, *peers]) + "\n")
    if (holds := card.with_suffix(".holds")).exists():
        holds.rename(card.with_suffix(".held"))
        signal.pause()
    if (dies := card.with_suffix(".dies")).exists():
        dies.rename(card.with_suffix(dies.read_text() or ".died"))
        os.kill(os.getpid(), signal.SIGKILL)
    pace = float(card.read_text())
    times_ms = {name: pace * cost_ms(parse_config(name)) for name in libraries}
    times_ms |= {name: pace * PEER_MS[name] for name in peers}
    return Timings(
        {name: Timing(ms, ms * 0.99, ms * 1.01, ROUNDS) for name, ms in times_ms.items()},
        rounds_ms={name: (ms,) * ROUNDS for name, ms in times_ms.items()},
        default_kernel="cudnn" if "default" in peers else None,
    )
