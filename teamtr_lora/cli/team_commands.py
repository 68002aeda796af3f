"""eval, ask, serve: what takes a trained team."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from teamtr_lora.cli.arguments import (
    RUNS_CODE,
    RUNS_ROUTER_ONLY,
    add_overrides,
    add_registry,
    add_trust,
    engine,
    options,
    port,
    positive,
    print_json,
    share,
    show,
    temperature,
    told_apart,
)
from teamtr_lora.cli.launch import add_gpus, on_every_gpu
from teamtr_lora.common.errors import UserError

_TEAM_OF = "where a team's bare name is looked up"
# what only means something with --baseline
_OF_BASELINES = ("agent", "tokens", "votes", "breadth", "depth", "beam")


def add_commands(command: Any) -> None:
    _add_eval(command)

    text = "Play one episode with your own question, without the replies of an environment, and print the transcript."
    ask = command("ask", _ask, text, RUNS_ROUTER_ONLY, json="print the transcript as JSON")
    ask.add_argument("team", type=Path, metavar="RUN_OR_TEAM", help="a run directory, or a team of the registry")
    ask.add_argument("question", help="what to ask the team, in quotes")
    ask.add_argument("--temperature", type=temperature, default=None, metavar="T", help="0 is greedy (default: the recipe's)")
    ask.add_argument("--seed", type=int, default=0, help="another seed, another answer (default: 0)")
    add_registry(ask, _TEAM_OF)

    text = "Serve a team by vLLM's OpenAI API: `team`, the base and every agent, each a model."
    serve = command("serve", _serve, text, RUNS_ROUTER_ONLY)
    serve.add_argument("team", type=Path, metavar="RUN_OR_TEAM", help="a run, a registry team; with --accept-adapters a recipe")
    add_registry(serve, _TEAM_OF)
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine only)")
    serve.add_argument("--port", type=port, default=8000, help="port to listen at (default: 8000)")
    serve.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    serve.add_argument("--memory-share", type=share, default=0.9, metavar="S", help="share of the GPU's memory (default: 0.9)")
    serve.add_argument(
        "--accept-adapters", action="store_true", help="let runs with rollout.engine=vllm_server put adapters here"
    )
    serve.add_argument("--api-key-variable", metavar="NAME", help="environment variable that holds the API key to ask for")


def _add_eval(command: Any) -> None:
    text = "Measure a team on held-out items: avg@k, pass@k, pass^k, maj@k, agents, coordination; interrupted, it goes on."
    evaluate = command("eval", _eval, text, RUNS_CODE, json="print the same fields as JSON")
    evaluate.add_argument(
        "team", type=Path, nargs="?", metavar="RUN_OR_TEAM", help="a run, a registry team, or a recipe (untrained)"
    )
    text = "recipe files, of which later ones win, and settings such as task.digits=4 or rollout.max_message_tokens=1024; of a "
    text += "trained team only the sections task, evaluation and rollout change, to measure it on other items"
    add_overrides(evaluate, "RECIPE|section.key=value", text)
    evaluate.add_argument("--split", choices=["train", "test"], default="test", help="which items (default: test)")
    evaluate.add_argument("--k", type=positive, metavar="K", help="samples per item (default: the recipe's, or the paper's)")
    evaluate.add_argument("--temperature", type=temperature, metavar="T", help="0 is greedy (default: the recipe's)")
    evaluate.add_argument("--limit", "--items", type=positive, metavar="N", help="items (default: the recipe's)")
    evaluate.add_argument("--engine", type=engine, metavar="NAME", help="what samples, as rollout.engine (default: the recipe's)")
    text = "folder of the results (default: one in RUN/evaluations; for a recipe or a registry team, in ./evaluations)"
    evaluate.add_argument("--out", type=Path, metavar="DIR", help=text)
    add_registry(evaluate, _TEAM_OF)
    add_gpus(evaluate)
    add_trust(evaluate)
    evaluate.add_argument("--reuse", action="store_true", help="read a finished evaluation instead of playing it again")
    evaluate.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar=("RUN_A", "RUN_B"),
        help="paired test of runs or evaluations; settings are for both",
    )
    group = evaluate.add_argument_group(
        "inference-time baselines, on the run's base and task", "The team plays the same items, and the two are compared."
    )
    group.add_argument(
        "--baseline", choices=["cot", "self_consistency", "tree_of_thoughts"], help="what answers, beside the team"
    )
    group.add_argument("--agent", metavar="NAME", help="with this agent's adapter (default: the base alone)")
    group.add_argument("--tokens", type=positive, metavar="N", help="most tokens per answer (default: a team episode's)")
    group.add_argument("--votes", type=positive, metavar="V", help="self_consistency: samples per answer (default: equal budget)")
    group.add_argument("--breadth", type=positive, metavar="N", help="tree_of_thoughts: steps per state (default: 3)")
    group.add_argument("--depth", type=positive, metavar="N", help="tree_of_thoughts: steps (default: 2)")
    group.add_argument("--beam", type=positive, metavar="N", help="tree_of_thoughts: states kept (default: 2)")


def _eval(args: argparse.Namespace) -> int | None:
    baseline = _baseline(args)
    from teamtr_lora.registry.stored import find_team

    team = args.team
    if args.compare and team is not None and "=" in str(team):  # a setting for both, which argparse takes for the team
        team, args.overrides = None, [str(team), *args.overrides]
    if (team is None) == (args.compare is None):
        raise UserError("eval takes one RUN_OR_TEAM, or --compare RUN_A RUN_B")
    more = told_apart(args.overrides)
    recipe = None if team is None else find_team(team, args.registry, recipes=True, more=more).recipe
    from teamtr_lora.cli.text.evaluation import print_comparison, print_evaluation
    from teamtr_lora.cli.text.summary import progress_bar
    from teamtr_lora.evaluation.commands import EvalOptions, beside_team, compare_runs, evaluate_team

    device, each = ("auto", 1) if recipe is None else (recipe.base.device, recipe.rollout.gpus_each)
    if (ended := on_every_gpu(args, device, each)) is not None:
        return ended
    asked = options(EvalOptions, args, baseline=baseline, more=more)
    with progress_bar("evaluating") as progress:
        if team is None:
            found = compare_runs(args.compare, asked, progress)
        else:
            result = evaluate_team(team, asked, progress)
            beside = beside_team(team, asked, result, progress) if baseline else None
    if team is None:
        show(args, found, print_comparison)
    elif args.json:
        print_json(result.as_dict() | ({"beside_team": asdict(beside)} if beside else {}))
    else:
        print_evaluation(result)
        if beside:
            print_comparison(beside)
    return None


def _baseline(args: argparse.Namespace) -> Any:
    given = {name: getattr(args, name) for name in _OF_BASELINES if getattr(args, name) is not None}
    if args.baseline is None:
        if given:
            raise UserError(f"--{next(iter(given))} needs --baseline (cot, self_consistency or tree_of_thoughts)")
        return None
    from teamtr_lora.evaluation.inference_baselines import BaselineOptions

    return BaselineOptions(args.baseline, **given)


def _ask(args: argparse.Namespace) -> None:
    from teamtr_lora.registry.stored import locate

    locate(args.team, args.registry, recipes=True)  # before the imports of torch: most mistakes show here
    from teamtr_lora.cli.text.summary import print_transcript
    from teamtr_lora.evaluation.commands import ask_team, transcript

    episode = ask_team(args.team, args.question, temperature=args.temperature, seed=args.seed, registry=args.registry)
    record = transcript(episode)
    print_json(record) if args.json else print_transcript(record)


def _serve(args: argparse.Namespace) -> None:
    from teamtr_lora.registry.stored import find_team
    from teamtr_lora.rollout.serve import ServedTeam, ServeOptions, serve

    stored = find_team(args.team, args.registry, scored=False, recipes=True)
    served = ServedTeam(
        source=args.team, recipe=stored.recipe, versions=stored.versions, adapters=stored.adapters if stored.versions else None
    )
    serve(served, options(ServeOptions, args))
