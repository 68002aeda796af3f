"""The files that a module of the user's own imports, read from its text: with them changes what its functions do."""

from __future__ import annotations

import ast
import hashlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType


def file_hashes(module: ModuleType, root: str, own: Callable[[str], str | None]) -> dict[Path, str]:
    """By file: of the module itself, and of all that it imports of the package `root`, at its top or when a function runs.

    `own` is the full name that a name in an import statement stands for, None where that is no part of `root`. What is imported
    by a name that is put together as the program runs does not show.
    """
    found: dict[Path, str] = {}
    queue = [(module.__name__, Path(getattr(module, "__file__", None) or ""))]  # without a file, the name is all there is to know
    queue += _files(module.__name__, root)
    for name, file in queue:  # which grows
        if file not in found:
            source = file.read_bytes() if file.is_file() else None
            found[file] = hashlib.sha256(source).hexdigest() if source is not None else ""
            around = name if file.name == "__init__.py" else name.rpartition(".")[0]
            for full in _imported(source or b"", around, own):
                queue += _files(full, root)
    return found


def _imported(source: bytes, around: str, own: Callable[[str], str | None]) -> Iterator[str]:
    """The full names in a text's import statements; `around` is the package that it stands in."""
    try:
        with warnings.catch_warnings(action="ignore"):  # running it says those too, and names the file
            statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    except (ValueError, SyntaxError, RecursionError):  # running it says so
        return
    for statement in statements:
        of = statement.module if isinstance(statement, ast.ImportFrom) else None
        level = statement.level if isinstance(statement, ast.ImportFrom) else 0
        for alias in statement.names:  # of `from a import b`, b may be a module too
            name = f"{of}.{alias.name}" if of else alias.name
            full = f"{around.rsplit('.', level - 1)[0]}.{name}" if level else own(name)
            if full is not None:
                yield full


def _files(full: str, root: str) -> Iterator[tuple[str, Path]]:
    """The files that importing a module runs: its own and those of the packages around it."""
    package = sys.modules.get(root)
    if package is None or not full.startswith(f"{root}."):
        return
    if file := getattr(package, "__file__", None):
        yield root, Path(file)
    parts = full.removeprefix(f"{root}.").split(".")
    for end in range(1, len(parts) + 1):
        for place in getattr(package, "__path__", ()):
            base = Path(place, *parts[:end])
            names = (base / "__init__.py", base.with_name(f"{base.name}.py"))
            yield from ((".".join([root, *parts[:end]]), file) for file in names if file.is_file())
