"""Runs checking programs that came with a dataset, each in a process that the kernel keeps from everything outside it.

A server process (sandbox_start.py) forks one process per check. What a program does to itself costs its own item only, and
whatever comes back is read as if an enemy had written it: `run_checks` always returns, unless programs cannot be run here at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from threading import Thread

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.trust import TRUST_PROGRAMS, UNPROTECTED
from teamtr_lora.tasks.machinery.sandbox_child import BREACH, NONCE_BYTES

COMMAND = [sys.executable, "-s", "-S", "-P", "-W", "ignore", str(Path(__file__).with_name("sandbox_start.py"))]
# no variable of the trainer's but where libraries are; and the same order of sets, and so the same verdict, every time
ENVIRONMENT = {"PATH": "", "LC_ALL": "C.UTF-8", "TZ": "UTC0", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
ENVIRONMENT |= {name: os.environ[name] for name in ["LD_LIBRARY_PATH"] if name in os.environ}
START_SECONDS = 60.0
GRACE_SECONDS = 2.0  # after the program's own alarm
REPLY_BYTES = 2**16
VERDICTS = re.compile(rb"\+[01]*(,[01]*)*")
PROBLEM = re.compile(rb"-[A-Za-z0-9_: ]{1,200}")


@dataclass(frozen=True)
class Limits:
    wall_seconds: float = 5.0
    cpu_seconds: int = 4
    memory_bytes: int = 512 * 2**20


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
    request = dumps({"source": source, "names": list(names), "argument": argument}).encode()
    outcome = _ask_server(request, names, limits) or _ask_server(request, names, limits)
    return outcome or Outcome(problem="the process that runs checking programs was killed")


def _ask_server(request: bytes, names: Sequence[str], limits: Limits) -> Outcome | None:
    """None where the server died, which no program can bring about: something outside killed it, and another one is asked."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    server, connection = _begin(limits)
    deadline = time.monotonic() + limits.wall_seconds + GRACE_SECONDS
    try:
        with connection:
            reply = _converse(connection, request, nonce, deadline)
        status = server.status(deadline)
    except TimeoutError:
        server.stop()
        return Outcome(problem=f"the program took longer than {limits.wall_seconds:g} s")
    except BaseException:
        server.stop()
        raise
    if status is None:
        server.stop()
        return None
    _idle.append(server)
    if status == -signal.SIGUSR1:  # the filter was refused to this one process
        raise UserError(_REFUSED)
    if status == -signal.SIGALRM:
        return Outcome(problem=f"the program took longer than {limits.wall_seconds:g} s")
    if status in (BREACH, -signal.SIGSYS):
        return Outcome(problem="the program reached for something it must not have (a module, a file, a process, the network)")
    return _outcome(reply, nonce, names, status)


def _converse(connection: socket.socket, request: bytes, nonce: bytes, deadline: float) -> bytes:
    """Sends the program, and the nonce when the program has ended; everything that is said after that."""
    reply = b""
    with contextlib.suppress(ConnectionError):  # the process has ended; its status says why
        connection.settimeout(_left(deadline))
        connection.sendall(len(request).to_bytes(8, "little") + request)
        if connection.recv(1):
            connection.sendall(nonce)
            while len(reply) <= REPLY_BYTES:
                connection.settimeout(_left(deadline))
                block = connection.recv(REPLY_BYTES)
                if not block:
                    break
                reply += block
    return reply


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _outcome(reply: bytes, nonce: bytes, names: Sequence[str], status: int) -> Outcome:
    """Only a reply of the one form that is expected, from a process that ended as it should, is a verdict."""
    said = reply[len(nonce) :] if reply.startswith(nonce) and len(reply) <= REPLY_BYTES and status == 0 else b""
    if PROBLEM.fullmatch(said):
        return Outcome(problem=said[1:].decode())
    groups = said[1:].decode().split(",") if VERDICTS.fullmatch(said) else []
    if not groups or len(groups) != len(names):
        return Outcome(problem=f"the program ended without a verdict (status {status}): out of time or memory, or it crashed")
    return Outcome({name: [bit == "1" for bit in group] for name, group in zip(names, groups, strict=True)})


_REFUSED = (
    "the dataset's checking programs are not run: this system has no seccomp filter (Linux on x86-64 or aarch64 has one), which "
    "keeps them from your files, processes and network; run this there, or, if you trust every program of the dataset, set "
    f"{TRUST_PROGRAMS}={UNPROTECTED}"
)


class _Server:
    """One process that runs one program at a time."""

    def __init__(self) -> None:
        if not hasattr(os, "fork"):
            raise UserError(_REFUSED)
        self._ours, theirs = socket.socketpair()
        started: Future[subprocess.Popen[bytes]] = Future()
        Thread(target=self._keep, args=(theirs, started), daemon=True, name="sandbox").start()
        try:
            self._process = started.result()
            self._ours.settimeout(START_SECONDS)
            ready = self._ours.recv(1)
        except OSError as error:
            raise UserError(f"the process that runs checking programs did not start ({type(error).__name__}: {error})") from error
        if ready != b"y":
            self.stop()
            raise UserError(_REFUSED if ready else "the process that runs checking programs ended as it started; try again")

    @staticmethod
    def _keep(theirs: socket.socket, started: Future[subprocess.Popen[bytes]]) -> None:
        """The thread that starts the server stays as long as it: when that thread ends, the kernel kills the server."""
        mode = UNPROTECTED if os.environ.get(TRUST_PROGRAMS) == UNPROTECTED else "protected"
        try:
            with theirs:
                process = subprocess.Popen(
                    [*COMMAND, str(os.getpid()), mode],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=ENVIRONMENT,
                    start_new_session=True,
                )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        process.wait()

    def begin(self, limits: Limits) -> socket.socket:
        """Starts the process of one program; the socket to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                bounds = struct.pack("ddd", limits.wall_seconds, limits.cpu_seconds, limits.memory_bytes)
                socket.send_fds(self._ours, [bounds], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

    def status(self, deadline: float) -> int | None:
        """How the process ended: its exit status, or the negative number of the signal; None where the server itself ended."""
        self._ours.settimeout(_left(deadline))
        try:
            status = self._ours.recv(4)
        except ConnectionError:
            status = b""
        return int.from_bytes(status, sys.byteorder, signed=True) if len(status) == 4 else None

    def stop(self) -> None:
        self._ours.close()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


_idle: list[_Server] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # they belong to the parent


def _begin(limits: Limits) -> tuple[_Server, socket.socket]:
    """A server that is idle, or a new one where there is none or it has died since."""
    while True:
        try:
            server = _idle.pop()
        except IndexError:
            server = _Server()
        try:
            return server, server.begin(limits)
        except ConnectionError:
            server.stop()
