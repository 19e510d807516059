"""The record of compiled kernels: what is on it is not compiled, but for a sample, which has to agree."""

from __future__ import annotations

import compile_record
import pytest
from compile_record import Figures, Record, is_sampled, key_of, read, written
from compiled_code import device_code, libraries

from bwdtune.gen.build.compile_step import CompiledResources
from bwdtune.gen.device import H200
from bwdtune.gen.families import PRESETS
from bwdtune.gen.problem import Problem
from bwdtune.gen.render import render

TOOLKIT = "13.0.88"
KEYS = [key_of(str(number)) for number in range(1000)]
SAMPLED = next(filter(is_sampled, KEYS))
ANSWERED = next(key for key in KEYS if not is_sampled(key))


def figures(registers: int = 128) -> Figures:
    return {"resources": {"registers": registers}, "complaints": [], "machine_code": "0123", "info": {}}


@pytest.fixture
def record() -> Record:
    return read(written({key: ("a kernel", figures()) for key in (SAMPLED, ANSWERED)}, TOOLKIT), TOOLKIT)


def test_what_is_on_record_is_not_compiled(record: Record) -> None:
    assert record.answers(ANSWERED)
    assert record.judge(ANSWERED, "a kernel", None) == figures()
    assert not record.compiled


def test_another_text_is_compiled_and_judged_by_that(record: Record) -> None:
    unknown = key_of("another text")
    assert not record.answers(unknown)
    assert record.judge(unknown, "another", figures(255)) == figures(255)
    assert record.compiled == {unknown}


def test_a_sample_is_compiled_and_has_to_agree(record: Record) -> None:
    assert not record.answers(SAMPLED)
    assert record.judge(SAMPLED, "a kernel", figures()) == figures()
    with pytest.raises(AssertionError, match="make record"):
        record.judge(SAMPLED, "a kernel", figures(129))
    assert not record.compiled


def test_one_in_ten_is_in_the_sample() -> None:
    assert 50 < sum(map(is_sampled, KEYS)) < 150


def test_another_toolkit_compiles_for_itself() -> None:
    text = written({ANSWERED: ("a kernel", figures())}, TOOLKIT)
    assert not read(text, "13.1.2").answers(ANSWERED)
    assert not read("", TOOLKIT).answers(ANSWERED)


def test_what_nobody_asks_for_is_not_written_again(record: Record) -> None:
    record.judge(ANSWERED, "a kernel", None)
    record.judge(key_of("new"), "another", figures())
    text = written(record.asked, TOOLKIT)
    assert ANSWERED in text
    assert key_of("new") in text
    assert SAMPLED not in text


def test_kernels_are_judged_by_recorded_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorded(Record):
        def answers(self, key: str) -> bool:
            return True

        def judge(self, key: str, name: str, compiled: Figures | None) -> Figures:
            assert compiled is None
            return {"resources": resources, "complaints": complaints, "machine_code": "0123", "info": {}}

    monkeypatch.setattr(compile_record, "record", Recorded)
    resources = {name: number for number, name in enumerate(CompiledResources._fields)}
    complaints: list[str] = []
    problem = Problem.parse("8_16_4096_128")
    assert device_code(problem, PRESETS["w64"], H200).resources == CompiledResources(**resources)
    assert libraries([render(problem, PRESETS["w64"])], H200.arch)[0].machine_code == "0123"
    complaints.append("(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to")
    with pytest.raises(AssertionError, match="serialized"):
        device_code(problem, PRESETS["w64"], H200)
