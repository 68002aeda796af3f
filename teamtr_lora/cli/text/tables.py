"""Tables, and numbers in them."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table


def table_of(title: str, *columns: str, left: int = 1, **look: Any) -> Table:
    """A table whose columns hold numbers, but for the first `left` of them."""
    table = Table(title=title, **look)
    for place, name in enumerate(columns):
        table.add_column(escape(name), justify="left" if place < left else "right", overflow="fold")
    return table


def known(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def with_error(value: float | None, error: float | None, form: str = ".4f") -> str:
    return known(value, form) + ("" if error is None else f" ± {error:{form}}")
