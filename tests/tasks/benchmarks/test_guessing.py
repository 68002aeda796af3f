"""Guessing numbers: the feedback, wasted turns, when it ends, AR-Bench's secrets."""

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.benchmarks.guessing import GuessingTask, compare, guess_in
from teamtr_lora.tasks.machinery.task import Item, Task
from teamtr_lora.team import Episode

Played = Callable[[Task, Item, Sequence[str]], Episode]
DIGITS = st.text(alphabet="0123456789", min_size=4, max_size=4)


def row(number: str = "0435") -> Item:
    return GuessingTask().row_item({"id": 1, "number": number}, "1")


@given(DIGITS, DIGITS)
def test_the_feedback_counts_each_digit_once(secret: str, guess: str) -> None:
    same, other = compare(secret, guess)
    best = max(sum(a == b for a, b in zip(secret, order, strict=True)) for order in permutations(guess))
    assert same + other == best  # all the digits that could be put in place
    assert (same == 4) == (secret == guess)


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("Guess: 0435", "0435"),
        ("Guess: [0435]", "0435"),
        ("guess:\n**0 4 3 5**", "0435"),
        ("Guess: 0, 4, 3, 5", "0435"),
        ("Guess: 1234\nno, Guess: 0435", "0435"),
        ("Guess: 0435. In 2024 I was right.", "0435"),
        ("I say 0435", "0435"),
        ("Guess: 0435\n2 of them were in 1234", "0435"),
        ("My last guess was 1234; now 0435", "0435"),
        ("Guess: `0-4-3-5`", "0435"),
        ("I say 12345", None),
        ("Guess: 123", None),
        ("Guess: ", None),
        ("", None),
        ("Guess: ٠٤٣٥", None),
    ],
)
def test_what_counts_as_a_guess(text: str, guess: str | None) -> None:
    assert guess_in(text) == guess


def test_the_right_guess_ends_it_and_wasted_turns_count(played: Played) -> None:
    task, item = GuessingTask(), row()
    game = played(task, item, ["Guess: 4035", "hm", "Guess: 0435", "Guess: 1234"])
    assert len(game.messages) == 3 and task.score([game]) == [1.0] and game.ended == "task"
    assert str(game.feedback[0]).startswith(
        "2 digits are present in the answer and in the correct positions\n2 digits are present in the answer but in the different"
    )
    assert "the turn is lost" in str(game.feedback[1]) and "Turn 3" in str(game.feedback[1])
    assert task.score([played(task, item, ["Guess: 4035"])]) == [0.0]
    assert task.score([played(task, item, [])]) == [0.0]


@pytest.mark.parametrize(("wasted", "score"), [(24, 1.0), (25, 1.0), (26, 0.0)])
def test_there_are_twenty_five_turns_and_a_final_guess(played: Played, wasted: int, score: float) -> None:
    task = GuessingTask()
    game = played(task, row(), ["nothing"] * wasted + ["Guess: 0435"])
    assert task.score([game]) == [score]
    if wasted >= 25:
        assert "final answer" in str(game.feedback[24]) and game.ended == "task" and len(game.messages) == 26


def test_the_official_protocol_plays_to_the_end(played: Played) -> None:
    task = GuessingTask(stop_when_right=False)
    texts = ["Guess: 0435"] + ["Guess: 1234"] * 25
    assert task.score([played(task, row(), texts)]) == [0.0]
    assert task.score([played(task, row(), texts[::-1])]) == [1.0]


def test_generated_secrets_reproduce_and_splits_are_apart() -> None:
    task = GuessingTask()
    found = {split: [task.items(split)[i].data["number"] for i in range(300)] for split in ("train", "test")}  # type: ignore[arg-type]
    assert not set(found["train"]) & set(found["test"])
    assert all(len(set(number)) == 4 for numbers in found.values() for number in numbers)
    assert found["test"][7] == GuessingTask().items("test")[7].data["number"]


def test_odd_rows() -> None:
    assert GuessingTask().row_item({"number": 435}, "1").data["number"] == "0435"
    with pytest.raises(UserError, match="is not four digits"):
        GuessingTask().row_item({"number": "12a4"}, "1")


@given(st.text() | st.text(alphabet="Guess: [0123]\n,"))
def test_no_text_crashes_it(played: Played, text: str) -> None:
    task = GuessingTask()
    assert task.score([played(task, row(), [text])])[0] in (0.0, 1.0)


@pytest.mark.parametrize("part", ["guess: ", "0", "1234 ", "guess: 1 ", "[", "\ud800"])
def test_a_megabyte_is_read(part: str) -> None:
    text = part * (10**6 // len(part))
    found = guess_in(text)
    assert found is None or (len(found) == 4 and found.isdigit())


@pytest.mark.parametrize("name", ["arbench/gn_test", "arbench/gn_train"])
def test_every_secret_is_found_by_its_own_guess_only(bench: Any, played: Played, name: str) -> None:
    task = GuessingTask()
    for given_row in bench(name):
        item, number = task.row_item(given_row, "i"), given_row["number"]
        wrong = f"{(int(number) + 1) % 10_000:04d}"
        right, off, swapped = (played(task, item, [f"Guess: {g}"]) for g in (number, wrong, number[::-1]))
        assert task.score([right, off, swapped]) == [1.0, 0.0, 0.0]
