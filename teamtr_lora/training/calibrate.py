"""A short run on this machine, to learn its speeds: one stage of a recipe on fewer items, in a folder that is thrown away."""

from __future__ import annotations

import tempfile
from pathlib import Path

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, ScriptSettings
from teamtr_lora.runs.metrics import MetricsRow, read_rows
from teamtr_lora.training.trainer import TeamTRTrainer

EPISODES = 128  # of one rollout: a batch that engines fill as in a whole run, in a fraction of its time
ITEMS = 8  # fewest of a rollout, and of an evaluation


def short_run(recipe: Recipe) -> tuple[Recipe, list[MetricsRow]]:
    """The recipe that was run, and what it logged."""
    if isinstance(recipe.task, ScriptSettings):
        raise UserError("--calibrate: this recipe's items and rewards live in a Python script; train there")
    rollout = recipe.rollout
    items = min(rollout.items_per_stage, max(ITEMS, EPISODES // rollout.episodes_per_item))
    if recipe.training.matched == "stage":  # whose shares must come out even
        items = rollout.items_per_stage
    with tempfile.TemporaryDirectory(prefix="teamtr-lora-calibrate-") as folder:
        data = recipe.model_dump()
        data |= {"output_dir": str(Path(folder) / "run"), "tracking": {}}
        data["training"] |= {"stages": 1}
        data["rollout"] |= {"items_per_stage": items}
        data["evaluation"] |= {"items": min(ITEMS, recipe.evaluation.items), "every_stages": 0, "samples_per_item": 1}
        short = Recipe.model_validate(data).placed_in(recipe.folder)
        with TeamTRTrainer.from_recipe(short, progress=False) as trainer:
            trainer.train()
        return short, read_rows(Path(folder) / "run")
