"""Runs inside the sandbox process, as a script of its own, which sandbox_start.py becomes.

Layers, each of which holds when another is missing: no network and no other processes in sight (namespaces, where the kernel
lends them), rlimits, a list of modules that may be imported, and an audit hook that ends the process at the first event that a
checking program has no need of (sockets, processes, files outside the working folder). ctypes is never loaded here.
"""

from __future__ import annotations

import ast
import builtins
import copy
import json
import os
import resource
import sys
from typing import Any

USEFUL = ["bisect", "calendar", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools"]
USEFUL += ["heapq", "itertools", "json", "math", "numbers", "operator", "random", "re", "statistics", "string", "time", "typing"]
HIDDEN = ["_strptime", "locale", "collections.abc", "encodings.idna"]  # what the useful ones load late
# no import: what a program may have is loaded before; no code or function from parts: crafted bytecode reaches any memory
HARMLESS = {"compile", "exec", "object.__getattr__", "object.__setattr__", "object.__delattr__", "builtins.id"}
HARMLESS |= {"sys._getframe", "sys._getframemodulename", "time.sleep", "cpython.run_string"}
BREACH = 77  # exit status of a program that reached for something it must not have


def limit(cpu_seconds: int, memory_bytes: int, file_bytes: int) -> None:
    for what, most in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
        (resource.RLIMIT_NPROC, 1),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def guard() -> None:
    # what raises no audit event: these write, make modules that were not imported (_posixsubprocess starts programs), or run a
    # function in the middle of the hook
    makers = [name for name in vars(sys.modules["_imp"]) if name.startswith(("create_", "exec_", "init_"))]
    files = ["mkfifo", "mknod"]
    for module, names in (("os", files), ("posix", files), ("_imp", makers), ("_signal", ["signal"])):
        for name in names:
            delattr(sys.modules[module], name)

    def hook(
        event: str,
        args: tuple[Any, ...],
        leave: Any = os._exit,
        status: int = BREACH,
        exactly: Any = type,
        text: Any = str,
        harmless: frozenset[str] = frozenset(HARMLESS),
        folders: frozenset[str] = frozenset({"", ".", ".."}),
    ) -> None:
        """Looks nothing up and calls nothing written in Python: the program may replace what is in any module."""
        try:
            if event in harmless:
                return
            if event == "open" and exactly(args[0]) is text and "/" not in args[0] and args[0] not in folders:
                return  # in the working folder, which it cannot leave
        except:  # noqa: E722 - no more stack, for example: whatever it is, the program ends
            leave(status)
        leave(status)  # not an exception: the program could catch that

    sys.addaudithook(hook)


def checked_import(name: str, *rest: Any) -> Any:
    if name.split(".")[0] not in USEFUL and name not in HIDDEN:
        os._exit(BREACH)
    return _import(name, *rest)


_import = builtins.__import__


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


def run(request: dict[str, Any]) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "checks", "__builtins__": {**vars(builtins), "__import__": checked_import}}
    try:
        value = read(request["argument"])
    except Exception as error:
        return {"problem": f"the answer cannot be read: {type(error).__name__}"}
    try:
        exec(compile(request["source"], "checks", "exec", dont_inherit=True), namespace)  # not this file's __future__
    except BaseException as error:
        return {"problem": f"the program failed: {type(error).__name__}"}
    verdicts: dict[str, list[bool]] = {}
    for name in request["names"]:
        functions = namespace.get(name)
        if functions is None:
            return {"problem": f"the program defines no {name}"}
        verdicts[name] = []
        for function in functions if isinstance(functions, list | tuple) else [functions]:
            try:
                verdicts[name].append(bool(function(copy.deepcopy(value))))
            except BaseException:  # a check that cannot judge the answer has not accepted it
                verdicts[name].append(False)
    return {"verdicts": verdicts}


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    for module in (*USEFUL, *HIDDEN):
        __import__(module)
    limit(**request["limits"])
    guard()
    try:
        answer = run(request)
    except MemoryError:
        answer = {"problem": "out of memory"}
    sys.stdout.flush()
    os.write(out, (request["token"] + json.dumps(answer) + "\n").encode())
    os._exit(0)


if __name__ == "__main__":
    main()
