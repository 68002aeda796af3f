"""tools/study_team_size.py: which runs it makes and what it says of them; training itself is tested elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from teamtr_lora.algorithm.variants.matched import stage_budget
from teamtr_lora.recipe import load_recipe


@pytest.fixture(scope="module")
def study(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("study_team_size")


def test_both_variants_have_one_budget_per_stage(study: ModuleType) -> None:
    for size in (2, 3, 4, 6, 8):
        counts = []
        for name in study.RESAMPLING:
            cell = study.variant(size, name)
            recipe = load_recipe(cell.recipe, cell.overrides)
            assert len(recipe.team.agents) == recipe.task.digits == size and recipe.training.stages >= 15
            rollouts, items = stage_budget(recipe.training, 48, size)
            counts.append(rollouts * items)
            assert rollouts == (1 if name == "naive" else size)
        assert counts == [48, 48]


def test_exponents_stand_below_the_table_of_the_runs(
    study: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare = study.compare

    def run_cell(cell: Any, seed: int, out: Path) -> Any:
        size, name = int(cell.name.split("-")[1]), cell.name.split("-")[2]
        values = dict.fromkeys((column.name for column in compare.COLUMNS), 0.5)
        values |= dict.fromkeys(study.FITTED, (1 + 0.1 * seed) * size ** (2.0 if name == "naive" else 1.0))
        values["delta_stale"] = -1.0 if name == "teamtr" else values["delta_stale"]
        failed = (name, size, seed) == ("teamtr", 8, 9)
        return compare.Cell(cell.name, seed, out, None if failed else values, "broken" if failed else None)

    monkeypatch.setattr(compare, "run_cell", run_cell)
    command = ["--out", str(tmp_path), "--sizes", "2,4,8"]
    assert study.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for name, power in (("naive", 2.0), ("teamtr", 1.0)):
        fit = report["exponents"][name]["d_occ"]
        assert fit["exponent"] == pytest.approx(power) and fit["low"] - 1e-9 <= power <= fit["high"] + 1e-9
        assert report["variants"][f"n-2-{name}"]["measures"]["d_occ"]["mean"] == pytest.approx(1.1 * 2**power)
    assert report["exponents"]["teamtr"]["delta_stale"] is None, "no power of n is negative"
    assert study.main([*command, "--seeds", "0,9"]) == 1
    shown = capsys.readouterr().out
    assert "exponents over n, naive: delta_stale 2.00" in shown and "n-8-teamtr, seed 9: broken" in shown
    assert "teamtr: delta_stale -, paired -, d_occ -" in shown, "a seed is missing"
