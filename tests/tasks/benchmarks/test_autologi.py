"""Open puzzles: the official item format, answers in their wrappings, and generated puzzles against a search of their own."""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.benchmarks.autologi import AutoLogi, answer_in
from teamtr_lora.tasks.benchmarks.autologi_maker import DAYS, MAKERS
from teamtr_lora.tasks.machinery.task import Item, Task

Score = Callable[[Task, Sequence[tuple[Item, str]]], list[float]]
ROW = {
    "prompt": "Put a, b, c in an order.",
    "code": {
        "Inputs_Check_code": "def inputs_check(inputs):\n    return sorted(inputs['order']) == ['a', 'b', 'c']",
        "Constraint_List_code": "def first(inputs):\n    return inputs['order'][0] == 'a'\n"
        "def second(inputs):\n    return inputs['order'].index('b') > 1\nconstraint_list = [first, second]",
    },
}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"order": ["a", "c", "b"]}', 1),
        ("So:\n```python\ninputs = {'order': ['a', 'c', 'b']}\n```", 1),
        ("```json\n{\"order\": [\"a\", \"b\", \"c\"]}\n```\nno:\n```\n{'order': ('a', 'c', 'b')}\n```", 1),
        ("The set {x} gives {'order': ['a', 'c', 'b']}.", 1),
        ("```python\n# the order\ninputs = {'order': ['a', 'c', 'b']}\nprint(inputs)\n```", 1),
        ("```python\nprint({'order': ['a', 'c', 'b']})\n```", 1),
        ('```json\n{\n  "order": ["a", "c", "b"] // a first\n}\n```', 1),
        ("```\ninputs = {'order': ['a', 'c', 'b'], 'sure': true}\n```\nDone:\n```\nyes\n```", 1),
        ("\\boxed{{'order': ['a', 'c', 'b']}}", 1),
        ("\\boxed{\\{'order': ['a', 'c', 'b']\\}}", 1),
        ("{'order': ['a', 'c', 'b']} (see [1])", 1),
        ("```python\ninputs = {'order': ['a', 'b', 'c']}\nprint(inputs)\n```", 0),
        ("```python\ninputs = {'order': sorted(['a', 'c', 'b'])}\n```", 0),
        ("\\boxed{{'order': ['a', 'b', 'c']}}", 0),
        ('{"order": ["a", "b", "c"]}', 0),
        ('{"order": ["a", "c", "c"]}', 0),
        ('{"order": ["a", "c"]}', 0),
        ('{"wrong": 1}', 0),
        ("['a', 'c', 'b']", 0),
        ("a, c, b", 0),
        ("{'order': __import__('os')}", 0),
        ("", 0),
    ],
)
def test_the_format_and_every_constraint_must_hold(text: str, right: int, score: Score) -> None:
    task = AutoLogi()
    assert score(task, [(task.row_item(ROW, "1"), text)]) == [right]


CHECK, FIRST, SECOND = (
    ROW["code"]["Inputs_Check_code"],  # type: ignore[index]
    "def rule(inputs):\n    return inputs['order'][0] == 'a'",
    "def rule(x):\n    return x['order'].index('b') > 1",
)


@pytest.mark.parametrize(
    "row",
    [
        {"idx": 7, **ROW, "lang": "en"},
        {"puzzle": "p", "inputs_check": CHECK, "constraints": [FIRST, SECOND]},
        {"question": "p", "format_check": CHECK.replace("inputs_check", "is_order"), "constraint_list": [FIRST, f"{SECOND}\n"]},
        {
            "prompt": "p",
            "code": {"Inputs_Check_code": CHECK, "Constraint_List_code": f"{FIRST}\n\n{SECOND.replace('rule', 'last')}"},
        },
        {"prompt": "p", "inputs_check_code": CHECK, "constraints": ["lambda x: x['order'][0] == 'a'", SECOND]},
        {
            "prompt": [{"role": "user", "content": "p"}],
            "reward_model": {"ground_truth": json.dumps({"inputs_check_code": CHECK, "constraint_list_code": [FIRST, SECOND]})},
        },
    ],
)
def test_other_layouts_of_an_item(row: dict[str, Any], score: Score) -> None:
    """Every constraint is asked, also where two have one name."""
    task = AutoLogi()
    item = task.row_item(row, "1")
    orders = [["a", "c", "b"], ["a", "b", "c"], ["c", "a", "b"], ["a", "b"]]
    assert score(task, [(item, json.dumps({"order": order})) for order in orders]) == [1.0, 0.0, 0.0, 0.0]


def test_a_bad_program_costs_its_own_item_only(score: Score) -> None:
    task = AutoLogi(check_seconds=1.0)
    good, answer = task.row_item(ROW, "1"), '{"order": ["a", "c", "b"]}'
    bad = Item("2", "p", {"check": "def inputs_check(x):\n    while True: pass", "constraints": "constraint_list = []"})
    broken = Item("3", "p", {"check": "def inputs_check(", "constraints": ""})
    assert score(task, [(good, answer), (bad, answer), (broken, answer), (good, answer)]) == [1.0, 0.0, 0.0, 1.0]
    with pytest.raises(UserError, match="item x: has no inputs_check_code"):
        task.row_item({"prompt": "p", "code": {}}, "x")


def test_no_constraints_accept_nothing(score: Score) -> None:
    task = AutoLogi()
    with pytest.raises(UserError, match="item x: constraints = \\[\\]"):
        task.row_item({"prompt": "p", "inputs_check": CHECK, "constraints": []}, "x")
    empty = task.row_item({"prompt": "p", "inputs_check": CHECK, "constraints": "constraint_list = []"}, "x")
    assert score(task, [(empty, '{"order": ["a", "c", "b"]}')]) == [0.0]


def candidates(kind: str, people: list[str]) -> Iterator[Any]:
    size = len(people)
    if kind == "ordering":
        return map(list, itertools.permutations(people))
    if kind == "selection":
        return map(list, itertools.combinations(people, max(2, size // 2)))
    return (dict(zip(people, days, strict=True)) for days in itertools.product(DAYS, repeat=size))


def accepted(puzzle: Any, answer: Any) -> bool:
    return all(eval(code, {"x": answer}) for code in (puzzle.check, *(rule.code for rule in puzzle.rules)))


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_generated_puzzles_have_solutions_found_by_search_and_get_harder(kind: str) -> None:
    shares = []
    for size in (3, 5, 6):
        found = []
        for seed in range(12):
            puzzle = MAKERS[kind](random.Random(seed), size)
            everything = list(candidates(kind, puzzle.people))
            right = [answer for answer in everything if accepted(puzzle, answer)]
            assert puzzle.example in right
            found.append(len(right) / len(everything))
        shares.append(sum(found) / len(found))
    assert shares[0] > shares[-1]  # a guess is right less often


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_the_rules_of_a_puzzle_are_of_different_kinds(kind: str) -> None:
    shapes, kinds = set(), set()
    for seed in range(100):
        for size in (3, 5, 7):
            rules = MAKERS[kind](random.Random(seed), size).rules
            used = [rule.kind for rule in rules]
            assert len(used) == size and len({rule.text for rule in rules}) == size
            assert len(set(used)) == size, used
            shapes.add(tuple(sorted(used)))
            kinds |= set(used)
    assert len(kinds) >= 8 and len(shapes) >= 60, "of 300 puzzles"


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_every_kind_of_rule_excludes_something(kind: str) -> None:
    """A sentence that is true of every arrangement would be no constraint, and its code would go unnoticed if it were wrong."""
    excluding: dict[str, bool] = {}
    for seed in range(60):
        puzzle = MAKERS[kind](random.Random(seed), 4)
        answers = list(candidates(kind, puzzle.people))
        for rule in puzzle.rules:
            share = sum(bool(eval(rule.code, {"x": answer})) for answer in answers) / len(answers)
            assert 0 < share <= 1
            excluding[rule.kind] = excluding.get(rule.kind, False) or share < 1
    assert all(excluding.values()), excluding


def test_generated_items_score_their_example_and_refuse_spoilt_ones(score: Score) -> None:
    task = AutoLogi(4)
    right, wrong = [], []
    for position in range(9):
        item = task.items("train")[position]
        example = item.data["example"]
        right.append((item, f"```json\n{json.dumps(example)}\n```"))
        short = example[:-1] if isinstance(example, list) else dict(list(example.items())[:-1])
        wrong.append((item, f"```json\n{json.dumps(short)}\n```"))
    assert score(task, right + wrong) == [1.0] * 9 + [0.0] * 9


def test_seeds_reproduce_and_splits_are_apart() -> None:
    task = AutoLogi(4)
    assert task.items("test")[2] == AutoLogi(4).items("test")[2]
    prompts = {split: {task.items(split)[i].prompt for i in range(200)} for split in ("train", "test")}  # type: ignore[arg-type]
    assert not prompts["train"] & prompts["test"]


@given(st.text() | st.text(alphabet="{}[]`json\n=x'\""))
def test_no_text_crashes_it(text: str) -> None:
    found = answer_in(text)
    assert found is None or found in text


@pytest.mark.parametrize("part", ["{", "}", "```\n", "[", "]", "```json\n{}\n```\n", "\x00"])
def test_a_megabyte_is_read(part: str) -> None:
    text = part * (10**6 // len(part))
    found = answer_in(text)
    assert found is None or found in text
