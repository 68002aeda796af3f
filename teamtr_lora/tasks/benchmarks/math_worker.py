"""Symbolic equality, in a process of its own: `python -P math_worker.py SECONDS`, a JSON pair a line in, 0 or 1 a line out.

A script that imports nothing of this package. SECONDS are of work, not by the clock: on a busy machine no answer is wrong for
being slow. An alarm works in a main thread only, and none interrupts one huge power; so whoever asks also kills this process when
no line comes back in time.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from functools import lru_cache
from types import FrameType
from typing import Any, TextIO

MEMORY_BYTES = 4 * 2**30
TINY = 1e-2
PARSED = 4096  # texts whose parse is kept


class OutOfTime(BaseException):
    """Not an Exception: the libraries catch those."""


def _ring(_signal: int, _frame: FrameType | None) -> None:
    raise OutOfTime


@lru_cache(PARSED)
def parsed(text: str) -> list[Any]:
    """Kept: the samples of an item share its reference, and many share an answer."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    how: list[Any] = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    # only what stood in the box is parsed, whole: any_match takes a number or fraction out of what cannot be read (>= 18 as 18)
    modes: Any = {"fallback_mode": "no_fallback", "extraction_mode": "first_match"}
    found: list[Any] = parse(f"\\boxed{{{text}}}", how, **modes, parsing_timeout=None)
    return found


def equal(gold: str, answer: str) -> bool:
    from math_verify import verify

    sides = [parsed(gold), parsed(answer)]
    return all(sides) and bool(verify(sides[0], sides[1], timeout_seconds=None)) and not _both_tiny_and_apart(*sides)


def _both_tiny_and_apart(gold: list[Any], answer: list[Any]) -> bool:
    """math-verify rounds to six decimals, where 2^-98 and 2^-99 are both 0; such numbers are compared by their ratio."""
    try:
        first, second = (complex(side[0]) for side in (gold, answer))
    except (TypeError, ValueError, OverflowError):
        return False  # no numbers
    largest = max(abs(first), abs(second))
    return largest < TINY and abs(first - second) > 1e-4 * largest


def parse_in_two_stages() -> None:
    """Most of the time goes into the LaTeX parser's lookahead with full context, and most answers need none.

    ANTLR promises that its cheaper prediction (SLL) finds the same tree or reports an error; after an error the text is parsed
    again as before. A parser that is built otherwise is left as it is.
    """
    try:
        from antlr4.atn.PredictionMode import PredictionMode
        from latex2sympy2_extended.latex2sympy2 import PSParser

        whole = PSParser.math
    except (ImportError, AttributeError):
        return

    def math(self: Any) -> Any:
        self._interp.predictionMode = PredictionMode.SLL
        try:
            return whole(self)
        except Exception:  # its error listener raises a bare one
            self.reset()
            self._interp.predictionMode = PredictionMode.LL
            return whole(self)

    PSParser.math = math


def one_kind_of_symbols() -> None:
    """The parser takes symbols for real ones unless it sees a lone i, as in 5 \\cdot i but not in 5i, and real symbols are not
    equal to others: here they are always real."""
    import math_verify.parser

    math_verify.parser.should_treat_as_complex = lambda _latex: False


def own_output() -> TextIO:
    """Where the verdicts go, and nothing else: what the libraries print would be taken for the next pair's verdict."""
    verdicts = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return verdicts


def main() -> None:
    seconds = float(sys.argv[1])
    verdicts = own_output()
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, _ring)
    parse_in_two_stages()
    one_kind_of_symbols()
    equal(r"\frac{2k+2}{3}", "2(k+1)/3")  # imports and caches, before the clock runs
    print("ready", file=verdicts, flush=True)
    for line in sys.stdin:
        try:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            verdict = equal(*json.loads(line))
        except (OutOfTime, Exception):
            verdict = False
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(verdict), file=verdicts, flush=True)


if __name__ == "__main__":
    main()
