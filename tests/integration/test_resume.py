"""kill -9 at any moment: the resumed run ends with the same adapters and the same metrics rows as an undisturbed one."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from forked import ForkedPython

from teamtr_lora.runs.metrics import TIME_FIELDS

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
TWO_AGENTS = ['team.agents=[{"name": "planner", "role": "ones"}, {"name": "solver", "role": "tens"}]', "task.digits=2"]
SMALL = [
    *TWO_AGENTS,
    "training.stages=2",
    "rollout.items_per_stage=6",
    "rollout.episodes_per_item=3",
    "training.inner_epochs=1",
    "evaluation.every_stages=1",
    "evaluation.items=4",
]
KILLS = 3


def started(run_dir: Path, *options: str) -> ForkedPython:
    command = [sys.executable, "-m", "teamtr_lora", "train", RECIPE, *SMALL, "--run-dir", run_dir, "--json", *options]
    return ForkedPython(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def finished(run_dir: Path, *options: str) -> dict[str, Any]:
    process = started(run_dir, *options)
    said, _ = process.communicate()
    assert process.returncode == 0
    return dict(json.loads(said))


def rows_without_times(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIME_FIELDS} for row in rows]


def kill_somewhere(run_dir: Path, rng: random.Random) -> bool:
    """Starts or resumes the run and kills it with SIGKILL while it is at work; False if it was done before."""
    checkpoints = run_dir / "checkpoint"
    newest = max((p.stat().st_mtime_ns for p in checkpoints.glob("step-*")), default=0)
    process = started(run_dir, *(["--resume"] if checkpoints.exists() else []))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(p.stat().st_mtime_ns > newest for p in checkpoints.glob("step-*")):
        time.sleep(0.01)
    time.sleep(rng.random() * 0.5)  # anywhere in what follows: a rollout, an update, a write
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def test_a_killed_run_resumes_to_the_same_end(tmp_path: Path) -> None:
    undisturbed = tmp_path / "undisturbed"
    reference = finished(undisturbed)
    disturbed, rng = tmp_path / "disturbed", random.Random(0)
    kills = sum(kill_somewhere(disturbed, rng) for _ in range(KILLS))
    assert kills >= 2, "the run was over before it could be killed twice: the test would prove nothing"
    resumed = finished(disturbed, "--resume")
    assert resumed["adapters"] == reference["adapters"]
    assert rows_without_times(disturbed) == rows_without_times(undisturbed)
    for key in ("updates", "accepted", "shrunk", "rejected", "accuracy_before", "accuracy_after", "tokens"):
        assert resumed[key] == reference[key], key
    assert not list(disturbed.rglob(".tmp-*"))
