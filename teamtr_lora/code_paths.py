"""Dotted paths to the user's own Python: reward functions and custom routers.

A recipe holds names, never code. A name is looked up first in the recipe's own folder, then among installed packages; Python's
own library is refused, so that a recipe and its data cannot make a shell out of `subprocess:getoutput`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from teamtr_lora.errors import UserError

_hashes: WeakKeyDictionary[ModuleType, str] = WeakKeyDictionary()


def load_callable(path: str, *, key: str, folder: Path | None = None) -> Callable[..., Any]:
    """The callable that `module:function` or `module.function` names; `key` is the recipe key, for the error."""
    return _load(path, key, folder)[0]


def code_hash(path: str, *, key: str, folder: Path | None = None) -> str:
    """Of the module's file, and of the one that defines the callable where that is another; what they import is no part of it."""
    return hashlib.sha256("\n".join(_load(path, key, folder)[1]).encode()).hexdigest()


def _load(path: str, key: str, folder: Path | None) -> tuple[Callable[..., Any], list[str]]:
    """The callable, and the hashes of its files."""
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not name or not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise UserError(f"{key} = {path!r}: not a dotted path; write it as module:function")
    try:
        module = _import(module_name, folder)
    except Exception as error:  # whatever the user's module raises while it is imported
        where = f"{folder} or " if folder else ""
        raise UserError(
            f"{key} = {path!r}: cannot import {module_name!r} from {where}Python's path ({' '.join(str(error).split())})"
        ) from error
    target = getattr(module, name, None)
    if target is None:
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise UserError(f"{key} = {path!r}: {module_name} has no {name!r}; it defines {', '.join(functions) or 'no function'}")
    written_in_python = inspect.isfunction(target) or inspect.isclass(target) or inspect.isfunction(type(target).__call__)
    if not written_in_python:
        raise UserError(f"{key} = {path!r}: must be a function or class written in Python, not {type(target).__name__}")
    defined = inspect.unwrap(target) if inspect.isfunction(target) else target if inspect.isclass(target) else type(target)
    modules = dict.fromkeys([module, sys.modules.get(defined.__module__, module)])
    return target, [_file_hash(each) for each in modules if isinstance(each, ModuleType)]


def _file_hash(module: ModuleType) -> str:
    """Of its file when it is first loaded: like Python, a process goes on with that, whatever is written there later."""
    if module not in _hashes:
        file = Path(getattr(module, "__file__", None) or "")  # without one, the name is all there is to know
        _hashes[module] = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
    return _hashes[module]


def _import(module_name: str, folder: Path | None) -> Any:
    """A file beside the recipe wins over an installed module; it gets a name of its own, so it can never replace one."""
    file = folder / (module_name.replace(".", "/") + ".py") if folder else None
    if folder is None or file is None or not file.is_file():
        if module_name.partition(".")[0] in sys.stdlib_module_names:
            raise ImportError(f"{module_name} is part of Python itself; name a function of your own")
        return importlib.import_module(module_name)
    private_name = f"teamtr_lora_user.{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}.{module_name}"
    if private_name in sys.modules:
        return sys.modules[private_name]
    spec = importlib.util.spec_from_file_location(private_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[private_name] = module
    sys.path.append(str(folder))  # it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[private_name]
        raise
    finally:
        sys.path.remove(str(folder))
    return module
