"""Every task says in its own words what it is, and reads a team's answer out of its messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from teamtr_lora import ask_team
from teamtr_lora.cli import main
from teamtr_lora.tasks import Item, Task
from teamtr_lora.tasks.generated.column_sum import ColumnSum
from teamtr_lora.tasks.table import BY_NAME, OF_THE_USER, SCRIPT
from teamtr_lora.team import Episode, Message

REFERENCE = Path(__file__).resolve().parents[2] / "adapters" / "column_sum"


def said(*texts: str) -> Episode:
    messages = [Message(f"a{turn}", turn, [], [turn], [], "", "stop", text) for turn, text in enumerate(texts)]
    return Episode("q", 0, "347+285", 0, Item("q", "347+285"), messages)


def test_each_task_is_described_in_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = {name: family.in_words(name) for name, family in BY_NAME.items() if name != SCRIPT}
    assert len(set(words.values())) == len(words) and all(text.endswith(".") for text in words.values()), "whole sentences"
    for family in set(BY_NAME.values()):
        assert set(family.about) <= set(family.names()) and (not family.about or set(family.about) == set(family.names()))
    assert main(["tasks", "list"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "largest of four numbers" in shown and "AIME 2025" in shown


def test_the_columns_make_the_sum() -> None:
    task = ColumnSum(3)
    assert task.team_answer(said("7+5+0=12", "4+8+1=13", "3+2+1=6")) == "632"
    assert task.team_answer(said("7+5+0=12", "4+8+1=13", "9+2+1=12")) == "1232"
    assert task.team_answer(said("7+5+0=12", "no idea", " hm ")) == "hm"
    assert task.team_answer(said("=2", "=3", "=1", "=2", "=4", "=1")) == "142"  # the last word on each column


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("gsm8k", "so \\boxed{12}", "12"),
        ("largest", "it is 7", "7"),
        ("countdown", "(1 + 2) * 3", None),
        ("gsm8k", "well", "well"),
    ],
)
def test_an_answer_is_read_as_the_task_reads_it(name: str, text: str, answer: str | None) -> None:
    family = BY_NAME[name]
    settings = family(name=name, **({"path": "x.jsonl"} if name == "gsm8k" else {}))
    assert settings.reader().team_answer(said("first", text)) == (text if answer is None else answer)


@pytest.mark.parametrize("name", sorted({*BY_NAME} - {*OF_THE_USER}))
def test_a_task_that_answers_messages_says_so(name: str, tmp_path: Path) -> None:
    """`ask` plays no replies, and knows of a task its settings alone."""
    given: dict[str, Any] = {"path": "x.jsonl"} if "path" in BY_NAME[name].model_fields else {}
    if "responder" in BY_NAME[name].model_fields:
        given["responder"] = {"url": "http://127.0.0.1:1/v1", "model": "m"}
    settings = BY_NAME[name](name=name, **given)
    assert bool(settings.replies) == (type(settings.make(tmp_path)).open is not Task.open)


def test_ask_says_that_nothing_replies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    team = "{protocol: {system: Guess.}, agents: [{name: a, lora: {rank: 2}}]}"
    for task, said in (("arbench_gn", True), ("column_sum, digits: 1", False)):
        caplog.clear()
        (tmp_path / "r.yaml").write_text(f"team: {team}\ntask: {{name: {task}}}\nrollout: {{max_message_tokens: 2}}\n")
        ask_team(tmp_path / "r.yaml", "12")
        assert ("the game replies to the team's messages; nothing does here" in caplog.text) is said


def test_where_no_answer_can_be_read_the_answering_message_is_the_answer() -> None:
    assert BY_NAME["dataset"](name="dataset", path="x.jsonl", reward="m:f").reader().team_answer(said("a", " b ")) == "b"
    assert Task().team_answer(said()) == ""


def test_a_dataset_team_that_votes_is_read_by_the_users_function_where_its_file_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "finds.py").write_text("def number(text):\n    return text.split()[-1] if text else None\n")
    settings = BY_NAME["dataset"](name="dataset", path="x.jsonl", reward="m:f", answer="finds:number")
    reader = settings.voting_reader(tmp_path, votes=True)
    assert reader.reads_answers and reader.vote(said("so 12")) == "12"
    assert not settings.voting_reader(tmp_path, votes=False).reads_answers and not caplog.text, "nobody votes: no file is run"
    assert not settings.voting_reader(tmp_path / "elsewhere", votes=True).reads_answers
    assert "what its first agent says is the answer" in caplog.text and "finds" in caplog.text


def test_the_shipped_team_answers(capsys: pytest.CaptureFixture[str]) -> None:
    episode = ask_team(REFERENCE, "347+285", temperature=0)
    assert episode.answer == "632"
    assert main(["ask", str(REFERENCE), "347+285", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("the team's answer: 632")
