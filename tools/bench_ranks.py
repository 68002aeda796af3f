"""How much faster several processes train than one: the first stage of a recipe on a CPU, one thread a process.

    python tools/bench_ranks.py                                   # the quickstart, 1 and 2 processes
    python tools/bench_ranks.py --ranks 1 2 4 rollout.items_per_stage=64

Prints the seconds of the stage (rollouts, updates, records and checkpoints), the ratio to the first, the share of the time that a
process waited for others, and whether the adapters are the same. The machine needs a free core a process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from teamtr_lora.runs.metrics import StageRow, UpdateRow, read_rows

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description="The first stage of a recipe with several processes, on a CPU.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], metavar="N", help="processes (default: 1 2)")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="(default: the quickstart)")
    args, overrides = parser.parse_known_args()
    first, hashes = None, set()
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as place:
            updates, seconds = stage(Path(place) / "run", args.recipe, ranks, overrides)
        first = first or seconds
        hashes.add(tuple(row.content_hash for row in updates))
        idle = sum(row.idle_share for row in updates) / len(updates)
        print(f"{ranks} processes: stage {seconds:.1f} s, {first / seconds:.2f}x, idle share {idle:.3f}", flush=True)
    print("adapters are the same" if len(hashes) == 1 else "adapters DIFFER")


def stage(run_dir: Path, recipe: Path, ranks: int, overrides: list[str]) -> tuple[list[UpdateRow], float]:
    """The first stage's updates, and the seconds between the evaluation before it and the last of them."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    settings = ["training.stages=1", "evaluation.items=8", "base.device=cpu", *overrides]
    command = [sys.executable, *launcher, "-m", "teamtr_lora", "train", str(recipe), *settings, "--run-dir", str(run_dir)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    rows = read_rows(run_dir)
    updates = [row for row in rows if isinstance(row, UpdateRow)]
    before = next(row for row in rows if isinstance(row, StageRow))
    return updates, updates[-1].time - before.time


if __name__ == "__main__":
    main()
