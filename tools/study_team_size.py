"""Naive sequential against TeamTR by team size, on nano teams whose every agent adds one column, with one budget per stage.

    python tools/study_team_size.py --out DIR [--jobs J] [--sizes 2,3,4,6,8] [--seeds 0,1,2] [--stages 15] [--items 48] [--json]

One run an (n, variant, seed), in a process of its own with one thread; J at a time, the longest first. Each leaves
DIR/n-N/VARIANT/seed-S/study.json; finished ones are read, unfinished ones resumed, so the same command goes on after an
interruption; finished ones of other --stages, --items, --episodes or --probe-every are refused. `--time-limit SECONDS` starts
nothing after it and ends what still runs; `--only-table` starts nothing at all.

The task is adding numbers of n digits; the reward is the share of columns that are right, accuracy counts whole sums. Both
variants play the same number of episodes in a stage (training.matched: stage): TeamTR shares them among its n rollouts. Every
`--probe-every`-th stage is probed. Delta_stale and D_occ of a stage are sums over its updates, less their split-half nulls.
`paired` is Delta_stale from |stale - fresh| over the same items and random numbers, less what its noise alone would give;
`coupled` is D_occ from the share of contexts that differ between the two teams with the same random numbers, which is never below
the total variation and 0 for one team. Means are over probed stages, then seeds; +- is half of the 95% Student t interval over
seeds. Exponents are least squares in log-log with a bootstrap over seeds, and are left out where a mean is not positive.
Accuracy, reward and coordination are means of the last three evaluations; `stability` is the SD over stages of the rise in
accuracy, `noise` its binomial floor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
NAMES = ["planner", "solver", "checker", "writer", "critic", "judge", "helper", "coder"]
ROLES = ["ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands", "millions", "ten millions"]
VARIANTS = {"naive": {"resampling": "never"}, "teamtr": {"resampling": "every_update"}}
DRIFTS = ("delta_stale", "paired", "d_occ", "coupled")
LAST = 3  # evaluations behind the accuracy, reward and coordination at the end
FITTED = (*DRIFTS, "stability")
MEASURES = (
    *DRIFTS, "accuracy", "improvement", "reward", "stability", "noise", "coordination", "accepted",
    "rollouts", "tokens", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    size: int
    variant: str
    seed: int

    def folder(self, out: Path) -> Path:
        return out / f"n-{self.size}" / self.variant / f"seed-{self.seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    numbers: Callable[[str], list[int]] = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sizes", type=numbers, default=[2, 3, 4, 6, 8])
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--stages", type=int, default=15)
    parser.add_argument("--items", type=int, default=48, help="per stage; a multiple of every size")
    parser.add_argument("--episodes", type=int, default=3, help="per item")
    parser.add_argument("--probe-every", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--only-table", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("N", "VARIANT", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.one:
        return run_one(Cell(int(args.one[0]), args.one[1], int(args.one[2])), args)
    cells = [Cell(n, variant, seed) for n in sorted(args.sizes, reverse=True) for seed in args.seeds for variant in VARIANTS]
    if other := differing(cells, args):
        print(f"study_team_size: {other}", file=sys.stderr)
        return 2
    failed = [] if args.only_table else run_all(cells, args)
    report = summary(cells, args.out)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "study.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2) if args.json else table(report))
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


def differing(cells: Sequence[Cell], args: argparse.Namespace) -> str | None:
    """The first result of other arguments. Of one that was made before they were written down they are not known."""
    for cell in cells:
        path = cell.folder(args.out) / "study.json"
        before = json.loads(path.read_text()).get("arguments", {}) if path.exists() else {}
        for name, value in chosen(args).items():
            if before.get(name, value) != value:
                option = f"--{name.replace('_', '-')}"
                return f"{path}: was made with {option} {before[name]}, not {value}; give that, or choose another --out"
    return None


def chosen(args: argparse.Namespace) -> dict[str, int]:
    """What decides a result, beside its cell."""
    return {name: getattr(args, name) for name in ("stages", "items", "episodes", "probe_every")}


def run_all(cells: Sequence[Cell], args: argparse.Namespace) -> list[str]:
    """What went wrong, one line a cell."""
    started, waiting = time.monotonic(), [cell for cell in cells if not (cell.folder(args.out) / "study.json").exists()]
    running: dict[Cell, subprocess.Popen[bytes]] = {}
    failed: list[str] = []
    try:
        while waiting or running:
            while waiting and len(running) < args.jobs:
                cell = waiting.pop(0)
                running[cell] = start(cell, args)
            time.sleep(0.5)
            for cell in [cell for cell, process in running.items() if process.poll() is not None]:
                status = running.pop(cell).returncode
                how = "done" if status == 0 else f"failed ({status})"
                print(f"[{time.monotonic() - started:.0f} s] {cell}: {how}", flush=True)
                if status:
                    failed.append(f"{cell}: exit status {status}, see {cell.folder(args.out)}.log")
            if time.monotonic() - started > args.time_limit:
                failed += [f"{cell}: not finished; the same command goes on with it" for cell in [*running, *waiting]]
                break
    finally:
        for process in running.values():
            process.terminate()
            process.wait()
    return failed


def start(cell: Cell, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    options = ["--stages", args.stages, "--items", args.items, "--episodes", args.episodes, "--probe-every", args.probe_every]
    command = [sys.executable, __file__, "--out", args.out, *options, "--one", cell.size, cell.variant, cell.seed]
    log = cell.folder(args.out).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        env = {**os.environ, **one_thread, "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen([str(word) for word in command], stdout=file, stderr=file, env=env)


def recipe_data(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "seed": cell.seed,
        "output_dir": str(cell.folder(args.out)),
        "base": {"source": "nano", "device": "cpu"},
        "team": {
            "protocol": {"view": "shared", "system": "Add by columns."},
            "agents": [{"name": name, "role": role} for name, role in zip(NAMES[: cell.size], ROLES, strict=False)],
        },
        "task": {"name": "column_sum", "digits": cell.size, "credit": "columns"},
        "rollout": {"items_per_stage": args.items, "episodes_per_item": args.episodes, "max_message_tokens": 12},
        "training": {
            "stages": args.stages,
            "learning_rate": 2e-3,
            "inner_epochs": 2,
            "matched": "stage",
            **VARIANTS[cell.variant],
        },
        "trust_region": {"delta": 0.02},
        "evaluation": {"every_stages": 1, "items": 64},
        "diagnostics": {
            "save_episodes": "none",
            "probe_every_stages": args.probe_every,
            "probe_items": 16,
            "probe_episodes_per_item": 4,
            "token_shift_ranks": 0,
        },
    }


def run_one(cell: Cell, args: argparse.Namespace) -> int:
    import torch

    from teamtr_lora.common.files import dump_json, write_atomic
    from teamtr_lora.recipe import Recipe
    from teamtr_lora.training.trainer import TeamTRTrainer

    torch.set_num_threads(1)
    trainer = TeamTRTrainer.from_recipe(Recipe(**recipe_data(cell, args)).placed_in(Path.cwd()))
    trainer.train(resume=True)
    write_atomic(cell.folder(args.out) / "study.json", dump_json(measures(cell.folder(args.out)) | {"arguments": chosen(args)}))
    return 0


def measures(run: Path) -> dict[str, Any]:
    """One run's numbers, from its directory alone."""
    from teamtr_lora.algorithm.occupancy import stability
    from teamtr_lora.runs.metrics import StageRow, UpdateRow, read_rows
    from teamtr_lora.study.diagnose import staleness

    rows = read_rows(run)
    updates = [row for row in rows if isinstance(row, UpdateRow)]
    stages = [row for row in rows if isinstance(row, StageRow)]
    evaluations = [row.evaluation for row in stages if row.evaluation]
    probed = staleness(updates)
    by_stage: dict[str, list[float]] = {
        "delta_stale": [row["delta_stale"]["excess"] for row in probed],
        "paired": [row["delta_stale_paired"] for row in probed],
        "d_occ": [row["d_occ"]["excess"] for row in probed],
        "coupled": [row["d_occ_coupled"] for row in probed],
    }
    accuracy = [evaluation["avg_at_k"] for evaluation in evaluations]
    spread = stability(accuracy, evaluations[-1]["episodes"]) if len(accuracy) > 2 else None
    last = evaluations[-LAST:]
    return {
        **{name: statistics.fmean(values) if values else None for name, values in by_stage.items()},
        "by_probed_stage": by_stage,
        "accuracy": statistics.fmean(accuracy[-LAST:]),
        "accuracy_by_stage": accuracy,
        "improvement": statistics.fmean(accuracy[-LAST:]) - accuracy[0],
        "stability": spread and spread.deviation,
        "noise": spread and spread.floor,
        "reward": statistics.fmean(e["mean_reward"] for e in last),
        "coordination": statistics.fmean(e["coordination"]["value"] for e in last),
        "accepted": stages[-1].accepted / stages[-1].updates,
        "rollouts": sum(row.fresh_episodes for row in updates),
        "tokens": stages[-1].sampled_tokens,
        "seconds": stages[-1].seconds,
    }


def summary(cells: Sequence[Cell], out: Path) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from compare import half_width  # beside this file

    done = {cell: json.loads(path.read_text()) for cell in cells if (path := cell.folder(out) / "study.json").exists()}
    sizes = sorted({cell.size for cell in done})
    rows = []
    for size in sizes:
        for variant in VARIANTS:
            own = [found for cell, found in done.items() if (cell.size, cell.variant) == (size, variant)]
            row: dict[str, Any] = {"n": size, "variant": variant, "seeds": len(own)}
            for name in MEASURES:
                known = [found[name] for found in own if found[name] is not None]
                row[name] = {"mean": statistics.fmean(known), "half_width": half_width(known)} if known else None
            rows.append(row)
    return {"rows": rows, "exponents": {v: {name: exponent(done, sizes, v, name) for name in FITTED} for v in VARIANTS}}


def exponent(done: dict[Cell, Any], sizes: Sequence[int], variant: str, name: str) -> dict[str, Any] | None:
    """None where there are no two sizes, a seed is missing, or a mean is not positive."""
    from teamtr_lora.algorithm.occupancy import fit_exponent

    seeds = sorted({cell.seed for cell in done if cell.variant == variant})
    try:
        values = [[done[Cell(size, variant, seed)][name] for size in sizes] for seed in seeds]
        found = fit_exponent(sizes, values) if len(sizes) > 1 and values else None
    except (KeyError, ValueError):
        return None
    return found and {"exponent": found.exponent, "low": found.low, "high": found.high}


def table(report: dict[str, Any]) -> str:
    lines = [["n", "variant", "seeds", *MEASURES]]
    for row in report["rows"]:
        lines.append([str(row["n"]), row["variant"], str(row["seeds"]), *(_shown(name, row[name]) for name in MEASURES)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    for variant, fits in report["exponents"].items():
        words = [f"{name} {_fit(fit)}" for name, fit in fits.items()]
        text.append(f"exponents over n, {variant}: " + ", ".join(words))
    return "\n".join(text)


def _shown(name: str, measure: dict[str, Any] | None) -> str:
    if measure is None:
        return "-"
    counted = name in ("rollouts", "tokens", "seconds")
    digits = ",.0f" if counted else ".4f" if name in DRIFTS else ".3f"
    half = measure["half_width"]
    plain = half is None or counted or name == "noise"
    return format(measure["mean"], digits) + ("" if plain else f" +- {half:{digits}}")


def _fit(fit: dict[str, Any] | None) -> str:
    if fit is None:
        return "-"
    return f"{fit['exponent']:.2f}" + ("" if fit["low"] is None else f" [{fit['low']:.2f}, {fit['high']:.2f}]")


if __name__ == "__main__":
    sys.exit(main())
