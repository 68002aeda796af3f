"""What `tasks` and `score` print."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

from rich.markup import escape
from rich.table import Table

from teamtr_lora.cli.arguments import print_json
from teamtr_lora.cli.text.tables import print_table
from teamtr_lora.common.code_paths import offered_tasks
from teamtr_lora.common.consoles import Console
from teamtr_lora.common.visible import visible_line
from teamtr_lora.recipe.words import walk
from teamtr_lora.tasks.machinery.score import Scores
from teamtr_lora.tasks.machinery.task import Item
from teamtr_lora.tasks.machinery.task_settings import TaskSettings
from teamtr_lora.tasks.table import BY_NAME, SCRIPT


def task_rows() -> list[dict[str, str]]:
    """Every task: its name, where its items come from, and a line about it; those that trusted packages offer come last."""
    rows = [
        {"name": name, "items": family.items_from, "about": family.in_words(name)}
        for name, family in BY_NAME.items()
        if name != SCRIPT
    ]
    return rows + [
        {"name": name, "items": path.partition(":")[0], "about": f"Use it by task: {{name: custom, callable: {name}}}."}
        for name, path in offered_tasks(trusted=True).items()
    ]


def print_tasks() -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("task", no_wrap=True)
    table.add_column("items", max_width=12)
    table.add_column("about")
    for row in task_rows():
        table.add_row(row["name"], row["items"], row["about"])
    print_table(Console(), table)


def task_keys(family: type[TaskSettings]) -> list[dict[str, Any]]:
    keys = [key for key in walk(family.model_json_schema()) if key.takes and key.name != "name"]
    return [
        {
            "key": key.name,
            "takes": key.takes,
            "default": json.loads(key.default or "null"),
            "required": not key.default,
            "about": key.meaning,
        }
        for key in keys
    ]


def print_task(name: str) -> None:
    family = BY_NAME[name]
    console = Console()
    console.print(f"{name}: {family.in_words(name)}\n{family.model_fields['name'].description}\n", markup=False)
    table = Table("key", "default", "about", box=None, pad_edge=False)
    for row in task_keys(family):
        default = "required" if row["required"] else json.dumps(row["default"])
        table.add_row(*(escape(cell) for cell in (row["key"], default, row["about"])))
    print_table(console, table)


def print_items(items: list[Item], as_json: bool) -> None:
    """JSON: one item a line, which `score --items` reads back."""
    for item in items:
        if as_json:
            print_json({"id": item.id, "prompt": item.prompt, "data": item.data}, indent=None)
        else:
            print(f"--- {visible_line(item.id)}\n{item.prompt}\n")


def print_scores(scores: Scores) -> None:
    kinds = [name for name in scores.items[0] if name not in ("id", "score")]
    table = Table("item", "score", *kinds, box=None, pad_edge=False)
    for row in scores.items:
        table.add_row(escape(visible_line(str(row["id"]))), *(f"{row[kind]:g}" for kind in ("score", *kinds)))
    console = Console()
    print_table(console, table)
    error = "" if scores.standard_error is None else f" ± {scores.standard_error:.4f} (standard error)"
    console.print(f"{scores.task}: n = {len(scores.items)}, mean = {scores.mean:.4f}{error}", markup=False)
    for kind in kinds:
        console.print(f"{kind}: mean = {fmean(row[kind] for row in scores.items):.4f}", markup=False)
    if scores.unanswered:
        console.print(f"{scores.unanswered} items have no response and are not in the mean", markup=False)
