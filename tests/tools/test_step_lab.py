"""tools/step_lab.py: variants start alike, their steps are read on held-out episodes, and a real direction is worth something."""

import json
from pathlib import Path

import pytest
import step_lab


def test_variants_learn_from_the_same_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lab.json"
    small = ["rollout.items_per_stage=12", "rollout.episodes_per_item=4", "training.inner_epochs=1", "base.device=cpu"]
    vary = ["--vary", "sgd: training.optimizer=sgd", "--vary", "same: lora.rank=8"]
    assert (
        step_lab.main(["recipes/quickstart.yaml", *small, "--agent", "solver", "--repeats", "1", *vary, "--out", str(out)]) == 0
    )
    report = json.loads(out.read_text())
    assert report["episodes"] == 48
    alone, sgd, same = (report["updates"][name][0] for name in ("as it is", "sgd", "same"))
    for update in (alone, sgd, same):
        assert 0 < update["kl"] <= 0.02 and update["gain_in_sample"] > 0
        assert update["worth"] == pytest.approx(update["gain"] / (2 * update["kl"]) ** 0.5)
    assert sgd["learning_rate"] > 100 * alone["learning_rate"], "an optimizer of its own"
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_an_agent_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert step_lab.main(["recipes/quickstart.yaml", "--agent", "solvr"]) == 2
    assert "planner, solver, checker" in capsys.readouterr().err
