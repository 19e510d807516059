"""Tables: whatever the width, what always stays is whole, and what is left out is named."""

from __future__ import annotations

import pytest
from rich.console import Console

from bwdtune.tuner.text_table import Column, TextTable, numeric

SHAPE = "2_16_16384_128"
CONFIG = "t64 block_kv=64 query_groups=2 exchange=1 q_stages=3 k_in_registers=1 staggered=0"


def rendered(width: int) -> str:
    columns = [Column("shape"), Column("GPU", optional=2), Column("configuration", folds=True)]
    table = TextTable("title", [*columns, *numeric("ms"), *numeric("max error", "threads", optional=1)], "a notice")
    table.add_row(SHAPE, "NVIDIA H200", CONFIG, "15.569", "2.0e-03", "256", bold=True)
    table.add_row(SHAPE, "[red]not markup", "v2", "16.2")
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize("width", [66, 80, 120, 160, 240])
def test_nothing_that_stays_is_cut(width: int) -> None:
    text = rendered(width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    assert SHAPE in text
    assert "15.569" in text
    assert all(word in text for word in CONFIG.split())
    assert "a notice" in text


def test_what_is_left_out_is_named_and_the_least_important_goes_first() -> None:
    narrow, wide = rendered(80), rendered(240)
    assert "NVIDIA H200" not in narrow
    assert "left out at this width: GPU" in narrow
    assert "NVIDIA H200" in wide
    assert CONFIG in wide
    assert "left out" not in wide
    assert "[red]not markup" in wide


def test_a_row_has_no_more_cells_than_columns() -> None:
    with pytest.raises(ValueError, match="2 cells"):
        TextTable("title", [Column("shape")]).add_row("a", "b")
