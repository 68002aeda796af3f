"""Where the program prints: rich's console, through which no text from elsewhere can steer the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich import console as rich_console
from rich.errors import MarkupError
from rich.segment import Segment
from rich.text import Text

from teamtr_lora.common.visible import end_above, go_above, visible

if TYPE_CHECKING:
    from rich.live import Live


class Console(rich_console.Console):
    """What rich itself writes between the texts (colours, the moves of a bar) is all that reaches the terminal as an escape.
    Texts are shown as they are: no number in them is coloured, and no :name: becomes a picture."""

    def __init__(self, **look: Any) -> None:
        super().__init__(**{"highlight": False, "emoji": False} | look)

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


def console(*, stderr: bool = False) -> Console:
    """On a terminal and in a notebook lines wrap between words; in a file or a pipe a line is a line, however long."""
    made = Console(stderr=stderr)
    made.soft_wrap = not (made.is_terminal or made.is_jupyter)
    return made


def print_hanging(console: rich_console.Console, text: str, indent: int = 4) -> None:
    """A line whose continuation, where it has to wrap, is indented."""
    if console.soft_wrap:
        console.print(text)
    else:
        console.print(*console.render_str(text).wrap(console, max(20, console.width - indent)), sep="\n" + " " * indent)
