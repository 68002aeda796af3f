"""What `eval` and `ask` do with a stored team."""

from __future__ import annotations

from pathlib import Path

from teamtr_lora.errors import UserError
from teamtr_lora.evaluation.evaluate import Evaluation, evaluate
from teamtr_lora.recipe import Recipe, ScriptTask
from teamtr_lora.rollout.collector import PlayPlan, Progress
from teamtr_lora.rollout.playable import PlayableTeam, load_versions, open_team
from teamtr_lora.rollout.records import read_team
from teamtr_lora.tasks import Item, Task, build_task
from teamtr_lora.tasks.task import Split
from teamtr_lora.team import Episode


def open_stored(folder: Path) -> tuple[Recipe, PlayableTeam]:
    recipe, versions = read_team(folder)
    playable = open_team(recipe.base, recipe.team, recipe.rollout, seed=recipe.seed, folder=recipe.folder)
    load_versions(playable, versions, folder / "adapters")
    return recipe, playable


def evaluate_team(
    folder: Path,
    *,
    split: Split = "test",
    k: int | None = None,
    temperature: float | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """What is left out is taken from the run's own recipe."""
    recipe, playable = open_stored(folder)
    if isinstance(recipe.task, ScriptTask):
        raise UserError(f"{folder}: this run's items and rewards live in a Python script; use TeamTRTrainer.evaluate() there")
    section, rollout = recipe.evaluation, recipe.rollout
    default = rollout.temperature if section.temperature is None else section.temperature
    return evaluate(
        playable,
        build_task(recipe.task, recipe.folder),
        items=limit or section.items,
        k=k or section.samples_per_item,
        temperature=default if temperature is None else temperature,
        max_message_tokens=rollout.max_message_tokens,
        seed=recipe.seed,
        split=split,
        progress=progress,
    )


def ask_team(folder: Path, question: str, *, temperature: float | None = None, seed: int = 0) -> Episode:
    """One unscored episode on the user's own question."""
    if not question.strip():
        raise UserError("the question is empty")
    recipe, playable = open_stored(folder)
    rollout = recipe.rollout
    plan = PlayPlan(
        [Item("question", question)],
        1,
        rollout.temperature if temperature is None else temperature,
        rollout.max_message_tokens,
        f"ask/{seed}",
    )
    return playable.play(Task(), plan)[0]
