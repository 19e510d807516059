"""Tables for people that cut nothing: what does not fit a terminal is left out by column, and said to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_BORDER_WIDTH = 1
_PADDING_WIDTH = 2
_READABLE_WIDTH = 40  # of a text in several lines


@dataclass(frozen=True)
class Column:
    """A column of a `TextTable`.

    Attributes:
        heading: Its heading, which may take several lines.
        numeric: Whether its cells are aligned to the right.
        folds: Whether its cells may take several lines, broken between words.
        optional: Columns with larger numbers are the first to be left out of a table that is too wide; with 0 it always
            stays, and its cells take several lines before anything of them is lost.
    """

    heading: str
    numeric: bool = False
    folds: bool = False
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
        for index, width in zip(shown, self._widths(shown, options.max_width), strict=True):
            column = self.columns[index]
            table.add_column(
                column.heading, justify="right" if column.numeric else "left", overflow="fold", width=width
            )
        for row, bold in zip(self._rows, self._bold, strict=True):
            table.add_row(*(Text(row[index]) for index in shown), style="bold" if bold else None)
        yield table

    def _fitting(self, width: int) -> list[int]:
        """The columns that are shown, by index."""
        shown = list(range(len(self.columns)))
        while _with_borders(self._least_width(index) for index in shown) > width:
            # The rightmost of those that are missed least.
            least = max(shown, key=lambda index: (self.columns[index].optional, index))
            if not self.columns[least].optional:
                break
            shown.remove(least)
        return shown

    def _widths(self, shown: Sequence[int], width: int) -> list[int | None]:
        """The columns' widths: what is left of a table's goes to texts that fold, and then to headings."""
        widths = {index: self._least_width(index) for index in shown}
        left = width - _with_borders(widths.values())
        if left < 0:
            return [None] * len(shown)  # rich folds all of them
        for index in sorted(shown, key=lambda index: not self.columns[index].folds):
            more = min(left, self._full_width(index) - widths[index])
            widths[index] += more
            left -= more
        return [widths[index] for index in shown]

    def _least_width(self, index: int) -> int:
        from rich.cells import cell_len

        column, cells = self.columns[index], [row[index] for row in self._rows]
        words = [word for text in cells for word in text.split()] if column.folds else cells
        least = max(map(cell_len, [*column.heading.split(), *words]), default=0)
        return max(least, min(self._full_width(index), _READABLE_WIDTH)) if column.folds else least

    def _full_width(self, index: int) -> int:
        from rich.cells import cell_len

        return max(map(cell_len, [self.columns[index].heading, *(row[index] for row in self._rows)]))


def _with_borders(widths: Iterable[int]) -> int:
    return _BORDER_WIDTH + sum(width + _PADDING_WIDTH + _BORDER_WIDTH for width in widths)
