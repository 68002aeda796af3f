"""Symbolic equality, in a process of its own: `python -P math_worker.py SECONDS`, a JSON pair a line in, 0 or 1 a line out.

A script that imports nothing of this package. math-verify keeps time by SIGALRM, which works in a main thread only, and no alarm
interrupts one huge power; so whoever asks also kills this process when no line comes back in time.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from types import FrameType
from typing import Any

MEMORY_BYTES = 4 * 2**30
TINY = 1e-2


class OutOfTime(BaseException):
    """Not an Exception: the libraries catch those."""


def _ring(_signal: int, _frame: FrameType | None) -> None:
    raise OutOfTime


def equal(gold: str, answer: str) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    how: list[Any] = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    # only what stood in the box is parsed, never the text around it
    sides = [parse(f"\\boxed{{{text}}}", how, fallback_mode="no_fallback", parsing_timeout=None) for text in (gold, answer)]
    return all(sides) and bool(verify(sides[0], sides[1], timeout_seconds=None)) and not _both_tiny_and_apart(*sides)


def _both_tiny_and_apart(gold: list[Any], answer: list[Any]) -> bool:
    """math-verify rounds to six decimals, where 2^-98 and 2^-99 are both 0; such numbers are compared by their ratio."""
    try:
        first, second = (abs(complex(side[0])) for side in (gold, answer))
    except (TypeError, ValueError, OverflowError):
        return False  # no numbers
    return max(first, second) < TINY and abs(first - second) > 1e-4 * max(first, second)


def main() -> None:
    seconds = float(sys.argv[1])
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _ring)
    equal("1", "2")  # imports and caches, before the clock runs
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            verdict = equal(*json.loads(line))
        except (OutOfTime, Exception):
            verdict = False
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        print(int(verdict), flush=True)


if __name__ == "__main__":
    main()
