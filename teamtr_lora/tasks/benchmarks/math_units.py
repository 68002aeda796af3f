"""Numbers with their units: 18 dollars, £18, 5 cm^2, 18%, 2 million. A unit beside a number is no mistake, a variable is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST_NUMBER = 60  # characters
LONGEST = 200

_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|hbox|operatorname)\s*\{([^{}]*)\}")
_NOISE = re.compile(r"\\[!,;: ]|\\left(?![a-z])|\\right(?![a-z])|\\displaystyle(?![a-z])|\s|\$|\\\$|\^\\circ|\^\{\\circ\}|[~°]")
_SIGNS = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-", "，": ","})
_WHOLE = r"(?:\d{1,3}(?:\{?,\}?\d{3})+|\d+)"
_PLAIN = re.compile(rf"([-+]?)({_WHOLE})?(?:\.(\d*))?")
_MIXED = re.compile(r"\s*([-+]?)\s*(\d+)(?:\s+(\d+)\s*/\s*(\d+)|\s*\\[dtc]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d)))\s*\.?")
_REPEATING = re.compile(r"([-+]?)(\d*)\.(\d*)\\overline\{(\d+)\}")
_RATIO = re.compile(
    r"([-+]?)(?:(\d+)/(\d+)|\\[dtc]?frac\{(-?\d+)\}\{(-?\d+)\}|\\[dtc]?frac(\d)(\d)|\\[dtc]?frac\{(-?\d+)\}(\d)|\\[dtc]?frac(\d)\{(-?\d+)\})"
)
_DEGREES = re.compile(r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])|°)\s*(?:[CF](?![a-zA-Z]))?")
_GROUPED = re.compile(r"(?<=\d)(?:\\[,; ]|[ ~\u00a0\u202f])(?=\d{3}(?!\d))")  # 10\,080 and 10 080
_COMMAS = re.compile(r"(?<=\d)(?:\{,\}|,?\\!)\s*(?=\d{3}(?!\d))")  # 10{,}080 and 10,\!080
_BRACED = re.compile(r"(?<!\\)\{\s*\d{1,3}(?:,\d{3})+\s*\}")  # \frac{1}{10,080}

_MONEY = r"(?:\\?\$|[£€¥₹]|\\(?:pounds|euro|yen)(?![a-z])|(?:US|CA|AU)\$|\b(?:USD|EUR|GBP|Rs\.?|INR)(?![a-z]))"
_VALUE = r"[-+]?\s*(?:(?:\d+\s*)?\\[dtc]?frac[\s\d{}-]+|\.?\d(?:[\d.,{} ]|\\[!,;: ])*(?:/\s*\d+)?|\d*\.\d*\\overline\{\d+\})"
_WORDS = r"[a-zA-Z](?:[a-zA-Z]|[\s./()-]|\^\{?[23]\}?|[²³'’])*"
_MEASURE = re.compile(
    rf"\s*(?:(?P<minus>-\s*)?{_MONEY}\s*)?(?P<value>{_VALUE})(?P<gap>\s*)(?:{_MONEY}|¢)?\s*(?P<percent>\\?%)?"
    rf"\s*(?:(?P<words>/?\s*{_WORDS})(?:\^\{{?(?P<power>\d+)\}}?)?)?[\s.,;]*"
)
_LETTERS = re.compile(r"\s*[-+]?[0-9.,]+\s*[a-zA-Z]{1,3}\s*")
_POWER = re.compile(r"\^\{?([23])\}?|([²³])|\b(?:squared?|sq)\b|\b(cubic|cu|cubed)\b", re.IGNORECASE)
_SHORT = re.compile(  # units of one or two letters
    "[mgshlL]|[cdmkn]m|in|ft|yd|mi|lb|oz|[km]g|[mcdk]l|mL|hr|[ap]m|st|nd|rd|th|sq|cu|pt|qt|kW|Hz|[rR]s|[kMGT]B"
)
_PERCENT = {"percent", "percentage", "pct"}
_TIMES: dict[str, int | Fraction] = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_TIMES |= {"dozen": 12, "dozens": 12, "halves": Fraction(1, 2), "quarters": Fraction(1, 4)}
_ORDINALS = ["third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"]
_TIMES |= {f"{word}s": Fraction(1, place + 3) for place, word in enumerate(_ORDINALS)}
_TIMES |= {"hundredths": Fraction(1, 100), "thousandths": Fraction(1, 1000)}
_RAISED = {"squared": 2, "cubed": 3}
_NEGATIVE = re.compile(r"\s*(?:negative|minus)\s+(?=[\d.\\$£€¥₹])", re.IGNORECASE)
_ASKED = re.compile(r"\bhow many ([a-z]+)", re.IGNORECASE)
_NO_UNIT = re.compile(
    "and|or|not|isn?|was|are|but|than|plus|minus|over|to|if|nor|pi|sin|cos|tan|log|exp|ln|max|mod|gcd|lcm|choose|sqrt|"
    "divided|multiplied|half|quarter|from|between|approximately|about|maybe|wrong|incorrect|infinity|inf|undefined|"
    "hundred|thousand|[mbtr]+illion|dozens?|factorial|doubled|tripled|quadrupled|halved|halves|quarters|negative|below|root|"
    "(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth|millionth)s?|"
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:twen|thir|for|fif|six|seven|eigh|nine)ty",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Measure:
    value: Fraction
    percent: bool = False
    power: int | None = None  # of the unit, where it is stated
    times: int | Fraction = 1  # the value is in millions, or so


def unwrapped(text: str, around: str = "") -> str:
    """Without the commands that only set type; `around` goes on both sides of what stood in them."""
    while (shorter := _WRAPPED.sub(lambda found: f"{around}{found[1]}{around}", text)) != text:
        text = shorter
    return text


def tight(text: str) -> str:
    """Without spacing, dollar and degree signs."""
    return _NOISE.sub("", text.translate(_SIGNS)).rstrip(".")


def ungrouped(text: str) -> str:
    """Without the commas between groups of three digits, where they cannot be those of a list."""
    return _BRACED.sub(lambda found: found[0].replace(",", ""), _COMMAS.sub("", text))


def number(text: str) -> Fraction | None:
    """An integer, decimal, mixed number or ratio of integers, written plainly or in LaTeX."""
    if len(text) > LONGEST:
        return None
    if mixed := _MIXED.fullmatch(text):
        units, top, bottom = [int(part) for part in mixed.groups()[1:] if part is not None]
        if 0 < top < bottom:
            return (units + Fraction(top, bottom)) * (-1 if mixed[1] == "-" else 1)
    text = _GROUPED.sub("", text.translate(_SIGNS))
    if re.search(r"\d\s+\d", text) and "frac" not in text:
        return None  # two numbers
    text = tight(text)
    if len(text) > LONGEST_NUMBER:
        return None
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    if plain := _PLAIN.fullmatch(text):
        sign, whole, decimals = plain.groups()
        if whole is None and not decimals:
            return None
        return Fraction(f"{sign}{re.sub('[{},]', '', whole or '0')}.{decimals or '0'}")
    if repeating := _REPEATING.fullmatch(text):
        sign, whole, once, again = repeating.groups()
        value = Fraction(f"{whole or '0'}.{once or '0'}") + Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(once))
        return -value if sign == "-" else value
    if ratio := _RATIO.fullmatch(text):
        top, bottom = [int(part) for part in ratio.groups()[1:] if part is not None]
        return Fraction(top, bottom) * (-1 if ratio[1] == "-" else 1) if bottom else None
    return None


def measure(text: str) -> Measure | None:
    """A number with at most a currency, percent sign or unit; None where anything else is said."""
    if len(text) > LONGEST:
        return None
    text = _NEGATIVE.sub("-", _DEGREES.sub(" ", unwrapped(text.rstrip(" .,;"), " ").translate(_SIGNS)), 1)
    found = _MEASURE.fullmatch(re.sub(r"\s{3,}", "  ", text))  # five parts of the pattern could share a run of spaces
    value = number(found["value"]) if found else None
    if found is None or value is None:
        return None
    value = -value if found["minus"] else value
    words = re.findall(r"[a-zA-Z]+", found["words"] or "")
    percent, times = bool(found["percent"]), Fraction(1)
    if words and words[0].lower() in _RAISED:  # after a unit it is the unit's
        value, words = value ** _RAISED[words[0].lower()], words[1:]
    while words and words[0].lower() in _TIMES:
        times, words = times * _TIMES[words[0].lower()], words[1:]
    if words and words[0].lower() in _PERCENT:
        percent, words = True, words[1:]
    attached = found.string[: found.start("words")][-1:].isdigit() and (found["words"] or "/")[0] != "/"
    if not all(_is_unit(word, attached and place == 0) for place, word in enumerate(words)):
        return None
    return Measure(value * times, percent, _power(found) if words else None, times)


def without_asked(text: str, problem: str) -> str:
    """Without the word for an amount that the problem counts: where it asks how many dozen, 5 dozen is 5."""
    for word in dict.fromkeys(_ASKED.findall(problem)):
        if {word.lower(), word.lower().rstrip("s")} & _TIMES.keys():
            text = re.sub(rf"(?<=[\d\s{{]){word.rstrip('s')}s?(?![a-zA-Z])", "", text, count=1, flags=re.IGNORECASE)
    return text


def no_unit(text: str) -> bool:
    """A number beside one to three letters that are no unit: 18x is not 18."""
    return bool(_LETTERS.fullmatch(text)) and measure(text) is None


def _is_unit(word: str, attached: bool) -> bool:
    """Letters right after a number may be variables; a word of four is none."""
    return bool(_SHORT.fullmatch(word)) or (len(word) >= 3 + attached and not _NO_UNIT.fullmatch(word))


def _power(found: re.Match[str]) -> int | None:
    if found["power"]:
        return int(found["power"])
    power = _POWER.search(found["words"])
    if power is None:
        return None
    return int(power[1]) if power[1] else 3 if power[3] or power[2] == "³" else 2
