"""An evaluation belongs to the code and the base that it was made with, not to their names; and what else shares its folder."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from teamtr_lora.common.code_paths import code_hash
from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation.commands import EvalOptions, compare_runs, evaluate_team
from teamtr_lora.evaluation.contents import code_hashes
from teamtr_lora.recipe import load_recipe
from teamtr_lora.registry.identity import base_hash
from teamtr_lora.runs.evaluations import EvaluationStore
from teamtr_lora.runs.run_dir import RunDir

RECIPE = """
base: {source: base, device: cpu}
team:
  agents: [{name: a, lora: {rank: 2}}, {name: b, lora: {rank: 2}}]
  router: {kind: custom, callable: "routers:turns"}
task: {name: dataset, path: items.jsonl, reward: ["rewards:same"], success_at_least: 0.5}
rollout: {items_per_stage: 8, episodes_per_item: 2, max_message_tokens: 4, requests_per_batch: 32}
evaluation: {items: 40}
"""
REWARD = "def same(prompts, completions, **columns):\n    return [VALUE for _ in prompts]\n"
ROUTER = "def turns(messages, agents):\n    return agents[len(messages) % len(agents)]\n"
REUSE = EvalOptions(k=2, reuse=True)


@pytest.fixture
def recipe(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_base, tmp_path / "base")
    (tmp_path / "items.jsonl").write_text("".join(json.dumps({"prompt": f"item {i}"}) + "\n" for i in range(400)))
    (tmp_path / "routers.py").write_text(ROUTER)
    (tmp_path / "rewards.py").write_text(REWARD.replace("VALUE", "0.25"))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


@pytest.fixture
def corrected(tmp_path: Path) -> Callable[[], None]:
    """The reward function is another one from here on, in what counts as a new process."""

    def correct() -> None:
        (tmp_path / "rewards.py").write_text(REWARD.replace("VALUE", "0.75"))
        for name in [name for name in sys.modules if name.startswith("teamtr_lora_user.")]:
            del sys.modules[name]

    return correct


def test_corrected_rewards_are_another_evaluation(recipe: Path, corrected: Callable[[], None]) -> None:
    old = evaluate_team(recipe, REUSE)
    corrected()
    new = evaluate_team(recipe, REUSE)
    assert (old.evaluation.mean_reward, new.evaluation.mean_reward) == (0.25, 0.75)
    assert compare_runs([recipe, recipe], EvalOptions(k=2)).tests["avg@2"].first == 1
    assert compare_runs([Path(old.folder), recipe], EvalOptions(k=2)).tests["avg@2"].difference == 1, "the old one stays"
    assert compare_runs([Path(old.folder), Path(new.folder)], EvalOptions()).tests["avg@2"].difference == 1
    with pytest.raises(UserError, match=r"holds another evaluation \(code differ\); choose another --out"):
        evaluate_team(recipe, EvalOptions(k=2, out=Path(old.folder)))


def test_an_interrupted_evaluation_does_not_go_on_with_other_rewards(
    recipe: Path, corrected: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EvaluationStore.append

    def once(self: EvaluationStore, *rows: Any) -> None:
        real(self, *rows)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(EvaluationStore, "append", once)
        evaluate_team(recipe, EvalOptions(k=2))
    corrected()
    assert evaluate_team(recipe, EvalOptions(k=2)).evaluation.mean_reward == 0.75


def test_every_file_counts_and_a_process_keeps_what_it_has_loaded(recipe: Path, tmp_path: Path) -> None:
    loaded = load_recipe(recipe)
    first = code_hashes(loaded), base_hash(loaded)
    assert set(first[0]) == {"task.reward.0", "team.router.callable"}
    for name in ("rewards.py", "routers.py"):
        (tmp_path / name).write_text((tmp_path / name).read_text() + "\n# another\n")
    assert code_hashes(loaded) == first[0], "what is written now is not what this process plays"
    for name in [name for name in sys.modules if name.startswith("teamtr_lora_user.")]:
        del sys.modules[name]
    again = code_hashes(loaded)
    assert all(again[name] != first[0][name] for name in again)
    weights = tmp_path / "base" / "model.safetensors"
    save_file({name: tensor + 0.01 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    assert base_hash(loaded) not in (first[1], None)
    elsewhere = loaded.model_copy(update={"base": loaded.base.model_copy(update={"source": "some/hub-name"})})
    assert base_hash(elsewhere.placed_in(tmp_path)) is None, "nothing is fetched to read a finished evaluation"


def test_a_function_taken_from_another_file_counts_with_that_file(tmp_path: Path) -> None:
    found = []
    for value in ("1", "2"):
        folder = tmp_path / value
        folder.mkdir()
        (folder / "taken_from.py").write_text(f"def f(x):\n    return {value}\n")
        (folder / "mine.py").write_text("from taken_from import f\n")
        found.append(code_hash("mine:f", key="k", folder=folder))
    assert found[0] != found[1]


def test_a_lock_that_cannot_be_made_is_no_other_process(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="a link"), EvaluationStore(tmp_path / "mine", {}, dict).claimed():
        pass
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(UserError, match="cannot (be written|write here)"), EvaluationStore(Path("/proc"), {}, dict).claimed():
        pass  # where no file can be made, though the folder is there


def test_whoever_takes_the_run_leaves_a_running_evaluations_files(tmp_path: Path) -> None:
    folder = tmp_path / "evaluations" / "team-test"
    half, own = folder / ".tmp-5-result.json", tmp_path / "checkpoint" / ".tmp-5-step"
    for file in (half, own):
        file.parent.mkdir(parents=True)
        file.write_text("{")
    RunDir(tmp_path).lock().release()
    assert half.exists() and not own.exists()
    with EvaluationStore(folder, {"items": 1}, dict).claimed():
        assert not half.exists(), "its own lock's holder clears it"
