"""tools/rate_arms.py: one run whose agents do not hear each other and learn with rates of their own."""

import json
from pathlib import Path

import pytest
import rate_arms

from teamtr_lora.runs.metrics import UpdateRow, read_rows

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
ASKED = [
    *(str(RECIPES / folder / name) for folder, name in (("bases", "nano.yaml"), ("tasks", "small.yaml"))),
    *("--rates", "2e-4,1e-3", "--items", "16"),
    *("training.stages=3", "training.schedule=linear", "training.inner_epochs=1", "trust_region.delta=0.5"),
    *("rollout.items_per_stage=16", "rollout.episodes_per_item=8", "evaluation.items=4", "evaluation.every_stages=0"),
    *("base.device=cpu", "diagnostics.save_episodes=none"),
]


def test_every_agent_learns_alone_with_its_rate_and_its_answers_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, load = [], rate_arms.load_versions
    monkeypatch.setattr(rate_arms, "load_versions", lambda *given: (measured.append(given[1]), load(*given)))
    assert rate_arms.main([*ASKED, "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "arms.json").read_text())
    rows = [row for row in read_rows(tmp_path / "run") if isinstance(row, UpdateRow) and row.decision != "skipped"]
    rates = {(row.stage, row.agent): row.learning_rate for row in rows}
    wanted = {(stage, f"arm-{n}"): rate * (4 - stage) / 3 for n, rate in ((1, 2e-4), (2, 1e-3)) for stage in (1, 2, 3)}
    assert len(rates) > 2 and rates == pytest.approx({key: wanted[key] for key in rates})
    arms = report["arms"]
    for versions, stage in zip(measured, (1, 3), strict=True):  # half-way is between stages, where all had as many updates
        last = {row.agent: row.content_hash for row in rows if row.stage <= stage}
        assert {agent: version.content_hash for agent, version in versions.items()} == last
    assert [own["rate"] for own in arms.values()] == [2e-4, 1e-3]
    kls = [arms[agent]["kl"][0] for agent in ("arm-1", "arm-2")]
    assert 0 < 5 * kls[0] < kls[1], "a step that is five times as long"
    for own in arms.values():
        assert len(own["held_out"]) == 3 and all(16 * share == round(16 * share) for share in own["held_out"])
        assert len(own["in_training"]) == 3 and 0 < max(own["in_training"]) < 1
    assert arms["arm-1"]["less_first"]["difference"] == 0
    shown = capsys.readouterr().out
    assert "0.001" in shown and "less the first" in shown
    assert rate_arms.main([*ASKED, "--out", str(tmp_path)]) == 0, "nothing is left to do"
    assert json.loads((tmp_path / "arms.json").read_text()) == report
    monkeypatch.setattr(rate_arms.TeamTRTrainer, "open", lambda _: pytest.fail("nothing is loaded for what is another run"))
    for other in (["--rates", "2e-4,2e-3"], ["training.stages=5"]):
        assert rate_arms.main([*ASKED, *other, "--out", str(tmp_path)]) == 2


def test_a_run_that_is_broken_off_within_a_stage_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = iter(range(9))

    def broken_off(self: rate_arms.Rates, *_: object, **__: object) -> None:
        if next(updates) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(rate_arms.Rates, "on_step_begin", broken_off)
    with pytest.raises(KeyboardInterrupt):
        rate_arms.main([*ASKED, "--out", str(tmp_path / "broken")])
    monkeypatch.undo()
    ends = {}
    for name in ("broken", "whole"):
        assert rate_arms.main([*ASKED, "--out", str(tmp_path / name)]) == 0
        stages = json.loads((tmp_path / name / "arms.json").read_text())["stages"]
        ends[name] = stages, json.loads((tmp_path / name / "run" / "team.json").read_text())
    assert ends["broken"][1] == ends["whole"][1]
    assert (ends["broken"][0], ends["whole"][0]) == (2, 3), "of the first stage's episodes nothing is left to judge"


@pytest.mark.parametrize("rates", ["fast", "1e-3", "1e-3,0", "1e-3,nan"])
def test_what_are_no_rates_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], rates: str) -> None:
    assert rate_arms.main([*ASKED[:2], "--rates", rates, "--out", str(tmp_path)]) == 2
    assert "rate_arms: " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_task_that_judges_no_single_message_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [ASKED[0], str(RECIPES / "tasks" / "distinct.yaml"), *ASKED[2:]]
    assert rate_arms.main([*words, "--out", str(tmp_path)]) == 2
    assert "single messages" in capsys.readouterr().err and not (tmp_path / "run" / "metrics.jsonl").exists()
