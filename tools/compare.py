"""Runs variants of a recipe over seeds, one after another, and prints one table.

    .venv/bin/python tools/compare.py RECIPE [RECIPE ...] --out DIR [--seeds 0,1,2] [section.key=value ...] [--json]
        [--vary "fill: trust_region.step=fill" --vary "shrink: trust_region.step=shrink training.stages=4" ...]

A variant is a --vary of a recipe, or a recipe as it is (named by its file) where there is none. Its runs are in
DIR/VARIANT/seed-N: finished ones are read, unfinished ones resumed, so the same command goes on after an interruption. A run that
fails stands in the table with its error and the rest goes on; the exit status is then 1. DIR/comparison.json holds everything.

Means are over seeds; +- is half of the 95% Student t interval over seeds. `stability` is the SD of the rise in accuracy from one
evaluation to the next (evaluation.every_stages=1 makes that every stage), `noise` what sampling alone would give it.
`delta stale` and `d occ` are means over probed stages of sums over their updates, less their split-half nulls (`paired` and
`coupled`: the more sensitive readings of both, with common random numbers); they need diagnostics.probe_every_stages=K.
`last three` is the mean accuracy of the last three evaluations. `rollouts` counts the episodes that were sampled to learn from,
`probe tokens` what probes sampled beside them.
Decisions and out-of-region updates are totals over seeds; `accepted` counts shrunk ones too.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import shlex
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, write_atomic
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.runs.metrics import StageRow, UpdateRow, has_rows, read_rows
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.study.diagnose import rise_stability, staleness
from teamtr_lora.training.trainer import TeamTRTrainer

FIRST, LAST, LAST_THREE = slice(1), slice(-1, None), slice(-3, None)  # evaluations
SAFE_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")
# 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom; the normal's beyond
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101,
    2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    name: str
    recipe: Path
    overrides: tuple[str, ...]


class RunRows:
    """The rows of one run's metrics.jsonl."""

    def __init__(self, rows: Sequence[UpdateRow | StageRow]) -> None:
        self.updates = [row for row in rows if isinstance(row, UpdateRow)]
        self.stages = [row for row in rows if isinstance(row, StageRow)]
        self.evaluations = [row.evaluation for row in self.stages if row.evaluation]

    @property
    def last(self) -> StageRow:
        return self.stages[-1]

    def accuracy(self, which: slice) -> float:
        return statistics.fmean(e["avg_at_k"] for e in self.evaluations[which])

    def stability(self, name: str) -> float | None:
        """One number of `diagnose`'s spread of rises in accuracy; one rise has none."""
        return rise_stability(self.stages).get(name)

    def staleness(self, *path: str) -> float | None:
        """One number of `diagnose`'s table of probed stages, averaged over them."""
        found: list[Any] = list(staleness(self.updates))
        for key in path:
            found = [row[key] for row in found]
        return statistics.fmean(found) if found else None

    def coordination(self) -> float | None:
        found = self.evaluations[-1]["coordination"]
        return float(found["value"]) if found else None


@dataclass(frozen=True)
class Column:
    """One measure of a run, and how a variant's runs are put together and shown. A new diagnostic is one more line below."""

    name: str
    of: Callable[[RunRows], float | None]
    shown: str
    interval: bool = False
    total: bool = False


COLUMNS = (
    Column("before", lambda run: run.accuracy(FIRST), ".3f", interval=True),
    Column("after", lambda run: run.accuracy(LAST), ".3f", interval=True),
    Column("last_three", lambda run: run.accuracy(LAST_THREE), ".3f", interval=True),
    Column("improvement", lambda run: run.accuracy(LAST) - run.accuracy(FIRST), "+.3f", interval=True),
    Column("delta_stale", lambda run: run.staleness("delta_stale", "excess"), ".4f", interval=True),
    Column("paired", lambda run: run.staleness("delta_stale_paired"), ".4f", interval=True),
    Column("d_occ", lambda run: run.staleness("d_occ", "excess"), ".4f", interval=True),
    Column("coupled", lambda run: run.staleness("d_occ_coupled"), ".4f", interval=True),
    Column("stability", lambda run: run.stability("deviation"), ".4f"),
    Column("noise", lambda run: run.stability("floor"), ".4f"),
    Column("coordination", RunRows.coordination, ".3f", interval=True),
    Column("tokens", lambda run: run.last.sampled_tokens, ",.0f"),
    Column("rollouts", lambda run: sum(row.fresh_episodes for row in run.updates), ",.0f"),
    Column("probe_tokens", lambda run: sum(row.probe.tokens for row in run.updates if row.probe), ",.0f"),
    Column("accepted", lambda run: run.last.accepted, ".0f", total=True),
    Column("shrunk", lambda run: run.last.shrunk, ".0f", total=True),
    Column("rejected", lambda run: run.last.rejected, ".0f", total=True),
    Column("skipped", lambda run: run.last.skipped, ".0f", total=True),
    Column("out_of_region", lambda run: run.last.out_of_region_accepted, ".0f", total=True),
    Column("seconds", lambda run: run.last.seconds, ",.0f"),
)


@dataclass(frozen=True)
class Cell:
    variant: str
    seed: int
    run_dir: Path
    measures: dict[str, float | None] | None
    error: str | None = None


def numbers(text: str) -> list[int]:
    """0,1,2 of a command line; one that stands twice would pass for two runs."""
    found = [int(part) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text}: each number once")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="RECIPE | section.key=value")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--vary", action="append", default=[], metavar='"NAME: section.key=value ..."')
    parser.add_argument("--json", action="store_true", help="print DIR/comparison.json instead of the table")
    args = parser.parse_intermixed_args(arguments)
    try:
        chosen = variants(args.words, args.vary)
    except UserError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    report = compare(chosen, args.seeds, args.out)
    print(json.dumps(report, indent=2) if args.json else table(report))
    return exit_status(report)


def compare(chosen: Sequence[Variant], seeds: Sequence[int], out: Path) -> dict[str, Any]:
    """Runs what is missing and returns what OUT/comparison.json then holds."""
    report = summary(chosen, [run_cell(variant, seed, out) for variant in chosen for seed in seeds])
    write_atomic(out / "comparison.json", dump_json(report))
    return report


def exit_status(report: dict[str, Any]) -> int:
    return 1 if any(variant["errors"] for variant in report["variants"].values()) else 0


def variants(words: Sequence[str], varied: Sequence[str]) -> list[Variant]:
    common = [word for word in words if "=" in word]
    recipes = [Path(word) for word in words if "=" not in word]
    if not recipes:
        raise UserError("no RECIPE was named")
    changes = [_change(text) for text in varied] or [("", [])]
    found = []
    for recipe in recipes:
        for name, overrides in changes:
            parts = [recipe.stem, name] if len(recipes) > 1 and name else [name or recipe.stem]
            found.append(Variant("-".join(parts), recipe, (*common, *overrides)))
    names = [variant.name for variant in found]
    for name in names:
        if names.count(name) > 1 or not SAFE_NAME.fullmatch(name):
            raise UserError(f"variant {name!r}: give every variant a name of its own that can be a folder's")
    return found


def _change(text: str) -> tuple[str, list[str]]:
    name, colon, overrides = text.partition(":")
    if not colon or not all("=" in word for word in shlex.split(overrides)):
        raise UserError(f'--vary {text!r}: write it as "NAME: section.key=value ..."')
    return name.strip(), shlex.split(overrides)


def run_cell(variant: Variant, seed: int, out: Path) -> Cell:
    """One run, trained as far as it is not yet; what goes wrong in it stays in it."""
    run_dir = out / variant.name / f"seed-{seed}"
    try:
        recipe = load_recipe(variant.recipe, [*variant.overrides, f"seed={seed}"])
        recipe = recipe.model_copy(update={"output_dir": str(run_dir)}).placed_in(recipe.folder)
        RunDir(run_dir).check(recipe, resume=True)
        if not finished(run_dir, recipe):
            print(f"{variant.name}, seed {seed}: training in {run_dir}", file=sys.stderr, flush=True)
            train(recipe)
        rows = RunRows(read_rows(run_dir))
        measures = {column.name: column.of(rows) for column in COLUMNS}
    except UserError as error:
        return Cell(variant.name, seed, run_dir, None, error=" ".join(str(error).split()))
    except Exception as error:  # a crash of one run says nothing about the others
        traceback.print_exc()
        return Cell(variant.name, seed, run_dir, None, error=" ".join(f"{type(error).__name__}: {error}".split()))
    return Cell(variant.name, seed, run_dir, measures)


def train(recipe: Recipe) -> None:
    trainer = TeamTRTrainer.from_recipe(recipe)
    try:
        trainer.train(resume=True)
    finally:
        trainer.close()
        del trainer  # before the next run loads its base
        gc.collect()
        torch.cuda.empty_cache()


def finished(run_dir: Path, recipe: Recipe) -> bool:
    if not RunDir(run_dir).checkpoints.exists() or not has_rows(run_dir):
        return False
    stages = RunRows(read_rows(run_dir)).stages
    return bool(stages) and stages[-1].stage >= recipe.training.stages and stages[-1].evaluation is not None


def summary(chosen: Sequence[Variant], cells: Sequence[Cell]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for variant in chosen:
        own = [cell for cell in cells if cell.variant == variant.name]
        done = [cell for cell in own if cell.measures is not None]
        report[variant.name] = {
            "recipe": str(variant.recipe),
            "overrides": list(variant.overrides),
            "seeds": [cell.seed for cell in done],
            "runs": [str(cell.run_dir) for cell in done],
            "errors": {str(cell.seed): cell.error for cell in own if cell.error},
            "measures": {column.name: together(column, done) for column in COLUMNS},
        }
    return {"interval": "95% Student t over seeds; half_width is half of it", "variants": report}


def together(column: Column, done: Sequence[Cell]) -> dict[str, Any]:
    values = [cell.measures[column.name] for cell in done if cell.measures is not None]
    known = [value for value in values if value is not None]
    result: dict[str, Any] = {"by_seed": values, "mean": statistics.fmean(known) if known else None}
    if column.interval:
        result["half_width"] = half_width(known)
    if column.total:
        result["total"] = sum(known)
    return result


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95% interval of the mean; None where one value gives no spread to judge by."""
    freedom = len(values) - 1
    if freedom < 1:
        return None
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else 1.960
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def table(report: dict[str, Any]) -> str:
    rows = [["variant", "seeds", *(column.name.replace("_", " ") for column in COLUMNS)]]
    errors: list[str] = []
    for name, variant in report["variants"].items():
        shown = [_shown(column, variant["measures"][column.name]) for column in COLUMNS]
        rows.append([name, f"{len(variant['seeds'])}", *shown])
        errors += [f"{name}, seed {seed}: {error}" for seed, error in variant["errors"].items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
             for row in rows]  # fmt: skip
    return "\n".join([*lines, *(["", "failed:", *errors] if errors else [])])


def _shown(column: Column, measure: dict[str, Any]) -> str:
    value = measure["total"] if column.total else measure["mean"]
    if value is None or not measure["by_seed"]:
        return "-"
    text = format(value, column.shown)
    half = measure.get("half_width")
    return text if half is None else f"{text} +- {format(half, column.shown.lstrip('+'))}"


if __name__ == "__main__":
    sys.exit(main())
