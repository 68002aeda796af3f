"""Untrained accuracies of nano bases beside each other: `tools/make_nano_base.py --check FOLDER [FOLDER ...]`.

Teams of 2, 3, 4 and 8 agents add by columns, with the usual names and with random ones of 1 to 3 tokens of the last folder's
tokenizer; the recipes that are played on nano, and free choices, follow. Items and random numbers are the same in every cell of a
row, and everything is sampled as the recipe says (the columns at temperature 1).
"""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from nano_text import COLUMN_NAMES, REFERENCE_NAMES, Author
from transformers import AutoTokenizer

from teamtr_lora.common.settings import SAFE_NAME
from teamtr_lora.evaluation.evaluate import plan_in_training, summarise
from teamtr_lora.recipe import load_recipe
from teamtr_lora.rollout.playable import open_team
from teamtr_lora.tasks import Item, Task
from teamtr_lora.tasks.machinery.task import Split, item_of
from teamtr_lora.team import Episode

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
SIZES = (2, 3, 4, 8)
FEW_SETS = 5  # name sets of the rows that vary the roles too
# By row: recipes below recipes/, and overrides (those that the comments of the recipes name for nano or small bases).
OTHERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **{
        name: (("bases/nano", "tasks/small"), (f"task.name={name}",))
        for name in ("arithmetic", "products", "largest", "letter_count")
    },
    "countdown": (("bases/nano", "tasks/countdown"), ("task.numbers=2",)),
    "planbench_blocksworld": (("bases/nano", "tasks/planbench_blocksworld"), ("task.blocks=2",)),
    "zebra": (("bases/nano", "tasks/zebra"), ("task.houses=2", "task.attributes=2", "task.reward=cells")),
    "autologi": (("bases/nano", "tasks/autologi"), ("task.size=3",)),
    "arbench_gn": (("bases/nano", "tasks/arbench_gn"), ("team.router.rounds=3", "task.turns=8", "rollout.max_message_tokens=32")),
    **{name: ((f"baselines/{name}",), ()) for name in ("discussion", "debate", "debate_judge", "role_play", "single_per_agent")},
    "no system turn": (("plug_and_play/no_unification",), ()),
}
LONG = ("planbench_blocksworld", "zebra", "autologi", "arbench_gn")  # prompts of hundreds of tokens: an eighth of the items
CHOICES = {"choice: an option": None, "choice: the first of 4": 0, "choice: the last of 4": 3}


class Choosing(Task):
    """Everybody's last word is one of the options; or the option at `place`, of which a quarter is fair."""

    name = "choosing"

    def __init__(self, place: int | None) -> None:
        self._place = place

    def items(self, split: Split) -> Sequence[Item]:
        rng = random.Random(f"choosing/{split}")
        sets = [rng.sample("ABCDEFGH123456789", 4) for _ in range(512)]
        return [Item(f"{split}-{n}", f"Pick one of {' '.join(own)}.", {"options": own}) for n, own in enumerate(sets)]

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return [float(e.messages[-1].text in self._wanted(item_of(e).data["options"])) for e in episodes]

    def _wanted(self, options: list[str]) -> list[str]:
        return options if self._place is None else [options[self._place]]


@dataclass(frozen=True)
class Cell:
    """One team on one base. Cells that differ in the names alone share a row."""

    row: str
    base: Path
    recipes: tuple[str, ...]
    overrides: tuple[str, ...]
    items: int
    task: Task | None = None  # instead of the recipe's


def random_names(rng: random.Random, pieces: Sequence[str], encode: Callable[[str], list[int]], count: int) -> list[str]:
    """Different names of 1 to 3 tokens, put together from the vocabulary."""
    found: dict[str, None] = {}
    while len(found) < count:
        name = "".join(rng.choices(pieces, k=rng.randint(1, 3)))
        if re.fullmatch(SAFE_NAME, name) and len(encode(name)) <= 3:
            found[name] = None
    return list(found)


def cells(bases: Sequence[Path], *, items: int, name_sets: int, seed: int) -> list[Cell]:
    tokenizer = AutoTokenizer.from_pretrained(bases[-1])
    rng = random.Random(f"{seed}/check")
    pieces = sorted(p for p in tokenizer.get_vocab() if re.fullmatch("[a-z0-9_-]+", p))
    text = Author(rng, pieces).text
    found: list[Cell] = []

    def column_cells(row: str, size: int, names: Sequence[str], roles: Sequence[str]) -> None:
        agents = [{"name": name, "role": role} for name, role in zip(names, roles, strict=False)]
        overrides = (f"team.agents={json.dumps(agents)}", f"task.digits={size}")
        found.extend(Cell(f"{size} agents, {row}", base, ("quickstart",), overrides, items) for base in bases)

    for size in SIZES:
        column_cells("usual names", size, REFERENCE_NAMES[:size], COLUMN_NAMES)
        for number in range(name_sets):
            names = random_names(rng, pieces, tokenizer.encode, size)
            column_cells("random names", size, names, COLUMN_NAMES)
            if number < FEW_SETS:
                column_cells("random names, no roles", size, names, [""] * size)
                column_cells("random names and roles", size, names, [text() for _ in names])
    for row, (recipes, overrides) in OTHERS.items():
        played = max(1, items // 8) if row in LONG else items
        found += [Cell(row, base, recipes, overrides, played) for base in bases]
    for row, place in CHOICES.items():
        found += [Cell(row, base, ("bases/nano",), ("rollout.max_message_tokens=8",), items, Choosing(place)) for base in bases]
    return found


def accuracy(cell: Cell, device: str) -> float:
    recipe = load_recipe(
        [RECIPES / f"{name}.yaml" for name in cell.recipes],
        [*cell.overrides, f"base.source={cell.base.resolve()}", f"base.device={device}"],
    )
    playable = open_team(recipe.base, recipe.team, recipe.rollout, seed=recipe.seed, folder=recipe.folder)
    try:
        task = cell.task or recipe.task.build(recipe.folder)
        plan = plan_in_training(task, recipe, cell.items, k=1)
        played = summarise(playable.play(task, plan), task, plan)
    finally:
        playable.close()
    return played.avg_at_k


def play(cells: Sequence[Cell], *, device: str, jobs: int) -> dict[tuple[str, Path], list[float]]:
    """Accuracies by row and base; one thread a process, the slowest rows first."""
    found: dict[tuple[str, Path], list[float]] = {(cell.row, cell.base): [] for cell in cells}
    started = time.monotonic()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        order = sorted(cells, key=lambda cell: cell.row in LONG or cell.row.startswith("8"), reverse=True)
        playing = {pool.submit(accuracy, cell, device): cell for cell in order}
        for done, future in enumerate(as_completed(playing), start=1):
            cell = playing[future]
            found[cell.row, cell.base].append(future.result())
            if done % 50 == 0 or done == len(cells):
                print(f"{done}/{len(cells)} teams  {time.monotonic() - started:.0f} s", flush=True)
    return found


def table(found: dict[tuple[str, Path], list[float]], bases: Sequence[Path]) -> str:
    """Rows by team, a column a base; mean [least, most] where a row has several teams."""
    rows: dict[str, list[str]] = defaultdict(list)
    for (row, _), values in found.items():
        spread = f" [{min(values):.3f}, {max(values):.3f}]" if len(values) > 1 else ""
        rows[row].append(f"{statistics.fmean(values):.3f}{spread}")
    width = max(map(len, [*(str(base) for base in bases), *(cell for cells in rows.values() for cell in cells)]))
    head = " " * 36 + "  ".join(f"{base!s:{width}}" for base in bases)
    return "\n".join([head, *(f"{row:36}" + "  ".join(f"{cell:{width}}" for cell in cells) for row, cells in rows.items())])
