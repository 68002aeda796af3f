"""Every key a recipe may have: what it takes, its default and what it means, from the same schema that checks recipes."""

from __future__ import annotations

from dataclasses import replace

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import nearest
from teamtr_lora.recipe.elsewhere import NAMES
from teamtr_lora.recipe.recipe_files import recipe_schema
from teamtr_lora.recipe.words import Key, walk


def recipe_keys(word: str = "") -> list[Key]:
    """In the order of a recipe; with a word, the keys in whose name it occurs (all of a section it names), else the key that
    another library calls so, else those in whose values or meaning it occurs."""
    keys, theirs, sought = _merge([*walk(recipe_schema())]), NAMES.get(word), word.lower()
    found = [key for key in keys if sought in key.name] or [key for key in keys if theirs and key.name == theirs.key]
    if not found and theirs:
        raise UserError(f"{word}: there is no such key here: {theirs.words(str)}")
    found = found or [key for key in keys if sought in f"{key.takes} {key.meaning}".lower()]
    if not found:
        meant = nearest(word, [part for key in keys for part in (key.name, key.name.rsplit(".", 1)[-1])])
        raise UserError(f"no recipe key has {word!r} in its name or meaning" + (f"; did you mean {meant!r}?" if meant else ""))
    return found


def _merge(keys: list[Key]) -> list[Key]:
    """Keys that several tasks share appear once, with the tasks' names; without, where all tasks have them."""
    everyone = {task for key in keys for task in key.tasks}
    tasks: dict[Key, tuple[str, ...]] = {}
    for key in keys:
        alike = replace(key, tasks=())
        tasks[alike] = tasks.get(alike, ()) + key.tasks
    return [replace(key, tasks=() if set(names) == everyone else names) for key, names in tasks.items()]
