"""The team that ships in adapters/: whole, made by the committed recipe, and as good as it says."""

from __future__ import annotations

from pathlib import Path

from teamtr_lora.evaluation.evaluate import plan_in_training, summarise
from teamtr_lora.recipe import load_recipe
from teamtr_lora.registry.reader import RegistryReader
from teamtr_lora.registry.stored import find_team
from teamtr_lora.registry.verify import verify
from teamtr_lora.rollout.playable import load_versions, open_team

REPO = Path(__file__).resolve().parent.parent.parent
TEAM = "column_sum"


def test_every_hash_fits() -> None:
    found = verify(RegistryReader(REPO / "adapters"))
    assert (found.problems, found.notes) == ([], [])
    assert found.adapters >= 3 and TEAM in RegistryReader(REPO / "adapters").teams()


def test_it_is_small_and_comes_from_the_committed_recipe() -> None:
    team = RegistryReader(REPO / "adapters").team(TEAM)
    assert team.load_recipe() == load_recipe(REPO / "recipes" / "quickstart.yaml")
    assert team.made_by == "train" and team.base.source == "nano"
    files = [path for path in (REPO / "adapters").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    machine = [str(path) for path in files if path.suffix != ".safetensors" and str(REPO) in path.read_text()]
    assert not machine  # no path of the machine it was made on


def test_it_plays_as_well_as_its_card_says() -> None:
    stored = find_team(REPO / "adapters" / TEAM)
    recipe = stored.recipe
    playable = open_team(recipe.base, recipe.team, recipe.rollout, seed=recipe.seed, folder=recipe.folder)
    load_versions(playable, stored.versions, stored.adapters)
    task = recipe.task.build(recipe.folder)
    plan = plan_in_training(task, recipe, 32, k=1)
    found = summarise(playable.play(task, plan), task, plan)
    playable.close()
    said = RegistryReader(REPO / "adapters").team(TEAM).metrics["avg_at_k"]
    assert said > 0.85 and found.avg_at_k > 0.68  # fresh adapters reach 0.5; 0.68 is four standard errors below
