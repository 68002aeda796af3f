"""Makes logic grids with exactly one solution: a random grid, true clues until only it fits, then no clue more than needed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from teamtr_lora.tasks.benchmarks.zebra_solver import DISTANCE, Clue, holds, solutions

# attribute: how the puzzle introduces it, how a clue names one of its values, the values
WORDS: dict[str, tuple[str, str, list[str]]] = {
    "Name": ("Each person has a unique name", "{}", ["Ada", "Boris", "Chen", "Dora", "Emil", "Farah"]),
    "Color": (
        "Everyone has a different favorite color",
        "the person who likes {}",
        ["red", "green", "blue", "yellow", "white", "purple"],
    ),
    "Animal": (
        "Everyone keeps a different animal",
        "the person who keeps the {}",
        ["cat", "dog", "horse", "fish", "bird", "rabbit"],
    ),
    "Drink": (
        "Each person drinks one thing only",
        "the person who drinks {}",
        ["tea", "water", "milk", "coffee", "juice", "cocoa"],
    ),
    "Food": ("Everyone has a different lunch", "the person who eats {}", ["pizza", "stew", "soup", "rice", "salad", "pasta"]),
    "Hobby": (
        "Each person has a hobby of their own",
        "the person who enjoys {}",
        ["chess", "painting", "gardening", "cooking", "knitting", "singing"],
    ),
    "Job": ("Each person has a different job", "the {}", ["doctor", "teacher", "lawyer", "artist", "engineer", "baker"]),
    "Sport": (
        "Each person has one favorite sport",
        "the person who loves {}",
        ["tennis", "soccer", "golf", "swimming", "boxing", "cycling"],
    ),
}
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth"]
# kind of clue: how often it is offered (roughly the benchmark's shares), and how it is said
CLUES = {
    "same": (8, "{0} is {1}."),
    "at": (1, "{0} is in the {1} house."),
    "not_at": (3, "{0} is not in the {1} house."),
    "directly_left": (4, "{0} is directly left of {1}."),
    "left": (2, "{0} is somewhere to the left of {1}."),
    "right": (2, "{0} is somewhere to the right of {1}."),
    "next": (2, "{0} and {1} are next to each other."),
    "one_between": (1, "There is one house between {0} and {1}."),
    "two_between": (1, "There are two houses between {0} and {1}."),
}


@dataclass(frozen=True)
class Grid:
    header: list[str]  # House, then the attributes
    rows: list[list[str]]
    clues: list[str]
    values: list[list[str]]  # of each attribute, in an order that gives nothing away

    @property
    def text(self) -> str:
        houses = len(self.rows)
        lines = [
            f"There are {houses} houses, numbered 1 to {houses} from left to right. Each house is occupied by a different "
            "person. Each house has a unique attribute for each of the following characteristics:"
        ]
        for name, values in zip(self.header[1:], self.values, strict=True):
            lines.append(f" - {WORDS[name][0]}: {', '.join(f'`{value}`' for value in values)}")
        lines += ["", "## Clues:", *(f"{i}. {clue}" for i, clue in enumerate(self.clues, 1))]
        return "\n".join(lines)


def make_grid(rng: random.Random, houses: int, attributes: int) -> Grid:
    names = ["Name", *rng.sample([name for name in WORDS if name != "Name"], attributes - 1)]
    values = [rng.sample(WORDS[name][2], houses) for name in names]
    places = [place for _ in names for place in rng.sample(range(houses), houses)]  # the house of every value
    clues = _needed(rng, _true_clues(rng, houses, places), houses, attributes)
    rows = [[str(house + 1), *[""] * attributes] for house in range(houses)]
    for value, house in enumerate(places):
        rows[house][1 + value // houses] = values[value // houses][value % houses]
    written = [_sentence(clue, houses, names, values) for clue in clues]
    return Grid(["House", *names], rows, written, values)


def _true_clues(rng: random.Random, houses: int, places: Sequence[int]) -> list[Clue]:
    """All clues that hold, in a random order that the weights lean on."""
    kinds = ["same", "directly_left", "left", "right", *(k for k, d in DISTANCE.items() if d < houses)]
    clues = [Clue(kind, value, house) for kind in ("at", "not_at") for value in range(len(places)) for house in range(houses)]
    for first in range(len(places)):
        for second in range(len(places)):
            if first // houses != second // houses or (first != second and houses > 2):
                clues += [Clue(k, first, second) for k in kinds if first < second or k in ("directly_left", "left", "right")]
    true = [clue for clue in clues if holds(clue, places)]
    share = {kind: CLUES[kind][0] / sum(clue.kind == kind for clue in true) for kind in {clue.kind for clue in true}}
    return sorted(true, key=lambda clue: -(rng.random() ** (1 / share[clue.kind])))


def _needed(rng: random.Random, clues: list[Clue], houses: int, attributes: int) -> list[Clue]:
    """The shortest beginning of the list that leaves one solution, without the clues it can do without."""

    def unique(some: Sequence[Clue]) -> bool:
        return len(solutions(houses, attributes, some)) == 1

    few, enough = 0, len(clues)
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if unique(clues[:middle]) else (middle, enough)
    kept = clues[:enough]
    for clue in list(kept):
        fewer = [other for other in kept if other != clue]
        if unique(fewer):
            kept = fewer
    rng.shuffle(kept)
    return kept


def _sentence(clue: Clue, houses: int, names: Sequence[str], values: Sequence[Sequence[str]]) -> str:
    def person(value: int) -> str:
        attribute = value // houses
        return WORDS[names[attribute]][1].format(values[attribute][value % houses])

    second = ORDINALS[clue.second] if clue.kind in ("at", "not_at") else person(clue.second)
    text = CLUES[clue.kind][1].format(person(clue.first), second)
    return text[0].upper() + text[1:]
