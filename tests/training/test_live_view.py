"""The live view shows every row a run can write, and gives the terminal back."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from teamtr_lora.recipe import Recipe, TeamTRConfig
from teamtr_lora.training.live_view import LiveView

STATE = SimpleNamespace(global_step=1, max_steps=3, epoch=0)


def update_row(**values: Any) -> dict[str, Any]:
    reading = {"mean": 0.004, "standard_error": 0.001, "bound": 0.006}
    row = {"kind": "update", "agent": "solver", "decision": "shrunk", "alpha": 0.5, "reward_mean": 0.25, "delta": 0.01}
    row |= {"reason": "", "episodes": 40, "fresh_episodes": 40, "overflowed_episodes": 4, "truncated_messages": 4}
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


def test_what_a_limit_took_from_the_rollout_is_on_the_line() -> None:
    assert "(" not in shown(TeamTRConfig(), update_row()).split("left")[1], "a tenth is not much"
    line = " ".join(shown(TeamTRConfig(), update_row(overflowed_episodes=5, truncated_messages=6, reason="why")).split())
    assert "(why) (5 of 40 episodes ended early: the context was full) (6 messages of 40 episodes were cut" in line
    again = shown(TeamTRConfig(), update_row(fresh_episodes=0, tokens_per_second=0.0))
    assert "same episodes" in again and "tokens/s" not in again


def test_an_accuracy_that_cannot_rise_is_explained_once() -> None:
    evaluation = {"avg_at_k": 0.0, "standard_error": 0.0, "mean_reward": 0.6}
    row = {"kind": "stage", "stage": 0, "floors": None, "evaluation": evaluation}
    assert "no episode counts as right yet" in shown(TeamTRConfig(), row)
    for other in (
        {"stage": 1},
        {"evaluation": evaluation | {"avg_at_k": 0.1}},
        {"evaluation": evaluation | {"mean_reward": 0.0}},
    ):
        assert "counts as right" not in shown(TeamTRConfig(), row | other)


def test_what_a_newcomer_asks_comes_before_what_passes_resolve() -> None:
    evaluation = {"avg_at_k": 0.5, "standard_error": 0.1, "mean_reward": 0.6}
    lines = shown(TeamTRConfig(), {"kind": "stage", "stage": 0, "floors": {"gate": 2e-4}, "evaluation": evaluation}).splitlines()
    assert "0.500 ± 0.100" in lines[0] and "gate 2.0e-04; delta = 0.01" in lines[1] and len(lines) == 2


def test_what_was_not_measured_is_told_at_the_end() -> None:
    out = io.StringIO()
    view, config = LiveView(Console(file=out, width=200)), TeamTRConfig()
    view.on_train_begin(config, STATE, None, run_dir="runs/x")
    assert config.unmeasured() and "measure" not in out.getvalue()
    view.on_train_end(config, STATE, None)
    assert f"not measured: {config.unmeasured()[0]}" in out.getvalue()
    out.truncate(0)
    view.on_train_begin(config, STATE, None)  # a baseline, which could not measure it
    view.on_train_end(config, STATE, None)
    assert "measured" not in out.getvalue()


@pytest.mark.parametrize("mean", [0.004, None])
def test_a_bound_nobody_can_give_is_shown_and_not_a_crash(mean: float | None) -> None:
    row = update_row(decision="rejected", alpha=None, kl={"exact": {"mean": mean, "standard_error": None, "bound": None}})
    assert "(bound inf)" in shown(TeamTRConfig(), row)


def test_the_estimator_that_gates_is_the_one_shown() -> None:
    assert "KL -0.5000" in shown(TeamTRConfig(estimator="k1"), update_row())


def test_what_is_left_counts_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds of evaluation before training and after stages 2 and 3, twenty for each of the three updates."""
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr("teamtr_lora.training.live_view.time.monotonic", lambda: now[0])
    view, config = LiveView(Console(file=out, width=200)), TeamTRConfig(stages=3, every_stages=2)
    view.on_train_begin(config, STATE, None)
    stage = {
        "kind": "stage",
        "stage": 0,
        "floors": None,
        "evaluation": {"avg_at_k": 0.5, "standard_error": 0.1, "mean_reward": 1.0},
    }
    for row, seconds, step in (
        (stage, 10, 1),
        (update_row(), 20, 2),
        (stage | {"evaluation": None}, 1, 2),
        (update_row(), 20, 3),
    ):
        now[0] += seconds
        view.on_log(config, SimpleNamespace(global_step=step, max_steps=4, epoch=step - 1), None, logs=row)
    view.close()
    assert re.findall(r"(\S+) left", out.getvalue()) == ["1:00", "0:30"]


def test_numerical_floors_are_told_where_delta_is_near_them() -> None:
    row = {"kind": "stage", "stage": 0, "floors": {"training": 1e-6, "gate": 2e-4}, "evaluation": None}
    assert "gate 2.0e-04; delta = 0.01" in shown(TeamTRConfig(), row)
    assert shown(TeamTRConfig(), row | {"floors": {"training": 2e-13, "gate": 9e-5}}) == ""


def test_the_terminal_gets_its_cursor_back() -> None:
    text = shown(TeamTRConfig(), update_row(), terminal=True)
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0


def test_an_update_that_was_not_taken_says_why_on_its_line() -> None:
    row = update_row(decision="rejected", alpha=None, reason="no gain: -0.0010 ± 0.0030 on held-out items [bold]")
    line = shown(TeamTRConfig(), row)
    assert (
        line.count("\n") == 1
        and "rejected" in line
        and line.rstrip().endswith("(no gain: -0.0010 ± 0.0030 on held-out items [bold])")
    )


def test_a_narrow_terminal_wraps_between_words() -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out, force_terminal=True, width=60, highlight=False, color_system=None))
    view.on_train_begin(TeamTRConfig(), STATE, None)
    view.close()
    out.truncate(0)
    view.on_log(
        TeamTRConfig(), STATE, None, logs=update_row(reason="the whole step was out of region: KL bound 0.0310 above 0.01")
    )
    lines = out.getvalue().replace("\x00", "").splitlines()
    words = " ".join(lines).split()
    assert len(lines) > 1 and all(len(line) <= 60 for line in lines)
    assert all(line.startswith("    ") for line in lines[1:]), "what belongs to a line stands under it"
    assert {"tokens/s", "region:", "0.0310", "bound", "(bound"} <= set(words)


def test_a_notebook_gets_the_lines_and_one_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    displayed, updated = [], []
    handle = SimpleNamespace(update=lambda data, raw: updated.append(data["text/plain"]))

    def display(data: Any, **how: Any) -> Any:
        displayed.append(data)
        return handle if how.get("display_id") else None

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    view = LiveView(Console(force_jupyter=True, width=100))
    view.on_train_begin(TeamTRConfig(), STATE, None, run_dir="runs/x")
    view.on_progress("rollout", 3, 64, 100)
    view.on_log(TeamTRConfig(), STATE, None, logs=update_row())
    view.close()
    assert {"text/plain": "rollout 3/64 episodes"} in displayed and updated == [""]
    texts = [str(getattr(each, "text", each)) for each in displayed]
    assert any("runs/x" in text for text in texts) and any("solver" in text for text in texts)


def finished_line(*, recipe: bool = False, **training: Any) -> str:
    out = io.StringIO()
    view = LiveView(Console(file=out, width=200))
    config = TeamTRConfig(stages=4, **training)
    config = Recipe(team={"agents": [{"name": "a"}]}, training=config.training) if recipe else config
    view.on_train_begin(config, SimpleNamespace(global_step=12, max_steps=12, epoch=4), None, run_dir="runs/x")
    view.on_train_end(config, STATE, None)
    return out.getvalue()


def test_a_run_that_has_nothing_left_to_do_says_so_in_the_words_of_who_started_it() -> None:
    assert finished_line() == "run directory: runs/x\nalready finished (4 of 4 stages); to go on, add stages=8\n"
    assert "to go on, add training.stages=8" in finished_line(recipe=True)
    falling = {"learning_rate": 1e-3, "schedule": "linear"}  # more stages are refused: the rate is nothing by the last one
    assert "to go on, give team='runs/x' and another output_dir" in finished_line(**falling)


def test_away_from_a_terminal_there_is_nothing_but_the_lines() -> None:
    assert shown(TeamTRConfig(), update_row()).count("\n") == 1
