"""tools/prove.py: which cells there are, what is chosen of them, budgets of minutes and tokens, exponents, and figures."""

import argparse
import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import budgets
import cells
import curves
import pytest
import studies

TWO_AGENTS = ['team.agents=[{"name": "planner", "role": "ones"}, {"name": "solver", "role": "tens"}]', "task.digits=2"]
TINY = (*TWO_AGENTS, "training.stages=9", "rollout.items_per_stage=6", "rollout.episodes_per_item=2", "evaluation.items=4",
        "evaluation.every_stages=0", "base.device=cpu", "training.inner_epochs=1")  # fmt: skip


@pytest.fixture(scope="module")
def prove(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("prove")


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[cells.Variant]]:
    folder = tmp_path_factory.mktemp("files")
    named = {"base": folder / "base.gguf", "data": folder, "new_base": folder}
    return studies.studies(argparse.Namespace(**named, overrides=[], minutes_per_cell=20.0, tokens_per_cell=1e6))


def test_every_cell_is_a_valid_recipe_with_a_folder_of_its_own(every: dict[str, list[cells.Variant]], tmp_path: Path) -> None:
    for study, own in every.items():
        for variant in own:
            assert variant.name.startswith(f"{study}/") and variant.recipe(3, tmp_path).seed == 3
    names = [variant.name for own in every.values() for variant in own]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "study", ["size-2", "size-3", "size-4", "size-5", "size-6", "size-8", "coupled-0.4", "ablations", "objectives"]
)
def test_all_methods_of_a_study_play_as_many_episodes_a_stage(
    study: str, every: dict[str, list[cells.Variant]], tmp_path: Path
) -> None:
    counts = set()
    for variant in every[study]:
        recipe = variant.recipe(0, tmp_path)
        rollouts, items = recipe.stage_budget()
        counts.add(rollouts * items * recipe.rollout.episodes_per_item * recipe.training.stages)
        if study.startswith("size"):
            assert len(recipe.team.agents) == recipe.task.digits == int(study.split("-")[1])
    assert len(counts) == 1


def test_cells_are_chosen_by_patterns(prove: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*arguments: str) -> list[str]:
        assert prove.main(["--out", str(tmp_path), "--list", *arguments]) == 0
        return capsys.readouterr().out.split()

    assert listed("--cells", "collapse") == ["collapse/gate", "collapse/no-region"]
    assert listed("--cells", "size-*/joint, coupled-0.4/naive") == [
        *(f"size-{n}/joint" for n in (2, 3, 4, 5, 6, 8)), "coupled-0.4/naive"
    ]  # fmt: skip
    assert not any(name.startswith("gsm8k") for name in listed())
    assert prove.main(["--out", str(tmp_path), "--cells", "gsm8k"]) == 2
    assert "--cells gsm8k: no such cell" in capsys.readouterr().err
    assert prove.main(["--out", str(tmp_path), "--base", "b.gguf"]) == 2
    assert "--data" in capsys.readouterr().err


def test_tables_exponents_and_figures_come_from_the_cells(
    prove: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_cell(variant: cells.Variant, seed: int, out: Path, until: float) -> cells.Cell:
        study, method = variant.name.split("/")
        size = int(study.removeprefix("size-"))
        values: cells.Measures = dict.fromkeys(prove.FITTED, (1 + 0.1 * seed) * size ** (2.0 if method == "naive" else 1.0))
        values |= {"after": 0.5 + 0.01 * seed - (0.1 if method == "naive" else 0), "delta_stale": -1.0}
        return cells.Cell(variant.name, seed, out, values)

    monkeypatch.setattr(cells, "run_cell", run_cell)
    command = ["--out", str(tmp_path), "--cells", "size-?/teamtr,size-?/naive", "--seeds", "0,1"]
    assert prove.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["exponents"]["naive"]["d_occ"]["exponent"] == pytest.approx(2.0)
    assert found["exponents"]["teamtr"]["d_occ"]["exponent"] == pytest.approx(1.0)
    assert found["exponents"]["teamtr"]["delta_stale"] is None, "no power of n is negative"
    less = found["studies"]["size-4"]["against"]["differences"]["size-4/naive"]["after"]
    assert less["mean"] == pytest.approx(-0.1) and less["half_width"] is None, "all seeds differ alike"
    assert prove.main(command) == 0
    assert "size-4/naive: after -0.100 (2 seeds)" in capsys.readouterr().out
    lines = list(ElementTree.parse(tmp_path / "sizes.svg").iter("{http://www.w3.org/2000/svg}polyline"))
    assert [len(line.attrib["points"].split()) for line in lines] == [6, 6]


def test_a_figure_keeps_its_points_inside_and_its_intervals_around_them() -> None:
    drawn = curves.drawn("a <b>", {"one": [curves.Point(0, 0.2, 0.1), curves.Point(4, 0.9, 0.3)], "two": [curves.Point(2, 0.5)]})
    root = ElementTree.fromstring(drawn)
    first, second = root.iter("{http://www.w3.org/2000/svg}polyline")
    assert first.attrib["points"] == f"{curves.LEFT:.1f},257.6 {curves.RIGHT:.1f},67.2"
    assert second.attrib["points"] == f"{(curves.LEFT + curves.RIGHT) / 2:.1f},176.0"
    bars = [e.attrib for e in root.iter("{http://www.w3.org/2000/svg}line") if e.attrib["x1"] == e.attrib["x2"]]
    assert [(float(b["y1"]), float(b["y2"])) for b in bars] == [(284.8, 230.4), (148.8, curves.TOP)]


def test_minutes_are_those_of_learning_and_tokens_those_of_fresh_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = {"rollout": 10.0, "optimize": 20.0, "gate": 5.0, "probe": 100.0, "diagnostics": 100.0}
    rows = [SimpleNamespace(seconds=phases, sampled_tokens=50, fresh_episodes=fresh) for fresh in (4, 0, 4)]
    monkeypatch.setattr(budgets, "_updates", lambda run: rows)
    ours, trl = budgets.Budget(1.0, 100), budgets.Budget(1.0, 100, trl=True)
    assert ours.used(Path()) == [(35.0, 50), (70.0, 50), (105.0, 100)] and ours.spent(Path())
    assert trl.used(Path()) == [(30.0, 50), (60.0, 50), (90.0, 100)], "measuring its KL is not TRL's own work"
    assert not budgets.Budget(2.0, 100).spent(Path()) and not budgets.Budget(1.0, 101).spent(Path())


@pytest.mark.parametrize("trl", [False, True], ids=["ours", "trl"])
def test_a_budget_ends_the_training_and_its_teams_are_played(trl: bool, prove: ModuleType, tmp_path: Path) -> None:
    if trl:
        pytest.importorskip("trl")
    budget = budgets.Budget(1e-6, 1, items=6, trl=trl)
    variant = cells.Variant("v", studies.QUICKSTART, TINY, budget.work)
    cell = cells.run_cell(variant, 0, tmp_path, math.inf)
    assert cell.error is None and cell.measures is not None and cell.measures["updates"] == 1
    assert len(budget.used(cell.run_dir / "run")) == 1, "nine stages were asked for, and one update spends it all"
    found = {point: json.loads((cell.run_dir / f"{point}.json").read_text()) for point in budgets.POINTS}
    assert len(found["start"]["by_item"]) == 6 and found["minutes"]["by_item"] == found["tokens"]["by_item"]
    assert (found["start"]["tokens"], found["tokens"]["updates"]) == (0, 1)
    for report in found.values():
        assert len(report.get("voted_by_item", [])) == (6 if trl else 0)
        assert 0 <= report["accuracy"] <= min(report["own_answers"].values()) <= 1, "the sum is right where every column is"
    paired = budgets.paired_by_item([cell.run_dir], [cell.run_dir])
    assert all(paired[point]["difference"] == 0 for point in budgets.POINTS)
    words = prove.shown({"studies": {}, "exponents": {}, "by_item": {"naive": paired}})
    assert words.startswith("naive less the first, item by item: start +0.000 (no interval)"), "both are the same team there"
    assert budgets.paired_by_item([cell.run_dir], [tmp_path / "missing"]) == {}
    points = budgets.learning_curves([cell.run_dir, tmp_path / "missing"])
    minutes = found["minutes"]["seconds"] / 60
    assert {point: at for point, ((at, _),) in points.items()} == dict.fromkeys(budgets.PARTS, minutes) | {"start": 0.0}
    assert points["half"] == [(minutes, found["half"]["accuracy"])]


@pytest.mark.parametrize("trl", [False, True], ids=["ours", "trl"])
def test_a_budget_ends_with_the_stages_too(trl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if trl:
        pytest.importorskip("trl")
    budget = budgets.Budget(60.0, 1e9, items=6, trl=trl)
    variant = cells.Variant("v", studies.QUICKSTART, (*TINY, "training.stages=1"), budget.work)
    cell = cells.run_cell(variant, 0, tmp_path, math.inf)
    assert cell.error is None and cell.measures is not None
    assert cell.measures["updates"] == 2, "a stage of the team, or two of the one agent that has all its rollouts"
    half = json.loads((cell.run_dir / "half.json").read_text())
    assert half["updates"] in (1, 2) and 0 < half["seconds"] <= 60 * cell.measures["minutes"] < 60
    if trl:
        first = budgets._updates(cell.run_dir / "run")[:1]
        monkeypatch.setattr(budgets, "_updates", lambda run: first)
        assert not budget._over(cell.run_dir / "run", variant.recipe(0, cell.run_dir / "run")), "ended after one of two"


def test_a_run_that_ends_because_it_learns_nothing_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At this temperature all episodes of an item are the same, so no update has a gradient."""
    cold = ("rollout.temperature=0.001", "training.stop_after_idle_stages=2", "evaluation.every_stages=1")
    variant = cells.Variant("v", studies.QUICKSTART, (*TINY, *cold))
    half = cells.run_cell(cells.Variant("v", studies.QUICKSTART, (*TINY, *cold, "training.stages=1")), 0, tmp_path, math.inf)
    assert half.measures is not None and half.measures["skipped"] == 2
    assert not cells.finished(half.run_dir, variant.recipe(0, half.run_dir)), "one idle stage of two"
    cell = cells.run_cell(variant, 0, tmp_path, math.inf)
    assert cell.measures is not None and cell.measures["skipped"] == 4, cell.error
    assert cells.run_cell(variant, 0, tmp_path, 0.0).measures == cell.measures, "and is not gone on with"
    printed = capsys.readouterr()
    assert "stage 2/9" in printed.err and not printed.out, "stdout is the report's"


def test_the_trained_difference_is_over_all_parts_but_the_start(tmp_path: Path) -> None:
    """Two seeds of three items: the second side is right where a part's bit of a pattern is set, the first never."""
    parts = {"start": 7, "quarter": 1, "half": 3, "three_quarters": 0, "minutes": 7, "tokens": 7}
    for name, on in (("first", 0), ("second", 1)):
        for seed in (0, 1):
            (tmp_path / name / str(seed)).mkdir(parents=True)
            for point, bits in parts.items():
                right = [float(on and bits >> item & 1 and seed == 0) for item in range(3)]
                (tmp_path / name / str(seed) / f"{point}.json").write_text(json.dumps({"by_item": right}))
    sides = ([tmp_path / name / str(seed) for seed in (0, 1)] for name in ("first", "second"))
    found = {point: test["difference"] for point, test in budgets.paired_by_item(*sides).items()}
    assert found == pytest.approx({p: bits.bit_count() / 6 for p, bits in parts.items()} | {"trained": (1 + 2 + 0 + 3) / 24})


def test_a_curve_by_minutes_is_the_mean_over_the_seeds_that_were_evaluated(prove: ModuleType, tmp_path: Path) -> None:
    variants = [cells.Variant(f"gsm8k/{name}", (), ()) for name in ("teamtr", "grpo")]
    for seed in (0, 1):
        folder = tmp_path / "gsm8k" / "teamtr" / f"seed-{seed}"
        folder.mkdir(parents=True)
        for place, point in enumerate(budgets.POINTS):
            seconds, accuracy = 60 * place * (1 + seed), 0.5 + 0.1 * place + 0.02 * seed
            (folder / f"{point}.json").write_text(json.dumps({"seconds": seconds, "accuracy": accuracy}))
    found = prove.curves_by_minute(variants, [0, 1, 2], tmp_path)
    assert list(found) == ["teamtr"] and [p.x for p in found["teamtr"]] == [0.0, 1.5, 3.0, 4.5, 6.0]
    assert [p.y for p in found["teamtr"]] == pytest.approx([0.51, 0.61, 0.71, 0.81, 0.91])
    assert found["teamtr"][0].half == pytest.approx(12.706 * 0.01, rel=1e-3), "Student's t of two seeds"


def test_later_updates_win_in_the_team_of_a_moment() -> None:
    def row(agent: str, number: int) -> Any:
        return SimpleNamespace(agent=agent, version=f"v{number:04d}-{'a' * 12}", content_hash="a" * 64)

    versions = budgets.versions_after([row("x", 1), row("y", 1), row("x", 2)])
    assert {agent: version.number for agent, version in versions.items()} == {"x": 2, "y": 1}
