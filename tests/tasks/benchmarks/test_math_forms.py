"""Answers that look like a number with a unit and are none, answers made to stall a pattern, and the verdicts' own channel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pace import processor_seconds

from teamtr_lora.tasks.benchmarks import math_answer, math_pool
from teamtr_lora.tasks.benchmarks.math_tasks import READERS, MathTask
from teamtr_lora.tasks.machinery.task import Item


@pytest.fixture(scope="module")
def task() -> MathTask:
    return MathTask("math500", answer_seconds=1.0)


def right(task: MathTask, pairs: list[tuple[str, str]], problem: str = "") -> list[bool]:
    items = [Item("i", "p", {"answer": gold, "problem": problem}) for gold, _ in pairs]
    return task._right(items, [f"\\boxed{{{answer}}}" for _, answer in pairs])


ANOTHER_NUMBER = [
    *(
        ("5", f"5 {word}")
        for word in ("dozen", "dozens", "squared", "cubed", "factorial", "doubled", "halved", "negative", "root")
    ),
    *(("5", f"5 {words}") for words in ("below zero", "degrees below zero", "hundred thousand", "times two", "thirds of a pie")),
    *(("5", rf"5\text{{ {words}}}") for words in ("dozen eggs", "squared", "factorial", "below zero", "millionths")),
    ("5", "negative 5"),
    ("5", "minus 5"),
    ("3", "3 halves"),
    ("2", "2 thirds"),
    ("2", "2 quarters"),
    ("2", "2 fifths"),
    ("2", "2 tenths"),
    ("2", r"2\text{ tenths}"),
    ("2", "2 root 3"),
    ("0.2", "2 tenths percent"),
    ("500", "5 hundred twenty"),
    (r"2\text{ dozen}", "2"),
]
SAME_NUMBER = [
    ("60", "5 dozen"),
    ("60", r"5\text{ dozen eggs}"),
    (r"5\text{ dozen}", "60"),
    ("25", "5 squared"),
    ("125", "5 cubed"),
    ("5", "5 meters squared"),
    (r"5\text{ m}^2", "5 m squared"),
    ("0.2", "2 tenths"),
    ("1.5", "3 halves"),
    (r"\frac{2}{3}", "2 thirds"),
    ("500000", "5 hundred thousand"),
    ("-5", "negative 5"),
    ("-5", r"\text{minus }5"),
    ("-5", "negative $5"),
    ("6", r"6\text{ times}"),
    ("3", "3 real roots"),
    (r"2\text{ million}", "2"),
]


def test_a_word_for_an_amount_is_no_unit(task: MathTask) -> None:
    found = right(task, ANOTHER_NUMBER + SAME_NUMBER)
    assert [pair for pair, said in zip(ANOTHER_NUMBER, found, strict=False) if said] == []
    assert [pair for pair, said in zip(SAME_NUMBER, found[len(ANOTHER_NUMBER) :], strict=True) if not said] == []


@pytest.mark.parametrize("word", ["dozen", "quarters", "million"])
def test_the_problem_may_ask_for_dozens(task: MathTask, word: str) -> None:
    pairs = [("5", f"5 {word}"), ("5", rf"5\text{{ {word}}}"), ("5", "5"), ("6", f"5 {word}")]
    assert right(task, pairs, f"How many {word} are there?") == [True, True, True, False]
    assert right(task, pairs, f"She has 5 {word}. How many is that?") == [False, False, True, False]


@pytest.mark.parametrize("sign", [r"\geq ", r"\le", r"\neq ", ">", "≤ ", r"\to ", r"977 \Rightarrow ", r"x \neq "])
@pytest.mark.parametrize("gold", ["18", r"\frac{3}{2}", r"\left( \frac{1}{4}, \frac{3}{4} \right)", "x^2+1"])
def test_a_relation_is_no_value(task: MathTask, gold: str, sign: str) -> None:
    assert right(task, [(gold, sign + gold)]) == [False]


def test_what_cannot_be_read_holds_no_answer(task: MathTask) -> None:
    pair = r"\left( \frac{1}{4}, \frac{3}{4} \right)"
    wrong = [
        (pair, "-" + pair),
        (pair, r"\frac{1}{2}" + pair),
        (r"\frac{1}{3}", r"\frac{1}{3} <"),
        (r"\frac{1}{2}", r"3(\frac{1}{2},4)"),
    ]
    wrong += [(r"\frac{1}{3}", r"\begin{cases} \frac{1}{2} & x<0 \\ \frac{1}{3} & x>0 \end{cases}")]
    assert right(task, wrong) == [False] * len(wrong)
    same = [
        (pair, pair.replace(r"\left", "").replace(r"\right", "")),
        ("8.24", r"\approx 8.24"),
        (r"\approx 8.24 \text{ mph}", "8.24"),
    ]
    assert right(task, same) == [True] * len(same)


def test_feet_and_inches_are_not_the_feet(task: MathTask) -> None:
    forms = [
        r"18 \text{ feet } 6 \text{ inches}",
        r"18\text{ ft }6\text{ in}",
        "18 hours 30 minutes",
        r"18\text{ hr. }30\text{ min.}",
    ]
    assert right(task, [("18", form) for form in forms]) == [False] * len(forms)
    assert right(task, [("18", r"18 \text{ square feet}"), ("18", r"18\text{ m}^2"), ("18", r"x \text{ is } 18")])[:2] == [
        True,
        True,
    ]


def test_complex_numbers_are_equal_however_i_is_written(task: MathTask) -> None:
    same = [("6-5i", form) for form in (r"6 - 5\cdot i", "6+(-5)i", "-5i+6", r"6-\sqrt{25}i", "6-i5")]
    same += [(r"-\frac{1}{2}+\frac{3}{2}i", r"\frac{-1+3i}{2}"), (r"\frac{-1+3i}{2}", r"-\frac{1}{2}+\frac{3}{2} i")]
    assert right(task, same) == [True] * len(same)
    assert right(task, [("6-5i", r"6+5\cdot i"), (r"-\frac{1}{2}+\frac{3}{2}i", r"\frac{-1+2i}{2}")]) == [False, False]


def test_digits_in_groups_are_one_number_wherever_they_stand(task: MathTask) -> None:
    same = [(r"\dfrac{2469}{20,\!000}", r"\frac{2469}{20000}"), (r"\frac{1}{29322216}", r"\frac{1}{29,322,216}")]
    same += [(r"1000\pi", r"1,000\pi"), (r"1000\pi", r"1{,}000\pi"), (r"1000\sqrt{2}", r"1,000 \sqrt{2}"), ("1000x", "1,000x")]
    assert right(task, same) == [True] * len(same)
    other = [
        (r"\frac{2469}{20000}", r"\frac{2469}{20,001}"),
        ("(2,100)", "2100"),
        (r"\{2,100\}", r"\{2100\}"),
        (r"1000\pi", r"1,001\pi"),
    ]
    assert right(task, other) == [False] * len(other)


@pytest.mark.parametrize("gold", [r"20\text{ miles}", r"(2,12) \cup (12,102)", "x^2+1", "18"])
def test_signs_of_maths_around_an_answer_are_not_part_of_it(task: MathTask, gold: str) -> None:
    forms = [rf"\({gold}\)", rf"\[{gold}\]", rf"\( {gold} \)"]
    assert right(task, [(gold, form) for form in forms]) == [True] * 3
    assert right(task, [(gold, rf"\({gold}\) \text{{ or }} \(977\)")]) == [False]


def test_a_name_before_the_number_splits_no_vote() -> None:
    for text in ("x = 5", "$x=5$", r"\text{total} = 5.0", "m + n = 5", "5 dollars"):
        assert math_answer.canonical(text) == math_answer.canonical("5") == "5"
    assert math_answer.canonical(r"x = \sqrt{2}") == math_answer.canonical(r"\sqrt{2}")
    assert len({math_answer.canonical(text) for text in ("5", "6", "5%", "x = 7", "x =")}) == 5


RUNS = [" ", "\t", "\n", " \n", "\u00a0", "\u2003", "1", "1 ", ",", "1,", ".", "\\", "\\ ", "\\,", "{", "}", "(", "$", "-"]
RUNS += ["- ", "^", "1^{", "=", "a ", "a", "a.", "*", "/", "1/", "\\frac", "\\frac1", "\\text{", "\\text{a}", "_{", "√"]
RUNS += ["\\infty ", "%", "°", "#### ", "####"]
STARTS = ["", "1", "-", "1.", "$", "x", "\\frac", "\\frac{", "1_", "[", "\\infty", "\\phantom", "3 cm"]
MARKS = ["####", "####x=", "#### -", "#### $", "answer", "answer:", "\\boxed ", "\\boxed{", "\\boxed 1"]


@pytest.mark.parametrize("run", RUNS)
def test_no_run_of_signs_stalls_a_pattern(run: str) -> None:
    """All this is outside of the pool's time limit."""
    texts = [(first + run * length)[: length - 1] + last for first in STARTS for last in "!x" for length in (190, 1990)]
    with processor_seconds(1):
        for text in texts:
            math_answer.quick("18", text)
            math_answer.canonical(text)
            math_answer.for_algebra(text)


@pytest.mark.parametrize("start", MARKS)
@pytest.mark.parametrize("run", [" ", "\t", "1", ",", "* ", "a", "="])
def test_no_run_of_signs_stalls_a_reader(start: str, run: str) -> None:
    with processor_seconds(0.1):
        for readers in READERS.values():
            math_answer.stated(start + run * 5000 + "!", readers)


def test_what_a_library_prints_is_no_verdict() -> None:
    """By Python, and by C code that knows the number only."""
    program = (
        "import os, sys; sys.path.insert(0, sys.argv.pop(1)); import math_worker as w; was = w.equal\n"
        "def loud(gold, answer):\n    print('1', flush=True); os.write(1, b'1\\n'); return was(gold, answer)\n"
        "w.equal = loud; w.main()"
    )
    pairs = [("x+1", "x+2"), ("x+1", "1+x"), ("x+1", "x+3")]
    run = [sys.executable, "-P", "-c", program, str(Path(math_pool.__file__).parent), "3"]
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
    done = subprocess.run(run, input=lines, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["ready", "0", "1", "0"]
