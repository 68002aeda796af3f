"""What a recipe names and must be on this machine: data files and functions. Looked at, never run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from teamtr_lora.common.code_paths import misnamed, undefined
from teamtr_lora.common.settings import nearest
from teamtr_lora.recipe.recipe import Recipe, TeamTRConfig
from teamtr_lora.recipe.words import MISSING, Problem, RecipeError
from teamtr_lora.tasks.dataset import DatasetSettings
from teamtr_lora.tasks.table import machine_keys

# Keys of a recipe that name something of this machine, for those who carry recipes from one machine to another.
LOCAL_FILES = machine_keys("file")
LOCAL_CHOICES = (  # where it writes, whom it calls, and which environment variables it sends there
    "output_dir",
    "rollout.server.urls",
    "rollout.server.adapter_root",
    "rollout.server.api_key_variable",
    *machine_keys("choice"),
    "tracking.trackers",
)
PATHS_OR_NAMES = machine_keys("path or name")  # a hub's name is the same everywhere; a path is this machine's


def check_named(recipe: Recipe, source: str) -> None:
    """Refuses a recipe whose files or functions are not there, whose success is out of its reward's reach, or whose
    trackers are not installed; all at once."""
    problems = [*_files(recipe), *_functions(recipe), *_success(recipe), *_votes(recipe), *missing_trackers(recipe)]
    if problems:
        raise RecipeError(problems, source)


def missing_trackers(recipe: TeamTRConfig) -> list[Problem]:
    """Trackers that are not installed here."""
    missing = [tracker for tracker in recipe.tracking.trackers if importlib.util.find_spec(tracker) is None]
    fix = f"pip install {' '.join(missing)}, or leave it out"
    wrong = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed"
    return [Problem("tracking.trackers", missing, wrong, fix)] if missing else []


def _files(recipe: Recipe) -> Iterator[Problem]:
    for key in LOCAL_FILES:
        try:
            named = attrgetter(key)(recipe)
        except AttributeError:  # a key of another task
            continue
        path = recipe.folder / os.path.expanduser(named or "")
        if named and not os.path.isfile(path):
            there = sorted(file.name for file in path.parent.glob("[!.]*")) if os.path.isdir(path.parent) else []
            wrong = "no such file" if there else f"no such file; there is nothing in {path.parent}"
            yield Problem(
                key,
                named,
                wrong,
                f"give yours with {key}=FILE; paths are relative to the recipe",
                suggestion=nearest(path.name, there),
            )


def _votes(recipe: Recipe) -> Iterator[Problem]:
    """A dataset is told what a message's answer is; the built-in tasks know, and say so themselves."""
    router, task = recipe.team.router, recipe.task
    if router.votes and isinstance(task, DatasetSettings) and task.answer is None:
        wrong = "is not given, so there is nothing to vote over"
        fix = "name the function that finds the answer in a message as module:function, or take another router"
        yield Problem("task.answer", MISSING, wrong, fix)


def named_code(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Python that a recipe, here as data, names and that no repository brings: recipe key -> module:function."""
    task = recipe.get("task", {})
    rewards = (task.get("reward") or []) if task.get("name") == "dataset" else []  # for other tasks `reward` is a built-in name
    found = {"task.reward": rewards} if isinstance(rewards, str) else {f"task.reward.{i}": str(p) for i, p in enumerate(rewards)}
    if task.get("name") == "dataset" and task.get("answer"):
        found["task.answer"] = str(task["answer"])
    if task.get("name") == "custom" and task.get("callable"):
        found["task.callable"] = str(task["callable"])
    if router := recipe.get("team", {}).get("router", {}).get("callable"):
        found["team.router.callable"] = str(router)
    return found


def _functions(recipe: Recipe) -> Iterator[Problem]:
    for key, name in named_code(recipe.model_dump()).items():
        if wrong := misnamed(name, recipe.folder) or undefined(name, recipe.folder):
            yield Problem(key, name, *wrong)


def _success(recipe: Recipe) -> Iterator[Problem]:
    """Checked only if the recipe sets both success_at_least and reward_range."""
    task = recipe.task
    if isinstance(task, DatasetSettings) and {"success_at_least", "reward_range"} <= task.model_fields_set:
        low, high = task.reward_range
        if not low <= task.success_at_least <= high:
            count = "no episode" if task.success_at_least > high else "every episode"
            wrong = f"is outside task.reward_range = [{low:g}, {high:g}]: {count} would count as right"
            yield Problem("task.success_at_least", task.success_at_least, wrong, f"set it between {low:g} and {high:g}")
