"""What is known of a team after an undo is of the team that is back; what went with the swap is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_up_run import plain_rows, write_rows

from teamtr_lora.cli import main
from teamtr_lora.report.in_words import tiles
from teamtr_lora.report.run_data import RunData
from teamtr_lora.runs.metrics import StageRow, SwapRow, read_rows
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.stored_run import read_run
from teamtr_lora.study.diagnose import diagnose_run

LEFT = ["--agent", "left", "--with", "fresh:rank=8", "--direct", "--json"]


@pytest.fixture(scope="module")
def trained_on(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One stage, a swap of left, another stage; every evaluation is given an accuracy of its own. Read only."""
    run = Path(shutil.copytree(trained, tmp_path_factory.mktemp("undo") / "run"))
    assert main(["swap", str(run), *LEFT]) == 0
    assert main(["train", str(run), "training.stages=2", "--resume", "--json"]) == 0
    rows = plain_rows(run)
    for row in rows:
        for key, share in (("evaluation", 0.1), ("evaluation_before", 0.05)):
            if row.get(key):
                judged = {"value": 0.5, "standard_error": 0.1}
                row[key] |= {"avg_at_k": share + row["stage"] / 5, "coordination": judged, "coordination_given_success": judged}
    write_rows(run, rows)
    _save(run, metrics_bytes=(run / "metrics.jsonl").stat().st_size, accuracy_after=0.5)
    return run


def _save(run: Path, **values: Any) -> None:
    store = RunDir(run).checkpoints
    state, optimizers = store.load()
    for key, value in (values | {"step": state.step + 1}).items():
        setattr(state, key, value)
    store.save(state, optimizers)


@pytest.fixture
def run(trained_on: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_on, tmp_path / "run"))


def after_undo(run: Path, capsys: Any) -> tuple[str, dict[str, Any]]:
    """What undo prints, and the summary of a resumed training that has nothing to do."""
    capsys.readouterr()
    assert main(["swap", str(run), "--undo"]) == 0
    told = capsys.readouterr().out
    assert main(["train", str(run), "--resume", "--json"]) == 0
    return told, json.loads(capsys.readouterr().out)


def test_the_accuracy_is_that_of_the_team_that_is_back(run: Path, capsys: Any) -> None:
    told, summary = after_undo(run, capsys)
    stages = {row.stage: row for row in read_rows(run) if isinstance(row, StageRow)}
    assert stages[1].versions == {agent: version.name for agent, version in read_run(run).versions.items()}
    assert summary["accuracy_after"] == pytest.approx(0.3) and summary["episodes_evaluated"] == 5
    assert stages[2].evaluation and stages[2].evaluation["avg_at_k"] == pytest.approx(0.5), "of the team that is gone"
    assert "what left, right learned after the swap is undone with it" in told and told.count("\n") == 3


def test_report_and_diagnose_begin_with_the_team_that_is_back(run: Path, capsys: Any) -> None:
    now = RunData("run", read_run(run), read_rows(run))
    assert [e["avg_at_k"] for e in now.ends] == pytest.approx([0.1, 0.5])
    after_undo(run, capsys)
    back = RunData("run", read_run(run), read_rows(run))
    assert [e["avg_at_k"] for e in back.ends] == pytest.approx([0.1, 0.3])
    assert "30.0%" in [tile.value for tile in tiles(back)] and "from 0.100 to 0.300" in diagnose_run(run).verdict[1]


def test_the_coordination_that_diagnose_shows_is_that_of_the_team_that_is_back(run: Path, capsys: Any) -> None:
    after_undo(run, capsys)
    shown = diagnose_run(run).coordination
    assert (shown["stage"], shown["accuracy"]) == (1, pytest.approx(0.3))


def test_a_team_that_only_the_swap_evaluated_has_that_accuracy(run: Path, capsys: Any) -> None:
    _forget(run, StageRow, "evaluation")
    assert after_undo(run, capsys)[1]["accuracy_after"] == pytest.approx(0.25)


def test_a_team_that_nobody_evaluated_has_no_accuracy(run: Path, capsys: Any) -> None:
    _forget(run, StageRow, "evaluation")
    _forget(run, SwapRow, "evaluation_before")
    _, summary = after_undo(run, capsys)
    assert summary["accuracy_after"] is None and summary["episodes_evaluated"] == 0
    assert main(["train", str(run), "--resume"]) == 0
    assert "-> - (this team was not evaluated)" in capsys.readouterr().out
    assert diagnose_run(run).missing["coordination"] == "this team was not evaluated"


def _forget(run: Path, kind: type, key: str) -> None:
    """Leaves an evaluation out of every row but stage 0's and the last stage's."""
    rows = read_rows(run)
    for row in rows:
        if isinstance(row, kind) and row.stage == 1:  # type: ignore[union-attr]
            setattr(row, key, None)
    write_rows(run, [row.model_dump(mode="json") for row in rows])
    _save(run, metrics_bytes=(run / "metrics.jsonl").stat().st_size)


def test_an_undo_right_after_the_swap_undoes_nothing_else(trained: Path, tmp_path: Path, capsys: Any) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    assert main(["swap", str(run), *LEFT]) == 0
    told, _ = after_undo(run, capsys)
    assert "learned" not in told and told.count("\n") == 1 and ": left v" in told


def test_a_run_does_not_become_shorter(run: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert main(["train", str(run), "training.stages=1", "--resume"]) == 0
    shown = capsys.readouterr()
    assert "already finished (2 of 2 stages); to go on, add training.stages=4" in shown.out + shown.err
    assert read_run(run).recipe.training.stages == 2, "what is done stays in the recipe"
