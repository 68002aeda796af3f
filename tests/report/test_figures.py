"""Figures show what the rows say, and say what is missing where there is nothing to show."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up_run import make_run

from teamtr_lora.cli import main
from teamtr_lora.recipe import Recipe
from teamtr_lora.report.figures import FIGURES
from teamtr_lora.report.figures.comparison import COMPARING
from teamtr_lora.report.figures.costs import phase_seconds
from teamtr_lora.report.figures.drawing import Drawing, log_axis, plain
from teamtr_lora.report.figures.learning import accuracy, moving_mean
from teamtr_lora.report.figures.steps import kl_against_delta
from teamtr_lora.report.run_data import RunData, read_named_runs
from teamtr_lora.report.seeds import kinds_of


@pytest.mark.parametrize("name", FIGURES)
def test_a_run_that_measured_everything_fills_every_figure(name: str, full_data: RunData) -> None:
    figure = FIGURES[name]
    drawn = figure.draw(full_data)
    assert isinstance(drawn, Drawing), drawn
    values = [value for trace in drawn.traces for value in trace["y"] if value is not None]
    assert values and all(len(trace["x"]) == len(trace["y"]) for trace in drawn.traces)
    shown = [trace for trace in drawn.traces if trace.get("hoverinfo") != "skip"]
    assert shown and all(trace.get("hovertemplate") for trace in shown), "hovering tells the value"
    assert drawn.layout["yaxis"]["title"]["text"], "an axis says what it shows"
    assert figure.read.count(".") == 1 and figure.read.endswith("."), "one sentence says how to read it"


def test_what_was_not_measured_names_the_setting_that_would(bare: Path) -> None:
    run = read_named_runs([bare])[0]
    missing = {name: drawn for name, figure in FIGURES.items() if isinstance(drawn := figure.draw(run), str)}
    assert set(missing) == {"staleness", "gap", "importance", "token_shift", "alignment", "shock"}
    for name, sentence in missing.items():
        assert "teamtr-lora swap" in sentence or "diagnostics.probe_every_stages=1" in sentence, name
        for word in sentence.replace(";", " ").split():
            if "=" in word:  # a setting that the recipe has
                section, key = word.partition("=")[0].split(".")
                assert key in type(getattr(run.stored.recipe, section)).model_fields
    assert isinstance(run.stored.recipe, Recipe)


def test_every_figure_of_a_run_that_has_only_begun_says_why_it_is_empty(tmp_path: Path) -> None:
    run = read_named_runs([make_run(tmp_path / "begun", 0)])[0]
    drawn = {name: figure.draw(run) for name, figure in FIGURES.items()}
    assert {name for name, found in drawn.items() if isinstance(found, Drawing)} == {"accuracy", "memory", "coordination"}
    assert all(found.endswith(".") for found in drawn.values() if isinstance(found, str))


def test_accuracies_are_those_of_the_evaluations(full_data: RunData) -> None:
    drawn = accuracy(full_data)
    assert isinstance(drawn, Drawing)
    evaluations = [row.evaluation for row in full_data.stages if row.evaluation]
    assert drawn.traces[0]["y"] == [e["avg_at_k"] for e in evaluations]
    assert drawn.traces[0]["error_y"]["array"] == pytest.approx([1.96 * e["standard_error"] for e in evaluations])


def test_every_judged_update_is_marked_once_by_its_decision(full_data: RunData) -> None:
    drawn = kl_against_delta(full_data)
    assert isinstance(drawn, Drawing)
    for decision in ("accepted", "shrunk", "rejected"):
        own = [(place, row) for place, row in enumerate(full_data.updates, 1) if row.decision == decision]
        marked = [trace for trace in drawn.traces if trace["name"] == decision]
        assert [trace["x"] for trace in marked] == ([[place for place, _ in own]] if own else [])
        for trace in marked:
            assert trace["y"] == [row.kl["exact"].bound for _, row in own]


def test_a_moving_mean_is_the_mean_around_each_value() -> None:
    assert moving_mean([1.0, 2.0, 6.0, 3.0], 3) == pytest.approx([1.5, 3.0, 11 / 3, 4.5])


def test_all_time_between_the_first_and_the_last_row_is_somewhere(full_data: RunData) -> None:
    rows = [row for row in full_data.rows if row.kind != "swap"]
    total = sum(sum(phases.values()) for phases in phase_seconds(full_data).values())
    inside = sum(sum(row.seconds.values()) for row in full_data.updates)
    assert total == pytest.approx(max(rows[-1].time - rows[0].time, inside), rel=0.05)


def test_names_from_outside_are_no_markup() -> None:
    assert plain("<b>&</b>") == "&lt;b&gt;&amp;&lt;/b&gt;"


def test_runs_that_differ_in_their_seed_are_one_line_with_a_band(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"seed-{seed}", 6, seed=seed) for seed in range(3)]
    runs.append(make_run(tmp_path / "other", 6, delta=0.05))
    kinds = kinds_of(read_named_runs(runs))
    assert [kind.label for kind in kinds] == ["delta 0.02 (3 seeds)", "other"]
    for name, figure in COMPARING.items():
        assert isinstance(figure.draw(kinds), Drawing), name
    drawn = COMPARING["accuracy_by_run"].draw(kinds)
    assert isinstance(drawn, Drawing)
    mean = next(trace for trace in drawn.traces if trace["name"] == kinds[0].label and trace["line"]["width"])
    last = [run.evaluated[-1].evaluation for run in kinds[0].runs]
    assert mean["y"][-1] == pytest.approx(sum(e["avg_at_k"] for e in last if e) / 3)


def test_a_difference_without_an_interval_has_no_arms_and_says_so(tmp_path: Path) -> None:
    runs = read_named_runs([make_run(tmp_path / name, 6, delta=delta) for name, delta in (("a", 0.02), ("b", 0.05))])
    runs[1].__dict__["ends"] = runs[0].ends
    drawn = COMPARING["paired"].draw(kinds_of(runs))
    assert isinstance(drawn, Drawing)
    (trace,) = drawn.traces
    assert trace["error_x"]["array"] == trace["error_x"]["arrayminus"] == [None]
    assert trace["name"] == "b (p = 1; no interval)"


def test_the_command_writes_a_file(full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert main(["report", str(full), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out and out.read_bytes().startswith(b"<!doctype html>")
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no run here" in capsys.readouterr().err


def test_ticks_of_a_logarithmic_axis_have_room() -> None:
    assert log_axis([{"y": [0.01, None, 0.9]}])["dtick"] == "D2"
    assert log_axis([{"y": [1e-5, 0.01]}, {"y": [0.1]}])["dtick"] == 1 and log_axis([{"y": [1e-14, 1]}])["dtick"] == 3
    assert log_axis([{"y": [None]}])["dtick"] == "D2"
