"""tools/compare.py and the cells that it runs: once, on after an interruption, side by side, and each fails alone."""

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cells
import pytest
from forked import ForkedPython

from teamtr_lora.common.errors import UserError
from teamtr_lora.training.run import TrainingRun

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml")
TWO_AGENTS = ['team.agents=[{"name": "planner", "role": "ones"}, {"name": "solver", "role": "tens"}]', "task.digits=2"]
SMALL = [*TWO_AGENTS, "training.stages=1", "rollout.items_per_stage=6", "rollout.episodes_per_item=2",
         "training.inner_epochs=1", "training.minibatches_per_epoch=1", "evaluation.items=4", "evaluation.every_stages=1",
         "diagnostics.probe_every_stages=1", "diagnostics.probe_items=2", "diagnostics.probe_episodes_per_item=2",
         "diagnostics.token_shift_ranks=0"]  # fmt: skip
FILL, SHRINK = "fill: trust_region.step=fill", "shrink: trust_region.step=shrink"


@pytest.fixture(scope="module")
def compare(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("compare")


@pytest.fixture(scope="module")
def done(compare: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Two variants that work and two that do not; read only."""
    out = tmp_path_factory.mktemp("compare")
    varied = [FILL, SHRINK, "misspelt: trust_region.stepp=fill", "too-fine: trust_region.delta=1e-13"]
    flags = [flag for text in varied for flag in ("--vary", text)]
    return compare.main([RECIPE, *SMALL, "--seeds", "0,1", *flags, "--out", str(out)]), out


def report_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "comparison.json").read_text())["variants"])


def hashes(run: Path) -> dict[str, str]:
    return {agent: version["content_hash"] for agent, version in json.loads((run / "team.json").read_text()).items()}


def test_failing_variants_are_reported_and_the_rest_goes_on(compare: ModuleType, done: tuple[int, Path]) -> None:
    status, out = done
    report = report_of(out)
    assert status == 1
    assert "trust_region.stepp" in report["misspelt"]["errors"]["0"]
    assert "trust_region.delta" in report["too-fine"]["errors"]["1"] and report["too-fine"]["seeds"] == []
    for name in ("fill", "shrink"):
        variant = report[name]
        assert variant["seeds"] == [0, 1] and variant["errors"] == {}
        measures = variant["measures"]
        assert measures["rollouts"]["mean"] == 2 * 12 and measures["tokens"]["mean"] > 0
        assert measures["probe_tokens"]["mean"] > 0
        for name in ("delta_stale", "paired", "d_occ", "coupled"):
            assert len(measures[name]["by_seed"]) == 2 and None not in measures[name]["by_seed"]
        assert all(value >= 0 for value in measures["coupled"]["by_seed"])
        updates = sum(measures[kind]["total"] for kind in ("accepted", "rejected", "skipped"))
        assert updates == 2 * 2 and measures["out_of_region"]["total"] == 0
        assert 0 <= measures["coordination"]["mean"] <= 1
        before, after, rise = (measures[key]["by_seed"] for key in ("before", "after", "improvement"))
        assert rise == pytest.approx([b - a for a, b in zip(before, after, strict=True)])
    assert report["fill"]["measures"]["after"]["half_width"] is None, "both seeds end alike, which is no certainty"
    found = json.loads((out / "comparison.json").read_text())
    found["variants"]["fill"]["measures"]["after"]["half_width"] = 0.25
    lines = cells.table(found).splitlines()
    assert "coordination" in lines[0] and lines[1].startswith("fill") and "+- 0.250" in lines[1]
    assert "failed:" in lines and any(line.startswith("too-fine, seed 0: trust_region.delta") for line in lines)


def test_a_finished_run_is_read_not_repeated(
    compare: ModuleType, done: tuple[int, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cells, "train", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(cells, "in_a_process", lambda *_: pytest.fail("a worker was started"))
    arguments = [RECIPE, *SMALL, "--seeds", "0,1", "--vary", FILL, "--vary", SHRINK, "--out", str(done[1]), "--json"]
    before = report_of(done[1])
    for workers in ("1", "2"):
        assert compare.main([*arguments, "--workers", workers]) == 0
        printed = json.loads(capsys.readouterr().out)["variants"]
        assert printed == {name: before[name] for name in ("fill", "shrink")}


def test_another_recipe_in_the_same_folder_is_an_error_not_a_result(done: tuple[int, Path]) -> None:
    variant = cells.Variant("fill", (Path(RECIPE),), (*SMALL, "trust_region.step=fill", "trust_region.delta=0.03"))
    cell = cells.run_cell(variant, 0, done[1], math.inf)
    assert cell.measures is None and "trust_region.delta is 0.02 there and 0.03 here" in cell.error


def test_what_ran_out_of_time_or_was_interrupted_goes_on_where_it_stopped(
    compare: ModuleType,
    done: tuple[int, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And ends where the one that was not disturbed ended."""
    arguments = [RECIPE, *SMALL, "--seeds", "1", "--vary", SHRINK, "--out", str(tmp_path)]
    assert compare.main([*arguments, "--minutes", "0"]) == 0 and not (tmp_path / "shrink").exists(), "nothing was begun"
    assert "not finished: shrink, seeds 1" in capsys.readouterr().out
    times = iter([0.0])  # the run begins in time; whenever it asks again, the time is up
    with monkeypatch.context() as patch:
        patch.setattr(cells.time, "time", lambda: next(times, 100.0))
        (variant,) = compare.variants([RECIPE, *SMALL], [SHRINK])
        cell = cells.run_cell(variant, 1, tmp_path, until=50.0)
    assert (cell.measures, cell.error) == (None, None)
    rows = cells.RunRows(cells.read_rows(tmp_path / "shrink" / "seed-1"))
    assert len(rows.updates) <= 1, "it stopped at its next checkpoint"
    record, made = TrainingRun.record_update, []

    def interrupted(self: TrainingRun, stage: int, update: int, *rest: Any) -> None:
        if (stage, update) == (1, 1):
            raise KeyboardInterrupt
        record(self, stage, update, *rest)

    def counted(self: TrainingRun, stage: int, update: int, *rest: Any) -> None:
        made.append((stage, update))
        record(self, stage, update, *rest)

    monkeypatch.setattr(TrainingRun, "record_update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare.main(arguments)
    monkeypatch.setattr(TrainingRun, "record_update", counted)
    assert compare.main(arguments) == 0
    assert made == [(1, 1)], "only what was lost is done again"
    assert hashes(tmp_path / "shrink" / "seed-1") == hashes(done[1] / "shrink" / "seed-1")


def test_workers_are_processes_of_their_own(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedPython)
    one = [*SMALL, "diagnostics.probe_every_stages=0"]
    varied = ["--vary", FILL, "--vary", "too-fine: trust_region.delta=1e-13", "--vary", "misspelt: trust_region.stepp=fill"]
    assert compare.main([RECIPE, *one, *varied, "--seeds", "0", "--workers", "2", "--out", str(tmp_path)]) == 1
    first, *later = capsys.readouterr().err.splitlines()
    assert first.startswith("misspelt, seed 0: ") and "trust_region.stepp" in first, "a recipe's mistake is told before any run"
    assert not any("misspelt" in line for line in later) and not (tmp_path / "misspelt").exists()
    report = report_of(tmp_path)
    assert report["fill"]["seeds"] == [0] and report["fill"]["measures"]["accepted"]["mean"] >= 0
    assert "trust_region.delta" in report["too-fine"]["errors"]["0"], "the worker's own words"
    assert (tmp_path / "fill" / "seed-0.log").exists()


def test_differences_are_taken_seed_by_seed() -> None:
    def variant(seeds: list[int], after: list[float | None]) -> dict[str, Any]:
        measures = {"after": {"by_seed": after, "mean": 0.0, "half_width": None}, "tokens": {"by_seed": after, "mean": 0.0}}
        return {"seeds": seeds, "measures": measures}

    report = {"a": variant([0, 1, 2], [0.5, 0.7, 0.6]), "b": variant([0, 2, 3], [0.6, 0.8, 0.9]), "c": variant([1], [None])}
    found = cells.differences(report, "a")
    assert found == {"b": {"after": {"mean": pytest.approx(0.15), "half_width": pytest.approx(12.706 * 0.05), "seeds": 2}}}
    cell = [cells.Cell("a", 0, Path(), {"after": 0.5}), cells.Cell("b", 0, Path(), {"after": 0.75})]
    shown = cells.table(cells.summary([cells.Variant(name, (), ()) for name in "ab"], cell))
    assert "less a, seed by seed:" in shown and "b: after +0.250 (1 seeds)" in shown


def test_variants_are_named_by_their_change_their_recipe_or_both(compare: ModuleType) -> None:
    def names(words: list[str], varied: list[str]) -> list[str]:
        return [variant.name for variant in compare.variants(words, varied)]

    assert names(["a/quick.yaml", "x.y=1"], []) == ["quick"]
    assert names(["a/quick.yaml", "b/slow.yaml"], []) == ["quick", "slow"]
    assert names(["a/quick.yaml"], [FILL, SHRINK]) == ["fill", "shrink"]
    assert names(["quick.yaml", "slow.yaml"], [FILL]) == ["quick-fill", "slow-fill"]
    assert compare.variants(["q.yaml", "x.y=1"], ["n: a.b=2 'c.d=[3, 4]'"])[0].overrides == ("x.y=1", "a.b=2", "c.d=[3, 4]")
    for words, varied in (([], []), (["a/x.yaml", "b/x.yaml"], []), (["x.yaml"], ["../up: a.b=1"]), (["x.yaml"], ["a.b=1"])):
        with pytest.raises(UserError):
            compare.variants(words, varied)


def test_usage_mistakes_end_with_status_2(compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([RECIPE, "--vary", "nameless", "--out", str(tmp_path)]) == 2
    assert "NAME: section.key=value" in capsys.readouterr().err


def test_the_interval_is_students() -> None:
    stats = pytest.importorskip("scipy.stats")
    assert cells.half_width([0.5]) is None
    for count in (2, 3, 5, 31, 60):
        values = [0.01 * i * (-1) ** i for i in range(count)]
        low, high = stats.t.interval(0.95, count - 1, loc=0, scale=stats.sem(values))
        assert cells.half_width(values) == pytest.approx((high - low) / 2, rel=0.03 if count > 31 else 1e-3)
