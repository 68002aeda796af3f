"""A run directory comes in as a team: with what it knows of itself, and only where all of it fits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_up_run import write_rows

from teamtr_lora.base.versions import CONFIG, WEIGHTS, AdapterVersion, content_hash, read_adapter_folder, write_version
from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json
from teamtr_lora.recipe import Recipe, dump_recipe
from teamtr_lora.registry.imports import import_path
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.verify import verify
from teamtr_lora.runs.metrics import StageRow
from teamtr_lora.runs.run_state import COUNTS


@pytest.fixture
def run(tmp_path: Path, bank: Any, recipe: Any) -> Path:
    """A run directory as training leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    team = {}
    for number, agent in enumerate(bank.agents, 3):
        version = AdapterVersion(agent, number, content_hash(bank.tensors(agent), bank.config(agent)))
        write_version(folder / "adapters", version, bank.tensors(agent), bank.config(agent))
        team[agent] = version.stored()
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    (folder / "origin.json").write_text(dump_json({"recipe_folder": str(tmp_path)}))
    (folder / "team.json").write_text(dump_json(team))
    now, evaluation = {agent: entry["version"] for agent, entry in team.items()}, {"avg_at_k": 0.75, "split": "test"}
    rows = [
        stage_row(0, {"avg_at_k": 0.5}, now | {"planner": "v0000-0123456789ab"}),
        stage_row(1, evaluation | {"agents": {"planner": {"value": 0.9}, "checker": None}}, now),
        stage_row(2, None, now),
    ]
    write_rows(folder, [row.model_dump(mode="json") for row in rows])
    return folder


def stage_row(stage: int, evaluation: dict[str, Any] | None, versions: dict[str, str]) -> StageRow:
    counts = dict.fromkeys(("items_seen", "sampled_tokens", "seconds", "peak_memory_bytes", "time", *COUNTS), 0)
    return StageRow(stage=stage, order=[], versions=versions, evaluation=evaluation, floors=None, **counts)  # type: ignore[arg-type]


def test_a_run_comes_in_as_a_team(run: Path, tmp_path: Path, bank: Any, recipe: Any) -> None:
    registry = Registry(tmp_path / "adapters")
    team = import_path(registry, run, team="mine").team
    assert team is not None and not verify(registry).problems
    assert team.load_recipe() == recipe and team.made_by == "train"
    assert team.metrics == {"avg_at_k": 0.75, "agents/planner/value": 0.9}  # the last evaluation there was
    for agent in bank.agents:
        tensors, config = read_adapter_folder(registry.folder("mine", agent, team.agents[agent]))
        assert config == bank.config(agent)
        assert all(torch.equal(tensor, bank.tensors(agent)[name]) for name, tensor in tensors.items())
    again = import_path(registry, run, team="mine")
    assert again.team is None and "is this run already" in again.notes[0] and registry.numbers("mine") == [1]
    assert [len(registry.versions("mine", agent)) for agent in bank.agents] == [1, 1]
    with pytest.raises(UserError, match="a run is imported whole"):
        import_path(registry, run, team="mine", agent="planner")


def test_files_beside_the_recipe_are_found_from_anywhere(
    run: Path, tmp_path: Path, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"path": "data/tasks.json", "database": "db.json", "policy": "policy.md", "split": "split.json"}
    for name in (*files.values(), "replies.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("[]")
    task = {"name": "tau2_retail", "test_path": "nowhere.json", "responder": {"script": "replies.jsonl"}, **files}
    told = Recipe.model_validate(recipe.model_dump() | {"task": task})
    (run / "recipe.yaml").write_text(dump_recipe(told))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    team = import_path(Registry(tmp_path / "adapters"), run, team="mine").team
    assert team is not None
    stored = team.load_recipe().model_dump()["task"]
    assert {key: stored[key] for key in files} == {key: str(tmp_path / name) for key, name in files.items()}
    assert stored["responder"]["script"] == str(tmp_path / "replies.jsonl") and stored["test_path"] == "nowhere.json"


def test_the_dataset_whose_programs_the_task_runs_is_named(
    run: Path, tmp_path: Path, recipe: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By import, and before a stranger's run is gone on with."""
    monkeypatch.setenv("TEAMTR_LORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TEAMTR_LORA_TRUST_PROGRAMS", raising=False)
    told = Recipe.model_validate(recipe.model_dump() | {"task": {"name": "autologi", "path": "puzzles.jsonl"}})
    (run / "recipe.yaml").write_text(dump_recipe(told))
    notes = import_path(Registry(tmp_path / "adapters"), run, team="mine").notes
    assert any("programs" in note and str(tmp_path / "puzzles.jsonl") in note and "--trust-programs" in note for note in notes)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for command in (
        ["train", str(run), "--resume"],
        ["eval", str(run)],
        ["swap", str(run), "--agent", "planner", "--with", "fresh"],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert str(tmp_path / "puzzles.jsonl") in error and "--trust-programs" in error and error.count("\n") == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_metrics_of_an_earlier_team_are_not_the_teams(run: Path, tmp_path: Path) -> None:
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    (run / "metrics.jsonl").write_text(first + "\n")
    done = import_path(Registry(tmp_path / "adapters"), run, team="mine")
    assert done.team is not None and done.team.metrics == {} and done.adapters[0].metrics == {}
    assert "not evaluated since its team last changed" in done.notes[0]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda run: (run / "team.json").write_text("{"), "team.json"),
        (lambda run: (run / "rebase.json").write_text('{"report": {"versions": 1}}'), "rebase.json"),
        (lambda run: (run / "team.json").write_text('{"planner": 3}'), "team.json"),
        (lambda run: (run / "metrics.jsonl").write_text('{"evaluation": {"a": 1\n'), "metrics.jsonl"),
        (
            lambda run: (run / "recipe.yaml").write_text("team: {agents: [{name: planner}, {name: checker}]}\n"),
            "the recipe says 8",
        ),
        (lambda run: next(run.rglob(WEIGHTS)).write_bytes(b"\x80\x04"), "pickle"),
        (lambda run: next(run.rglob(CONFIG)).write_text("{}"), "peft_type"),
        (lambda run: shutil.rmtree(run / "adapters"), "missing"),
        (lambda run: (run / "adapters").rename(run.parent / "x") and (run / "adapters").symlink_to(run.parent / "x"), "a link"),
    ],
    ids=["json", "a record", "no version", "metrics", "other ranks", "pickle", "config", "gone", "a linked folder"],
)
def test_a_run_that_does_not_fit_is_refused(run: Path, tmp_path: Path, spoil: Callable[[Path], Any], words: str) -> None:
    spoil(run)
    registry = Registry(tmp_path / "adapters")
    with pytest.raises(UserError) as caught:
        import_path(registry, run, team="mine")
    assert words in str(caught.value)
    assert not registry.root.exists()
