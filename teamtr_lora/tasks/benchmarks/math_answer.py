"""What a response states as its answer, and the comparisons that need no algebra."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable
from fractions import Fraction

from teamtr_lora.tasks.benchmarks.math_units import Measure, measure, no_unit, tight, ungrouped, unwrapped, without_asked

LONGEST = 2_000  # characters of an answer worth looking at; the longest reference of MATH has under 200

BARE_BOX = re.compile(r"\\boxed[ \t]+(-?[0-9a-zA-Z][0-9a-zA-Z.,/]*)(?<![.,])(?=\s*(?:\$|\.?\s|\.?\Z))")  # Hendrycks reads it too
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
# grade-school-math's own pattern, and what may stand before the number: a currency, a name, bold type
# (possessive: three runs of spaces side by side are tried in every way otherwise)
HASHES = re.compile(r"####[ \t]*+(?:\*\*)?(?:[a-zA-Z]{1,20}[ \t]*+=[ \t]*+)?(-?[ \t]*+(?:\\?\$|[£€¥₹])?[ \t]*+-?[0-9.,]*[0-9])")
ANSWER_LINE = re.compile(r"(?:answer|答案)[\s*]*[:：][\s*]*([^\n]+)", re.IGNORECASE)

_IN_MATHS = re.compile(r"\\\(((?:[^\\]|\\[^()])+)\\\)|\\\[((?:[^\\]|\\[^\[\]])+)\\\]")  # \(18\) and \[18\]
LONGEST_BASE = 100
_BASE = re.compile(
    r".*?[0-9A-Za-z}](?P<sub>_)(?:\{\s*(?:\\text\{\s*)?([0-9]{1,2}|[a-z]+)\s*\}{1,2}|([0-9]{1,2}))[\s.$]*", re.DOTALL
)
_BASES = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]  # from 2 on
_BASE_NAMES = {2: "binary", 8: "octal", 16: "hexadecimal"}
_NAME = re.compile(r"[\s$]*(?:[a-zA-Z][a-zA-Z+\s]{0,40}|\\(?:text|mbox|mathrm)\{[^{}]{0,60}\})\s*=")
_DOUBT = re.compile(
    r"\b(?:not|isn|wrong|incorrect|plus|minus|negative|below|root|factorial|(?:squar|cub|doubl|tripl|quadrupl|halv)ed|dozens?|half|"
    r"halves|(?:third|quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth|millionth)s?)\b",
    re.IGNORECASE,
)
_APART = re.compile(r"\s*-?[0-9.]+(?:\s+[0-9.]+)+\s*")  # numbers with nothing between them
# the last: 10 hours 30 minutes
_SEVERAL = re.compile(r";|,(?!\s?\d{3}(?!\d))|\b(?:or|and)\b|(?<=[a-zA-Z])\.?\s+(?=-?\d)", re.IGNORECASE)
_LAST_COMMA = re.compile(r"(?:,|(?<!\s))\s*+\\(?:text|mbox|textrm|mathrm)\{\s*,\s*(?:and|or)?\s*\}")
_COEFFICIENT = re.compile(r"\A\s*-?\d{1,3}(?:,\d{3})+(?=\s*(?:\\(?:pi|sqrt)|[a-zA-Z](?![a-zA-Z])))")  # 1,000\pi
_ABOUT = re.compile(r"\A\s*(?:\\approx(?![a-z])|≈)")
_UNSEEN = re.compile(r"\\[hv]?phantom\s*(?:\{[^{}]*\}|\S)")
_PI_FRACTION = re.compile(r"\\[dtc]?frac\s*\\pi\s*(\d|[a-zA-Z])")
_ROOT = re.compile(r"√\s*(\d+|[a-zA-Z])")
_SIGNS = str.maketrans(
    {"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "√": r"\sqrt"}
    | {"×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup "}
    | {"±": r"\pm ", "−": "-", "°": r"^\circ ", "²": "^2", "³": "^3", "∈": r"\in "}
)
ROUNDED = 5e-7  # how far from a fraction its decimal may be: math-verify compares six places
_TOWER = re.compile(r"\d\s*\^[\s{(]*(\d{1,9})\s*\^[\s{(]*(\d{1,9})")
_LONG_POWER = re.compile(r"\d\s*\^[\s{(]*\d{5}|\d{5}\s*\)?\s*!|(?:(?:[2-9]|\d\d)\s*\^[\s{(]*){4,}\d")
_NESTED = re.compile(r"[({\[](?:\s*[({\[]){40,}")  # no answer opens so many at once
_CLOSED_INFINITY = re.compile(r"\[\s*-\s*\\infty|\\infty\s*(?:\\right)?\s*\]")


def last_box(text: str) -> tuple[int, str] | None:
    """Where the last box starts and what is in it; nothing when it is not closed (the official rule)."""
    place = max(text.rfind("\\boxed"), text.rfind("\\fbox"), 0)
    if bare := BARE_BOX.match(text, place):
        return place, bare[1]
    opened = BOX.match(text, place)
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
    return found[0].start(), box[1] if box else line.rstrip(".。").strip("$").strip()


Reader = Callable[[str], tuple[int, str] | None]


def stated(text: str, readers: tuple[Reader, ...]) -> str | None:
    """The answer that stands last in the text; None without a box or marker, whatever else the text says."""
    found = [place for reader in readers if (place := reader(text)) is not None]
    answer = max(found)[1] if found else ""
    if whole := _IN_MATHS.fullmatch(answer):
        answer = (whole[1] or whole[2]).strip()
    return answer if 0 < len(answer) <= LONGEST else None


def integer(text: str) -> int | None:
    """A whole number written as one, with a name before or a unit after it at most."""
    found = measure(_unnamed(text))
    return int(found.value) if found and not found.percent and found.value.denominator == 1 and "/" not in text else None


def _unnamed(text: str) -> str:
    """Without `x =` before it."""
    name = _NAME.match(text)
    return text[name.end() :] if name else text


def plain(text: str) -> str:
    """The text without spacing, dollar and degree signs and text wrappers."""
    text = tight(unwrapped(text))
    return text[1:-1] if re.fullmatch(r"\([A-Z]\)", text) else text  # a choice


def canonical(text: str) -> str:
    r"""Equal for answers that are plainly the same, such as 1/2, 0.5 and \frac12: what a majority counts."""
    text = _unnamed(text).strip() or text
    found = measure(text)
    return plain(text) if found is None else f"{found.value}{'%' if found.percent else ''}"


def quick(gold: str, answer: str, problem: str = "") -> bool | None:
    """Whether the two are equal, where that is plain to see; None where algebra must decide.

    `problem` may name a base, or ask how many dozen.
    """
    if not re.search("[!^]", gold) and _huge(answer):
        return False  # algebra would run out of time over it
    if _CLOSED_INFINITY.search(answer) and not _CLOSED_INFINITY.search(gold):
        return False  # a parser opens such an interval silently
    (gold_digits, gold_base), (digits, base) = _in_base(gold), _in_base(answer)
    if base:  # a parser takes the base for decoration
        meant = base == gold_base if gold_base else base == 10 or _mentions(problem, base)
        return meant and gold_digits == digits
    if gold_base and gold_digits == digits:
        return True
    if _APART.fullmatch(answer) and measure(answer) is None:
        return gold.split() == answer.split()  # 20 4 is not 204
    if plain(gold) == plain(answer) != "":
        return True
    answer = without_asked(answer, problem)
    golds = [measure(part) for part in gold.split("=", 3)]  # 0.56 = 56\%
    said = [measure(part) for part in (_unnamed(answer) if len(golds) == 1 else answer).split("=", 3)]
    if None in said and None not in golds and (no_unit(answer) or _DOUBT.search(answer)):
        return False  # a parser drops such letters and words
    if None in said and len(golds) == 1 and golds[0] and _names_another(golds[0], answer):
        return False  # a parser reads 10 cm or 11 cm as 10
    if None in said or None in golds:
        return None
    return all(any(_same(first, second) for first in golds if first) for second in said if second)


def _names_another(gold: Measure, answer: str) -> bool:
    """Several values are given where one is right, and one of them is another."""
    parts = _SEVERAL.split(unwrapped(answer, " "))
    said = (measure(_unnamed(part)) for part in (parts if len(parts) > 1 else []))  # read up to the first other one only
    return any(not _same(gold, part) for part in said if part)


def _huge(text: str) -> bool:
    """A tower of powers, power or factorial with more than ten thousand digits, or brackets in brackets without end."""
    towers = [(int(base), int(power)) for base, power in _TOWER.findall(text)]
    return bool(_LONG_POWER.search(text) or _NESTED.search(text)) or any(
        power * math.log10(max(base, 1)) > 4 for base, power in towers
    )


def _same(first: Measure, second: Measure) -> bool:
    if first.power and second.power and first.power != second.power:
        return False  # square and cubic feet
    if first.percent != second.percent:  # 5% is 0.05, and also 5 where a question asks how many percent
        share, other = (first, second) if first.percent else (second, first)
        return share.value == 100 * other.value or (share.value == other.value and abs(other.value) >= 1)
    if first.times >= 1000 and second.times == 1 and first.value == second.value * first.times:
        return True  # the question may have asked for millions
    apart = abs(first.value - second.value)
    rounded = _ends(first.value) != _ends(second.value) and apart < ROUNDED and apart < 1e-5 * abs(first.value)
    return apart == 0 or rounded


def _ends(value: Fraction) -> bool:
    """Whether it can be written as a decimal."""
    return pow(10, value.denominator.bit_length(), value.denominator) == 0 or value.denominator == 1


def for_algebra(text: str) -> str:
    """What the parser misreads: digits in groups, lists with their last comma inside the words, what is not printed, signs that
    are no LaTeX."""
    text = _COEFFICIENT.sub(lambda found: found[0].replace(",", ""), ungrouped(_ABOUT.sub("", text, 1)), 1)
    text = _PI_FRACTION.sub(r"\\frac{\\pi}{\1}", _UNSEEN.sub("", _ROOT.sub(r"\\sqrt{\1}", text)))
    return _LAST_COMMA.sub(",", text.translate(_SIGNS)).rstrip(". ")


def _in_base(text: str) -> tuple[str, int | None]:
    """The digits of a number and the base that it is written in, if it says one."""
    found = _BASE.fullmatch(text) if len(text) <= LONGEST_BASE else None
    named = (found[2] or found[3]).lower() if found else ""
    base = int(named) if named.isdecimal() else _BASES.index(named) + 2 if named in _BASES else 0
    digits = plain(re.sub(r"^\s*[a-zA-Z]\s*=", "", text[: found.start("sub")] if found else text)).upper()
    if not 2 <= base <= 36 or not re.fullmatch(r"-?[0-9A-Z]*[0-9][0-9A-Z]*", digits):
        return digits, None
    letters = [int(letter, 36) for letter in digits if letter.isalpha()]
    return digits, base if all(value < base for value in letters) else None


def _mentions(problem: str, base: int) -> bool:
    words = [str(base), *_BASES[base - 2 : base - 1]]
    spelled = rf"\bbase[\s$\\-]*(?:{'|'.join(words)})\b|_\{{?{base}(?!\d)|\b{_BASE_NAMES.get(base, 'base-' + words[-1])}\b"
    return bool(re.search(spelled, problem, re.IGNORECASE))
