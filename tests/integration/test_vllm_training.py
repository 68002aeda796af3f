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
SMALL = ["rollout.engine=vllm", "training.stages=1", "rollout.items_per_stage=10", "evaluation.items=8"]
# One run after the other in one process: with the patches, and on vLLM's public interface alone.
BOTH = """
import sys
from teamtr_lora.cli import main
for folder, *more in (("patched",), ("public", "rollout.vllm.patches=none", "rollout.episodes_per_item=3")):
    assert main([*sys.argv[2:], *more, "--run-dir", f"{sys.argv[1]}/{folder}"]) == 0
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    command = [sys.executable, "-c", BOTH, str(folder), "train", str(ROOT / "recipes" / "quickstart.yaml"), *SMALL]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return folder


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed (tools/setup --all installs it)"
)


def test_the_quickstart_team_trains_with_vllm(runs: Path) -> None:
    """A small stage of it: every update is sampled by the team as it is then, and what the engine samples is the trainer's policy
    (tools/compare.py recipes/quickstart.yaml rollout.engine=vllm shows that it learns)."""
    run_dir = runs / "patched"
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


def test_the_quickstart_runs_on_vllms_public_interface_alone(runs: Path) -> None:
    """One small stage without patches: accepted updates reach the engine, and what it samples is the trainer's policy."""
    rows = [row for row in read_rows(runs / "public") if isinstance(row, UpdateRow)]
    assert len(rows) == 3 and all(row.sampler_gap is not None and row.sampler_gap["max_abs"] < 1e-3 for row in rows)
