"""The whole loop on the embedded base: the gate's promise under stress, and that a team really learns."""

from __future__ import annotations

import json
import math
from pathlib import Path

from teamtr_lora.recipe import load_recipe
from teamtr_lora.training.metrics import UpdateRow, read_rows
from teamtr_lora.training.trainer import TeamTRTrainer

ROOT = Path(__file__).resolve().parents[2]


def train(tmp_path: Path, recipe: str, *overrides: str) -> tuple[TeamTRTrainer, list[UpdateRow]]:
    loaded = load_recipe(ROOT / "recipes" / recipe, [*overrides, f"output_dir={tmp_path / 'run'}"])
    trainer = TeamTRTrainer.from_recipe(loaded)
    trainer.train()
    return trainer, [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if isinstance(row, UpdateRow)]


def test_the_gate_holds_under_stress(tmp_path: Path) -> None:
    _, rows = train(tmp_path, "stress.yaml", "evaluation.items=16")
    decisions = [row.decision for row in rows]
    assert decisions.count("shrunk") + decisions.count("rejected") >= len(rows) / 2
    assert "shrunk" in decisions or "rejected" in decisions
    for row in rows:
        assert not row.out_of_region
        if row.decision in ("accepted", "shrunk"):
            assert row.kl["exact"].bound <= row.delta
            assert row.surrogate_gain is not None and row.surrogate_gain > 0


def test_every_message_comes_from_the_version_current_at_its_update(tmp_path: Path) -> None:
    _, rows = train(tmp_path, "stress.yaml", "training.stages=2", "trust_region.delta=0.05", "evaluation.items=16")
    current = dict(rows[0].team_versions)
    for row in rows:
        assert row.team_versions == current
        file = tmp_path / "run" / "episodes" / f"stage-{row.stage:04d}-update-{row.update}-{row.agent}.jsonl"
        for line in file.read_text().splitlines():
            for message in json.loads(line)["messages"]:
                assert message["version"] == current[message["agent"]]
        current[row.agent] = row.version
    assert any(row.decision in ("accepted", "shrunk") for row in rows), "nothing changed, so nothing was proved"


def test_the_quickstart_team_learns(tmp_path: Path) -> None:
    """Three stages of the quickstart: a rise that chance does not explain (tools/claims.py measures the full claim)."""
    trainer, rows = train(tmp_path, "quickstart.yaml", "training.stages=3", "evaluation.every_stages=0")
    assert trainer.run is not None
    state = trainer.run.state
    before, after, n = state.accuracy_before, state.accuracy_after, state.episodes_evaluated
    assert before is not None and after is not None and n >= 512
    pooled = (before + after) / 2
    z = (after - before) / math.sqrt(2 * pooled * (1 - pooled) / n)
    assert z > 3.3, f"{before:.3f} -> {after:.3f} on {n} episodes"
    assert not any(row.out_of_region for row in rows)
