"""What in a recipe is of one machine: its files, servers and environment variables.

Recipes are plain dicts here, as manifests hold them; a section or key that one lacks has its default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from teamtr_lora.recipe import ResponderSettings, TrackingSection
from teamtr_lora.recipe.named import LOCAL_CHOICES, LOCAL_FILES, PATHS_OR_NAMES
from teamtr_lora.recipe.rollout_section import ServerSection

_DEFAULTS = {
    "rollout": {"server": ServerSection().model_dump(mode="json")},
    "task": {"responder": ResponderSettings().model_dump(mode="json")},
    "tracking": TrackingSection().model_dump(mode="json"),
}


def local_files(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Files that the recipe reads, by their keys."""
    return dict(_texts(recipe, LOCAL_FILES))


def local_choices(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What the recipe chooses for the machine it is on, where it says anything but the default."""
    found = {key: value_at(recipe, key) for key in LOCAL_CHOICES}
    return {key: value for key, value in found.items() if value is not None and value != value_at(_DEFAULTS, key)}


def local_paths(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Files, and what else may be a path, that lie outside the recipe's folder."""
    settings = value_at(recipe, "task.settings")  # of a custom task: any text in them may be a path
    own = [(f"task.settings.{name}", text) for name, value in dict(settings or {}).items() for text in _all_texts([name, value])]
    found = [*_texts(recipe, (*LOCAL_FILES, *PATHS_OR_NAMES)), *own]
    return {key: value for key, value in found if leaves_its_folder(value)}


def _all_texts(value: Any) -> Iterator[str]:
    """Every text in a value, however deep; the keys of mappings too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list)):
        for inner in [*value, *value.values()] if isinstance(value, Mapping) else value:
            yield from _all_texts(inner)


def forget(recipe: dict[str, Any], key: str) -> None:
    """Puts the default in place of what the recipe chooses."""
    put(recipe, key, value_at(_DEFAULTS, key))


def value_at(recipe: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None where it is not there."""
    value: Any = recipe
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def put(recipe: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value of a dotted key, whose sections must be there."""
    *sections, last = key.split(".")
    for section in sections:
        recipe = recipe[section]
    recipe[last] = value


def leaves_its_folder(path: str) -> bool:
    """Whether a path is absolute on any system, or goes up by `..`."""
    drive = PureWindowsPath(path).drive or PureWindowsPath(path).root
    return path.startswith("~") or ".." in re.split(r"[/\\]", path) or PurePosixPath(path).is_absolute() or bool(drive)


def _texts(recipe: Mapping[str, Any], keys: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for key in keys:
        value = value_at(recipe, key)
        if isinstance(value, str) and value:
            yield key, value
