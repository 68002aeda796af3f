"""The example environment of the docs: trained from Python and from a recipe, with each agent paid for its own dial."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import teamtr_lora
from teamtr_lora import Feedback, TeamTRConfig, TeamTRTrainer
from teamtr_lora.cli import main
from teamtr_lora.tasks.machinery.score import play

EXAMPLE = Path(teamtr_lora.__file__).parent / "docs" / "examples" / "number_vault.py"
TEAM: dict[str, Any] = {
    "protocol": {"system": "Add by columns."},
    "router": {"kind": "round_robin", "rounds": 2},
    "agents": [{"name": "solver", "role": "ones"}, {"name": "checker", "role": "tens"}],
}
SMALL: dict[str, Any] = {
    "rollout": {"items_per_stage": 8, "episodes_per_item": 4, "max_message_tokens": 12},
    "training": {"stages": 1, "inner_epochs": 1},
    "evaluation": {"items": 2, "every_stages": 0},
}


@pytest.fixture(scope="module")
def vault() -> Any:
    spec = importlib.util.spec_from_file_location("number_vault", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80


def test_by_hand(vault: Any) -> None:
    task = vault.NumberVault()
    splits = {split: {item.id for item in task.items(split)} for split in ("train", "test")}
    assert len(splits["test"]) == 64 and len(splits["train"]) > 400 and not splits["test"] & splits["train"]
    item = teamtr_lora.Item("47+38", "47+38", {"totals": task.totals(47, 38)})
    episode = play(task, item, ["7+8+0=15", "4+3=7", "again", '{"name": "dial", "arguments": {"total": 8}}'])
    assert episode.feedback == ["click", "closed", "open", "click"] and episode.rewards == [0.5, 0.0, 0.0, 0.5]
    assert episode.ended == "task" and task.success(episode.reward)
    assert [vault.turned_to(text) for text in ("dial(total=12)", "3+4= 7 ", "seven")] == ["12", "7", None]


def test_trained_from_a_recipe(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path)
    task = {"name": "custom", "callable": "number_vault:make_task", "settings": {"largest": 49, "seconds": 0.001}}
    (tmp_path / "r.yaml").write_text(json.dumps({"team": TEAM, "task": task, **SMALL}))
    assert main(["train", str(tmp_path / "r.yaml"), "--run-dir", str(tmp_path / "run"), "--json"]) == 0
    rows = [json.loads(line) for file in sorted((tmp_path / "run/episodes").iterdir()) for line in file.read_text().splitlines()]
    assert rows and all(sum(row["credit"].values()) == row["reward"] for row in rows), "one agent earns each click"
    assert {row["credit"]["solver"] for row in rows} == {row["credit"]["checker"] for row in rows} == {0.0, 0.5}


def test_trained_from_python_and_each_agent_learns_from_its_own_credit(vault: Any, tmp_path: Path) -> None:
    """The team's reward varies by both dials. With credit for the first alone, the second agent's update has nothing to learn."""

    class FirstDial(vault.Vault):  # type: ignore[misc]
        async def feed(self, message: Any) -> Feedback:
            said = await super().feed(message)
            return Feedback(said.text, said.reward, said.done, said.credit if message.agent == "solver" else {})

    class FirstDialVault(vault.NumberVault):  # type: ignore[misc]
        def open(self, item: Any) -> Any:
            return FirstDial(item, self.seconds)

    args = TeamTRConfig(output_dir=str(tmp_path / "run"), **SMALL)
    with TeamTRTrainer(team=TEAM, task=FirstDialVault(), args=args) as trainer:
        summary = trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    decided = {row["agent"]: row["decision"] for row in rows if row.get("kind") == "update" or "decision" in row}
    assert summary.skipped == 1 and decided["checker"] == "skipped" and decided["solver"] != "skipped"
