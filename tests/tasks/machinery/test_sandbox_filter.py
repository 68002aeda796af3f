"""The seccomp filter for both machines, run by a small interpreter of its instructions."""

import struct

import pytest

from teamtr_lora.tasks.machinery.sandbox_filter import ALLOW, ARCHITECTURES, KILL, REFUSE, filter_program

MACHINES = ("x86_64", "aarch64")
# Numbers of calls that are allowed with any arguments, with some, and refused without ending the process; written out once more,
# so that a change of the list shows here.
FREE = {
    "x86_64": {11, 12, 15, 24, 25, 28, 35, 39, 60, 96, 186, 201, 219, 228, 229, 230, 231, 318},
    "aarch64": {93, 94, 101, 113, 114, 115, 124, 128, 139, 169, 172, 178, 214, 215, 216, 233, 278},
}
BOUND = {
    "x86_64": {"read": 0, "write": 1, "mmap": 9, "mprotect": 10, "futex": 202},
    "aarch64": {"read": 63, "write": 64, "mmap": 222, "mprotect": 226, "futex": 98},
}
REFUSED = {"x86_64": {2, 14, 257}, "aarch64": {56, 135}}


def verdict(program: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the kernel does with a call, by the program."""
    padded = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, architecture, 0, *(a & (2**64 - 1) for a in padded))
    instructions = list(struct.iter_unpack("HBBI", program))
    at = accumulator = 0
    while True:
        code, then, otherwise, value = instructions[at]
        at += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code in (0x15, 0x35):
            at += then if (accumulator == value if code == 0x15 else accumulator >= value) else otherwise
        else:
            raise AssertionError(f"instruction {code:#x}")


@pytest.mark.parametrize("machine", MACHINES)
def test_only_the_listed_calls_pass(machine: str) -> None:
    program, architecture = filter_program(machine), ARCHITECTURES[machine]
    assert len(program) // 8 < 4096
    for number in range(700):
        expected = ALLOW if number in FREE[machine] else REFUSE if number in REFUSED[machine] else KILL
        if number not in BOUND[machine].values():
            assert verdict(program, architecture, number, (2**64 - 1,) * 6) == expected, number
    for number in (-1, 2**31, 2**32 - 1):
        assert verdict(program, architecture, number) == KILL


@pytest.mark.parametrize("machine", MACHINES)
def test_other_tables_of_calls_are_closed(machine: str) -> None:
    """The 32-bit calls of either machine, the other machine's, and x86-64's second table have other meanings for the numbers."""
    program = filter_program(machine)
    others = {0x40000003, 0x40000028, *ARCHITECTURES.values()} - {ARCHITECTURES[machine]}
    for number in range(700):
        assert all(verdict(program, other, number) == KILL for other in others)
        assert verdict(program, ARCHITECTURES[machine], 0x40000000 + number) == KILL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "good", "bad"),
    [
        ("read", [(0,)], [(1,), (3,), (2**32 - 1,)]),
        ("write", [(0,)], [(1,), (2,), (2**31,)]),
        (
            "mmap",
            [(0, 9, 3, 0x22), (0, 9, 0, 0x4022)],
            [(0, 9, 7, 0x22), (0, 9, 4, 0x22), (0, 9, 1, 2), (0, 9, 3, 1), (0, 9, 5, 2)],
        ),
        ("mprotect", [(0, 9, 0), (0, 9, 3)], [(0, 9, 4), (0, 9, 5), (0, 9, 7), (0, 9, 2**32 + 4)]),
        ("futex", [(0, 128), (0, 129), (0, 0x189), (0, 1), (0, 138)], [(0, 2), (0, 4), (0, 134), (0, 139), (0, 13), (0, 131)]),
    ],
)
def test_calls_that_depend_on_their_arguments(
    machine: str, call: str, good: list[tuple[int, ...]], bad: list[tuple[int, ...]]
) -> None:
    program, number = filter_program(machine), BOUND[machine][call]
    assert all(verdict(program, ARCHITECTURES[machine], number, one) == ALLOW for one in good)
    assert all(verdict(program, ARCHITECTURES[machine], number, one) == KILL for one in bad)
