"""Recipe files: YAML, the parents that `extends` names and overrides become one Recipe, and back."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import nearest
from teamtr_lora.recipe.problems import check
from teamtr_lora.recipe.recipe import Recipe
from teamtr_lora.recipe.words import Problem, RecipeError, key_text, schema_of_recipe
from teamtr_lora.recipe.yaml_text import MAX_BYTES, parse, write

MAX_FILES = 64

# The order in which a recipe is written out: who plays what comes before how it learns.
_ORDER = ("seed", "output_dir", "base", "team", "task")


def load_recipe(path: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file and checks it.

    `path`: a recipe file, or several, of which later ones win key by key: a base, then a task. That is the same as a file
    that extends them in this order. Paths in the recipe are relative to its folder (of several files, to the last one's).
    `overrides`: `section.key=value` as on the command line; they win over every file.

    Raises RecipeError with every problem at once, or UserError where a file cannot be read.
    """
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(one) for one in path]
    if not paths:
        raise UserError("no recipe given; name at least one recipe file")
    data = read_files(paths)
    wrong_overrides = [problem for text in overrides if (problem := override(data, text))]
    recipe, problems = check(data)
    if recipe is None or wrong_overrides:
        raise RecipeError([*wrong_overrides, *problems], " + ".join(map(str, paths)))
    return recipe.placed_in(paths[-1].resolve().parent)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every key written out; `load_recipe` reads an equal recipe from it."""
    return write(_as_data(recipe))


def recipe_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a recipe file, for editors and for `validate --schema`."""
    schema = copy.deepcopy(schema_of_recipe())
    extends = {
        "title": "Extends",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
        "description": "Recipes to start from: a file relative to this one, or a list of them, of which later ones win. This "
        "file's own keys win over all.",
    }
    schema["properties"] = {"extends": extends, **_ordered(schema["properties"])}
    # A file may leave the team to the files that it extends or that are named beside it on the command line.
    del schema["required"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def differences(a: Recipe, b: Recipe, ignore: Collection[str] = ()) -> list[tuple[str, Any, Any]]:
    """The keys, in reading order, whose values differ, with both values; None where one recipe lacks the key.

    `ignore` names keys or whole sections that may differ, such as "output_dir" or "tracking".
    """
    return list(_differences(_as_data(a), _as_data(b), "", frozenset(ignore)))


def _differences(a: Any, b: Any, key: str, ignore: frozenset[str]) -> Iterator[tuple[str, Any, Any]]:
    if key in ignore:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = [(name, a.get(name), b.get(name)) for name in [*a, *(name for name in b if name not in a)]]
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = [(str(i), *both) for i, both in enumerate(zip(a, b, strict=True))]
    else:
        if a != b or type(a) is not type(b):
            yield key, a, b
        return
    for name, x, y in pairs:
        yield from _differences(x, y, f"{key}.{name}" if key else name, ignore)


def _as_data(recipe: Recipe) -> dict[str, Any]:
    return _ordered(recipe.model_dump(mode="json"))


def _ordered(sections: dict[str, Any]) -> dict[str, Any]:
    return {key: sections[key] for key in [*_ORDER, *(key for key in sections if key not in _ORDER)]}


def read_files(paths: Sequence[Path]) -> dict[str, Any]:
    """What recipe files say together, unchecked; later ones win."""
    reader, data = _Reader(), dict[str, Any]()
    for path in paths:
        data = merge(data, reader.read(path))
    return data


class _Reader:
    """Reads recipe files together with their parents."""

    def __init__(self) -> None:
        self._files = 0

    def read(self, path: Path, children: tuple[Path, ...] = ()) -> dict[str, Any]:
        """The mapping in `path` merged over its parents'. `children`: the files by whose `extends` this one is read."""
        data = _read(path)
        self._files += 1
        if self._files > MAX_FILES:  # where each file has two parents, sixteen generations would be 65,536 files
            raise UserError(f"{path}: more than {MAX_FILES} recipe files are extended in all; merge some of them")
        if "extends" not in data:
            return data
        named = data.pop("extends")
        merged: dict[str, Any] = {}
        for parent in _parent_paths(path, named):
            chain = (*children, path.resolve())
            if parent.resolve() in chain:
                loop = [*chain[chain.index(parent.resolve()) :], parent.resolve()]
                names = " -> ".join(file.name for file in loop)
                raise UserError(
                    f"{path}: extends = {named!r}: the recipes extend each other in a circle ({names}); remove one extends"
                )
            merged = merge(merged, self.read(parent, chain))
        return dict(merge(merged, data))


def _parent_paths(path: Path, named: Any) -> list[Path]:
    names = named if isinstance(named, list) and named else [named]
    for name in names:
        if not isinstance(name, str) or not name.strip() or "\0" in name:
            fix = "must be the path of a recipe file, relative to this one, or a list of such paths"
            raise UserError(f"{path}: extends = {named!r}: {fix}")
        # A scheme has two letters or more, a Windows drive has one.
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:|//|\\\\", name):
            raise UserError(
                f"{path}: extends = {name!r}: must be a local file, not an address; copy the parent beside this recipe"
            )
    return [path.parent / name for name in names]


def merge(parent: Any, child: Any) -> Any:
    """Mappings merge key by key; lists and values of the child replace the parent's."""
    if not (isinstance(parent, dict) and isinstance(child, dict)):
        return child
    if "name" in child and child["name"] != parent.get("name", child["name"]):
        return child  # another task, which would refuse the settings of the parent's task
    return {**parent, **{key: merge(parent[key], value) if key in parent else value for key, value in child.items()}}


def _read(path: Path) -> dict[str, Any]:
    try:
        if not path.exists():
            raise UserError(_not_found(path))
        if not path.is_file():
            raise UserError(f"{path}: is not a file; give a recipe such as {path / 'recipe.yaml'}")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path} line {line}: not UTF-8 text; save the recipe as UTF-8") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if len(raw) > MAX_BYTES:
        raise UserError(f"{path}: is larger than {MAX_BYTES} bytes; a recipe holds settings, put data in a dataset file")
    data = parse(text, str(path))
    if not isinstance(data, dict):
        what = "is empty" if data is None else f"holds {type(data).__name__}, not a mapping"
        raise UserError(f"{path}: {what}; a recipe is a mapping of sections such as team: and training:")
    return data


def _not_found(path: Path) -> str:
    """One line that names the recipes that are there, or the folders where a folder was meant."""
    folder, is_recipe = path.parent, path.suffix in (".yaml", ".yml")
    what = "no such recipe" if is_recipe else "no such recipe or run directory"
    if not folder.is_dir():
        return f"{path}: {what}; the folder {folder} does not exist"
    there = sorted(
        file.name for file in folder.iterdir() if file.suffix in (".yaml", ".yml") or (not is_recipe and file.is_dir())
    )
    like = nearest(path.name, there)
    if like:
        return f"{path}: {what}; did you mean {str(folder / like)!r}?"
    listed = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "")
    return f"{path}: {what}; {folder} holds {listed or 'no .yaml file'}"


def override(data: dict[str, Any], text: str) -> Problem | None:
    """Apply one `section.key=value` in place. Unknown keys are set too: `check` reports them with the others."""
    key, equals, value_text = text.partition("=")
    key = key.strip()
    parts = key.split(".")
    if not equals or not all(parts):
        return Problem("override", text, "must be section.key=value", "for example training.stages=4")
    try:
        value = parse(value_text, f"override {key}")
    except UserError as error:
        return Problem(key, value_text, f"cannot be read as YAML ({error})", "put text in quotes")
    if isinstance(value, (dict, list)) and not value_text.lstrip().startswith(("{", "[")):
        value = value_text  # YAML reads `FINAL:` and `- so` as a mapping and a list; here those need braces or brackets
    return _set(data, parts, value)


def _set(data: Any, parts: list[str], value: Any) -> Problem | None:
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        here = key_text(tuple(parts[:depth]))
        at: Any = part
        if isinstance(data, list):
            index = _index(data, part)
            if index is None:
                return _no_element(here, ".".join(parts), data, part, value)
            at = index
        elif not isinstance(data, dict):
            return Problem(".".join(parts), value, f"{here} is a value, not a section", f"set {here} itself, or check the key")
        elif not last and part not in data:
            data[part] = {}
        if last:
            data[at] = value
        else:
            data = data[at]
    return None


def _index(items: list[Any], part: str) -> int | None:
    """A list position, or the position of the agent of that name."""
    if part.isascii() and part.isdigit():
        return int(part) if int(part) < len(items) else None
    return next((i for i, item in enumerate(items) if isinstance(item, dict) and item.get("name") == part), None)


def _no_element(here: str, key: str, items: list[Any], part: str, value: Any) -> Problem:
    names = [item["name"] for item in items if isinstance(item, dict) and isinstance(item.get("name"), str)]
    if part.isdigit():
        return Problem(key, value, f"{here} has no element {part}", f"it has {len(items)}, counted from 0")
    fix = "" if nearest(part, names) else f"it has {', '.join(names) or 'no named elements'}"
    return Problem(key, value, f"nothing in {here} is named {part!r}", fix, suggestion=nearest(part, names))
