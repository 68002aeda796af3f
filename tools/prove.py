"""What TeamTR is worth, measured: the studies that compare whole runs, a run directory a cell, resumable.

    .venv/bin/python tools/prove.py --out DIR [--cells "size-*,coupled-0.4/naive"] [--seeds 0,1,2,3,4] [--workers 16]
        [--minutes 60] [--base BASE.gguf --data FOLDER --minutes-per-cell 20 --tokens-per-cell 2e6] [--new-base FOLDER]
        [section.key=value ...] [--json]
    .venv/bin/python tools/prove.py --out DIR --list

The cells are in tools/studies.py: STUDY/VARIANT, each run in DIR/STUDY/VARIANT/seed-N. --cells chooses by patterns; `size-4` is
all of a study. --workers runs that many cells at a time, each in a process of its own with one thread. When --minutes are over,
nothing new begins and what is in progress stops after its update: the same command goes on. --minutes 0 only reads what is there.

    size-N      teams of N agents, each adds a column, equal episodes per stage: TeamTR with and without reuse, naive, joint, ...
    coupled-D   four blind agents that must differ, radius D: where stale episodes cost, and where they do not
    collapse    a learning rate that is far too large, with and without a trust region
    rates       initial learning rates over a 30-fold range;  ratios: units of the ratio by clip range
    ablations   the rows of tab:ablation;  objectives: sequential training with PPO's, GRPO's and DAPO's
    oracle      every candidate read again on 768 other episodes
    upgrade     one agent replaced, and with --new-base the whole team moved: aligned, from scratch, and left alone
    protocol    the rows of tab:pnp-ablation
    gsm8k       needs --base and --data: equal minutes and equal tokens, against TRL's GRPO; gsm8k-oracle: as oracle, there, with
                those of a stage's start

DIR/proof.json holds every table, DIR/STUDY.svg a study's curves, DIR/sizes.svg the accuracy by team size. Tables are those of
tools/compare.py: means over seeds with 95% intervals, and differences from the first variant of the study, seed by seed (gsm8k:
also item by item). A larger embedded base for --new-base: python tools/make_nano_base.py --out FOLDER --layers 6 --grow
teamtr_lora/base/nano --steps 1500 --batch 16 --learning-rate 5e-4
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from budgets import learning_curves, paired_by_item
from cells import RunRows, Variant, add_options, exit_status, half_width, in_words, numbers, run_cells, summary, table, work_on
from curves import Point, drawn
from exponents import fit_exponent
from studies import ITEMS, studies

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, write_atomic
from teamtr_lora.runs.metrics import has_rows, read_rows

FITTED = ("delta_stale", "paired", "d_occ", "coupled", "stability")  # measures whose growth with the team is fitted


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--cells", default="*", metavar="PATTERN,...", help="STUDY or STUDY/VARIANT, with * and ?")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2, 3, 4])
    parser.add_argument("--list", action="store_true", help="print the chosen cells and end")
    parser.add_argument("--base", type=Path, metavar="FILE", help="a real base, for gsm8k")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="with train.jsonl.gz and test.jsonl.gz, for gsm8k")
    parser.add_argument("--new-base", type=Path, metavar="FOLDER", help="the base that `upgrade` moves a team to")
    parser.add_argument("--minutes-per-cell", type=float, default=20.0, help="of training in a cell of gsm8k")
    parser.add_argument("--tokens-per-cell", type=float, default=2e6, help="sampled by a cell of gsm8k")
    add_options(parser)
    args = parser.parse_intermixed_args(words)
    try:
        chosen = choose(studies(args), args.cells)
    except UserError as error:
        print(f"prove: {error}", file=sys.stderr)
        return 2
    every = [variant for own in chosen.values() for variant in own]
    if args.only:
        return work_on(args.only, every, args)
    if args.list:
        print("\n".join(variant.name for variant in every))
        return 0
    # seed by seed, so that what is there after a while compares all variants
    cells = run_cells([(variant, seed) for seed in args.seeds for variant in every], args, [__file__, *words])
    report = {study: summary(own, [cell for cell in cells if cell.variant in names(own)]) for study, own in chosen.items()}
    for study, own in chosen.items():
        timed = curves_by_minute(own, args.seeds, args.out)
        found_curves, along = (timed, "minutes") if timed else (curves(own, args.seeds, args.out), "stage")
        write_atomic(args.out / f"{study}.svg", drawn(study, found_curves, along).encode())
    if sizes := by_size(report):
        write_atomic(args.out / "sizes.svg", drawn("accuracy at the end, by team size", sizes, "agents").encode())
    found = {"studies": report, "exponents": exponents(report), "by_item": by_item(chosen, args)}
    write_atomic(args.out / "proof.json", dump_json(found))
    print(json.dumps(found, indent=2) if args.json else shown(found))
    return max(exit_status(study) for study in report.values())


def choose(every: dict[str, list[Variant]], patterns: str) -> dict[str, list[Variant]]:
    """The studies with the variants that a pattern names; one that names nothing is a mistake."""
    asked = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in asked:
        if not any(_matches(v.name, [pattern]) for own in every.values() for v in own):
            raise UserError(
                f"--cells {pattern}: no such cell; the studies are {', '.join(every)} (gsm8k needs --base and --data)"
            )
    found = {study: [variant for variant in own if _matches(variant.name, asked)] for study, own in every.items()}
    return {study: own for study, own in found.items() if own}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) or fnmatch(name.split("/")[0], pattern) for pattern in patterns)


def names(variants: Sequence[Variant]) -> set[str]:
    return {variant.name for variant in variants}


def curves(variants: Sequence[Variant], seeds: Sequence[int], out: Path) -> dict[str, list[Point]]:
    """Of each variant the mean accuracy over seeds by stage, as far as every seed that has begun has come."""
    found: dict[str, list[Point]] = {}
    for variant in variants:
        folders = [out / variant.name / f"seed-{seed}" for seed in seeds]
        runs = [next((run for run in (f, f / "run", f / "swapped") if has_rows(run)), None) for f in folders]
        rows = [RunRows(read_rows(run)) for run in runs if run is not None]
        by_stage = [{row.stage: row.evaluation["avg_at_k"] for row in own.stages if row.evaluation} for own in rows]
        for stage in sorted(set.intersection(*map(set, by_stage))) if by_stage else ():
            values = [own[stage] for own in by_stage]
            found.setdefault(variant.name.split("/")[1], []).append(
                Point(stage, sum(values) / len(values), half_width(values) or 0.0)
            )
    return found


def curves_by_minute(variants: Sequence[Variant], seeds: Sequence[int], out: Path) -> dict[str, list[Point]]:
    """Of each variant whose budget is in minutes the mean accuracy over seeds at parts of them."""
    found: dict[str, list[Point]] = {}
    for variant in variants:
        for moments in learning_curves([out / variant.name / f"seed-{seed}" for seed in seeds]).values():
            minutes, values = zip(*moments, strict=True)
            point = Point(sum(minutes) / len(minutes), sum(values) / len(values), half_width(values) or 0.0)
            found.setdefault(variant.name.split("/")[1], []).append(point)
    return found


def by_size(report: dict[str, Any]) -> dict[str, list[Point]]:
    """Of each method the accuracy after training by team size."""
    found: dict[str, list[Point]] = {}
    for size in ITEMS:
        for name, variant in report.get(f"size-{size}", {"variants": {}})["variants"].items():
            after = variant["measures"].get("after")
            if after is not None:
                found.setdefault(name.split("/")[1], []).append(Point(size, after["mean"], after["half_width"] or 0.0))
    return found


def exponents(report: dict[str, Any]) -> dict[str, Any]:
    """How measures grow with the team's size, by method, least squares in log-log with a bootstrap over seeds; None where a mean
    is not positive, or a size or a seed is missing."""
    sizes = [size for size in ITEMS if f"size-{size}" in report]
    methods = [name.split("/")[1] for name in report[f"size-{sizes[0]}"]["variants"]] if sizes else []
    found: dict[str, Any] = {}
    for method in methods:
        own = [report[f"size-{size}"]["variants"].get(f"size-{size}/{method}", {"measures": {}})["measures"] for size in sizes]
        for measure in FITTED:
            by_size = [measures.get(measure, {"by_seed": []})["by_seed"] for measures in own]
            seeds = {len(values) for values in by_size}
            complete = len(sizes) > 1 and len(seeds) == 1 and seeds != {0} and all(None not in values for values in by_size)
            try:
                fit = asdict(fit_exponent(sizes, list(zip(*by_size, strict=True)))) if complete else None
            except ValueError:
                fit = None
            found.setdefault(method, {})[measure] = fit
    return found


def by_item(chosen: dict[str, list[Variant]], args: argparse.Namespace) -> dict[str, Any]:
    """Of the study with a budget: every variant minus the first, paired by item."""
    folders = lambda variant: [args.out / variant.name / f"seed-{seed}" for seed in args.seeds]  # noqa: E731
    own = chosen.get("gsm8k", [])
    return {other.name: paired_by_item(folders(own[0]), folders(other)) for other in own[1:]}


def shown(found: dict[str, Any]) -> str:
    parts = [f"== {study}\n{table(report)}" for study, report in found["studies"].items()]
    for method, by_measure in found["exponents"].items():
        words = [f"{measure} {fit['exponent']:.2f}" if fit else f"{measure} -" for measure, fit in by_measure.items()]
        parts.append(f"exponents over n, {method}: {', '.join(words)}")
    for name, points in found["by_item"].items():
        words = [f"{point} {in_words(test)}" for point, test in points.items()]
        parts.append(f"{name} less the first, item by item: {', '.join(words) or '-'}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
