"""The host target reports each kind of fault of a kernel with its place, and nothing of a kernel that is right."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import host_programs
import numpy as np
import pytest

ADDRESS, DEADLOCK, MISALIGNED, FAILURE = 700, 702, 716, 719  # of cudaError_t

FAULTS: dict[str, tuple[int, str]] = {
    "shared_read_outside": (
        ADDRESS,
        r"thread 37 \(warp 1, lane 5\), line \d+: ldmatrix of 16 bytes at shared offset 4112 of",
    ),
    "shared_write_outside": (
        ADDRESS,
        r"thread 0 .* st\.shared of 4 bytes at shared offset -4 of a block with 4112 bytes",
    ),
    "global_read_outside": (
        ADDRESS,
        r"ld\.global of 4 bytes at .*: outside all buffers \(offset 1024 of the nearest, readable, which has 1024",
    ),
    "global_read_across_the_end": (ADDRESS, r"ld\.global of 16 bytes at .*: outside all buffers"),
    "global_write_outside": (
        ADDRESS,
        r"st\.global of 4 bytes at .*: outside all buffers \(offset -4 of the nearest, writable, which has 1024",
    ),
    "global_add_outside": (ADDRESS, r"red\.global\.add\.v2\.f32 of 8 bytes at .*: outside all buffers"),
    "write_of_an_input": (ADDRESS, r"st\.global of 4 bytes at .*: the buffer is not to be written"),
    "misaligned_vector": (MISALIGNED, r"ld\.global of global address 0x[0-9a-f]+, which is not 16-byte aligned"),
    "misaligned_add": (MISALIGNED, r"red\.global\.add\.v4\.f32 of global address .* not 16-byte aligned"),
    "misaligned_ldmatrix": (MISALIGNED, r"ldmatrix at shared address 0x408, which is not 16-byte aligned"),
    "misaligned_copy": (MISALIGNED, r"cp\.async\.bulk\.tensor at shared address 0x440, which is not 128-byte aligned"),
    "copy_off_its_pattern": (MISALIGNED, r"shared address 0x480, which is not 1024-byte aligned"),
    "copy_from_outside": (ADDRESS, r"cp\.async\.bulk\.tensor of 128 bytes at .*: outside all buffers"),
    "read_of_nothing": (FAILURE, r"ldmatrix reads shared offset 20, which was never written"),
    "read_before_the_wait": (
        FAILURE,
        r"shared offset 0, which a copy of line \d+ writes: this thread has not waited .*phase 0",
    ),
    "wait_of_another_thread": (FAILURE, r"thread 1 .*which a copy of line \d+ writes: this thread has not waited"),
    "wait_for_the_wrong_phase": (
        DEADLOCK,
        r"deadlock: thread 0 waits at line \d+ for parity 0 .*phase 2 misses 1 of 1 arr",
    ),
    "wait_that_passes_at_once": (
        FAILURE,
        r"which a copy of line \d+ writes: this thread has not waited for its mbarrier",
    ),
    "write_over_an_mbarrier": (FAILURE, r"st\.shared overwrites the mbarrier at shared offset 4100"),
    "read_of_an_mbarrier": (FAILURE, r"ldmatrix reads shared offset 4096, which holds an mbarrier"),
    "barrier_without_an_exited_thread": (DEADLOCK, r"is reached by 63 of 64 threads; thread 63 has exited"),
    "barrier_in_a_branch": (
        DEADLOCK,
        r"the block barrier of line \d+ is reached by 32 of 64 threads; thread 32 has exited",
    ),
    "mbarrier_that_never_completes": (DEADLOCK, r"phase 0 misses 0 of 1 arrivals and 16 bytes"),
    "more_arrivals_than_the_count": (FAILURE, r"more arrivals than the 63 of the mbarrier at shared offset 4096"),
    "more_bytes_than_expected": (FAILURE, r"16 bytes more than expected arrive at the mbarrier at shared offset 4096"),
    "bytes_left_at_exit": (FAILURE, r"block \(0,0,0\) exits while the mbarrier at shared offset 4096 misses 16 bytes"),
    "copy_in_flight_at_exit": (FAILURE, r"exits with a copy in flight: nobody waited for phase 0"),
    "mbarrier_not_initialised": (FAILURE, r"names shared offset 4104, where no mbarrier was initialised"),
    "mbarrier_initialised_by_another_thread": (
        FAILURE,
        r"thread 1 .*which thread 0 initialised with no block barrier since",
    ),
    "mbarrier_initialised_twice": (FAILURE, r"mbarrier\.init overwrites the mbarrier at shared offset 4096"),
    "copy_without_the_fence": (FAILURE, r"whose initialiser has not called mbarrier_fence_init"),
    "half_a_warp": (
        FAILURE,
        r"shfl\.sync\.bfly is reached by a part of its warp only: this thread exits, lanes 0x0000ffff",
    ),
    "half_a_warp_at_a_barrier": (
        DEADLOCK,
        r"lanes 0xffff0000 of warp 0 only; thread 0 waits at the block barrier of line",
    ),
    "two_places_in_one_warp": (FAILURE, r"thread 1 .*lanes 0x00000001 are at shfl\.sync\.bfly of line"),
    "half_a_warp_waits_forever": (
        DEADLOCK,
        r"elect\.sync of line \d+ is reached by lanes 0xffffff7f of warp 0 only; thread 7 wa",
    ),
    "too_many_local_variables": (
        FAILURE,
        r"thread 32 \(warp 1, lane 0\), line \d+: local variables take more than a thread's 256 KiB of stack",
    ),
    "mma_in_half_a_warp": (
        FAILURE,
        r"thread 16 .*mma\.m16n8k16 of line \d+ is reached by a part of its warp only: this thread has not come to it",
    ),
    "mma_at_two_places": (
        FAILURE,
        r"thread 1 .*mma\.m16n8k16 is reached by a part of its warp only: other lanes are at mma\.m16n8k16 of line \d+",
    ),
    "mma_that_is_not_done": (FAILURE, r"mma\.m16n8k16 has no mma_done before this thread exits"),
    "named_barrier_that_never_completes": (DEADLOCK, r"at line \d+ for named barrier 2, which 32 of 64 threads have"),
    "named_barrier_of_two_sizes": (FAILURE, r"bar\.sync of barrier 2 for 32 threads, which line \d+ uses for 64"),
    "named_barrier_left_at_exit": (FAILURE, r"exits while named barrier 15 of line \d+ has 32 of 64 threads"),
    "named_barrier_in_half_a_warp": (FAILURE, r"bar\.sync is reached by a part of its warp only: .*lanes 0x0000ffff"),
    "bulk_copy_of_odd_bytes": (FAILURE, r"cp\.async\.bulk of 24 bytes: they must be a multiple of 16"),
    "wgmma_without_its_fence": (FAILURE, r"wgmma with no wgmma\.fence since its registers"),
    "wgmma_of_what_is_not_fenced": (
        FAILURE,
        r"wgmma reads shared offset \d+, which thread 9 wrote at line \d+ with no proxy fence",
    ),
    "wgmma_of_what_is_fenced_too_late": (
        FAILURE,
        r"wgmma reads shared offset \d+, which thread \d+ wrote at line \d+ with no proxy fence",
    ),
    "wgmma_in_flight_at_exit": (FAILURE, r"exits with a wgmma of line \d+ in flight in warp 0"),
    "store_of_what_is_not_fenced": (
        FAILURE,
        r"cp\.reduce\.async\.bulk reads shared offset 0, which thread 0 wrote at line \d+ with no proxy fence",
    ),
    "store_of_what_is_overwritten": (
        FAILURE,
        r"the operands of cp\.reduce\.async\.bulk were written to before it was waited for",
    ),
    "wgmma_of_what_is_overwritten": (FAILURE, r"the operands of wgmma were written to before it was waited for"),
    "store_in_flight_at_exit": (FAILURE, r"exits with a bulk copy of line \d+ in flight in thread 0"),
    "turn_of_what_is_read_only": (
        FAILURE,
        r"st\.release\.global\.u32 while what bulk copies of this thread write may not be in memory yet",
    ),
    "turn_with_no_fence": (
        FAILURE,
        r"st\.release\.global\.u32 with no proxy fence since bulk copies of this thread were complete",
    ),
    "store_with_no_fence_after_a_turn": (
        FAILURE,
        r"a bulk copy with no proxy fence since this thread waited for a word of global memory",
    ),
    "store_to_another_block": (ADDRESS, r"st\.shared of 4 bytes at shared offset -?262144 of a block with 4112 bytes"),
    "block_that_is_not_there": (ADDRESS, r"mapa to block 2 of a cluster of 2"),
    "exit_before_the_other_blocks_store": (
        ADDRESS,
        r"no barrier since thread \d+ of another block accessed its shared memory|of the cluster, which has exited",
    ),
    "copy_to_a_block_of_what_is_not_fenced": (
        FAILURE,
        r"cp\.async\.bulk\.shared::cluster reads shared offset 0, which thread 0 wrote at line \d+ with no proxy fence",
    ),
}

RACES: dict[str, str] = {
    "race_of_write_and_read": r"race: ldmatrix reads shared offset 0, which thread 0 wrote at line \d+",
    "race_of_two_writes": r"race: st\.shared writes shared offset 0, which thread 0 wrote at line \d+",
    "race_of_read_and_write": r"thread 63 .*race: st\.shared writes shared offset 0, which thread \d+ read",
    "race_of_read_and_copy": r"thread 32 .*race: cp\.async\.bulk\.tensor writes shared offset 0, which thread \d+ read",
    "race_of_copy_and_write": r"race: cp\.async\.bulk\.tensor writes shared offset 0, which thread 40 wrote",
    "race_past_an_mbarrier": r"race: ldmatrix reads shared offset 36, which thread 9 wrote",
    "race_within_a_warp": r"race: ldmatrix reads shared offset \d+, which thread \d+ wrote",
    "race_past_a_named_barrier": r"race: ldmatrix reads shared offset \d+, which thread \d+ wrote",
    "race_of_one_lanes_arrival": r"race: ldmatrix reads shared offset \d+, which thread \d+ wrote",
    "race_of_two_blocks": r"race: ld\.shared reads shared offset \d+, which thread \d+ wrote",
}


@pytest.fixture(scope="module")
def program() -> ctypes.CDLL:
    loaded = host_programs.load(Path(__file__).with_name("host_faults.cu"))
    loaded.case_name.restype = ctypes.c_char_p
    return loaded


def case_names(program: ctypes.CDLL) -> list[str]:
    names = []
    while name := program.case_name(len(names)):
        names.append(name.decode())
    return names


def run(program: ctypes.CDLL, name: str, *, fault: bool) -> tuple[int, str]:
    """A kernel's error code, and its diagnosis."""

    def aligned(size_bytes: int) -> np.ndarray:
        room = np.ones(size_bytes + 128, np.uint8)
        return room[-room.ctypes.data % 128 :][:size_bytes]

    buffers = [aligned(size_bytes) for size_bytes in (2048, 1024, 1024)]
    pointers = [ctypes.c_void_p(buffer.ctypes.data) for buffer in buffers]
    code = program.run_case(case_names(program).index(name), int(fault), *pointers)
    return code, program.error_text(code).decode()


def test_every_planted_fault_is_looked_for(program: ctypes.CDLL) -> None:
    assert case_names(program) == [*FAULTS, *RACES]


@pytest.mark.parametrize("name", [*FAULTS, *RACES])
@pytest.mark.parametrize("race_check", ["0", "1"])
def test_nothing_is_reported_where_nothing_is_wrong(
    program: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, name: str, race_check: str
) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_RACECHECK", race_check)
    assert run(program, name, fault=False) == (0, "no error")


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("os_threads", ["1", "2"])
def test_a_fault_is_reported(program: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, name: str, os_threads: str) -> None:
    monkeypatch.delenv("BWDTUNE_HOST_RACECHECK", raising=False)
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", os_threads)
    code, diagnosis = run(program, name, fault=True)
    expected, pattern = FAULTS[name]
    assert code == expected, diagnosis
    assert re.match(rf"{name}<true>, block \([01],0,0\)", diagnosis)
    assert re.search(pattern, diagnosis.replace("block (1,0,0)", "block (0,0,0)")), diagnosis
    assert "\n" not in diagnosis


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_reported_where_it_is_asked_for(
    program: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_RACECHECK", "0")
    assert run(program, name, fault=True)[0] == 0
    monkeypatch.setenv("BWDTUNE_HOST_RACECHECK", "1")
    code, diagnosis = run(program, name, fault=True)
    assert code == FAILURE
    assert re.search(RACES[name], diagnosis), diagnosis


def test_a_fault_leaves_nothing_behind(program: ctypes.CDLL) -> None:
    """The next launch of the same library is not disturbed, and knows of no error."""
    for name in ("barrier_in_a_branch", "shared_read_outside"):
        assert run(program, name, fault=True)[0]
        assert run(program, name, fault=False) == (0, "no error")
