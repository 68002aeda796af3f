"""What a script sees of its training: progress, callbacks, reasons, idle stages, trackers, and what a failed start leaves."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import EarlyStoppingCallback, PrinterCallback, ProgressCallback, TrainerCallback
from transformers.integrations import CometCallback, TensorBoardCallback, WandbCallback

from teamtr_lora import TeamTRConfig, TeamTRTrainer, UserError
from teamtr_lora.algorithm.clustered import ClusteredMean
from teamtr_lora.algorithm.trust_region import GateReading, StepDecision
from teamtr_lora.cli import main
from teamtr_lora.evaluation.returns import recorded
from teamtr_lora.runs.metrics import StageRow, UpdateRow, read_rows
from teamtr_lora.training.rows import decision_reason

ROWS = [{"prompt": f"question {n}", "answer": n} for n in range(12)]
AGENTS: list[dict[str, Any]] = [{"name": "planner", "lora": {"rank": 2}}, {"name": "solver", "lora": {"rank": 2}}]


def even(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [sum(b % 2 == 0 for b in text.encode()) / max(1, len(text.encode())) for text in completions]


def nothing(prompts: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(prompts)


Make = Callable[..., TeamTRTrainer]


@pytest.fixture
def make(tiny_base: Path, tmp_path: Path) -> Make:
    team = {"base": {"source": str(tiny_base), "device": "cpu"}, "agents": AGENTS}

    def trainer(reward: Any = even, callbacks: Any = None, progress: bool = False, **values: Any) -> TeamTRTrainer:
        small: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "stages": 1, "items_per_stage": 8, "episodes_per_item": 4}
        small |= {"max_message_tokens": 3, "inner_epochs": 1, "learning_rate": 0.01, "delta": 0.05, "items": 4}
        return TeamTRTrainer(team, reward, TeamTRConfig(**small | values), ROWS, ROWS, callbacks, progress=progress)

    return trainer


def test_a_script_shows_its_progress_unless_told_not_to(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(progress=True).train()
    shown = capsys.readouterr().out
    assert f"run directory: {tmp_path / 'run'}" in shown and "stage 1/1" in shown and "held-out accuracy after stage 1" in shown
    assert all(f"  {agent['name']}" in shown for agent in AGENTS)
    make(output_dir=str(tmp_path / "silent")).train()
    assert capsys.readouterr().out == ""


def test_transformers_own_progress_takes_the_place_of_ours(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make(callbacks=[ProgressCallback], progress=True).train()
    out, err = capsys.readouterr()
    assert "run directory" not in out and "2/2" in err and "'kind': 'update'" in out + err


def test_the_printer_prints_every_row(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    make(callbacks=[PrinterCallback()], progress=True).train()
    out = capsys.readouterr().out
    assert out.count("'kind': 'update'") == 2 and out.count("'kind': 'stage'") == 2 and "run directory" not in out


def test_early_stopping_goes_by_held_out_accuracy(make: Make, tmp_path: Path) -> None:
    """The accuracy of a reward that is never 1 does not rise, so the first evaluation after training ends the run."""
    summary = make(nothing_right, [EarlyStoppingCallback(early_stopping_patience=1)], stages=4, stop_after_idle_stages=0).train()
    assert summary.stages == 1 and summary.accuracy_after == 0
    patient = make(
        nothing_right, [EarlyStoppingCallback(2)], stages=4, stop_after_idle_stages=0, output_dir=str(tmp_path / "patient")
    )
    assert patient.train().stages == 2


def test_a_resumed_run_knows_the_best_accuracy_so_far(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an evaluation after the resume counts as the best, however far below an earlier one."""
    accuracies = iter([0.5, 0.9, 0.8, 0.7])
    monkeypatch.setattr("teamtr_lora.training.run.recorded", lambda *args: recorded(*args) | {"avg_at_k": next(accuracies, 0.0)})
    assert make(stages=1, every_stages=1).train().accuracy_after == 0.9
    assert make(stages=4, every_stages=1, callbacks=[EarlyStoppingCallback(2)]).train(resume=True).stages == 3
    assert next(accuracies, None) is None


def nothing_right(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [0.5 * value for value in even(prompts, completions)]


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (TensorBoardCallback, "TensorBoardCallback .*trackers=\\['tensorboard'\\]"),
        (WandbCallback, "WandbCallback .*trackers=\\['wandb'\\]"),
        (CometCallback, "CometCallback .*on_log"),
    ],
)
def test_trackers_callbacks_are_refused_by_name_before_anything_is_loaded(
    make: Make, callback: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=f"^callbacks: {words}"):
        make(callbacks=[callback])  # without being made: some refuse that where their package is missing
    with pytest.raises(UserError, match=f"^callbacks: {words.replace('Callback', 'CallbackOfMine', 1)}"):
        make(callbacks=[type(f"{callback.__name__}OfMine", (callback,), {})])
    monkeypatch.setattr(callback, "__init__", lambda self: None)
    with pytest.raises(UserError, match=f"^callbacks: {words}"):
        make().add_callback(callback())


def test_what_is_no_callback_is_told(make: Make) -> None:
    class Needs(TrainerCallback):
        def __init__(self, path: str) -> None:
            self.path = path

    for given, words in (
        (print, "<built-in function print> is no TrainerCallback"),
        (dict, "<class 'dict'> is no TrainerCallback"),
        (Needs, r"Needs\(\) failed \(.*'path'\); give an instance"),
    ):
        with pytest.raises(UserError, match=f"^callbacks: {words}"):
            make(callbacks=[given])


def test_one_callback_is_a_list_of_one_and_may_name_what_transformers_gives(make: Make) -> None:
    """There is no one model, so it is None."""
    seen: list[Any] = []

    class Usual(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, processing_class: Any, **_: Any) -> None:
            seen.append((model, processing_class))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = 0, **_: Any) -> None:
            seen.append(model)
            control.should_training_stop = True

    make(callbacks=Usual()).train()
    assert seen == [(None, None), None]


def test_a_callback_that_reads_training_arguments_is_named(make: Make, tmp_path: Path) -> None:
    class Reads(TrainerCallback):
        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            assert args.training.stages == 1 and args.metric_for_best_model == "eval_accuracy"
            print(args.per_device_train_batch_size)

    with pytest.raises(UserError, match="^callbacks: Reads reads args.per_device_train_batch_size, a setting of transformers'"):
        make(callbacks=[Reads]).train()
    assert not (tmp_path / "run").exists()


def test_a_failed_start_leaves_no_folder_and_a_begun_run_stays(make: Make, tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("power cut")

        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            if args.seed:
                raise RuntimeError("too early")

    with pytest.raises(RuntimeError, match="too early"):
        make(callbacks=[Fails], seed=1).train()
    assert not (tmp_path / "run").exists()
    with pytest.raises(RuntimeError, match="power cut"):
        make(callbacks=[Fails]).train()
    assert (tmp_path / "run" / "checkpoint").is_dir()
    (tmp_path / "mine").mkdir()
    with pytest.raises(RuntimeError, match="too early"):
        make(callbacks=[Fails], seed=1, output_dir=str(tmp_path / "mine")).train()
    assert (tmp_path / "mine").is_dir()  # it was there before


def test_a_stage_that_teaches_nothing_warns_at_once_and_two_end_the_run(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        summary = make(nothing, stages=5).train()
    assert summary.stages == 2 and summary.skipped == summary.updates == 4
    told = [record.getMessage() for record in caplog.records if "taught nothing" in record.getMessage()]
    assert [text.split()[1] for text in told] == ["1", "2"]
    assert "The reward never varies: all 32 episodes earned 0." in told[0] and "check reward_funcs" in told[0]
    assert told[0].count(", reward 0: ") == 2 and "planner: " in told[0] and "raise max_message_tokens (now 3" in told[0]
    assert "the run stops here" not in told[0] and "stop_after_idle_stages = 2; 0 never stops" in told[1]
    rows = read_rows(tmp_path / "run")
    assert isinstance(rows[-1], StageRow) and rows[-1].evaluation is not None  # the last stage is evaluated as the last one
    reasons = {(row.agent, row.reason) for row in rows if isinstance(row, UpdateRow)}
    assert len(reasons) > 1 and all(
        reason == f"nothing to learn from: in 8 of 8 new groups all episodes earned agent {agent} the same"
        for agent, reason in reasons
    )
    assert make(nothing, stages=5, stop_after_idle_stages=0).train(resume=True).stages == 5


def test_the_count_of_idle_stages_survives_a_resume(make: Make) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step == 3
            return control

    assert make(nothing, [Stop], stages=5).train().updates == 3
    assert make(nothing, stages=5).train(resume=True).updates == 4


def test_rows_say_why_a_step_was_not_taken(make: Make, tmp_path: Path) -> None:
    make(stages=2, learning_rate=0.5, delta=0.001, step="shrink").train()
    for row in read_rows(tmp_path / "run"):
        if isinstance(row, UpdateRow):
            assert (row.reason == "") == (row.decision == "accepted")
            if row.decision == "shrunk":
                assert " step was out of region: KL bound" in row.reason or row.reason.startswith("the whole step had no gain")
            if row.decision == "rejected":
                assert row.reason.startswith(("out of region: KL bound ", "no gain: "))
            if "no gain" in row.reason:
                assert "±" in row.reason


def test_the_reason_is_that_of_the_length_that_was_refused() -> None:
    """A longer step was tried after it and was out of region, which is not why nothing was taken."""
    gain = ClusteredMean(0.01, 0.002, 0.013)
    inside, outside = (GateReading(alpha, ClusteredMean(kl, 0.0, kl), gain) for alpha, kl in ((1.0, 0.005), (4.0, 0.5)))
    step = StepDecision(None, [inside, outside], refused=inside)
    outcome: Any = SimpleNamespace(decision="rejected", step=step, delta=0.02, optimized=SimpleNamespace(gain=-0.001))
    assert step.shown is inside
    assert decision_reason(outcome) == "no gain: +0.0100 ± 0.0020 on held-out episodes; -0.0010 on those it was fitted to"
    outcome.step = StepDecision(None, [inside, outside])
    assert decision_reason(outcome) == "out of region: KL bound 0.5000 above 0.02"
    outcome.step = StepDecision(None, [inside], radius=0.002)  # a kind of region that allows less than delta
    assert decision_reason(outcome) == "out of region: KL bound 0.0050 above 0.002"


def test_the_summary_has_the_mean_reward_beside_the_accuracy(make: Make, tmp_path: Path) -> None:
    summary = make().train()
    first, last = (row for row in read_rows(tmp_path / "run") if isinstance(row, StageRow) and row.evaluation)
    assert first.evaluation and last.evaluation
    assert (summary.reward_before, summary.reward_after) == (first.evaluation["mean_reward"], last.evaluation["mean_reward"])


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end"])
def test_a_team_that_a_callback_stops_was_not_evaluated(make: Make, event: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The evaluation before training says nothing of what it has become. That it was stopped is said."""

    def stop(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True

    stopping = [type("Stop", (TrainerCallback,), {event: stop})]
    summary = make(stages=3, every_stages=0, gain="none", callbacks=stopping, progress=True).train()
    assert summary.accepted and summary.accuracy_before is not None
    assert f"a callback has ended the run after {summary.updates} of 6 updates; resumed, it goes on" in capsys.readouterr().out
    assert (summary.accuracy_after, summary.reward_after, summary.episodes_evaluated) == (None, None, 0)
    whole = make(stages=3, every_stages=0, gain="none", progress=True).train(resume=True)
    assert "a callback" not in capsys.readouterr().out
    assert whole.accuracy_after is not None and whole.reward_after is not None and whole.episodes_evaluated == 4


@pytest.mark.parametrize("joint", [{}, {"update": "joint", "resampling": "never"}])
def test_a_callback_may_measure_the_team_and_changes_nothing_by_it(make: Make, tmp_path: Path, joint: dict[str, str]) -> None:
    """Also where agents that have learned are not played before their stage ends."""

    class Measures(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            measured.append(trainer.evaluate(items=2, k=1).episodes)

    measured: list[int] = []
    trainer = make(stages=2, gain="none", callbacks=[Measures], **joint)
    summary = trainer.train()
    assert measured == [2] * 4 and summary.accepted
    assert make(stages=2, gain="none", output_dir=str(tmp_path / "other"), **joint).train().adapters == summary.adapters


class FakeTracker(SimpleNamespace):
    """wandb as far as accelerate uses it."""

    def init(self, project: str, name: str | None = None, group: str | None = None, tags: Any = None) -> Any:
        self.started = {"project": project, "name": name, "group": group, "tags": tags}
        self.logged: list[tuple[dict[str, Any], int | None]] = []
        return SimpleNamespace(log=lambda values, step=None, **_: self.logged.append((values, step)), finish=lambda: None)

    def Table(self, columns: list[str], data: list[list[Any]]) -> Any:  # noqa: N802
        return SimpleNamespace(columns=columns, data=data)


def test_a_tracker_gets_flat_settings_names_few_numbers_and_transcripts(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import accelerate.accelerator
    import accelerate.tracking

    stored: dict[str, Any] = {}
    fake = FakeTracker(config=SimpleNamespace(update=lambda values, **_: stored.update(values)), __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(accelerate.tracking, "is_wandb_available", lambda: True)
    monkeypatch.setattr(accelerate.accelerator, "filter_trackers", lambda log_with, *_: list(log_with))
    make(trackers=["wandb"], run_name="first", group="tries", tags=["a", "b"], stages=2).train()
    assert fake.started == {"project": "teamtr-lora", "name": "first", "group": "tries", "tags": ["a", "b"]}
    assert stored["training.stages"] == 2 and stored["team.agents.solver.lora.rank"] == 2 and stored["tracking.group"] == "tries"
    assert all(isinstance(value, (bool, int, float, str)) for value in stored.values())
    scalars = {name for values, _ in fake.logged for name, value in values.items() if isinstance(value, float)}
    assert {"planner/kl", "solver/reward", "solver/informative_share", "team/accuracy", "team/mean_reward"} <= scalars
    assert all(name.startswith(("planner/", "solver/", "team/")) for name in scalars)
    assert len(scalars) + 9 <= 40  # with a third agent
    tables = [values["transcripts"] for values, _ in fake.logged if "transcripts" in values]
    assert len(tables) == 2 and len(tables[0].data) == 8 and tables[0].columns[-1] == "transcript"
    assert tables[0].data[0][3] >= tables[0].data[-1][3] and "planner: " in tables[0].data[0][-1]
    steps = [step for _, step in fake.logged]
    assert steps == sorted(steps)


def test_a_tracker_that_is_not_installed_is_found_before_anything_is_loaded(make: Make) -> None:
    with pytest.raises(UserError, match="^TeamTRTrainer: trackers = .*wandb.*: wandb is not installed; pip install wandb"):
        make(trackers=["wandb"])


def test_a_run_of_a_script_goes_on_from_the_command_line(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where its reward is in a file of its own: evaluated, resumed to the same adapters, and gone on with from Python again."""
    (tmp_path / "my_rewards.py").write_text(
        "def even(completions, **_):\n    return [sum(b % 2 for b in c.encode()) / (len(c.encode()) or 1) for c in completions]\n"
        "def first(text):\n    return text[:1] or None\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_rewards  # type: ignore[import-not-found]

    blind = {"router": {"kind": "debate"}, "protocol": {"view": "per_agent"}}  # they vote, over what `answer` finds
    team = {"base": {"source": str(tiny_base), "device": "cpu"}, "agents": AGENTS, **blind}

    def trainer(folder: str, stages: int, reward: Any = my_rewards.even, answer: Any = my_rewards.first) -> TeamTRTrainer:
        small = {
            "items_per_stage": 8,
            "episodes_per_item": 4,
            "max_message_tokens": 3,
            "inner_epochs": 1,
            "delta": 0.05,
            "items": 4,
        }
        args = TeamTRConfig(output_dir=folder, stages=stages, **small)
        return TeamTRTrainer(team, reward, args, ROWS, ROWS, progress=False, success_at_least=0.5, answer=answer)

    with pytest.raises(UserError, match="or for a dataset the function that finds them, answer"):
        trainer("none", 1, answer=None).train()
    with pytest.raises(UserError, match="^answer raised ZeroDivisionError"):
        trainer("wrong", 1, answer=lambda text: str(1 // 0)).train()
    with pytest.raises(UserError, match="datasets.Dataset"):
        TeamTRTrainer(team, my_rewards.even, TeamTRConfig(output_dir="none"), iter(ROWS), progress=False)
    inside = trainer("run", 1)
    inside.train()
    assert main(["eval", "run", "seed=1"]) == 2 and "is a trained team" in capsys.readouterr().err
    measured = inside.evaluate(k=1)
    assert main(["eval", "run", "--k", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["avg_at_k"] == measured.avg_at_k
    assert main(["report", "run"]) == 0 and (tmp_path / "run" / "report.html").stat().st_size > 100_000
    assert main(["runs", "run", "--json"]) == 0 and '"finished"' in capsys.readouterr().out
    assert main(["train", "run", "--resume", "training.stages=2", "--json"]) == 0
    gone_on = json.loads(capsys.readouterr().out)
    assert gone_on["adapters"] == trainer("whole", 2).train().adapters
    assert trainer("run", 3).train(resume=True).stages == 3
    monkeypatch.delitem(sys.modules, "my_rewards")


def test_a_run_of_a_script_alone_is_refused_with_ways_on_that_work(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    team = {"base": {"source": str(tiny_base), "device": "cpu"}, "agents": AGENTS, "protocol": {"system": "Answer."}}
    args = TeamTRConfig(output_dir="run", stages=1, items_per_stage=8, episodes_per_item=4, max_message_tokens=3, items=4)
    TeamTRTrainer(team, lambda completions, **_: [0.0] * len(completions), args, ROWS, ROWS, progress=False).train()
    swap = ["--agent", AGENTS[0]["name"], "--with", "fresh:rank=2", "--dry-run"]
    for words, fix in (
        (["eval", "run"], "use TeamTRTrainer(team='run', ...).evaluate() there, or add a recipe whose task section names them"),
        (["swap", "run", *swap], "begin a run with these adapters by `train RECIPE --from run`"),
    ):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert "live in a Python script" in told and fix in told
    assert TeamTRTrainer("run", even, args, ROWS, ROWS, progress=False).evaluate(k=1).items == 4
    data = {"name": "dataset", "path": "rows.json", "test_path": "rows.json", "on_overlap": "allow", "reward": "fixed:half"}
    recipe = {**yaml.safe_load(Path("run/recipe.yaml").read_text()), "output_dir": None, "task": data}
    Path("fixed.py").write_text("def half(completions, **_):\n    return [0.5] * len(completions)\n")
    Path("rows.json").write_text(json.dumps(ROWS))
    Path("named.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["eval", "run", "named.yaml", "--k", "1"]) == 0
    assert main(["train", "named.yaml", "--from", "run", "--run-dir", "named"]) == 0
    assert main(["swap", "named", *swap]) == 0
