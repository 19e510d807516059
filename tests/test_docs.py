"""What the documents name is there, and they can be read in an editor."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

import bwdtune

ROOT = Path(bwdtune.__file__).resolve().parent
PAGES = sorted(
    path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
)
LONGEST_LINE = 132
FLOORS = "benchmarks|db|docs|examples|gen|runtime|templates|tests|tuner"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(rf"(?:{FLOORS})/[\w./-]*\w/?")

pages = pytest.mark.parametrize("page", PAGES, ids=str)


@cache
def text_of(page: Path) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found.resolve().relative_to(ROOT)), target


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths from the root of the repository, in backquotes; `*` stands for any name, and so do `NAME` and `FAMILY`."""
    for code in CODE.findall(FENCE.sub("", text_of(page)).replace("NAME", "*").replace("FAMILY", "*")):
        if FILE.fullmatch(code.replace("*", "x")):
            assert list(ROOT.glob(code.rstrip("/"))), code


def test_the_source_of_a_kernel_is_saved_as_the_docs_say(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = re.findall(r"python -c '(.*?)' > kernel.cu", text_of(Path("docs/host.md")), re.DOTALL)
    exec(script, {})
    assert capsys.readouterr().out.startswith("// Attention backward")


@pages
def test_no_line_is_too_long(page: Path) -> None:
    """But for rows of tables and code, which cannot be broken."""
    text = FENCE.sub(lambda code: "\n" * code[0].count("\n"), text_of(page))
    long = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > LONGEST_LINE and not line.startswith(("|", "    "))
    ]
    assert not long, f"lines over {LONGEST_LINE} characters: {long}"


@pages
def test_a_table_is_whole(page: Path) -> None:
    """Its rows have one number of cells, and a row of dashes stands below the first: a blank line would break it."""
    lines = FENCE.sub("", text_of(page)).splitlines()
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if not line.startswith("|"):
            continue
        if not before.startswith("|"):
            assert re.fullmatch(r"[| :-]+", after), f"a table begins without a head: {line}"
        else:
            assert _cells(line) == _cells(before), line


def _cells(row: str) -> int:
    return len(re.findall(r"(?<!\\)\|", CODE.sub("", row)))


def test_the_index_names_every_page() -> None:
    named = {(ROOT / "docs" / target).resolve() for target in LINK.findall(text_of(Path("docs/README.md")))}
    there = {path.resolve() for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"}
    assert there <= named
