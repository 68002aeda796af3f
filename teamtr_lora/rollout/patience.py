"""Who is being waited for. An environment that never answers would otherwise be a run that stands still and says nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
_due = 15.0  # seconds of waiting until a word; twice as long after each, so that an environment that is always slow fills no log
_calls: dict[int, tuple[float, object, str]] = {}  # by thread: since when, whom, and for which item


@contextmanager
def waiting_for(whom: object, item: str) -> Iterator[None]:
    """Around what the user's code may never end: after some seconds a warning names it, and the item; nothing is broken off."""
    _watch()
    thread = threading.get_ident()
    outer = _calls.get(thread)
    _calls[thread] = (time.monotonic(), whom, item)
    try:
        yield
    finally:
        if outer is None:
            del _calls[thread]
        else:
            _calls[thread] = outer


@cache
def _watch() -> None:
    """One thread looks on, so that a call costs no thread of its own; a daemon, so that a run that ends never waits for it."""
    threading.Thread(target=_look_on, name="teamtr-lora-patience", daemon=True).start()


def _look_on() -> None:
    global _due
    pause = threading.Event()
    while not pause.wait(LOOK_SECONDS):
        for since, whom, item in list(_calls.values()):
            waited = time.monotonic() - since
            if waited >= _due:
                _due *= 2
                logger.warning("item %r: %s has not answered for %.0f s; still waiting", item, type(whom).__name__, waited)
