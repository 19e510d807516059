"""The page as a file: what it says, that it is whole, and that no database can put HTML or a script into it.

`test_browser` looks at it with a browser; these need none.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_databases import HOSTILE, OTHER_PROBLEM
from search_fakes import PROBLEM

from bwdtune.db.store import Store
from bwdtune.gen.families import short_form
from bwdtune.tuner.cli import main

SHAPE = ["--shape", PROBLEM.shape, "--causal"]
VOID = {"meta", "link", "input", "img", "br", "hr"}


class Page(HTMLParser):
    """A page, parsed.

    Attributes:
        tags: Its elements, each with its attributes.
        text: What a person reads, without the script and the style.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert not self._open, "everything is closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, "elements are nested"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in self.raw:
            self.raw[self._open[-1]].append(data)
        else:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def parsed(path: Path) -> tuple[Page, str]:
    """A page, and its source."""
    source = path.read_text(encoding="utf-8")
    return Page(source), source


def assert_self_contained(page: Page) -> None:
    """One script and one style, both its own and allowed by name; nothing is loaded."""
    (policy,) = (tag["content"] or "" for tag in page.all("meta") if tag.get("http-equiv"))
    assert policy.startswith("default-src 'none'; ")
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        assert page.all(tag) == [{}]
        (text,) = page.raw[tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    for tag, attributes in page.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "video", "audio"), tag
        for name, value in attributes.items():
            assert not name.startswith("on"), f"{tag} has {name}"
            assert name not in ("src", "srcset", "style", "action", "formaction", "srcdoc"), f"{tag} has {name}"
            if name in ("href", "xlink:href"):
                assert value == "data:," or (value or "").startswith("#"), value


def test_a_page_is_whole(report: Callable[..., Path]) -> None:
    page, source = parsed(report("searched"))
    assert_self_contained(page)
    assert source.startswith("<!DOCTYPE html>")
    names = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(names) == len(set(names))
    assert {(link["href"] or "").removeprefix("#") for link in page.all("a")} <= set(names)
    assert any(tag.get("name") == "viewport" for tag in page.all("meta"))
    assert len(source.encode()) < 1_000_000, "it can be sent by mail"


def test_one_problem_has_no_index_and_all_its_figures(report: Callable[..., Path], searched: Path) -> None:
    page, _ = parsed(report("searched", "--shape", OTHER_PROBLEM.shape, "--causal"))
    assert "Back to the index" not in page.text
    for heading in ("Convergence", "Winner beside peers", "Roofline", "Searches", "Candidates"):
        assert heading in page.text
    with closing(Store.open(searched, read_only=True)) as store:
        (winner,) = (one for one in store.winners() if one.problem == OTHER_PROBLEM)
    assert f"{winner.median_ms:.3f} ms" in page.text
    assert short_form(winner.config) in page.text
    assert winner.advantage
    assert f"{winner.advantage:.2f} ×" in page.text
    for kernel in ("F.sdpa() (PyTorch's default), cudnn", "F.sdpa() (Flash Attention)"):
        assert kernel in page.text


def test_a_database_has_an_index_and_a_section_each(report: Callable[..., Path]) -> None:
    page, source = parsed(report("searched"))
    assert len(page.all("section")) == 4
    for where in ("NVIDIA H200", "NVIDIA H200, emulating sm_120", "sm_120a, without a GPU"):
        assert where in page.text
    assert "Roofline of NVIDIA H200" in page.text
    assert source.count('class="problem"') == 4


def test_every_candidate_is_a_row_with_its_figures(report: Callable[..., Path]) -> None:
    page, source = parsed(report("searched", *SHAPE))
    assert len(page.all("section")) == 3
    (trials, *_) = source.split('<div class="trials">')[1:]
    rows = re.findall(r'<tr role="row".*?</tr>', trials.split("<tbody")[1], re.DOTALL)
    assert len(rows) == 30 + sum("data-value" not in row.split("</td>")[0] for row in rows)
    outcomes = [re.search('data-outcome="(.*?)"', row) for row in rows]
    assert {found[1] for found in outcomes if found} == {"measured", "refused", "failed"}
    measured = next(row for row in rows if 'data-outcome="measured"' in row)
    for text in ("168", "2.0e-03", " to "):
        assert text in measured
    for reason in ("spills: sm_90a: 400 bytes", "compiler: sm_90a: error: expected a", "gradients: wrong: dq is off"):
        assert reason in page.text


def test_refusals_are_counted_by_kind(report: Callable[..., Path]) -> None:
    page, _ = parsed(report("searched", *SHAPE))
    counted = page.text.split("Refused and failed")[1].split("Candidates by the kind")[0].split()
    kinds = {kind: int(counted[counted.index(kind) + 1]) for kind in ("spills", "compiler", "error", "gradients")}
    assert kinds["gradients"] == 1
    assert all(kinds.values())


def test_what_parameters_are_worth_says_how_it_is_known(report: Callable[..., Path]) -> None:
    page, _ = parsed(report("searched", *SHAPE))
    worth = page.text.split("What each parameter is worth")[1].split("Searches")[0]
    assert "ridge regression" in worth
    assert "of the variance" in worth
    assert "takes 8" in worth, "there are too few of some families"


@pytest.mark.parametrize("options", [[], SHAPE], ids=["all", "one"])
def test_hostile_texts_are_text(report: Callable[..., Path], options: list[str]) -> None:
    page, source = parsed(report("hostile", *options))
    assert_self_contained(page)
    assert HOSTILE in page.text
    assert HOSTILE not in source
    assert page.text.count(HOSTILE) >= 20
    assert "{{ 7*7 }}" in page.text


def test_nothing_stored_is_one_line(tmp_path: Path, searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, output = tmp_path / "empty.sqlite", tmp_path / "page.html"
    with closing(Store.open(empty)):
        pass
    assert main(["report", "--db", str(empty), "-o", str(output)]) == 1
    assert capsys.readouterr().err.startswith("tuner: nothing is stored about any problem yet: run `tuner search`")
    assert main(["report", "--db", str(searched), "--shape", "1_1_64_64", "-o", str(output)]) == 1
    assert "nothing is stored about 1_1_64_64 bf16 full yet" in capsys.readouterr().err
    assert not output.exists()


def test_a_page_that_cannot_be_written_is_one_line(searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = searched.parent / "nowhere" / "page.html"
    assert main(["report", "--db", str(searched), *SHAPE, "-o", str(output)]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("tuner: ")
    assert str(output) in errors


def test_the_database_is_left_as_it_was(
    searched: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(searched.parent)
    before = searched.read_bytes()
    searched.chmod(0o444)
    assert main(["report", "--db", os.fspath(searched)]) == 0
    assert re.fullmatch(r"report.html: 4 searches, \d+ kB\n", capsys.readouterr().out)
    assert Path("report.html").exists()
    assert searched.read_bytes() == before
