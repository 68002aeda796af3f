"""tools/step_lab.py: variants start alike, and their steps are read at one length on episodes that none has learned from."""

import json
from pathlib import Path
from typing import Any

import pytest
import step_lab


def test_steps_of_one_length_are_read_on_unseen_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lab.json"
    small = ["rollout.items_per_stage=24", "rollout.episodes_per_item=4", "training.inner_epochs=1", "base.device=cpu"]
    vary = [
        "--vary",
        "sgd: training.optimizer=sgd training.initial_learning_rate=0.1",
        "--vary",
        "narrow: lora.rank=2 lora.alpha=4",
    ]
    asked = ["--agent", "solver", "--judge", "64", "--kl", "0.005", "--repeats", "1", "--steps", "2", "--out", str(out)]
    assert step_lab.main(["recipes/quickstart.yaml", *small, *asked, *vary]) == 0
    report = json.loads(out.read_text())
    assert report["episodes"] == 4 * (64 + 2 * 24)
    found = report["updates"]
    names = ["as it is", "sgd", "narrow"]
    assert found.keys() == {row for name in names for row in (name, f"{name} x 2")}
    for name in names:
        (once,), (twice,) = found[name], found[f"{name} x 2"]
        assert once["kl"] == pytest.approx(0.005, rel=0.3), "scaled, and read on other episodes"
        assert once["worth"] == pytest.approx(once["gain"] / (2 * once["kl"]) ** 0.5) and once["error"] > 0
        assert twice["learning_rate"] == once["learning_rate"] and twice["kl"] > once["kl"]
        assert -0.05 < once["gain"] < 0.05, "in units of the reward, for a short step"
    assert found["sgd"][0]["learning_rate"] > 100 * found["as it is"][0]["learning_rate"], "an optimizer of its own"
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(found)


def test_what_judges_is_never_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    learned, judged = [], []
    real_step, real_kept = step_lab.Lab._step, step_lab.Lab._kept

    def step(self: Any, updater: Any, adapter: str, lot: Any) -> float:
        learned.extend(episode.item_id for episode in lot)
        return real_step(self, updater, adapter, lot)

    def kept(self: Any, scorer: Any, episodes: Any) -> Any:
        judged.extend(episode.item_id for episode in episodes)
        return real_kept(self, scorer, episodes)

    monkeypatch.setattr(step_lab.Lab, "_step", step)
    monkeypatch.setattr(step_lab.Lab, "_kept", kept)
    small = ["base.device=cpu", "rollout.items_per_stage=20", "rollout.episodes_per_item=4", "training.inner_epochs=1"]
    asked = ["--judge", "24", "--kl", "0.005", "--repeats", "2"]
    assert step_lab.main(["recipes/quickstart.yaml", *small, *asked]) == 0
    assert len(set(judged)) == 24 and len(set(learned)) == 40 and not set(judged) & set(learned)
    rows = tmp_path / "rows.jsonl"
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "held out", "answer": "#### 1"}))
    rows.write_text("".join(json.dumps({"question": f"{n}+{n}", "answer": f"#### {2 * n}"}) + "\n" for n in range(63)))
    files = ["task.hub=null", f"task.path={rows}", f"task.test_path={tmp_path / 'test.jsonl'}"]
    assert step_lab.main(["recipes/bases/nano.yaml", "recipes/tasks/gsm8k.yaml", *files, *small, *asked]) == 2
    assert "64 items are to judge and to be learned from, and there are 63" in capsys.readouterr().err


def test_an_agent_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert step_lab.main(["recipes/quickstart.yaml", "--agent", "solvr"]) == 2
    assert "planner, solver, checker" in capsys.readouterr().err
