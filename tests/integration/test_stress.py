"""A team trained in steps far too large for its region: the gate's promise, and whose words are trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from teamtr_lora.recipe import load_recipe
from teamtr_lora.runs.metrics import UpdateRow, read_rows
from teamtr_lora.training.trainer import TeamTRTrainer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stress") / "run"
    recipe = load_recipe(
        ROOT / "recipes" / "stress.yaml",
        ["evaluation.items=4", "training.stages=1", "rollout.episodes_per_item=4", f"output_dir={folder}"],
    )
    TeamTRTrainer.from_recipe(recipe).train()
    return folder


@pytest.fixture
def rows(run: Path) -> list[UpdateRow]:
    return [row for row in read_rows(run) if isinstance(row, UpdateRow)]


def test_the_gate_holds_under_stress(rows: list[UpdateRow]) -> None:
    decisions = [row.decision for row in rows]
    assert decisions.count("shrunk") + decisions.count("rejected") >= len(rows) / 2
    for row in rows:
        assert not row.out_of_region
        if row.decision in ("accepted", "shrunk"):
            assert row.kl["exact"].bound <= row.delta
            assert row.surrogate_gain_in_sample is not None and row.surrogate_gain_in_sample > 0


def test_every_message_comes_from_the_version_current_at_its_update(run: Path, rows: list[UpdateRow]) -> None:
    current = dict(rows[0].team_versions)
    for row in rows:
        assert row.team_versions == current
        file = run / "episodes" / f"stage-{row.stage:04d}-update-{row.update}-{row.agent}.jsonl"
        for line in file.read_text().splitlines():
            for message in json.loads(line)["messages"]:
                assert message["version"] == current[message["agent"]]
        current[row.agent] = row.version
    assert current != rows[0].team_versions, "nothing changed, so nothing was proved"
