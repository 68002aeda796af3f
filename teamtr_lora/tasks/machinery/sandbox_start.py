"""Serves one sandbox: a script of its own, started as `python sandbox_start.py PARENT MODE` with a socket as standard input.

For each request it forks a process that runs one program and ends. The walls are the kernel's: the seccomp filter of
sandbox_filter.py, which each of those processes puts on itself before it reads its program; and where the system grants them,
namespaces with an empty file system, Landlock, and no capabilities, for this process and so for all of them. Nothing of a request
is read here: the program travels over a socket that is handed through to the process that runs it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(HERE)
import sandbox_child  # noqa: E402
import sandbox_filter  # noqa: E402

sys.path.remove(HERE)

libc = ctypes.CDLL(None, use_errno=True)
LIMITS = struct.Struct("ddd")  # seconds by the clock, seconds of a processor, bytes of memory
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_REC_PRIVATE, MS_LOCKED_DOWN, MNT_DETACH = 0x44000, 0x0F, 2  # read only, no devices, no programs, no set-user-id
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC = 1, 1
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446  # the same numbers on every machine
CALLS = {"x86_64": {"seccomp": 317, "pivot_root": 155}, "aarch64": {"seccomp": 277, "pivot_root": 41}}
OWN_MODULES = ("__main__", "ctypes", "gc", "resource", "sandbox", "select", "signal", "socket")  # no use to programs
MACHINE = os.uname().machine
LINUX = sys.platform == "linux" and MACHINE in CALLS and sys.maxsize > 2**32
FILTER = ctypes.create_string_buffer(sandbox_filter.filter_program(MACHINE)) if LINUX else None


def die_with(parent: int) -> None:
    """From now on this process is killed when its parent ends; it ends at once where the parent was gone before."""
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def enter_namespaces() -> None:
    """Own users, processes, network, IPC and an empty file system, where allowed. A child of this process goes on."""
    spaces = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    if libc.unshare(spaces | CLONE_NEWUSER) != 0 and libc.unshare(spaces) != 0:
        return
    server = os.fork()
    if server:
        os.close(0)  # or the trainer would not see that the server has ended
        os.waitpid(server, 0)
        os._exit(1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # where that came too late, the socket ends and serve() with it
    here = HERE.encode()
    if (
        libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC_PRIVATE), None) == 0
        and libc.mount(b"none", here, b"tmpfs", ctypes.c_ulong(MS_LOCKED_DOWN), b"size=4k,mode=555") == 0
        and libc.chdir(here) == 0
        and libc.syscall(CALLS[MACHINE]["pivot_root"], b".", b".") == 0
    ):
        libc.umount2(b".", MNT_DETACH)
    libc.chdir(b"/")


def close_files_with_landlock() -> None:
    """No file can be opened, made or removed and no TCP port used; newer kernels add signals and abstract sockets."""
    version = libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return
    files = {1: 2**13, 2: 2**14, 3: 2**15, 4: 2**15}.get(version, 2**16) - 1
    rules = struct.pack("QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    if ruleset >= 0:
        libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)
        os.close(ruleset)


def drop_capabilities() -> None:
    libc.capset(struct.pack("II", 0x20080522, 0), bytes(24))


def install_filter() -> bool:
    """Puts the seccomp filter on every thread of this process, for good; False where the system refuses."""
    if FILTER is None or libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    program = struct.pack("HxxxxxxQ", len(FILTER) // 8, ctypes.addressof(FILTER))
    return bool(libc.syscall(CALLS[MACHINE]["seccomp"], SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, program) == 0)


def filter_works() -> bool:
    """Tried in a process of its own: a filter cannot be taken off again."""
    child = os.fork()
    if child == 0:
        os._exit(0 if install_filter() else 1)
    return os.waitpid(child, 0)[1] == 0


def run_child(connection: int, limits: tuple[float, float, float], seal: Any, server: int) -> None:
    """In the process of one program. The alarm and the limits cannot be changed again under the filter."""
    die_with(server)
    if sys.platform == "linux":  # or a crash would start the system's own program for crashes, outside and with its rights
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.dup2(connection, 0)
    os.closerange(1, 64)
    clock_seconds, cpu_seconds, memory = limits
    signal.setitimer(signal.ITIMER_REAL, clock_seconds)
    bounds = {resource.RLIMIT_CPU: int(cpu_seconds), resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 1}
    if sys.platform == "linux":  # macOS refuses this one
        bounds[resource.RLIMIT_AS] = int(memory)
    for what, most in bounds.items():
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    sandbox_child.main(seal)


def serve(seal: Any) -> None:
    """One program at a time: a descriptor and limits come in, and the status with which the process ended goes out."""
    trainer, server, end = socket.socket(fileno=0), os.getpid(), os._exit
    trainer.send(b"y")
    while True:
        message, connections, _, _ = socket.recv_fds(trainer, LIMITS.size, 1)
        if not message:
            return
        child = os.fork()
        if child == 0:
            try:
                run_child(connections[0], LIMITS.unpack(message), seal, server)
            finally:
                end(1)
        os.close(connections[0])
        _, status = os.waitpid(child, 0)
        trainer.send(struct.pack("i", os.waitstatus_to_exitcode(status)))


def main(parent: int, unprotected: bool) -> None:
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # both are inherited, and these signals must end a process
    for number in (signal.SIGALRM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    sandbox_child.prepare()
    if LINUX:
        enter_namespaces()
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        close_files_with_landlock()
        drop_capabilities()
    walled = filter_works()
    if not walled and not unprotected:
        os.write(0, b"n")
        return
    gc.freeze()  # what is here stays in memory that is shared with the children

    def seal() -> None:
        if walled and not install_filter():
            os.kill(os.getpid(), signal.SIGUSR1)  # no program can end like this, so none can say that there is no filter
            os._exit(1)
        for name in [name for name in sys.modules if any(own in name for own in OWN_MODULES)]:
            del sys.modules[name]

    serve(seal)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "unprotected")
