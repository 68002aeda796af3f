"""Tasks of the user's own Python: `custom`, which a recipe names, and `script`, which a script passes to TeamTRTrainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from teamtr_lora.common.code_paths import load_callable, raised, user_code
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import TASK_PATH, meant, refuse
from teamtr_lora.tasks.machinery.task import Item, Split, Task
from teamtr_lora.tasks.machinery.task_settings import TaskSettings


class CustomSettings(TaskSettings):
    """An environment of your own: a function or class that returns a Task, called with `settings`."""

    items_from: ClassVar[str] = "your code"
    replies: ClassVar[str] = "the task's own feed, where it has one,"

    name: Literal["custom"] = Field(description="Your own environment; `teamtr-lora docs environments` shows how to write one.")
    callable: Annotated[str, Field(pattern=TASK_PATH)] = Field(
        description="The function or class that makes the task, as module:function, in a file beside the recipe or in a package "
        "that TEAMTR_LORA_TRUST names; or the name under which such a package offers it (entry points teamtr_lora.tasks)."
    )
    settings: dict[str, Any] = Field(default={}, description="What it is called with, by the names of its arguments.")

    @model_validator(mode="after")
    def _errors_stop(self) -> Self:
        if self.on_reward_error == "zero":
            wrong, fix = ("a custom task that raises stops the run", "catch the error in the task and return a reward")
            refuse("task", [(("on_reward_error",), "zero", wrong, fix)])
        return self

    def make(self, folder: Path) -> Task:
        function = load_callable(self.callable, key="task.callable", folder=folder)
        _check_settings(function, self.settings)
        try:
            with user_code():
                task = function(**self.settings)
        except UserError:
            raise
        except Exception as error:  # whatever the user's function raises
            raise UserError(f"task.callable = {self.callable!r}: {raised(error)}") from error
        return checked_task(task, f"task.callable = {self.callable!r}: it returned")

    def build(self, folder: Path) -> Task:
        task = self.make(folder)
        if "reward_range" in self.model_fields_set:
            task.reward_range = self.reward_range
        elif tuple(task.reward_range) != self.reward_range:
            low, high = task.reward_range
            raise UserError(
                f"task.reward_range = {list(self.reward_range)}: the task says [{low:g}, {high:g}]; set task.reward_range to that"
            )
        return task


class ScriptSettings(TaskSettings):
    """A task, or items and rewards, that a Python script passed to TeamTRTrainer: such a run goes on from its script."""

    items_from: ClassVar[str] = "a script"
    replies: ClassVar[str] = "the task's own feed, where it has one,"

    name: Literal["script"] = Field(description="Written by TeamTRTrainer; a recipe file cannot run it.")

    def make(self, folder: Path) -> Task:
        raise UserError(
            "task.name = 'script': this run's items and rewards live in a Python script; go on from there (rewards in a file of "
            "their own beside the script can be used from here)"
        )


def checked_task(task: Any, said: str) -> Task:
    """The task, if it is one that can be played; `said` begins the error."""
    if isinstance(task, type) and issubclass(task, Task):
        raise UserError(f"{said} the class {task.__name__}; give a task made of it, {task.__name__}(...)")
    if not isinstance(task, Task):
        raise UserError(f"{said} {type(task).__name__}; a task is an object of a subclass of teamtr_lora.Task")
    if type(task).items is Task.items:
        raise UserError(f"{said} a {type(task).__name__}, which defines no items(split); a task needs items to play")
    for split in get_args(Split):
        _check_items(task, split)
    return task


LOOKED_AT = 10_000  # items of a split that are looked at before training begins


def _check_items(task: Task, split: Split) -> None:
    """Looks at the items (the first of them, where they never end), so that a mistake shows before a base is loaded."""
    where = f"{type(task).__name__}.items({split!r})"
    try:
        items = task.items(split)
        size = getattr(items, "size", items)
        known = range(min(size, LOOKED_AT)) if isinstance(size, int) else range(0 if size is items else 1)
        found: list[Any] = [items[place] for place in known]
    except Exception as error:  # whatever the user's task raises
        raise UserError(f"{where} {raised(error)}") from error
    if size is items:
        raise UserError(f"{where} returned {type(items).__name__}, which has no size; return a list of items")
    if not found:
        raise UserError(f"{where} has {size} items; it needs at least one")
    seen: set[str] = set()
    for item in found:
        if not isinstance(item, Item):
            raise UserError(f"{where} holds {type(item).__name__}; it must hold teamtr_lora.Item(id=..., prompt=...)")
        if not isinstance(item.id, str) or not isinstance(item.prompt, str):
            raise UserError(f"{where} holds {item!r:.80}; the id and the prompt of an item must be texts")
        if item.id in seen:
            raise UserError(f"{where} holds two items with the id {item.id!r}; give every item an id of its own")
        seen.add(item.id)


def _check_settings(function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Names the setting that the function does not take, or lacks, before it is called."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    lacking = [p.name for p in parameters if p.name in known and p.default is p.empty and p.name not in settings]
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    strange = next((setting for setting in settings if setting not in known and not any_name), None)
    name, takes = getattr(function, "__name__", "it"), f"it takes {', '.join(known) or 'none'}"
    if strange is not None:
        fix = meant(strange, known, takes)
        raise UserError(f"task.settings.{strange} = {settings[strange]!r}: {name} has no such setting; {fix}")
    if lacking:
        raise UserError(f"task.settings: {name} cannot be called without {', '.join(lacking)}; {takes}")
