"""The quickstart recipe with vLLM as its sampler, in its own process: it learns, from the right versions, inside the region."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from teamtr_lora.runs.metrics import UpdateRow, read_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (tools/setup --all installs it)")
def test_the_quickstart_team_trains_with_vllm(tmp_path: Path) -> None:
    """A small stage of it: every update is sampled by the team as it is then, and what the engine samples is the trainer's policy
    (tools/compare.py recipes/quickstart.yaml rollout.engine=vllm shows that it learns)."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "teamtr_lora", "train", str(ROOT / "recipes" / "quickstart.yaml"), "--json"]
    smaller = ["training.stages=1", "rollout.items_per_stage=12", "evaluation.items=16"]
    ran = subprocess.run(
        [*command, "rollout.engine=vllm", *smaller, "--run-dir", str(run_dir)], capture_output=True, text=True, timeout=400
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    summary = json.loads(ran.stdout)
    assert summary["accepted"] > 0 and summary["out_of_region_accepted"] == 0
    rows = [row for row in read_rows(run_dir) if isinstance(row, UpdateRow)]
    assert len(rows) == 3
    current = dict(rows[0].team_versions)
    for row in rows:
        assert row.team_versions == current
        assert row.sampler_gap is not None and row.sampler_gap["max_abs"] < 1e-3
        file = run_dir / "episodes" / f"stage-{row.stage:04d}-update-{row.update}-{row.agent}.jsonl"
        said = {(m["agent"], m["version"]) for line in file.read_text().splitlines() for m in json.loads(line)["messages"]}
        assert said == set(current.items())
        current[row.agent] = row.version


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (tools/setup --all installs it)")
def test_the_quickstart_runs_on_vllms_public_interface_alone(tmp_path: Path) -> None:
    """One small stage without patches: accepted updates reach the engine, and what it samples is the trainer's policy."""
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "teamtr_lora", "train", str(ROOT / "recipes" / "quickstart.yaml"), "--json"]
    smaller = ["training.stages=1", "rollout.items_per_stage=8", "rollout.episodes_per_item=4", "evaluation.items=8"]
    ran = subprocess.run(
        [*command, "rollout.engine=vllm", "rollout.vllm.patches=none", *smaller, "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=400,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [row for row in read_rows(run_dir) if isinstance(row, UpdateRow)]
    assert len(rows) == 3 and all(row.sampler_gap is not None and row.sampler_gap["max_abs"] < 1e-3 for row in rows)
