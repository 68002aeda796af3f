"""Train items that are test items too: found, named, refused or dropped."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pace import processor_seconds

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe.task_by_name import task_settings
from teamtr_lora.tasks.machinery.overlap import bare_problem, normalised, shared_items


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is $1+1$?", "what is 1 + 1", True),
        ("Find  $\\dfrac{1}{2}$.\n", "Find $\\frac{1}{2}$", True),
        ("Let $\\left( x \\right)$", "Let $(x)$", True),
        ("Solve \\[x = 1\\]", "Solve \\(x=1\\).", True),
        ("What is 3+4?", "What is 3-4?", False),
        ("What is 34?", "What is 3/4?", False),
        ("?", "!", False),
        ("Let $a \\leq b$.", "Let $a\\le b$", True),
        ("Let a ≤ b", "Let $a \\le b$", True),
        ("$x^2 \\geqslant \\frac12$", "$x^{2} \\ge \\dfrac{1}{2}$", True),
        ("$1, 2, \\ldots, n$", "$1,2,\\cdots,n$", True),
        ("The $n^\\text{th}$ of 10,000", "The $n^{th}$ of $10{,}000$", True),
        ("Is \\textbf{it} 90°?", "Is it $90^\\circ$?", True),
        ("\\begin{align*}x&=1\\end{align*}", "\\[x&=1\\]", True),
        ("Take 1.5 of it", "Take 15 of it", False),
        ("At (1,2)", "At (12)", False),
        ("Ratio 3:4", "Ratio 34", False),
        ("Is 3 4 prime?", "Is 34 prime?", False),
        ("$\\frac{1}{23}$", "$\\frac{12}{3}$", False),
        ("$2^{3}4$", "$2^{34}$", False),
        ("Find 5!", "Find 5", False),
        ("Find $f'(x)$", "Find $f(x)$", False),
    ],
)
def test_copies_of_a_problem_are_the_same(one: str, other: str, same: bool) -> None:
    assert (normalised(one) == normalised(other)) == same


@given(st.text())
def test_no_text_crashes_it(text: str) -> None:
    assert normalised(text) == normalised(text)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["math500", "dataset"])
def test_overlap_is_refused_with_the_pairs_named_or_dropped(name: str, tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def zero(prompts, **_):\n    return [0.0] * len(prompts)\n")
    column = "problem" if name == "math500" else "prompt"
    train = [{"id": "a", column: "What is  1+1?", "answer": "2"}, {"id": "b", column: "What is 2+2?", "answer": "4"}]
    write(tmp_path / "train.jsonl", train)
    write(tmp_path / "test.jsonl", [{"id": "c", column: "What is $1 + 1$", "answer": "2"}])
    settings = ["path=train.jsonl", "test_path=test.jsonl"] + (["reward=my_rewards:zero"] if name == "dataset" else [])
    with pytest.raises(UserError, match=r"1 train items are test items too.*train-0 \(a\) = test-0 \(c\).*on_overlap=drop"):
        task_settings(name, settings).build(tmp_path)
    task = task_settings(name, [*settings, "on_overlap=drop"]).build(tmp_path)
    assert task.items("train").size == 1 and "2+2" in task.items("train")[0].prompt
    assert task.items("test").size == 1


def test_a_share_held_out_never_has_a_copy_in_train(tmp_path: Path) -> None:
    rows = [{"problem": f"{'  ' * (i % 2)}Problem {i // 2}", "answer": "1"} for i in range(60)]
    write(tmp_path / "all.jsonl", rows)
    task = task_settings("gsm8k", ["path=all.jsonl", "test_fraction=0.3"]).build(tmp_path)
    texts = {s: {normalised(task.items(s)[i].prompt) for i in range(task.items(s).size or 0)} for s in ("train", "test")}  # type: ignore[arg-type]
    assert texts["train"] and texts["test"] and not texts["train"] & texts["test"]


FRAME = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem."
    '\n\n{}\n\nRemember to put your answer on its own line after "Answer:".'
)


@pytest.mark.parametrize("frame", ["{}", FRAME, "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."])
def test_an_instruction_around_a_problem_hides_no_copy(frame: str) -> None:
    problem = "Solve $x^2 = 4$ step by step, and put $y = x$.\n\nThen find $y$."
    assert bare_problem(frame.format(problem)) == problem
    assert normalised(frame.format(problem)) == normalised(problem) != normalised(problem + "z")


def test_a_long_text_is_read_in_time() -> None:
    words = ("\\text{", "\\frac{", "\\boxed{Answer: ", "Solve the following math problem step by step. ")
    with processor_seconds(8):
        for part in ("1 ", " ", "}", "1,", *words):
            normalised(part * (300_000 // len(part)))


def test_math_problems_inside_dapo_are_found(bench: Any) -> None:
    """Also in the layout that DAPO itself has, with an instruction around every problem."""
    dapo = [(str(r["id"]), r["problem"]) for r in bench("dapo_math_17k/train")]
    math = [(r["id"], r["problem"]) for r in bench("math500/test")]
    found = shared_items(dapo, math)
    assert len(found) >= 3  # six in the whole of MATH-500
    assert shared_items([(name, FRAME.format(dict(dapo)[name])) for name, _ in found], math) == found
