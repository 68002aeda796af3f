"""What `eval` and `ask` do with a stored team."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from teamtr_lora.errors import UserError
from teamtr_lora.evaluation.evaluate import Evaluation, evaluate
from teamtr_lora.recipe import Recipe, ScriptTask
from teamtr_lora.rollout.collector import PlayPlan, Progress
from teamtr_lora.rollout.playable import PlayableTeam, load_versions, open_team
from teamtr_lora.rollout.records import read_team
from teamtr_lora.tasks import Item, Task, build_task
from teamtr_lora.tasks.task import Split
from teamtr_lora.team import Episode

Engine = Literal["transformers", "vllm"]


@contextmanager
def open_stored(folder: Path, engine: Engine | None = None) -> Iterator[tuple[Recipe, PlayableTeam]]:
    """A stored team, ready to play on the engine of its recipe or on another one."""
    recipe, versions = read_team(folder)
    rollout = recipe.rollout if engine is None else recipe.rollout.model_copy(update={"engine": engine})
    playable = open_team(recipe.base, recipe.team, rollout, seed=recipe.seed, folder=recipe.folder)
    try:
        load_versions(playable, versions, folder / "adapters")
        yield recipe, playable
    finally:
        playable.close()


def evaluate_team(
    folder: Path,
    *,
    split: Split = "test",
    k: int | None = None,
    temperature: float | None = None,
    limit: int | None = None,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """What is left out is taken from the run's own recipe."""
    recipe, _ = read_team(folder)
    if isinstance(recipe.task, ScriptTask):
        raise UserError(f"{folder}: this run's items and rewards live in a Python script; use TeamTRTrainer.evaluate() there")
    task, section = build_task(recipe.task, recipe.folder), recipe.evaluation
    default = recipe.rollout.temperature if section.temperature is None else section.temperature
    with open_stored(folder, engine) as (_, playable):
        return evaluate(
            playable,
            task,
            items=limit or section.items,
            k=k or section.samples_per_item,
            temperature=default if temperature is None else temperature,
            max_message_tokens=recipe.rollout.max_message_tokens,
            seed=recipe.seed,
            split=split,
            progress=progress,
        )


def ask_team(folder: Path, question: str, *, temperature: float | None = None, seed: int = 0) -> Episode:
    """One unscored episode on the user's own question."""
    if not question.strip():
        raise UserError("the question is empty")
    with open_stored(folder, "transformers") as (recipe, playable):  # one question does not pay for starting an engine
        rollout = recipe.rollout
        plan = PlayPlan(
            [Item("question", question)],
            1,
            rollout.temperature if temperature is None else temperature,
            rollout.max_message_tokens,
            f"ask/{seed}",
        )
        return playable.play(Task(), plan)[0]
