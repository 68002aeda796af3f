"""From the recipe's `task` section to a Task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from teamtr_lora import recipe as recipes
from teamtr_lora.code_paths import load_callable
from teamtr_lora.tasks.column_sum import ColumnSum
from teamtr_lora.tasks.dataset import DatasetTask, read_hub, read_rows
from teamtr_lora.tasks.rewards import Rewards
from teamtr_lora.tasks.small import SmallTask
from teamtr_lora.tasks.task import Task


def build_task(section: Any, folder: Path) -> Task:
    """`folder` is the recipe's: data files and reward modules are looked up beside it."""
    if isinstance(section, recipes.ColumnSumTask):
        task: Task = ColumnSum(section.digits)
        task.reward_range = section.reward_range
        return task
    if isinstance(section, recipes.SmallTask):
        task = SmallTask(section.name, section.shots)
        task.reward_range = section.reward_range
        return task
    return _build_dataset(section, folder)


def _build_dataset(section: recipes.DatasetTask, folder: Path) -> DatasetTask:
    names = [section.reward] if isinstance(section.reward, str) else list(section.reward)
    functions = [load_callable(name, key="task.reward", folder=folder) for name in names]
    test: Any = None
    if section.path:
        train = read_rows(_beside(folder, section.path), "task.path")
        if section.test_path:
            test = read_rows(_beside(folder, section.test_path), "task.test_path")
    else:
        hub = section.hub or ""
        train = read_hub(hub, section.hub_config, section.train_split, "task.hub")
        test = read_hub(hub, section.hub_config, section.test_split, "task.hub") if section.test_split else None
    return DatasetTask(
        train,
        test,
        Rewards(functions, section.on_reward_error),
        prompt_column=section.prompt_column,
        answer_column=section.answer_column,
        test_fraction=section.test_fraction,
        success_at_least=section.success_at_least,
        reward_range=section.reward_range,
    )


def _beside(folder: Path, path: str) -> Path:
    given = Path(path).expanduser()
    return given if given.is_absolute() else folder / given
