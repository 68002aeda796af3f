"""`plan`'s memory estimate against the measured peak of the same recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "recipes" / "quickstart.yaml")

MEASURE = """
import sys, torch
from teamtr_lora.cli import main
from teamtr_lora.base.memory import peak_memory
code = main(sys.argv[1:])
print("peak", peak_memory(torch.device("cpu")), file=sys.stderr)
sys.exit(code)
"""


def test_estimate_is_within_a_quarter_of_the_measured_peak(tmp_path: Path) -> None:
    planned = subprocess.run([sys.executable, "-m", "teamtr_lora.cli", "plan", RECIPE, "--json"], capture_output=True, text=True)
    estimate = json.loads(planned.stdout)["memory_total_bytes"]
    arguments = ["train", RECIPE, "training.stages=1", "evaluation.items=32", "--run-dir", str(tmp_path / "run"), "--json"]
    ran = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True)
    peak = int(ran.stderr.rsplit("peak", 1)[1])
    assert 0.75 * peak <= estimate <= 1.25 * peak, f"estimated {estimate / 2**20:.0f} MiB, measured {peak / 2**20:.0f} MiB"
