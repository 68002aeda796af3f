"""baseline: other people's training of one agent, beside a team's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from teamtr_lora import __version__
from teamtr_lora.baselines.algorithms import WHAT_THEY_ARE
from teamtr_lora.cli.arguments import RUNS_CODE, add_recipe, recipe_words, run_name, show
from teamtr_lora.cli.launch import add_gpus, on_every_gpu
from teamtr_lora.common.consoles import Console


def add_commands(command: Any) -> None:
    text = "Train one agent by TRL's GRPOTrainer on the budget of a recipe's team."
    baseline = command(
        "baseline", _baseline, text, f"{WHAT_THEY_ARE.rstrip()}\n\n{RUNS_CODE}", json="print the JSON object of train at the end"
    )
    baseline.add_argument("algorithm", choices=["grpo", "dapo", "ppo"], help="what trains it")
    add_recipe(baseline, "the recipe of the team to compare with")
    baseline.add_argument("--agent", metavar="NAME", help="whose adapter settings it has (default: the first agent's)")
    baseline.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where the run lives (default: runs/RECIPE-ALGORITHM, numbered if taken)"
    )
    baseline.add_argument("--resume", action="store_true", help="go on from the last update of the run directory")
    add_gpus(baseline)


def _baseline(args: argparse.Namespace) -> int | None:
    from teamtr_lora.recipe import load_recipe

    recipes, overrides = recipe_words(args)
    recipe = load_recipe(recipes, overrides)
    if args.run_dir is not None:
        recipe = recipe.model_copy(update={"output_dir": str(args.run_dir)}).placed_in(recipe.folder)
    if (ended := on_every_gpu(args, recipe.base.device, recipe.rollout.gpus_each, helping=True)) is not None:
        return ended
    from teamtr_lora.baselines.trl_baseline import train_baseline
    from teamtr_lora.cli.text.summary import print_next_steps
    from teamtr_lora.tasks.table import OF_THE_USER
    from teamtr_lora.training.live_view import LiveView

    out = Console(stderr=args.json)
    out.print(f"teamtr-lora {__version__}: {args.algorithm} by TRL on {' '.join(recipes)}", markup=False)
    view = LiveView(out)
    try:
        name = f"{run_name(recipes)}-{args.algorithm}"
        summary = train_baseline(recipe, args.algorithm, agent=args.agent, resume=args.resume, name=name, callbacks=[view])
    finally:
        view.close()
    test_items = lambda: recipe.task.build(recipe.folder).items("test")  # noqa: E731
    own = recipe.task.name in OF_THE_USER
    show(args, summary, lambda summary: print_next_steps(out, summary, test_items()[0].prompt, own_task=own))
    return None
