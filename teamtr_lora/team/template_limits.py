"""Bounds for a chat template, which is a program that came with a base: one that loops or explodes ends in one line.

A template is first tried in a process of its own, with bounds on time and memory. Later renders, of contents that nobody has seen
yet, are bounded in time here.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from teamtr_lora.common.errors import UserError
from teamtr_lora.team.template_trial import SECONDS, TOO_LARGE

TRIAL_SECONDS = 4.0 * SECONDS  # by the wall clock: other work may have the processor
RENDER_SECONDS = 10.0
MOST_CHARACTERS = 1 << 24
_TURNS = [("system", "s" * 50), ("user", "u" * 5000), ("assistant", "a" * 50), ("user", "mark")]


class TooLongError(Exception):
    """Raised in the thread whose render took too long."""


@lru_cache(maxsize=32)
def check_template(template: str, names: tuple[tuple[str, str], ...]) -> None:
    """Refuses a template that does not come to an end. `names`: the special tokens by the names that templates use."""
    whole = [{"role": role, "content": text} for role, text in _TURNS]
    given = {"template": template, "names": dict(names), "conversations": [whole[1:2], whole[1:3], whole[:2], whole]}
    command = [sys.executable, "-I", "-W", "ignore", str(Path(__file__).with_name("template_trial.py"))]
    try:
        done = subprocess.run(command, input=json.dumps(given).encode(), capture_output=True, timeout=TRIAL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise _refused(f"was not finished after {TRIAL_SECONDS:g} seconds") from error
    if done.returncode < 0:  # the system ended it: out of processor time, or of memory
        raise _refused(f"was not finished after {SECONDS} seconds of work")
    if done.returncode == TOO_LARGE:
        raise _refused("needs more than a gigabyte of memory")


@contextmanager
def limited(seconds: float = RENDER_SECONDS) -> Iterator[None]:
    """TooLongError, in this thread, once `seconds` are over."""
    thread, lock, finished = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

    def stop() -> None:
        with lock:
            if not finished:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TooLongError))

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            finished = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # one that was about to come
        timer.cancel()


def _refused(why: str) -> UserError:
    return UserError(f"base.source: the tokenizer's chat template {why} on a conversation of four turns; use another base")
