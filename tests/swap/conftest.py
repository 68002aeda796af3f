"""A small trained run on the tiny base, whose agents have moved far enough from a fresh adapter to be missed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from teamtr_lora.recipe import load_recipe
from teamtr_lora.training.trainer import TeamTRTrainer

RECIPE = """
base: {{source: {base}, device: cpu}}
team:
  protocol: {{system: Say something.}}
  agents:
    - {{name: left, role: first, lora: {{rank: 4, alpha: 8.0}}}}
    - {{name: right, role: last, lora: {{rank: 2, alpha: 4.0, targets: [q_proj, v_proj]}}}}
task: {{name: dataset, path: items.jsonl, reward: "rewards:letters"}}
rollout: {{items_per_stage: 8, episodes_per_item: 4, max_message_tokens: 4}}
training: {{stages: 1, learning_rate: 0.01, inner_epochs: 3, order: fixed, tokens_per_microbatch: 1000}}
trust_region: {{kind: none, delta: 0.5}}
evaluation: {{items: 5}}
swap: {{probe_contexts: 16, contexts_per_step: 4, align_steps: 12, align_rate: 0.01}}
diagnostics: {{save_episodes: none}}
"""
REWARD = """
def letters(prompts, completions, **columns):
    return [sum(c.isalpha() for c in text) / 4 for text in completions]
"""


@pytest.fixture(scope="session")
def recipe_file(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swap-recipe")
    (folder / "items.jsonl").write_text("".join(json.dumps({"prompt": f"item {i}"}) + "\n" for i in range(60)))
    (folder / "rewards.py").write_text(REWARD)
    (folder / "recipe.yaml").write_text(RECIPE.format(base=tiny_base))
    return folder / "recipe.yaml"


@pytest.fixture(scope="session")
def trained(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swap-run") / "run"
    trainer = TeamTRTrainer.from_recipe(load_recipe(recipe_file, [f"output_dir={folder}"]))
    summary = trainer.train()
    trainer.close()
    assert summary.accepted == 2, "both agents must have moved"
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="session")
def files() -> Callable[[Path], dict[str, bytes]]:
    """Every file of a folder but locks, as bytes."""

    def read(folder: Path) -> dict[str, bytes]:
        found = [p for p in folder.rglob("*") if p.is_file() and p.name != ".lock"]
        return {str(p.relative_to(folder)): p.read_bytes() for p in found}

    return read
