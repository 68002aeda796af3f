"""Makes open puzzles with at least one solution, in AutoLogi's format: an order, an assignment to days, or a selection.

A hidden solution is drawn first and only constraints that it satisfies are used; each is a sentence and a line of Python. No kind
of constraint comes twice in a puzzle before every kind has come once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, permutations

PEOPLE = ["Ada", "Boris", "Chen", "Dora", "Emil", "Farah", "Gita", "Hugo", "Ines", "Jonas", "Kira", "Leo", "Mona", "Nils"]
DAYS = ["Monday", "Tuesday", "Wednesday"]
PLACES = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh"]
# what they do: the story, and how a sentence says "stands", "works" or "chosen"
LINES = [
    ("stand in a line", "stands"),
    ("give talks one after another", "speaks"),
    ("finish a race, no two together", "finishes"),
]
SHIFTS = [("each work on one day", "works", "work"), ("each visit the museum on one day", "comes", "come")]
GROUPS = [("are chosen for a trip", "chosen"), ("are invited to a jury", "invited"), ("are hired", "hired")]


@dataclass(frozen=True)
class Rule:
    """A sentence, and a Python expression over `x` (the answer) that says the same."""

    kind: str
    text: str
    code: str


@dataclass(frozen=True)
class Puzzle:
    story: str
    form: str  # how to answer
    check: str  # the format check, as a Python expression over x
    rules: list[Rule]
    example: object  # a solution
    people: list[str]

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
    people = sorted(rng.sample(PEOPLE, size))
    hidden = rng.sample(people, size)
    story, does = rng.choice(LINES)
    at = {person: place for place, person in enumerate(hidden)}
    rules = []
    for a, b in permutations(people, 2):
        gap = at[b] - at[a]
        i, j = f"x.index({a!r})", f"x.index({b!r})"
        if gap > 0:
            rules.append(Rule("before", f"{a} {does} somewhere before {b}.", f"{i} < {j}"))
        if gap == 1:
            rules.append(Rule("just before", f"{a} {does} directly before {b}.", f"{j} - {i} == 1"))
            rules.append(Rule("adjacent", f"Nobody is between {a} and {b}.", f"abs({i} - {j}) == 1"))
        if gap > 1:
            count = "one person is" if gap == 2 else f"{gap - 1} people are"
            rules.append(Rule("apart", f"{a} and {b} are not directly one after the other.", f"abs({i} - {j}) != 1"))
            rules.append(Rule("between", f"Exactly {count} between {a} and {b}.", f"abs({i} - {j}) == {gap}"))
        if a < b and (at[a] == 0 or at[b] == 0):
            rules.append(Rule("either first", f"Either {a} or {b} {does} first.", f"x[0] in ({a!r}, {b!r})"))
    for a in people:
        i, elsewhere = f"x.index({a!r})", rng.choice([place for place in range(size) if place != at[a]])
        rules.append(Rule("not at", f"{a} is not the {PLACES[elsewhere]}.", f"{i} != {elsewhere}"))
        if at[a] not in (0, size - 1):
            rules.append(Rule("inside", f"{a} is neither first nor last.", f"{i} not in (0, len(x) - 1)"))
        else:
            rules.append(Rule("at an end", f"{a} is first or last.", f"{i} in (0, len(x) - 1)"))
    return Puzzle(
        story=f"{', '.join(people)} {story}.",
        form="Answer with a list of the names from first to last, in a ```json block.",
        check=f"isinstance(x, list) and sorted(map(str, x)) == {people!r}",
        rules=_varied(rng, rules, size),
        example=hidden,
        people=people,
    )


def assignment(rng: random.Random, size: int) -> Puzzle:
    people = sorted(rng.sample(PEOPLE, size))
    hidden = {person: rng.choice(DAYS) for person in people}
    story, does, do = rng.choice(SHIFTS)
    day = {person: DAYS.index(name) for person, name in hidden.items()}
    rules = []
    for a, b in combinations(people, 2):
        same = hidden[a] == hidden[b]
        words = "on the same day" if same else "on different days"
        kind = "same" if same else "different"
        rules.append(Rule(kind, f"{a} and {b} {do} {words}.", f"x[{a!r}] {'==' if same else '!='} x[{b!r}]"))
    for a, b in permutations(people, 2):
        i, j = f"{DAYS!r}.index(x[{a!r}])", f"{DAYS!r}.index(x[{b!r}])"
        if day[a] < day[b]:
            rules.append(Rule("earlier", f"{a} {does} on an earlier day than {b}.", f"{i} < {j}"))
        if day[a] + 1 == day[b]:
            rules.append(Rule("day before", f"{a} {does} on the day right before {b}.", f"{j} - {i} == 1"))
        when, then = rng.choice(DAYS), rng.choice(DAYS)
        if hidden[a] != when or hidden[b] == then:
            code = f"x[{a!r}] != {when!r} or x[{b!r}] == {then!r}"
            rules.append(Rule("if", f"If {a} {does} on {when}, then {b} {does} on {then}.", code))
    for a in people:
        other = rng.choice([name for name in DAYS if name != hidden[a]])
        rules.append(Rule("not on", f"{a} does not {do} on {other}.", f"x[{a!r}] != {other!r}"))
        pair = sorted((hidden[a], other), key=DAYS.index)
        rules.append(Rule("one of two", f"{a} {does} on {pair[0]} or {pair[1]}.", f"x[{a!r}] in {tuple(pair)!r}"))
    for name in DAYS:
        count, counted = list(hidden.values()).count(name), f"list(x.values()).count({name!r})"
        rules.append(Rule("at most", f"At most {count} of them {do} on {name}.", f"{counted} <= {count}"))
        rules.append(Rule("exactly", f"Exactly {count} of them {do} on {name}.", f"{counted} == {count}"))
    return Puzzle(
        story=f"{', '.join(people)} {story}: {', '.join(DAYS)}.",
        form="Answer with an object that maps each name to a day, in a ```json block.",
        check=f"isinstance(x, dict) and sorted(x) == {people!r} and all(day in {DAYS!r} for day in x.values())",
        rules=_varied(rng, rules, size),
        example=hidden,
        people=people,
    )


def selection(rng: random.Random, size: int) -> Puzzle:
    people, count = sorted(rng.sample(PEOPLE, size)), max(2, size // 2)
    hidden = sorted(rng.sample(people, count))
    story, done = rng.choice(GROUPS)
    rules = []
    for a, b in combinations(people, 2):
        i, j = f"{a!r} in x", f"{b!r} in x"
        both, one = a in hidden and b in hidden, (a in hidden) != (b in hidden)
        if not both:
            rules.append(Rule("not both", f"{a} and {b} are not both {done}.", f"not ({i} and {j})"))
        if both or one:
            rules.append(Rule("at least one", f"At least one of {a} and {b} is {done}.", f"{i} or {j}"))
        if one:
            rules.append(Rule("exactly one", f"Exactly one of {a} and {b} is {done}.", f"({i}) != ({j})"))
        else:
            rules.append(Rule("both or neither", f"{a} and {b} are both {done}, or neither is.", f"({i}) == ({j})"))
    for a, b in permutations(people, 2):
        if a not in hidden or b in hidden:
            rules.append(Rule("if", f"If {a} is {done}, so is {b}.", f"{a!r} not in x or {b!r} in x"))
        if a in hidden or b in hidden:
            rules.append(Rule("if not", f"If {a} is not {done}, then {b} is.", f"{a!r} in x or {b!r} in x"))
    for three in combinations(people, 3):
        among, named = sum(person in hidden for person in three), f"{three[0]}, {three[1]} and {three[2]}"
        counted = f"sum(name in x for name in {three!r})"
        rules.append(
            Rule("of three", f"Exactly {among} of {named} {'is' if among == 1 else 'are'} {done}.", f"{counted} == {among}")
        )
        if among < 3:
            most = max(1, among)
            rules.append(Rule("at most of three", f"At most {most} of {named} may be {done}.", f"{counted} <= {most}"))
    return Puzzle(
        story=f"{count} of {', '.join(people)} {story}.",
        form=f"Answer with a list of the names of those {done}, in a ```json block.",
        check=f"isinstance(x, list) and len(x) == {count} == len(set(map(str, x))) and all(name in {people!r} for name in x)",
        rules=_varied(rng, rules, size),
        example=hidden,
        people=people,
    )


def _varied(rng: random.Random, rules: list[Rule], count: int) -> list[Rule]:
    """A rule of every kind in turn, kinds and rules in random order, until there are `count`."""
    rules = rng.sample(rules, len(rules))
    kinds = rng.sample(sorted({rule.kind for rule in rules}), len({rule.kind for rule in rules}))
    queues = {kind: [rule for rule in rules if rule.kind == kind] for kind in kinds}
    chosen: list[Rule] = []
    while len(chosen) < count and any(queues.values()):
        chosen += [queue.pop() for queue in queues.values() if queue]
    return chosen[:count]


MAKERS: dict[str, Callable[[random.Random, int], Puzzle]] = {
    "ordering": ordering,
    "assignment": assignment,
    "selection": selection,
}
