"""Programs that try to get out of the sandbox. Each defines `check(x)`, which returns True only where it got what it wanted.

`x` tells where things are: a file with a secret, a path to write to, a unix socket, a TCP port, and a process to kill. There are
three kinds: plain Python; memory, which reads and writes any address through a use-after-free of io.BufferedReader and switches
the audit hook off; and raw, which is lent ctypes to call the kernel, as native code of its own could.
"""

from __future__ import annotations

import os
import textwrap

MODULES = "import collections\nsys = collections._sys\nmodules = sys.modules\nos = modules['os']\n"

# What a program can do without leaving Python.
PYTHON = {
    "open to read": "return bool(open(x['secret']).read())",
    "open to read, caught": "try:\n    return bool(open(x['secret']).read())\nexcept BaseException:\n    return False",
    "open to write": "open(x['target'], 'w').write('a')\nreturn True",
    "open in the working folder": "open('note', 'w').write('a')\nreturn True",
    "open a device": "return bool(open('/dev/zero', 'rb').read(1))",
    "open its own environment": "return bool(open('/proc/self/environ').read())",
    "open its own memory": "open('/proc/self/mem', 'r+b')\nreturn True",
    "open a parent's memory": "open(f\"/proc/{x['pid']}/mem\", 'r+b')\nreturn True",
    "open a descriptor": "open(1, 'wb', closefd=False).write(b'a')\nreturn True",
    "open its socket": "open(0, 'wb', closefd=False).write(b'a')\nreturn True",
    "io.FileIO": MODULES + "modules['io'].FileIO(x['secret'])\nreturn True",
    "_io.open_code": MODULES + "modules['_io'].open_code(x['secret'])\nreturn True",
    "codecs.open": MODULES + "return bool(modules['codecs'].open(x['secret']).read())",
    "os.open": MODULES + "return bool(os.read(os.open(x['secret'], 0), 1))",
    "os.listdir": MODULES + "return bool(os.listdir('/'))",
    "os.scandir": MODULES + "return bool(list(os.scandir('/')))",
    "os.stat": MODULES + "return bool(os.stat(x['secret']))",
    "os.chdir": MODULES + "os.chdir('/')\nreturn True",
    "os.unlink": MODULES + "os.unlink(x['secret'])\nreturn True",
    "os.rename": MODULES + "os.rename(x['secret'], x['target'])\nreturn True",
    "os.mkfifo": MODULES + "os.mkfifo(x['target'])\nreturn True",
    "os.symlink": MODULES + "os.symlink(x['secret'], x['target'])\nreturn True",
    "os.mkdir": MODULES + "os.mkdir(x['target'])\nreturn True",
    "os.truncate": MODULES + "os.truncate(x['secret'], 0)\nreturn True",
    "os.fork": MODULES + "os.fork()\nreturn True",
    "posix.fork": MODULES + "modules['posix'].fork()\nreturn True",
    "os.system": MODULES + "return os.system('true') == 0",
    "os.execv": MODULES + "os.execv('/bin/true', ['true'])",
    "os.posix_spawn": MODULES + "os.posix_spawn('/bin/true', ['true'], {})\nreturn True",
    "os.kill": MODULES + "os.kill(x['pid'], 9)\nreturn True",
    "os.killpg": MODULES + "os.killpg(0, 9)\nreturn True",
    "os.pidfd_open": MODULES + "modules['_signal'].pidfd_send_signal(os.pidfd_open(x['pid']), 9)\nreturn True",
    "_socket.socket": MODULES + "return modules['_socket'].socket() is not None",
    "os.setsid": MODULES + "os.setsid()\nreturn True",
    "os.environ": MODULES + "return 'HOME' in os.environ or 'USER' in os.environ",
    "signal.raise_signal": MODULES + "modules['_signal'].raise_signal(9)\nreturn True",
    "signal.signal": MODULES + "modules['_signal'].signal(14, lambda *a: None)\nreturn True",
    "signal.setitimer": MODULES + "modules['_signal'].setitimer(0, 0)\nreturn True",
    "a thread": MODULES + "modules['_thread'].start_new_thread(print, ())\nreturn True",
    "import os": "import os\nreturn True",
    "import socket": "import socket\nreturn True",
    "import, caught": "try:\n    import subprocess\nexcept BaseException:\n    pass\nreturn True",
    "builtins.__import__": MODULES + "return modules['builtins'].__import__('_socket') is not None",
    "importlib": MODULES + "return modules['importlib'].import_module('ctypes') is not None",
    "_imp.create_builtin": MODULES
    + "return modules['_imp'].create_builtin(type('S', (), {'name': 'posix', 'origin': None})).fork() > 0",
    "ctypes in sys.modules": MODULES + "return any('ctypes' in name for name in modules)",
    "main module": MODULES + "return bool(modules['__main__'].libc)",
    "code from parts": "code = (lambda: 1).__code__\nreturn code.replace(co_consts=(2,)) is not None",
    "function from parts": "f = lambda: 1\nreturn type(f)(f.__code__, {}) is not None",
    "marshal": MODULES + "return modules['marshal'].loads(modules['marshal'].dumps((lambda: 1).__code__)) is not None",
    "replaced builtins": MODULES
    + "modules['builtins'].type = modules['builtins'].str = lambda *a: str\nreturn bool(open(x['secret']).read())",
    "a string that lies": "name = type('S', (str,), {'__eq__': lambda *a: True, '__hash__': str.__hash__})(x['secret'])\n"
    "return bool(open(name).read())",
    "where the stack ends": MODULES
    + "found = []\ndef deep():\n    try:\n        deep()\n    except RecursionError:\n        found.append(open(x['secret']))\n"
    "deep()\nreturn bool(found)",
}

# What a program can do to be called right without the check's having returned: it would hang, end or fail afterwards.
FORGERIES = {
    "exit": "raise SystemExit(0)",
    "os._exit": MODULES + "os._exit(0)",
    "kept _exit": MODULES + "sys._getframe(1).f_globals['_leave'](0)",
    "write to descriptor 0": MODULES + "os.write(0, b'.+1')\nos._exit(0)",
    "print a verdict": 'print(\'{"verdicts":{"check":[true]}}\', flush=True)\nraise SystemExit(0)',
    "frames that write": MODULES + "frame, wanted = sys._getframe(), {'write', 'nonce', 'read_bytes', 'libc'}\nwhile frame:\n"
    "    if wanted & {*frame.f_locals, *frame.f_globals}: return True\n    frame = frame.f_back\nreturn False",
    "frames of other threads": MODULES + "return len(sys._current_frames()) > 0",
    "everything there is": MODULES + "return bool(modules['gc'].get_objects())",
    "its thread's lock and box": MODULES
    + "frame = sys._getframe()\nwhile 'over' not in frame.f_locals:\n    frame = frame.f_back\n"
    "frame.f_locals['box'].append(b'+1')\nframe.f_locals['over'].release()\nwhile True: pass",
    "a box of something else": MODULES
    + "frame = sys._getframe()\nwhile 'over' not in frame.f_locals:\n    frame = frame.f_back\n"
    "box = frame.f_locals['box']\nbox.append([True])\nmodules['builtins'].str = None\nraise SystemExit",
    "a destructor in another thread": MODULES
    + "class D:\n    def __del__(self):\n        frame = sys._getframe()\n        while frame:\n"
    "            if 'read_bytes' in frame.f_locals: frame.f_locals['box'].append(b'+1')\n            frame = frame.f_back\n"
    "for _ in range(690):\n    d = D()\n    d.me = d\nreturn False",
    "a broken builtin": MODULES + "modules['builtins'].isinstance = modules['builtins'].map = None\nraise SystemExit",
    "a bool that lies": "class B:\n    def __bool__(self): raise ValueError\nreturn B()",
    "an endless list of checks": "return all(iter(int, 1))",
}

ENDLESS = {
    "a loop": "while True: pass",
    "a loop that catches": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "sleep": "import time\ntime.sleep(60)\nreturn True",
    "short sleeps": "import time\nwhile True: time.sleep(0.01)",
    "memory": "y = []\nwhile True: y.append('a' * 10**6)",
    "one big block": "return len(bytearray(10**10)) > 0",
    "a big number": "return 10 ** (10 ** 10) > 1",
    "print": "while True: print('a' * 10**5)",
    "recursion": "def f(): return f()\nreturn f()",
    "deep parentheses": "return eval('(' * 10**5 + ')' * 10**5)",
    "a regular expression": "import re\nreturn bool(re.match('(a+)+$', 'a' * 40 + 'b'))",
}

# Any memory, in pure Python (BufferedReader keeps no hold of the buffer that it lends): `memory` is a bytearray over the whole
# address space. The hook's code is then overwritten to do nothing, and the functions that were deleted are made again.
MEMORY = (
    MODULES
    + """
io = modules['io']
views = []
class Raw(io.RawIOBase):
    def readable(self): return True
    def readinto(self, view):
        views.append(view)
        return 1
reader = io.BufferedReader(Raw(), 8192)
reader.read(1)
del reader
view = views[0].cast('B').cast('P')
slots = [None] * (len(view))
head = (1 << 40).to_bytes(8, 'little') + id(bytearray).to_bytes(8, 'little')
whole = (2**63 - 1).to_bytes(8, 'little') * 2
fake = head + whole + bytes(24)
view[0] = id(fake) + bytes.__basicsize__ - 1
memory = slots[0]
frame = sys._getframe()
while 'guard' not in frame.f_globals:
    frame = frame.f_back
kind = type(frame.f_code)
hook = [one for one in frame.f_globals['guard'].__code__.co_consts if type(one) is kind and one.co_name == 'hook'][0]
at = id(hook) + kind.__basicsize__
memory[at:at + 6] = bytes([151, 0, 100, 0, 83, 0])
make = lambda name: modules['_imp'].create_builtin(type('S', (), {'name': name, 'origin': None}))
posix = make('posix')
modules['_imp'].exec_builtin(posix)
"""
)
WITH_MEMORY = {
    "open": "return bool(open(x['secret']).read())",
    "open caught": "try:\n    return bool(posix.open(x['secret'], 0))\nexcept OSError:\n    return False",
    "write": "posix.open(x['target'], 65, 0o600)\nreturn True",
    "fork": "posix.fork()\nreturn True",
    "system": "return posix.system('true') == 0",
    "execv": "posix.execv('/bin/true', ['true'])",
    "kill": "posix.kill(x['pid'], 9)\nreturn True",
    "pidfd": "return posix.pidfd_open(x['pid']) > 0",
    "stat": "return bool(posix.stat(x['secret']))",
    "listdir": "return bool(posix.listdir('/'))",
    "ctypes": "return modules['importlib'].import_module('ctypes') is not None",
    "socket": "return modules['importlib'].import_module('socket').socket() is not None",
    "mmap": "return modules['importlib'].import_module('mmap').mmap(-1, 4096, prot=7) is not None",
    "raise its limits": "return modules['importlib'].import_module('resource').setrlimit(0, (-1, -1)) is None",
    "a wild write": "memory[0:8] = bytes(8)\nreturn True",
}

# Number on x86-64, number on aarch64, arguments. `page` is memory to write to and `address` that of a page in it, both lent.
RAW = {
    "openat": (257, 56, "-100, name, 0, 0"),
    "openat to write": (257, 56, "-100, other, 65, 0o600"),
    "openat of its memory": (257, 56, "-100, b'/proc/self/mem', 2, 0"),
    "openat2": (437, 437, "-100, name, bytes(24), 24"),
    "open_by_handle_at": (304, 265, "-100, bytes(128), 0"),
    "name_to_handle_at": (303, 264, "-100, name, bytes(128), bytes(8), 0"),
    "open_tree": (428, 428, "-100, name, 1"),
    "newfstatat": (262, 79, "-100, name, page, 0"),
    "statx": (332, 291, "-100, name, 0, 4095, page"),
    "faccessat": (269, 48, "-100, name, 4, 0"),
    "readlinkat": (267, 78, "-100, b'/proc/self/exe', page, 100"),
    "mkdirat": (258, 34, "-100, other, 0o700"),
    "unlinkat": (263, 35, "-100, name, 0"),
    "linkat": (265, 37, "-100, name, -100, other, 0"),
    "symlinkat": (266, 36, "name, -100, other"),
    "renameat2": (316, 276, "-100, name, -100, other, 0"),
    "mknodat": (259, 33, "-100, other, 0o100600, 0"),
    "truncate": (76, 45, "name, 0"),
    "fchmodat": (268, 53, "-100, name, 0, 0"),
    "fchownat": (260, 54, "-100, name, 0, 0, 0"),
    "chdir": (80, 49, "b'/'"),
    "chroot": (161, 51, "b'/'"),
    "mount": (165, 40, "b'none', b'/', b'tmpfs', 0, 0"),
    "unshare": (272, 97, "0x10000000"),
    "setns": (308, 268, "0, 0"),
    "getdents64": (217, 61, "0, page, 4096"),
    "memfd_create": (319, 279, "b'm', 0"),
    "dup": (32, 23, "0"),
    "fcntl": (72, 25, "0, 0, 5"),
    "close": (3, 57, "0"),
    "ioctl": (16, 29, "0, 0x541B, page"),
    "pipe2": (293, 59, "page, 0"),
    "eventfd2": (290, 19, "0, 0"),
    "write to descriptor 1": (1, 64, "1, b'a', 1"),
    "socket, unix": (41, 198, "1, 1, 0"),
    "socket, TCP": (41, 198, "2, 1, 0"),
    "socketpair": (53, 199, "1, 1, 0, page"),
    "connect": (42, 203, "0, b'\\x01\\0' + bytes(14), 16"),
    "sendmsg": (46, 211, "0, bytes(56), 0"),
    "recvmsg": (47, 212, "0, page, 0"),
    "clone": (56, 220, "17, 0, 0, 0, 0"),
    "clone of a thread": (56, 220, "0x50F00, address, 0, 0, 0"),
    "clone3": (435, 435, "(17).to_bytes(40, 'little')[::-1], 88"),
    "execve": (59, 221, "b'/bin/true', 0, 0"),
    "execveat": (322, 281, "-100, b'/bin/true', 0, 0, 0"),
    "kill": (62, 129, "x['pid'], 9"),
    "kill everybody": (62, 129, "-1, 9"),
    "tgkill": (234, 131, "x['pid'], x['pid'], 9"),
    "rt_sigqueueinfo": (129, 138, "x['pid'], 9, bytes(128)"),
    "pidfd_open": (434, 434, "x['pid'], 0"),
    "pidfd_send_signal": (424, 424, "0, 9, 0, 0"),
    "pidfd_getfd": (438, 438, "0, 0, 0"),
    "ptrace": (101, 117, "16, x['pid'], 0, 0"),
    "process_vm_readv": (310, 270, "x['pid'], page, 1, page, 1, 0"),
    "process_vm_writev": (311, 271, "x['pid'], page, 1, page, 1, 0"),
    "process_madvise": (440, 440, "0, page, 1, 4, 0"),
    "kcmp": (312, 272, "x['pid'], x['pid'], 0, 0, 0"),
    "prctl": (157, 167, "1, 0, 0, 0, 0"),
    "seccomp": (317, 277, "0, 0, 0"),
    "prlimit64": (302, 261, "0, 0, b'\\xff' * 16, 0"),
    "setitimer": (38, 103, "0, bytes(32), 0"),
    "timer_create": (222, 107, "0, 0, page"),
    "rt_sigaction": (13, 134, "14, bytes(64), 0, 8"),
    "rt_sigprocmask": (14, 135, "0, b'\\xff' * 8, 0, 8"),
    "setsid": (112, 157, ""),
    "setpgid": (109, 154, "0, 0"),
    "setuid": (105, 146, "0"),
    "capset": (126, 91, "(0x20080522).to_bytes(8, 'little'), b'\\xff' * 24"),
    "bpf": (321, 280, "0, page, 72"),
    "perf_event_open": (298, 241, "page, 0, -1, -1, 0"),
    "userfaultfd": (323, 282, "1"),
    "io_uring_setup": (425, 425, "8, page"),
    "io_setup": (206, 0, "8, page"),
    "add_key": (248, 217, "b'user', b'a', b'a', 1, -3"),
    "keyctl": (250, 219, "0, -3, 1"),
    "shmget": (29, 194, "0, 4096, 0o1600"),
    "msgget": (68, 186, "0, 0o1600"),
    "mq_open": (240, 180, "b'a', 66, 0o600, 0"),
    "personality": (135, 92, "0x0400000"),
    "sethostname": (170, 161, "b'a', 1"),
    "reboot": (169, 142, "0, 0, 0, 0"),
    "init_module": (175, 105, "page, 10, b''"),
    "inotify_init1": (294, 26, "0"),
    "fanotify_init": (300, 262, "0, 0"),
    "landlock_create_ruleset": (444, 444, "0, 0, 1"),
    "executable memory": (9, 222, "0, 4096, 7, 0x22, -1, 0"),
    "memory of a file": (9, 222, "0, 4096, 1, 2, 0, 0"),
    "memory made executable": (10, 226, "address, 4096, 5"),
    "futex, another kind": (202, 98, "page, 6, 0, 0, 0, 0"),
    "a number of the 32-bit table": (0x40000000 + 39, 0x40000000 + 172, ""),
    "a number beyond the table": (5000, 5000, ""),
    "a negative number": (-1, -1, ""),
}
# What a program with native code writes in the place of a verdict: the main thread's part is played by the program itself.
REPLIES = {
    "another form": 'nonce + b\'{"verdicts":{"check":3}}\'',
    "sixty thousand brackets": "nonce + b'[' * 60000",
    "too many names": "nonce + b'+1,1'",
    "no bits": "nonce + b'+2'",
    "control characters": "nonce + b'-\\x1b[2J'",
    "a megabyte": "nonce + b'+' + b'1' * 10**6",
    "a wrong number": "bytes(16) + b'+1'",
    "without a number": "b'+1'",
    "nothing": "b''",
}


def _function(body: str) -> str:
    return "def check(x):\n" + textwrap.indent(body, "    ") + "\n"


def _raw(number: int, arguments: str) -> str:
    return f"name, other = x['secret'].encode(), x['target'].encode()\nreturn libc.syscall({number}, {arguments}) >= 0"


def _reply(reply: str) -> str:
    end = 94 if os.uname().machine == "aarch64" else 231
    return (
        f"libc.write(0, b'.', 1)\nlibc.read(0, page, 16)\nnonce = page.raw[:16]\nreply = {reply}\n"
        f"libc.write(0, reply, len(reply))\nlibc.syscall({end}, 0)"
    )


COLUMN = 1 if os.uname().machine == "aarch64" else 0
PROGRAMS = {
    **{f"python: {name}": _function(body) for name, body in PYTHON.items()},
    **{f"forgery: {name}": _function(body) for name, body in FORGERIES.items()},
    **{f"endless: {name}": _function(body) for name, body in ENDLESS.items()},
    **{f"memory: {name}": _function(MEMORY + body) for name, body in WITH_MEMORY.items()},
    **{f"raw: {name}": _function(_raw(row[COLUMN], row[2])) for name, row in RAW.items()},
    **{f"reply: {name}": _function(_reply(reply)) for name, reply in REPLIES.items()},
}
# That the tools of the other programs are what they are said to be.
CONTROLS = {
    "raw": _function(_raw((39, 172)[COLUMN], "")),
    "memory": _function(MEMORY + "return type(memory) is bytearray and len(sys._current_frames()) == 2 and posix.getpid() > 0"),
}
