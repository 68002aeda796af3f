"""Tables, and numbers in them."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from teamtr_lora.common.consoles import Console, longest_word, print_hanging


def table_of(title: str, *columns: str, left: int = 1, **look: Any) -> Table:
    """A table whose columns hold numbers, but for the first `left` of them."""
    table = Table(title=title, **look)
    for place, name in enumerate(columns):
        table.add_column(escape(name), justify="left" if place < left else "right", overflow="fold")
    return table


def print_table(console: Console, table: Table) -> None:
    """A table that is too wide for the console, so that words and numbers would be broken, becomes a list: a block a row."""
    _, right, _, left = table.padding
    room = console.width - (left + right + 1) * len(table.columns) - 1
    texts = [[Text.from_markup(str(text)).plain for text in (column.header, *column.cells)] for column in table.columns]
    words, lines = ([max(map(length, column)) for column in texts] for length in (_whole, len))
    if sum(words) <= room:
        for left_over, place in enumerate(sorted(range(len(words)), key=lambda i: lines[i] - words[i])):
            others = len(words) - left_over
            share = (room - sum(words)) // others  # columns that need less than it leave more to the rest
            words[place] = min(lines[place], words[place] + share)
            table.columns[place].width = words[place]
        with console.capture() as captured:
            console.print(table)
        for line in captured.get().splitlines():  # rich fills the last column up with spaces
            console.print(Text.from_ansi(line.rstrip()), soft_wrap=True)
        return
    if table.title:
        console.print(table.title, style="italic")
    names = [str(column.header) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        pairs = [f"{name} {cell}".strip() for name, cell in zip(names, cells, strict=True) if str(cell)]
        print_hanging(console, "  " + (", " if any(names) else "  ").join(pairs))


def _whole(cell: str) -> int:
    """The length of what may not be broken: a word, or an interval."""
    return len(cell) if cell.startswith("[") else longest_word(cell)


def known(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def with_error(value: float | None, error: float | None, form: str = ".4f") -> str:
    return known(value, form) + ("" if error is None else f" ± {error:{form}}")
