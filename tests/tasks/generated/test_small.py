"""The small generated tasks: answers by another computation, disjoint splits, seeds; countdown's expressions."""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teamtr_lora.tasks.generated.countdown import Countdown, expression_in, value_of
from teamtr_lora.tasks.generated.small import GENERATORS, SmallTask
from teamtr_lora.tasks.machinery.task import Item, Task

Score = Callable[[Task, Sequence[tuple[Item, str]]], list[float]]


def solve(question: str) -> int:
    """The answer from the question's text alone."""
    if question.startswith("Largest"):
        return sorted(int(n) for n in re.findall(r"\d+", question))[-1]
    if question.startswith("How many"):
        letter, word = re.fullmatch(r"How many (\w) in (\w+):", question).groups()  # type: ignore[union-attr]
        return len(re.findall(letter, word))
    left = question.removesuffix("=")
    if "+" in left:
        return sum(map(int, left.split("+")))
    first, second = map(int, left.split("*"))
    return sum([first] * second)


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_right_and_so_are_the_examples(name: str, split: str, score: Score) -> None:
    task = SmallTask(name)
    right, wrong = [], []
    for position in range(100):
        item = task.items(split)[position]  # type: ignore[arg-type]
        *examples, question = item.prompt.split("\n")
        assert solve(question) == int(item.data["answer"])
        for example in examples:
            shown, _, answer = example.rpartition(" ")
            assert solve(shown) == int(answer) and shown != question
        right.append((item, f"It is {item.data['answer']}"))
        wrong.append((item, f"It is {int(item.data['answer']) + 1}"))
    assert set(score(task, right)) == {1.0} and set(score(task, wrong)) == {0.0}


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_no_question_is_on_both_sides_and_seeds_reproduce(name: str) -> None:
    task = SmallTask(name)
    keys = {}
    for split in ("train", "test"):
        lines = [task.items(split)[i].prompt.split("\n")[-1] for i in range(400)]  # type: ignore[arg-type]
        keys[split] = {tuple(sorted(re.findall(r"\d+", line) or [line])) for line in lines}
    assert not keys["train"] & keys["test"]
    assert task.items("test")[9] == SmallTask(name).items("test")[9]


@given(st.sampled_from(sorted(GENERATORS)), st.text() | st.text(alphabet="-0123456789 \n"))
def test_no_text_crashes_a_small_task(name: str, text: str) -> None:
    answer = SmallTask(name).answer(text)
    assert answer is None or (str(int(answer)) == answer and re.search("[0-9]", text))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is 1,188.", "1188"), ("34.0", "34"), ("Answer:34", "34"), ("10-4", "4"), ("= -5", "-5"), ("so 3 r's", "3"),
        ("12.34", None), ("7/34", None), ("12:34", None), ("1e34", None), ("34th", None), ("x34", None), ("none", None),
    ],
)  # fmt: skip
def test_only_a_whole_number_is_an_answer(text: str, answer: str | None) -> None:
    assert SmallTask("largest").answer(text) == answer


RIGHT = [
    "5*3+2",
    r"5 \times 3 + 2 = 17",
    r"\boxed{5 \cdot 3+2}",
    "5x3+2",
    r"\left(5*3\right)+2",
    "Step 1. 5*3+2.",
    "- 5*3+2",
    "2+5·3",
    "2+5⋅3",
    "**5*3+2**",
    "**5*3+2** = 17",
    "5*3+2 = **17**",
    "Answer: **5\u22173 + 2**",
]
WRONG = [
    "x **5*3+2",
    "9**5*3+2",
    "9 ** 5*3+2",
    "-5*3+2",
    "1.5*3+2",
    "5*3+2.7",
    "2^5*3+2",
    "1,5*3+2",
    r"9 \times 5*3+2",
    "100 x 5*3+2",
    r"\frac{5}{3}+2",
]


@pytest.mark.parametrize(("text", "expected"), [(t, 1.0) for t in RIGHT] + [(t, 0.0) for t in WRONG])
def test_an_expression_counts_as_a_whole(text: str, expected: float, score: Score) -> None:
    item = Item("a", "p", {"numbers": [5, 3, 2], "target": 17})
    assert score(Countdown(), [(item, text)]) == [expected]


@pytest.mark.parametrize("numbers", [2, 3, 4, 6])
def test_countdown_items_are_solvable_and_reproduce(numbers: int, score: Score) -> None:
    task = Countdown(numbers)
    items = [task.items("train")[i] for i in range(40)]
    for item in items:
        solution = item.data["solution"]
        assert eval(solution) == item.data["target"]
        assert sorted(map(int, re.findall(r"\d+", solution))) == sorted(item.data["numbers"])
    right = [(i, f"try 1+1... so {i.data['solution']} = {i.data['target']}") for i in items]
    wrong = [(i, f"{i.data['solution']}+1") for i in items] + [(i, str(i.data["target"])) for i in items]
    assert set(score(task, right)) == {1.0} and set(score(task, wrong)) == {0.0}
    keys = {
        s: {(*sorted((i := task.items(s)[n]).data["numbers"]), i.data["target"]) for n in range(200)} for s in ("train", "test")
    }  # type: ignore[arg-type]
    assert not keys["train"] & keys["test"] and task.items("test")[3] == Countdown(numbers).items("test")[3]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(3+4)*5 = 35", Fraction(35)),
        ("8/3", Fraction(8, 3)),
        ("2×3÷4", Fraction(3, 2)),
        ("7-2-1", Fraction(4)),
        ("12/2/3", Fraction(2)),
        ("1/0", None),
        ("(1+2", None),
        ("2**9", None),
        ("3 4 + 5", None),
        ("seven", None),
        ("", None),
        ("42", None),
    ],
)
def test_expressions_are_read_exactly(text: str, value: Fraction | None) -> None:
    expression = expression_in(text)
    found = value_of(expression) if expression else None
    assert (found[0] if found else None) == value


@given(st.text() | st.text(alphabet="0123456789+-*/() ="))
def test_no_text_crashes_countdown(text: str) -> None:
    expression = expression_in(text)
    assert (expression is None) <= (value_of(expression or "") is None)
    assert expression is None or set(expression) <= set("0123456789+-*/() \t\n")


@pytest.mark.parametrize("part", ["(", "9", "1+", "\x00", "((1)", "\ud800"])
def test_a_megabyte_is_read(part: str, score: Score) -> None:
    text = part * (10**6 // len(part))
    task = Countdown()
    assert score(task, [(task.items("train")[0], text)]) == [0.0]
    SmallTask("largest").score([])
    score(SmallTask("largest"), [(SmallTask("largest").items("train")[0], text)])
