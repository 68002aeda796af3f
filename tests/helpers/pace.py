"""Bounds of time that mean the same on every machine: a slow or busy one is given more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

ORDINARY = 0.015  # what `_work` takes on the cores that the bounds were written on


@contextmanager
def processor_seconds(most: float) -> Iterator[None]:
    """The block takes at most so many seconds of an ordinary core: this one's are told by a fixed piece of work around it."""
    before = _work()
    started = time.process_time()
    yield
    took = time.process_time() - started
    slower = max(1.0, before / ORDINARY, _work() / ORDINARY)
    assert took <= most * slower, f"{took:.2f} s, and a fixed piece of work {slower:.1f} times as long as on an ordinary core"


def _work() -> float:
    started = time.process_time()
    words: dict[str, int] = {}
    for n in range(30_000):
        words[str(n % 5000)] = len(words) + n
    return time.process_time() - started
