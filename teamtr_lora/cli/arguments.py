"""Values that several commands take, and how they are printed."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, TypeVar

from teamtr_lora.common.trust import SANDBOXED, TRUST_PROGRAMS
from teamtr_lora.common.visible import json_escaped

_REGISTRY = Path("adapters")
# What of a user's own Python a command runs, for its help.
RUNS_CODE = "It runs the Python files that task.reward, task.answer, task.callable and team.router.callable name."
RUNS_ITEMS_ONLY = "Of Python files that a recipe names it runs that of task.callable, which makes the items, and no other."
RUNS_ROUTER_ONLY = (
    "Of Python files that the team's recipe names it runs those of team.router.callable and, where the team votes, task.answer."
)
RUNS_MORE_TO_CALIBRATE = f"{RUNS_ITEMS_ONLY[:-1]}; with --calibrate it trains for a stage and runs the others as train does."
T = TypeVar("T", bound=Any)


def add_recipe(parser: argparse.ArgumentParser, text: str = "a recipe file", *, optional: bool = False) -> None:
    """One recipe or several, and overrides: `recipe_words` tells them apart."""
    parser.add_argument("recipe", metavar="RECIPE", nargs="?" if optional else None, help=text)
    add_more(parser, "further recipe files, of which later ones win (a base, then a task); settings such as training.stages=4")


def add_more(parser: argparse.ArgumentParser, text: str) -> None:
    add_overrides(parser, "RECIPE|section.key=value", f"{text} or team.agents.planner.lora.rank=16")


def recipe_words(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The recipe files and the overrides of a command line."""
    more, overrides = told_apart(args.overrides)
    return [args.recipe, *more], overrides


def told_apart(words: list[str]) -> tuple[list[str], list[str]]:
    """Further recipe files, and overrides."""
    more = [word for word in words if "=" not in word and word.endswith((".yaml", ".yml"))]
    return more, [word for word in words if word not in more]


def run_name(recipes: list[str]) -> str:
    """What a run of these recipe files is called where its user names no folder. A file that is called recipe, as `init` writes
    it, goes by its folder's name."""
    files = [Path(recipe) for recipe in recipes]
    return "-".join((file.resolve().parent.name if file.stem == "recipe" else "") or file.stem for file in files)


def add_overrides(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    # without a default, argparse calls them required
    parser.add_argument("overrides", nargs="*", default=[], metavar=metavar, help=text)


def add_registry(parser: argparse.ArgumentParser, text: str = "the registry") -> None:
    parser.add_argument("--registry", type=Path, default=_REGISTRY, metavar="DIR", help=f"{text} (default: {_REGISTRY})")


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trust-programs",
        action="store_true",
        help="the team's task may run programs of its dataset, in the sandbox (needed once a dataset)",
    )


@contextlib.contextmanager
def trusting(args: argparse.Namespace) -> Iterator[None]:
    """--trust-programs is the environment variable, for one command."""
    before = os.environ.get(TRUST_PROGRAMS)
    if getattr(args, "trust_programs", False):
        os.environ.setdefault(TRUST_PROGRAMS, SANDBOXED)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(TRUST_PROGRAMS, None)


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def engine(text: str) -> str:
    from teamtr_lora.recipe.engine_facts import ENGINES

    if text not in ENGINES:
        raise argparse.ArgumentTypeError(f"{text!r} is no engine; use {', '.join(ENGINES)}")
    return text


def port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use a number from 1 to 65535")
    return int(text)


def _within(what: str, use: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan  # which is in no range
        if not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what}; use {use}")
        return value

    return read


temperature = _within("temperature", "0 or a positive number", lambda value: 0 <= value < math.inf)
radius = _within("radius", "a positive number", lambda value: 0 < value < math.inf)
coefficient = _within("coefficient", "0 or a number below 1", lambda value: 0 <= value < 1)
share = _within("share", "a number between 0 and 1", lambda value: 0 < value < 1)


def options(kind: type[T], args: argparse.Namespace, **more: Any) -> T:
    """A dataclass of options, each field the argument of its name."""
    given = {name: value for name, value in vars(args).items() if name in kind.__dataclass_fields__}
    return kind(**given | more)


def show(args: argparse.Namespace, result: Any, in_words: Callable[[Any], None]) -> None:
    """Prints a command's result: as JSON with --json."""
    if not args.json:
        in_words(result)
        return
    print_json(result.as_dict() if hasattr(result, "as_dict") else asdict(result))


_json_out: TextIO | None = None


def keep_stdout_for_json() -> None:
    """From here on stdout is for `print_json` alone: whatever else writes to it, the user's own code, libraries or programs that
    they start, writes to stderr instead."""
    global _json_out
    out = sys.__stdout__
    if out is not None and getattr(sys.stdout, "rich_proxied_file", sys.stdout) is out:
        with contextlib.suppress(OSError):  # there is no stderr
            kept = os.dup(out.fileno())
            os.dup2(2, out.fileno())
            _json_out = os.fdopen(kept, "w", encoding=out.encoding)


def give_stdout_back() -> None:
    """For the processes of several that this one starts: one of them prints the JSON."""
    if _json_out is not None and sys.__stdout__ is not None:
        sys.__stdout__.flush()  # to stderr, where it belongs
        os.dup2(_json_out.fileno(), sys.__stdout__.fileno())


def print_json(value: Any, *, indent: int | None = 2) -> None:
    print(json_escaped(json.dumps(value, indent=indent, ensure_ascii=False)), file=_json_out or sys.stdout, flush=True)
