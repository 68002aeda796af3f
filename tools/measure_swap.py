"""Measures what a swap costs, over seeds: trains a team, replaces one agent directly and aligned, and trains on.

    .venv/bin/python tools/measure_swap.py --out DIR [--recipe recipes/quickstart.yaml] [--seeds 0,1,2] [--agent solver]
        [--with fresh:rank=32,targets=all-linear | --to BASE] [--items 512] [--more-stages 2] [--control] [--scratch]
        [section.key=value ...] [--json]

DIR/seed-N/team is the trained team, DIR/seed-N/swapped a copy of it whose agent is swapped and which then trains on. What is
there already is not done again, so the same command goes on after an interruption; DIR/arguments.json says with what arguments
it was made, and others are refused. DIR/swap.json holds everything.

What must hold: Stage-0 reaches its radius on the held-out half; the aligned swap loses at most a quarter of the accuracy that the
direct one loses; training that goes on reaches at least the accuracy the team had, within noise (two standard errors). With
--control a copy without a swap (DIR/seed-N/control) trains on as long: what a team at its plateau loses by training alone. With
--scratch the same agents begin untrained (DIR/seed-N/scratch) and train for the same --more-stages: what the swap saved. With
--to the whole team moves to another base (`rebase`), where its adapters are aligned with the old ones.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cells

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import dump_json, sha256, write_atomic
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.runs.metrics import read_rows
from teamtr_lora.runs.stored_run import load_run_recipe, read_run
from teamtr_lora.swap.places import find_place
from teamtr_lora.swap.rebase import rebased
from teamtr_lora.swap.replace import swapped
from teamtr_lora.swap.swap_report import RebaseOptions, SwapOptions

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--seeds", type=cells.numbers, default=[0, 1, 2])
    parser.add_argument("--agent", default="solver")
    parser.add_argument("--with", dest="spec", default="fresh:rank=32,targets=all-linear")
    parser.add_argument("--to", metavar="BASE", help="move the whole team to this base instead of swapping one agent")
    parser.add_argument("--items", type=int, default=512, help="held-out items of the swap shock")
    parser.add_argument("--more-stages", type=int, default=2, help="stages trained after the swap")
    parser.add_argument("--control", action="store_true", help="also train on without a swap")
    parser.add_argument("--scratch", action="store_true", help="also train the new agents from nothing, for as many stages")
    parser.add_argument("--json", action="store_true", help="print DIR/swap.json instead of the table")
    args = parser.parse_intermixed_args(arguments)
    try:
        if not recipe_of(args, args.seeds[0]).swap.stage0:
            raise UserError("swap.stage0 = false: what is measured here is what Stage-0 saves; leave it true")
        same_arguments(args)
        seeds = {str(seed): measure(args, seed) for seed in args.seeds}
    except UserError as error:
        print(f"measure_swap: {error}", file=sys.stderr)
        return 2
    said = {"agent": "the whole team" if args.to else args.agent, "with": args.to or args.spec}
    report = said | {"seeds": seeds, "verdicts": verdicts(list(seeds.values()))}
    write_atomic(args.out / "swap.json", dump_json(report))
    print(json.dumps(report, indent=2) if args.json else table(report))
    return 0 if all(report["verdicts"].values()) else 1


def recipe_of(args: argparse.Namespace, seed: int) -> Recipe:
    return load_recipe(args.recipe, [*args.overrides, f"seed={seed}", f"output_dir={args.out / f'seed-{seed}' / 'team'}"])


def measure(args: argparse.Namespace, seed: int, until: float = math.inf) -> dict[str, Any]:
    """One seed, as far as it is not done; cells.TimeUpError where it is not by the Unix time `until`."""
    folder = args.out / f"seed-{seed}"
    team, copy, kept = folder / "team", folder / "swapped", folder / "swap-report.json"
    recipe = recipe_of(args, seed)
    stages = recipe.training.stages
    trained(recipe, seed, f"training {stages} stages", until)
    if not kept.exists():
        cells.in_time(until)
        say(seed, f"moving to {args.to}" if args.to else f"swapping {args.agent}")
        write_atomic(kept, dump_json(replaced(args, team, copy)))
    more = f"training.stages={args.more_stages if args.to else stages + args.more_stages}"  # a moved team counts anew
    goes_on = {"swapped": load_run_recipe(copy, [more])}
    if args.control:
        goes_on["control"] = load_run_recipe(copied(team, folder / "control"), [f"training.stages={stages + args.more_stages}"])
    if args.scratch:
        new = read_run(copy).recipe
        training = new.training.model_copy(update={"stages": args.more_stages})
        anew = new.model_copy(update={"output_dir": str(folder / "scratch"), "training": training})
        goes_on["scratch"] = anew.placed_in(new.folder)
    for name, longer in goes_on.items():
        trained(longer, seed, f"training {args.more_stages} more stages: {name}", until)
    measured = summary(json.loads(kept.read_text()), evaluation(team), evaluation(copy))
    return measured | {name: evaluation(folder / name)["avg_at_k"] for name in goes_on if name != "swapped"}


def trained(recipe: Recipe, seed: int, what: str, until: float) -> None:
    run = Path(str(recipe.output_dir))
    if not cells.finished(run, recipe):
        cells.in_time(until)
        say(seed, what)
        cells.train(recipe, until)
        if not cells.finished(run, recipe):
            raise cells.TimeUpError


def replaced(args: argparse.Namespace, team: Path, copy: Path) -> dict[str, Any]:
    """The report of the swap of one agent in a copy, or of the whole team's move into a run of its own."""
    if args.to:
        with rebased(find_place(team), RebaseOptions(args.to, out=copy, items=args.items)) as moved:
            report = moved.as_dict()
        alignments = report["alignments"].values()  # by agent: what they have in common is the worst of them
        return report | {"alignment": max(alignments, key=lambda alignment: alignment["after"]["mean"])}
    options = SwapOptions(args.agent, args.spec, items=args.items)
    with swapped(find_place(copied(team, copy)), options, registry=Registry(ROOT / "adapters")) as one:
        return one.as_dict()


def same_arguments(args: argparse.Namespace) -> None:
    """Refuses a folder that was made with others, before anything is trained."""
    kept = args.out / "arguments.json"
    now = {name: getattr(args, name) for name in ("agent", "spec", "to", "items", "more_stages")}
    now |= {"recipe_sha256": sha256(args.recipe.read_bytes()), "overrides": args.overrides}
    before = json.loads(kept.read_text()) if kept.exists() else now
    if other := [f"{name} = {before.get(name)!r}, not {value!r}" for name, value in now.items() if before.get(name) != value]:
        raise UserError(f"{args.out}: was measured with {'; '.join(other)}: choose another --out")
    write_atomic(kept, dump_json(now))


def copied(team: Path, copy: Path) -> Path:
    if not copy.exists():
        unfinished = copy.with_name(".copying")
        shutil.copytree(team, unfinished, dirs_exist_ok=True)
        unfinished.rename(copy)
    return copy


def evaluation(run: Path) -> dict[str, Any]:
    return cells.RunRows(read_rows(run)).evaluations[-1]


def summary(report: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was not measured, as nothing is aligned in a direct swap, is None."""
    alignment = report["alignment"] or {}
    noise = math.hypot(before["standard_error"] or 0, after["standard_error"] or 0)
    return {
        "kl_before": alignment.get("before"),
        "kl_after": alignment.get("after"),
        "delta_align": alignment.get("delta"),
        "reached": alignment.get("reached"),
        "steps": alignment.get("steps"),
        "accuracy": {name: report[name] and report[name]["accuracy"] for name in ("before", "direct", "aligned")},
        "lost_direct": report["shock_direct"],
        "lost_aligned": report["shock_aligned"],
        "trained": before["avg_at_k"],
        "trained_on": after["avg_at_k"],
        "trained_on_noise": noise,
        "seconds": report["seconds"],
    }


def verdicts(seeds: list[dict[str, Any]]) -> dict[str, bool]:
    direct = statistics.fmean(s["lost_direct"]["lost"] for s in seeds)
    aligned = statistics.fmean(s["lost_aligned"]["lost"] for s in seeds)
    gained = statistics.fmean(s["trained_on"] - s["trained"] for s in seeds)
    noise = math.sqrt(sum(s["trained_on_noise"] ** 2 for s in seeds)) / len(seeds)
    return {
        "stage0_reaches_its_radius": all(s["reached"] for s in seeds),
        "direct_loses": direct > 0,
        "aligned_loses_at_most_a_quarter": aligned <= direct / 4,
        "training_on_reaches_what_it_had": gained >= -2 * noise,
    }


def table(report: dict[str, Any]) -> str:
    lines = [f"{report['agent']} replaced by {report['with']}"]
    lines.append(
        "seed  KL before       KL after        of     steps  before  direct  aligned  lost direct      lost aligned    trained on"
    )
    for seed, s in report["seeds"].items():
        kl = [f"{s[key]['mean']:.4f}+-{s[key]['standard_error'] or 0:.4f}" for key in ("kl_before", "kl_after")]
        lost = [f"{s[key]['lost']:+.4f}+-{s[key]['standard_error'] or 0:.4f}" for key in ("lost_direct", "lost_aligned")]
        accuracy = "  ".join(f"{s['accuracy'][name]:.4f}" for name in ("before", "direct", "aligned"))
        lines.append(
            f"{seed:<4}  {kl[0]:<14}  {kl[1]:<14}  {s['delta_align']:<5g}  {s['steps']:<5}  {accuracy}   {lost[0]}  {lost[1]}  "
            f"{s['trained']:.4f} -> {s['trained_on']:.4f} +-{s['trained_on_noise']:.4f}"
            + (f", {s['control']:.4f} without a swap" if "control" in s else "")
            + (f", {s['scratch']:.4f} from scratch" if "scratch" in s else "")
        )
    return "\n".join([*lines, *(f"{name.replace('_', ' ')}: {'yes' if ok else 'NO'}" for name, ok in report["verdicts"].items())])


def say(seed: int, what: str) -> None:
    print(f"seed {seed}: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
