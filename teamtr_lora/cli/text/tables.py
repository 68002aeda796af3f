"""Tables, and numbers in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from teamtr_lora.common.consoles import Console, print_hanging


def table_of(title: str, *columns: str, left: int = 1, **look: Any) -> Table:
    """A table whose columns hold numbers, but for the first `left` of them."""
    table = Table(title=title, **look)
    for place, name in enumerate(columns):
        table.add_column(escape(name), justify="left" if place < left else "right", overflow="fold")
    return table


def print_table(console: Console, table: Table) -> None:
    """A table that is too wide for the console, so that words and numbers would be broken, becomes a list: a block a row."""
    _, right, _, left = table.padding
    needed = [_longest_word([column.header, *column.cells]) + left + right + 1 for column in table.columns]
    if sum(needed) + 1 <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(table.title, style="italic")
    names = [str(column.header) for column in table.columns]
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        pairs = [f"{name} {cell}" for name, cell in zip(names, cells, strict=True) if str(cell)]
        print_hanging(console, "  " + ", ".join(pairs))


def _longest_word(texts: Iterable[Any]) -> int:
    return max((len(word) for text in texts for word in Text.from_markup(str(text)).plain.split()), default=0)


def known(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def with_error(value: float | None, error: float | None, form: str = ".4f") -> str:
    return known(value, form) + ("" if error is None else f" ± {error:{form}}")
