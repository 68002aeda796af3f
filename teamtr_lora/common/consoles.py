"""Where the program prints: rich's console, through which no text from elsewhere can steer the terminal."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich import console as rich_console
from rich.errors import MarkupError
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

from teamtr_lora.common.visible import end_above, go_above, visible

if TYPE_CHECKING:
    from rich.live import Live


class Console(rich_console.Console):
    """What rich itself writes between the texts (colours, the moves of a bar) is all that reaches the terminal as an escape.
    Texts are shown as they are: no number in them is coloured, and no :name: becomes a picture.

    On a terminal and in a notebook lines wrap between words; in a file or a pipe a line is a line, a row of a table too."""

    def __init__(self, **look: Any) -> None:
        super().__init__(**{"highlight": False, "emoji": False} | look)
        if not (self.is_terminal or self.is_jupyter or "width" in look or "COLUMNS" in os.environ):
            self.soft_wrap, self.width = True, _ENDLESS

    def render_str(self, text: str, **look: Any) -> Text:
        shown = visible(text)  # before it is laid out: a column is as wide as what it shows
        try:
            return super().render_str(shown, **look)
        except MarkupError:  # a name with brackets in it
            return super().render_str(shown, **{**look, "markup": False})

    def render(self, renderable: Any, options: rich_console.ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
                continue
            style = segment.style
            if style is not None and style.link:  # an address that the text does not show
                style = style.update_link(None)
            yield Segment(visible(segment.text), style)

    def set_live(self, live: Live) -> bool:
        """While a bar stands, what others print goes above it: through our filter, and not through rich's own, which would make
        colours and links of the escapes in it."""
        live._redirect_stdout = live._redirect_stderr = False
        go_above(lambda line: self.print(Text(line), soft_wrap=True))
        return super().set_live(live)

    def clear_live(self) -> None:
        super().clear_live()
        end_above()


_ENDLESS = 100_000


def say(text: str, *, stderr: bool = False) -> None:
    """One plain line, without colours."""
    print_hanging(Console(stderr=stderr), escape(text), indent=0)


def print_hanging(console: rich_console.Console, text: str, indent: int = 4) -> None:
    """A line whose continuation, where it has to wrap, is indented. A word that no line can hold, as a path, stays whole."""
    shown, width = console.render_str(text), max(20, console.width - indent)
    if console.soft_wrap or longest_word(shown.plain) > width:
        console.print(shown, soft_wrap=True)
    else:
        lines = shown.wrap(console, width)
        for line in lines:
            line.rstrip()
        console.print(*lines, sep="\n" + " " * indent)


def longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def wrapped(text: str, width: int) -> str:
    """Paragraphs and list points for a terminal of this width; code and tables stay as they are."""
    lines: list[str] = []
    paragraph: list[str] = []
    code = False
    for line in [*text.splitlines(), ""]:
        fence = line.startswith("```")
        flows = not (code or fence or line[:1] in ("", "|", "#"))
        if paragraph and (not flows or _POINT.match(line)):
            hang = " " * len(found[0]) if (found := _POINT.match(paragraph[0])) else ""
            joined = " ".join([paragraph[0], *map(str.strip, paragraph[1:])])
            lines += textwrap.wrap(joined, width, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
            paragraph = []
        (paragraph if flows else lines).append(line)
        code ^= fence
    return "\n".join(lines)


_POINT = re.compile(r" *(-|\d+\.) ")
