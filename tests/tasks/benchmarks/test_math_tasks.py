"""Answers to mathematical problems: what counts as one, what is equal to it, and that no answer stalls the others."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import processor_seconds

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.benchmarks import math_answer, math_pool
from teamtr_lora.tasks.benchmarks.math_pool import MathPool, Pair
from teamtr_lora.tasks.benchmarks.math_tasks import READERS, MathTask
from teamtr_lora.tasks.machinery.task import Item, Task

Score = Callable[[Task, Sequence[tuple[Item, str]]], list[float]]
Bench = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def tasks() -> dict[str, MathTask]:
    return {name: MathTask(name, answer_seconds=1.0) for name in READERS}


def item(gold: str) -> Item:
    return Item("i", "p", {"answer": gold})


EQUAL = [
    ("1/2", "0.5"),
    ("1/2", r"\frac12"),
    ("0.5", r"\dfrac{1}{2}"),
    (r"\frac{1}{2}", ".5"),
    (r"\frac{1}{2}", r"\frac{2}{4}"),
    ("10,080", "10080"),
    (r"10,\!080", "10080"),
    (r"\$18.90", "18.9"),
    ("204", "0204"),
    ("x=5", "5"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{(B)}", "B"),
    (r"120^\circ", "120"),
    ("2k+2", "2(k+1)"),
    (r"\sqrt{51}", r"51^{1/2}"),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
    (r"(5,\infty)", r"(5, \infty)"),
    (r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}", r"\begin{bmatrix}-1&0\\0&-1\end{bmatrix}"),
    ("40_9", "40_{9}"),
    (r"\frac{1}{2^{98}}", "2^{-98}"),
    ("2^{10}", "1024"),
    ("256", "2^{2^{3}}"),
    ("300000", r"3\times 10^5"),
    (r"10\frac{1}{12}", "10 1/12"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    (r"\frac{1}{3}", "0.333333"),
    ("0.56 = 56\\%", "0.56"),
    (r"6, 8\text{, and }10", "6, 8, 10"),
    (r"864 \mbox{ inches}^2", "864 square inches"),
    (r"\frac{1}{2}", "½"),
    (r"2\sqrt{2}", "2√2"),
    (r"\text{A5}_{11}", "a5_{11}"),
    ("43_5.", "43_{five}"),
    ("91", "91_{10}"),
    ("6", r"6\text{ times}"),
    (r"2.5\text{ million}", "2.5"),
    (r"2.5\text{ million}", "2,500,000"),
    ("18", "36/2 = 18"),
]
UNEQUAL = [
    ("18", "19"),
    ("18", "-18"),
    ("18", ""),
    ("18", "eighteen"),
    ("18", "the answer is 18 or 19"),
    ("0.5", "0.51"),
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    ("x=5", "x=6"),
    ("2k+2", "2k+3"),
    (r"\text{Evelyn}", "Carla"),
    ("(2,4)", "(4,2)"),
    ("40_9", "40_8"),
    (r"15\mbox{ cm}^2", r"15\mbox{ cm}^3"),
    ("1/3", "1/0"),
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
    (r"\frac{1}{2^{98}}", r"-\frac{1}{2^{98}}"),
    ("12", "12_3"),
    ("18", "17 = 18"),
    ("0.56 = 56\\%", "1.56 = 56\\%"),
    ("2.5", r"2.5\text{ million}"),
    ("12", "12_{3}"),
    ("40_9", "40_10"),
    (r"(5,\infty)", r"(5,\infty]"),
    (r"(-\infty,2)", r"[-\infty,2)"),
    ("(1,2)", "2,1"),
    ("204", "2 04"),
    ("18", "18ab"),
    ("18", r"18\text{ and a half}"),
    ("18", r"18\text{ is wrong}"),
    (r"\frac{3}{161840}", r"\frac{3}{161841}"),
    (r"2007 + \frac\pi 2", r"2008 + \frac\pi 2"),
    (r"864 \mbox{ inches}^2", "864 cubic inches"),
    (r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}.", r"\begin{pmatrix} -2 & 0 \\ 0 & -1 \end{pmatrix}."),
]


def test_equal_forms_are_right_and_others_wrong(tasks: dict[str, MathTask], score: Score) -> None:
    pairs = [(item(gold), rf"So it is $\boxed{{{answer}}}$.") for gold, answer in EQUAL + UNEQUAL]
    assert score(tasks["math500"], pairs) == [1.0] * len(EQUAL) + [0.0] * len(UNEQUAL)


@pytest.mark.parametrize(
    ("name", "text", "right"),
    [
        ("gsm8k", "#### 18", 1),
        ("gsm8k", "####18", 1),
        ("gsm8k", "#### $18.00 a day", 1),
        ("gsm8k", "#### 19\n#### 18", 1),
        ("gsm8k", r"\boxed{19} no: #### 18", 1),
        ("gsm8k", r"#### 19 no: \boxed{18}", 1),
        ("gsm8k", "#### **18**", 1),
        ("gsm8k", "#### £18", 1),
        ("gsm8k", "#### -$18", 0),
        ("gsm8k", "#### 18.5", 0),
        ("gsm8k", "18", 0),
        ("gsm8k", "The answer is 18.", 0),
        ("gsm8k", "Answer: 18", 0),
        ("gsm8k", "####", 0),
        ("math500", "18", 0),
        ("math500", "$18$", 0),
        ("math500", "#### 18", 0),
        ("math500", r"\boxed{18", 0),
        ("math500", r"\boxed{}", 0),
        ("math500", r"\boxed{18} and \boxed{19}", 0),
        ("math500", r"\boxed{\boxed{18}}", 1),
        ("math500", r"\fbox{18}", 1),
        ("math500", r"\boxed {18}", 1),
        ("aime24", r"\boxed{018}", 1),
        ("aime25", r"\boxed{17}", 0),
        ("dapo_math", "Answer: 18", 1),
        ("dapo_math", "**Answer:** 18", 1),
        ("dapo_math", "answer: $18$.", 1),
        ("dapo_math", r"Answer: $\boxed{18}$", 1),
        ("dapo_math", r"\boxed{18}", 1),
        ("dapo_math", "Answer: 19\nAnswer: 18", 1),
        ("dapo_math", "Answer: 18\nAnswer: 19", 0),
        ("dapo_math", "the answer is 18", 0),
        ("dapo_math", "**Answer**: 18", 1),
        ("dapo_math", "**Answer:**\n**18**", 1),
        ("dapo_math", "### Answer：$18$", 1),
        ("dapo_math", "答案：18", 1),
        ("dapo_math", "**答案**: 18。", 1),
        ("dapo_math", "Answer: x = 18", 1),
        ("dapo_math", "Answer: 18 dollars", 1),
        ("dapo_math", "答案：19", 0),
        ("dapo_math", "The answer: no idea", 0),
    ],
)
def test_only_a_box_or_the_marker_states_an_answer(
    tasks: dict[str, MathTask], score: Score, name: str, text: str, right: int
) -> None:
    assert score(tasks[name], [(item("18"), text)]) == [right]


UNITS = [
    "{} dollars",
    "£{}",
    "€{}",
    r"{} \text{{ dollars}}",
    "${}",
    r"\${}",
    r"{}\%",
    "{}%",
    "{} percent",
    "{} eggs per day",
    "{} km/h",
]
UNITS += [
    r"\text{{{} dollars}}",
    r"\${}\text{{ a day}}",
    "USD {}",
    "{} cm^2",
    "{}°",
    "{}th",
    "x = {}",
    "{} dollars.",
    "-(-{})",
    "$ {} / day",
]
OTHERS = [
    "{}x",
    "{} million",
    "{}k",
    "{}.5 dollars",
    "-{} dollars",
    "-£{}",
    "{} or 19",
    "{}!",
    "{} and a half",
    "{} hours 30 minutes",
]


def test_a_unit_beside_the_number_changes_nothing(tasks: dict[str, MathTask], score: Score) -> None:
    for name in ("gsm8k", "math500"):
        right, near = ([(item("18"), f"\\boxed{{{form.format(n)}}}") for form in UNITS] for n in (18, 17))
        other = [(item("18"), f"\\boxed{{{form.format(18)}}}") for form in OTHERS]
        assert [text for (_, text), s in zip(right, score(tasks[name], right), strict=True) if s != 1] == []
        assert [text for (_, text), s in zip(near + other, score(tasks[name], near + other), strict=True) if s != 0] == []
    assert score(tasks["gsm8k"], [(item("2500000"), r"\boxed{2.5 million dollars}")]) == [1.0]
    assert math_answer.canonical("18 dollars") == math_answer.canonical("$18.0") == "18"


def test_two_values_are_no_answer_where_one_is_right() -> None:
    assert math_answer.quick(r"10\text{ cm}", r"10\text{ cm} \text{ or } 11\text{ cm}") is False
    assert math_answer.quick(r"10\text{ cm}", r"10\text{ cm}; 11\text{ cm}") is False
    assert math_answer.quick("10", r"10\text{ cm or }10\text{ cm}") is not False
    assert math_answer.quick("1,234", r"\$1,234\text{ or so}") is not False


def test_a_base_counts_where_the_problem_asks_for_it(tasks: dict[str, MathTask], score: Score) -> None:
    asked = Item("i", "p", {"answer": "1331", "problem": "What is the base five product of $121_{5}$ and $11_{5}$?"})
    assert score(tasks["math500"], [(asked, r"\boxed{1331_5}"), (asked, r"\boxed{1331_6}"), (asked, r"\boxed{1331}")]) == [
        1,
        0,
        1,
    ]


def test_a_pathological_answer_does_not_stall_the_others(tasks: dict[str, MathTask], score: Score) -> None:
    bad = ["10^{10^{10}}", r"9^{9^{9^{9}}}", "(" * 900 + ")" * 900, r"\frac{" * 300, "x" * 1900, "1000000!"]
    pairs = [(item("18"), rf"\boxed{{{answer}}}") for answer in bad]
    good = [(item("2k+2"), rf"\boxed{{2(k+1)+{n}-{n}}}") for n in range(10)]
    start = time.monotonic()
    assert score(tasks["math500"], pairs + good) == [0.0] * len(bad) + [1.0] * len(good)
    through = [("18", answer) for answer in (bad[0], bad[1], "1000000!")]  # what is not even asked for above
    assert tasks["math500"]._pool.equal([*through, ("2k+2", "2(k+1)")]) == [False] * 3 + [True]
    assert time.monotonic() - start < 60


def test_ten_thousand_responses_in_seconds(tasks: dict[str, MathTask], score: Score) -> None:
    prose = "She sells 16 - 3 - 4 = 9 eggs a day, which is 9 * 2 dollars. " * 8
    endings = ["#### {}", r"\boxed{{{}}}", r"\boxed{{\${}}}", r"\boxed{{{}.00}}", r"\boxed{{{}\text{{ dollars}}}}"]
    pairs = [(item(str(n)), prose + endings[n % 5].format(n + n % 3 % 2)) for n in range(10_000)]
    with processor_seconds(20):
        found = score(tasks["gsm8k"], pairs)
    assert found == [float(n % 3 != 1) for n in range(10_000)]


def test_rows_of_other_layouts_are_read(tasks: dict[str, MathTask]) -> None:
    assert tasks["gsm8k"].row_item({"question": "q", "answer": "so\n#### 1,080"}, "a").data["answer"] == "1,080"
    assert tasks["aime24"].row_item({"Problem": "q", "Answer": 204}, "a").data["answer"] == "204"
    verl = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "34"}}
    assert tasks["dapo_math"].row_item(verl, "a").data["problem"] == "q"
    framed = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer.\n\n"
    )
    framed += 'q\n\nRemember to put your answer on its own line after "Answer:".'
    own = {"prompt": [{"role": "user", "content": framed}], "reward_model": {"ground_truth": "34"}}
    assert tasks["dapo_math"].row_item(own, "a") == tasks["dapo_math"].row_item(verl, "a")
    with pytest.raises(UserError, match="item a: has no problem or question or prompt; it has text"):
        tasks["math500"].row_item({"text": "q"}, "a")


def test_the_answer_may_stand_on_the_next_line(tasks: dict[str, MathTask], score: Score) -> None:
    assert score(tasks["dapo_math"], [(item("34"), "so\nAnswer:\n34"), (item("34"), "Answer: 35")]) == [1.0, 0.0]


@pytest.mark.parametrize("answer", ["204", " 204 ", "$204$", "204.0", "204^\\circ", "m+n=204", r"\text{204}", "0204"])
def test_an_aime_answer_is_that_integer(tasks: dict[str, MathTask], score: Score, answer: str) -> None:
    assert score(tasks["aime24"], [(item("204"), f"\\boxed{{{answer}}}")]) == [1.0]


@pytest.mark.parametrize(
    "answer", [r"20400\%", "2 04", "20 4", "204_7", "203=204", r"204\text{ is wrong}", r"204\ldots", "204, 205", "2*102", "-204"]
)
def test_an_aime_answer_is_nothing_else(tasks: dict[str, MathTask], score: Score, answer: str) -> None:
    assert score(tasks["aime24"], [(item("204"), f"\\boxed{{{answer}}}")]) == [0.0]


def test_rows_whose_answer_was_lost_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"id": n, "problem": f"what is {n}?", "answer": None if n % 7 == 3 else str(n)} for n in range(40)]
    task = MathTask("math500")
    task.use_rows(rows, None, 0.25)
    kept = [item for split in ("train", "test") for item in task.items(split)]
    assert sorted(int(item.data["answer"]) for item in kept) == [n for n in range(40) if n % 7 != 3]
    assert all(item.data["problem"] == f"what is {item.data['answer']}?" for item in kept)
    assert "6 of 40 train items have no answer" in caplog.text
    task.use_rows(rows[:5], rows[5:], 0.25)
    assert (task.items("train").size, task.items("test").size) == (4, 30)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(READERS)), st.text() | st.text(alphabet="\\boxed{}$#18/.,-=Answer: \n", max_size=80), st.booleans())
def test_no_text_crashes_it(name: str, text: str, boxed: bool) -> None:
    said = math_answer.stated(f"\\boxed{{{text}}}" if boxed else text, READERS[name])
    if said is not None:
        assert said in text or boxed
        assert math_answer.quick("18", said) in (True, False, None) and math_answer.quick(said, said) is not False


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=40) | st.text(alphabet="\\frac{}sqrt^_()0123,+-", max_size=30))
def test_no_box_crashes_the_pool(tasks: dict[str, MathTask], score: Score, text: str) -> None:
    assert score(tasks["math500"], [(item("x+18"), f"\\boxed{{{text}}}")])[0] in (0.0, 1.0)


@pytest.mark.parametrize("part", ["\\boxed{", "{", "}", "#### ", "Answer: ", "9", "\x00", "\ud800", "é", "\\boxed{1}", "\n"])
def test_a_megabyte_is_read_in_time(tasks: dict[str, MathTask], score: Score, part: str) -> None:
    with processor_seconds(5):
        for name in READERS:
            score(tasks[name], [(item("x"), part * (10**6 // len(part)))])


@pytest.mark.parametrize("name", ["gsm8k/test", "math500/test", "aime24/test", "dapo_math_17k/train", "math_train/train"])
def test_references_are_right_and_off_by_one_is_wrong(tasks: dict[str, MathTask], bench: Bench, score: Score, name: str) -> None:
    task = tasks[{"gsm8k": "gsm8k", "math500": "math500", "aime24": "aime24"}.get(name.split("/")[0], "dapo_math")]
    rows = [row for row in bench(name)[:2000] if row["answer"]]  # math_train has a few without
    items = [task.row_item(row, str(row["id"])) for row in rows]
    if name.startswith("gsm8k"):
        assert set(score(task, [(i, row["solution"]) for i, row in zip(items, rows, strict=True)])) == {1.0}
    assert set(score(task, [(i, f"so \\boxed{{{i.data['answer']}}}.") for i in items])) == {1.0}
    assert set(score(task, [(i, i.data["answer"]) for i in items])) == {0.0}
    numbers = [(i, m) for i in items for m in [re.search(r"\d+", i.data["answer"])] if m]
    wrong = [
        (i, f"\\boxed{{{i.data['answer'][: m.start()]}{int(m[0]) + 1}{i.data['answer'][m.end() :]}}}")
        for i, m in (numbers if name != "math_train/train" else numbers[:200])
    ]
    found = score(task, wrong)
    assert [text for (_, text), right in zip(wrong, found, strict=True) if right] == []


def test_a_verdict_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from one call to the next; but a pair that ran out of time, perhaps of a busy machine, is asked again."""
    pool = MathPool(processes=1)
    asked: list[Pair] = []

    def ask(pair: Pair) -> bool | None:
        asked.append(pair)
        return None if pair[1] == "slow" else pair[0] == pair[1]

    monkeypatch.setattr(pool, "_ask", ask)
    pairs = [("a", "a"), ("a", "b"), ("a", "slow"), ("a", "a")]
    assert pool.equal(pairs) == pool.equal(pairs) == [True, False, False, True]
    assert asked == [("a", "a"), ("a", "b"), ("a", "slow"), ("a", "slow")]


def test_two_stages_parse_alike(tmp_path: Path) -> None:
    """The faster parser's trees are the slow one's, also after an error and for what no parser takes."""
    texts = [side for pair in EQUAL + UNEQUAL for side in pair if side] + [
        r"\frac{x",
        "2+",
        r"\sqrt[3]{x^2}+\pi",
        r"\{1,2\}\cup[3,4)",
    ]
    program = (
        "import json, sys, sympy, logging; logging.disable(50); sys.path.insert(0, sys.argv[1]); import math_worker as w\n"
        "texts = json.load(open(sys.argv[2]))\n"
        "seen = lambda: [[s if isinstance(s, str) else sympy.srepr(s) for s in w.parsed(t)] for t in texts]\n"
        "slow = seen(); w.parsed.cache_clear(); w.parse_in_two_stages(); assert seen() == slow; print(sum(map(bool, slow)))"
    )
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    run = [sys.executable, "-c", program, str(Path(math_pool.__file__).parent), str(tmp_path / "texts.json")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-500:]
    assert int(done.stdout) > 50


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("18", r"18\text{ dollars}", True),
        ("18", r"19\text{ dollars}", False),
        ("0.5", r"\frac{1}{2}\text{ square feet}", True),
        ("18", r"18\text{ and}", None),
        ("18", r"18\text{percent}", True),
        ("18", r"x\text{ dollars}", None),
        (r"\sqrt{2}", r"2\text{ cm}", None),
    ],
)
def test_a_number_and_its_unit_need_no_algebra(gold: str, answer: str, verdict: bool | None) -> None:
    assert math_answer.quick(gold, answer) is verdict
