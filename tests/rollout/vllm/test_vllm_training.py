"""The quickstart recipe with vLLM as its sampler: it learns, from the right versions, inside the region."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from teamtr_lora.cli import main
from teamtr_lora.runs.metrics import UpdateRow, read_rows

RECIPE = Path(__file__).resolve().parents[3] / "recipes" / "quickstart.yaml"
SMALL = ["rollout.engine=vllm", "training.stages=1", "rollout.items_per_stage=10", "evaluation.items=4"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed (tools/setup --all installs it)"
)


def test_the_quickstart_team_trains_with_vllm(tmp_path: Path) -> None:
    """A small stage of it: every update is sampled by the team as it is then, and what the engine samples is the trainer's policy
    (tools/compare.py recipes/quickstart.yaml rollout.engine=vllm shows that it learns)."""
    run_dir = tmp_path / "run"
    assert main(["train", str(RECIPE), *SMALL, "--run-dir", str(run_dir)]) == 0
    rows = [row for row in read_rows(run_dir) if isinstance(row, UpdateRow)]
    assert len(rows) == 3 and any(row.alpha for row in rows) and not any(row.out_of_region for row in rows)
    current = dict(rows[0].team_versions)
    for row in rows:
        assert row.team_versions == current
        assert row.sampler_gap is not None and row.sampler_gap["max_abs"] < 1e-3
        file = run_dir / "episodes" / f"stage-{row.stage:04d}-update-{row.update}-{row.agent}.jsonl"
        said = {(m["agent"], m["version"]) for line in file.read_text().splitlines() for m in json.loads(line)["messages"]}
        assert said == set(current.items())
        current[row.agent] = row.version
