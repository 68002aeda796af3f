"""How this program was started, and what its user calls things there."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_on_command_line: ContextVar[bool] = ContextVar("on_command_line", default=False)
# What a recipe has in its task section and a script passes to TeamTRTrainer under another name.
_IN_PYTHON = {"task.reward": "reward_funcs", "task.path": "train_dataset"}


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


def setting(key: str, value: str = "") -> str:
    """A recipe's key, such as rollout.temperature, as the user writes it here: `temperature` in a script, whose settings need no
    section. `value`: as YAML writes it."""
    if _on_command_line.get():
        return f"{key}={value}" if value else key
    name = _IN_PYTHON.get(key, key.rpartition(".")[2])
    return f"{name}={value if _is_plain(value) else repr(value)}" if value else name


def _is_plain(value: str) -> bool:
    """Whether YAML and Python write the value alike."""
    return value.replace(".", "", 1).replace("-", "", 1).isdigit()
