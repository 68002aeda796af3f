"""What would steer a terminal is shown, whoever prints it; everything else is left alone."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata
import warnings

import pytest
from rich.progress import Progress
from rich.text import Text

from teamtr_lora.common.consoles import Console
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.visible import VisibleStream, json_escaped, visible, visible_line, visible_streams

ATTACKS = {
    "clear the screen": "\x1b[2J",
    "colour": "\x1b[31m",
    "window title": "\x1b]0;owned\x07",
    "hyperlink": "\x1b]8;;http://evil\x1b\\here\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;aGk=\x07",
    "device control": "\x1bP$qm\x1b\\",
    "C1 sequence": "\x9b31m",
    "C1 command": "\x9d0;owned\x9c",
    "carriage return": "fine\rowned",
    "backspace": "fine\b\b\b\bowned",
    "form feed": "a\x0cb",
    "NUL": "a\0b",
    "delete": "a\x7fb",
    "override": "a\u202eb",
    "isolate": "a\u2066b\u2069",
    "mark": "a\u200fb",
    "zero width": "a\u200bb\u2060c\ufeffd",
    "soft hyphen": "a\xadb",
    "line separator": "a\u2028b",
    "tag": "a\U000e0041b",
    "lone surrogate": "a\ud800b\udcff",
}
KEPT = "plain text, tabs\tand lines\nÄ é 中文 العربية हिन्दी 🙂 ❤️ [red]brackets[/] \\x1b"


def steers(text: str) -> list[str]:
    """Independent of the implementation: by Unicode's own categories."""
    found = [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t"]
    return [f"U+{ord(c):04X}" for c in found]


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_what_steers_is_shown(attack: str) -> None:
    assert steers(attack) and not steers(visible(attack))
    assert not steers(visible_line(f"{attack}\nnext\tcell")) and "\n" not in visible_line(f"{attack}\nnext")


def test_every_code_point_that_steers_or_has_no_width_is_shown() -> None:
    arabic_signs = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}  # of category Cf, but drawn
    egyptian = set(range(0x13430, 0x13440))  # joiners of hieroglyphs
    codes = [c for c in range(sys.maxunicode + 1) if c not in arabic_signs | egyptian]
    assert not steers(visible("".join(map(chr, codes))).replace("\r\n", "\n"))


def test_ordinary_text_is_left_alone() -> None:
    assert visible(KEPT) == KEPT and visible("one\r\ntwo") == "one\r\ntwo"
    assert visible("\x1b[1m\u202e\U000e0041") == "\\x1b[1m\\u202e\\U000e0041"


@pytest.mark.parametrize("attack", [*ATTACKS.values(), KEPT])
def test_json_keeps_the_value(attack: str) -> None:
    dumped = json_escaped(json.dumps({attack: [attack]}, ensure_ascii=False, indent=1))
    assert json.loads(dumped) == {attack: [attack]} and not steers(dumped)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_no_channel_of_a_command_lets_it_through(
    attack: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with visible_streams():
        print("a name:", attack)
        print(attack)
        logging.getLogger("teamtr_lora.x").warning("a file: %s", attack)
        sys.stderr.write(warnings.formatwarning(UserWarning(attack), UserWarning, "f", 1))
        sys.stderr.writelines([attack, "\n"])
        for terminal in (True, False):
            console = Console(file=None, force_terminal=terminal, color_system=None, width=200)
            console.print(attack, Text(attack), f"[bold]{attack}[/bold]")
    assert sys.stdout is out
    ours = ("\x1b[1m", "\x1b[0m")  # bold, by rich itself
    text = out.getvalue() + err.getvalue()
    for sequence in ours:
        text = text.replace(sequence, "")
    assert not steers(text), text
    assert not steers(str(UserError(attack)))
    # pytest sends what was logged to another process, which a lone surrogate would end
    request.config.pluginmanager.get_plugin("logging-plugin").report_handler.reset()  # type: ignore[union-attr]


def test_a_link_and_broken_markup_in_a_name_do_nothing() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, highlight=False)
    console.print("[link=http://evil]here[/link]")
    console.print("a name [/] with brackets")
    assert "\x1b]8" not in out.getvalue() and "a name [/] with brackets" in out.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_printed_beside_a_bar_stands_above_it_without_its_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", Terminal())
    with visible_streams():
        with Progress(console=Console(stderr=True, force_terminal=True, width=80), auto_refresh=False):
            print("beg", end="", file=sys.stderr)
            print("un \x1b[8mhidden\x1b]8;;http://evil\x1b\\", file=sys.stderr)
        print("after", file=sys.stderr)
    text = terminal.getvalue()
    assert "begun \\x1b[8mhidden\\x1b]8;;http://evil" in text and "after\n" in text
    assert "\x1b[8m" not in text and "\x1b]8" not in text


def test_bars_are_redrawn_and_overwrite_nothing_else() -> None:
    out = io.StringIO()
    stream = VisibleStream(out)  # type: ignore[arg-type]
    for text in ("\r 10%", "\r 20% \x1b[2J", "\n", "\r 10% second", "\x1b[A", "\n"):
        stream.write(text)
    assert out.getvalue() == "\r 10%\r 20% \\x1b[2J\n\r 10% second\x1b[A\n"
    out.truncate(0)
    out.seek(0)
    for text in ("trusted", "\rowned", "\n", "\x1b[A", "owned", "\n"):
        stream.write(text)
    assert out.getvalue() == "trusted\\rowned\n\\x1b[Aowned\n"
    out.truncate(0)
    out.seek(0)
    print("trusted", file=stream)  # type: ignore[call-overload]
    print("\rowned", "\x1b[A", "\n\x1b[A\x1b[A", file=stream)  # type: ignore[call-overload]
    assert out.getvalue() == "trusted\n\rowned \\x1b[A \n\\x1b[A\\x1b[A\n", "no line of others, by no combination of writes"


def test_what_the_terminal_cannot_encode_is_escaped_too() -> None:
    raw = io.BytesIO()
    stream = VisibleStream(io.TextIOWrapper(raw, encoding="latin-1"))
    stream.write("Ä 中\n")
    stream.flush()
    assert raw.getvalue() == "Ä ".encode("latin-1") + b"\\u4e2d\n"
