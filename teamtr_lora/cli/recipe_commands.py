"""train, validate, keys, plan, init: what has to do with recipes."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from teamtr_lora import __version__
from teamtr_lora.cli.arguments import (
    RUNS_CODE,
    RUNS_MORE_TO_CALIBRATE,
    add_recipe,
    add_trust,
    positive,
    print_json,
    recipe_words,
    run_name,
    show,
)
from teamtr_lora.cli.launch import add_gpus, on_every_gpu, processes_on
from teamtr_lora.common.consoles import Console, say
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.program import program

_AT_THE_END = "print one JSON object at the end; progress goes to stderr"


def add_commands(command: Any) -> None:
    text = "Train the team of a recipe; every update is checkpointed."
    train = command("train", _train, text, RUNS_CODE, json=_AT_THE_END)
    add_recipe(train, "a recipe file, or a run directory to go on with (with --resume)")
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="where the run lives (default: runs/RECIPE, or a number more)")
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run directory")
    text = "begin a new run with the trained adapters of this one; all but base, agents' names and LoRA settings may differ"
    train.add_argument("--from", dest="team", type=Path, metavar="RUN_OR_TEAM", help=text)
    add_gpus(train)
    add_trust(train)

    text = "Print the resolved recipe, or every problem in it at once."
    validate = command("validate", _validate, text, json="print the resolved recipe as JSON")
    add_recipe(validate, optional=True)
    validate.add_argument("--schema", action="store_true", help="print the JSON schema of recipes instead")

    text = "Every key a recipe may have: its default, what it takes, what it means."
    keys = command("keys", _keys, text, json="print the keys as JSON")
    keys.add_argument("word", nargs="?", default="", metavar="WORD", help="only a section, a key, or keys this word occurs in")

    text = "What a recipe will cost, without loading weights: episodes, tokens, updates, memory; time, where speeds are known."
    plan = command("plan", _plan, text, RUNS_MORE_TO_CALIBRATE, json="print the plan as JSON")
    add_recipe(plan)
    plan.add_argument("--gpus", type=positive, default=1, metavar="N", help="GPUs of each host (default: 1)")
    plan.add_argument("--nodes", type=positive, default=1, metavar="M", help="hosts, with as many GPUs each (default: 1)")
    speeds = plan.add_mutually_exclusive_group()
    speeds.add_argument("--calibrate", action="store_true", help="measure this machine's speeds by a short run of the recipe")
    speeds.add_argument("--from", type=Path, dest="earlier", metavar="RUN", help="take the speeds of an earlier run")

    init = command("init", _init, "Write a commented recipe, a small dataset and a reward function to start from.")
    init.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")


def _train(args: argparse.Namespace) -> int | None:
    from teamtr_lora.recipe import load_recipe
    from teamtr_lora.registry.programs import recipe_to_go_on_with

    recipes, overrides = recipe_words(args)
    goes_on = len(recipes) == 1 and Path(args.recipe).is_dir()
    recipe = recipe_to_go_on_with(Path(args.recipe), overrides) if goes_on else load_recipe(recipes, overrides)
    if args.run_dir is not None:
        recipe = recipe.model_copy(update={"output_dir": str(args.run_dir)}).placed_in(recipe.folder)
    from teamtr_lora.training.cpu_processes import cpu_processes

    processes = partial(cpu_processes, recipe, run_name(recipes), resume=args.resume)
    if (ended := on_every_gpu(args, recipe.base.device, recipe.rollout.gpus_each, on_cpu=processes)) is not None:
        return ended
    from teamtr_lora.cli.text.summary import print_next_steps
    from teamtr_lora.tasks.table import OF_THE_USER
    from teamtr_lora.training.live_view import LiveView
    from teamtr_lora.training.trainer import TeamTRTrainer

    out = Console(stderr=args.json)
    start = "" if args.team is None else f" from {args.team}"
    out.print(f"teamtr-lora {__version__}: {' '.join(recipes)}{start}", markup=False)
    if args.resume and args.run_dir is not None and not args.run_dir.exists():  # no run yet, or killed before it wrote anything
        out.print(f"--resume: there is no run in {args.run_dir} yet; starting one", style="yellow", markup=False)
    trainer = TeamTRTrainer.from_recipe(recipe, callbacks=[LiveView(out)], team=args.team)
    try:
        summary = trainer.train(resume=args.resume, name=run_name(recipes))
    except KeyboardInterrupt as stop:
        begun = trainer.run is not None and trainer.run.run_dir.path.exists()
        where = shlex.quote(str(trainer.run.run_dir.path)) if trainer.run is not None else ""
        stop.add_note(f"go on with: {program()} train {where} --resume" if begun else "the run had not begun: start it again")
        raise
    finally:
        trainer.close()
    own = recipe.task.name in OF_THE_USER
    show(args, summary, lambda summary: print_next_steps(out, summary, trainer.task.items("test")[0].prompt, own_task=own))
    return None


def _validate(args: argparse.Namespace) -> None:
    from teamtr_lora.recipe import check_named, dump_recipe, load_recipe, recipe_schema

    if args.schema:
        print_json(recipe_schema())
        return
    if args.recipe is None:
        raise UserError("validate needs a RECIPE (or --schema); `keys` explains the keys")
    recipes, overrides = recipe_words(args)
    recipe = load_recipe(recipes, overrides)
    check_named(recipe, " + ".join(recipes))
    print_json(recipe.model_dump(mode="json")) if args.json else print(dump_recipe(recipe), end="")


def _keys(args: argparse.Namespace) -> None:
    from teamtr_lora.cli.text.keys import print_keys
    from teamtr_lora.recipe.reference import recipe_keys

    found = recipe_keys(args.word)
    print_json([asdict(key) for key in found]) if args.json else print_keys(found)


def _plan(args: argparse.Namespace) -> None:
    from teamtr_lora.recipe import check_named, load_recipe

    recipes, overrides = recipe_words(args)
    recipe = load_recipe(recipes, overrides)  # before the imports of torch: most mistakes show here
    check_named(recipe, " + ".join(recipes))
    processes = args.nodes * processes_on(args.gpus, recipe.rollout.gpus_each)
    from teamtr_lora.cli.text.summary import print_plan
    from teamtr_lora.study.expected_time import speeds_of, speeds_of_run
    from teamtr_lora.study.plan import make_plan

    speeds = speeds_of_run(args.earlier, recipe) if args.earlier else None
    if args.calibrate:
        from teamtr_lora.training.calibrate import short_run

        make_plan(recipe)  # what is wrong with the recipe shows before anything is run
        Console(stderr=True).print("calibrating: one short stage of the recipe, on this machine")
        short, rows = short_run(recipe)
        speeds = speeds_of(rows, short, "a short run on this machine")
    show(args, make_plan(recipe, speeds, processes=processes, nodes=args.nodes), print_plan)


def _init(args: argparse.Namespace) -> None:
    from teamtr_lora.recipe.template import write_starter

    for path in write_starter(args.folder):
        say(f"wrote {path}")
    recipe = shlex.quote(str(args.folder / "recipe.yaml"))
    say(
        f"\nnext: put your own rows into questions.jsonl and your own reward into rewards.py, or try them as they are:\n"
        f"  {program()} train {recipe}"
    )
