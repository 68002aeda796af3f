"""Measures what the project claims about the quickstart, and prints one table.

    .venv/bin/python tools/claims.py [--seeds 0 1 2] [section.key=value ...]

For each seed: held-out accuracy before and after training with a two-proportion z-test, accepted updates outside the trust
region (must be 0), decisions, and training seconds; then the stress recipe's decisions.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def train(recipe: str, run_dir: Path, overrides: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "teamtr_lora", "train", str(ROOT / "recipes" / recipe), *overrides]
    done = subprocess.run([*command, "--run-dir", str(run_dir), "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def two_proportion_p(before: float, after: float, episodes: int) -> float:
    """One-sided: how likely a rise this large is if nothing changed."""
    pooled = (before + after) / 2
    spread = math.sqrt(2 * pooled * (1 - pooled) / episodes)
    return 0.5 * math.erfc((after - before) / spread / math.sqrt(2)) if spread else 1.0


def line(name: str, result: dict[str, Any]) -> str:
    before, after, count = result["accuracy_before"], result["accuracy_after"], result["episodes_evaluated"]
    decisions = f"{result['accepted']}/{result['shrunk']}/{result['rejected']}/{result['skipped']}"
    return (
        f"{name:<16} {before:>7.3f} {after:>7.3f} {100 * (after - before):>+7.1f} {two_proportion_p(before, after, count):>10.1e}"
        f" {count:>9} {result['out_of_region_accepted']:>14} {decisions:>16} {result['seconds']:>8.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args, overrides = parser.parse_known_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            result = train("quickstart.yaml", Path(folder) / str(seed), [f"seed={seed}", *overrides])
            rows.append(line(f"quickstart {seed}", result))
        rows.append(line("stress", train("stress.yaml", Path(folder) / "stress", overrides)))
    print(
        f"{'run':<16} {'before':>7} {'after':>7} {'points':>7} {'p':>10} {'episodes':>9} {'out of region':>14} "
        f"{'acc/shr/rej/skip':>16} {'seconds':>8}"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
