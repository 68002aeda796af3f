"""A chat template is a program that came with a base: it runs in a process of its own, with bounds on time and memory.

What it renders there is a few conversations of ours, once. No text of a dataset, a model or a user ever reaches it.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from teamtr_lora.common.errors import UserError
from teamtr_lora.team.template_trial import SECONDS, TOO_LARGE

TRIAL_SECONDS = 4.0 * SECONDS  # by the wall clock: other work may have the processor
FIXED_DAY = datetime.date(2024, 7, 26)  # some templates print the date: a run must not depend on the day it is resumed

Conversation = tuple[tuple[tuple[str, str], ...], bool]
"""Turns of role and content, and whether the template opens the next answer."""


@lru_cache(maxsize=32)
def rendered(
    template: str, names: tuple[tuple[str, str | bool], ...], conversations: tuple[Conversation, ...]
) -> list[tuple[str | None, str]]:
    """The text of each conversation, or None and the template's reason; `names`: its variables, such as bos_token."""
    given = {"template": template, "names": dict(names), "conversations": conversations, "day": FIXED_DAY.isoformat()}
    command = [sys.executable, "-I", "-W", "ignore", str(Path(__file__).with_name("template_trial.py"))]
    try:
        done = subprocess.run(command, input=json.dumps(given).encode(), capture_output=True, timeout=TRIAL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise _refused(f"was not finished after {TRIAL_SECONDS:g} seconds") from error
    if done.returncode < 0:  # the system ended it: out of processor time, or of memory
        raise _refused(f"was not finished after {SECONDS} seconds of work")
    if done.returncode == TOO_LARGE:
        raise _refused("fills the memory")
    if done.returncode != 0:
        raise _refused("ended the process that renders it")
    return [(text, why) for text, why in json.loads(done.stdout)]


def _refused(why: str) -> UserError:
    return UserError(f"base.source: the tokenizer's chat template {why} on a short conversation; use another base")
