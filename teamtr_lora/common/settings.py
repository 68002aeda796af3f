"""What settings are made of: the strict base class of every section, the texts that sections share, and rules between keys.

A section is a pydantic model that the user writes as YAML or as keyword arguments. Sections live beside the code they configure,
so this module imports nothing of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

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


def nearest(word: str, known: Iterable[str], at_least: float = 0.6) -> str | None:
    """The valid name most like `word`, if any is like it at all."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=at_least)
    return close[0] if close else None
