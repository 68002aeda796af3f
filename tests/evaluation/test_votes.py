"""What the tasks say to a majority, and what results are reported by."""

import json
from typing import Any

import pytest

from teamtr_lora.evaluation.outcome import Attempt, judge
from teamtr_lora.tasks import Item, Task
from teamtr_lora.tasks.benchmarks.autologi import AutoLogi
from teamtr_lora.tasks.benchmarks.math_answer import canonical
from teamtr_lora.tasks.benchmarks.math_tasks import MathTask
from teamtr_lora.tasks.benchmarks.planbench import Blocksworld
from teamtr_lora.tasks.benchmarks.zebra import ZebraTask
from teamtr_lora.tasks.generated.column_sum import ColumnSum
from teamtr_lora.tasks.generated.countdown import Countdown
from teamtr_lora.tasks.generated.small import SmallTask
from teamtr_lora.tasks.machinery.score import play


@pytest.mark.parametrize(
    ("answers", "same"),
    [
        (["1/2", "0.5", r"\frac12", r"\dfrac{1}{2}", ".50"], True),
        (["1,000", "1000", "1000.0", r"\$1000"], True),
        ([r"\text{Evelyn}", "Evelyn"], True),
        ([r"\left(1, 2\right)", "(1,2)"], True),
        (["1/2", "1/3"], False),
        (["x+1", "x+2"], False),
        (["12", "21"], False),
    ],
)
def test_answers_that_are_plainly_the_same_count_together(answers: list[str], same: bool) -> None:
    assert (len({canonical(answer) for answer in answers}) == 1) is same


def vote(task: Task, item: Item, *texts: str) -> str | None:
    return task.vote(play(task, item, texts))


def test_votes_of_the_tasks() -> None:
    math = MathTask("math500")
    item = Item("x", "p", {"answer": "1/2"})
    assert vote(math, item, r"\boxed{0.5}") == vote(math, item, "so", r"\boxed{\frac12}") == "1/2"
    assert vote(math, item, "0.5") is None and vote(math, item) is None
    assert vote(SmallTask("products"), item, "it is 42") == "42"
    columns = Item("x", "17+25", {"totals": [12, 4]})
    assert vote(ColumnSum(2), columns, "=12", "=4") == "12 4", "every message is a part of the answer"
    assert vote(ColumnSum(2), columns, "=12", "=4", "=11") == "11 4" and vote(ColumnSum(2), columns, "=12") is None


def test_votes_on_grids_and_plans() -> None:
    grid, zebra = {"House 2": {"Name": "Bob"}, "House 1": {"Name": "Ann"}}, ZebraTask("zebra")
    item = Item("x", "p", {})
    plain, lower = json.dumps({"solution": grid}), json.dumps({"solution": dict(sorted(grid.items()))}).lower()
    assert vote(zebra, item, plain) == vote(zebra, item, "so\n" + lower) is not None
    other = json.dumps({"solution": {**grid, "House 1": {"Name": "Eve"}}})
    assert vote(zebra, item, other) not in (None, vote(zebra, item, plain)), "another grid is another vote"
    assert vote(zebra, item, '{"solution": 3}') is None and vote(zebra, item, "{") is None
    nested = ['{"solution":' + '{"a":' * depth + "1" + "}" * (depth + 1) for depth in (3, 200_000)]
    assert vote(zebra, item, nested[0]) == '{"a": {"a": {"a": 1}}}'
    assert vote(zebra, item, nested[1]) is None, "too deep to be read: no vote, and no crash"
    blocks = Blocksworld(2)
    problem = blocks.items("test")[0]
    said = ["pick up the red block\nstack the red block on top of the blue block", "(pick-up a)\n(stack a b)"]
    assert vote(blocks, problem, said[0]) == vote(blocks, problem, said[1]) is not None
    assert vote(blocks, problem, "hello") is None


def test_categories_come_with_the_rows() -> None:
    math = MathTask("math500")
    rows: list[dict[str, Any]] = [
        {"problem": f"p{i}", "answer": "1", "subject": "Algebra", "level": 5, "other": 2, "type": None} for i in range(4)
    ]
    math.use_rows(rows[:2], rows[2:], 0.5)
    assert math.categories(math.items("test")[0]) == {"subject": "Algebra", "level": "5"}
    assert Blocksworld(3).categories(Blocksworld(3).items("test")[0]) == {"blocks": "3"}
    assert ZebraTask("zebra", 2, 3).categories(ZebraTask("zebra", 2, 3).items("test")[0]) == {"size": "2x3"}
    assert SmallTask("products").categories(SmallTask("products").items("test")[0]) == {}


def test_equal_answers_vote_together_however_they_are_laid_out() -> None:
    item = Item("i", "?", {})
    assert vote(Countdown(), item, "(4 + 1) * 3") == vote(Countdown(), item, "(4+1)*3") != vote(Countdown(), item, "3+4+1")
    assert vote(Countdown(), item, "3+/4") is None
    table = {"b": [1, 2], "a": "x"}
    for spelled in ([json.dumps(table), json.dumps(table, indent=1)], [repr(table), repr(table).replace(" ", "")]):
        assert len({vote(AutoLogi(), item, f"```json\n{text}\n```") for text in spelled}) == 1
    assert vote(AutoLogi(), item, "[" * 9000 + "]" * 9000) is not None, "no depth of brackets stops an evaluation"
    names = [json.dumps({"solution": {"House 1": {"Name": name}}}) for name in ("Bob", [" bob"], ["Bob", "Al"])]
    assert len({vote(ZebraTask("zebra"), item, text) for text in names}) == 1


def test_the_vote_of_a_team_that_has_voted_is_that_of_the_message_that_answers() -> None:
    item = Item("i", "?", {"answer": "42"})
    episode = play(SmallTask("products"), item, ("42", "nobody knows", "7"))
    episode.item, episode.answer_turn = item, 0
    assert judge(Attempt.of(episode), SmallTask("products")).vote == "42"


@pytest.mark.parametrize(
    ("task", "data", "right", "wrong"),
    [
        (SmallTask("products"), {"answer": "42"}, "42", "7"),
        (ColumnSum(1), {"totals": [7], "answer": "7"}, "=7", "=8"),
        (Countdown(), {"numbers": [3, 4], "target": 7}, "3+4", "3*4"),
        (MathTask("math500"), {"answer": "1/2"}, r"\boxed{0.5}", r"\boxed{2}"),
    ],
)
def test_a_score_is_the_answers_wherever_it_was_spoken(task: Task, data: dict[str, Any], right: str, wrong: str) -> None:
    episode = play(task, Item("i", "?", data), (wrong, right, wrong))
    assert task.score([episode]) == [0.0] and task.vote(episode) != task.vote(play(task, Item("i", "?", data), (right,)))
    episode.answer_turn = 1
    assert task.score([episode]) == [1.0] and task.vote(episode) == task.vote(play(task, Item("i", "?", data), (right,)))
