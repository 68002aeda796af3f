"""A command runs a file of the user's only where it needs it, and its help says which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from teamtr_lora.cli import build_parser, main

RECIPE = """
base: {source: nano, device: cpu}
team:
  agents: [{name: solver}]
  router: {kind: custom, callable: "watched:router"}
task: {name: dataset, path: rows.jsonl, reward: "watched:reward"}
"""
WATCHED = """
from pathlib import Path
Path(__file__).with_name("ran").touch()

def reward(prompts, completions, **columns):
    return [0.0] * len(prompts)

def router(messages, agents):
    return agents[0]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "watched.py").write_text(WATCHED)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"q {n}"}) + "\n" for n in range(40)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "argv",
    [
        ["validate", "recipe.yaml"],
        ["plan", "recipe.yaml"],
        ["tasks", "sample", "dataset", "path=rows.jsonl", "reward=watched:reward"],
        ["tasks", "sample", "dataset", "path=rows.jsonl", "reward=nowhere:reward"],
        ["tasks", "sample", "dataset", "path=rows.jsonl"],
    ],
)
def test_what_needs_no_reward_runs_none(argv: list[str], folder: Path) -> None:
    assert main(argv) == 0
    assert not (folder / "ran").exists()


def test_what_scores_does_run_it(folder: Path) -> None:
    assert main(["eval", "recipe.yaml", "--limit", "1", "--k", "1"]) == 0
    assert (folder / "ran").exists()


def test_a_plan_still_finds_a_missing_reward(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "recipe.yaml", "task.reward=watched:rewrad"]) == 2
    assert "'rewrad'; it defines reward, router" in capsys.readouterr().err
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("command", "named"),
    [
        *(
            (command, "task.reward, task.answer, task.callable and team.router.callable")
            for command in ("train", "eval", "swap", "rebase")
        ),
        ("baseline", "task.reward, task.answer, task.callable and team.router.callable"),
        ("plan", "that of task.callable"),
        ("tasks", "that of task.callable"),
        ("ask", "those of team.router.callable and, where the team votes, task.answer"),
    ],
)
def test_help_says_which_files_are_run(command: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([command, "--help"])
    assert named in " ".join(capsys.readouterr().out.split())
