"""A run directory made by hand: what training would leave of a team of two, without a base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from teamtr_lora.base.versions import AdapterVersion, content_hash, version_names, write_version
from teamtr_lora.recipe import Recipe
from teamtr_lora.runs.metrics import StageRow
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.run_state import COUNTS, RunState
from teamtr_lora.team import Episode

CONFIG = {"r": 2, "lora_alpha": 4}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    team = {"agents": [{"name": "left"}, {"name": "right"}]}
    return Recipe.model_validate({"team": team}).placed_in(tmp_path)


def stage_row(stage: int, versions: dict[str, str], evaluation: dict[str, object] | None = None) -> StageRow:
    zeros = dict.fromkeys(("items_seen", "sampled_tokens", "seconds", "peak_memory_bytes", "time", *COUNTS), 0)
    return StageRow(stage=stage, order=[], versions=versions, evaluation=evaluation, floors=None, **zeros)  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path: Path, recipe: Recipe) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.claim(recipe, {}).release()
    versions = {}
    for number, agent in enumerate(("left", "right"), start=3):
        tensors = {f"{agent}.weight": torch.full((2, 2), float(number))}
        versions[agent] = AdapterVersion(agent, number, content_hash(tensors, CONFIG))
        write_version(made.adapters, versions[agent], tensors, CONFIG)
    made.write_team(versions, {})
    made.metrics.append(stage_row(0, version_names(versions) | {"left": "v0000-0123456789ab"}, {"avg_at_k": 0.25}))
    made.metrics.append(stage_row(1, version_names(versions), {"avg_at_k": 0.5, "agents": {"left": None}}))
    made.write_episodes("stage-0001", [Episode("i0", 0, "prompt", seed=0)], "all")
    made.checkpoints.save(RunState(step=1, stage=1, versions=versions, metrics_bytes=made.metrics.size, started=True), {})
    return made
