"""tools/study_team_size.py: which runs it makes and what its table says of them; training itself is tested elsewhere."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from teamtr_lora.algorithm.variants.matched import stage_budget
from teamtr_lora.recipe import Recipe


@pytest.fixture(scope="module")
def study(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("study_team_size")


def test_both_variants_have_one_budget_per_stage(study: ModuleType, tmp_path: Path) -> None:
    args = argparse.Namespace(out=tmp_path, items=48, episodes=3, stages=15, probe_every=5)
    for size in (2, 3, 4, 6, 8):
        counts = []
        for variant in study.VARIANTS:
            recipe = Recipe(**study.recipe_data(study.Cell(size, variant, 1), args))
            assert len(recipe.team.agents) == recipe.task.digits == size and recipe.training.stages >= 15
            rollouts, items = stage_budget(recipe.training, 48, size)
            counts.append(rollouts * items)
            assert rollouts == (1 if variant == "naive" else size)
        assert counts == [48, 48]


def test_the_table_has_means_intervals_and_exponents(
    study: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in (2, 4, 8):
        for variant, power in (("naive", 2.0), ("teamtr", 1.0)):
            for seed in (0, 1, 2):
                found = dict.fromkeys(study.MEASURES, 0.5) | dict.fromkeys(study.FITTED, (1 + 0.1 * seed) * size**power)
                found["delta_stale"] = -1.0 if variant == "teamtr" else found["delta_stale"]
                folder = study.Cell(size, variant, seed).folder(tmp_path)
                folder.mkdir(parents=True)
                (folder / "study.json").write_text(json.dumps(found))
    assert study.main(["--out", str(tmp_path), "--sizes", "2,4,8", "--only-table"]) == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "study.json").read_text())
    for variant, power in (("naive", 2.0), ("teamtr", 1.0)):
        fit = report["exponents"][variant]["d_occ"]
        assert fit["exponent"] == pytest.approx(power) and fit["low"] <= fit["exponent"] + 1e-9 and fit["high"] >= power - 1e-9
    assert report["exponents"]["teamtr"]["delta_stale"] is None, "no power of n is negative"
    assert report["rows"][0]["d_occ"]["mean"] == pytest.approx(1.1 * 4) and report["rows"][0]["d_occ"]["half_width"] > 0
    assert "exponents over n, naive" in shown and "+-" in shown


def test_unfinished_runs_are_left_out_and_missing_seeds_have_no_exponent(study: ModuleType, tmp_path: Path) -> None:
    folder = study.Cell(2, "naive", 0).folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps(dict.fromkeys(study.MEASURES, 1.0)))
    report = study.summary([study.Cell(n, v, s) for n in (2, 3) for v in study.VARIANTS for s in (0, 1)], tmp_path)
    assert [row["seeds"] for row in report["rows"]] == [1, 0] and report["exponents"]["naive"]["d_occ"] is None


def test_finished_runs_of_other_arguments_are_refused(
    study: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"stages": 3, "items": 48, "episodes": 3, "probe_every": 5}
    for variant in study.VARIANTS:
        folder = study.Cell(2, variant, 0).folder(tmp_path)
        folder.mkdir(parents=True)
        (folder / "study.json").write_text(json.dumps(dict.fromkeys(study.MEASURES, 1.0) | {"arguments": made}))
    monkeypatch.setattr(study, "start", lambda *_: pytest.fail("nothing is to be run"))
    command = ["--out", str(tmp_path), "--sizes", "2", "--seeds", "0"]
    assert study.main([*command, "--stages", "3"]) == 0
    for option, before in (("--items", 48), ("--episodes", 3), ("--probe-every", 5), ("--stages", 3)):
        capsys.readouterr()
        assert study.main([*command, "--stages", "3", option, "12"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"was made with {option} {before}, not 12" in line


def test_a_run_says_with_what_it_was_made(study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = type("Trained", (), {"train": lambda self, resume: None})
    monkeypatch.setattr("teamtr_lora.training.trainer.TeamTRTrainer.from_recipe", lambda recipe: trained())
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr(study, "measures", lambda run: {"accuracy": 0.5})
    command = ["--out", str(tmp_path), "--stages", "4", "--items", "12", "--episodes", "2", "--probe-every", "1"]
    assert study.main([*command, "--one", "2", "naive", "0"]) == 0
    kept = json.loads((study.Cell(2, "naive", 0).folder(tmp_path) / "study.json").read_text())
    assert kept == {"accuracy": 0.5, "arguments": {"stages": 4, "items": 12, "episodes": 2, "probe_every": 1}}
