"""Items that are both in the train and in the test split: found by their text up to spacing, case and punctuation."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Literal

from teamtr_lora.errors import UserError

OnOverlap = Literal["refuse", "drop", "allow"]
NAMED = 20  # pairs that an error names; more are counted

# spacing, and the signs that set a formula apart
_LATEX_SPACING = re.compile(r"\\[!,;: ()\[\]]|\\left(?![a-z])|\\right(?![a-z])|\\q?quad(?![a-z])|\\displaystyle(?![a-z])")
_SAME = (("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\cdots", "\\dots"), ("\\ldots", "\\dots"))


def normalised(text: str) -> str:
    """What two copies of one problem have in common. Letters, digits and mathematical signs are kept: 3+4 is not 3-4."""
    text = _LATEX_SPACING.sub("", unicodedata.normalize("NFKC", text)).casefold()
    for written, meant in _SAME:
        text = text.replace(written, meant)
    short = re.sub(r"[\s$.,;:!?'\"`’‘“”{}]+", "", text)
    return short or text


def shared_items(train: Iterable[tuple[str, str]], test: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(train id, test id) of every train item whose text is that of a test item; both sides give (id, text)."""
    known: dict[str, str] = {}
    for name, text in test:
        known.setdefault(normalised(text), name)
    return [(name, known[key]) for name, text in train if (key := normalised(text)) in known]


def refuse_overlap(pairs: list[tuple[str, str]], fix: str = "set task.on_overlap=drop") -> None:
    if pairs:
        named = ", ".join(f"{train} = {test}" for train, test in pairs[:NAMED])
        more = f" and {len(pairs) - NAMED} more" if len(pairs) > NAMED else ""
        raise UserError(
            f"{len(pairs)} train items are test items too, so the test would measure memory: {named}{more}; remove them from one "
            f"side, or {fix} to train without them"
        )
