"""`tasks` and `score`: the same verifiers as training, over files."""

import json
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.cli import main
from teamtr_lora.cli.text.tasks import task_keys, task_rows
from teamtr_lora.tasks.machinery.task_settings import ItemsOrGenerated, TaskSettings
from teamtr_lora.tasks.table import BY_NAME, FAMILIES, SCRIPT

GENERATED = [r["name"] for r in task_rows() if "generated" in r["items"]]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(list(argv))
    return status, *capsys.readouterr()


def test_every_family_is_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in BY_NAME if name != SCRIPT]
    status, out, _ = run(capsys, "tasks", "list")
    assert status == 0 and all(name in out for name in names)
    assert {row["name"] for row in json.loads(run(capsys, "tasks", "list", "--json")[1])} == set(names)
    assert run(capsys, "tasks", "list", "zebra")[0] == 2
    status, _, said = run(capsys, "score", "dataset", "--items", "a.jsonl", "--responses", "b.jsonl")
    assert status == 2 and "teamtr-lora eval RUN" in said
    for name in names:
        status, out, err = run(capsys, "tasks", "show", name)
        assert status == 0 and name in out, err


def test_keys_of_a_section_are_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [row["key"] for row in json.loads(run(capsys, "tasks", "show", "tau2_retail", "--json")[1])]
    assert {"responder.url", "responder.api_key_variable", "database"} <= set(keys) and "name" not in keys
    out = run(capsys, "tasks", "show", "tau2_retail")[1]
    assert "responder.url" in out and "{train: [ids], test: [ids]}" in " ".join(out.split())


def test_a_key_without_a_default_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    keys = json.loads(run(capsys, "tasks", "show", "dataset", "--json")[1])
    assert [row["key"] for row in keys if row["required"]] == ["reward"]
    shown = {line.split()[0]: line.split()[1] for line in run(capsys, "tasks", "show", "dataset")[1].splitlines() if "  " in line}
    assert (shown["reward"], shown["answer"], shown["prompt_column"]) == ("required", "null", '"prompt"')


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_called_required_is_what_a_recipe_cannot_leave_out(family: type[TaskSettings]) -> None:
    """`custom` needs a callable, and no settings."""
    needed = {name for name, field in family.model_fields.items() if field.is_required()} - {"name"}
    assert {row["key"] for row in task_keys(family) if row["required"]} == needed


@pytest.mark.parametrize("name", GENERATED)
def test_sampled_items_can_be_scored(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = run(capsys, "tasks", "sample", name, "-n", "2", "--json")
    assert status == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == 2
    items = write(tmp_path / "items.jsonl", rows)
    said = write(tmp_path / "said.jsonl", [{"id": row["id"], "response": "nothing"} for row in rows])
    report = json.loads(run(capsys, "score", name, "--items", items, "--responses", said, "--json")[1])
    assert report["task"] == name and report["n"] == 2 and report["mean"] == 0.0 and report["standard_error"] == 0.0
    assert report["items"] == [{"id": row["id"], "score": 0.0} for row in rows]


def test_scoring_a_benchmark_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    items = write(tmp_path / "items.jsonl", [{"id": i, "question": f"q{i}", "answer": str(i)} for i in range(4)])
    said = write(tmp_path / "said.jsonl", [{"id": i, "response": f"#### {min(i, 2)}"} for i in range(4)])
    report = json.loads(run(capsys, "score", "gsm8k", "--items", items, "--responses", said, "--json")[1])
    assert [row["score"] for row in report["items"]] == [1.0, 1.0, 1.0, 0.0]
    assert report["mean"] == 0.75 and report["standard_error"] == pytest.approx(0.25)
    status, out, _ = run(capsys, "score", "gsm8k", "--items", items, "--responses", said)
    assert status == 0 and "n = 4, mean = 0.7500 ± 0.2500" in out


def test_ids_stay_as_they_are_written_and_a_list_of_rows_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"id": 3, "number": "0435"}, {"id": "a", "number": "0435"}, {"number": "0435"}]
    (tmp_path / "items.jsonl").write_text(json.dumps(rows, indent=1))  # one list, in spite of its name
    said = [{"id": "3", "response": "Guess: 0435"}, {"id": "a", "response": "Guess: 0436"}, {"id": 2, "response": "Guess: 0435"}]
    (tmp_path / "said.json").write_text("".join(json.dumps(row) + "\n" for row in said))  # and the other way round
    files = ["--items", str(tmp_path / "items.jsonl"), "--responses", str(tmp_path / "said.json")]
    report = json.loads(run(capsys, "score", "arbench_gn", *files, "--json")[1])
    assert report["items"] == [{"id": 3, "score": 1.0}, {"id": "a", "score": 0.0}, {"id": 2, "score": 1.0}]
    assert run(capsys, "score", "arbench_gn", *files)[0] == 0


@pytest.mark.parametrize(("name", "shown"), [("[/x]", "[/x]"), ("[bold]", "[bold]"), ("\ud800", "\\ud800"), ("é ", "é ")])
def test_odd_ids_are_printed(name: str, shown: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    items = write(tmp_path / "items.jsonl", [{"id": name, "number": "0435"}])
    said = write(tmp_path / "said.jsonl", [{"id": name, "response": "Guess: 0435"}])
    done, out, err = run(capsys, "score", "arbench_gn", "--items", items, "--responses", said)
    assert done == 0 and shown in out and not err


def test_scoring_an_interactive_task(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    items = write(tmp_path / "items.jsonl", [{"id": i, "number": "0435"} for i in range(3)])
    conversation = [{"role": "assistant", "content": "Guess: 1234"}, {"role": "user", "content": "Guess: 0435"}]
    rows: list[dict[str, Any]] = [
        {"id": 0, "messages": ["Guess: 1234", "Guess: 0435"]},
        {"id": 1, "messages": conversation},
        {"id": 2, "response": "Guess: 0435"},
    ]
    said = write(tmp_path / "said.jsonl", rows)
    report = json.loads(run(capsys, "score", "arbench_gn", "--items", items, "--responses", said, "--json")[1])
    assert [row["score"] for row in report["items"]] == [1.0, 0.0, 1.0]


def test_items_whose_answer_was_lost_are_left_out(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    items = write(
        tmp_path / "items.jsonl", [{"id": i, "problem": f"{i}?", "answer": None if i == 1 else str(i)} for i in range(3)]
    )
    said = write(tmp_path / "said.jsonl", [{"id": i, "response": f"\\boxed{{{i}}}"} for i in (0, 2)])
    report = json.loads(run(capsys, "score", "math500", "--items", items, "--responses", said, "--json")[1])
    assert report["n"] == 2 and report["mean"] == 1
    assert "1 items have no answer and are left out" in caplog.text


def test_items_without_a_response_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    items = write(tmp_path / "items.jsonl", [{"id": i, "number": "0435"} for i in range(5)])
    said = write(tmp_path / "said.jsonl", [{"id": 3, "response": "Guess: 0435"}, {"id": 3, "response": "Guess: 1234"}])
    _, printed, noted = run(capsys, "score", "arbench_gn", "--items", items, "--responses", said, "--json")
    report = json.loads(printed)
    assert "4 items have no response" in noted
    assert set(report) == {"task", "n", "mean", "standard_error", "items"}
    assert report["n"] == 2 and report["mean"] == 0.5
    status, out, _ = run(capsys, "score", "arbench_gn", "--items", items, "--responses", said)
    assert status == 0 and "4 items have no response and are not in the mean" in out


def test_what_a_benchmark_reports_beside_the_score(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    items = write(tmp_path / "items.json", [])
    (tmp_path / "items.json").write_text(json.dumps([{"id": 1, "surface": "Why?", "bottom": "ab cd"}]))
    said = write(tmp_path / "said.jsonl", [{"id": 1, "messages": ["Q: a?", "A: ab"]}])
    argv = ["score", "arbench_sp", "--items", items, "--responses", said, "reward=words"]
    row = json.loads(run(capsys, *argv, "--json")[1])["items"][0]
    assert row == {"id": 1, "score": 0.5, "characters": pytest.approx(2 * 3 / 10), "words": 0.5}
    out = run(capsys, *argv)[1]
    assert "characters: mean = 0.6000" in out and "words: mean = 0.5000" in out


def test_settings_of_a_section(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    items = write(tmp_path / "items.jsonl", [{"id": 1, "surface": "Why?", "bottom": "b"}])
    said = write(tmp_path / "said.jsonl", [{"id": 1, "messages": ["Q: a?", "b"]}])
    script = write(tmp_path / "script.jsonl", [{"reply": "Yes"}])
    argv = ["score", "arbench_sp", "--items", items, "--responses", said, "--json"]
    assert json.loads(run(capsys, *argv, f"task.responder.script={script}")[1])["mean"] == 1.0
    for setting, message in (
        ("responder.scrpt=a", "did you mean 'script'?"),
        ("responder.url=here", "must be an address such as http://host:8000"),
        (f"responder.script={tmp_path / 'no.jsonl'}", "no such file"),
    ):
        status, _, err = run(capsys, *argv, setting)
        assert status == 2 and message in err and err.count("\n") == 1
    status, _, err = run(capsys, *argv, "turns=3", "turns.x=1")
    assert status == 2 and "task.turns is a value, not a section" in err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["tasks", "show"], "needs a TASK"),
        (["tasks", "sample", "arbench_dc"], "a arbench_dc task needs items"),
        (["tasks", "show", "gsm9k"], "did you mean 'gsm8k'?"),
        (["tasks", "sample", "gsm8k"], "a gsm8k task needs items"),
        (["tasks", "sample", "zebra", "houses=9"], "task.houses = 9: must be at least 2 and at most 6"),
        (["tasks", "sample", "zebra", "housse=3"], "did you mean 'houses'?"),
        (["tasks", "sample", "arithmetic", "shots=-1"], "task.shots = -1"),
        (["score", "gsm8k", "--items", "ITEMS", "--responses", "none.jsonl"], "no such file"),
        (["score", "gsm8k", "--items", "ITEMS", "--responses", "UNKNOWN"], "row 1: no item of"),
        (["score", "gsm8k", "--items", "ITEMS", "--responses", "SILENT"], "row 1: has neither response"),
        (["score", "gsm8k", "--items", "TWICE", "--responses", "UNKNOWN"], "two items have the id '1'"),
        (["score", "math500", "--items", "EMPTY", "--responses", "EMPTY"], "holds no response"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    row = {"id": 1, "question": "q", "answer": "1"}
    files = {"ITEMS": [row], "UNKNOWN": [{"id": 7, "response": ""}], "SILENT": [{"id": 1}], "TWICE": [row, row], "EMPTY": []}
    argv = [write(tmp_path / f"{word}.jsonl", files[word]) if word in files else word for word in argv]
    status, _, err = run(capsys, *argv)
    assert status == 2 and expected in err and err.count("\n") == 1


def test_generated_tasks_need_no_path() -> None:
    assert all(name in GENERATED for f in FAMILIES if issubclass(f, ItemsOrGenerated) for name in f.names())
