"""The recipe's keys as a page to read."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.markup import escape

from teamtr_lora.common.consoles import Console
from teamtr_lora.recipe.words import Key


def print_keys(keys: Sequence[Key]) -> None:
    console = Console()
    for key in keys:
        if not key.takes:
            lines, style = _lines(console, f"{key.name}  {key.meaning}", 0), "bold"
            console.print()
        else:
            default = f" = {key.default}" if key.default else ""
            tasks = f" Tasks: {', '.join(key.tasks)}." if key.tasks else ""
            lines = _lines(console, f"{key.name}{default}  ({key.takes})", 2) + _lines(console, key.meaning + tasks, 6)
            style = "cyan"
        console.print(escape("\n".join(lines)).replace(key.name, f"[{style}]{key.name}[/]", 1), soft_wrap=True)


def _lines(console: Console, text: str, indent: int) -> list[str]:
    wrapper = textwrap.TextWrapper(min(console.width, 130), " " * indent, " " * 6)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text)
