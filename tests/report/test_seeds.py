"""Means over seeds and differences by item, against other computations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_up_run import make_run
from scipy import stats

from teamtr_lora.report.figures.comparison import accuracy_by_kind
from teamtr_lora.report.figures.drawing import Drawing
from teamtr_lora.report.in_words import compared_in_words, headline, measured_gain, summary, tiles
from teamtr_lora.report.run_data import RunData, read_named_runs
from teamtr_lora.report.seeds import differences, kinds_of, mean_and_interval, over_seeds


@pytest.mark.parametrize("count", [2, 3, 5, 12])
def test_the_interval_over_seeds_is_students(count: int) -> None:
    values = np.random.default_rng(count).normal(0.7, 0.1, count).tolist()
    mean, half = mean_and_interval(values)
    low, high = stats.t.interval(0.95, count - 1, loc=np.mean(values), scale=stats.sem(values))
    assert half is not None and (mean - half, mean + half) == pytest.approx((low, high), rel=1e-3)
    assert mean_and_interval([0.5]) == (0.5, None)


def test_runs_of_one_seed_are_not_several_seeds(tmp_path: Path) -> None:
    """Two runs of one seed are one draw, however often they are given; beside another seed they count once."""
    runs = read_named_runs([make_run(tmp_path / name, 6, seed=seed) for name, seed in (("a", 0), ("again", 0), ("b", 1))])
    ends = [run.ends[-1]["avg_at_k"] for run in runs]
    (text,) = compared_in_words(kinds_of(runs[:2]))
    assert text.startswith("a (2 runs of one seed)") and "95%" not in text and "no interval, as one seed" in text
    (kind,) = kinds_of(runs)
    mean, half = mean_and_interval([ends[0], ends[2]])
    assert half is not None and over_seeds([ends[:2], ends[2:]]) == pytest.approx((mean, half))
    assert kind.label == "a (3 runs of 2 seeds)"
    assert f"{100 * mean:.1f}% of held-out items" in compared_in_words([kind])[0]
    for own, bands in ((runs[:2], 0), (runs, 2)):
        drawn = accuracy_by_kind(kinds_of(own))
        assert isinstance(drawn, Drawing) and len(drawn.traces) == 1 + bands


def test_a_difference_is_paired_where_the_items_are_the_same(tmp_path: Path) -> None:
    runs = read_named_runs([make_run(tmp_path / name, 6, seed=1, delta=delta) for name, delta in (("a", 0.02), ("b", 0.05))])
    (found,) = differences(kinds_of(runs))
    ends = [run.evaluated[-1].evaluation for run in runs]
    by_item = [np.array(e["by_item"]) for e in ends if e]
    assert found.test.difference == pytest.approx((by_item[1] - by_item[0]).mean())
    assert any("p = " in text for text in compared_in_words(kinds_of(runs)))
    assert len(read_named_runs([tmp_path / "a", tmp_path / "b" / ".." / "a"])) == 1, "a run given twice is one run"
    ends[1]["items_digest"] = "other"  # type: ignore[index]
    assert differences(kinds_of(runs)) == []


def test_the_gain_of_a_run_has_a_paired_interval(full_data: RunData) -> None:
    gain = measured_gain(full_data)
    assert gain is not None and gain.interval is not None
    assert gain.interval[0] < gain.after - gain.before < gain.interval[1]


def test_a_gain_that_is_the_same_on_every_item_has_no_interval(full_data: RunData) -> None:
    first = full_data.ends[0]
    for before, after, said in ((0.0, 1.0, "The team got better"), (0.5, 0.5, "No clear change")):
        ends = [{**first, "avg_at_k": value, "by_item": [value] * first["items"]} for value in (before, after)]
        run = RunData("alike", full_data.stored, full_data.rows)
        run.__dict__["ends"] = ends  # as read from its rows
        assert headline(run).startswith(said)
        text = " ".join(summary(run))
        assert "no interval, as every item changed by the same" in text and "95% confidence" not in text
        tile = next(tile for tile in tiles(run) if tile.label == "change, in points")
        assert tile.note == ""


def test_seeds_that_end_alike_have_no_interval() -> None:
    assert mean_and_interval([0.7, 0.7, 0.7]) == (pytest.approx(0.7), None)
    assert mean_and_interval([0.3 - (0.1 + 0.2), 0.0])[1] is None, "differences of equal values"


def test_the_summary_says_how_many_updates_and_why(full_data: RunData) -> None:
    text = " ".join(summary(full_data))
    assert f"Of {len(full_data.updates)} updates" in text and "held-out items went from" in text
    for row in full_data.updates:
        assert row.reason.partition(":")[0] in text
    assert headline(full_data).endswith("right on held-out items.")
