"""How long a recipe will take: from an earlier run, or from a short one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from teamtr_lora.cli import main
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.runs.metrics import StageRow, UpdateRow, read_rows
from teamtr_lora.study.expected_time import expected_time, speeds_of
from teamtr_lora.training.trainer import TeamTRTrainer

SMALL = """
base: {{source: {base}, device: cpu}}
team: {{agents: [{{name: ones, lora: {{rank: 2}}}}, {{name: tens, lora: {{rank: 2}}}}]}}
task: {{name: dataset, path: rows.jsonl, reward: "rewards:even", test_fraction: 0.3}}
rollout: {{items_per_stage: 8, episodes_per_item: 4, max_message_tokens: 4}}
training: {{stages: 2, inner_epochs: 2, min_informative_groups: 1, stop_after_idle_stages: 0}}
trust_region: {{delta: 0.5}}
evaluation: {{items: 8}}
"""


@pytest.fixture(scope="module")
def recipe(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "small.yaml"
    # even bytes earn, so that untrained teams have something to learn from
    file.with_name("rewards.py").write_text(
        "def even(completions, **_):\n    return [sum(b % 2 for b in c.encode()) / (len(c.encode()) or 1) for c in completions]\n"
    )
    file.with_name("rows.jsonl").write_text("".join(json.dumps({"prompt": f"q{n}"}) + "\n" for n in range(80)))
    file.write_text(SMALL.format(base=tiny_base))
    return file


@pytest.fixture(scope="module")
def run(recipe: Path) -> Path:
    folder = recipe.parent / "run"
    with TeamTRTrainer.from_recipe(load_recipe(recipe, [f"output_dir={folder}"]), progress=False) as trainer:
        trainer.train()
    return folder


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)["expected_time"]
    return found


def test_the_estimate_from_a_runs_own_speeds_is_about_what_it_took(
    recipe: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the updates whose speeds it takes, all but the first: how busy the machine is between them does not matter."""
    rows = read_rows(run)
    warm = [sum(row.seconds.values()) for row in rows if isinstance(row, UpdateRow)][1:]
    time = planned(capsys, str(recipe), "--from", str(run))
    assert len(warm) == 3 and time["stage_seconds"] == pytest.approx(2 * sum(warm) / 3, rel=0.05)
    assert time["stage_seconds"] == pytest.approx(time["rollouts_seconds"] + time["updates_seconds"])
    began, first, last = (row.seconds for row in rows if isinstance(row, StageRow))
    assert time["start_seconds"] + time["evaluation_seconds"] == pytest.approx(began) and began < first < last
    assert time["run_seconds"] == pytest.approx(began + 2 * time["stage_seconds"] + 2 * time["evaluation_seconds"])


def test_more_of_everything_takes_longer_in_proportion(recipe: Path, run: Path) -> None:
    small = load_recipe(recipe)
    speeds = speeds_of(read_rows(run), small, "x")

    def time(more: Recipe, episodes: int = 32) -> float:
        return expected_time(speeds, more, rollouts=2, episodes=episodes, messages=2).stage_seconds

    assert time(small, 64) == pytest.approx(2 * time(small))
    epochs = load_recipe(recipe, ["training.inner_epochs=4"])
    assert time(epochs) - time(small) == pytest.approx(
        expected_time(speeds, small, rollouts=2, episodes=32, messages=2).updates_seconds
    )
    longer = expected_time(speeds, load_recipe(recipe, ["training.stages=4"]), rollouts=2, episodes=32, messages=2)
    short = expected_time(speeds, small, rollouts=2, episodes=32, messages=2)
    per_stage = short.stage_seconds + short.evaluation_seconds
    assert longer.run_seconds - short.run_seconds == pytest.approx(2 * per_stage)


def test_a_short_run_here_gives_the_speeds_and_leaves_nothing(
    recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", str(recipe), "--calibrate"]) == 0
    out, err = capsys.readouterr()
    assert "calibrating" in err and "time, expected" in out and "the run" in out and "by a short run on this machine" in out
    assert not any(tmp_path.iterdir())
    assert main(["plan", str(recipe)]) == 0
    assert "Expected time: not known; --calibrate" in " ".join(capsys.readouterr().out.split())


def test_speeds_of_another_base_or_engine_say_nothing(
    recipe: Path, run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", str(recipe), "base.source=nano", "--from", str(run)]) == 2
    assert "base.source is" in (error := capsys.readouterr().err) and "use --calibrate" in error
    assert main(["plan", str(recipe), "--from", str(tmp_path)]) == 2
    assert "no run here" in capsys.readouterr().err


def test_a_device_has_more_than_one_name(recipe: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is compared is the device that a name stands for: without a GPU `auto` is the run's `cpu`."""
    here = "auto" if not torch.cuda.is_available() else "cpu"
    assert planned(capsys, str(recipe), f"base.device={here}", "--from", str(run))["run_seconds"] > 0


def test_a_plan_is_of_a_run_that_can_start(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), "rollout.items_per_stage=81"]) == 2
    assert "the train split has only" in capsys.readouterr().err
    assert main(["plan", str(recipe), "team.protocol.context_tokens=8"]) == 2
    assert "do not fit into 8 tokens of context" in capsys.readouterr().err
