"""Items that are both in the train and in the test split: found by their text up to spacing, case and punctuation."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Literal

from teamtr_lora.common.errors import UserError

OnOverlap = Literal["refuse", "drop", "allow"]
NAMED = 20  # pairs that an error names; more are counted

# what datasets put around a problem: DAPO's frame, and the sentence that asks for a box
_FRAME = re.compile(
    r"\A\s*Solve the following math problem step by step\.[^\n]{0,400}\n\s*\n"
    r"|Remember to put your answer on its own line after \W{0,3}Answer:\W{0,3}\s*\Z"
    r"|(?:Please |Let's )?(?:reason|think) step by step,? (?:and )?(?:put|output) [^.\n]{0,60}\\boxed\{[^{}]{0,20}\}\W*\Z",
    re.IGNORECASE,
)

_CHARACTERS = str.maketrans(
    {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "×": r"\times ", "·": r"\cdot ", "→": r"\to ", "∞": r"\infty ", "π": r"\pi "}
    | {"°": r"^\circ ", "÷": r"\div ", "±": r"\pm ", "√": r"\sqrt ", "∠": r"\angle ", "²": "^2", "³": "^3", "…": r"\dots "}
    | dict.fromkeys("−–—‐", "-")
)
_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|tt|normal)?|math(?:rm|bf|it)|emph|[mh]box|operatorname\*?)\s*\{([^{}]*)\}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{(?:align|aligned|equation|gather|gathered|center|split|eqnarray)\*?\}|\*\*|__")
_COMMAND = re.compile(r"\\([a-zA-Z]+)[ \t]*")
_SILENT = {"left", "right", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "quad", "qquad", "displaystyle", "limits", "rm", "bf"}
_SAME = {  # of commands that mean the same, the one kept
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), "frac"),
    **dict.fromkeys(("dbinom", "tbinom"), "binom"),
    **dict.fromkeys(("leq", "leqslant"), "le"),
    **dict.fromkeys(("geq", "geqslant"), "ge"),
    **dict.fromkeys(("lvert", "rvert", "vert"), "mid"),
    **dict.fromkeys(("cdots", "ldots", "dotsc", "dotsb", "dotsm"), "dots"),
    "neq": "ne",
    "rightarrow": "to",
}
_SIGN = {"mid": "|", "lt": "<", "gt": ">", "lbrace": "\\{", "rbrace": "\\}"}
_TIGHT = re.compile(r"\\!|\\,(?=\d{3}(?!\d))")
_SPACING = re.compile(r"\\[,;: ()\[\]$\\]|[~$]")
_TWO = re.compile(r"\\frac *([0-9a-z]) *([0-9a-z])")  # arguments without braces
_HALF = re.compile(r"(\\frac *\{[^{}]*\}) *([0-9a-z])")
_ONE = re.compile(r"(\\(?:frac|sqrt|mathbb|overline|vec) *|[\^_] *)([0-9a-z])")
_GROUPS = re.compile(r"\d{1,3}(?:\{?,\}?\d{3})+(?![\d,])")
_ARGUMENT = re.compile(r"\} ?(?=[{0-9a-z])")
# punctuation that carries meaning, and what it becomes: between digits, factorials, primes
_BETWEEN = re.compile(r"(\d) ?([.,:]|(?<= )) ?(?=\d)")
_KEPT = {".": "⋅", ",": "‚", ":": "∶"}
_AFTER = re.compile(r"(?:(?<=[\d)}])|(?<=\b[a-z]))(?:!|'(?![a-z]))")
_DROPPED = re.compile(r"[\s.,;:!?'\"`’‘“”{}。、「」]+")


def bare_problem(text: str) -> str:
    """The problem without the instruction that a dataset wraps it in."""
    return _FRAME.sub("", text).strip() if "Answer:" in text or "boxed" in text else text


def normalised(text: str) -> str:
    """What two copies of one problem have in common. What carries meaning is kept: 3+4 is not 3-4, nor 1.5 the same as 15."""
    short = bare_problem(text)
    short = short if short.isascii() else unicodedata.normalize("NFKC", short.translate(_CHARACTERS))
    short = " ".join(short.split())
    if "\\" in short:
        short = _ENVIRONMENT.sub(" ", _TIGHT.sub("", short))
        short = _WRAPPED.sub(_inside, _WRAPPED.sub(_inside, short))
        short = _COMMAND.sub(_command, short)
    short = _GROUPS.sub(lambda found: re.sub("[{,}]", "", found[0]), short.casefold().replace("**", ""))
    if "\\" in short or "^" in short or "_" in short or "}" in short:
        short = _ONE.sub(r"\1{\2}", _HALF.sub(r"\1{\2}", _TWO.sub(r"\\frac{\1}{\2}", short)))
        short = _ARGUMENT.sub("¦", short)
    short = " ".join(_SPACING.sub(" ", short).split())
    short = _BETWEEN.sub(lambda found: found[1] + _KEPT.get(found[2], "¦"), short)
    if "!" in short or "'" in short:
        short = _AFTER.sub(lambda found: "ǃ" if found[0] == "!" else "′", short)
    return _DROPPED.sub("", short) or text


def _inside(found: re.Match[str]) -> str:
    r"""The text inside a LaTeX formatting command such as \textbf{...}; its braces stay after ^ and _."""
    return f"{{{found[1]}}}" if found.string[max(0, found.start() - 1) : found.start()] in ("^", "_") else found[1]


def _command(found: re.Match[str]) -> str:
    name = _SAME.get(found[1], found[1])
    return "" if name in _SILENT else _SIGN.get(name, f"\\{name} ")


def shared_items(train: Iterable[tuple[str, str]], test: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(train id, test id) of every train item whose text is that of a test item; both sides give (id, text)."""
    known: dict[str, str] = {}
    for name, text in test:
        known.setdefault(normalised(text), name)
    return [(name, known[key]) for name, text in train if (key := normalised(text)) in known]


def refuse_overlap(pairs: list[tuple[str, str]], fix: str) -> None:
    if pairs:
        named = ", ".join(f"{train} = {test}" for train, test in pairs[:NAMED])
        more = f" and {len(pairs) - NAMED} more" if len(pairs) > NAMED else ""
        raise UserError(
            f"{len(pairs)} train items are test items too, so the test would measure memory: {named}{more}; remove them from one "
            f"side, or {fix} to train without them"
        )
