"""A pool of processes that decide whether two answers are equal, each under a hard time limit."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from teamtr_lora.common.errors import UserError

WORKER = Path(__file__).with_name("math_worker.py")
START_SECONDS = 120.0  # importing sympy on a busy machine
GRACE_SECONDS = 1.0  # after the worker's own alarm
WALL_FACTOR = 2  # limits are of work: on a busy machine it may take longer by the clock, and no answer is wrong for that
MOST_PROCESSES = 8
KNOWN_PAIRS = 50_000  # verdicts kept; a pair that ran out of time is asked again, the machine may have been busy

Pair = tuple[str, str]


class _Worker:
    """One process; started when first asked, killed when it gives no answer in time, then started again."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, pair: Pair) -> bool | None:
        """None where no answer came in time."""
        try:
            if self._process is None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            self._process.stdin.write(json.dumps(pair).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._line(WALL_FACTOR * self._seconds + GRACE_SECONDS)
        except OSError:  # it died, out of memory for example
            answer = b""
        if not answer:
            self.stop()
            return None
        return answer == b"1"

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(self._seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        if self._line(START_SECONDS) != b"ready":
            self.stop()
            raise UserError("the process that compares answers did not start; check that math-verify can be imported here")

    def _line(self, seconds: float) -> bytes:
        """The next line, or nothing when the process says none in `seconds`."""
        assert self._process is not None and self._process.stdout is not None
        output, deadline, line = self._process.stdout.fileno(), time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                return b""
            block = os.read(output, 64)
            if not block:
                return b""
            line += block
        return line.strip()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.stop()


@cache
def shared_pool(seconds: float) -> MathPool:
    """One pool serves all the tasks of a process."""
    return MathPool(seconds)


class MathPool:
    """Symbolic equality by math-verify. An answer that takes longer than `seconds` is not equal, and holds up nobody else."""

    def __init__(self, seconds: float = 3.0, processes: int | None = None) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(
                "this task compares answers with math-verify, which is not installed: pip install 'teamtr-lora[math]'"
            )
        count = processes or min(MOST_PROCESSES, len(os.sched_getaffinity(0)))
        workers = [_Worker(seconds) for _ in range(count)]
        self._count = count
        self._known: dict[Pair, bool] = {}
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in workers:
            self._idle.put(worker)
        weakref.finalize(self, _stop_all, workers)

    def equal(self, pairs: Sequence[Pair]) -> list[bool]:
        """Each pair is (reference, answer); pairs that repeat, also from one call to the next, are compared once."""
        unique = [pair for pair in dict.fromkeys(pairs) if pair not in self._known]
        if len(unique) <= 1:
            found = [self._ask(pair) for pair in unique]
        else:
            with ThreadPoolExecutor(min(self._count, len(unique))) as threads:
                found = list(threads.map(self._ask, unique))
        verdicts = dict(zip(unique, found, strict=True))
        equal = [bool(verdicts[pair] if pair in verdicts else self._known[pair]) for pair in pairs]
        if len(self._known) > KNOWN_PAIRS:
            self._known.clear()
        self._known |= {pair: verdict for pair, verdict in verdicts.items() if verdict is not None}
        return equal

    def _ask(self, pair: Pair) -> bool | None:
        worker = self._idle.get()
        try:
            return worker.ask(pair)
        finally:
            self._idle.put(worker)
