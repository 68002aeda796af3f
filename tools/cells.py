"""Cells: one variant's run with one seed, made where it is missing, measured, and put together over seeds.

What tools/compare.py and tools/prove.py share. A cell's folder is OUT/VARIANT/seed-N; what is finished there is read, what
is not goes on. Columns: `stability` is the SD of the rise in accuracy from one evaluation to the next (evaluation.every_stages=1
makes that every stage), `noise` what sampling alone would give it. `delta stale` and `d occ` are means over probed stages of sums
over their updates, less their split-half nulls (`paired` and `coupled`: the more sensitive readings of both, with common random
numbers); they need diagnostics.probe_every_stages=K. `last three` is the mean accuracy of the last three evaluations, `area` that
of all after the first. `rollouts` counts the episodes that were sampled to learn from, `probe tokens` what probes sampled beside
them. Decisions and out-of-region updates are totals over seeds; `accepted` counts shrunk ones too, `below half` those at
alpha < 0.5.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import TrainerCallback

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.report.seeds import mean_and_interval
from teamtr_lora.runs.metrics import StageRow, UpdateRow, has_rows, read_rows
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.study.diagnose import rise_stability, staleness
from teamtr_lora.training.trainer import TeamTRTrainer

FIRST, LAST, LAST_THREE, TRAINED = slice(1), slice(-1, None), slice(-3, None), slice(1, None)  # evaluations

Measures = dict[str, float | None]


class TimeUpError(Exception):
    """The time was up before the run was done; what is there of it can be resumed."""


@dataclass(frozen=True)
class Variant:
    """`work(variant, seed, folder, until)` finishes what is missing in the folder by the Unix time `until` and measures it."""

    name: str
    recipes: tuple[Path, ...]
    overrides: tuple[str, ...]
    work: Callable[[Variant, int, Path, float], Measures] | None = None  # None: a training run, measured by COLUMNS

    def recipe(self, seed: int, run_dir: Path) -> Recipe:
        recipe = load_recipe(self.recipes, [*self.overrides, f"seed={seed}"])
        return recipe.model_copy(update={"output_dir": str(run_dir)}).placed_in(recipe.folder)


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
    Column("area", lambda run: run.accuracy(TRAINED), ".3f", interval=True),
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
    Column("below_half", lambda run: sum(row.alpha is not None and row.alpha < 0.5 for row in run.updates), ".0f", total=True),
    Column("rejected", lambda run: run.last.rejected, ".0f", total=True),
    Column("skipped", lambda run: run.last.skipped, ".0f", total=True),
    Column("out_of_region", lambda run: run.last.out_of_region_accepted, ".0f", total=True),
    Column("seconds", lambda run: run.last.seconds, ",.0f"),
)


BY_NAME = {column.name: column for column in COLUMNS}


@dataclass(frozen=True)
class Cell:
    """One variant's run with one seed; neither measures nor an error: it is not finished."""

    variant: str
    seed: int
    run_dir: Path
    measures: Measures | None
    error: str | None = None


def numbers(text: str) -> list[int]:
    """0,1,2 of a command line; one that stands twice would pass for two runs."""
    found = [int(part) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text}: each number once")
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every tool that runs cells has on its command line."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="runs at a time, each in a process with one thread")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop cleanly after so long; the same command goes on")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of the table")
    parser.add_argument("--only", metavar="VARIANT@SEED", help=argparse.SUPPRESS)  # what a worker is asked for
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)


def exit_status(report: dict[str, Any]) -> int:
    return 1 if any(variant["errors"] for variant in report["variants"].values()) else 0


def run_cells(jobs: Sequence[tuple[Variant, int]], args: argparse.Namespace, command: Sequence[str]) -> list[Cell]:
    """Every job's cell, in order. `command` is this program's own, which its workers are started with."""
    until = math.inf if args.minutes is None else time.time() + 60 * args.minutes
    if args.workers == 1:
        return [run_cell(variant, seed, args.out, until) for variant, seed in jobs]
    cells = [run_cell(variant, seed, args.out, 0.0) for variant, seed in jobs]  # what is there already
    for cell in cells:
        if cell.error:  # hours before the table says so
            print(f"{cell.variant}, seed {cell.seed}: {cell.error}", file=sys.stderr, flush=True)
    missing = [place for place, cell in enumerate(cells) if cell.measures is None and cell.error is None]
    with ThreadPoolExecutor(args.workers) as pool:
        errors = list(pool.map(lambda place: in_a_process(cells[place], until, command), missing))
    for place, error in zip(missing, errors, strict=True):
        variant, seed = jobs[place]
        cell = run_cell(variant, seed, args.out, 0.0)
        cells[place] = Cell(variant.name, seed, cell.run_dir, None, error) if error else cell
    return cells


def in_a_process(cell: Cell, until: float, command: Sequence[str]) -> str | None:
    """Works on one cell; returns what went wrong."""
    if time.time() >= until:
        return None
    log = cell.run_dir.with_name(f"{cell.run_dir.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    asked = ["--only", f"{cell.variant}@{cell.seed}", *([] if until == math.inf else ["--until", str(until)])]
    print(f"{cell.variant}, seed {cell.seed}: in {cell.run_dir}", file=sys.stderr, flush=True)
    with open(log, "w", encoding="utf-8") as words:
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [sys.executable, *command, *asked], stdout=subprocess.PIPE, stderr=words, env=os.environ | threads, text=True
        )
    said = done.stdout.strip().splitlines()
    return None if done.returncode == 0 else said[-1] if said else f"ended with status {done.returncode}; see {log}"


def work_on(name: str, chosen: Sequence[Variant], args: argparse.Namespace) -> int:
    """What a worker does: one cell, whose error it prints."""
    variant, _, seed = name.rpartition("@")
    (asked,) = (each for each in chosen if each.name == variant)
    cell = run_cell(asked, int(seed), args.out, math.inf if args.until is None else args.until)
    print(cell.error or "", flush=True)
    return 1 if cell.error else 0


def run_cell(variant: Variant, seed: int, out: Path, until: float) -> Cell:
    """One run, made as far as it is not yet; what goes wrong in it stays in it."""
    folder = out / variant.name / f"seed-{seed}"
    try:
        return Cell(variant.name, seed, folder, (variant.work or trained)(variant, seed, folder, until))
    except TimeUpError:
        return Cell(variant.name, seed, folder, None)
    except UserError as error:
        return Cell(variant.name, seed, folder, None, error=" ".join(str(error).split()))
    except Exception as error:  # a crash of one run says nothing about the others
        traceback.print_exc()
        return Cell(variant.name, seed, folder, None, error=" ".join(f"{type(error).__name__}: {error}".split()))


def trained(variant: Variant, seed: int, folder: Path, until: float) -> Measures:
    recipe = variant.recipe(seed, folder)
    RunDir(folder).check(recipe, resume=True)
    if not finished(folder, recipe):
        told(variant, seed, folder, until)
        train(recipe, until)
    return measures(folder, recipe)


def in_time(until: float) -> None:
    if time.time() >= until:
        raise TimeUpError


def told(variant: Variant, seed: int, folder: Path, until: float) -> None:
    in_time(until)
    print(f"{variant.name}, seed {seed}: training in {folder}", file=sys.stderr, flush=True)


def measures(run_dir: Path, recipe: Recipe) -> Measures:
    if not finished(run_dir, recipe):
        raise TimeUpError
    rows = RunRows(read_rows(run_dir))
    return {column.name: column.of(rows) for column in COLUMNS}


class StopWhen(TrainerCallback):  # type: ignore[misc]
    """Ends a run after the update in which `over()` became true."""

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over

    def on_log(self, args: Any, state: Any, control: Any, **details: Any) -> None:  # on_save would wait for the disk
        control.should_training_stop = control.should_training_stop or self._over()


def train(
    recipe: Recipe,
    until: float = math.inf,
    callbacks: Sequence[TrainerCallback] = (),
    watch: Callable[[TeamTRTrainer], None] | None = None,
) -> None:
    """Goes on with the recipe's run to its end, or until the time is up. `watch` is given the trainer before it begins."""
    with redirect_stdout(sys.stderr):  # a tool's own output is its report
        trainer = TeamTRTrainer.from_recipe(recipe, [*callbacks, StopWhen(lambda: time.time() >= until)])
        try:
            if watch:
                watch(trainer)
            trainer.train(resume=True)
        finally:
            trainer.close()
            del trainer  # before the next run loads its base
            gc.collect()
            torch.cuda.empty_cache()


def finished(run_dir: Path, recipe: Recipe) -> bool:
    if not RunDir(run_dir).checkpoints.exists() or not has_rows(run_dir):
        return False
    rows = RunRows(read_rows(run_dir))
    if not rows.stages or rows.stages[-1].evaluation is None:
        return False
    last, idle = rows.stages[-1].stage, recipe.training.stop_after_idle_stages * len(recipe.team.agents)
    taught = [row.decision != "skipped" or row.stage > last for row in rows.updates[-idle:]]
    ended_idle = len(taught) == idle > 0 and not any(taught)  # the run has ended itself
    return ended_idle or last >= recipe.training.stages


def summary(chosen: Sequence[Variant], cells: Sequence[Cell]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for variant in chosen:
        own = [cell for cell in cells if cell.variant == variant.name]
        done = [cell for cell in own if cell.measures is not None]
        report[variant.name] = {
            "recipes": [str(recipe) for recipe in variant.recipes],
            "overrides": list(variant.overrides),
            "seeds": [cell.seed for cell in done],
            "unfinished": [cell.seed for cell in own if cell.measures is None and cell.error is None],
            "runs": [str(cell.run_dir) for cell in done],
            "errors": {str(cell.seed): cell.error for cell in own if cell.error},
            "measures": {name: together(column_of(name), done) for name in measured_in(done)},
        }
    return {
        "interval": "95% Student t over seeds; half_width is half of it",
        "variants": report,
        "against": {"reference": chosen[0].name, "differences": differences(report, chosen[0].name)},
    }


def measured_in(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(name for cell in cells for name in cell.measures or ()))


def column_of(name: str) -> Column:
    """How a measure is shown; those of other work than training are means with intervals."""
    return BY_NAME.get(name) or Column(name, lambda run: None, ".3f", interval=True)


def differences(report: dict[str, Any], reference: str) -> dict[str, dict[str, Any]]:
    """By variant and measure: this variant minus the reference, over the seeds that both have."""
    found: dict[str, dict[str, Any]] = {}
    for name, variant in report.items():
        own = {}
        for measure, values in variant["measures"].items():
            theirs = report[reference]["measures"].get(measure)
            if name == reference or theirs is None or "half_width" not in values:
                continue
            there = dict(zip(report[reference]["seeds"], theirs["by_seed"], strict=True))
            here = dict(zip(variant["seeds"], values["by_seed"], strict=True))
            apart = [here[seed] - there[seed] for seed in here if None not in (here[seed], there.get(seed))]
            if apart:
                own[measure] = {"mean": statistics.fmean(apart), "half_width": half_width(apart), "seeds": len(apart)}
        found |= {name: own} if own else {}
    return found


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
    return mean_and_interval(values)[1] if values else None


COMPARED = ("after", "area")  # of these the paired differences are printed


def table(report: dict[str, Any]) -> str:
    measured = [(name, m["mean"]) for variant in report["variants"].values() for name, m in variant["measures"].items()]
    names = list(dict.fromkeys(name for name, mean in measured if mean is not None))
    rows = [["variant", "seeds", *(name.replace("_", " ") for name in names)]]
    notes: list[str] = []
    for name, variant in report["variants"].items():
        shown = [_shown(column_of(measure), variant["measures"].get(measure)) for measure in names]
        rows.append([name, f"{len(variant['seeds'])}", *shown])
        notes += [f"{name}, seed {seed}: {error}" for seed, error in variant["errors"].items()]
    notes = ["", "failed:", *notes] if notes else []
    if waiting := {name: v["unfinished"] for name, v in report["variants"].items() if v["unfinished"]}:
        notes += ["", "not finished: " + "; ".join(f"{name}, seeds {', '.join(map(str, s))}" for name, s in waiting.items())]
    return "\n".join([*columns(rows), *_compared(report["against"]), *notes])


def _compared(against: dict[str, Any]) -> list[str]:
    lines = []
    for name, measured in against["differences"].items():
        kept = [(m, v | {"by_seed": [0.0]}) for m, v in measured.items() if m in COMPARED or not measured.keys() & {*COMPARED}]
        words = [f"{m.replace('_', ' ')} {_shown(Column(m, lambda run: None, '+.3f', interval=True), v)}" for m, v in kept]
        lines.append(f"  {name}: {', '.join(words)} ({kept[0][1]['seeds']} seeds)")
    return ["", f"less {against['reference']}, seed by seed:", *lines] if lines else []


def in_words(test: Mapping[str, Any]) -> str:
    """A paired difference and its interval."""
    between = "no interval" if test["low"] is None else f"{test['low']:+.3f} to {test['high']:+.3f}"
    return f"{test['difference']:+.3f} ({between})"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, the first column to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows]  # fmt: skip


def _shown(column: Column, measure: dict[str, Any] | None) -> str:
    value = None if measure is None else measure["total"] if column.total else measure["mean"]
    if measure is None or value is None or not measure["by_seed"]:
        return "-"
    text = format(value, column.shown)
    half = measure.get("half_width")
    return text if half is None else f"{text} +- {format(half, column.shown.lstrip('+'))}"
