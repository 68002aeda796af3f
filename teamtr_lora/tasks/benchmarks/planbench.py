"""planbench_blocksworld: write a plan; right if every action can be done in its turn and the goal holds at the end.

Items in PlanBench's format (objects, init, goal, query), or generated: two random arrangements of the blocks, seeded.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from teamtr_lora.tasks.benchmarks.blocksworld import COLOURS, LETTERS, Fact, achieves, block_names, fact, parse_plan
from teamtr_lora.tasks.machinery.bench import BenchTask, field
from teamtr_lora.tasks.machinery.drawn import DrawnItems, draw_for
from teamtr_lora.tasks.machinery.forms import Form, check_form
from teamtr_lora.tasks.machinery.task import Item, Split, item_of
from teamtr_lora.tasks.machinery.task_settings import ItemsOrGenerated
from teamtr_lora.team import Episode, Message

PLAIN = """Blocks stand on a table or on one another. Four actions move them, with one hand:
pick up the X block: X is on the table, nothing is on X, and the hand is empty; then the hand holds X.
put down the X block: the hand holds X; then X is on the table.
stack the X block on top of the Y block: the hand holds X and nothing is on Y; then X is on Y and the hand is empty.
unstack the X block from on top of the Y block: X is on Y, nothing is on X, and the hand is empty; then the hand holds X."""
STRANGE = """Objects have properties that four actions change:
attack X: needs province X, planet X and harmony; they end, and pain X begins.
succumb X: needs pain X; it ends, and province X, planet X and harmony begin.
overcome X from Y: needs province Y and pain X; they end, and harmony, province X and X craves Y begin.
feast X from Y: needs X craves Y, province X and harmony; they end, and pain X and province Y begin."""
ENDING = "Write a plan that reaches the goal: one action a line, between [PLAN] and [PLAN END]."
WORDS = {
    False: {
        "ontable": "the {} block is on the table",
        "clear": "the {} block is clear",
        "handempty": "the hand is empty",
        "holding": "the hand is holding the {} block",
        "on": "the {} block is on top of the {} block",
    },
    True: {
        "ontable": "planet object {}",
        "clear": "province object {}",
        "handempty": "harmony",
        "holding": "pain object {}",
        "on": "object {} craves object {}",
    },
}


def describe(facts: Iterable[Fact], mystery: bool) -> str:
    def name(block: str) -> str:
        return block if mystery or block not in LETTERS else COLOURS[LETTERS.index(block)]

    return ", ".join(WORDS[mystery][kind].format(*map(name, blocks)) for kind, *blocks in facts)


def prompt_of(init: Sequence[Fact], goal: Sequence[Fact], mystery: bool) -> str:
    rules = STRANGE if mystery else PLAIN
    return f"{rules}\n\nNow: {describe(init, mystery)}.\nGoal: {describe(goal, mystery)}.\n\n{ENDING}"


class BlocksData(Form):
    objects: Annotated[list[str], Field(min_length=1)]
    init: Annotated[list[list[str]], Field(min_length=1)]
    goal: Annotated[list[list[str]], Field(min_length=1)]

    @field_validator("init", "goal")
    @classmethod
    def _are_facts(cls, facts: list[list[str]]) -> list[list[str]]:
        for words in facts:
            fact(words)
        return facts

    @model_validator(mode="after")
    def _is_an_instance(self) -> Self:
        known = {block.lower() for block in self.objects}
        for words in (*self.init, *self.goal):
            strange = set(fact(words)[1:]) - known
            if strange:
                raise ValueError(f"{' '.join(words)!r} has blocks that objects has not: {ascii(sorted(strange))[1:-1]}")
        return self


class Blocksworld(BenchTask):
    name = "planbench_blocksworld"
    data_form = BlocksData

    def __init__(self, blocks: int = 4, mystery: bool = False) -> None:
        self._blocks, self._mystery = blocks, mystery

    def row_item(self, row: Mapping[str, Any], name: str) -> Item:
        facts = {key: field(row, name, [key], list) for key in ("init", "goal")}
        objects = row.get("objects") or sorted({str(b) for f in facts["init"] if isinstance(f, list) for b in f[1:]})
        check_form(BlocksData, {**facts, "objects": objects}, f"item {name}")
        init, goal = ([fact(words) for words in facts[key]] for key in ("init", "goal"))
        query = row.get("query")
        prompt = query if isinstance(query, str) and query else prompt_of(init, goal, self._mystery)
        return Item(name, prompt, {"objects": list(map(str, objects)), "init": init, "goal": goal})

    def generated(self, split: Split) -> DrawnItems:
        return DrawnItems(f"blocksworld/{self._blocks}", split, self._made)

    def _made(self, rng: random.Random, split: Split, name: str) -> Item:
        def draw() -> tuple[list[Fact], list[Fact]]:
            while True:
                init = arrangement(_towers(rng, self._blocks))
                goal = [f for f in arrangement(_towers(rng, self._blocks)) if f[0] == "on"]
                if goal and not set(goal) <= set(init):
                    return init, goal

        init, goal = draw_for(split, draw, lambda drawn: _key(*drawn))
        data = {"objects": list(LETTERS[: self._blocks]), "init": init, "goal": goal}
        return Item(name, prompt_of(init, goal, self._mystery), data)

    def text(self, item: Item) -> str:
        """The instance itself: PlanBench's prompts also hold a solved example, which differs between copies."""
        return _key(item.data["init"], item.data["goal"])

    def verdict(self, item: Item, text: str) -> float:
        plan = parse_plan(text, block_names(item.data["objects"]))
        facts = [[tuple(f) for f in item.data[key]] for key in ("init", "goal")]  # lists, where the item was read back from JSON
        return float(plan is not None and achieves(facts[0], facts[1], plan))

    def vote(self, episode: Episode) -> str | None:
        objects = item_of(episode).data["objects"]
        plan = parse_plan(episode.answer_text, block_names(objects))
        return None if plan is None else "; ".join(" ".join([action.name, *action.blocks]) for action in plan)

    def categories(self, item: Item) -> dict[str, str]:
        return {"blocks": str(len(item.data["objects"])), **super().categories(item)}

    def message_correct(self, item: Item, message: Message) -> bool:
        return bool(self.verdict(item, message.text))


def _towers(rng: random.Random, blocks: int) -> list[list[str]]:
    """Bottom block first."""
    order = rng.sample(LETTERS[:blocks], blocks)
    towers: list[list[str]] = [[order[0]]]
    for block in order[1:]:
        if rng.random() < 0.4:
            towers.append([block])
        else:
            towers[-1].append(block)
    return towers


def arrangement(towers: Iterable[Sequence[str]]) -> list[Fact]:
    facts: list[Fact] = [("handempty",)]
    for tower in towers:
        facts += [("ontable", tower[0]), ("clear", tower[-1])]
        facts += [("on", upper, lower) for lower, upper in zip(tower, tower[1:], strict=False)]
    return sorted(facts)


def _key(init: Iterable[Sequence[str]], goal: Iterable[Sequence[str]]) -> str:
    return " / ".join(" ".join(sorted("-".join(f) for f in facts)) for facts in (init, goal))


class BlocksworldSettings(ItemsOrGenerated):
    """Plans in the blocks world, simulated with exact preconditions; PlanBench's items, or generated ones."""

    paper_samples: ClassVar[Mapping[str, int]] = {"planbench_blocksworld": 8}
    name: Literal["planbench_blocksworld"] = Field(
        description="Rows need objects, init, goal and query (PlanBench's fields); without path or hub, items are generated."
    )
    blocks: int = Field(default=4, ge=2, le=12, description="Blocks per generated item; more are harder.")
    mystery: bool = Field(default=False, description="Generated items in PlanBench's mystery names (attack, feast, ...).")

    def make(self, folder: Path) -> Blocksworld:
        return Blocksworld(self.blocks, self.mystery)
