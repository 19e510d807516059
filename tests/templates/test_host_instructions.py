"""The host target's instructions against models written down from the PTX ISA, independently of its C++."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import host_programs
import numpy as np
import pytest
import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BFLOAT16, UINT8 = 9, 0  # of CUtensorMapDataType
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # of CUtensorMapSwizzle, by span in bytes


@pytest.fixture(scope="module")
def program() -> ctypes.CDLL:
    return host_programs.load(Path(__file__).with_name("host_instructions.cu"))


@pytest.fixture(autouse=True)
def _race_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_RACECHECK", "1")


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """It holds the array."""
    assert array.flags["C_CONTIGUOUS"]
    return array.ctypes.data_as(ctypes.c_void_p)


def check(program: ctypes.CDLL, code: int) -> None:
    assert code == 0, program.error_text(code).decode()


def bits_of(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.int16).numpy().view(np.uint16)


# ---- numbers ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpack_is_exact_for_every_pattern(program: ctypes.CDLL, dtype: str) -> None:
    found = np.empty(65536, np.float32)
    program.unpack_all(int(dtype == "fp16"), pointer(found))
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    np.testing.assert_array_equal(found, patterns.view(DTYPES[dtype]).float().numpy())
    signs = np.signbit(found[~np.isnan(found)])
    np.testing.assert_array_equal(signs, np.arange(65536)[~np.isnan(found)] >= 32768)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_rounds_to_nearest_even(program: ctypes.CDLL, dtype: str) -> None:
    """Random patterns of all magnitudes, every value of the dtype, every midpoint between two, and their neighbours."""
    generator = np.random.default_rng(0)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype]).float().numpy()
    every = every[np.isfinite(every)]
    ordered = np.unique(every).astype(np.float64)
    midpoints = ((ordered[1:] + ordered[:-1]) / 2).astype(np.float32)
    patterns = generator.integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    near = [np.nextafter(midpoints, np.float32(side)) for side in (np.inf, -np.inf)]
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, 65519.9, 65520.0, 3.4e38, 1e-45, 5.9e-8, 2.9e-8, 2.98e-8], np.float32
    )
    values = np.concatenate([patterns[~np.isnan(patterns)], every, midpoints, *near, special])
    values = np.resize(values, len(values) // 2 * 2)
    packed = np.empty(len(values) // 2, np.uint32)
    program.pack_pairs(int(dtype == "fp16"), pointer(values), pointer(packed), len(packed))
    # The first of a pair is the lower half: the lower address.
    np.testing.assert_array_equal(packed.view(np.uint16), bits_of(torch.from_numpy(values).to(DTYPES[dtype])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_gives_the_canonical_nan(program: ctypes.CDLL, dtype: str) -> None:
    values = np.array([0x7F800001, 0xFFC00000, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    packed = np.empty(2, np.uint32)
    program.pack_pairs(int(dtype == "fp16"), pointer(values), pointer(packed), 2)
    assert packed.view(np.uint16).tolist() == [0x7FFF] * 4


def test_exp2_is_within_two_ulp_and_flushes_subnormals(program: ctypes.CDLL) -> None:
    x = np.concatenate([np.linspace(-160, 130, 100_001), [-np.inf, np.inf, 1e-40, -1e-40, 0.0, -126.0]])
    x = x.astype(np.float32)
    found = np.empty_like(x)
    program.exp2_all(pointer(x), pointer(found), len(x))
    with np.errstate(over="ignore"):
        exact = np.exp2(x.astype(np.float64)).astype(np.float32)
    smallest_normal = np.finfo(np.float32).tiny
    assert (found[exact < smallest_normal] == 0).all()
    normal = (exact >= smallest_normal) & np.isfinite(exact)
    assert (np.abs(found[normal] - exact[normal]) <= 2 * np.spacing(exact[normal])).all()
    assert (found[np.isinf(exact)] == np.inf).all()
    nan = np.array([np.nan], np.float32)
    program.exp2_all(pointer(nan), pointer(nan), 1)
    assert np.isnan(nan[0])


# ---- a warp's instructions ----


@pytest.mark.parametrize("lane_mask", [1, 2, 3, 7, 16, 31])
def test_shuffle_and_elect(program: ctypes.CDLL, lane_mask: int) -> None:
    values = np.random.default_rng(lane_mask).standard_normal(32).astype(np.float32)
    shuffled, words = np.empty_like(values), np.empty(32, np.uint32)
    first, elected = np.empty(32, np.int32), np.empty(32, np.int32)
    outputs = (pointer(shuffled), pointer(words), pointer(first), pointer(elected))
    check(program, program.run_warp(pointer(values), *outputs, lane_mask))
    np.testing.assert_array_equal(shuffled, values[np.arange(32) ^ lane_mask])
    np.testing.assert_array_equal(words.view(np.float32), shuffled)
    assert (first == 7).all()
    assert sorted(elected) == [0] * 31 + [1]


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(program: ctypes.CDLL, transposed: bool) -> None:
    """Row r of matrix m is at lane 8 m + r's address; lane l gets row l / 4, columns 2 (l % 4) and the next."""
    generator = np.random.default_rng(1)
    tile = generator.integers(0, 65536, 512).astype(np.uint16)
    addresses = (generator.permutation(64)[:32] * 16).astype(np.uint32)
    fragments = np.empty((32, 4), np.uint32)
    check(program, program.run_ldmatrix(pointer(tile), pointer(addresses), pointer(fragments), int(transposed)))
    for matrix in range(4):
        rows = np.stack([tile[address // 2 :][:8] for address in addresses[8 * matrix :][:8]])
        if transposed:
            rows = rows.T
        expected = [[rows[lane // 4, lane % 4 * 2], rows[lane // 4, lane % 4 * 2 + 1]] for lane in range(32)]
        np.testing.assert_array_equal(
            np.ascontiguousarray(fragments[:, matrix]).view(np.uint16).reshape(32, 2), expected
        )


def test_a_bulk_copy_is_handed_on_by_a_named_barrier(program: ctypes.CDLL) -> None:
    room = np.random.default_rng(5).standard_normal(64 + 8).astype(np.float32)
    values = room[-room.ctypes.data % 16 // 4 :][:64]
    out = np.zeros_like(room)[-room.ctypes.data % 16 // 4 :][:64]
    check(program, program.run_relay(ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(out.ctypes.data)))
    np.testing.assert_array_equal(out, values)


def a_place(lane: int, i: int) -> tuple[int, int]:
    """Row and k of element i of A's fragment, as the ISA's formula for m16n8k16 has it."""
    group, in_group = lane >> 2, lane % 4
    row = group if i % 4 < 2 else group + 8
    return row, in_group * 2 + (i & 1) + (8 if i >= 4 else 0)


def b_place(lane: int, i: int) -> tuple[int, int]:
    """k and column of element i of B's fragment."""
    return lane % 4 * 2 + (i & 1) + (8 if i >= 2 else 0), lane >> 2


def c_place(lane: int, i: int) -> tuple[int, int]:
    """Row and column of element i of the accumulator."""
    return (lane >> 2) + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mma(program: ctypes.CDLL, dtype: str) -> None:
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(shape, generator=generator).to(DTYPES[dtype]) for shape in ((16, 16), (16, 8)))
    c = torch.randn((16, 8), generator=generator)
    lanes = range(32)
    a_bits, b_bits = bits_of(a), bits_of(b)
    a_fragments = np.array([[a_bits[a_place(lane, i)] for i in range(8)] for lane in lanes], np.uint16)
    b_fragments = np.array([[b_bits[b_place(lane, i)] for i in range(4)] for lane in lanes], np.uint16)
    accumulator = np.array([[c[c_place(lane, i)] for i in range(4)] for lane in lanes], np.float32)
    check(
        program,
        program.run_mma(int(dtype == "fp16"), pointer(a_fragments), pointer(b_fragments), pointer(accumulator)),
    )
    exact = (a.double() @ b.double() + c.double()).numpy()
    found = np.empty((16, 8))
    for lane in lanes:
        for i in range(4):
            found[c_place(lane, i)] = accumulator[lane, i]
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6)


def test_mma_keeps_subnormals_whatever_the_thread_has_set(program: ctypes.CDLL) -> None:
    a, b = np.zeros((32, 8), np.uint16), np.zeros((32, 4), np.uint16)
    a[0, 0], b[0, 0] = 1, 0x3C00  # 2^-24 and 1
    accumulator = np.zeros((32, 4), np.float32)
    torch.set_flush_denormal(True)
    try:
        check(program, program.run_mma(1, pointer(a), pointer(b), pointer(accumulator)))
    finally:
        torch.set_flush_denormal(False)
    assert accumulator[0, 0] == np.float32(2.0**-24)


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_and_movmatrix(program: ctypes.CDLL, transposed: bool) -> None:
    """ldmatrix backwards: lane l has row l / 4, columns 2 (l % 4) and the next, of each matrix."""
    generator = np.random.default_rng(4)
    matrices = generator.integers(0, 65536, (4, 8, 8)).astype(np.uint16)
    fragments = np.empty((32, 4, 2), np.uint16)
    for lane in range(32):
        fragments[lane] = matrices[:, lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2]
    addresses = (generator.permutation(32) * 16).astype(np.uint32)
    tile, moved = np.empty(256, np.uint16), np.empty((32, 2), np.uint16)
    check(
        program,
        program.run_stmatrix(pointer(fragments), pointer(addresses), pointer(tile), pointer(moved), int(transposed)),
    )
    for lane in range(32):
        row = (matrices[lane // 8].T if transposed else matrices[lane // 8])[lane % 8]
        np.testing.assert_array_equal(tile[addresses[lane] // 2 :][:8], row)
        np.testing.assert_array_equal(moved[lane], matrices[0].T[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2])


# ---- a warpgroup's instructions ----


class SharedMatrix:
    """(k 16, count) in shared memory as a descriptor of wgmma promises it, by the ISA's canonical layouts.

    In units of 8 rows of `span` bytes: where k runs along the rows, unit u has elements 8 u to 8 u + 7 of the other
    dimension; where it does not, unit (i, j) has the elements from i span / 2 on, for k from 8 j to 8 j + 7.
    """

    def __init__(self, generator: torch.Generator, dtype: torch.dtype, count: int, span: int, transposed: bool) -> None:
        self.values = torch.randn((16, count), generator=generator).to(dtype)
        unit = 8 * span
        self.stride = unit * (3 if transposed else 2)
        self.leading = unit * 7
        across = -(-count // (span // 2))
        self.size = 1024 + (unit + self.stride + across * self.leading if transposed else count // 8 * self.stride)
        self.size = -(-self.size // 1024) * 1024
        self.transposed, self.span = transposed, span

    def place(self, k: int, n: int) -> int:
        """The byte that an element begins at, before the chunks of a row change places."""
        if self.transposed:
            row_elements = self.span // 2
            unit = n // row_elements * self.leading + k // 8 * self.stride
            return unit + k % 8 * self.span + n % row_elements * 2
        return n // 8 * self.stride + n % 8 * self.span + k * 2

    def write(self, image: np.ndarray, start: int) -> None:
        bits = bits_of(self.values)
        for k, n in np.ndindex(bits.shape):
            at = start + self.place(k, n)
            chunk = at // 16 % (self.span // 16) ^ at // 128 % (self.span // 16)
            image[(at // self.span * self.span + chunk * 16 + at % 16) // 2] = bits[k, n]

    def descriptor(self, start: int) -> int:
        mode = {128: 1, 64: 2, 32: 3}[self.span]
        return start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | mode << 62


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("n", "a_span", "transposed_a", "b_span", "transposed_b"),
    [
        (64, 128, False, 128, False),  # S and dP
        (128, 128, False, 128, True),
        (64, 128, True, 128, False),  # dQ
        (32, 128, True, 128, True),
        (128, None, False, 128, True),  # dK and dV
        (64, None, False, 128, False),
        (64, 64, False, 32, True),
        (128, 32, True, 64, False),
    ],
)
def test_wgmma(
    program: ctypes.CDLL,
    dtype: str,
    accumulate: bool,
    n: int,
    a_span: int | None,
    transposed_a: bool,
    b_span: int,
    transposed_b: bool,
) -> None:
    """With A from registers where it has no span. The accumulator is as it was until it is waited for."""
    generator = torch.Generator().manual_seed(n)
    a = SharedMatrix(generator, DTYPES[dtype], 64, a_span or 128, transposed_a)
    b = SharedMatrix(generator, DTYPES[dtype], n, b_span, transposed_b)
    image = np.zeros((a.size + b.size) // 2, np.uint16)
    a.write(image, 0)
    b.write(image, a.size)
    c = torch.randn((64, n), generator=generator)
    threads = range(128)
    a_bits = bits_of(a.values)
    a_fragments = np.empty((128, 8), np.uint16)
    accumulator = np.empty((128, n // 2), np.float32)
    for thread in threads:
        for i in range(8):
            row, k = a_place(thread % 32, i)
            a_fragments[thread, i] = a_bits[k, thread // 32 * 16 + row]
        for i in range(n // 2):
            row, column = c_place(thread % 32, i % 4)
            accumulator[thread, i] = c[thread // 32 * 16 + row, i // 4 * 8 + column]
    before, before_wait = accumulator.copy(), np.empty_like(accumulator)
    check(
        program,
        program.run_wgmma(
            int(dtype == "fp16"),
            n,
            int(a_span is None),
            int(transposed_a),
            int(transposed_b),
            pointer(image),
            len(image) // 2,
            ctypes.c_uint64(a.descriptor(0)),
            ctypes.c_uint64(b.descriptor(a.size)),
            pointer(a_fragments),
            pointer(accumulator),
            pointer(before_wait),
            int(accumulate),
        ),
    )
    np.testing.assert_array_equal(before_wait, before)
    exact = (a.values.double().T @ b.values.double() + (c.double() if accumulate else 0)).numpy()
    found = np.empty((64, n))
    for thread in threads:
        for i in range(n // 2):
            row, column = c_place(thread % 32, i % 4)
            found[thread // 32 * 16 + row, i // 4 * 8 + column] = accumulator[thread, i]
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)


def test_a_group_of_wgmma_is_waited_for_alone(program: ctypes.CDLL) -> None:
    found = np.empty((2, 128), np.float32)
    check(program, program.run_wgmma_groups(pointer(found)))
    np.testing.assert_array_equal(found, np.broadcast_to([[32.0], [0.0]], (2, 128)))


# ---- TMA ----


def encode(
    program: ctypes.CDLL,
    storage: np.ndarray,
    sizes: list[int],
    strides: list[int],
    box: list[int],
    swizzle: int = 0,
    **changed: int,
) -> tuple[int, np.ndarray]:
    """The result of cuTensorMapEncodeTiled for 16-bit elements, and the map."""
    room = np.zeros(256, np.uint8)
    start = -room.ctypes.data % 64
    encoded = room[start : start + 128]
    code = program.encode(
        ctypes.c_void_p(encoded.ctypes.data + changed.get("map_offset", 0)),
        changed.get("type", BFLOAT16),
        changed.get("rank", len(sizes)),
        ctypes.c_void_p(storage.ctypes.data + changed.get("base_offset", 0)),
        pointer(np.array(sizes, np.uint64)),
        pointer(np.array(strides, np.uint64)),
        pointer(np.array(box, np.uint32)),
        pointer(np.array([changed.get("element_stride", 1)] * len(sizes), np.uint32)),
        changed.get("interleave", 0),
        changed.get("swizzle_code", SWIZZLES.get(swizzle, 0)),
        changed.get("promotion", 3),
        changed.get("fill", 0),
    )
    return code, encoded


def aligned(elements: int) -> np.ndarray:
    """A 16-byte aligned array of 16-bit elements, none of them zero."""
    room = np.random.default_rng(3).integers(1, 65536, elements + 8).astype(np.uint16)
    start = -room.ctypes.data % 16 // 2
    return room[start : start + elements]


def swizzled(tile: np.ndarray, span: int) -> np.ndarray:
    """(rows, bytes of a row) as it lies in shared memory: in each row the 16-byte chunks change places.

    By the figures of the CUDA programming guide: with 128 bytes chunk c of row r goes to c ^ (r % 8), with 64 bytes to
    c ^ (r / 2 % 4), with 32 bytes to c ^ (r / 4 % 2).
    """
    if not span:
        return tile
    chunks = tile.reshape(len(tile), span // 16, 16)
    out = np.empty_like(chunks)
    for row in range(len(tile)):
        for chunk in range(span // 16):
            out[row, chunk ^ (row // (128 // span) % (span // 16))] = chunks[row, chunk]
    return out.reshape(tile.shape)


BOXES = [
    # span, sizes from the innermost, box, coordinates: inside, past each end, before each start, and all outside
    (128, (128, 40, 3, 2), (64, 32, 1, 1), (64, 4, 2, 1)),
    (128, (64, 40, 3, 2), (64, 32, 1, 1), (0, 20, 1, 0)),
    (128, (96, 40, 3, 2), (64, 16, 2, 1), (64, 30, 2, 1)),
    (64, (64, 33, 2, 1), (32, 16, 1, 1), (32, 24, 1, 0)),
    (32, (64, 33, 2, 1), (16, 16, 1, 1), (16, -5, 0, 0)),
    (32, (40, 9, 2, 2), (16, 8, 1, 2), (-8, 3, 1, 1)),
    (0, (64, 50, 2, 2), (8, 32, 1, 1), (56, 20, 0, 1)),
    (0, (60, 50, 2, 2), (8, 32, 1, 1), (56, 20, 0, 1)),
    (0, (64, 50, 2, 2), (64, 4, 2, 2), (0, 48, 1, 1)),
    (64, (64, 33, 2, 2), (32, 16, 1, 1), (0, 0, 2, 0)),
    (128, (64, 33, 2, 2), (64, 16, 1, 1), (64, 0, 0, 0)),
]


@pytest.mark.parametrize(("span", "sizes", "box", "start"), BOXES)
def test_a_copied_box(
    program: ctypes.CDLL, span: int, sizes: tuple[int, ...], box: tuple[int, ...], start: tuple[int, ...]
) -> None:
    """Rows of the box one after another, zeros where it leaves the tensor, chunks permuted."""
    # Dimension 2 lies inside of dimension 1, as in (batch, seqlen, head, head_dim); rows have room between them.
    inner = -(-sizes[0] // 8) * 8 + 8
    strides = [inner * sizes[2], inner, inner * sizes[2] * sizes[1]]
    storage = aligned(strides[2] * sizes[3])
    code, encoded = encode(program, storage, list(sizes), [2 * stride for stride in strides], list(box), span)
    check(program, code)
    tile = np.zeros(box[::-1], np.uint16)
    for place in np.ndindex(tile.shape):
        at = [index + first for index, first in zip(place[::-1], start, strict=True)]
        if all(0 <= index < size for index, size in zip(at, sizes, strict=True)):
            tile[place] = storage[at[0] + sum(index * stride for index, stride in zip(at[1:], strides, strict=True))]
    rows = tile.reshape(-1, box[0]).view(np.uint8)
    found = np.zeros(rows.size // 4, np.uint32)
    coordinates = np.array(start, np.int32)
    check(program, program.run_box(pointer(encoded), pointer(found), 4, pointer(coordinates), rows.size))
    np.testing.assert_array_equal(found.view(np.uint8).reshape(rows.shape), swizzled(rows, span))


@pytest.mark.parametrize(("span", "sizes", "box", "start"), BOXES)
def test_a_stored_box(
    program: ctypes.CDLL, span: int, sizes: tuple[int, ...], box: tuple[int, ...], start: tuple[int, ...]
) -> None:
    """The inverse of a copied box; what lies outside is not written. The same bytes as floats are added up."""
    inner = -(-sizes[0] // 8) * 8 + 8
    strides = [inner * sizes[2], inner, inner * sizes[2] * sizes[1]]
    storage = aligned(strides[2] * sizes[3])
    expected = storage.copy()
    code, encoded = encode(program, storage, list(sizes), [2 * stride for stride in strides], list(box), span)
    check(program, code)
    tile = np.random.default_rng(5).integers(0, 0x3F80, box[::-1]).astype(np.uint16)  # pairs are floats below 1
    for place in np.ndindex(tile.shape):
        at = [index + first for index, first in zip(place[::-1], start, strict=True)]
        if all(0 <= index < size for index, size in zip(at, sizes, strict=True)):
            expected[at[0] + sum(index * stride for index, stride in zip(at[1:], strides, strict=True))] = tile[place]
    image = swizzled(tile.reshape(-1, box[0]).view(np.uint8), span)
    sums = aligned(image.size // 2).view(np.float32)
    sums[:] = 1
    coordinates = np.array(start, np.int32)
    check(
        program,
        program.run_store(pointer(encoded), pointer(image), 4, pointer(coordinates), image.size, pointer(sums)),
    )
    np.testing.assert_array_equal(storage, expected)
    np.testing.assert_array_equal(sums, 1 + image.view(np.float32).ravel())


SEQUENCES = [
    # the first row of a sequence, its rows, the first row of the box
    (0, 40, 8),
    (7, 20, 0),
    (7, 20, 16),
    (7, 20, 32),
    (39, 1, 0),
    (20, 0, 0),
]


@pytest.mark.parametrize(("first", "length", "row"), SEQUENCES)
def test_a_box_of_a_packed_sequence(program: ctypes.CDLL, first: int, length: int, row: int) -> None:
    """The rows' first coordinate ends with the sequence, two others move the box, and addresses wrap around at 2^64."""
    columns, rows, heads, head, end_of_rows, wrap_bytes = 64, 40, 3, 2, 2**30, 2**35
    storage = aligned(rows * heads * columns)
    tensor = storage.reshape(rows, heads, columns)
    row_bytes = 2 * heads * columns
    code, encoded = encode(
        program,
        storage,
        [columns, end_of_rows, heads, 2**31 - 1, 2**31 - 1],
        [row_bytes, 2 * columns, row_bytes, wrap_bytes - row_bytes],
        [columns, 16, 1, 1, 1],
        128,
    )
    check(program, code)
    inside = max(min(length - row, 16), 0)
    tile = np.zeros((16, columns), np.uint16)
    tile[:inside] = tensor[first + row : first + row + inside, head]
    coordinates = np.array([0, end_of_rows - length + row, head, first + length, end_of_rows], np.int32)
    found = np.zeros(tile.size // 2, np.uint32)
    check(program, program.run_box(pointer(encoded), pointer(found), 5, pointer(coordinates), tile.nbytes))
    np.testing.assert_array_equal(found.view(np.uint8).reshape(16, -1), swizzled(tile.view(np.uint8), 128))

    stored = np.full((16, columns), 0x3F80, np.uint16)
    expected = tensor.copy()
    expected[first + row : first + row + inside, head] = stored[:inside]
    image, sums = stored.view(np.uint8).copy(), aligned(tile.size).view(np.float32)
    check(
        program, program.run_store(pointer(encoded), pointer(image), 5, pointer(coordinates), image.size, pointer(sums))
    )
    np.testing.assert_array_equal(tensor, expected)


@pytest.mark.parametrize("rounds", [1, 2, 5, 8])
def test_mbarrier_phases_in_a_ring(program: ctypes.CDLL, rounds: int) -> None:
    storage = aligned(8 * 8 * rounds)
    code, encoded = encode(program, storage, [8, 8 * rounds, 1, 1], [16, 1024, 1024], [8, 8, 1, 1])
    check(program, code)
    found = np.zeros((rounds, 32), np.uint32)
    check(program, program.run_ring(pointer(encoded), pointer(found), rounds))
    np.testing.assert_array_equal(found.view(np.uint16).ravel(), storage)


def test_blocks_of_a_cluster_reach_each_other(program: ctypes.CDLL) -> None:
    storage = aligned(8 * 16)
    code, encoded = encode(program, storage, [8, 16, 1, 1], [16, 1024, 1024], [8, 8, 1, 1])
    check(program, code)
    found = np.zeros((4, 97), np.uint32)
    check(program, program.run_exchange(pointer(encoded), pointer(found), 4, 2))
    peers = np.arange(4) ^ 1
    np.testing.assert_array_equal(found[:, 0], peers)
    np.testing.assert_array_equal(found[:, 1:65], 100 * peers[:, None] + np.arange(64))
    np.testing.assert_array_equal(found[:, 65:].copy().view(np.uint16), np.tile(storage[64:], (4, 1)))


@pytest.mark.parametrize(("blocks", "cluster"), [(3, 2), (3, 3), (2, 0)])
def test_clusters_that_the_host_target_does_not_have(program: ctypes.CDLL, blocks: int, cluster: int) -> None:
    storage = aligned(8 * 16)
    _, encoded = encode(program, storage, [8, 16, 1, 1], [16, 1024, 1024], [8, 8, 1, 1])
    code = program.run_exchange(pointer(encoded), pointer(np.zeros(4 * 97, np.uint32)), blocks, cluster)
    assert code == 912
    assert f"clusters of ({cluster},1,1) in a grid of ({blocks},1,1)" in program.error_text(code).decode()


ENCODE_REFUSALS = {
    "the map lies at": {"map_offset": 8},
    "data type 77": {"type": 77},
    "rank 6": {"rank": 6},
    "rank 0": {"rank": 0},
    "base address": {"base_offset": 8},
    "interleave 1": {"interleave": 1},
    "fill 1": {"fill": 1},
    "swizzle 9": {"swizzle_code": 9},
    "promotion 4": {"promotion": 4},
    "element stride 2": {"element_stride": 2},
}


@pytest.mark.parametrize("reason", ENCODE_REFUSALS)
def test_a_map_that_the_driver_refuses(program: ctypes.CDLL, reason: str) -> None:
    code, _ = encode(program, aligned(4096), [64, 8, 2, 2], [128, 1024, 2048], [64, 8, 1, 1], **ENCODE_REFUSALS[reason])
    assert code == 1
    assert reason in program.error_text(1).decode()


@pytest.mark.parametrize(
    ("sizes", "strides", "box", "swizzle", "reason"),
    [
        ([0, 8], [128], [64, 8], 0, "size 0 of dimension 0"),
        ([64, 2**32 + 1], [128], [64, 8], 0, "size 4294967297 of dimension 1"),
        ([64, 8], [120], [64, 8], 0, "stride of 120 bytes of dimension 1"),
        ([64, 8], [2**40], [64, 8], 0, "stride of 1099511627776 bytes"),
        ([64, 8], [128], [64, 0], 0, "box size 0 of dimension 1"),
        ([64, 8], [128], [64, 257], 0, "box size 257"),
        ([64, 8], [128], [12, 8], 0, "box rows of 24 bytes"),
        ([256, 8], [512], [128, 8], 128, "box rows of 256 bytes exceed the swizzle's 128"),
        ([64, 8], [128], [64, 8], 64, "box rows of 128 bytes exceed the swizzle's 64"),
        ([64, 8], [128], [32, 8], 32, "box rows of 64 bytes exceed the swizzle's 32"),
    ],
)
def test_sizes_that_the_driver_refuses(
    program: ctypes.CDLL, sizes: list[int], strides: list[int], box: list[int], swizzle: int, reason: str
) -> None:
    code, _ = encode(program, aligned(4096), sizes, strides, box, swizzle)
    assert code == 1
    assert reason in program.error_text(1).decode()


@pytest.mark.parametrize(("sizes", "strides"), [([64, 2**32], [2**40 - 16]), ([1, 1], [16])])
def test_the_largest_and_smallest_sizes_are_taken(program: ctypes.CDLL, sizes: list[int], strides: list[int]) -> None:
    code, _ = encode(program, aligned(64), sizes, strides, [64, 256], 128)
    check(program, code)


# ---- global memory ----


@pytest.mark.parametrize("vector", [1, 2, 4])
@pytest.mark.parametrize("os_threads", ["1", "2"])
def test_adds_are_atomic(program: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, vector: int, os_threads: str) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", os_threads)
    room = np.zeros(8, np.float32)
    sums = room[-room.ctypes.data % 16 // 4 :][:4]
    values = np.array([1, 2, 3, 4], np.float32)
    check(program, program.run_add(pointer(sums), pointer(values), vector, 500, 64))
    np.testing.assert_array_equal(sums, 500 * 64 * values)


@pytest.mark.parametrize("os_threads", ["1", "2"])
def test_a_number_is_taken_once(program: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, os_threads: str) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", os_threads)
    counter, taken = np.full(1, 7, np.uint32), np.zeros((50, 64, 2), np.uint32)
    check(program, program.run_counter(pointer(counter), pointer(taken), 50, 64))
    np.testing.assert_array_equal(np.sort(taken.ravel()), np.arange(7, 7 + taken.size))
    assert counter[0] == 7 + taken.size


def test_adds_flush_subnormals(program: ctypes.CDLL) -> None:
    tiny = np.finfo(np.float32).tiny
    sums = np.array([0.0, 1e-40, tiny * 1.5, 1.0], np.float32)
    values = np.array([1e-40, 1.0, -tiny, -1e-40], np.float32)
    check(program, program.run_add(pointer(sums), pointer(values), 1, 1, 1))
    np.testing.assert_array_equal(sums, np.array([0.0, 1.0, 0.0, 1.0], np.float32))


# ---- launches ----


@pytest.mark.parametrize("os_threads", ["1", "3"])
def test_every_thread_of_every_block_runs_once(
    program: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, os_threads: str
) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_THREADS", os_threads)
    blocks, threads = 37, 96
    places = np.zeros((blocks, threads, 4), np.uint32)
    check(program, program.run_places(pointer(places), blocks, threads))
    np.testing.assert_array_equal(places[:, :, 0], np.tile(np.arange(threads), (blocks, 1)))
    np.testing.assert_array_equal(places[:, :, 1], np.tile(np.arange(blocks)[:, None], (1, threads)))
    assert (places[:, :, 2] == threads).all()
    assert (places[:, :, 3] == blocks).all()


def run_empty(
    program: ctypes.CDLL,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    shared_bytes: int = 0,
    allowed: int = -1,
) -> str:
    code = program.run_empty(
        pointer(np.array(grid, np.uint32)), pointer(np.array(block, np.uint32)), ctypes.c_size_t(shared_bytes), allowed
    )
    return program.error_text(code).decode()


LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"block": (1024, 1, 1)}, "no error"),
    ({"block": (16, 8, 8)}, "no error"),
    ({"block": (1025, 1, 1)}, "empty_kernel: a block of (1025,1,1) threads"),
    ({"block": (32, 33, 1)}, "a block of (32,33,1) threads"),
    ({"block": (1, 1, 65)}, "a block of (1,1,65) threads"),
    ({"block": (0, 1, 1)}, "a block of (0,1,1) threads"),
    ({"grid": (2, 3, 4)}, "no error"),
    ({"grid": (0, 1, 1)}, "a grid of (0,1,1) blocks"),
    ({"grid": (2**31, 1, 1)}, "a grid of (2147483648,1,1) blocks"),
    ({"grid": (1, 65536, 1)}, "a grid of (1,65536,1) blocks"),
    ({"allowed": 232448, "shared_bytes": 232448}, "no error"),
    ({"allowed": 232449}, "232449 bytes of shared memory a block: the card has 232448"),
    ({"allowed": 1000, "shared_bytes": 1001}, "1001 bytes of dynamic shared memory: the kernel is allowed 1000"),
]


@pytest.mark.parametrize(("asked", "answer"), LIMITS)
def test_limits_of_a_launch(program: ctypes.CDLL, asked: dict[str, Any], answer: str) -> None:
    assert answer in run_empty(program, **asked)


def test_shared_memory_of_another_card(program: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BWDTUNE_HOST_SMEM_LIMIT", "101376")
    assert run_empty(program, allowed=101376, shared_bytes=101376) == "no error"
    assert "the card has 101376" in run_empty(program, allowed=101377)


def test_what_the_target_does_not_have(program: ctypes.CDLL) -> None:
    assert program.set_device(0) == 0
    code = program.set_device(1)
    assert "device 1" in program.error_text(code).decode()
    code = program.find_driver_function(b"cuCtxCreate")
    assert "cuCtxCreate" in program.error_text(code).decode()
