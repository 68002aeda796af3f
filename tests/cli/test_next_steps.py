"""What is printed at the end of a run can be typed as it stands."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from teamtr_lora.cli import build_parser, main
from teamtr_lora.cli.text.summary import print_next_steps
from teamtr_lora.cli.text.tables import print_table, table_of
from teamtr_lora.common.consoles import Console
from teamtr_lora.training.trainer import TrainSummary


def commands(run_dir: str, capsys: pytest.CaptureFixture[str], *, own_task: bool = False, skipped: int = 1) -> list[list[str]]:
    names = "stages updates accepted shrunk rejected skipped out_of_region_accepted episodes_evaluated tokens"
    counts = dict.fromkeys(names.split(), 1) | {"updates": 2, "skipped": skipped}
    accuracies = dict.fromkeys(("accuracy_before", "accuracy_after", "reward_before", "reward_after"), 0.5)
    summary = TrainSummary(run_dir=run_dir, seconds=1.0, adapters={}, **counts, **accuracies)  # type: ignore[arg-type]
    print_next_steps(Console(width=60), summary, "what's 1 + 1?", own_task=own_task)
    lines = capsys.readouterr().out.partition("next:\n")[2].splitlines()
    return [shlex.split(line)[1:] for line in lines]


def test_every_command_is_one_and_names_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = commands("runs/my team", capsys)
    assert [words[0] for words in found] == ["ask", "view", "report", "eval", "init"]
    for words in found:
        build_parser().parse_args(words)
    assert found[0][1:] == ["runs/my team", "what's 1 + 1?"] and found[1] == ["view"] and found[2][1] == "runs/my team"
    assert [words[0] for words in commands("r", capsys, own_task=True)] == ["ask", "view", "report", "eval"]
    nothing = commands("r", capsys, skipped=2)  # there is no new team to ask or to measure
    assert [words[0] for words in nothing] == ["diagnose", "view", "report", "init"] and nothing[0][1:] == ["r"]
    build_parser().parse_args(nothing[0])
    (tmp_path / "my-team").mkdir()
    elsewhere = commands("/some/place/first", capsys)
    assert elsewhere[1] == ["view", "/some/place"] and [words[0] for words in elsewhere] == ["ask", "view", "report", "eval"]


@pytest.mark.parametrize("command", [["report"], ["certify"], ["eval"], ["ask"]])
def test_a_misspelt_run_is_told_the_one_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    (tmp_path / "quickstart").mkdir()
    question = ["1+1"] if command == ["ask"] else []
    for name, meant in (("quickstrat", True), ("elsewhere", False), ("x" * 300, False)):
        assert main([*command, str(tmp_path / name), *question]) == 2
        assert (f"did you mean {str(tmp_path / 'quickstart')!r}?" in (said := capsys.readouterr().err)) == meant, said


def test_an_interval_is_not_broken_in_two(capsys: pytest.CaptureFixture[str]) -> None:
    table = table_of("", "measure", "value", "95% interval", "standard error")
    table.add_row("own answer of the planner right", "0.6875", "[0.3750, 1.0000]", "0.1619")
    print_table(Console(width=60), table)
    assert "[0.3750, 1.0000]" in (shown := capsys.readouterr().out) and max(map(len, shown.splitlines())) <= 60
