"""From the recipe's `task` section to a Task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from teamtr_lora import recipe as recipes
from teamtr_lora.common.code_paths import load_callable
from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.benchmarks.arbench import DetectiveTask, SituationTask
from teamtr_lora.tasks.benchmarks.autologi import AutoLogi
from teamtr_lora.tasks.benchmarks.guessing import GuessingTask
from teamtr_lora.tasks.benchmarks.math_tasks import MathTask
from teamtr_lora.tasks.benchmarks.planbench import Blocksworld
from teamtr_lora.tasks.benchmarks.tau2 import Tau2Task
from teamtr_lora.tasks.benchmarks.tau2_files import DomainFiles
from teamtr_lora.tasks.benchmarks.zebra import ZebraTask
from teamtr_lora.tasks.dataset import DatasetTask, read_hub, read_rows
from teamtr_lora.tasks.generated.column_sum import ColumnSum
from teamtr_lora.tasks.generated.countdown import Countdown
from teamtr_lora.tasks.generated.small import SmallTask
from teamtr_lora.tasks.machinery.bench import BenchTask
from teamtr_lora.tasks.machinery.responder import build_responder
from teamtr_lora.tasks.machinery.rewards import Rewards
from teamtr_lora.tasks.machinery.task import Task


def build_task(section: Any, folder: Path) -> Task:
    """`folder` is the recipe's: data files and reward modules are looked up beside it."""
    if isinstance(section, recipes.DatasetTaskSection):
        return _build_dataset(section, folder)
    task = bare_task(section, folder)
    task.reward_range = section.reward_range
    if isinstance(section, recipes.ItemSource) and (section.path or section.hub):
        assert isinstance(task, BenchTask)
        train, test = read_source(section, folder)
        task.use_rows(train, test, section.test_fraction, section.on_overlap)
    return task


def bare_task(section: Any, folder: Path) -> Task:
    """The task with its verifier, before it has read any items."""
    match section:
        case recipes.ColumnSumTaskSection():
            return ColumnSum(section.digits, section.credit)
        case recipes.SmallTaskSection():
            return SmallTask(section.name, section.shots)
        case recipes.CountdownTaskSection():
            return Countdown(section.numbers, section.shots)
        case recipes.MathTaskSection():
            return MathTask(section.name, section.instruction, section.answer_seconds)
        case recipes.GuessingTaskSection():
            return GuessingTask(section.turns, section.stop_when_right)
        case recipes.ZebraTaskSection():
            return ZebraTask(section.name, section.houses, section.attributes, section.reward)
        case recipes.AutoLogiTaskSection():
            return AutoLogi(section.size, section.check_seconds)
        case recipes.BlocksworldTaskSection():
            return Blocksworld(section.blocks, section.mystery)
        case recipes.DetectiveTaskSection():
            return DetectiveTask(build_responder(section.responder, folder), section.turns, section.answer_early)
        case recipes.SituationTaskSection():
            responder = build_responder(section.responder, folder)
            return SituationTask(responder, section.turns, section.answer_early, section.reward)
        case recipes.Tau2TaskSection():
            return _build_tau2(section, folder)
    raise UserError(f"task.name = {section.name!r}: this task cannot be built from a recipe")


def _build_tau2(section: recipes.Tau2TaskSection, folder: Path) -> Tau2Task:
    given = (section.database, section.policy, section.split)
    database, policy, split = (_beside(folder, path) if path else None for path in given)
    tasks = _beside(folder, section.path).parent if section.path else folder
    files = DomainFiles(section.name.removeprefix("tau2_"), tasks, database, policy, split)
    responder = build_responder(section.responder, folder)
    return Tau2Task(section.name, files, responder, section.max_errors, section.judge_assertions)


def read_source(section: recipes.ItemSource, folder: Path) -> tuple[Any, Any | None]:
    """The train rows, and the test rows where they are apart."""
    test: Any = None
    if section.path:
        train = read_rows(_beside(folder, section.path), "task.path")
        if section.test_path:
            test = read_rows(_beside(folder, section.test_path), "task.test_path")
    else:
        hub = section.hub or ""
        train = read_hub(hub, section.hub_config, section.train_split, "task.hub")
        test = read_hub(hub, section.hub_config, section.test_split, "task.hub") if section.test_split else None
    for rows, key in ((train, "train"), (test, "test")):
        if rows is not None and len(rows) == 0:
            raise UserError(f"the {key} dataset is empty; it needs at least one row")
    return train, test


def _build_dataset(section: recipes.DatasetTaskSection, folder: Path) -> DatasetTask:
    names = [section.reward] if isinstance(section.reward, str) else list(section.reward)
    functions = [load_callable(name, key="task.reward", folder=folder) for name in names]
    train, test = read_source(section, folder)
    task = DatasetTask(
        train,
        test,
        Rewards(functions, section.on_reward_error, section.reward_range),
        prompt_column=section.prompt_column,
        answer_column=section.answer_column,
        test_fraction=section.test_fraction,
        success_at_least=section.success_at_least,
        reward_range=section.reward_range,
    )
    if test is not None:
        task.settle_overlap(section.on_overlap)
    return task


def _beside(folder: Path, path: str) -> Path:
    given = Path(path).expanduser()
    return given if given.is_absolute() else folder / given
