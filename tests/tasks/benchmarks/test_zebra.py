"""Logic grids: scoring as in ZeroEval, and generated puzzles against a solver that reads their sentences."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.benchmarks.zebra import ZebraTask, cells_right, last_json
from teamtr_lora.tasks.benchmarks.zebra_maker import ORDINALS, WORDS, make_grid
from teamtr_lora.tasks.benchmarks.zebra_solver import STEPS, Clue, holds, solutions
from teamtr_lora.tasks.machinery.task import Item, Task

Score = Callable[[Task, Sequence[tuple[Item, str]]], list[float]]
SENTENCES = [
    ("between1", r"There is one house between (.+) and (.+)\."),
    ("between2", r"There are two houses between (.+) and (.+)\."),
    ("next", r"(.+) and (.+) are next to each other\."),
    ("just left", r"(.+) is directly left of (.+)\."),
    ("left", r"(.+) is somewhere to the left of (.+)\."),
    ("right", r"(.+) is somewhere to the right of (.+)\."),
    ("not in", r"(.+) is not in the (.+) house\."),
    ("in", r"(.+) is in the (.+) house\."),
    ("is", r"(.+) is (.+)\."),
]
TESTS: dict[str, Callable[[int, int], bool]] = {
    "between1": lambda a, b: abs(a - b) == 2,
    "between2": lambda a, b: abs(a - b) == 3,
    "next": lambda a, b: abs(a - b) == 1,
    "just left": lambda a, b: b - a == 1,
    "left": lambda a, b: a < b,
    "right": lambda a, b: a > b,
    "not in": lambda a, b: a != b,
    "in": lambda a, b: a == b,
    "is": lambda a, b: a == b,
}


def read(item: Item) -> tuple[list[list[str]], list[tuple[str, str, str]]]:
    """The people of each attribute as clues name them, and the clues, from the puzzle's text alone."""
    text = item.data["problem"]
    groups = re.findall(r"^ - (.+?): (.+)$", text, re.M)
    phrases = {intro: phrase for intro, phrase, _ in WORDS.values()}
    people = [[phrases[intro].format(v.strip("`")).lower() for v in values.split(", ")] for intro, values in groups]
    clues = []
    for line in re.findall(r"^\d+\. (.+)$", text, re.M):
        kind, found = next((k, m) for k, p in SENTENCES if (m := re.fullmatch(p, line)))
        clues.append((kind, found[1].lower(), found[2].lower()))
    return people, clues


def all_solutions(item: Item) -> list[dict[str, int]]:
    """Attribute by attribute over whole permutations; a clue is looked at when all it names has a place."""
    people, clues = read(item)
    fixed = {name: house for house, name in enumerate(ORDINALS)}
    found: list[dict[str, int]] = []

    def place(depth: int, known: dict[str, int]) -> None:
        if depth == len(people):
            found.append({name: house for name, house in known.items() if name not in fixed})
            return
        names = people[depth]
        relevant = [c for c in clues if (c[1] in names or c[2] in names) and all(w in names or w in known for w in c[1:])]
        for order in permutations(range(len(names))):
            now = {**known, **dict(zip(names, order, strict=True))}
            if all(TESTS[kind](now[a], now[b]) for kind, a, b in relevant):
                place(depth + 1, now)

    place(0, fixed)
    return found


def search(item: Item, without: int | None = None) -> Iterator[dict[str, int]]:
    """Every solution, person by person: houses that a clue or a neighbour rules out are struck off, the surest goes first.

    For grids that are too large for whole permutations; shares nothing with the generator's solver but the sentences.
    `without` leaves one clue out.
    """
    people, clues = read(item)
    clues = [clue for place, clue in enumerate(clues) if place != without]
    group = {name: names for names in people for name in names}
    fixed = {name: {house} for house, name in enumerate(ORDINALS)}

    def strike(houses: dict[str, set[int]]) -> bool:
        """Until nothing changes; False when somebody has no house left."""
        changed = True
        while changed:
            changed = False
            for kind, a, b in clues:
                first, second = houses.get(a, fixed.get(a)), houses.get(b, fixed.get(b))
                assert first is not None and second is not None
                keep_a = {i for i in first if any(TESTS[kind](i, j) for j in second)}
                keep_b = {j for j in second if any(TESTS[kind](i, j) for i in first)}
                for name, keep, old in ((a, keep_a, first), (b, keep_b, second)):
                    if name in houses and keep != old:
                        houses[name], changed = keep, True
                    elif not keep:
                        return False
            for name, own in houses.items():
                if len(own) == 1:
                    for other in group[name]:
                        if other != name and own & houses[other]:
                            houses[other], changed = houses[other] - own, True
            if not all(houses.values()):
                return False
        return True

    def go(houses: dict[str, set[int]]) -> Iterator[dict[str, int]]:
        if not strike(houses):
            return
        open_ones = [name for name, own in houses.items() if len(own) > 1]
        if not open_ones:
            yield {name: next(iter(own)) for name, own in houses.items()}
            return
        name = min(open_ones, key=lambda n: (len(houses[n]), n))
        for house in sorted(houses[name]):
            yield from go({n: ({house} if n == name else set(own)) for n, own in houses.items()})

    return go({name: set(range(len(names))) for names in people for name in names})


def reference(item: Item) -> dict[str, int]:
    places = {}
    for attribute, column in enumerate(item.data["header"][1:]):
        for house, row in enumerate(item.data["rows"]):
            places[WORDS[column][1].format(row[attribute + 1]).lower()] = house
    return places


@pytest.mark.parametrize(("houses", "attributes"), [(5, 4), (4, 5), (5, 5), (5, 6), (6, 5), (6, 6)])
def test_large_generated_puzzles_have_one_solution(houses: int, attributes: int) -> None:
    item = ZebraTask("zebra", houses, attributes).items("test")[0]
    assert list(islice(search(item), 2)) == [reference(item)]


def test_the_search_finds_every_solution_there_is() -> None:
    """With a clue left out there are several; whole permutations find the same ones."""
    several = 0
    for position in range(6):
        item = ZebraTask("zebra", 3, 3).items("train")[position]
        assert list(search(item)) == all_solutions(item)
        for place in range(len(read(item)[1])):
            text = re.sub(rf"(?m)^{place + 1}\. .+\n?", "", item.data["problem"])
            fewer = Item(item.id, item.prompt, {**item.data, "problem": text})
            key = lambda places: sorted(places.items())  # noqa: E731
            assert sorted(search(item, without=place), key=key) == sorted(all_solutions(fewer), key=key)
            several += len(all_solutions(fewer)) > 1
    assert several > 10


def grid(item: Item) -> dict[str, Any]:
    header, rows = item.data["header"], item.data["rows"]
    return {f"House {row[0]}": dict(zip(header[1:], row[1:], strict=True)) for row in rows}


def answer(table: dict[str, Any]) -> str:
    return "I think {so}.\n" + json.dumps({"reasoning": "because", "solution": table}, indent=2)


@pytest.mark.parametrize(
    ("houses", "attributes"), [(n, m) for n in range(2, 5) for m in range(2, 5)] + [(2, 6), (3, 6), (5, 3), (6, 2)]
)
def test_generated_puzzles_have_one_solution_and_it_is_the_reference(houses: int, attributes: int) -> None:
    task = ZebraTask("zebra", houses, attributes)
    for position in range(3 if houses < 5 else 1):
        item = task.items("train")[position]
        (solution,) = all_solutions(item)
        for attribute, column in enumerate(item.data["header"][1:]):
            phrase = WORDS[column][1]
            for house, row in enumerate(item.data["rows"]):
                assert solution[phrase.format(row[attribute + 1]).lower()] == house


@pytest.mark.parametrize("seed", range(3))
def test_the_largest_grids_can_be_made(seed: int) -> None:
    item = ZebraTask("zebra", 6, 6).items("test")[seed]
    assert item.data["size"] == "6x6" and len(item.data["rows"]) == 6


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 2), st.data())
def test_the_solver_finds_all_solutions(houses: int, attributes: int, data: st.DataObject) -> None:
    values = st.integers(0, houses * attributes - 1)
    clues = []
    for kind in data.draw(st.lists(st.sampled_from(["at", "not_at", *STEPS]), max_size=4)):
        second = st.integers(0, houses - 1) if kind in ("at", "not_at") else values
        clues.append(Clue(kind, data.draw(values), data.draw(second)))
    orders = list(permutations(range(houses)))
    grids = [list(a) for a in orders] if attributes == 1 else [[*a, *b] for a in orders for b in orders]
    expected = [places for places in grids if all(holds(clue, places) for clue in clues)]
    assert sorted(solutions(houses, attributes, clues, limit=10**6)) == sorted(expected)


def test_difficulty_grows_and_seeds_reproduce_and_splits_are_apart() -> None:
    counts = [sum(len(make_grid(random.Random(i), n, n).clues) for i in range(4)) for n in (2, 3, 4, 5, 6)]
    assert counts == sorted(set(counts))
    task = ZebraTask("zebra", 2, 2)
    assert task.items("test")[3] == ZebraTask("zebra", 2, 2).items("test")[3]
    clues = {s: {tuple(sorted(read(task.items(s)[i])[1])) for i in range(100)} for s in ("train", "test")}  # type: ignore[arg-type]
    assert not clues["train"] & clues["test"]


def test_a_number_is_right_as_text_and_as_a_number() -> None:
    said = '{"solution": {"House 1": {"Price": 5.5, "Year": 1999, "Pet": true}}}'
    assert cells_right(["House", "Price", "Year", "Pet"], [["1", "5.5", "1999", "true"]], said) == (2, 3)


def test_one_wrong_cell_is_a_wrong_puzzle(score: Score) -> None:
    task, by_cell = ZebraTask("zebra", 3, 3), ZebraTask("zebra", 3, 3, "cells")
    item = task.items("train")[0]
    table = grid(item)
    assert score(task, [(item, answer(table))]) == [1.0]
    loud = {h: {c: [f"  {v.upper()} "] for c, v in cells.items()} for h, cells in table.items()}
    assert score(task, [(item, answer(loud))]) == [1.0]
    for house, cells in table.items():
        for column in cells:
            wrong = json.loads(json.dumps(table))
            wrong[house][column] = "nobody"
            missing = json.loads(json.dumps(table))
            del missing[house][column]
            assert score(task, [(item, answer(wrong)), (item, answer(missing))]) == [0.0, 0.0]
            assert score(by_cell, [(item, answer(wrong))]) == [8 / 9]
    assert score(task, [(item, answer(table) + "\nor {}"), (item, json.dumps(table)), (item, "")]) == [0.0, 0.0, 0.0]
    assert not task.success(8 / 9)


@pytest.mark.parametrize(
    "text", ["", "{", "}", "{}", '{"solution": 1}', '{"solution": {"House 1": []}}', "{'solution': 2}", "{{}", "[1]"]
)
def test_answers_that_are_no_grids_score_nothing(text: str, score: Score) -> None:
    task = ZebraTask("zebra", 2, 2)
    assert score(task, [(task.items("train")[0], text)]) == [0.0]


@given(st.text() | st.text(alphabet='{}[]":, solutionHouse 1\n'))
def test_no_text_crashes_it(text: str) -> None:
    found = last_json(text)
    assert found is None or json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("part", ["{}", '{"a":', "[", "\ud800"])
def test_a_megabyte_is_read(part: str, score: Score) -> None:
    task = ZebraTask("zebra", 2, 2)
    text = part * (10**6 // len(part))
    assert score(task, [(task.items("train")[0], text), (task.items("train")[0], text + "}" * (10**6 // len(part)))]) == [
        0.0,
        0.0,
    ]


def test_a_row_without_a_table_is_named() -> None:
    with pytest.raises(UserError, match="item x: solution: the rows of the solution are not as long as its header"):
        ZebraTask("zebralogic").row_item({"puzzle": "p", "solution": {"header": ["House", "Name"], "rows": [["1"]]}}, "x")


def test_reference_grids_are_right_and_one_changed_cell_is_wrong(bench: Any, score: Score) -> None:
    task, rng = ZebraTask("zebralogic"), random.Random(0)
    right, wrong = [], []
    for row in bench("zebralogic/test"):
        item = task.row_item(row, row["id"])
        right.append((item, answer(grid(item))))
        table = grid(item)
        column = rng.choice(item.data["header"][1:])
        one, other = rng.sample(sorted(table), 2)
        spoilt = {house: dict(cells) for house, cells in table.items()}
        spoilt[one][column] = table[other][column]
        wrong.append((item, answer(spoilt)))
    assert set(score(task, right)) == {1.0}
    assert set(score(task, wrong)) == {0.0}
