"""A task's settings without a recipe around them: for commands that take a task by its name and `key=value` settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from teamtr_lora.recipe.problems import check
from teamtr_lora.recipe.recipe_files import override
from teamtr_lora.recipe.words import RecipeError
from teamtr_lora.tasks.machinery.task_settings import ItemSource, TaskSettings
from teamtr_lora.tasks.table import BY_NAME


def task_settings(name: str, settings: Sequence[str] = (), path: Path | None = None) -> TaskSettings:
    """Checked in the words of `validate`; `path` stands in where the task needs items from a file."""
    data: dict[str, Any] = {"name": name}
    if path is not None and name in BY_NAME and BY_NAME[name].items_from == ItemSource.items_from:
        data["path"] = str(path)
    whole: dict[str, Any] = {"team": {"agents": [{"name": "agent"}]}, "task": data}
    wrong = [problem for text in settings if (problem := override(whole, f"task.{text.strip().removeprefix('task.')}"))]
    recipe, problems = check(whole)
    if recipe is None or wrong:
        raise RecipeError([*wrong, *problems], "the task")
    return recipe.task
