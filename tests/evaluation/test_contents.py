"""An evaluation belongs to the code and the base that it was made with, not to their names; and what else shares its folder."""

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from teamtr_lora.cli import main
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


def test_a_run_and_its_evaluations_notice_another_file_that_the_reward_imports(
    recipe: Path, corrected: Callable[[], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def imported(value: float) -> None:
        corrected()
        reward = REWARD.replace("\n", "\n    from values import VALUE\n", 1)
        (tmp_path / "rewards.py").write_text(reward)
        (tmp_path / "values.py").write_text(f"VALUE = {value}\n")

    imported(0.25)
    run = tmp_path / "run"
    train = ["train", str(recipe), "--run-dir", str(run), "training.stages=1", "evaluation.items=2"]
    assert main(train) == 0
    rewards = [evaluate_team(run, REUSE).evaluation.mean_reward]
    for value, told in ((0.25, False), (0.5, True)):
        imported(value)
        caplog.clear()
        assert main([*train, "--resume"]) == 0
        assert ("what task.reward.0 names is not what it was" in caplog.text) is told
        rewards.append(evaluate_team(run, REUSE).evaluation.mean_reward)
    assert rewards == [0.25, 0.25, 0.5]


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


IMPORTS = {  # by how mine.py, or pack/mine.py, comes by a VALUE: what is written in which file
    "its own": {"mine.py": "VALUE = 1"},
    "a name": {"mine.py": "from other import VALUE", "other.py": "VALUE = 1"},
    "all names": {"mine.py": "from other import *", "other.py": "VALUE = 1"},
    "by way of another": {"mine.py": "import a as b", "a.py": "import other", "other.py": "VALUE = 1"},
    "when it is called": {"mine.py": "def load():\n    from other import VALUE", "other.py": "VALUE = 1"},
    "a part of a package": {"mine.py": "import pack.other as o", "pack/__init__.py": "", "pack/other.py": "VALUE = 1"},
    "the package around it": {"mine.py": "from pack import other", "pack/__init__.py": "VALUE = 1", "pack/other.py": ""},
    "one that is named in full": {"pack/mine.py": "from pack.deep.other import VALUE", "pack/deep/other.py": "VALUE = 1"},
    "a relative one": {"pack/mine.py": "from . import other", "pack/other.py": "VALUE = 1"},
    "one further up": {"pack/deep/mine.py": "from ..other import VALUE", "pack/other.py": "VALUE = 1"},
    "in a circle": {"mine.py": "import other", "other.py": "import mine\nVALUE = 1"},
}


def written(folder: Path, files: dict[str, str], value: str = "1", **more: str) -> Path:
    for name, text in {**files, **{f"{name}.py": text for name, text in more.items()}}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        defined = "\ndef f(x):\n    return x\n" if name.endswith("mine.py") else "\n"
        (folder / name).write_text(text.replace("VALUE = 1", f"VALUE = {value}") + defined)
    return folder


@pytest.mark.parametrize("files", IMPORTS.values(), ids=IMPORTS)
def test_what_a_file_imports_counts_with_it(tmp_path: Path, files: dict[str, str]) -> None:
    name = next(name for name in files if name.endswith("mine.py")).removesuffix(".py").replace("/", ".")
    folders = [
        written(tmp_path / "1", files, bystander="import re"),
        written(tmp_path / "2", files, bystander="import sys"),
        written(tmp_path / "3", files, value="2", bystander="import re"),
    ]
    first, same, other = [code_hash(f"{name}:f", key="k", folder=folder) for folder in folders]
    assert first == same != other


def test_a_warning_of_the_users_text_is_not_said_again_of_no_file(tmp_path: Path) -> None:
    written(tmp_path, {"mine.py": "PLACES = '\\d'"})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        code_hash("mine:f", key="k", folder=tmp_path)
    assert [Path(each.filename).name for each in said] == ["mine.py"]


def test_what_a_trusted_package_imports_of_itself_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEAMTR_LORA_TRUST", "hashed_here")
    files = {"mine.py": "import json\nfrom hashed_here import other", "other.py": "VALUE = 1", "__init__.py": "import re"}
    found = []
    for place, value in enumerate(("1", "1", "2")):
        monkeypatch.syspath_prepend(str(written(tmp_path / str(place) / "hashed_here", files, value).parent))
        for name in [name for name in sys.modules if name.partition(".")[0] == "hashed_here"]:
            monkeypatch.delitem(sys.modules, name)
        found.append(code_hash("hashed_here.mine:f", key="k", folder=None))
    assert found[0] == found[1] != found[2]


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
