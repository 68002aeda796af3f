"""The seccomp filter that checking programs run under, as a BPF program for Linux on x86-64 and on aarch64.

The kernel runs it before every system call of the process. The list says what is allowed: memory, time, random bytes, the end,
and reading and writing descriptor 0, which is the only one the process has. Every other call ends the process. Nothing here looks
at the program: what it can make of its interpreter, native code included, is stopped by the same filter.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

KILL, ALLOW, REFUSE = 0x80000000, 0x7FFF0000, 0x00050001  # REFUSE: the call fails with EPERM and the process goes on
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # os.uname().machine: the kernel's AUDIT_ARCH
X32 = 0x40000000  # set in the numbers of x86-64's second, 32-bit table of calls
PROT_EXEC, MAP_ANONYMOUS = 4, 0x20
FUTEX_OPERATION, FUTEX_WAIT_AND_WAKE = 0x7F, (0, 1, 9, 10)  # with and without a bitset; the rest has no use here

LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # BPF instructions
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16  # places in struct seccomp_data


@dataclass(frozen=True)
class Argument:
    """The lower half of an argument, after masking, must be one of the values."""

    place: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


@dataclass(frozen=True)
class Rule:
    """A call, its numbers in the two tables (None: not in that table), and what becomes of it."""

    x86_64: int | None
    aarch64: int | None
    arguments: tuple[Argument, ...] = ()
    action: int = ALLOW


ONLY_DESCRIPTOR = (Argument(0, (0,)),)
NOT_EXECUTABLE = Argument(2, (0,), PROT_EXEC)
RULES = {
    "futex": Rule(202, 98, (Argument(1, FUTEX_WAIT_AND_WAKE, FUTEX_OPERATION),)),
    "mmap": Rule(9, 222, (NOT_EXECUTABLE, Argument(3, (MAP_ANONYMOUS,), MAP_ANONYMOUS))),
    "munmap": Rule(11, 215),
    "mprotect": Rule(10, 226, (NOT_EXECUTABLE,)),
    "mremap": Rule(25, 216),
    "madvise": Rule(28, 233),
    "brk": Rule(12, 214),
    "read": Rule(0, 63, ONLY_DESCRIPTOR),
    "write": Rule(1, 64, ONLY_DESCRIPTOR),
    "clock_gettime": Rule(228, 113),
    "clock_getres": Rule(229, 114),
    "clock_nanosleep": Rule(230, 115),
    "nanosleep": Rule(35, 101),
    "gettimeofday": Rule(96, 169),
    "time": Rule(201, None),
    "getrandom": Rule(318, 278),
    "getpid": Rule(39, 172),
    "gettid": Rule(186, 178),
    "sched_yield": Rule(24, 124),
    "restart_syscall": Rule(219, 128),
    "rt_sigreturn": Rule(15, 139),
    "exit": Rule(60, 93),
    "exit_group": Rule(231, 94),
    # the C library blocks signals while a thread ends, and a compiler that reports an error looks for the source file: both go on
    # when they may not
    "rt_sigprocmask": Rule(14, 135, action=REFUSE),
    "openat": Rule(257, 56, action=REFUSE),
    "open": Rule(2, None, action=REFUSE),
}


def filter_program(machine: str) -> bytes:
    """The program's instructions, eight bytes each, for a machine of ARCHITECTURES."""
    code = [
        _instruction(LOAD, ARCHITECTURE_AT),
        _instruction(EQUAL, ARCHITECTURES[machine], then=1),
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER_AT),
        _instruction(AT_LEAST, X32, otherwise=1),
        _instruction(RETURN, KILL),
    ]
    for rule in RULES.values():
        number = rule.x86_64 if machine == "x86_64" else rule.aarch64
        if number is not None:
            body = [part for argument in rule.arguments for part in _must_be(argument)] + [_instruction(RETURN, rule.action)]
            code += [_instruction(EQUAL, number, otherwise=len(body)), *body]
    return b"".join([*code, _instruction(RETURN, KILL)])


def _must_be(argument: Argument) -> list[bytes]:
    """Goes on behind these instructions where the argument has one of its values, and ends the process where it has none."""
    tests = [_instruction(EQUAL, value, then=len(argument.values) - i) for i, value in enumerate(argument.values)]
    load = _instruction(LOAD, ARGUMENTS_AT + 8 * argument.place)  # both machines store the lower half first
    return [load, _instruction(AND, argument.mask), *tests, _instruction(RETURN, KILL)]


def _instruction(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, then, otherwise, value)
