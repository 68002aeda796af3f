"""The command line: parse, call, print; no logic. Exit codes: 0 ok, 2 user error in one line, 1 crash."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from teamtr_lora import __version__
from teamtr_lora.errors import UserError

EXAMPLES = """examples:
  teamtr-lora train recipes/quickstart.yaml
  teamtr-lora train recipes/quickstart.yaml training.stages=4 trust_region.delta=0.02 --run-dir runs/try
  teamtr-lora train recipes/quickstart.yaml --run-dir runs/try --resume
  teamtr-lora eval runs/quickstart --k 4
  teamtr-lora ask runs/quickstart "347+285"
  teamtr-lora serve runs/quickstart --port 8000
"""
OVERRIDES = "section.key=value, for example training.stages=4 or team.agents.planner.lora.rank=16"


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    # argparse takes positionals in one run only: overrides that follow an option are collected here
    if any(word.startswith("-") for word in rest) or (rest and not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    try:
        return int(args.run(args) or 0)
    except UserError as error:
        if args.debug:
            traceback.print_exc()
        # only a recipe's list of problems has several lines
        text = str(error) if hasattr(error, "problems") else " ".join(str(error).split())
        print(f"teamtr-lora: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("teamtr-lora: interrupted; what was saved is intact, train continues with --resume", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left: nothing more to say to it
        return 0
    except Exception as error:
        if args.debug:
            raise
        print(f"teamtr-lora: crashed: {type(error).__name__}: {error}; run again with --debug for the traceback", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    parser = argparse.ArgumentParser(
        prog="teamtr-lora",
        description="Trains teams of LLM agents, each a LoRA adapter on one frozen base, by TeamTR.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"teamtr-lora {__version__}")
    parser.add_argument("--debug", action="store_true", default=False, help="show the traceback of an error")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, run: Any, text: str, epilog: str = "") -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            parents=[common],
            help=text,
            description=text,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        return added

    _add_recipe_commands(command)
    _add_team_commands(command)
    _add_task_commands(command)
    return parser


def _add_recipe_commands(command: Any) -> None:
    train = command("train", _train, "Train the team of a recipe; every update is checkpointed.", EXAMPLES)
    train.add_argument("recipe", metavar="RECIPE", help="a recipe file")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDES)
    train.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where the run lives (default: runs/RECIPE, numbered if taken)"
    )
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run directory")
    train.add_argument("--json", action="store_true", help="print one JSON object at the end; progress goes to stderr")

    validate = command("validate", _validate, "Print the resolved recipe, or every problem in it at once.")
    validate.add_argument("recipe", nargs="?", metavar="RECIPE", help="a recipe file")
    validate.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDES)
    validate.add_argument("--schema", action="store_true", help="print the JSON schema of recipes instead")
    validate.add_argument("--json", action="store_true", help="print the resolved recipe as JSON")

    plan = command("plan", _plan, "What a recipe will cost, without loading weights: episodes, tokens, updates, memory.")
    plan.add_argument("recipe", metavar="RECIPE", help="a recipe file")
    plan.add_argument("overrides", nargs="*", metavar="section.key=value", help=OVERRIDES)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")

    init = command("init", _init, "Write a commented recipe and a reward function to start from.")
    init.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")


def _add_team_commands(command: Any) -> None:
    evaluate = command("eval", _eval, "Measure a team on held-out items: avg@k, pass@k, agents, coordination.")
    evaluate.add_argument("team", type=Path, metavar="RUN_OR_TEAM", help="the run directory that train printed")
    evaluate.add_argument("--split", choices=["train", "test"], default="test", help="which items (default: test)")
    evaluate.add_argument("--k", type=_positive, metavar="K", help="samples per item (default: the recipe's)")
    evaluate.add_argument("--temperature", type=_temperature, metavar="T", help="0 is greedy (default: the recipe's)")
    evaluate.add_argument("--limit", type=_positive, metavar="N", help="items (default: the recipe's)")
    evaluate.add_argument("--engine", choices=["transformers", "vllm"], help="what samples (default: the recipe's)")
    evaluate.add_argument("--json", action="store_true", help="print the same fields as JSON")

    ask = command("ask", _ask, "Play one episode with your own question and print the transcript.")
    ask.add_argument("team", type=Path, metavar="RUN_OR_TEAM", help="the run directory that train printed")
    ask.add_argument("question", help="what to ask the team")
    ask.add_argument("--temperature", type=_temperature, default=None, metavar="T", help="0 is greedy (default: the recipe's)")
    ask.add_argument("--seed", type=int, default=0, help="another seed, another answer (default: 0)")
    ask.add_argument("--json", action="store_true", help="print the transcript as JSON")

    certify = command("certify", _certify, "What the trust region certifies about each stage of a run, beside what was measured.")
    certify.add_argument("team", type=Path, metavar="RUN", help="the run directory that train printed")
    certify.add_argument("--json", action="store_true", help="print every term as JSON")

    serve = command("serve", _serve, "Serve a team by vLLM's OpenAI API: the base and every agent, each a model by its name.")
    serve.add_argument(
        "team",
        type=Path,
        metavar="RUN_OR_TEAM",
        help="the run directory that train printed (with --accept-adapters a recipe will do)",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine only)")
    serve.add_argument("--port", type=_port, default=8000, help="port to listen at (default: 8000)")
    serve.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    serve.add_argument("--memory-share", type=_share, default=0.9, metavar="S", help="share of the GPU's memory (default: 0.9)")
    serve.add_argument(
        "--accept-adapters", action="store_true", help="let training runs with rollout.engine=vllm_server put adapters here"
    )
    serve.add_argument("--api-key-variable", metavar="NAME", help="environment variable that holds the API key to ask for")


def _add_task_commands(command: Any) -> None:
    settings = "settings of the task, for example houses=4"
    tasks = command("tasks", _tasks, "List the tasks, show one's settings, or print a few of its items.")
    tasks.add_argument("action", choices=["list", "show", "sample"], help="what to do")
    tasks.add_argument("task", nargs="?", metavar="TASK", help="a task's name (show, sample)")
    tasks.add_argument("overrides", nargs="*", metavar="key=value", help=settings)
    tasks.add_argument("-n", type=_positive, default=3, metavar="N", help="items to print (default: 3)")
    tasks.add_argument("--split", choices=["train", "test"], default="train", help="which items (default: train)")
    tasks.add_argument("--json", action="store_true", help="print JSON; items one a line, as score --items takes them")

    score = command("score", _score, "Score a file of responses with a task's verifier, as training does.")
    score.add_argument("task", metavar="TASK", help="a task's name; teamtr-lora tasks list shows them")
    score.add_argument("overrides", nargs="*", metavar="key=value", help=settings)
    score.add_argument("--items", type=Path, required=True, metavar="FILE", help="the items, in the benchmark's own format")
    score.add_argument(
        "--responses", type=Path, required=True, metavar="FILE", help='rows {"id", "response"}, or "messages": the turns in order'
    )
    score.add_argument("--json", action="store_true", help="print {task, n, mean, standard_error, items} as JSON")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature; use 0 or a positive number")
    return value


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use a number from 1 to 65535")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; use a number between 0 and 1")
    return value


def _train(args: argparse.Namespace) -> None:
    from teamtr_lora.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    if args.run_dir is not None:
        recipe = recipe.model_copy(update={"output_dir": str(args.run_dir)}).placed_in(recipe.folder)
    from rich.console import Console

    from teamtr_lora.report.live import LiveView
    from teamtr_lora.report.summary import print_next_steps
    from teamtr_lora.training.trainer import TeamTRTrainer

    console = Console(stderr=args.json, highlight=False, soft_wrap=True)
    console.print(f"teamtr-lora {__version__}: {args.recipe}")
    view = LiveView(console)
    trainer = TeamTRTrainer.from_recipe(recipe, callbacks=[view])
    try:
        summary = trainer.train(resume=args.resume, name=Path(args.recipe).stem)
    finally:
        view.close()
        trainer.close()
    if args.json:
        _print_json(summary.as_dict())
    else:
        print_next_steps(console, summary, trainer.task.items("test")[0].prompt)


def _validate(args: argparse.Namespace) -> None:
    from teamtr_lora.recipe import dump_recipe, load_recipe, recipe_schema

    if args.schema:
        _print_json(recipe_schema())
        return
    if args.recipe is None:
        raise UserError("validate needs a RECIPE (or --schema)")
    recipe = load_recipe(args.recipe, args.overrides)
    if args.json:
        _print_json(recipe.model_dump(mode="json"))
        return
    print(dump_recipe(recipe), end="")


def _plan(args: argparse.Namespace) -> None:
    from teamtr_lora.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    from teamtr_lora.training.plan import make_plan

    plan = make_plan(recipe)
    if args.json:
        _print_json(plan.as_dict())
        return
    from teamtr_lora.report.summary import print_plan

    print_plan(plan)


def _init(args: argparse.Namespace) -> None:
    from teamtr_lora.recipe.template import write_starter

    for path in write_starter(args.folder):
        print(f"wrote {path}")
    print(f"try: teamtr-lora train {args.folder / 'recipe.yaml'}")


def _eval(args: argparse.Namespace) -> None:
    from teamtr_lora.evaluation.commands import evaluate_team
    from teamtr_lora.report.summary import print_evaluation, progress_bar

    with progress_bar("evaluating") as progress:
        evaluation = evaluate_team(
            args.team,
            split=args.split,
            k=args.k,
            temperature=args.temperature,
            limit=args.limit,
            engine=args.engine,
            progress=progress,
        )
    if args.json:
        _print_json(evaluation.as_dict())
        return
    print_evaluation(evaluation)


def _ask(args: argparse.Namespace) -> None:
    from teamtr_lora.evaluation.commands import ask_team
    from teamtr_lora.report.summary import print_transcript

    episode = ask_team(args.team, args.question, temperature=args.temperature, seed=args.seed)
    if args.json:
        from teamtr_lora.rollout.records import episode_record

        _print_json(episode_record(episode))
        return
    print_transcript(episode)


def _serve(args: argparse.Namespace) -> None:
    from teamtr_lora.rollout.serve import ServeOptions, serve

    serve(
        args.team,
        ServeOptions(
            host=args.host,
            port=args.port,
            device=args.device,
            memory_share=args.memory_share,
            accept_adapters=args.accept_adapters,
            api_key_variable=args.api_key_variable,
        ),
    )


def _certify(args: argparse.Namespace) -> None:
    from teamtr_lora.training.certify import certify_run

    certificates = certify_run(args.team)
    if args.json:
        _print_json(certificates.as_dict())
        return
    from teamtr_lora.report.certificates import print_certificates

    print_certificates(certificates)


def _tasks(args: argparse.Namespace) -> None:
    from teamtr_lora.report import tasks as report

    if args.action == "list":
        _print_json(report.task_rows()) if args.json else report.print_tasks()
        return
    if args.task is None:
        raise UserError(f"tasks {args.action} needs a TASK; teamtr-lora tasks list shows them")
    from teamtr_lora.tasks.score import sample_items, task_section

    if args.action == "show":
        section = task_section(args.task, args.overrides, Path("items.jsonl"))
        _print_json(report.task_keys(type(section))) if args.json else report.print_task(args.task)
        return
    report.print_items(sample_items(args.task, args.overrides, args.split, args.n), args.json)


def _score(args: argparse.Namespace) -> None:
    from teamtr_lora.report.tasks import print_scores
    from teamtr_lora.tasks.score import score_file

    scores = score_file(args.task, args.items, args.responses, args.overrides)
    _print_json(scores.as_dict()) if args.json else print_scores(scores)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(main())
