"""sandbox_start.py with something taken away, or lent to the programs: `python weak_start.py OPTIONS PARENT MODE`.

`raw` lends programs ctypes; the other options are names of system calls that fail with EPERM, as they do in a container.
"""

import builtins
import ctypes
import os
import runpy
import struct
import sys
from pathlib import Path

NUMBERS = {"aarch64": {"unshare": 97, "mount": 40, "seccomp": 277}, "x86_64": {"unshare": 272, "mount": 165, "seccomp": 317}}
REFUSE, ALLOW = 0x00050001, 0x7FFF0000


def refuse(numbers: list[int]) -> None:
    code = struct.pack("HBBI", 0x20, 0, 0, 0)
    for number in numbers:
        code += struct.pack("HBBI", 0x15, 0, 1, number) + struct.pack("HBBI", 0x06, 0, 0, REFUSE)
    code += struct.pack("HBBI", 0x06, 0, 0, ALLOW)
    space = ctypes.create_string_buffer(code)
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(space)), 0, 0) == 0


if __name__ == "__main__":
    options = sys.argv.pop(1).split(",")
    if "raw" in options:
        libc = builtins.libc = ctypes.CDLL(None)  # type: ignore[attr-defined]
        _ = libc.syscall, libc.read, libc.write  # looked up now: the audit hook sees it when a program does
        page = builtins.page = ctypes.create_string_buffer(16384)  # type: ignore[attr-defined]
        builtins.address = ctypes.c_void_p(ctypes.addressof(page) + 4095 & -4096)  # type: ignore[attr-defined]
    refuse([number for name, number in NUMBERS[os.uname().machine].items() if name in options])
    start = Path(__file__).resolve().parents[3] / "teamtr_lora" / "tasks" / "machinery" / "sandbox_start.py"
    runpy.run_path(str(start), run_name="__main__")
