"""Runs one checking program, in a process that ends with it. sandbox_start.py calls `main` there.

The kernel keeps the program from everything outside its process (sandbox_filter.py). What this file adds is manners: a list of
modules, and an audit hook that ends the process with a status of its own where a program reaches for what it cannot have.

The program runs in a thread of its own. When that has ended, the main thread says so, is sent a random number by the trainer, and
writes the verdict behind it. So no frame that the program can reach is able to write a verdict, and nothing in this process knows
the number while the program runs. What the program's functions return is its own affair: it is the judge of its item.
"""

from __future__ import annotations

import _thread
import ast
import builtins
import copy
import gc
import io
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

USEFUL = ["bisect", "calendar", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools"]
USEFUL += ["heapq", "itertools", "json", "math", "numbers", "operator", "random", "re", "statistics", "string", "time", "typing"]
HIDDEN = ["_strptime", "locale", "collections.abc", "encodings.idna"]  # what the useful ones load late
# Audit events of honest programs. `import` is not among them: what a program may import is loaded before.
HARMLESS = {"compile", "exec", "object.__getattr__", "object.__setattr__", "object.__delattr__", "builtins.id"}
HARMLESS |= {"sys._getframe", "sys._getframemodulename", "sys.unraisablehook", "time.sleep", "cpython.run_string"}
BREACH = 77  # exit status: the program reached for something it must not have
NONCE_BYTES = 16
STACK_BYTES = 16 * 2**20


class Nowhere(io.TextIOBase):
    """What a program prints."""

    def write(self, text: str) -> int:
        return len(text)


def prepare() -> None:
    """Before any program: loads what it may import; what it prints goes nowhere."""
    for module in (*USEFUL, *HIDDEN):
        __import__(module)
    sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = Nowhere()  # type: ignore[assignment,misc]
    sys.stdin = sys.__stdin__ = io.StringIO()  # type: ignore[assignment,misc]
    sys.unraisablehook = lambda *_: None
    time.tzset()


def guard() -> None:
    """Ends the process where the program reaches for something; the kernel would, with less to say about why."""
    for name in ("os", "posix"):  # their functions have no use under the filter; the two that are left serve other modules
        functions = vars(sys.modules[name])
        for one in [n for n, value in functions.items() if type(value) is type(len) and n not in ("fspath", "urandom")]:
            del functions[one]
    leave, harmless = _leave, frozenset(HARMLESS)

    def hook(event: str, args: tuple[Any, ...], exactly: Any = type, text: Any = str) -> None:
        """Looks nothing up that the program may have replaced, and raises nothing that it could catch."""
        if event in harmless or (event == "open" and exactly(args[0]) is text and args[0][:1] == "<"):
            return  # on an error in <string>, the compiler tries to open a file of that name
        leave(BREACH)

    sys.addaudithook(hook)


_leave = os._exit
_import = builtins.__import__


def checked_import(name: str, *rest: Any) -> Any:
    if name.split(".")[0] not in USEFUL and name not in HIDDEN:
        _leave(BREACH)
    return _import(name, *rest)


def read(text: str) -> Any:
    """The response: JSON, a Python literal, or a few lines of code that hold one; no code is run."""
    text = text.strip()
    for form in (text, text.replace("\\{", "{").replace("\\}", "}").replace("\\_", "_")):
        for parse in (json.loads, ast.literal_eval, literal_of):
            try:
                return parse(form)
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
    raise ValueError("no value")


class Names(ast.NodeTransformer):
    """JSON's words in Python code."""

    words: dict[str, Any] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Constant(self.words[node.id]), node) if node.id in self.words else node


def literal_of(text: str) -> Any:
    """The last table or list that a program states: assigned, printed or alone."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("//")]
    tree = Names().visit(ast.parse("\n".join(line.split(" //")[0] for line in lines)))
    found = []
    for node in tree.body:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "print" and len(value.args) == 1:
            value = value.args[0]
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr)) and isinstance(
            value, (ast.Dict, ast.List, ast.Tuple, ast.Set)
        ):
            found.append(ast.literal_eval(value))
    if not found:
        raise ValueError("no value")
    return found[-1]


def judge(request: dict[str, Any]) -> bytes:
    """`+` and the verdicts, such as +1,101 for two names; or `-` and why there are none."""
    namespace: dict[str, Any] = {"__name__": "checks", "__builtins__": {**vars(builtins), "__import__": checked_import}}
    try:
        value = read(request["argument"])
    except Exception as error:
        return f"-the answer cannot be read: {type(error).__name__}".encode()
    try:
        exec(compile(request["source"], "<checks>", "exec", dont_inherit=True), namespace)  # not this file's __future__
    except BaseException as error:
        return f"-the program failed: {type(error).__name__}".encode()

    def said(function: Any) -> str:
        try:
            return "1" if function(copy.deepcopy(value)) else "0"
        except BaseException:  # a check that cannot judge the answer has not accepted it
            return "0"

    groups = []
    for name in request["names"]:
        functions = namespace.get(name)
        if functions is None:
            return f"-the program defines no {name}".encode()
        groups.append("".join(map(said, functions if isinstance(functions, list | tuple) else [functions])))
    return b"+" + ",".join(groups).encode()


def work(box: list[Any], running: Any, begin: Any, over: Any, stop_collecting: Callable[[], None] = gc.disable) -> None:
    """The thread of the program."""
    running.release()
    begin.acquire()
    try:
        box.append(judge(box.pop()))
    except MemoryError:
        box.append(b"-out of memory")
    finally:
        stop_collecting()  # or the main thread could be made to run a destructor of the program's
        over.release()


def main(seal: Callable[[], None]) -> None:
    """Runs the program that descriptor 0 brings, writes its verdict there and ends the process.

    While the program runs it may replace anything in any module; so what is needed afterwards is held in local variables.
    """
    read_bytes, write, leave, threads, rest, exactly = os.read, os.write, os._exit, _thread._count, time.sleep, type
    box: list[Any] = []
    running, begin, over = (_thread.allocate_lock() for _ in range(3))
    for lock in (running, begin, over):
        lock.acquire()
    _thread.stack_size(STACK_BYTES)
    _thread.start_new_thread(work, (box, running, begin, over))
    running.acquire()  # a thread that starts needs calls that the filter forbids
    seal()
    length, request = int.from_bytes(read_bytes(0, 8), "little"), b""
    while len(request) < length:
        request += read_bytes(0, length - len(request)) or leave(1)
    box.append(json.loads(request))
    guard()
    random.seed(0)  # the same verdict every time
    begin.release()
    over.acquire()
    while threads():  # the program could release the lock; its thread has ended when it is not counted any more
        rest(0)
    reply = box.pop()
    if exactly(reply) is not bytes:
        leave(1)
    write(0, b".")
    write(0, read_bytes(0, NONCE_BYTES) + reply)
    leave(0)
