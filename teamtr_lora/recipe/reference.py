"""Every key a recipe may have: what it takes, its default and what it means, from the same schema that checks recipes."""

from __future__ import annotations

import re
from dataclasses import replace

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import nearest
from teamtr_lora.recipe.elsewhere import NAMES
from teamtr_lora.recipe.recipe_files import recipe_schema
from teamtr_lora.recipe.words import Key, walk

FEW = 3  # keys with a word in their name: beside so few, those that speak of it are shown too


def recipe_keys(word: str = "") -> list[Key]:
    """In the order of a recipe; with a word, the keys in whose name it occurs (all of a section it names), else the key that
    another library calls so. Where neither is found, or only few whose names have more to them, also those in whose values or
    meaning the word occurs."""
    keys, theirs, sought = _merge([*walk(recipe_schema())]), NAMES.get(word), word.lower()
    found = [key for key in keys if sought in key.name]
    if not found and theirs:
        if theirs.key is None:
            raise UserError(f"{word}: there is no such key here: {theirs.words(str)}")
        return [key for key in keys if key.name == theirs.key]
    if len(found) <= FEW and not any(sought in (key.name, *key.name.split(".")) for key in found):
        spoken = re.compile(rf"\b{re.escape(sought)}", re.IGNORECASE)
        found += [key for key in keys if key not in found and spoken.search(f"{key.takes} {key.meaning}")]
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
