"""How this program was started, and what its user calls things there."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_on_command_line: ContextVar[bool] = ContextVar("on_command_line", default=False)
# What a recipe has in its task section and a script passes to TeamTRTrainer; of the other keys there, only the rows themselves.
OF_THE_TRAINER = ("reward_range", "on_reward_error", "on_overlap", "success_at_least", "answer")


def program() -> str:
    """What to type to run this program again: its path where it is not on the shell's."""
    on_path = shutil.which("teamtr-lora") is not None or os.path.basename(sys.argv[0]) != "teamtr-lora"
    return "teamtr-lora" if on_path else shlex.quote(os.path.relpath(sys.argv[0]))


@contextmanager
def command_line() -> Iterator[None]:
    """Inside, advice is for somebody at the command line; elsewhere it is for a script."""
    token = _on_command_line.set(True)
    try:
        yield
    finally:
        _on_command_line.reset(token)


def said(*, cli: str, python: str) -> str:
    """The words for the interface that was used."""
    return cli if _on_command_line.get() else python


def in_a_recipe(key: str, value: Any = None) -> str:
    """A key as a recipe or the command line writes it, with a value where one is given."""
    return key if value is None else f"{key}={value}"


def in_a_script(key: str, value: Any = None) -> str:
    """A recipe's key as a script writes it: settings need no section, the team's are those of TeamSpec, the data are given."""
    section, _, name = key.partition(".")
    if section in ("base", "team"):
        return key.removeprefix("team.") + ("" if value is None else f"={value!r}")
    name, _, inner = (name or section).partition(".")
    if section == "task" and name not in OF_THE_TRAINER:
        return "reward_funcs" if name == "reward" else "eval_dataset" if name.startswith("test_") else "train_dataset"
    if inner and not inner.isdecimal():  # a mapping within a section
        return f"{name}[{inner!r}]" if value is None else f"{name}={{{inner!r}: {value!r}}}"
    return name if value is None else f"{name}={value!r}"
