"""Tables for people that cut nothing: what does not fit a terminal is left out by column, and said to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_BORDER_WIDTH = 1
_PADDING_WIDTH = 2


@dataclass(frozen=True)
class Column:
    """A column of a `TextTable`.

    Attributes:
        heading: Its heading, which may take several lines.
        numeric: Whether its cells are aligned to the right.
        optional: Columns with larger numbers are the first to be left out of a table that is too wide; with 0 it always
            stays, and its cells are folded before anything of them is lost.
    """

    heading: str
    numeric: bool = False
    optional: int = 0


def numeric(*headings: str, optional: int = 0) -> list[Column]:
    """Columns of numbers that are equally important."""
    return [Column(heading, numeric=True, optional=optional) for heading in headings]


class TextTable:
    """A table that `rich` can print, as wide as its console and no wider.

    Args:
        title: Above it.
        columns: From left to right.
        caption: Below it.
    """

    def __init__(self, title: str, columns: Sequence[Column], caption: str = "") -> None:
        self.title, self.columns, self.caption = title, tuple(columns), caption
        self._rows: list[tuple[str, ...]] = []
        self._bold: list[bool] = []

    def add_row(self, *cells: str, bold: bool = False) -> None:
        """Adds a row of one cell a column; cells that are missing on the right are empty."""
        if len(cells) > len(self.columns):
            raise ValueError(f"{len(cells)} cells in a table of {len(self.columns)} columns")
        self._rows.append((*cells, *[""] * (len(self.columns) - len(cells))))
        self._bold.append(bold)

    def add_section(self, rows: Iterable[Sequence[str]]) -> None:
        """Adds several rows."""
        for row in rows:
            self.add_row(*row)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        shown = self._fitting(options.max_width)
        left_out = [column.heading for index, column in enumerate(self.columns) if index not in shown]
        notes = [self.caption] if self.caption else []
        if left_out:
            notes.append(f"left out at this width: {', '.join(left_out)} (--json has them)")
        table = Table(
            title=self.title,
            title_justify="left",
            caption="\n".join(notes) or None,
            caption_justify="left",
        )
        for index in shown:
            column = self.columns[index]
            table.add_column(column.heading, justify="right" if column.numeric else "left", overflow="fold")
        if self._width(shown) <= options.max_width:  # else all are folded alike
            for index, made in zip(shown, table.columns, strict=True):
                made.min_width = self._column_width(index)
        for row, bold in zip(self._rows, self._bold, strict=True):
            table.add_row(*(Text(row[index]) for index in shown), style="bold" if bold else None)
        yield table

    def _fitting(self, width: int) -> list[int]:
        shown = list(range(len(self.columns)))
        while self._width(shown) > width:
            # The rightmost of those that are missed least.
            least = max(shown, key=lambda index: (self.columns[index].optional, index))
            if not self.columns[least].optional:
                break
            shown.remove(least)
        return shown

    def _width(self, shown: Sequence[int]) -> int:
        return _BORDER_WIDTH + sum(self._column_width(index) + _PADDING_WIDTH + _BORDER_WIDTH for index in shown)

    def _column_width(self, index: int) -> int:
        from rich.cells import cell_len

        words = self.columns[index].heading.split()
        return max(map(cell_len, [*words, *(row[index] for row in self._rows)]), default=0)
