"""A trained team with another task, to measure it on other items."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from teamtr_lora.base.source import beside
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, RecipeError
from teamtr_lora.recipe.named import LOCAL_FILES, PATHS_OR_NAMES, named_code
from teamtr_lora.recipe.problems import check
from teamtr_lora.recipe.recipe_files import merge, override, read_files
from teamtr_lora.registry.local_keys import put, value_at

SECTIONS = ("task", "evaluation", "rollout")  # the items and how they are played; all else is the team, or how it was trained


def on_other_items(recipe: Recipe, files: Sequence[str], overrides: Sequence[str], source: str | Path) -> Recipe:
    """A trained team's recipe, changed by recipe files, of which only SECTIONS count, and by overrides in those. `source`: what
    the user calls the team.

    A task recipe brings roles and training settings along, for teams that are still to be trained: here they say nothing.
    """
    if not files and not overrides:
        return recipe
    for text in overrides:
        if re.split(r"[.=]", text.strip(), maxsplit=1)[0] not in SECTIONS:
            settled = f"is a trained team, whose recipe is settled but for {', '.join(SECTIONS)}"
            raise UserError(f"{text}: {source} {settled}; change a recipe instead")
    data, folder = recipe.model_dump(mode="json"), recipe.folder
    given = read_files([Path(file) for file in files])
    given = {key: value for key, value in given.items() if key in SECTIONS or key not in Recipe.model_fields}
    if isinstance(given.get("task"), dict):
        folder = Path(files[-1]).resolve().parent
        _fix_paths(data, recipe.folder)
    data = merge(data, given)
    for text in overrides:
        key, _, value = text.partition("=")
        if key.strip() == "task.name":  # another task, which would refuse the settings of this one
            data = merge(data, {"task": {"name": value.strip()}})
    wrong = [problem for text in overrides if (problem := override(data, text))]
    changed, problems = check(data)
    if changed is None or wrong:
        raise RecipeError([*wrong, *problems], " + ".join([str(source), *files]))
    if folder.resolve() != recipe.folder.resolve():
        _check_code_is_here(changed, given["task"], recipe, files[-1])
    return changed.placed_in(folder)


def _check_code_is_here(changed: Recipe, task: dict[str, Any], recipe: Recipe, file: str) -> None:
    """Code is looked for in the folder of the task's recipe, where a file of the same name would be other code."""
    given, own = named_code({"task": {"name": changed.task.name, **task}}), named_code(recipe.model_dump())
    for key, path in named_code(changed.model_dump()).items():
        if own.get(key) == path and key not in given:
            fix = "put this recipe there, or give its task as settings (task.KEY=VALUE)"
            raise UserError(f"{file}: is in another folder than the code of {key} = {path!r}, which is in {recipe.folder}; {fix}")


def _fix_paths(data: dict[str, Any], home: Path) -> None:
    """Makes the relative paths of the team's own recipe absolute."""
    for key in ("base.source", *LOCAL_FILES, *PATHS_OR_NAMES):
        if isinstance(path := value_at(data, key), str):
            put(data, key, beside(path, home))
