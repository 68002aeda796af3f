"""The live view shows every row a run can write, and gives the terminal back."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.report.live import LiveView

STATE = SimpleNamespace(global_step=1, max_steps=3, epoch=0)


def update_row(**values: Any) -> dict[str, Any]:
    reading = {"mean": 0.004, "standard_error": 0.001, "bound": 0.006}
    row = {"kind": "update", "agent": "solver", "decision": "shrunk", "alpha": 0.5, "reward_mean": 0.25, "delta": 0.01}
    return row | {"tokens_per_second": 1200.0, "kl": {"exact": reading, "k1": {**reading, "mean": -0.5}}} | values


def shown(config: TeamTRConfig, row: dict[str, Any], *, terminal: bool = False) -> str:
    out = io.StringIO()
    view = LiveView(Console(file=out, force_terminal=terminal, width=200))
    view.on_train_begin(config, STATE, None)
    try:
        view.on_log(config, STATE, None, logs=row)
    finally:
        view.close()
    return out.getvalue()


def test_an_update_line_says_everything() -> None:
    line = shown(TeamTRConfig(), update_row())
    for part in ("solver", "reward 0.250", "KL 0.0040 (bound 0.0060) of 0.01", "shrunk x0.50", "1,200 tokens/s", "left"):
        assert part in line


@pytest.mark.parametrize("mean", [0.004, None])
def test_a_bound_nobody_can_give_is_shown_and_not_a_crash(mean: float | None) -> None:
    row = update_row(decision="rejected", alpha=None, kl={"exact": {"mean": mean, "standard_error": None, "bound": None}})
    assert "(bound inf)" in shown(TeamTRConfig(), row)


def test_the_estimator_that_gates_is_the_one_shown() -> None:
    assert "KL -0.5000" in shown(TeamTRConfig(estimator="k1"), update_row())


def test_the_terminal_gets_its_cursor_back() -> None:
    text = shown(TeamTRConfig(), update_row(), terminal=True)
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0


def test_a_skipped_update_says_why() -> None:
    row = update_row(decision="skipped", alpha=None, kl={}, groups=16, zero_variance_groups=15, messages=32)
    assert "skipped (15 of 16 groups had equal rewards: too few are left)" in shown(TeamTRConfig(), row)
    assert "skipped (solver said nothing to learn from)" in shown(TeamTRConfig(), row | {"messages": 0})


def test_a_run_that_has_nothing_left_to_do_says_so() -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, width=200))
    view.on_train_begin(TeamTRConfig(stages=4), SimpleNamespace(global_step=12, max_steps=12, epoch=4), None, run_dir="runs/x")
    view.close()
    assert out.getvalue() == "run directory: runs/x\nalready finished (4 of 4 stages); to go on, add training.stages=8\n"


def test_away_from_a_terminal_there_is_nothing_but_the_lines() -> None:
    assert shown(TeamTRConfig(), update_row()).count("\n") == 1
