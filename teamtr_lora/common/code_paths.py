"""Dotted paths to the user's own Python: reward functions, tasks and custom routers.

A recipe holds names, never code. A name is looked up in the files beside the recipe, which its user can read, and nowhere else:
with a dataset column called `command`, a stranger's recipe could make a shell out of many a function that is installed. A package
is looked at too once the user has named it in TEAMTR_LORA_TRUST; Python's own library and this one never are.

A package may offer tasks under short names (entry points of the group teamtr_lora.tasks); such a name stands for its dotted path,
and the same rules hold.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import symtable
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.imported_files import file_hashes
from teamtr_lora.common.program import program

TRUST = "TEAMTR_LORA_TRUST"
OFFERED = "teamtr_lora.tasks"  # the entry-point group
BESIDE = "teamtr_lora_user"  # the first part of the names under which modules beside a recipe are loaded

# Where one of these is in a module's text, it may define names that do not show as statements at its top level.
_BINDS_UNSEEN = re.compile(
    rb"\bimport[\s\\]*\*|\b(global|globals|locals|vars|setattr|exec|eval|modules|__dict__|__getattr__"
    rb"|f_globals|__globals__)\b|:="
)

_hashes: WeakKeyDictionary[ModuleType, dict[Path, str]] = WeakKeyDictionary()


def load_callable(path: str, *, key: str, folder: Path | None = None) -> Callable[..., Any]:
    """The callable that `module:function` or `module.function` names; `key` is the recipe key, for the error."""
    return _load(path, key, folder)[0]


def code_hash(path: str, *, key: str, folder: Path | None) -> str:
    """A hash of the module's file, of the file that defines the callable where that is another, and of the files that they import
    from beside the recipe or out of their own package."""
    return hashlib.sha256("\n".join(_load(path, key, folder)[1]).encode()).hexdigest()


@contextmanager
def user_code() -> Iterator[None]:
    """For the user's own code: what it prints goes to stderr, since stdout may be one JSON object, and sys.exit is an error."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as stop:
        raise RuntimeError(f"it called sys.exit({'' if stop.code is None else repr(stop.code)})") from stop


def raised(error: BaseException) -> str:
    """What the user's own code raised, and on which of its lines, in one line."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if _installed(Path(frame.filename)) is None]
    where = f" ({Path(lines[-1].filename).name} line {lines[-1].lineno})" if lines else ""
    return f"raised {type(error).__name__}: {_one_line(error)}{where}"


def offered_tasks(*, trusted: bool) -> dict[str, str]:
    """The tasks that installed packages offer, by name, as module:function; `trusted`: only those of packages that the user has
    named in TEAMTR_LORA_TRUST. Nothing is imported."""
    found = [(entry.name, f"{entry.module}:{entry.attr}") for entry in entry_points(group=OFFERED)]
    mine = _trusted()
    return dict(pair for pair in found if not trusted or pair[1].partition(":")[0].partition(".")[0] in mine)


def misnamed(path: str, folder: Path | None) -> tuple[str, str] | None:
    """What is wrong with a name, and the fix, as far as that shows without running any code; None where nothing is."""
    module_name, name, folder = _parts(path, folder)
    if not module_name and path == name and name.isidentifier():
        return f"not a dotted path, and no installed package offers a task {name!r}", "write it as module:function"
    if not module_name or not name or not all(part.isidentifier() for part in [*module_name.split("."), name]):
        return "not a dotted path", "write it as module:function"
    file = _file(module_name, folder)
    if file is None and (without := module_name.removesuffix(".py")) != module_name and _file(without, folder):
        return "names a file where a module belongs", f"write it as {without}:{name}"
    package = _installed(file) if file else module_name.partition(".")[0]
    return _refused(package, file or Path(module_name.replace(".", "/") + ".py"), folder) if package else None


def undefined(path: str, folder: Path | None) -> tuple[str, str] | None:
    """What is wrong, and the fix, where the text of a file beside the recipe shows that it does not define the function."""
    module_name, name, folder = _parts(path, folder)
    file = _file(module_name, folder)
    defined = _defined(file) if file else None
    if defined is not None and name not in defined:
        functions = ", ".join(sorted(n for n, is_function in defined.items() if is_function))
        return f"{module_name} has no {name!r}", f"it defines {functions or 'no function'}"
    return None


def _defined(file: Path) -> dict[str, bool] | None:
    """The names that a file binds at its top level, and whether as a function; None where that does not show from its text."""
    try:
        source = file.read_bytes()
        table = symtable.symtable(source.decode(), str(file), "exec")
    except (OSError, ValueError, SyntaxError, RecursionError):  # importing it will say so
        return None
    if _BINDS_UNSEEN.search(source):
        return None
    functions = {child.get_name() for child in table.get_children() if child.get_type() == "function"}
    return {s.get_name(): s.get_name() in functions for s in table.get_symbols() if s.is_assigned() or s.is_imported()}


def _load(path: str, key: str, folder: Path | None) -> tuple[Callable[..., Any], list[str]]:
    """The callable, and the hashes of its files."""
    if wrong := misnamed(path, folder):
        raise UserError(f"{key} = {path!r}: {'; '.join(wrong)}")
    module_name, name, folder = _parts(path, folder)
    try:
        with user_code():
            module = _import(module_name, folder)
            target = getattr(module, name, None)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise UserError(f"{key} = {path!r}: cannot import {module_name!r} ({_one_line(error)})") from error
    if target is None:
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise UserError(f"{key} = {path!r}: {module_name} has no {name!r}; it defines {', '.join(functions) or 'no function'}")
    written_in_python = inspect.isfunction(target) or inspect.isclass(target) or inspect.isfunction(type(target).__call__)
    if not written_in_python:
        raise UserError(f"{key} = {path!r}: must be a function or class written in Python, not {type(target).__name__}")
    defined = inspect.unwrap(target) if inspect.isfunction(target) else target if inspect.isclass(target) else type(target)
    home = sys.modules.get(str(defined.__module__))
    if not _is_users_own(home, folder):
        raise UserError(
            f"{key} = {path!r}: {name} is not {module_name}'s own, it comes from {defined.__module__}; "
            "name a function of yours that calls it"
        )
    return target, list({**_file_hashes(module), **(_file_hashes(home) if home else {})}.values())


def _parts(path: str, folder: Path | None) -> tuple[str, str, Path | None]:
    """The module, the name in it, and the folder that the module may lie in: none where an installed package offers the name."""
    if ":" not in path and "." not in path:
        offered = {**offered_tasks(trusted=False), **offered_tasks(trusted=True)}.get(path)
        path, folder = (offered, None) if offered else (path, folder)
    module_name, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    return module_name, name, folder


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _file(module_name: str, folder: Path | None) -> Path | None:
    """The module's file beside the recipe, if there is one."""
    file = folder / (module_name.replace(".", "/") + ".py") if folder else None
    return file if file is not None and file.is_file() else None


def _trusted() -> set[str]:
    names = {name.strip() for name in os.environ.get(TRUST, "").split(",")} - {""}
    wrong = sorted(name for name in names if not name.isidentifier())
    if wrong:
        raise UserError(f"{TRUST} = {wrong[0]!r}: must be names of packages with commas between them, such as my_rewards,mine")
    return {name for name in names if name not in sys.stdlib_module_names and name != "teamtr_lora"}


def _refused(package: str, file: Path, folder: Path | None) -> tuple[str, str] | None:
    """Why the functions of a package may not be named, and the fix; `file` is where one of the user's own would be, in the
    recipe's `folder`."""
    if package in sys.stdlib_module_names:
        return f"{package} is part of Python itself", "name a function of your own, in a file beside the recipe"
    if package == "teamtr_lora":
        return "teamtr_lora's own functions cannot be named", "name a function of your own, in a file beside the recipe"
    try:
        found = package in sys.modules or importlib.util.find_spec(package) is not None  # this does not run the package
    except (ImportError, ValueError):
        found = False
    if not found and folder is not None and not folder.is_dir():  # no file's recipe: a run remembers where its own lay
        again = f"go on with its recipe from there: {program()} train NEW/recipe.yaml --run-dir RUN --resume"
        return f"cannot import it: the recipe's folder {folder} is not there", f"if it has moved, {again}"
    if not found:
        where = f", in {folder.resolve()}" if folder is not None else ""
        return f"cannot import it: there is no {file} beside the recipe{where}", "write that file, or check the name"
    if package not in _trusted():
        return (
            f"{package} is an installed package, and a stranger's recipe could name any function of it",
            f"put {file} beside the recipe, or set {TRUST}={package} if the package is yours",
        )
    return None


def _installed(file: Path) -> str | None:
    """The installed package that a file belongs to, if any. Links are followed: one beside the recipe does not make the file the
    user's own, nor does a recipe that lies in the package."""
    file = file.resolve()
    for place in file.parents:
        library = (place / "os.py").is_file() and (place / "site.py").is_file()  # of any Python, not only of this one
        if library or place.name in ("site-packages", "dist-packages"):
            return file.relative_to(place).parts[0].removesuffix(".py")
        if place == Path(__file__).resolve().parents[1]:
            return "teamtr_lora"
    return None


def _is_users_own(module: ModuleType | None, folder: Path | None) -> bool:
    """Whether the module that a function is defined in, which may be another than the one it is named by, lies beside the recipe
    or is trusted."""
    if module is None or module.__name__.partition(".")[0] in _trusted():
        return module is not None
    file = Path(getattr(module, "__file__", None) or os.devnull)
    if package := _installed(file):
        return package in _trusted()
    beside = folder is not None and file.absolute().is_relative_to(folder.absolute())
    return beside or module.__name__.startswith(f"{BESIDE}.")


def _file_hashes(module: ModuleType) -> dict[Path, str]:
    """Of a module's file and of those it imports, as they were when first asked for. Python does not read a changed file again
    either."""
    if module not in _hashes:
        top, _, rest = module.__name__.partition(".")
        root = f"{top}.{rest.partition('.')[0]}" if top == BESIDE else top

        def own(name: str) -> str | None:
            first = name.partition(".")[0]
            if top == BESIDE:
                return f"{root}.{name}" if _is_neighbour(first, root) else None
            return name if first == top else None

        _hashes[module] = file_hashes(module, root, own)
    return _hashes[module]


def _import(module_name: str, folder: Path | None) -> Any:
    """A file beside the recipe wins over an installed module."""
    if folder is None or _file(module_name, folder) is None:
        return importlib.import_module(module_name)
    return importlib.import_module(f"{_package_of(folder)}.{module_name}")


def _package_of(folder: Path) -> str:
    """The package that the modules of a folder are loaded in. It has a name of its own, so that none of them can replace an
    installed module, nor one of the same name beside another recipe."""
    folder = folder.resolve()
    name = f"{BESIDE}.{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if BESIDE not in sys.modules:
        sys.modules[BESIDE] = ModuleType(BESIDE)
        sys.meta_path.insert(0, _FromFolder())
    if name not in sys.modules:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    return name


class _FromFolder(MetaPathFinder):
    """Finds the modules of those packages: source files of their folder, and no part of an installed package that lies in it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is None or not name.startswith(f"{BESIDE}."):
            return None
        own = [place for place in path if _installed(Path(place) / "_") in {None, *_trusted()}]
        found = (FileFinder(place, (_AsWritten, [".py"])).find_spec(name) for place in own)
        return next((spec for spec in found if spec is not None), None)


class _AsWritten(SourceFileLoader):
    """Runs the source file, never a compiled one from `__pycache__`, which may do something else than the user can read.

    Its imports find the files beside the recipe, at once or when a function of it is called.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        package = ".".join(module.__name__.split(".")[:2])
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": partial(_import_beside, package)}
        super().exec_module(module)


def _import_beside(
    package: str, name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
) -> Any:
    """Python's `__import__`, for a module of `package`."""
    top = name.partition(".")[0]
    if level or not _is_neighbour(top, package):
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    if fromlist:
        return builtins.__import__(f"{package}.{name}", globals, locals, fromlist)
    importlib.import_module(f"{package}.{name}")
    return sys.modules[f"{package}.{top}"]


def _is_neighbour(name: str, package: str) -> bool:
    """Whether a module lies in the package's folder, and none that is installed has its name."""
    folder = Path(sys.modules[package].__path__[0])
    if name in sys.builtin_module_names or not ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
        return False
    if f"{package}.{name}" in sys.modules:
        return True
    other = PathFinder.find_spec(name)
    if other is None or other.origin is None:
        return other is None
    return Path(other.origin).absolute().is_relative_to(folder) and _installed(Path(other.origin)) is None
