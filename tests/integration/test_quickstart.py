"""Two stages of the quickstart in a process of their own: the team learns, in the memory that `plan` foretells."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.common.paired import paired_test
from teamtr_lora.runs.metrics import StageRow, UpdateRow, read_rows

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml")

# What `plan` foretells, then a run and what it took, in one process: most of its memory are the libraries.
MEASURE = """
import sys, torch
from teamtr_lora.base.memory import peak_memory
from teamtr_lora.cli import main
from teamtr_lora.recipe import load_recipe
from teamtr_lora.study.plan import make_plan
print("planned", make_plan(load_recipe(sys.argv[2], sys.argv[3:-3])).memory_total_bytes, file=sys.stderr)
code = main(sys.argv[1:])
print("peak", peak_memory(torch.device("cpu")), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], int, int]:
    """The run directory, the summary that `train --json` prints, and the peak memory in bytes, as planned and as measured."""
    run_dir = tmp_path_factory.mktemp("quickstart") / "run"
    smaller = ["training.stages=2", "rollout.items_per_stage=16", "evaluation.every_stages=0", "evaluation.items=192"]
    arguments = ["train", RECIPE, *smaller, "--run-dir", str(run_dir), "--json"]
    # freed memory goes back: what glibc keeps for itself differs between machines, by up to a third of all
    returned = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "3000000"}
    command = [sys.executable, "-c", MEASURE, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **returned})
    assert ran.returncode == 0, ran.stderr[-2000:]
    planned, peak = (int(re.findall(rf"^{word} (\d+)$", ran.stderr, re.MULTILINE)[0]) for word in ("planned", "peak"))
    return run_dir, json.loads(ran.stdout), planned, peak


def test_the_team_learns(trained: tuple[Path, dict[str, Any], int, int]) -> None:
    """A rise that chance does not explain, on the same items and seeds (tools/compare.py measures the full claim)."""
    run_dir, summary, _, _ = trained
    before, after = (row.evaluation for row in read_rows(run_dir) if isinstance(row, StageRow) and row.evaluation)
    assert (before["avg_at_k"], after["avg_at_k"]) == (summary["accuracy_before"], summary["accuracy_after"])
    rise = paired_test(before["by_item"], after["by_item"])
    assert rise.difference > 0.05 and rise.p_value < 0.001, rise
    rows = [row for row in read_rows(run_dir) if isinstance(row, UpdateRow)]
    assert len(rows) == 6 and not any(row.out_of_region for row in rows)


def test_the_untrained_team_is_right_between_30_and_60_percent_of_the_time(
    trained: tuple[Path, dict[str, Any], int, int],
) -> None:
    before = next(row.evaluation for row in read_rows(trained[0]) if isinstance(row, StageRow))
    assert before is not None and before["temperature"] == 1.0 and 0.30 <= before["avg_at_k"] <= 0.60
    assert before["coordination"]["value"] == before["avg_at_k"], "the sum is right where every column is"


def test_the_estimate_is_within_a_quarter_of_the_peak(trained: tuple[Path, dict[str, Any], int, int]) -> None:
    _, _, estimate, peak = trained
    assert 0.75 * peak <= estimate <= 1.25 * peak, f"estimated {estimate / 2**20:.0f} MiB, measured {peak / 2**20:.0f} MiB"
