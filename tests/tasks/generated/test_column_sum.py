"""The embedded task: totals, splits, what a message says, and that every message counts."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import processor_seconds

from teamtr_lora.common.errors import UserError
from teamtr_lora.tasks.generated.column_sum import ColumnSum, column_totals, pair_key
from teamtr_lora.tasks.machinery.drawn import split_of
from teamtr_lora.tasks.machinery.task import Item
from teamtr_lora.team import Episode, Message


def message(text: str, turn: int = 0) -> Message:
    return Message(f"agent{turn}", turn, [], [], [], "", "stop", text)


def episode(item: Item, texts: Sequence[str]) -> Episode:
    return Episode(item.id, 0, item.prompt, 0, item, [message(text, turn) for turn, text in enumerate(texts)])


@given(st.integers(1, 8), st.data())
def test_totals_are_those_of_long_addition(digits: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, 10**digits - 1))
    second = data.draw(st.integers(0, 10**digits - 1))
    totals = column_totals(first, second, digits)
    for column, total in enumerate(totals):
        part = 10**column
        carry = (first % part + second % part) // part
        assert total == int(str(first).zfill(digits)[-1 - column]) + int(str(second).zfill(digits)[-1 - column]) + carry
    written = sum(total % 10 * 10**column for column, total in enumerate(totals)) + totals[-1] // 10 * 10**digits
    assert written == first + second


@pytest.mark.parametrize("digits", [1, 2, 3, 8])
def test_a_pair_is_in_one_split_and_an_item_is_its_position(digits: int) -> None:
    task = ColumnSum(digits)
    pairs = {}
    for split in ("train", "test"):
        items = task.items(split)  # type: ignore[arg-type]
        assert items.size is None
        drawn = [items[i] for i in range(200)]
        assert drawn == [task.items(split)[i] for i in range(200)], "again, from a new object"  # type: ignore[arg-type]
        assert items[10**12] == items[10**12]
        pairs[split] = {frozenset(map(int, item.prompt.split("+"))) for item in drawn}  # in either order
        for item in drawn:
            first, second = map(int, item.prompt.split("+"))
            assert split_of(pair_key((first, second))) == split
            assert len(str(first)) == len(str(second)) == digits
            assert item.data == {"totals": column_totals(first, second, digits), "answer": str(first + second)}
        assert len({item.id for item in drawn}) == len({item.prompt for item in drawn}), "an item drawn twice is the same item"
    assert not pairs["train"] & pairs["test"]


def test_a_fifth_of_all_pairs_is_held_out() -> None:
    share = sum(split_of(pair_key((a, b))) == "test" for a in range(100, 200) for b in range(100, 200)) / 10_000
    assert abs(share - 0.2) < 0.02


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 8), st.data())
def test_every_message_is_needed(position: int, digits: int, data: st.DataObject) -> None:
    task = ColumnSum(digits)
    item = task.items("train")[position]
    right = [f"={total}" for total in item.data["totals"]]
    column = data.draw(st.integers(0, digits - 1))
    wrong = data.draw(st.integers(0, 30).filter(lambda n: n != item.data["totals"][column]))
    spoiled = [*right[:column], f"={wrong}", *right[column + 1 :]]
    silent = [*right[:column], "no idea", *right[column + 1 :]]
    assert task.score([episode(item, t) for t in (right, spoiled, silent, right[:-1], [])]) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert task.success(1.0) and not task.success(0.0)


def test_the_last_word_on_a_column_counts() -> None:
    task = ColumnSum(2)
    item = Item("x", "17+25", {"totals": [12, 4], "answer": "42"})
    assert task.score([episode(item, ["=1", "=4", "7+5+0=12"])]) == [1.0]
    assert task.score([episode(item, ["=12", "=4", "=1"])]) == [0.0]
    assert task.score([episode(item, ["=12", "=4", "=12", "hm"])]) == [0.0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7+5+0=12", "12"),
        ("= 12", "12"),
        ("=1 no, =12", "12"),
        ("=012", "12"),
        ("=", None),
        ("===", None),
        ("", None),
        ("=-3", None),
        ("12", None),
        ("=²", None),
        ("=\x00", None),
        ("=12=", "12"),
        ("=\n\n12", "12"),
    ],
)
def test_answers(text: str, answer: str | None) -> None:
    assert ColumnSum().answer(text) == answer


@pytest.mark.parametrize(
    "text", ["=" + "9" * 100_000, "=" * 100_000, "= " * 50_000, "=٣", "=१२", "=" + "0" * 5000 + "7", "=\ud800"]
)
def test_hostile_messages_are_wrong_and_nothing_worse(text: str) -> None:
    task = ColumnSum(1)
    item = Item("x", "3+4", {"totals": [7], "answer": "7"})
    with processor_seconds(2):
        answer = task.answer(text)
        assert answer is None or isinstance(answer, str)
        assert task.score([episode(item, [text])]) in ([0.0], [1.0])
        assert isinstance(task.message_correct(item, message(text)), bool)


@given(st.text(alphabet="=0123456789 +-²٣\n\x00", max_size=40))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    answer = ColumnSum().answer(text)
    assert answer is None or answer == str(int(answer))


def test_a_message_is_judged_by_its_own_column() -> None:
    task = ColumnSum(2)
    item = Item("x", "17+25", {"totals": [12, 4], "answer": "42"})
    assert task.message_correct(item, message("=12", 0)) is True
    assert task.message_correct(item, message("=4", 0)) is False
    assert task.message_correct(item, message("=4", 1)) is True
    assert task.message_correct(item, message("=12", 2)) is True, "a second round starts at the ones again"
    assert task.message_correct(item, message("hm", 1)) is False


def test_a_team_too_small_for_the_columns_is_refused() -> None:
    with pytest.raises(UserError, match=r"task\.digits = 3.*2 messages.*task\.digits=2"):
        ColumnSum(3).check_agents(["a", "b"], 2)
    ColumnSum(3).check_agents(["a"], 3)


def test_success_does_not_depend_on_a_wider_reward_range() -> None:
    """The range only bounds the rewards; a perfect sum stays a success."""
    task = ColumnSum(1)
    task.reward_range = (0.0, 2.0)
    assert task.success(task.score([episode(Item("x", "3+4", {"totals": [7], "answer": "7"}), ["=7"])])[0])


def test_credit_for_columns_is_their_share_and_success_still_the_whole_sum() -> None:
    item = Item("x", "117+125", {"totals": [12, 4, 2], "answer": "242"})
    task = ColumnSum(3, "columns")
    rewards = task.score([episode(item, texts) for texts in (["=12", "=4", "=2"], ["=12", "=3", "=2"], ["=12"], [])])
    assert rewards == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert [task.success(reward) for reward in rewards] == [True, False, False, False]
