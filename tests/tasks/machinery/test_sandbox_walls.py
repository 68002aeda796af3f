"""Hostile programs against the sandbox, with and without namespaces, and what is left when the trainer dies."""

import contextlib
import ctypes
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.machinery import sandbox
from teamtr_lora.tasks.machinery.sandbox import Limits, run_checks

HERE = Path(__file__).resolve().parent
QUICK = Limits(wall_seconds=1.0, cpu_seconds=1, memory_bytes=256 * 2**20)
GOOD = "def check(x):\n    return len(x['secret']) > 0\n"
BAD = "def check(x):\n    return len(x['secret']) == 0\n"

HOSTILE = runpy.run_path(str(HERE / "hostile_programs.py"))
PROGRAMS: dict[str, str] = HOSTILE["PROGRAMS"]
CONTROLS: dict[str, str] = HOSTILE["CONTROLS"]
SAME_LAYOUT = sys.version_info[:2] == (3, 11)  # the programs with memory know the layout of objects of one version

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's")


@pytest.fixture
def weakly(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Servers of one test, started with the options of weak_start.py."""
    servers: list[Any] = []
    monkeypatch.setattr(sandbox, "_idle", servers)

    def start(options: str) -> None:
        monkeypatch.setattr(sandbox, "COMMAND", [*sandbox.COMMAND[:-1], str(HERE / "weak_start.py"), options])

    yield start
    for server in servers:
        server.stop()


class Surroundings:
    """What programs must not reach, and whether they did."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "secret").write_text("secret")
        self._victim = subprocess.Popen(["sleep", "1000"])
        self._listeners = [socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))]
        self._listeners[0].bind(str(folder / "socket"))
        self._listeners[0].listen()
        self.argument = json.dumps(
            {
                "secret": str(folder / "secret"),
                "target": str(folder / "target"),
                "unix": str(folder / "socket"),
                "port": self._listeners[1].getsockname()[1],
                "pid": self._victim.pid,
            }
        )

    def untouched(self) -> bool:
        for listener in self._listeners:
            listener.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                listener.accept()
                return False
        files = sorted(path.name for path in self._folder.iterdir())
        return (self._folder / "secret").read_text() == "secret" and files == ["secret", "socket"] and self._victim.poll() is None

    def close(self) -> None:
        self._victim.kill()
        self._victim.wait()
        for listener in self._listeners:
            listener.close()


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Surroundings]:
    around = Surroundings(tmp_path)
    yield around
    around.close()


def processes(trainer: int, script: str) -> list[int]:
    """The sandbox's processes of a trainer: servers are told its number, and what they fork has their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(trainer).encode() in words[-3:] and any(word.endswith(script.encode()) for word in words):
                found.append(int(path.parent.name))
    return found


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("options", ["raw", "raw,unshare,mount"])
def test_no_hostile_program_gets_out(options: str, weakly: Callable[[str], None], outside: Surroundings) -> None:
    """Each is run between a good and a bad check in the same server, whose verdicts it must not change."""
    weakly(options)
    assert len(PROGRAMS) >= 150

    def attack(name: str) -> list[str]:
        rows = ((GOOD, sandbox.DEFAULT_LIMITS), (PROGRAMS[name], QUICK), (BAD, sandbox.DEFAULT_LIMITS))
        said = [run_checks(source, ["check"], outside.argument, limits) for source, limits in rows]
        wrong = [] if said[0].accepted and not said[2].accepted and said[2].problem is None else [f"{name}: others' verdicts"]
        return wrong + ([f"{name}: accepted"] if said[1].accepted else [])

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(attack, PROGRAMS), []) == []
    assert outside.untouched()
    each = 1 if "unshare" in options else 2  # with namespaces there is one process more to a server
    most = each * len(sandbox._idle)
    assert soon(lambda: len(processes(os.getpid(), "weak_start.py")) <= most), "a process that a program started"


@pytest.mark.parametrize("options", ["raw", "raw,unshare,mount"])
def test_the_tools_of_hostile_programs_work(options: str, weakly: Callable[[str], None], outside: Surroundings) -> None:
    """Without this, programs that fail for another reason than the walls would look like a success."""
    weakly(options)
    assert run_checks(CONTROLS["raw"], ["check"], outside.argument).accepted
    if SAME_LAYOUT:
        assert run_checks(CONTROLS["memory"], ["check"], outside.argument).accepted


def test_the_kernel_stops_what_the_hook_does_not_see(weakly: Callable[[str], None], outside: Surroundings) -> None:
    weakly("raw,unshare")
    for name in ("raw: socket, unix", "raw: clone", "raw: kill", "raw: executable memory", "memory: fork", "memory: pidfd"):
        if SAME_LAYOUT or name.startswith("raw"):
            assert "reached for" in str(run_checks(PROGRAMS[name], ["check"], outside.argument).problem), name


def test_without_a_filter_nothing_runs_unless_the_user_says_so(
    weakly: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    weakly("seccomp")
    good = "def check(x): return x == [1]"
    with pytest.raises(UserError, match="no seccomp filter.*TEAMTR_LORA_TRUST_PROGRAMS=unprotected") as error:
        run_checks(good, ["check"], "[1]")
    assert "\n" not in str(error.value)
    monkeypatch.setenv("TEAMTR_LORA_TRUST_PROGRAMS", "1")
    with pytest.raises(UserError):
        run_checks(good, ["check"], "[1]")
    monkeypatch.setenv("TEAMTR_LORA_TRUST_PROGRAMS", "unprotected")
    assert run_checks(good, ["check"], "[1]").accepted
    monkeypatch.delattr(os, "fork")
    sandbox._idle.clear()
    with pytest.raises(UserError):
        run_checks(good, ["check"], "[1]")


def test_no_exit_status_of_a_program_speaks_for_the_sandbox(
    weakly: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may end as it likes: that is its own failed item, never an error that stops the run or asks for less safety."""
    weakly("raw,unshare")
    leave = "import collections\ndef check(x): collections._sys._getframe(1).f_globals['_leave'](x)"
    for status in range(256):
        assert not run_checks(leave, ["check"], str(status)).accepted, status
    monkeypatch.setattr(sandbox._Server, "status", lambda *_: -signal.SIGUSR1)
    with pytest.raises(UserError, match="no seccomp filter"):
        run_checks(leave, ["check"], "0")


def test_a_crash_starts_no_program_of_the_system(weakly: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel hands the memory of a process that crashed to the system's handler, unless the process is not dumpable."""
    monkeypatch.setenv("TEAMTR_LORA_TRUST_PROGRAMS", "unprotected")
    weakly("raw,seccomp")
    dumpable = "libc.syscall(167 if x == 'aarch64' else 157, 3, 0, 0, 0, 0)"
    assert run_checks(f"def check(x): return {dumpable} == 0", ["check"], repr(os.uname().machine)).accepted


def test_landlock_closes_files_where_the_filter_is_missing(
    weakly: Callable[[str], None], outside: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 1:
        pytest.skip("this system has no Landlock")
    monkeypatch.setenv("TEAMTR_LORA_TRUST_PROGRAMS", "unprotected")
    weakly("raw,seccomp,unshare,mount")
    assert run_checks(PROGRAMS["raw: prctl"], ["check"], outside.argument).accepted, "the filter is missing"
    for name in ("openat", "openat to write", "mkdirat", "unlinkat", "symlinkat", "renameat2", "truncate"):
        assert run_checks(PROGRAMS[f"raw: {name}"], ["check"], outside.argument).verdicts == {"check": [False]}, name
    assert outside.untouched()


def test_namespaces_where_they_are_granted() -> None:
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "--user", "--net", "--mount", "--pid", "true"], capture_output=True).returncode
    ):
        pytest.skip("this system grants no namespaces")
    assert run_checks("def check(x): return True", ["check"], "[1]").accepted
    server = max(processes(os.getpid(), "sandbox_start.py"))
    for kind in ("net", "pid", "ipc", "user"):
        assert os.readlink(f"/proc/{server}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    assert os.listdir(f"/proc/{server}/root") == []
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{server}/status").read_text().splitlines() if ":\t" in line)
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0 and status["NoNewPrivs"] == "1"


TRAINER = """
import sys, threading
from teamtr_lora.tasks.machinery import sandbox
if sys.argv[1] == "weak":
    sandbox.COMMAND = [*sandbox.COMMAND[:-1], sys.argv[2], "unshare"]
quick = "def check(x): return True"
thread = threading.Thread(target=sandbox.run_checks, args=(quick, ["check"], "[1]"))
thread.start()
thread.join()
assert sandbox.run_checks(quick, ["check"], "[1]").accepted and len(sandbox._idle) == 1, "outlives the thread that asked for it"
print("ready", flush=True)
sandbox.run_checks("import time\\ntime.sleep(100)", ["check"], "[1]", sandbox.Limits(wall_seconds=100))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("namespaces", ["granted", "weak"])
def test_nothing_outlives_the_trainer(number: int, namespaces: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(HERE.parents[2])}
    command = [sys.executable, "-c", TRAINER, namespaces, str(HERE / "weak_start.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"ready\n"
        assert soon(lambda: len(processes(trainer.pid, "_start.py")) >= 2)
        trainer.send_signal(number)
        trainer.wait()
        assert soon(lambda: not processes(trainer.pid, "_start.py"))
    assert not list(tmp_path.iterdir())


def test_a_server_that_died_is_replaced(weakly: Callable[[str], None]) -> None:
    weakly("raw")
    good = "def check(x): return x == [1]"
    assert run_checks(good, ["check"], "[1]").accepted
    os.killpg(sandbox._idle[0]._process.pid, signal.SIGKILL)
    sandbox._idle[0]._process.wait()
    assert run_checks(good, ["check"], "[1]").accepted
    assert len(sandbox._idle) == 1


def test_a_server_that_hangs_costs_one_item(weakly: Callable[[str], None]) -> None:
    """The alarm is inside; where even that fails, the trainer kills the whole group."""
    weakly("raw")
    good = "def check(x): return x == [1]"
    assert run_checks(good, ["check"], "[1]").accepted
    os.killpg(sandbox._idle[0]._process.pid, signal.SIGSTOP)
    stopped = sandbox._idle[0]._process
    outcome = run_checks(good, ["check"], "[1]", Limits(wall_seconds=0.2))
    assert "took longer" in str(outcome.problem)
    assert soon(lambda: stopped.returncode is not None)
    assert run_checks(good, ["check"], "[1]").accepted
