"""Every key a recipe may have: what it takes, its default and what it means, from the same schema that checks recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import nearest
from teamtr_lora.recipe.recipe_files import recipe_schema
from teamtr_lora.recipe.words import Node, describe, resolve, task_names
from teamtr_lora.tasks.table import SCRIPT


@dataclass(frozen=True)
class Key:
    name: str  # dotted; * is every element of a list
    takes: str  # in words; empty for a section
    default: str  # as YAML writes it; empty where there is none
    meaning: str
    tasks: tuple[str, ...] = ()  # those it belongs to, where not all have it


def recipe_keys(word: str = "") -> list[Key]:
    """In the order of a recipe; with a word, the keys in whose name it occurs (all of a section it names), else those in whose
    meaning it does."""
    keys = _merge([*_walk(recipe_schema(), "")])
    found = [key for key in keys if word.lower() in key.name] or [key for key in keys if word.lower() in key.meaning.lower()]
    if not found:
        meant = nearest(word, [part for key in keys for part in (key.name, key.name.rsplit(".", 1)[-1])])
        raise UserError(f"no recipe key has {word!r} in its name or meaning" + (f"; did you mean {meant!r}?" if meant else ""))
    return found


def _walk(node: Node, prefix: str) -> Iterator[Key]:
    for name, child in node.get("properties", {}).items():
        yield from _describe(f"{prefix}{name}", child)


def _describe(name: str, child: Node) -> Iterator[Key]:
    node = resolve(child)
    meaning = node.get("description", "")
    items = resolve(node["items"]) if "items" in node else {}
    if "oneOf" in node:
        tasks = {tuple(task_names(task)): task for task in map(resolve, node["oneOf"])}
        del tasks[(SCRIPT,)]
        yield Key(name, "", "", meaning)
        yield Key(f"{name}.name", f"one of {', '.join(chain(*tasks))}", "", "Which task: see `tasks list`.")
        for names, task in tasks.items():
            yield from (replace(key, tasks=names) for key in _walk(task, f"{name}.") if key.name != f"{name}.name")
    elif items.get("properties"):
        yield Key(name, describe(node), "", meaning)
        yield from _walk(items, f"{name}.*.")
    elif node.get("properties"):
        yield Key(name, "", "", meaning)
        yield from _walk(node, f"{name}.")
    else:
        default = json.dumps(node["default"]) if "default" in node else ""
        yield Key(name, describe(node), default, meaning)


def _merge(keys: list[Key]) -> list[Key]:
    """Keys that several tasks share appear once, with the tasks' names; without, where all tasks have them."""
    everyone = {task for key in keys for task in key.tasks}
    tasks: dict[Key, tuple[str, ...]] = {}
    for key in keys:
        alike = replace(key, tasks=())
        tasks[alike] = tasks.get(alike, ()) + key.tasks
    return [replace(key, tasks=() if set(names) == everyone else names) for key, names in tasks.items()]
