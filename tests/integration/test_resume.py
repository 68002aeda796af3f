"""kill -9 at any moment: the resumed run ends with the same adapters and the same metrics rows as an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from teamtr_lora.runs.metrics import TIME_FIELDS

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "quickstart.yaml"
SMALL = [
    "training.stages=2",
    "rollout.items_per_stage=8",
    "rollout.episodes_per_item=4",
    "training.inner_epochs=2",
    "evaluation.every_stages=1",
    "evaluation.items=8",
]
KILLS = 2


def command(run_dir: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "teamtr_lora", "train", str(RECIPE), *SMALL, "--run-dir", str(run_dir), "--json", *options]


def rows_without_times(run_dir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIME_FIELDS} for row in rows]


def kill_somewhere(run_dir: Path, rng: random.Random) -> bool:
    """Starts or resumes the run and kills it with SIGKILL while it is at work; False if it was done before."""
    resume = ["--resume"] if (run_dir / "checkpoint").exists() else []
    seen = len(list((run_dir / "checkpoint").glob("step-*"))) if resume else 0
    newest = max((p.stat().st_mtime_ns for p in (run_dir / "checkpoint").glob("step-*")), default=0) if resume else 0
    process = subprocess.Popen(command(run_dir, *resume), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        steps = list((run_dir / "checkpoint").glob("step-*")) if (run_dir / "checkpoint").exists() else []
        if len(steps) > seen or any(p.stat().st_mtime_ns > newest for p in steps):
            break
        time.sleep(0.01)
    time.sleep(rng.random() * 1.5)  # anywhere in what follows: a rollout, an update, a write
    alive = process.poll() is None
    if alive:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return alive


def test_a_killed_run_resumes_to_the_same_end(tmp_path: Path) -> None:
    undisturbed = tmp_path / "undisturbed"
    reference = json.loads(subprocess.run(command(undisturbed), check=True, capture_output=True, text=True).stdout)
    disturbed, rng = tmp_path / "disturbed", random.Random(0)
    kills = sum(kill_somewhere(disturbed, rng) for _ in range(KILLS))
    assert kills >= 2, "the run was over before it could be killed twice: the test would prove nothing"
    done = subprocess.run(command(disturbed, "--resume"), check=True, capture_output=True, text=True)
    resumed = json.loads(done.stdout)
    assert resumed["adapters"] == reference["adapters"]
    assert rows_without_times(disturbed) == rows_without_times(undisturbed)
    for key in ("updates", "accepted", "shrunk", "rejected", "accuracy_before", "accuracy_after", "tokens"):
        assert resumed[key] == reference[key], key
    assert not list(disturbed.rglob(".tmp-*"))
