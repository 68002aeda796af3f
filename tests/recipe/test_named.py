"""Files and functions that a recipe names are looked for, and never run."""

from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.recipe import Recipe, RecipeError, check_named

TEAM = {"agents": [{"name": "solver"}, {"name": "checker"}, {"name": "judge"}], "protocol": {"view": "per_agent"}}


def found(folder: Path, task: dict[str, Any], router: dict[str, Any] | None = None) -> list[str]:
    recipe = Recipe.model_validate({"team": TEAM | ({"router": router} if router else {}), "task": task}).placed_in(folder)
    try:
        check_named(recipe, "r.yaml")
    except RecipeError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("not even JSON")
    (tmp_path / "mine.py").write_text("raise SystemExit('this was run')\nf = g = r = print\n")
    return tmp_path


def test_what_is_there_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"name": "dataset", "path": "rows.jsonl", "test_path": str(folder / "rows.jsonl"), "reward": ["mine:f", "mine.g"]}
    router = {"kind": "custom", "callable": "mine:r"}
    assert found(folder, task, router) == []
    (folder / "packages").mkdir()
    (folder / "packages" / "trusted_mine.py").write_text("raise SystemExit('this was run')\n")
    monkeypatch.syspath_prepend(folder / "packages")
    task["reward"] = "trusted_mine.deeper:f"
    assert ["TEAMTR_LORA_TRUST=trusted_mine" in line for line in found(folder, task)] == [True]
    monkeypatch.setenv("TEAMTR_LORA_TRUST", "trusted_mine")
    assert found(folder, task) == []


def test_all_that_is_missing_at_once(folder: Path) -> None:
    task = {"name": "dataset", "path": "row.jsonl", "test_path": "no/rows.csv", "reward": ["mine:f", "mime:f"]}
    lines = found(folder, task, {"kind": "custom", "callable": "subprocess:run"})
    assert [line.split(":")[0] for line in lines] == [
        "task.path = 'row.jsonl'",
        "task.test_path = 'no/rows.csv'",
        "task.reward.1 = 'mime",
        "team.router.callable = 'subprocess",
    ]
    assert lines[0].endswith("did you mean 'rows.jsonl'?") and all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("def f(): ...", False),
        ("class f: ...", False),
        ("from deeper import f", False),
        ("try:\n    import x as f\nexcept ImportError:\n    f = None", False),
        ("from deeper import *", False),
        ("from deeper import  \\\n*", False),
        ("def make():\n    global f\n    f = print\nmake()", False),
        ("import sys\nsys.modules[__name__].f = print", False),
        ("# -*- coding: latin-1 -*-\nf = 1", False),
        ("[f := print for _ in range(1)]", False),
        ("import sys\nsys._getframe().f_globals['f'] = print", False),
        ("globals()['f'] = 1", False),
        ("def __getattr__(name): ...", False),
        ("def f(:", False),  # importing it will say so
        ("def ff(): f = 1", True),
        ("f", True),
        ("class C:\n    def f(self): ...", True),
    ],
)
def test_a_function_that_the_file_does_not_define(folder: Path, text: str, missing: bool) -> None:
    (folder / "mine.py").write_text(text + "\ndef other(): ...\n")
    lines = found(folder, {"name": "dataset", "path": "rows.jsonl", "reward": "mine:f"})
    assert bool(lines) == missing
    assert all("mine has no 'f'; it defines " in line and "other" in line for line in lines)


def test_a_file_named_instead_of_its_module(folder: Path) -> None:
    (line,) = found(folder, {"name": "dataset", "path": "rows.jsonl", "reward": "mine.py:f"})
    assert line.endswith("names a file where a module belongs; write it as mine:f")


def test_files_of_other_tasks(folder: Path) -> None:
    task = {"name": "tau2_retail", "path": "rows.jsonl", "policy": "policy.md", "responder": {"script": "replies.jsonl"}}
    keys = [line.split(" = ")[0] for line in found(folder, task)]
    assert keys == ["task.policy", "task.responder.script"]
    for odd in ("\0.jsonl", "a" * 5000 + ".jsonl", "~nobody-here/x.jsonl"):
        assert len(found(folder, {"name": "gsm8k", "path": odd})) == 1
    assert found(folder, {"name": "gsm8k", "hub": "a/b"}) == found(folder, {"name": "column_sum"}) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"reward_range": [0, 1], "success_at_least": 1.5}, "no episode would count"),
        ({"reward_range": [0, 2], "success_at_least": -1}, "every episode would count"),
        ({"reward_range": [0, 2], "success_at_least": 2}, None),
        ({"reward_range": [-2, 0]}, None),
        ({"success_at_least": 7}, None),
    ],
)
def test_success_is_within_the_range_where_both_are_given(folder: Path, keys: dict[str, Any], words: str | None) -> None:
    lines = found(folder, {"name": "dataset", "path": "rows.jsonl", "reward": "mine:f", **keys})
    assert ["task.success_at_least" in line and str(words) in line for line in lines] == ([] if words is None else [True])


@pytest.mark.parametrize(
    ("router", "refused"),
    [
        ({"kind": "debate"}, True),
        ({"answer": "majority"}, True),
        ({"kind": "debate", "judge": "judge"}, False),
        ({"kind": "blind"}, False),
    ],
)
def test_a_dataset_says_what_its_team_votes_over(folder: Path, router: dict[str, Any], refused: bool) -> None:
    task = {"name": "dataset", "path": "rows.jsonl", "reward": "mine:f"}
    assert [line.startswith("task.answer: is not given") for line in found(folder, task, router)] == [True] * refused
    assert found(folder, task | {"answer": "mine:g"}, router) == found(folder, {"name": "column_sum"}, router) == []
