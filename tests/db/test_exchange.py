"""A database as JSON: what comes out goes in again, and nothing else does."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from exports import DATABASE, exported
from hypothesis import given, settings
from hypothesis import strategies as st

from bwdtune.db.blocks import Block, read_blocks
from bwdtune.db.exchange import InvalidExport, read_export, write_export
from bwdtune.db.store import Store
from bwdtune.gen.families import PRESETS, config_from_dict
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render

MARK = "EVIL"
HOSTILE = [
    f"{{{{ {MARK} }}}}",
    f"{{% include '/etc/passwd' %}}{MARK}",
    f'128; asm("{MARK}");',
    f"<script>{MARK}</script>",
    f"\x1b]0;{MARK}\x07",
    f"{MARK}\n",
    f"../../{MARK}'",
    MARK * 1000,
    "",
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**31,
    2**63,
    10**400,
    1e308,
    0.5,
    [],
    [MARK],
    {},
    {MARK: MARK},
    {f"<b>{MARK}</b>": 1},
]


@pytest.fixture
def text() -> str:
    return exported()


@functools.cache
def places() -> list[tuple[Any, ...]]:
    """Every place of an export."""

    def walk(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        yield place
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            yield from walk(inner, (*place, key))

    return [place for place in walk(json.loads(exported(2)), ()) if place]


def put(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    *path, last = place
    for key in path:
        data = data[key]
    data[last] = value


def accepted(text: str | bytes) -> list[Block] | None:
    """What is read; None where the file is refused, in one printable line."""
    try:
        return read_export(text)
    except InvalidExport as error:
        message = str(error)
    assert message.isprintable()
    assert len(message) < 400
    return None


def assert_harmless(blocks: list[Block]) -> None:
    """Nothing of it can put text into a kernel or markup into a page."""
    for block in blocks:
        for kernel in block.kernels:
            config = kernel.variant.config
            assert config_from_dict(config.to_stored()) == config
            assert MARK not in render(block.problem, config).text
    again = write_export(blocks)
    strings = [value for value in _strings(json.loads(again)) if set(value) & set("<>&\"'`{}$\\\x1b\n")]
    assert not strings
    assert write_export(read_export(again)) == again


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def test_what_is_written_is_read_again(text: str) -> None:
    blocks = read_export(text)
    assert write_export(blocks) == text
    with closing(Store.open(DATABASE, read_only=True)) as store:
        winners, bests, searches = store.winners(), store.emulated_bests(), store.searches()
        assert len(store.measurements()) == sum(len(kernel.timed) for block in blocks for kernel in block.kernels)
    assert {block.problem for block in blocks} == {best.problem for best in (*winners, *bests)}
    assert [search.uid for block in blocks for search in block.searches] == sorted(
        (search.uid for search in searches), key=[one.uid for block in blocks for one in block.searches].index
    )
    won = [
        (block.problem, kernel.variant.config, timed.record.median_ms)
        for block in blocks
        for kernel in block.kernels
        for timed in kernel.timed
        if timed.wins and timed.record.kind == "measured"
    ]
    assert sorted(won) == sorted((one.problem, one.config, one.median_ms) for one in winners)


def test_one_line_each_for_searches_kernels_and_measurements(text: str) -> None:
    """So that a diff shows which of them has changed."""
    lines = [line.strip().rstrip(",") for line in text.splitlines()]
    objects = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    assert sum("median_ms" in one for one in objects) == text.count('"median_ms"')
    assert sum("uid" in one for one in objects) == text.count('"uid"')
    assert sum(line.startswith('"config": {') and line.endswith("}") for line in lines) == text.count('"config"')


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_whatever_stands_in_a_file_is_refused_or_harmless(data: st.DataObject) -> None:
    document = json.loads(exported(2))
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(places()))
        value = data.draw(st.sampled_from(HOSTILE))
        try:
            put(document, place, copy.deepcopy(value))
        except (KeyError, IndexError, TypeError):  # what the first one has replaced
            continue
    blocks = accepted(json.dumps(document))
    if blocks is not None:
        assert_harmless(blocks)


@settings(deadline=None)
@given(data=st.data())
def test_bytes_of_a_file_may_change(data: st.DataObject) -> None:
    content = bytearray(exported(2).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    blocks = accepted(bytes(content))
    if blocks is not None:
        assert_harmless(blocks)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("block_q", "64; asm"),
        ("block_q", 63),
        ("block_q", 64.0),
        ("block_q", True),
        ("block_q", 2**64),
        ("block_q", 10**4000),
        ("block_q", None),
        ("block_q", [64]),
        ("family", "../mma"),
        ("family", ["mma"]),
        ("{{ 7 * 7 }}", 1),
        ("unknown", 1),
    ],
)
def test_a_configuration_goes_through_the_families_parser(text: str, parameter: str, value: Any) -> None:
    document = json.loads(text)
    document["problems"][0]["kernels"][0]["config"][parameter] = value
    with pytest.raises(InvalidExport, match=r"^problems\[0\]\.kernels\[0\]\.config.*$"):
        read_export(json.dumps(document))


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ('"median_ms": 14.0', '"median_ms": NaN'),
        ('"median_ms": 14.0', '"median_ms": Infinity'),
        ('"median_ms": 14.0', '"median_ms": 1e999'),
        ('"median_ms": 14.0', '"median_ms": -14.0'),
        ('"median_ms": 14.0', '"median_ms": "14.0"'),
        ('"median_ms": 14.0', '"median_ms": 15.0'),  # outside of its interval
        ('"samples": 30', '"samples": 30, "samples": 31'),
        ('"samples": 30', '"samples": 30, "extra": 1'),
        ('"samples": 30', '"samples": 30.0'),
        ('"kind": "emulated"', '"kind": "guessed"'),
        ('"NVIDIA H200"', '"<img src=x>"'),
        ('"batch": 1', '"batch": true'),
        ('"batch": 1', '"batch": 0'),
        ('"batch": 1', '"batch": 2147483647'),
        ('"seqlen_q": 4096', '"seqlen_q": 2147483647'),
        ('"dtype": "bf16"', '"dtype": "fp32"'),
        ('"softcap": false', '"softcap": 0'),
        ('"at": "2', '"at": "1'),
        ('"at": "20', '"at": 20, "was": "'),
        ('"machine_code": null', '"machine_code": "$(reboot)"'),
        ('"version": 1', '"version": 2'),
        ('"version": 1', '"version": true'),
        ('"format": "bwdtune database"', '"format": "another"'),
        ('"wins": "whole"', '"wins": "always"'),
        ('"problems": [', '"problems": [0, '),
    ],
)
def test_what_no_database_holds_is_refused(text: str, was: str, becomes: str) -> None:
    assert was in text
    with pytest.raises(InvalidExport, match=r"^[^\n]+$"):
        read_export(text.replace(was, becomes, 1))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_export_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidExport, match=r"^[^\n]+$"):
        read_export(content)


def test_a_measurement_of_another_problems_search_is_refused(text: str) -> None:
    document = json.loads(text)
    (search,) = document["problems"][1]["searches"]
    document["problems"][0]["kernels"][0]["measurements"][0]["search"] = search["uid"]
    with pytest.raises(InvalidExport, match="none of this problem"):
        read_export(json.dumps(document))


def test_why_a_search_failed_comes_without_markup(text: str) -> None:
    document = json.loads(text)
    document["problems"][1]["searches"][0]["error"] = "no 'space' left <b>here</b>\n"
    assert read_export(json.dumps(document))[1].searches[0].error == "no ?space? left ?b?here?/b??"


def test_a_problem_of_before_a_feature_was_added_has_none_of_it(text: str) -> None:
    document = json.loads(text)
    del document["problems"][1]["problem"]["deterministic"]
    assert read_export(json.dumps(document))[1].problem == Problem.parse("8_16_4096_128", causal=True)


def test_what_was_only_claimed_is_not_handed_on(examples: Any) -> None:
    examples.contender(PRESETS["v2"])
    (honest,) = examples.store.measurements(examples.problem)
    claimed = examples.variant(PRESETS["v1"])
    examples.store.record_measurement(examples.problem, claimed, honest.record, trusted=False)
    (block,) = read_blocks(examples.store)
    assert [kernel.variant.config for kernel in block.kernels] == [PRESETS["v2"]]


def test_problems_can_be_selected(text: str) -> None:
    wanted = Problem.parse("8_16_4096_128", causal=True)
    with closing(Store.open(DATABASE, read_only=True)) as store:
        assert [block.problem for block in read_blocks(store, {wanted})] == [wanted]
