"""The study `upgrade` of tools/prove.py: a swap, the same agents from scratch, and the team left alone, as one small cell."""

import argparse
import json
import math
from pathlib import Path

import cells
import pytest
import studies

from teamtr_lora.runs.stored_run import read_run

TWO_AGENTS = ['team.agents=[{"name": "planner", "role": "ones"}, {"name": "solver", "role": "tens"}]', "task.digits=2"]
TINY = [*TWO_AGENTS, "training.stages=1", "rollout.items_per_stage=6", "rollout.episodes_per_item=2", "training.inner_epochs=1",
        "evaluation.items=4", "swap.probe_contexts=12", "swap.delta_align=2.0"]  # fmt: skip


def test_a_swap_has_its_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "SHOCK_ITEMS", 4)
    monkeypatch.setattr(studies, "MORE_STAGES", 1)
    (variant,) = studies.studies(argparse.Namespace(base=None, data=None, new_base=None, overrides=TINY))["upgrade"]
    assert cells.run_cell(variant, 0, tmp_path, until=0.0).measures is None and not any(tmp_path.iterdir())
    cell = cells.run_cell(variant, 0, tmp_path, math.inf)
    assert cell.error is None and cell.measures is not None
    assert set(cell.measures) == {"before", "lost_direct", "lost_aligned", "shock", "after", "control", "scratch"}
    report = json.loads((cell.run_dir / "swap-report.json").read_text())
    assert cell.measures["shock"] == report["shock_aligned"]["lost"]
    runs = {name: read_run(cell.run_dir / name) for name in ("team", "swapped", "control", "scratch")}
    rank = {name: run.recipe.team.agents[1].lora.rank for name, run in runs.items()}
    assert rank == {"team": 8, "swapped": 32, "control": 8, "scratch": 32}
    stages = {name: max(row.stage for row in run.rows()) for name, run in runs.items()}
    assert stages == {"team": 1, "swapped": 2, "control": 2, "scratch": 1}, "as many stages after the swap as from scratch"
