"""One search a GPU: the second waits, says for whom, and goes on when the first has ended, however that ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from bwdtune.tuner.lab.gpu_lock import gpu_lock

UUID = "GPU-5d3b8a3e-0000-0000-0000-000000000000"
HOLDER = """
import sys
from pathlib import Path
from bwdtune.tuner.lab.gpu_lock import gpu_lock
with gpu_lock(sys.argv[1], print, Path(sys.argv[2])):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, UUID, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_waits_and_says_for_whom(tmp_path: Path) -> None:
    process = hold(tmp_path)
    told, entered = threading.Event(), threading.Event()
    notices: list[str] = []

    def notice(text: str) -> None:
        notices.append(text)
        told.set()

    def enter() -> None:
        with gpu_lock(UUID, notice, tmp_path):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert told.wait(60)
    assert not entered.is_set()
    assert f"process {process.pid}" in notices[0]
    assert UUID in notices[0]
    process.kill()  # which leaves no time to put anything away
    process.communicate()
    assert entered.wait(60)
    thread.join()
    assert len(notices) == 1


def test_another_gpu_is_free(tmp_path: Path) -> None:
    with gpu_lock(UUID, lambda text: None, tmp_path), gpu_lock("GPU-another", _unexpected, tmp_path):
        pass
    with gpu_lock(UUID, _unexpected, tmp_path):
        assert f"process {os.getpid()}" in (tmp_path / f"bwdtune-{UUID}.holder").read_text()


def _unexpected(text: str) -> None:
    raise AssertionError(text)
