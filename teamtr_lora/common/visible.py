"""Text from elsewhere on a terminal: characters that would steer it, hide or reorder text are shown as their escapes.

Prompts, ids, file names, names of bases and errors of other libraries may hold anything. `visible_streams` puts the one filter
in front of stdout and stderr, so that whatever prints, logs or raises goes through it. A rich console knows which escapes are its
own; ours (common/consoles.py) passes every text through `visible` itself and is let through here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# Control characters but for line ends and tabs, what has no width, what reorders text (bidirectional overrides and isolates),
# other line separators, tags, and halves of surrogate pairs, which no terminal can be sent.
_STEERING = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff\ud800-\udfff]|\r(?!\n)"
)
_LINE_ENDS = str.maketrans({"\n": "\\n", "\r": "\\r", "\t": "\\t"})
_BAR_MOVES = re.compile("\n*(\x1b\\[A)+")


def visible(text: str) -> str:
    """The text with such characters written as in a Python string (\\x1b, \\u202e); lines and tabs stay as they are."""
    return _STEERING.sub(lambda found: _escaped(found[0]), text)


def visible_line(text: str) -> str:
    """The same on one line, for a name or an id: a line end in it could pass for the next line of our own output."""
    return visible(text).translate(_LINE_ENDS)


def json_escaped(dumped: str) -> str:
    """JSON text in which such characters are \\u escapes, as JSON has them: it still holds the same value."""
    return _STEERING.sub(lambda found: "".join(f"\\u{unit:04x}" for unit in _utf16(found[0])), dumped)


def _escaped(char: str) -> str:
    code = ord(char)
    if char == "\r" or code < 0x100:
        return "\\r" if char == "\r" else f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _utf16(char: str) -> list[int]:
    data = char.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2)]


_live: list[Callable[[str], None]] = []


@contextmanager
def visible_streams() -> Iterator[None]:
    """stdout and stderr behind the filter, for as long as a command runs."""
    before = sys.stdout, sys.stderr
    streams = [stream if stream is None or isinstance(stream, VisibleStream) else VisibleStream(stream) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def go_above(print_line: Callable[[str], None]) -> None:
    """From here on whole lines go to `print_line`: a progress bar stands on the terminal, and they belong above it."""
    _live.append(print_line)


def end_above() -> None:
    """Takes the last `go_above` back."""
    _live.pop()


class VisibleStream:
    """A text stream that shows what would steer the terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream  # by this name rich finds the stream behind a proxy
        self._kept = ""  # the beginning of a line that goes above a bar
        self._in_bar = False  # the line began with a carriage return: tqdm's bars are redrawn by these
        self._at_start = True
        self._blank = 0  # empty lines above: what a bar below others may go up over

    def write(self, text: str) -> int:
        shown = visible(text)
        if _live and self.isatty():
            *lines, self._kept = (self._kept + shown).split("\n")
            for line in lines:
                _live[-1](line)
            return len(text)
        bar = self._bar(text) if shown != text else ""
        self._put(bar or shown)
        if text:
            if not text.strip("\n") and (self._at_start or self._in_bar):
                self._blank += len(text)
            elif not bar:
                self._blank = 0
            self._at_start = text.endswith("\n")
            self._in_bar = not self._at_start and (self._in_bar or text.startswith("\r"))
        return len(text)

    def _bar(self, text: str) -> str:
        """A bar that is drawn over itself, as it is. Nothing else is on such a line, so nothing else can be overwritten."""
        up = text.count("\x1b") - text.count("\n")
        if self._in_bar and _BAR_MOVES.fullmatch(text) and up <= self._blank:
            self._blank -= up
            return text
        return "\r" + visible(text[1:]) if text.startswith("\r") and (self._at_start or self._in_bar) else ""

    def _put(self, text: str) -> None:
        stream = self.rich_proxied_file
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self._kept and not _live:
            self._put(self._kept)
            self._kept = ""
        self.rich_proxied_file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)
