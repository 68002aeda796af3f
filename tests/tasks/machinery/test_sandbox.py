"""Checking programs: what they can do, and that what they do wrong costs their own item only. Attacks: test_sandbox_walls.py."""

import re
import sys
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr_lora.tasks.benchmarks.autologi import AutoLogi
from teamtr_lora.tasks.machinery import sandbox
from teamtr_lora.tasks.machinery.sandbox import Limits, Outcome, run_checks
from teamtr_lora.tasks.machinery.task import Item

QUICK = Limits(wall_seconds=1.5, cpu_seconds=1, memory_bytes=256 * 2**20)
NONCE = bytes(range(16))

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs run on Linux only")


def outcome(body: str, argument: str = "[1, 2]", limits: Limits = QUICK) -> Outcome:
    lines = "\n".join("    " + line for line in body.splitlines())
    return run_checks(f"def check(x):\n{lines}\n", ["check"], argument, limits)


def accepts(body: str, argument: str = "[1, 2]") -> bool:
    return outcome(body, argument).accepted


def test_a_plain_program_judges_the_answer() -> None:
    source = "import itertools, math\nfrom collections import Counter\n"
    source += "def first(x): return Counter(x)[1] == 1\ndef second(x): return x.pop() == 2\nboth = [first, second, second]"
    assert run_checks(source, ["first", "both"], "[1, 2]", QUICK).verdicts == {"first": [True], "both": [True, True, True]}
    assert run_checks(source, ["both"], "[1, 3]", QUICK).verdicts == {"both": [True, False, False]}
    assert run_checks(source, ["first"], "(1, 'it''s')", QUICK).accepted
    assert not run_checks(source, ["third"], "[1]", QUICK).accepted
    assert run_checks("none = []", ["none"], "[1]", QUICK) == Outcome({"none": []})
    assert not Outcome({"none": []}).accepted
    assert not run_checks(source, [], "[1]", QUICK).accepted
    assert "SyntaxError" in str(run_checks("def broken(", ["broken"], "[1]", QUICK).problem)
    assert "SyntaxError" in str(run_checks("def f():\n    nonlocal a", ["f"], "[1]", QUICK).problem)
    assert "cannot be read" in str(run_checks(source, ["first"], "[1", QUICK).problem)


@pytest.mark.parametrize(
    "body",
    [
        "import datetime\nreturn datetime.datetime.strptime('2024-01-02', '%Y-%m-%d').day == 2",
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    a: int = 1\nreturn A() == A(1)",
        "import time\ntime.sleep(0.01)\nreturn time.mktime(time.localtime(0)) == 0 and bool(time.strftime('%c'))",
        "import random\nreturn 0 <= random.SystemRandom().random() < 1 and random.random() == random.Random(0).random()",
        "import decimal, fractions, statistics\nreturn statistics.mean([decimal.Decimal(1), fractions.Fraction(1)][:1]) == 1",
        "big = [bytearray(10**6) for _ in range(60)]\ndel big\nreturn len({i: str(i) for i in range(10**5)}) == 10**5",
        "print('a' * 10**6)\nreturn True",
        "class D:\n    def __del__(self): raise ValueError\nD()\nreturn True",
        "try:\n    exec('def f():\\n    nonlocal b')\nexcept SyntaxError:\n    return True",
        "try:\n    [0] * 10**18\nexcept MemoryError:\n    return True",
        "try:\n    bytearray(300 * 2**20)\nexcept MemoryError:\n    return True",
        "def f(): return f()\ntry:\n    f()\nexcept RecursionError:\n    return True",
        "return x[0] is 1",
        "return eval('lambda y: y + 1')(x[0]) == 2",
        "return sorted({'b', 'a'}) == ['a', 'b'] and f'{1.5:.1f}' == '1.5' and '\\u00e4'.encode('latin-1') == b'\\xe4'",
    ],
)
def test_what_honest_programs_need(body: str) -> None:
    assert outcome(body, limits=Limits(memory_bytes=256 * 2**20)) == Outcome({"check": [True]})


def test_programs_do_not_meet() -> None:
    """Each has a process of its own, so what one leaves behind the next does not find."""
    assert accepts("import math\nmath.pi = 3\nmath.left = 1\nreturn True")
    assert accepts("import math\nreturn math.pi > 3.1 and not hasattr(math, 'left')")
    leak = "import collections\ncollections._sys.modules['builtins'].sorted = lambda *a, **k: [1, 2]\nreturn True"
    assert accepts(leak)
    assert not accepts("return sorted(x) == [1, 2]", "[3]")


def test_the_same_verdict_every_time() -> None:
    """Nothing differs from one run to the next: sets have one order, and `random` starts the same."""
    body = "import random\nwords = list({str(i) for i in range(50)})\nreturn hash((tuple(words), random.random())) % 7 == 3"
    assert len({accepts(body.replace("== 3", f"== {i}")) for i in range(7) for _ in range(2)}) == 2
    first = [accepts(body.replace("== 3", f"== {i}")) for i in range(7)]
    assert sum(first) == 1
    sandbox._idle.pop().stop()
    assert [accepts(body.replace("== 3", f"== {i}")) for i in range(7)] == first


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("while True: pass", "took longer|without a verdict"),
        ("import time\ntime.sleep(60)", "took longer than 1.5 s"),
        ("import os", "reached for something"),
        ("open('/etc/passwd')", "reached for something"),
        ("raise SystemExit(0)", None),
    ],
)
def test_the_problem_is_named_in_time(body: str, problem: str | None) -> None:
    assert accepts("return True")
    server, start = sandbox._idle[-1], time.monotonic()
    found = outcome(body)
    assert not found.accepted
    assert sandbox._idle[-1] is server, "the alarm and the limits are inside: the server need not be killed"
    assert re.search(problem, str(found.problem)) if problem else found == Outcome({"check": [False]})
    assert time.monotonic() - start < 30


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=200), st.text(max_size=200))
def test_no_text_crashes_it_or_passes(source: str, argument: str) -> None:
    found = run_checks(source, ["check"], argument, QUICK)
    assert not found.accepted and found.problem and found.verdicts == {}


@pytest.mark.parametrize("argument", ["{" * 100_000, "[" * 10**6, "a" * 10**6, "\x00", '"\ud800"', "9" * 10**5])
def test_monstrous_answers_are_only_refused(argument: str) -> None:
    assert not accepts("return x == [1]", argument)


MALFORMED = [
    b"",
    b"+",
    b"+2",
    b"+1,",
    b"+1,1,1",
    b'{"verdicts":{"a":3}}',
    b"[" * 60_000,
    b"+1\n",
    b"-",
    b"-\x1b[2J",
    b"-" + b"a" * 300,
]
MALFORMED += [b"+" + b"1" * 70_000, b"1", b" +1,1", b"+\xb9,1"]


@pytest.mark.parametrize("said", MALFORMED, ids=lambda said: repr(said[:20]))
def test_a_malformed_verdict_is_a_failed_item(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not sandbox._outcome(NONCE + said, NONCE, ["a", "b"], 0).accepted
    converse = sandbox._converse

    def replaced(connection: Any, request: bytes, nonce: bytes, deadline: float) -> bytes:
        converse(connection, request, nonce, deadline)
        return nonce + said

    monkeypatch.setattr(sandbox, "_converse", replaced)
    programs = {"check": "def inputs_check(x): return True", "constraints": "constraint_list = [inputs_check]"}
    assert AutoLogi().verdict(Item("1", "p", programs), "[1]") == 0.0


def test_only_a_process_that_ended_well_has_a_verdict() -> None:
    good = NONCE + b"+1,11"
    assert sandbox._outcome(good, NONCE, ["a", "b"], 0) == Outcome({"a": [True], "b": [True, True]})
    for reply, status in ((good, 1), (good, -9), (good[1:], 0), (b"+1,11", 0), (bytes(16) + b"+1,11", 0), (good + b"\n", 0)):
        found = sandbox._outcome(reply, NONCE, ["a", "b"], status)
        assert found.problem and not found.verdicts


@given(st.binary(max_size=300), st.integers(-64, 255), st.lists(st.sampled_from("abc"), unique=True))
def test_no_reply_crashes_the_reader(said: bytes, status: int, names: list[str]) -> None:
    found = sandbox._outcome(NONCE + said, NONCE, names, status)
    assert found.problem is None or found.problem.isprintable()
    assert all(type(bit) is bool for bits in found.verdicts.values() for bit in bits)


def test_many_threads_share_a_few_servers() -> None:
    found: list[bool] = []

    def ask(number: int) -> None:
        found.append(run_checks("def check(x): return x == 1", ["check"], str(number), QUICK).accepted)

    threads = [threading.Thread(target=ask, args=(i % 2,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False] * 4 + [True] * 4
    before = len(sandbox._idle)
    assert accepts("return True") and len(sandbox._idle) == before
