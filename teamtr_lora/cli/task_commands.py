"""tasks, score: what takes a task."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from teamtr_lora.cli.arguments import RUNS_ITEMS_ONLY, add_overrides, positive, print_json
from teamtr_lora.common.consoles import say
from teamtr_lora.common.errors import UserError


def add_commands(command: Any) -> None:
    settings = "settings of the task, for example houses=4"
    one_a_line = "print JSON; items one a line, as score --items takes them"
    as_json = "print {task, n, mean, standard_error, items} as JSON"
    text = "List the tasks, show one's settings, or print a few of its items."
    tasks = command("tasks", _tasks, text, RUNS_ITEMS_ONLY, json=one_a_line)
    tasks.add_argument("action", choices=["list", "show", "sample"], help="what to do")
    tasks.add_argument("task", nargs="?", metavar="TASK", help="a task's name (show, sample)")
    add_overrides(tasks, "key=value", settings)
    tasks.add_argument("-n", type=positive, default=3, metavar="N", help="items to print (default: 3)")
    tasks.add_argument("--split", choices=["train", "test"], default="train", help="which items (default: train)")

    score = command("score", _score, "Score a file of responses with a task's verifier, as training does.", json=as_json)
    score.add_argument("task", metavar="TASK", help="a task's name; teamtr-lora tasks list shows them")
    add_overrides(score, "key=value", settings)
    score.add_argument("--items", type=Path, required=True, metavar="FILE", help="the items, in the benchmark's own format")
    score.add_argument(
        "--responses", type=Path, required=True, metavar="FILE", help='rows {"id", "response"}, or "messages": the turns in order'
    )


def _tasks(args: argparse.Namespace) -> None:
    from teamtr_lora.cli.text import tasks as text

    if args.action == "list":
        if args.task is not None:
            raise UserError(f"tasks list shows all and takes no TASK; for one: tasks show {args.task}")
        print_json(text.task_rows()) if args.json else text.print_tasks()
        return
    if args.task is None:
        raise UserError(f"tasks {args.action} needs a TASK; teamtr-lora tasks list shows them")
    from teamtr_lora.recipe.task_by_name import task_settings
    from teamtr_lora.tasks.machinery.score import sample_items
    from teamtr_lora.tasks.table import BY_NAME

    if args.action == "show" and args.task in BY_NAME and not args.overrides:
        print_json(text.task_keys(BY_NAME[args.task])) if args.json else text.print_task(args.task)
        return
    if args.action == "show" and args.overrides:
        raise UserError("tasks show takes a TASK and no settings; it shows which there are")
    settings = list(args.overrides)
    if args.task == "dataset" and not any(word.startswith("reward=") for word in settings):
        settings.append("reward=not:needed")  # a key that training needs; no reward is loaded here
    text.print_items(sample_items(task_settings(args.task, settings), args.split, args.n), args.json)


def _score(args: argparse.Namespace) -> None:
    from teamtr_lora.cli.text.tasks import print_scores
    from teamtr_lora.recipe.task_by_name import task_settings
    from teamtr_lora.tasks.machinery.score import score_file

    if args.task == "dataset":
        raise UserError(
            "score dataset: rewards of your own are run by `teamtr-lora eval RUN`; score is for tasks with a verifier"
        )
    scores = score_file(task_settings(args.task, args.overrides, args.items), args.items, args.responses)
    if not args.json:
        print_scores(scores)
        return
    print_json(scores.as_dict())
    if scores.unanswered:
        say(f"{scores.unanswered} items have no response and are not in the mean", stderr=True)
