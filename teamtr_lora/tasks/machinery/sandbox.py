"""Runs checking programs that came with a dataset: another process, no network, no files, hard limits on time and memory.

What the program does to itself costs its own item only: `run_checks` always returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from teamtr_lora.tasks.machinery import sandbox_child

START = Path(__file__).with_name("sandbox_start.py")


@dataclass(frozen=True)
class Limits:
    wall_seconds: float = 5.0
    cpu_seconds: int = 4
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 2**20
    output_bytes: int = 2**16


@dataclass(frozen=True)
class Outcome:
    """`verdicts[name]`: what each function under that name said of the answer. `problem` says why there are none."""

    verdicts: dict[str, list[bool]] = field(default_factory=dict)
    problem: str | None = None

    @property
    def accepted(self) -> bool:
        """Every name has verdicts and all are good: an empty list of checks accepts nothing."""
        return self.problem is None and bool(self.verdicts) and all(said and all(said) for said in self.verdicts.values())


DEFAULT_LIMITS = Limits()


def run_checks(source: str, names: Sequence[str], argument: str, limits: Limits = DEFAULT_LIMITS) -> Outcome:
    """Runs `source` and calls the function (or list of functions) under each name on the value that `argument` writes out."""
    token = secrets.token_hex(16)  # tells the verdicts from whatever the program prints
    request = {
        "source": source,
        "names": list(names),
        "argument": argument,
        "token": token,
        "limits": {
            "cpu_seconds": limits.cpu_seconds,
            "memory_bytes": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
        },
    }
    with tempfile.TemporaryDirectory(prefix="checks-", ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as given:
        given.write(json.dumps(request).encode())
        given.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(START)],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            output, problem = _read(child, limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            assert child.stdout is not None
            child.stdout.close()
            status = child.wait()
    if problem is None and status == sandbox_child.BREACH:
        problem = "the program reached for something it must not have (a module, a file, a process, the network)"
    return Outcome(problem=problem) if problem else _outcome(output, token, status)


def _read(child: subprocess.Popen[bytes], limits: Limits) -> tuple[bytes, str | None]:
    """All the child writes until it ends, or why it was not let to its end."""
    assert child.stdout is not None
    descriptor, deadline, output = child.stdout.fileno(), time.monotonic() + limits.wall_seconds, b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return output, f"the program took longer than {limits.wall_seconds:g} s"
        block = os.read(descriptor, 65536)
        if not block:
            with contextlib.suppress(subprocess.TimeoutExpired):  # closed its output: it has until the deadline to end
                child.wait(max(0.0, deadline - time.monotonic()))
            return output, None
        output += block
        if len(output) > limits.output_bytes:
            return output, f"the program printed more than {limits.output_bytes} bytes"


def _outcome(output: bytes, token: str, status: int) -> Outcome:
    _, found, last = output.rpartition(token.encode())
    try:
        answer = json.loads(last) if found else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        return Outcome(problem=f"the program ended without a verdict (status {status}): out of time or memory, or it crashed")
    return Outcome(answer.get("verdicts", {}), answer.get("problem"))
