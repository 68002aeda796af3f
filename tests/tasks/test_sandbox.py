"""Checking programs: what they may do, and that whatever else they try costs their own item only."""

import contextlib
import ctypes
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr_lora.tasks.machinery.sandbox import Limits, run_checks

QUICK = Limits(wall_seconds=1.5, cpu_seconds=1, memory_bytes=256 * 2**20)


def accepts(body: str, argument: str = "[1, 2]") -> bool:
    lines = "\n".join("    " + line for line in body.splitlines())
    return run_checks(f"def check(x):\n{lines}\n", ["check"], argument, QUICK).accepted


def test_a_plain_program_judges_the_answer() -> None:
    source = "import itertools, math\nfrom collections import Counter\n"
    source += "def first(x): return Counter(x)[1] == 1\ndef second(x): return x.pop() == 2\nboth = [first, second, second]"
    assert run_checks(source, ["first", "both"], "[1, 2]", QUICK).verdicts == {"first": [True], "both": [True, True, True]}
    assert run_checks(source, ["both"], "[1, 3]", QUICK).verdicts == {"both": [True, False, False]}
    assert run_checks(source, ["first"], "(1, 'it''s')", QUICK).accepted
    assert not run_checks(source, ["third"], "[1]", QUICK).accepted
    assert not run_checks("none = []", ["none"], "[1]", QUICK).accepted
    assert not run_checks(source, [], "[1]", QUICK).accepted
    assert not run_checks("def broken(", ["broken"], "[1]", QUICK).accepted
    assert accepts("import datetime\nreturn datetime.datetime.strptime('2024-01-02', '%Y-%m-%d').day == 2")
    assert accepts("import dataclasses\n@dataclasses.dataclass\nclass A:\n    a: int = 1\nreturn A() == A(1)")
    assert "cannot be read" in str(run_checks(source, ["first"], "[1", QUICK).problem)


def test_files_inside_the_temporary_folder_only(tmp_path: Path) -> None:
    inside = "open('note', 'w').write('a'); return open('note').read() == 'a'"
    assert accepts(inside)
    outside = tmp_path / "written"
    assert not accepts(f"open({str(outside)!r}, 'w').write('a'); return True")
    assert not accepts("open('../escaped', 'w').write('a'); return True")
    assert not outside.exists()
    assert not accepts("return bool(open('/etc/passwd').read())")
    assert not accepts("open('big', 'w').write('a' * 10**8); return True")


@pytest.mark.parametrize(
    "body",
    [
        "import os\nreturn True",
        "try:\n    import os\nexcept BaseException:\n    pass\nreturn True",
        "import socket\nreturn True",
        "import sys\nreturn 'os' in sys.modules",
        "return bool(open('/proc/self/environ').read())",
        "return __import__('subprocess') is not None",
        "import json\njson.codecs.sys.modules['posix'].fork()\nreturn True",
        "import json\njson.codecs.sys.modules['os'].system('true')\nreturn True",
        "import json\njson.codecs.sys.modules['os'].listdir('/')\nreturn True",
        "import json\njson.codecs.sys.modules['builtins'].__import__('_socket')\nreturn True",
        "import json\nreturn 'HOME' in json.codecs.sys.modules['os'].environ",
        "import json\njson.codecs.sys.modules['os'].mkfifo('pipe')\nreturn True",
        "import json\njson.codecs.sys.modules['posix'].mknod('file')\nreturn True",
        "import json\nimp = json.codecs.sys.modules['_imp']\nspec = type('S', (), {'name': '_posixsubprocess', 'origin': None})\n"
        "return imp.create_builtin(spec) is not None",
        "raise SystemExit(0)",
        "import json\njson.codecs.sys.modules['os']._exit(0)",
    ],
)
def test_reaching_out_fails_the_item(body: str) -> None:
    assert not accepts(body)


def test_native_code_is_out_of_reach(tmp_path: Path) -> None:
    """ctypes calls any address unseen by an audit hook, and how far apart two C functions are is the same in every process."""
    secret = tmp_path / "secret"
    secret.write_text("a")
    apart = (ctypes.cast(ctypes.CDLL(None).open, ctypes.c_void_p).value or 0) - ctypes._memmove_addr  # type: ignore[attr-defined]
    loaded = "import collections\nmodules = collections._sys.modules\n"
    call = f"ct = modules['ctypes']\nf = ct.CFUNCTYPE(ct.c_int, ct.c_char_p, ct.c_int)(ct._memmove_addr + {apart})\n"
    assert not accepts(f"{loaded}{call}return modules['os'].read(f({os.fsencode(secret)!r}, 0), 1) == b'a'")
    assert accepts(f"{loaded}return not [name for name in modules if 'ctypes' in name]")
    assert accepts(
        "todo, seen = [object], set()\nwhile todo:\n    kind = todo.pop()\n    seen.add(kind)\n"
        "    todo += [sub for sub in type.__subclasses__(kind) if sub not in seen]\n"
        "return len(seen) > 300 and not [kind for kind in seen if 'ctypes' in str(kind.__module__)]"
    )
    for name in ("ctypes", "_ctypes", "mmap"):
        assert not accepts(f"import {name}\nreturn True")
        assert not accepts(f"{loaded}modules['importlib'].import_module({name!r})\nreturn True")
        assert not accepts(f"{loaded}modules['builtins'].__import__({name!r})\nreturn True")
    library = getattr(sys.modules["_ctypes"], "__file__", "_ctypes")
    disguised = f"machinery = modules['importlib.machinery']\nloader = machinery.ExtensionFileLoader('json', {library!r})\n"
    assert not accepts(f"{loaded}{disguised}loader.create_module(machinery.ModuleSpec('json', loader))\nreturn True")


@pytest.mark.parametrize(
    "made",
    [
        "code.replace(co_consts=(2,))",
        "code.replace(co_code=code.co_code)",
        "type(f)(code, {})",
        "modules['marshal'].loads(modules['marshal'].dumps(code))",
    ],
)
def test_no_code_is_made_of_parts(made: str) -> None:
    """Crafted bytecode reaches any memory."""
    assert not accepts(
        f"import collections\nmodules = collections._sys.modules\nf = lambda: 1\ncode = f.__code__\nreturn {made} is not None"
    )
    assert accepts("return eval('lambda y: y + 1')(x[0]) == 2")


@pytest.mark.parametrize(
    "before",
    [
        "modules['__main__'].HARMLESS.update(['open', 'os.listdir'])",
        "modules['__main__'].guard = modules['__main__'].os._exit = print",
        "os.path._joinrealpath = lambda *a, **k: (os.getcwd() + '/note', True)",
        "os.path.realpath = lambda *a, **k: os.getcwd() + '/note'",
        "modules['builtins'].isinstance = modules['builtins'].type = lambda *a: str",
        "modules['_signal'].signal(14, print)",
        "name = type('S', (str,), {'__contains__': lambda *a: False, 'startswith': lambda *a: True})(name)",
    ],
)
def test_the_guard_cannot_be_talked_round(before: str, tmp_path: Path) -> None:
    """What the program puts in the place of modules' functions and tables is nothing the guard relies on."""
    secret = tmp_path / "secret"
    secret.write_text("a")
    reach = f"import collections\nmodules = collections._sys.modules\nos = modules['os']\nname = {str(secret)!r}\n{before}\n"
    assert not accepts(f"{reach}return open(name).read() == 'a'")
    assert not accepts(f"{reach}return bool(os.listdir('/'))")


def test_no_guard_is_lost_where_the_stack_ends() -> None:
    """The hook must not let an event through, nor hand out a way to change it, when it runs out of stack."""
    assert not accepts(
        "import collections\nos = collections._sys.modules['os']\nfound = []\ndef deep():\n    try:\n        deep()\n"
        "    except RecursionError:\n        found.append(os.listdir('/'))\ndeep()\nreturn bool(found)"
    )


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "x = []\nwhile True: x.append('a' * 10**6)",
        "while True: print('a' * 10**5)",
        "print('a' * 10**6)\nreturn True",
        "import time\ntime.sleep(60)\nreturn True",
        "return 10 ** (10 ** 10) > 1",
        "def f(): return f()\nreturn f()",
        "try:\n    while True: pass\nexcept BaseException:\n    return True",
    ],
)
def test_using_without_end_fails_the_item_in_time(body: str) -> None:
    start = time.monotonic()
    assert not accepts(body)
    assert time.monotonic() - start < 4


def running_in(folder: Path) -> list[str]:
    places = []
    for process in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            places.append(os.readlink(process))
    return [place for place in places if place.startswith(str(folder))]


@pytest.mark.parametrize("before", ["", "collections._sys.modules['os'].setsid()\n"])
def test_nothing_is_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    """Also not what has left the process group."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert not accepts(f"import collections, time\n{before}time.sleep(60)\nreturn True")
    deadline = time.monotonic() + 5  # a killed process takes a moment to be gone
    while (left := running_in(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    assert not list(tmp_path.iterdir())


@settings(max_examples=15, deadline=None)
@given(st.text(max_size=200), st.text(max_size=200))
def test_no_text_crashes_it_or_passes(source: str, argument: str) -> None:
    outcome = run_checks(source, ["check"], argument, QUICK)
    assert not outcome.accepted and outcome.problem and outcome.verdicts == {}


@pytest.mark.parametrize("argument", ["{" * 100_000, "[" * 10**6, "a" * 10**6, "\x00", '"\ud800"', "9" * 10**5])
def test_monstrous_answers_are_only_refused(argument: str) -> None:
    assert not accepts("return x == [1]", argument)
