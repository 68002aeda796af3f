"""What a response states as its answer, and the comparisons that need no algebra."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction

LONGEST = 2_000  # characters of an answer worth looking at; the longest reference of MATH has under 200

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
HASHES = re.compile(r"####[ \t]*\\?\$?[ \t]*(-?[0-9.,]*[0-9])")  # grade-school-math's own pattern, and an optional dollar sign
ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

_NUMBER = r"(-?)(\d+|\d{1,3}(?:,\d{3})+)?(?:\.(\d+))?"
_PLAIN = re.compile(_NUMBER)
_WHOLE = re.compile(
    r"[\s$]*(?:[a-zA-Z][a-zA-Z+\s]*=)?[\s$]*(?:\\text\{\s*)?(-?(?:\d+|\d{1,3}(?:,\d{3})+))(?:\.0+)?(?:\s*\})?(?:\^\{?\\circ\}?)?[\s$.]*"
)
_RATIO = re.compile(r"(-?)(?:(\d+)/(\d+)|\\[dt]?frac\{(-?\d+)\}\{(\d+)\}|\\[dt]?frac(\d)(\d))")
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{([^{}]*)\}")
_NOISE = re.compile(r"\\[!,;: ]|\\left(?![a-z])|\\right(?![a-z])|\s|\$|\\\$|\^\\circ|\^\{\\circ\}|~")
_BASE = re.compile(r"\d_\{?(\d+)\}?\s*$")
_UNIT = re.compile(r"([^a-zA-Z]*|\\[dt]?frac[^a-zA-Z]*)\\text\{([a-zA-Z ]+)\}\s*")  # a number and its unit
_NO_UNIT = re.compile(r"\b(?:and|or|percent\w*)\b", re.IGNORECASE)
_UNIT_POWER = re.compile(r"\\(?:text|mbox|mathrm)\{[^{}]*\}\^\{?(\d+)\}?\s*$")


def last_box(text: str) -> tuple[int, str] | None:
    """Where the last box starts and what is in it; nothing when it is not closed (the official rule)."""
    opened = BOX.match(text, max(text.rfind("\\boxed"), text.rfind("\\fbox"), 0))
    inside = _balanced(text, opened.end()) if opened else None
    return None if opened is None or inside is None else (opened.start(), inside.strip())


def _balanced(text: str, start: int) -> str | None:
    depth, position = 1, start
    for position in range(start, min(len(text), start + LONGEST)):
        character = text[position]
        if character in "{}" and text[position - 1] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start:position]
    return None


def last_hashes(text: str) -> tuple[int, str] | None:
    found = deque(HASHES.finditer(text), 1)
    return (found[0].start(), found[0][1]) if found else None


def last_answer_line(text: str) -> tuple[int, str] | None:
    found = deque(ANSWER_LINE.finditer(text), 1)
    if not found:
        return None
    line = found[0][1].strip().strip("*").strip()
    box = last_box(line)
    return found[0].start(), box[1] if box else line.rstrip(".").strip("$").strip()


Reader = Callable[[str], tuple[int, str] | None]


def stated(text: str, readers: tuple[Reader, ...]) -> str | None:
    """The answer that stands last in the text; None without a box or marker, whatever else the text says."""
    found = [place for reader in readers if (place := reader(text)) is not None]
    answer = max(found)[1] if found else ""
    return answer if 0 < len(answer) <= LONGEST else None


def integer(text: str) -> int | None:
    """A whole number written as one, with a name before or a degree sign after it at most."""
    found = _WHOLE.fullmatch(text)
    return int(found[1].replace(",", "")) if found and len(found[1]) < 60 else None


def number(text: str) -> Fraction | None:
    """An integer, decimal or ratio of integers, written plainly or in LaTeX."""
    text = _NOISE.sub("", text).rstrip(".")
    if len(text) > 60:
        return None
    if plain := _PLAIN.fullmatch(text):
        sign, whole, decimals = plain.groups()
        if whole is None and decimals is None:
            return None
        return Fraction(f"{sign}{(whole or '0').replace(',', '')}.{decimals or '0'}")
    if ratio := _RATIO.fullmatch(text):
        top, bottom = [part for part in ratio.groups()[1:] if part is not None]
        return Fraction(int(top), int(bottom)) * (-1 if ratio[1] else 1) if int(bottom) else None
    return None


def plain(text: str) -> str:
    """The text without spacing, dollar and degree signs and text wrappers."""
    while (shorter := _WRAPPED.sub(r"\1", text)) != text:
        text = shorter
    text = _NOISE.sub("", text).rstrip(".")
    return text[1:-1] if re.fullmatch(r"\([A-Z]\)", text) else text  # a choice


def canonical(text: str) -> str:
    r"""Equal for answers that are plainly the same, such as 1/2, 0.5 and \frac12: what a majority counts."""
    value = number(text)
    return plain(text) if value is None else str(value)


def quick(gold: str, answer: str) -> bool | None:
    """Whether the two are equal, where that is plain to see; None where algebra must decide."""
    for suffix in (_BASE, _UNIT_POWER):
        ends = [suffix.search(side) for side in (gold, answer)]
        if ends[0] and ends[1] and int(ends[0][1]) != int(ends[1][1]):
            return False  # another base or unit, which a parser takes for decoration
    if (unit := _UNIT.fullmatch(answer)) and not _NO_UNIT.search(unit[2]):
        answer = unit[1]  # math-verify drops such words too
    first, second = number(gold), number(answer)
    if first is not None and second is not None:
        return first == second
    if plain(gold) == plain(answer) != "":
        return True
    return None
