"""Starts the sandbox's process, as a script of its own: `python -I -S sandbox_start.py < request`.

It asks the kernel for namespaces, which needs ctypes, and then becomes sandbox_child.py, a fresh interpreter that never had
ctypes: a checking program that finds that module, or one class of it, calls any function of the C library unseen by audit hooks.
Nothing of the request is read here. Imports are few, they are paid for by every check.
"""

from __future__ import annotations

import os
import sys


def isolate() -> None:
    """New user, network, process and IPC namespaces, where allowed; the child of the new process namespace goes on."""
    import ctypes

    new_user, new_pid, new_net, new_ipc = 0x10000000, 0x20000000, 0x40000000, 0x08000000
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: no program that it might start has more rights than it
    if libc.unshare(new_user | new_pid | new_net | new_ipc) != 0:
        return
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL; also after the exec


if __name__ == "__main__":
    isolate()
    os.execv(sys.executable, [sys.executable, "-I", "-S", os.path.join(os.path.dirname(__file__), "sandbox_child.py")])
