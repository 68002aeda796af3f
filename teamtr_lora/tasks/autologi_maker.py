"""Makes open puzzles with at least one solution, in AutoLogi's format: an order, an assignment to days, or a selection.

A hidden solution is drawn first and only constraints that it satisfies are used; each is a sentence and a line of Python.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from teamtr_lora.tasks.task import Item, Split

TEST_SHARE = 0.2
PEOPLE = ["Ada", "Boris", "Chen", "Dora", "Emil", "Farah", "Gita"]
DAYS = ["Monday", "Tuesday", "Wednesday"]


@dataclass(frozen=True)
class Rule:
    """A sentence, and a Python expression over `x` (the answer) that says the same."""

    text: str
    code: str


@dataclass(frozen=True)
class Puzzle:
    story: str
    form: str  # how to answer
    check: str  # the format check, as a Python expression over x
    rules: list[Rule]
    example: object  # a solution

    @property
    def prompt(self) -> str:
        rules = "\n".join(f"{i}. {rule.text}" for i, rule in enumerate(self.rules, 1))
        return f"{self.story}\n\n{rules}\n\nFind one arrangement that satisfies all of this. {self.form}"

    @property
    def check_code(self) -> str:
        return f"def inputs_check(x):\n    return {self.check}\n"

    @property
    def constraint_code(self) -> str:
        functions = [f"def constraint_{i}(x):\n    return {rule.code}\n" for i, rule in enumerate(self.rules, 1)]
        return "\n".join(functions) + f"\nconstraint_list = [{', '.join(f'constraint_{i + 1}' for i in range(len(functions)))}]\n"


def ordering(rng: random.Random, size: int) -> Puzzle:
    people = PEOPLE[:size]
    hidden = rng.sample(people, size)
    rules = []
    for a in people:
        for b in people:
            i, j = hidden.index(a), hidden.index(b)
            if i < j:
                rules.append(Rule(f"{a} stands somewhere before {b}.", f"x.index({a!r}) < x.index({b!r})"))
            if j - i > 1:
                rules.append(Rule(f"{a} and {b} do not stand next to each other.", f"abs(x.index({a!r}) - x.index({b!r})) != 1"))
            if j - i == 1:
                rules.append(Rule(f"{a} stands directly before {b}.", f"x.index({b!r}) - x.index({a!r}) == 1"))
        if hidden.index(a) not in (0, size - 1):
            rules.append(Rule(f"{a} is neither first nor last.", f"x.index({a!r}) not in (0, len(x) - 1)"))
    return Puzzle(
        f"{', '.join(people)} stand in a line.",
        "Answer with a list of the names from first to last, in a ```json block.",
        f"isinstance(x, list) and sorted(map(str, x)) == {sorted(people)!r}",
        _some(rng, rules, size),
        hidden,
    )


def assignment(rng: random.Random, size: int) -> Puzzle:
    people = PEOPLE[:size]
    hidden = {person: rng.choice(DAYS) for person in people}
    rules = []
    for a in people:
        for day in DAYS:
            if hidden[a] != day:
                rules.append(Rule(f"{a} does not work on {day}.", f"x[{a!r}] != {day!r}"))
        for b in people[people.index(a) + 1 :]:
            same = hidden[a] == hidden[b]
            words = "on the same day" if same else "on different days"
            rules.append(Rule(f"{a} and {b} work {words}.", f"x[{a!r}] {'==' if same else '!='} x[{b!r}]"))
    for day in DAYS:
        count = list(hidden.values()).count(day)
        rules.append(Rule(f"At most {count} of them work on {day}.", f"list(x.values()).count({day!r}) <= {count}"))
    return Puzzle(
        f"{', '.join(people)} each work on one day: {', '.join(DAYS)}.",
        "Answer with an object that maps each name to a day, in a ```json block.",
        f"isinstance(x, dict) and sorted(x) == {sorted(people)!r} and all(day in {DAYS!r} for day in x.values())",
        _some(rng, rules, size),
        hidden,
    )


def selection(rng: random.Random, size: int) -> Puzzle:
    people, chosen = PEOPLE[:size], max(2, size // 2)
    hidden = sorted(rng.sample(people, chosen))
    rules = []
    for a in people:
        for b in people:
            if a < b and not (a in hidden and b in hidden):
                rules.append(Rule(f"{a} and {b} are not both chosen.", f"not ({a!r} in x and {b!r} in x)"))
            if a < b and (a in hidden or b in hidden):
                rules.append(Rule(f"At least one of {a} and {b} is chosen.", f"{a!r} in x or {b!r} in x"))
            if a != b and (a not in hidden or b in hidden):
                rules.append(Rule(f"If {a} is chosen, so is {b}.", f"{a!r} not in x or {b!r} in x"))
    return Puzzle(
        f"{chosen} of {', '.join(people)} are chosen.",
        "Answer with a list of the chosen names, in a ```json block.",
        f"isinstance(x, list) and len(x) == {chosen} == len(set(map(str, x))) and all(name in {people!r} for name in x)",
        _some(rng, rules, size),
        hidden,
    )


def _some(rng: random.Random, rules: list[Rule], size: int) -> list[Rule]:
    return rng.sample(rules, min(size, len(rules)))


MAKERS: dict[str, Callable[[random.Random, int], Puzzle]] = {
    "ordering": ordering,
    "assignment": assignment,
    "selection": selection,
}


class LogicItems:
    """Item `position` of a split, made by a generator seeded by the position alone; a puzzle is in one split by a hash."""

    size: int | None = None

    def __init__(self, people: int, split: Split) -> None:
        self._people, self._split = people, split

    def __getitem__(self, position: int) -> Item:
        rng = random.Random(f"autologi/{self._people}/{self._split}/{position}")
        while True:
            kind = rng.choice(sorted(MAKERS))
            puzzle = MAKERS[kind](rng, self._people)
            key = f"{puzzle.story} {sorted(rule.text for rule in puzzle.rules)}"
            if (hashlib.sha256(key.encode()).digest()[0] < 256 * TEST_SHARE) == (self._split == "test"):
                break
        data = {"kind": kind, "check": puzzle.check_code, "constraints": puzzle.constraint_code, "example": puzzle.example}
        return Item(f"{self._split}:{position}", puzzle.prompt, data)
