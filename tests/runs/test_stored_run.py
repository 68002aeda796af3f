"""What a run directory says of itself, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.registry.imports import import_path
from teamtr_lora.registry.reader import DEFAULT_ROOT, RegistryReader
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.registry.stored import Location, locate
from teamtr_lora.runs.history import Replaced
from teamtr_lora.runs.metrics import read_rows
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.run_state import Dials, RunState, SwapRecord
from teamtr_lora.runs.stored_run import load_run_recipe, read_run

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"


def test_a_run_is_read_back(run: RunDir, recipe: Recipe) -> None:
    stored = read_run(run.path)
    assert stored.recipe == recipe and stored.recipe.folder == recipe.folder and not stored.baseline
    assert {agent: version.number for agent, version in stored.versions.items()} == {"left": 3, "right": 4}
    assert stored.versions == run.checkpoints.state().versions
    assert [row.stage for row in stored.rows()] == [0, 1]
    history = stored.history()
    assert history.made_by == {"left": "train", "right": "train"} and history.lineage == []
    assert history.metrics == {"avg_at_k": 0.5} and not history.stale
    assert load_run_recipe(run.path, ["training.stages=9"]).training.stages == 9


def test_a_row_that_is_being_written_is_no_row_yet(run: RunDir) -> None:
    path = run.path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "stage", "sta')
    assert len(read_rows(run.path)) == 2
    for spoilt in (
        b"{\n",
        b"[]\n",
        b'{"kind": "other"}\n',
        b'{"kind": "stage"}\n',
        b'{"kind": "stage", "stage": NaN}\n',
        b"[" * 9000 + b"\n",
    ):
        path.write_bytes(whole + spoilt)
        with pytest.raises(UserError, match=r"metrics.jsonl: line 3") as caught:
            read_rows(run.path)
        assert "\n" not in str(caught.value)


def test_swaps_are_remembered_and_undone_ones_are_not(run: RunDir) -> None:
    state = run.checkpoints.state()
    lora = read_run(run.path).recipe.team.agents[0].lora.model_dump(mode="json")
    other, first = lora | {"rank": 3}, state.versions
    second = first | {"left": AdapterVersion("left", 4, "b" * 64)}
    third = second | {"right": AdapterVersion("right", 5, "c" * 64)}
    state.dials = {"left": Dials(1.0, 0.02, slope=0.1), "right": Dials(2.0, 0.02, slope=0.2)}
    assert state.take_swap(SwapRecord("stage0", "fresh:rank=3", "left", lora, other, before=first, after=second)) == ["left"]
    assert state.dials == {"right": Dials(2.0, 0.02, slope=0.2)} and state.loras == {"left": other}
    state.take_swap(SwapRecord("direct", "elsewhere", "right", lora, lora, before=second, after=third))
    state.take_swap(SwapRecord("undo", "", "right", lora, lora, before=third, after=second))
    assert [swap.source for swap in state.standing_swaps()] == ["fresh:rank=3"] and state.versions == second
    assert RunState.from_stored(json.loads(json.dumps(state.stored()))) == state
    state.step += 1
    run.checkpoints.save(state, {})
    run.write_team(state.versions, state.loras)
    stored = read_run(run.path)
    history = stored.history()
    assert stored.recipe.team.agents[0].lora.rank == 3 and history.stale and history.metrics == {}
    assert history.made_by == {"left": "stage0", "right": "train"}
    assert history.lineage == [Replaced("left", first["left"].name, second["left"].name, "stage0", "fresh:rank=3")]


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("team.json", {"left": {"number": 3}}, "team.json or origin.json is damaged"),
        ("team.json", {"left": 3}, "team.json or origin.json is damaged"),
        ("team.json", {"other": None}, "team.json or origin.json is damaged"),
        ("origin.json", {"recipe_folder": None}, "team.json or origin.json is damaged"),
        ("team.json", None, "has no team yet (team.json is missing)"),
        ("origin.json", None, "has no team yet (origin.json is missing)"),
        ("recipe.yaml", None, "no run here (recipe.yaml is missing)"),
    ],
)
def test_damage_is_one_line(run: RunDir, file: str, change: dict[str, Any] | None, words: str) -> None:
    path = run.path / file
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError) as caught:
        read_run(run.path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_recipe_without_a_run_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("team: {agents: [{name: a}]}\n")
    with pytest.raises(UserError, match="holds a recipe but no run; use: teamtr-lora train"):
        load_run_recipe(tmp_path)


def test_a_run_whose_rate_falls_ends_with_the_stages_it_began_with(tmp_path: Path) -> None:
    """They say how long each step is; a run of a constant rate may be longer."""
    keys, run = ["training.learning_rate=1e-3"], RunDir(tmp_path / "run")
    for schedule in ("constant", "linear"):
        two, four = (load_recipe(QUICKSTART, [*keys, f"training.schedule={schedule}", f"training.stages={n}"]) for n in (2, 4))
        run.write_recipe(two)
        run.check_same(two)
        if schedule == "constant":
            run.check_same(four)
        else:
            with pytest.raises(UserError, match="another recipe's run: training.stages is 2 there and 4 here"):
                run.check_same(four)


def test_the_folder_of_init_is_no_run_and_hides_no_team(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run is elsewhere, and a registry may have a team of its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.yaml").write_text("team: {agents: [{name: a}]}\n")
    untrained = r"mine'?: holds a recipe but no run; use: teamtr-lora train mine/recipe.yaml$"
    for reads in (read_run, load_run_recipe, locate, lambda path: import_path(Registry(tmp_path), path, team="new")):
        with pytest.raises(UserError, match=untrained):
            reads(Path("mine"))
    shutil.copytree(run.path, tmp_path / "runs" / "mine")
    with pytest.raises(UserError, match=r"mine/recipe\.yaml; its run is in runs/mine$"):
        read_run(Path("mine"))
    monkeypatch.setattr(RegistryReader, "teams", lambda self: ["mine"])
    assert locate("mine") == Location("team", DEFAULT_ROOT, "mine")
