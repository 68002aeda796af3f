"""Where the program prints."""

from __future__ import annotations

from rich.console import Console


def console(*, stderr: bool = False) -> Console:
    """On a terminal and in a notebook lines wrap between words; in a file or a pipe a line is a line, however long."""
    made = Console(stderr=stderr, highlight=False, emoji=False)
    made.soft_wrap = not (made.is_terminal or made.is_jupyter)
    return made
