"""A task's settings without a recipe around them: for commands that take a task by its name and `key=value` settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe.problems import check
from teamtr_lora.recipe.words import RecipeError
from teamtr_lora.recipe.yaml_text import parse
from teamtr_lora.tasks.machinery.task_settings import ItemSource, TaskSettings
from teamtr_lora.tasks.table import BY_NAME


def task_settings(name: str, settings: Sequence[str] = (), path: Path | None = None) -> TaskSettings:
    """Checked in the words of `validate`; `path` stands in where the task needs items from a file."""
    data: dict[str, Any] = {"name": name}
    if path is not None and name in BY_NAME and BY_NAME[name].items_from == ItemSource.items_from:
        data["path"] = str(path)
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"{text!r}: settings are key=value, for example houses=4")
        *sections, last = key.strip().removeprefix("task.").split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UserError(f"{text!r}: {section} is set to a value already; it has no keys")
        place[last] = parse(value, f"setting {key}")
    recipe, problems = check({"team": {"agents": [{"name": "agent"}]}, "task": data})
    if recipe is None:
        raise RecipeError(problems, "the task")
    return recipe.task
