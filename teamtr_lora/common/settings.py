"""What settings are made of: the strict base class of every section, the texts that sections share, and rules between keys.

A section is a pydantic model that the user writes as YAML or as keyword arguments. Sections live beside the code they configure,
so this module imports nothing of theirs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from teamtr_lora.common.errors import UserError

SAFE_NAME = r"^[a-z][a-z0-9_-]{0,31}$"
DEVICE = r"^(auto|cpu|cuda(:[0-9]+)?)$"
DOTTED_PATH = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*[:.][A-Za-z_][A-Za-z0-9_]*$"
TASK_PATH = rf"{DOTTED_PATH}|^[A-Za-z_][A-Za-z0-9_-]*$"
DATA_FILE = r"\.(jsonl|jsonl\.gz|json|json\.gz|csv|parquet)$"
FOLDER = r"^[^\x00]+$"
SERVER_URL = r"^https?://[^/\s@]+(/[^\s]*)?$"
API_KEY_VARIABLE = r"^([A-Za-z_][A-Za-z0-9_]*)?API_KEY$"  # a stranger's recipe could send any other secret to its own server

# What a value that misses the pattern should have been, in words.
PATTERN_WORDS = {
    SAFE_NAME: "a safe file name: a lower-case letter, then up to 31 of a-z, 0-9, _ and -",
    DEVICE: "auto, cpu, cuda or cuda:N",
    DOTTED_PATH: "a Python callable written module:function",
    TASK_PATH: "a Python callable written module:function, or the name of a task that an installed package offers",
    FOLDER: "the path of a folder (not empty, no NUL character)",
    SERVER_URL: "an address such as http://host:8000",
    API_KEY_VARIABLE: "the name of an environment variable that ends in API_KEY (letters, digits and _)",
    DATA_FILE: "a file that ends in .jsonl, .json, .jsonl.gz, .json.gz, .csv or .parquet",
}

CallablePath = Annotated[str, Field(pattern=DOTTED_PATH)]
DataFile = Annotated[str, Field(pattern=DATA_FILE)]
Text = Annotated[str, Field(min_length=1)]
ApiKeyVariable = Annotated[str, Field(pattern=API_KEY_VARIABLE)]


class Section(BaseModel):
    """Strict: text such as "8" or "yes" is never taken for a number or a switch; ints still serve as floats."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=False)


@dataclass(frozen=True)
class OnThisMachine:
    """Marks a key that names something of one machine, as `Annotated[..., OnThisMachine("file")]`: a file that is read; a choice
    of servers and environment variables; or a text that may be a local path, or a name that is the same everywhere. Those who
    carry recipes to other machines look for the mark.
    """

    what: Literal["file", "choice", "path or name"]


def api_key(variable: str, key: str) -> str:
    """The API key in an environment variable, empty for none; `key` is the recipe's that names the variable."""
    found = os.environ.get(variable, "").strip()
    if not (found.isascii() and found.isprintable()):
        raise UserError(f"{key}: what {variable} holds is no API key (odd characters)")
    return found


Mistake = tuple[tuple[str | int, ...], Any, str, str]
"""A broken rule between keys: where, the value there, what is wrong, the fix."""


def refuse(title: str, mistakes: Iterable[Mistake]) -> None:
    """Raise all broken rules at once, each at its own key (a plain ValueError could name only the section)."""
    details = [
        InitErrorDetails(type=PydanticCustomError("rule", "{wrong}; {fix}", {"wrong": wrong, "fix": fix}), loc=loc, input=value)
        for loc, value, wrong, fix in mistakes
    ]
    if details:
        raise ValidationError.from_exception_data(title, details)


def nearest(word: str, known: Iterable[str], *, same_words: bool = False) -> str | None:
    """The valid name that `word` is a slip of: one or two letters, other separators, a plural, words swapped, shortened or left
    out. None where it is merely like one, or could be two: a wrong hint is worse than no hint. `same_words`: a plural, other
    separators and the order are all that may differ.
    """
    slips = [(slip, name) for name in dict.fromkeys(known) if (slip := _slip(word.lower(), name.lower())) is not None]
    slips = [(slip, name) for slip, name in slips if slip == 0 or not same_words]
    best = min((slip for slip, _ in slips), default=0)
    names = [name for slip, name in slips if slip == best]
    return names[0] if len(names) == 1 else None


def _slip(word: str, name: str) -> int | None:
    """How far `word` is from `name`, if it is a slip of it."""
    written, right = re.findall(r"[^\W_]+", word), re.findall(r"[^\W_]+", name)
    if sorted(map(_stem, written)) == sorted(map(_stem, right)):
        return 0
    letters, wanted = "".join(written), "".join(right)
    shorter = min(len(letters), len(wanted))
    most = 0 if shorter < 3 else 2 if shorter >= 8 and letters[0] == wanted[0] else 1
    for slips in range(most + 1):
        if _within(letters, wanted, slips):
            return slips
    pairs = [sorted(pair, key=len) for pair in zip(written, right, strict=False)]
    if len(written) == len(right) and all(short == long or long.startswith(short) and len(short) >= 3 for short, long in pairs):
        return 3
    return 4 if written and set(map(_stem, written)) < set(map(_stem, right)) else None


def _stem(word: str) -> str:
    return word.rstrip("s").rstrip("e") or word


def _within(word: str, name: str, slips: int) -> bool:
    """Whether so many slips make `word` of `name`: a letter too many, too few or wrong, or two neighbours swapped."""
    same = len(os.path.commonprefix([word, name]))
    word, name = word[same:], name[same:]
    if slips == 0 or not word or not name:
        return max(len(word), len(name)) <= slips
    swapped = len(name) > 1 and word[:2] == name[1::-1] and _within(word[2:], name[2:], slips - 1)
    return swapped or any(_within(word[a:], name[b:], slips - 1) for a, b in ((1, 0), (0, 1), (1, 1)))


def meant(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """How an error about an unknown name ends: with the one that is most like it, or with all there are (or `otherwise`)."""
    names = list(known)
    like = nearest(word, names)
    return f"did you mean {like!r}?" if like else otherwise or f"it has {', '.join(names) or 'none'}"


def known_agent(agent: str, agents: Iterable[str]) -> str:
    """The agent that --agent names; it must be one of the team's."""
    known = list(agents)
    if agent not in known:
        raise UserError(f"--agent {agent}: the team has no such agent; {meant(agent, known)}")
    return agent
