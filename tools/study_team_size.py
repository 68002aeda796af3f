"""Naive sequential against TeamTR by team size, on nano teams whose every agent adds one column, with one budget per stage.

    python tools/study_team_size.py --out DIR [--sizes 2,3,4,6,8] [--seeds 0,1,2] [section.key=value ...] [--json]

The runs are cells of tools/compare.py, in DIR/n-N-VARIANT/seed-S: the same command goes on after an interruption.
The task is adding numbers of n digits; the reward is the share of columns that are right, accuracy counts whole sums. Both
variants play the same number of episodes in a stage (training.matched: stage): TeamTR shares them among its n rollouts.
The table is compare's, and below it the exponents over n, least squares in log-log with a bootstrap over seeds; they are left
out where a mean is not positive or a seed is missing. One run takes one core: give OMP_NUM_THREADS=1 and an --out of its own to
several of these commands to use more.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import compare

from teamtr_lora.algorithm.occupancy import fit_exponent

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.yaml"
NAMES = ("planner", "solver", "checker", "writer", "critic", "judge", "helper", "coder")
ROLES = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands", "millions", "ten millions")
RESAMPLING = {"naive": "never", "teamtr": "every_update"}
COMMON = (
    "base.device=cpu", "task.credit=columns", "rollout.items_per_stage=48", "rollout.episodes_per_item=3", "training.stages=15",
    "training.inner_epochs=2", "training.matched=stage", "evaluation.every_stages=1", "evaluation.items=64",
    "diagnostics.save_episodes=none", "diagnostics.probe_every_stages=5", "diagnostics.probe_items=16",
    "diagnostics.probe_episodes_per_item=4", "diagnostics.token_shift_ranks=0",
)  # fmt: skip
FITTED = ("delta_stale", "paired", "d_occ", "coupled", "stability")


def variant(size: int, name: str, overrides: Sequence[str] = ()) -> compare.Variant:
    agents = [{"name": agent, "role": role} for agent, role in zip(NAMES[:size], ROLES, strict=False)]
    own = (f"team.agents={json.dumps(agents)}", f"task.digits={size}", f"training.resampling={RESAMPLING[name]}")
    return compare.Variant(f"n-{size}-{name}", RECIPE, (*COMMON, *own, *overrides))


def exponents(report: dict[str, Any], sizes: Sequence[int], seeds: int) -> dict[str, Any]:
    """By variant and measure; None where nothing can be fitted."""
    found: dict[str, Any] = {}
    for name in RESAMPLING:
        measured = [report["variants"][f"n-{size}-{name}"]["measures"] for size in sizes]
        for measure in FITTED:
            by_size = [own[measure]["by_seed"] for own in measured]
            complete = len(sizes) > 1 and all(len(values) == seeds and None not in values for values in by_size)
            try:
                fit = asdict(fit_exponent(sizes, list(zip(*by_size, strict=True)))) if complete else None
            except ValueError:
                fit = None
            found.setdefault(name, {})[measure] = fit
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--sizes", type=compare.numbers, default=[2, 3, 4, 6, 8])
    parser.add_argument("--seeds", type=compare.numbers, default=[0, 1, 2])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_intermixed_args(arguments)
    cells = [variant(size, name, args.overrides) for size in args.sizes for name in RESAMPLING]
    report = compare.compare(cells, args.seeds, args.out)
    fits = exponents(report, args.sizes, len(args.seeds))
    if args.json:
        print(json.dumps(report | {"exponents": fits}, indent=2))
        return compare.exit_status(report)
    print(compare.table(report))
    for name, by_measure in fits.items():
        words = [f"{measure} {fit['exponent']:.2f}" if fit else f"{measure} -" for measure, fit in by_measure.items()]
        print(f"exponents over n, {name}: {', '.join(words)}")
    return compare.exit_status(report)


if __name__ == "__main__":
    sys.exit(main())
