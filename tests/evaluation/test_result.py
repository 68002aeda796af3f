"""Every measure of a small evaluation by hand, tables by category, and paired comparisons of two of them."""

import json
import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from teamtr_lora.cli.text.evaluation import print_comparison, print_evaluation
from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation.compare import Comparison, compare
from teamtr_lora.evaluation.outcome import Outcome, problem_digest
from teamtr_lora.evaluation.result import EvaluationResult, make_result
from teamtr_lora.tasks import Item

SETTINGS: dict[str, Any] = {"k": 4, "split": "test", "temperature": 0.8, "policy": {"kind": "team"}}


def outcomes(answers: list[str], *, right: str = "a", levels: str = "", tokens: int = 10) -> list[Outcome]:
    """One string of answers an item; "-" states none."""
    made = []
    for group, votes in enumerate(answers):
        for vote in votes:
            categories = {"level": levels[group]} if levels else {}
            success = vote == right
            made.append(
                Outcome(
                    f"i{group}",
                    f"d{group}",
                    group,
                    float(success),
                    success,
                    None if vote == "-" else vote,
                    {},
                    tokens,
                    50,
                    categories,
                )  # fmt: skip
            )
    return made


def result(*answers: str, **options: Any) -> EvaluationResult:
    settings = {**SETTINGS, "k": len(answers[0])}
    return make_result(outcomes(list(answers), **options), settings, "somewhere")


def values(found: EvaluationResult) -> dict[str, float]:
    return {name: estimate.value for name, estimate in found.measures.items()}


def test_all_measures_by_hand() -> None:
    found = result("aaaa", "aabb", "abbb", "-b-a")
    assert values(found) == pytest.approx(
        {
            "avg@4": (1 + 0.5 + 0.25 + 0.25) / 4,
            "pass@1": 0.5,
            "pass@2": (1 + 5 / 6 + 0.5 + 0.5) / 4,
            "pass@4": 1.0,
            "pass^2": (1 + 1 / 6 + 0 + 0) / 4,
            "pass^4": 0.25,
            "maj@4": (1 + 0.5 + 0 + 0.5) / 4,
            "mean reward": 0.5,
            "sampled tokens per answer": 10,
            "prompt tokens per answer": 50,
        }
    )
    assert found.evaluation.sampled_tokens == 160 and found.evaluation.avg_at_k == 0.5
    avg = found.measures["avg@4"]
    assert avg.low is not None and avg.high is not None and avg.low < 0.5 < avg.high
    assert avg.standard_error == pytest.approx(found.evaluation.standard_error)


def test_a_task_without_answers_has_no_majority() -> None:
    assert "maj@2" not in values(result("--", "--")) and "maj@2" in values(result("--", "-a"))


def test_categories_have_their_own_items_only() -> None:
    found = result("aa", "ab", "bb", "bb", "aa", levels="5115" + "a")
    table = found.categories["level"]
    assert list(table) == ["1", "5", "a"], "numbers first"
    assert {value: items for value, (items, _) in table.items()} == {"1": 2, "5": 2, "a": 1}
    assert table["1"][1]["avg@2"].value == 0.25 and table["5"][1]["avg@2"].value == 0.5
    assert table["a"][1]["avg@2"].low is None, "one item has no interval"
    weighted = sum(items * measures["avg@2"].value for items, measures in table.values()) / 5
    assert weighted == pytest.approx(found.evaluation.avg_at_k)


def test_a_name_for_every_item_is_no_category() -> None:
    assert "level" not in result(*["a"] * 10, levels="0123456789").categories
    assert "level" in result(*["a"] * 10, levels="0123456788").categories


def test_json_is_plain_and_the_table_names_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    found = result("aaaa", "aabb", "abbb", levels="112")
    data = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert data["measures"]["maj@4"]["value"] == pytest.approx(0.5) and data["categories"]["level"]["2"]["items"] == 1
    assert [row["successes"] for row in data["by_item"]] == [4, 2, 1]
    print_evaluation(found)
    text = capsys.readouterr().out
    for part in ("3 test items, k = 4, temperature 0.8", "avg@4", "pass@2", "pass^4", "maj@4", "95% interval", "by level"):
        assert part in text, part
    for alike, bound in ((2, "100%"), (3, "100%"), (7, "42.9%"), (800, "0.375%")):
        print_evaluation(result(*["aa"] * alike))
        assert f"no spread; up to {bound} of unseen" in capsys.readouterr().out


def test_rows_that_say_the_same_once_more_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")

    def rows(of: Any) -> list[str]:
        print_comparison(of) if isinstance(of, Comparison) else print_evaluation(of)
        lines = capsys.readouterr().out.splitlines()
        return [line.split("│")[1].strip() for line in lines if line.startswith("│")]

    tokens, once = [f"{kind} tokens per answer" for kind in ("sampled", "prompt")], result("a", "b", "-")
    assert rows(once) == ["avg@1", *tokens], "nobody judged single messages"
    judged = make_result([replace(o, verdicts={"solver": o.success}) for o in outcomes(["a", "b"])], {**SETTINGS, "k": 1})
    team = ["solver's own answer right", "all agents right together", "... given that the team is right"]
    assert rows(judged) == ["avg@1", *tokens, *team]
    print_evaluation(judged)
    assert re.search(r"own answer right +│ 0.5000 │ \[0.0000, 1.0000\]", capsys.readouterr().out), "1.96 errors, at most"
    assert rows(result("aa", "ab")) == ["avg@2", "pass@1", "pass@2", "pass^2", "maj@2", *tokens]
    print_evaluation(once)
    assert "the same as avg@1 here, and left out: pass@1, maj@1, mean reward" in capsys.readouterr().out
    assert {"pass@1", "maj@1", "mean reward"} <= once.as_dict()["measures"].keys(), "the JSON has all"

    unlike = make_result([replace(o, reward=o.reward / 2) for o in outcomes(["a", "b"])], {**SETTINGS, "k": 1})
    assert rows(unlike) == ["avg@1", "mean reward", *tokens]
    assert rows(compare(once, result("b", "b", "a"), ["A", "B"])) == ["avg@1", *tokens]
    assert rows(compare(result("a", "b"), unlike, ["A", "B"])) == ["avg@1", "mean reward", *tokens]

    one = {**SETTINGS, "k": 1, "policy": {"kind": "cot", "agent": None}}
    alone = make_result([replace(o, verdicts={"solver": o.success}) for o in outcomes(["a", "b"])], one)
    assert alone.evaluation.agents["solver"] is not None and rows(alone) == ["avg@1", *tokens]


def test_comparing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    first, second = result("a", "b", "b", "b", "b", "a", "b"), result("a", "a", "a", "a", "a", "b", "a", tokens=20)
    found = compare(first, second, ["A", "B"])
    test = found.tests["avg@1"]
    assert (test.better, test.worse, test.difference) == (5, 1, pytest.approx(4 / 7))
    assert test.mcnemar_p_value == pytest.approx(2 * (1 + 6) / 64)
    assert found.tests["sampled tokens per answer"].difference == 10
    print_comparison(found)
    text = capsys.readouterr().out
    assert "7 items, k = 1" in text and "McNemar" in text and "+0.5714" in text and "5 / 1" in text
    assert "no interval for sampled tokens per answer, prompt tokens per answer: every item changed by the same" in text
    assert "[+10.0, +10.0]" not in text and asdict(found)["tests"]["sampled tokens per answer"]["low"] is None
    json.dumps(asdict(found), allow_nan=False)


def test_comparing_needs_the_same_items() -> None:
    first = result("aa", "ab")
    with pytest.raises(UserError, match="A has 2 and B has 3; give --limit"):
        compare(first, result("aa", "ab", "ab"), ["A", "B"])
    with pytest.raises(UserError, match="A is sampled 2 times an item and B 1 times; give --k"):
        compare(first, result("a", "b"), ["A", "B"])
    other = replace(first, rows=[first.rows[0], replace(first.rows[1], item="x")])
    with pytest.raises(UserError, match="item 1 is 'i1' in A and 'x' in B"):
        compare(first, other, ["A", "B"])
    other = replace(first, rows=[first.rows[0], replace(first.rows[1], digest="x")])
    with pytest.raises(UserError, match="item 'i1' is not the same problem"):
        compare(first, other, ["A", "B"])


def test_what_makes_two_items_the_same_problem() -> None:
    item = Item("x", "1+1\nIn a box.", {"problem": "1+1", "answer": "2"})
    assert problem_digest(item) == problem_digest(replace(item, prompt="1+1\nPlease.")), "instructions may differ"
    assert problem_digest(item) != problem_digest(replace(item, data={"problem": "1+1", "answer": "3"}))
    assert problem_digest(Item("x", "a")) != problem_digest(Item("x", "b"))
    problem_digest(Item("x", "\ud800", {(1, 2): object(), "k": {3: "x", "y": 1}}))  # type: ignore[dict-item]
