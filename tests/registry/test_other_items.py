"""A trained team on other items: in which folder its paths and code are looked for, and that nothing gets around trust."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, RecipeError
from teamtr_lora.registry.other_items import on_other_items
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.stored import find_team


@pytest.fixture
def team(recipe: Recipe, tmp_path: Path) -> Recipe:
    """A team whose recipe lies at home, with a base, rows and a router there; the user's task recipe is away."""
    (tmp_path / "home" / "base").mkdir(parents=True)
    (tmp_path / "away").mkdir()
    for name in ("rows.jsonl", "tests.jsonl"):
        (tmp_path / "home" / name).write_text("{}\n")
    data = recipe.model_dump()
    data["base"] = {"source": "base"}
    data["task"] = {"name": "dataset", "path": "rows.jsonl", "test_path": "tests.jsonl", "reward": ["rewards:right"]}
    return Recipe.model_validate(data).placed_in(tmp_path / "home")


def task(folder: Path, text: str) -> str:
    (folder / "task.yaml").write_text(text)
    return str(folder / "task.yaml")


def test_paths_of_the_team_stay_at_home_and_those_of_the_task_are_its_own(team: Recipe, tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    text = "task: {path: new.jsonl, reward: 'own:right'}\nteam: {agents: [{name: x}]}\ntraining: {stages: 7}\n"
    changed = on_other_items(team, [task(away, text)], ["task.prompt_column=q"], "RUN")
    assert changed.folder == away and changed.base.source == str(home / "base") and changed.team == team.team
    found: Any = changed.task
    assert (found.path, found.test_path, found.prompt_column) == ("new.jsonl", str(home / "tests.jsonl"), "q")
    assert changed.training == team.training
    only = on_other_items(team, [task(away, "evaluation: {items: 3}\n")], ["rollout.temperature=0.3"], "RUN")
    assert (only.folder, only.base, only.task) == (team.folder, team.base, team.task)
    assert (only.evaluation.items, only.rollout.temperature) == (3, 0.3)
    assert on_other_items(team, [], [], "RUN") is team


def test_code_that_the_task_does_not_bring_must_be_beside_it(team: Recipe, tmp_path: Path) -> None:
    text = "task: {path: new.jsonl}\n"
    with pytest.raises(
        UserError, match=r"task.yaml: is in another folder than the code of task.reward.0 = 'rewards:right', which"
    ):
        on_other_items(team, [task(tmp_path / "away", text)], [], "RUN")
    assert on_other_items(team, [task(tmp_path / "home", text)], [], "RUN").folder == team.folder
    data = team.model_dump()
    data["team"]["router"] = {"kind": "custom", "callable": "router:speak"}
    routed = Recipe.model_validate(data).placed_in(team.folder)
    with pytest.raises(UserError, match="code of team.router.callable = 'router:speak'"):
        on_other_items(routed, [task(tmp_path / "away", "task: {name: column_sum}\n")], [], "RUN")
    assert on_other_items(routed, [], ["task={name: column_sum}"], "RUN").task.name == "column_sum"


@pytest.mark.parametrize(
    "text", ["task: 5\n", "task: {reward: 5}\n", "task: {name: 5}\n", "task: {name: dataset, reward: [5]}\n"]
)
def test_a_wrong_task_is_a_line(team: Recipe, tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match=r"^RUN \+ .*task.yaml"):
        on_other_items(team, [task(tmp_path / "away", text)], [], "RUN")


def test_a_stored_team_on_another_task_runs_nothing_that_is_not_trusted(
    filled: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAMTR_LORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TEAMTR_LORA_TRUST_PROGRAMS", raising=False)
    (tmp_path / "puzzles.jsonl").write_text("{}\n")

    def on(text: str, *overrides: str) -> str:
        return find_team(filled.root / "demo", more=([task(tmp_path, text)], overrides)).recipe.task.name

    with pytest.raises(UserError, match=r"demo: its task 'autologi' runs programs .*puzzles.jsonl.*--trust-programs"):
        on("task: {name: autologi, path: puzzles.jsonl}\n")
    with pytest.raises(UserError, match=r"task.reward.0 = 'os:system': os is part of Python itself"):
        on("task: {name: dataset, path: puzzles.jsonl, reward: ['os:system']}\n")
    with pytest.raises(UserError, match=r"task.callable = 'torch.hub:load': torch is an installed package"):
        on("task: {name: column_sum}\n", "task={name: custom, callable: 'torch.hub:load'}")
    monkeypatch.setenv("TEAMTR_LORA_TRUST_PROGRAMS", "sandboxed")
    assert on("task: {name: autologi, path: puzzles.jsonl}\n") == "autologi"
