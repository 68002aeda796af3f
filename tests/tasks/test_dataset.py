"""Rows as items: file kinds, bad files, splits by hash, and the order they are drawn in."""

import csv
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe.named import named_code
from teamtr_lora.tasks import DataOrder, Item, Rewards
from teamtr_lora.tasks.dataset import DatasetSettings, DatasetTask
from teamtr_lora.tasks.machinery.data_files import read_rows
from teamtr_lora.team import Episode, Message, build_router

ROWS = [{"prompt": f"question {i}", "answer": f"{i}", "level": i} for i in range(20)]
ZERO = Rewards([lambda prompts, **_: [0.0] * len(prompts)])


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_gz(path: Path) -> None:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path: Path) -> None:
    datasets.Dataset.from_list(ROWS).to_parquet(path)


@pytest.mark.parametrize(
    ("name", "write"),
    [("rows.jsonl", write_jsonl), ("rows.jsonl.gz", write_gz), ("rows.v2.csv", write_csv), ("rows.parquet", write_parquet)],
)
def test_file_kinds(tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
    write(tmp_path / name)
    rows = read_rows(tmp_path / name, "task.path")
    as_text = name.endswith("csv")  # CSV knows no types
    assert [dict(row) for row in rows] == [{k: str(v) if as_text else v for k, v in row.items()} for row in ROWS]
    task = DatasetTask(rows, rows, ZERO, answer_column="answer")
    item = task.items("train")[3]
    assert (item.prompt, item.data["answer"], item.data["level"]) == ("question 3", "3", "3" if as_text else 3)
    assert task.items("train").size == 20


@pytest.mark.parametrize("rows", [ROWS, datasets.Dataset.from_list(ROWS)], ids=["list", "Dataset"])
def test_rows_in_memory(rows: Any) -> None:
    task = DatasetTask(rows, None, ZERO, test_fraction=0.3)
    train, test = task.items("train"), task.items("test")
    assert train.size + test.size == 20  # type: ignore[operator]
    prompts = [[items[i].prompt for i in range(items.size or 0)] for items in (train, test)]
    assert sorted(prompts[0] + prompts[1]) == sorted(row["prompt"] for row in ROWS)
    assert train[0].data == {**next(r for r in ROWS if r["prompt"] == train[0].prompt)}


def test_another_prompt_column_and_ids() -> None:
    task = DatasetTask([{"q": "hi", "id": "row-a"}], [{"q": "ho"}], ZERO, prompt_column="q")
    assert task.items("train")[0] == Item("train-0 (row-a)", "hi", {"id": "row-a", "q": "hi", "prompt": "hi"})
    assert task.items("test")[0].id == "test-0"


@pytest.mark.parametrize("text_only", [False, True])
def test_conversational_prompts_are_played_as_their_text(text_only: bool) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    if text_only:
        turns[1:] = [{"role": "user", "content": "2+2?"}, {"role": "user", "content": "Sure?"}]
    for rows in ([{"prompt": turns}], *([datasets.Dataset.from_list([{"prompt": turns}])] if text_only else [])):
        item = DatasetTask(rows, rows, ZERO).items("train")[0]
        assert item.prompt == "Be brief.\n\n2+2?\n\nSure?"
        assert item.data["prompt"] == turns, "the reward sees it as it was"


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "assistant", "content": "4"}, "holds a turn of an assistant"),
        ({"role": "user", "content": None}, "whose content is None; give text"),
        ({"role": "user", "content": 4}, "whose content is 4; give text"),
        ({"role": "user", "content": [{"type": "image", "url": "x"}]}, "give text"),
        ({"role": "user", "content": [{"type": "text"}]}, "give text"),
    ],
)
def test_a_conversation_that_is_more_than_text_is_refused(turn: dict[str, Any], message: str) -> None:
    rows = [{"prompt": "fine"}, {"prompt": [{"role": "user", "content": "2+2?"}, turn]}]
    with pytest.raises(UserError, match=rf"^item train-1: 'prompt' .*{message}"):
        DatasetTask(rows, rows, ZERO).items("train")[1]


def test_prompts_as_pandas_has_them() -> None:
    rows = [{"prompt": np.array([{"role": "user", "content": "2+2?"}], dtype=object)}, {"prompt": np.array("abc")}]
    items = DatasetTask(rows, rows, ZERO).items("train")
    assert [items[0].prompt, items[1].prompt] == ["2+2?", "abc"]


def test_blank_prompts_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": text} for text in ("hi", " ", "ho", "")]
    assert DatasetTask(rows, rows[:1], ZERO).items("train")[1].prompt == " "
    assert [record.getMessage() for record in caplog.records] == [
        "2 rows of the train dataset have an empty 'prompt' and are played with it, row 1 (counted from 0) first: leave them out"
    ]


def test_a_reward_takes_the_prompt_by_its_columns_name_too() -> None:
    def by_question(completions: list[str], question: list[str], prompts: list[str]) -> list[float]:
        assert question == prompts
        return [float(len(q)) for q in question]

    task = DatasetTask([{"question": "four"}], [{"question": "five!"}], Rewards([by_question]), prompt_column="question")
    item = task.items("test")[0]
    assert task.score([Episode(item_id=item.id, group=0, prompt=item.prompt, seed=0, item=item)]) == [5.0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ("rows.jsonl", b'{"prompt": "a"}\n["b"]\n', "line 2 is no object"),
        ("rows.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', r"line 2: not UTF-8 text; save the file as UTF-8"),
        ("rows.csv.gz", gzip.compress(b"prompt\n\xff\n"), r"line 2: not UTF-8"),
        ("rows.jsonl", b"[" * 100_000, r"cannot be read as \.jsonl"),
        ("rows.csv", b'prompt\n"never closed\n', r"cannot be read as \.csv"),
        ("rows.csv", b"prompt,n\na,1\nb,2,3\n", "line 3 has more cells"),
        ("rows.csv", b"prompt\n" + b"x" * 200_000 + b"\nshort\n", ""),
        ("rows.parquet", b"this is not parquet", r"cannot be read as \.parquet"),
        ("rows.parquet", b"", r"cannot be read as \.parquet"),
        ("rows.jsonl.gz", b"this is not gzip", r"cannot be read as \.jsonl"),
        ("rows.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n')[:-9], r"cannot be read as \.jsonl"),
        ("rows.jsonl.gz", gzip.compress(b"x")[:10] + b"\xff" * 20, r"cannot be read as \.jsonl"),
        ("rows.txt", b"hi", "unknown file type"),
        ("rows", b"hi", "unknown file type"),
        ("rows.gz", b"hi", "unknown file type"),
    ],
    ids=str.split("json row latin1 latin1gz deep quote cells long arrow void nogzip cut garbled txt bare gz"),
)
def test_bad_files_give_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    try:
        rows = read_rows(tmp_path / name, "task.path")
    except UserError as error:
        assert re.search(message, str(error)) and "task.path" in str(error) and "\n" not in str(error)
    else:
        assert not message and len(rows) == 2, "a long field is no error"


@pytest.mark.parametrize("content", [b"", b"\n", b"prompt,answer\n"], ids=["nothing", "blank", "header"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".jsonl.gz", ".csv.gz"])
def test_a_file_without_rows_is_empty(tmp_path: Path, content: bytes, suffix: str) -> None:
    if content.startswith(b"prompt") and "csv" not in suffix:
        pytest.skip("a header is CSV's")
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(UserError, match="empty") as caught:
        DatasetTask(read_rows(path, "task.path"), None, ZERO)
    assert "\n" not in str(caught.value)


def test_files_as_spreadsheets_write_them(tmp_path: Path) -> None:
    """A byte-order mark, Windows line ends, quotes and line breaks inside a field."""
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufeffprompt,answer\r\n"Say ""hi"",\r\nthen é.",x\r\n'.encode())
    rows = read_rows(path, "task.path")
    assert DatasetTask(rows, rows, ZERO).items("train")[0].prompt == 'Say "hi",\r\nthen é.'
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"prompt": "a"}\r\n\r\n{"prompt": "b\\u2028c"}\r\n'.encode())
    assert [row["prompt"] for row in read_rows(path, "task.path")] == ["a", "b\u2028c"]


def test_a_missing_file_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "question.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"no such file; the folder has question\.jsonl"):
        read_rows(tmp_path / "questions.jsonl", "task.path")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the train dataset is empty"),
        (["just text"], "holds str, not rows"),
        ([{"question": "hi"}], r"no column 'prompt'; it has question"),
        ([{"prompt": "hi"}], r"no column 'answer'"),
        ([{"prompt": "hi", "answer": "1"}, {"answer": "2"}], "prompt"),
        (pandas.DataFrame(ROWS), r"give rows.to_dict\('records'\)"),
        ({"prompt": ["hi"], "answer": ["1"]}, "datasets.Dataset"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}), "datasets.Dataset"),
        (datasets.Dataset.from_list(ROWS).to_iterable_dataset(), "datasets.Dataset"),
    ],
    ids=[
        "empty",
        "strings",
        "no-prompt",
        "no-answer",
        "one-row-lacks-it",
        "DataFrame",
        "dict-of-columns",
        "DatasetDict",
        "iterable",
    ],
)
def test_rows_that_are_no_dataset(rows: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DatasetTask(rows, None, ZERO, answer_column="answer", test_fraction=0.5)


@pytest.mark.parametrize(
    ("row", "given", "by_key", "by_hand"),
    [
        ({"question": "2+2?", "answer": "4"}, {}, "set task.prompt_column=question", "rename the column 'question' to 'prompt'"),
        ({"prompts": "2+2?", "question": "x"}, {}, "set task.prompt_column=prompts", "rename the column 'prompts' to 'prompt'"),
        ({"words": "2+2?"}, {}, "set task.prompt_column=words", "rename the column 'words' to 'prompt'"),
        (
            {"answer": "4"},
            {},
            "set task.prompt_column to the one that holds the prompt",
            "name the one that holds the prompt 'prompt'",
        ),
        (
            {"prompt": "2+2?", "level": 1, "label": "4"},
            {"answer_column": "answer"},
            "set task.answer_column=label",
            "rename the column 'label' to 'answer'",
        ),
    ],
)
def test_a_column_of_another_name_is_told_as_its_user_can_name_it(
    tmp_path: Path, row: dict[str, Any], given: dict[str, str], by_key: str, by_hand: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "rewards.py").write_text("def f(prompts, **_):\n    return [0.0] * len(prompts)\n")
    column = next(iter(given.values()), "prompt")
    said = f"the train dataset has no column {column!r}; it has {', '.join(row)}; "
    with pytest.raises(UserError) as caught:
        DatasetSettings(name="dataset", path="rows.jsonl", reward="rewards:f", **given).build(tmp_path)
    assert str(caught.value) == said + by_key
    with pytest.raises(UserError) as caught:
        DatasetTask([row], None, ZERO, **given)
    assert str(caught.value) == said + by_hand
    with pytest.raises(UserError, match="test dataset has no column .*(rename|name) the"):  # by a key both would change
        DatasetTask(ROWS, [row], ZERO, by_recipe=True, **given)


def test_a_row_without_a_prompt_is_refused_and_not_played_as_null(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "n": 1}\n{"n": 2}\n{"prompt": null, "n": 3}\n')
    with pytest.raises(UserError, match="prompt"):
        rows = read_rows(path, "task.path")
        task = DatasetTask(rows, rows, ZERO)
        [task.items("train")[i].prompt for i in range(3)]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("as_dataset", [False, True])
def test_a_row_without_an_answer_is_found_before_anything_is_played(split: str, as_dataset: bool) -> None:
    spoilt: list[dict[str, Any]] = [dict(row) for row in ROWS]
    spoilt[5]["answer"] = None
    sides = {"train": ROWS, "test": ROWS, split: datasets.Dataset.from_list(spoilt) if as_dataset else spoilt}
    with pytest.raises(UserError, match=rf"^row 5 \(counted from 0\) of the {split} dataset has no 'answer';"):
        DatasetTask(sides["train"], sides["test"], ZERO, answer_column="answer")


def test_columns_that_a_reward_takes_are_in_every_row() -> None:
    class Rows:
        """A length and integers to index by; it never ends by itself."""

        def __len__(self) -> int:
            return len(ROWS)

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {key: value for key, value in ROWS[i % 20].items() if (i, key) != (7, "level")}

    def by_level(completions: list[str], level: list[int]) -> list[float]:
        return [0.0 for _ in level]

    rewards = Rewards([by_level])
    assert DatasetTask(ROWS, ROWS, rewards).items("train").size == DatasetTask(Rows(), Rows(), ZERO).items("train").size == 20
    with pytest.raises(UserError, match=r"row 7 \(counted from 0\) of the test dataset has no 'level'.*reward by_level takes it"):
        DatasetTask(ROWS, Rows(), rewards)
    without = [{"prompt": row["prompt"]} for row in ROWS]
    with pytest.raises(UserError, match=r"the train dataset has no column 'level', which reward by_level takes; it has prompt$"):
        DatasetTask(without, None, rewards)


def test_half_a_character_in_a_prompt_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "whole \\ud83d\\ude00"}\n{"prompt": "half \\ud83d emoji"}\n')
    with pytest.raises(UserError, match="item train-1: 'prompt' holds half a character"):
        DatasetTask(read_rows(path, "task.path"), None, ZERO)


@given(st.lists(st.text(max_size=3), min_size=2, max_size=40), st.floats(0.05, 0.95))
def test_equal_prompts_are_never_on_both_sides(prompts: list[str], fraction: float) -> None:
    rows = [{"prompt": prompt, "n": i} for i, prompt in enumerate(prompts)]
    try:
        task = DatasetTask(rows, None, ZERO, test_fraction=fraction)
    except UserError as error:
        assert "task.test_fraction" in str(error)
        return
    sides = [{task.items(s)[i].prompt for i in range(task.items(s).size or 0)} for s in ("train", "test")]  # type: ignore[arg-type]
    assert not sides[0] & sides[1]
    numbers = [task.items(s)[i].data["n"] for s in ("train", "test") for i in range(task.items(s).size or 0)]  # type: ignore[arg-type]
    assert sorted(numbers) == list(range(len(prompts)))


def test_the_held_out_share_is_near_the_fraction_and_does_not_move_when_rows_are_added() -> None:
    rows = [{"prompt": f"p{i}"} for i in range(2000)]
    few, many = (DatasetTask(rows[:n], None, ZERO, test_fraction=0.2).items("test") for n in (1000, 2000))
    assert abs((many.size or 0) / 2000 - 0.2) < 0.03
    assert {few[i].prompt for i in range(few.size or 0)} <= {many[i].prompt for i in range(many.size or 0)}


def test_success_and_answers() -> None:
    task = DatasetTask(ROWS, ROWS, ZERO, answer_column="answer", success_at_least=0.5, answer=lambda text: text.strip() or None)
    assert task.success(0.5) and not task.success(0.49)
    said = Message("a", 0, [], [], [], "", "stop", " 3 ")
    assert task.answer(said.text) == "3" and task.answer("  ") is None
    assert task.message_correct(task.items("train")[3], said) is True
    assert task.message_correct(task.items("train")[4], said) is False
    plain = DatasetTask([{"prompt": "x"}], [{"prompt": "y"}], ZERO)
    assert plain.message_correct(plain.items("train")[0], said) is None


def test_a_recipe_names_the_function_that_reads_answers(tmp_path: Path) -> None:
    """Then teams can vote over a dataset of one's own. To count items nothing is run."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    code = "def zero(completions, **_): return [0.0] * len(completions)\n"
    code += "def last(text): return text.split()[-1] if text else None\ndef number(text): return 3\n"
    (tmp_path / "reading.py").write_text(code)
    common = {"name": "dataset", "path": "rows.jsonl", "reward": "reading:zero", "answer_column": "answer"}
    debate = build_router("debate", ["a", "b", "c"])
    for name, answer in (("last", "3"), ("number", UserError), ("split", UserError)):
        settings = DatasetSettings.model_validate(common | {"answer": f"reading:{name}"})
        settings.for_items(tmp_path).check_router(debate)
        if name == "split":
            with pytest.raises(UserError, match="task.answer"):
                settings.build(tmp_path)
            continue
        task = settings.build(tmp_path)
        task.check_router(debate)
        if answer is UserError:
            with pytest.raises(UserError, match="task.answer returned 3, a int"):
                task.answer("x")
        else:
            assert task.answer("so it is 3") == answer and task.answer("") is None
    assert named_code({"task": common | {"answer": "reading:last"}})["task.answer"] == "reading:last"


def test_without_a_reader_of_answers_nothing_is_known_of_a_message() -> None:
    """The reward may read `so it is 3`, or several messages: comparing whole messages would call right ones wrong."""
    task = DatasetTask(ROWS, ROWS, ZERO, answer_column="answer")
    read = DatasetTask(ROWS, ROWS, ZERO, answer_column="answer", answer=lambda text: text.split()[-1])
    debate = build_router("debate", ["a", "b", "c"])
    for text, right in (("3", True), ("so it is 3", True), ("4", False)):
        said, item = Message("a", 0, [], [], [], "", "stop", text), task.items("train")[3]
        episode = Episode(item.id, 0, item.prompt, 0, item, [said])
        assert task.message_correct(item, said) is None and task.vote(episode) is None
        assert read.message_correct(item, said) is right and read.vote(episode) == text.split()[-1]
    read.check_router(debate)
    with pytest.raises(UserError, match="dataset reads no answers from messages.*name a team.router.judge"):
        task.check_router(debate)


def test_build_looks_beside_the_recipe(tmp_path: Path) -> None:
    from teamtr_lora.tasks.dataset import DatasetSettings as Section

    write_jsonl(tmp_path / "rows.jsonl")
    (tmp_path / "my_rewards_beside.py").write_text("def f(prompts, level, **_):\n    return [float(n) for n in level]\n")
    section = Section(name="dataset", path="rows.jsonl", reward="my_rewards_beside:f", test_path="rows.jsonl", on_overlap="allow")
    task = section.build(tmp_path)
    from teamtr_lora.team import Episode

    item = task.items("test")[7]
    assert task.score([Episode(item.id, 0, item.prompt, 0, item)]) == [7.0]
    with pytest.raises(UserError, match=r"task\.reward = 'my_rewards_beside:g'.*it defines f"):
        section.model_copy(update={"reward": "my_rewards_beside:g"}).build(tmp_path)


class _Finite:
    def __init__(self, size: int | None) -> None:
        self.size = size

    def __getitem__(self, position: int) -> Item:
        return Item(str(position), "")


def ids(order: DataOrder, cursor: int, count: int) -> list[int]:
    return [int(item.id) for item in order.take(cursor, count)]


@given(st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_an_epoch_is_a_permutation(size: int, seed: int) -> None:
    order = DataOrder(_Finite(size), seed)
    for epoch in range(3):
        assert sorted(ids(order, epoch * size, size)) == list(range(size))


@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 5))
def test_a_cursor_is_all_there_is_to_know(size: int, counts: list[int], seed: int) -> None:
    whole = ids(DataOrder(_Finite(size), seed), 0, sum(counts))
    order, cursor = DataOrder(_Finite(size), seed), 0
    for count in counts:
        assert ids(order, cursor, count) == whole[cursor : cursor + count] == ids(DataOrder(_Finite(size), seed), cursor, count)
        cursor += count


def test_epochs_and_seeds_differ() -> None:
    order = DataOrder(_Finite(50), 0)
    assert ids(order, 0, 50) != ids(order, 50, 50)
    assert ids(order, 0, 50) != ids(DataOrder(_Finite(50), 1), 0, 50)


def test_unlimited_items_are_taken_in_turn_and_never_shared_by_seeds() -> None:
    first, second = (ids(DataOrder(_Finite(None), seed), 0, 1000) for seed in (0, 1))
    assert first == list(range(first[0], first[0] + 1000))
    assert not set(first) & set(second)
    assert ids(DataOrder(_Finite(None), 1), 5, 3) == second[5:8]


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(UserError, match="empty"):
        DataOrder(_Finite(0), 0)
