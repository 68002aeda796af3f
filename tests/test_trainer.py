"""The Python API in TRL's idiom: datasets, rewards, callbacks, trackers, resume."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers.trainer_callback import TrainerCallback

from teamtr_lora import RecipeError, TeamSpec, TeamTRConfig, TeamTRTrainer, UserError, load_recipe
from teamtr_lora.recipe import AgentSection, TrainingSection
from teamtr_lora.runs.checkpoint import CheckpointStore
from teamtr_lora.runs.metrics import StageRow, UpdateRow, read_rows
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.stored_run import load_run_recipe
from teamtr_lora.study.certify import certify_run
from teamtr_lora.training.run import TrainingRun
from teamtr_lora.training.run_diagnostics import RunDiagnostics

ROWS = [{"prompt": f"question {n}", "answer": n} for n in range(12)]
AGENTS: list[dict[str, Any]] = [{"name": "planner", "lora": {"rank": 2}}, {"name": "solver", "lora": {"rank": 2}}]


def even(prompts: list[str], completions: list[str], answer: list[int], **columns: Any) -> list[float]:
    """The share of even bytes in the team's last message: noisy, and easy to learn."""
    assert len(prompts) == len(completions) == len(answer) and all(isinstance(n, int) for n in answer)
    return [sum(b % 2 == 0 for b in text.encode()) / max(1, len(text.encode())) for text in completions]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., TeamTRConfig]:
    def make(**values: Any) -> TeamTRConfig:
        small: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "stages": 1,
            "items_per_stage": 8,
            "episodes_per_item": 4,
            "max_message_tokens": 3,
            "inner_epochs": 1,
            "learning_rate": 0.01,
            "delta": 0.05,
            "items": 4,
        }
        return TeamTRConfig(**{**small, **values})

    return make


@pytest.fixture
def team(tiny_base: Path) -> dict[str, Any]:
    return {"base": {"source": str(tiny_base), "device": "cpu"}, "agents": AGENTS}


class Recorder(TrainerCallback):
    """Writes down every event."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.logs: list[dict[str, Any]] = []
        self.steps: list[int] = []
        self.metrics: list[dict[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and name not in ("on_progress", "on_note"):

            def record(args: Any, state: Any, control: Any, **details: Any) -> None:
                self.events.append(name)
                if name == "on_log":
                    self.logs.append(details["logs"])
                elif name == "on_evaluate":
                    self.metrics.append(details["metrics"])
                elif name == "on_step_end":
                    self.steps.append(state.global_step)

            return record
        return super().__getattribute__(name)


def test_config_takes_flat_keys_and_sections() -> None:
    flat = TeamTRConfig(stages=2, delta=0.02, items_per_stage=12, trackers=["tensorboard"], seed=3, save_episodes="none")
    nested = TeamTRConfig(
        training={"stages": 2},
        trust_region={"delta": 0.02},
        rollout={"items_per_stage": 12},
        tracking={"trackers": ["tensorboard"]},
        diagnostics={"save_episodes": "none"},
        seed=3,
    )
    assert flat == nested
    assert TeamTRConfig(rollout={"items_per_stage": 12}, temperature=0.5).rollout.items_per_stage == 12
    assert TeamTRConfig(rollout={"items_per_stage": 12}, temperature=0.5).rollout.temperature == 0.5
    part = TeamTRConfig(training=TrainingSection(stages=2), learning_rate=0.5).training
    assert (part.stages, part.learning_rate) == (2, 0.5)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"stagess": 2}, "stagess = 2: unknown key; did you mean 'stages'?"),
        ({"lr": 0.1}, "lr = 0.1: unknown key; did you mean 'learning_rate'?"),
        ({"num_generations": 8}, "num_generations = 8: unknown key; did you mean 'episodes_per_item'?"),
        ({"zzz": {}}, "zzz: unknown key; `teamtr-lora keys` lists the keys"),
        ({"training": {"lr": 0.1}}, "training.lr = 0.1: unknown key; did you mean 'training.learning_rate'?"),
        ({"delta": -1.0}, "delta = -1.0: must be greater than 0; try 0.01 (the paper's radius)"),
        ({"stages": "2"}, "stages = '2': must be a whole number, at least 1; the default is 8"),
        ({"training": None, "stages": 2}, "training = null: must be a section (a mapping of keys); leave the section out to use"),
        ({"items_per_stage": 4}, "a clustered standard error needs at least two held-out groups"),
        ({"training": {"stages": 2}, "stages": 3}, "stages = 3: is in training= too; give it once"),
        ({"training": TrainingSection(stages=2), "stages": 2}, "stages = 2: is in training= too; give it once"),
        ({"team": {}}, "team: is no setting of TeamTRConfig; give the team and the data to TeamTRTrainer"),
        ({"rank": 2}, "rank = 2: is no setting of TeamTRConfig; give agents.*.lora.rank to TeamSpec"),
        ({"digits": 2}, "digits = 2: unknown key; `teamtr-lora keys` lists the keys"),
        ({"rounds": 2}, "rounds = 2: is no setting of TeamTRConfig; give router.rounds to TeamSpec"),
        ({"bf16": True}, "bf16 = true: is no setting of TeamTRConfig; give base.precision to TeamSpec"),
        ({"reward_range": 2}, "reward_range = 2: is no setting of TeamTRConfig; give it to TeamTRTrainer, as reward_range="),
    ],
)
def test_a_mistake_in_the_config_is_one_line(wrong: dict[str, Any], line: str) -> None:
    for make in (lambda: TeamTRConfig(**wrong), lambda: TeamTRConfig.model_validate(wrong)):
        with pytest.raises(RecipeError) as caught:
            make()
        assert line in str(caught.value) and str(caught.value).startswith("TeamTRConfig: ") and "\n" not in str(caught.value)


def test_every_mistake_in_the_config_is_told_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        TeamTRConfig(lr=1, training={"stages": 0}, delta=0.1, trust_region={"delta": 0.2}, items_per_stage=4)
    assert {problem.key for problem in caught.value.problems} == {"lr", "stages", "delta", "holdout"}


def test_a_config_of_whole_agents_and_orders_is_not_refused_before_the_team_is_known() -> None:
    """What depends on the team is the trainer's to check."""
    assert TeamTRConfig(order=["b", "a"], items_per_stage=7, matched="stage").training.order == ["b", "a"]


def test_train_and_evaluate(team: dict[str, Any], config: Callable[..., TeamTRConfig], tmp_path: Path) -> None:
    """From a list of dicts and from a datasets.Dataset: the same run."""
    summaries = []
    for name, rows in (("list", ROWS), ("dataset", datasets.Dataset.from_list(ROWS))):
        args = config(output_dir=str(tmp_path / name), inner_epochs=2)
        trainer = TeamTRTrainer(team=TeamSpec(**team), reward_funcs=[even], args=args, train_dataset=rows, eval_dataset=rows)
        summaries.append(trainer.train())
    first, second = summaries
    assert first.adapters == second.adapters
    assert first.updates == 2 and first.accepted >= 1 and first.out_of_region_accepted == 0
    assert first.run_dir == str(tmp_path / "list") and set(first.adapters) == {"planner", "solver"}
    written = read_rows(tmp_path / "list")
    assert [type(row) for row in written] == [StageRow, UpdateRow, UpdateRow, StageRow]
    evaluation = trainer.evaluate(items=4, k=2)
    assert evaluation.episodes == 8 and 0 <= evaluation.avg_at_k <= 1
    team_file = json.loads((tmp_path / "list" / "team.json").read_text())
    assert {agent: v["content_hash"] for agent, v in team_file.items()} == first.adapters


def test_without_an_eval_dataset_some_prompts_are_held_out(team: dict[str, Any], config: Callable[..., TeamTRConfig]) -> None:
    rows = [{"prompt": f"p{n}", "answer": n} for n in range(100)]
    trainer = TeamTRTrainer(team, even, config(), rows)
    train, test = trainer.task.items("train"), trainer.task.items("test")
    assert train.size and test.size and train.size + test.size == 100 and 3 <= test.size <= 25


def test_several_rewards_are_summed_and_conversations_are_trls(team: dict[str, Any], config: Callable[..., TeamTRConfig]) -> None:
    think = pytest.importorskip("trl.rewards").think_format_reward
    rows = [{"prompt": [{"role": "user", "content": f"question {n}"}], "answer": n} for n in range(4)]
    kinds: set[type] = set()

    def spy(completions: list[Any], **_: Any) -> list[float]:
        kinds.update(type(c) for c in completions)
        assert all(set(c[0]) == {"role", "content"} for c in completions)
        return [0.25] * len(completions)

    trainer = TeamTRTrainer(team, [think, spy], config(), rows, rows)
    assert trainer.evaluate(items=4, k=1).mean_reward == pytest.approx(0.25)
    assert kinds == {list}


class Saved(TrainerCallback):
    """What is on the disk when a checkpoint is said to be there."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        run = RunDir(Path(args.output_dir))
        self.found.append((run.checkpoints.load()[0].step, len(run.checkpoints.steps())))


def test_a_checkpoint_is_written_while_the_next_update_is_made(
    team: dict[str, Any], config: Callable[..., TeamTRConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk holds up the record of the update after it, not its rollout and passes; whoever listens for a checkpoint finds
    it; and a disk that fails ends the run at the next update."""
    order: list[str] = []
    made, writes, roll_out, update = threading.Event(), CheckpointStore._write, TrainingRun.roll_out, TrainingRun.update

    def rolling_out(*args: Any) -> Any:
        rollout = roll_out(*args)
        order.append("played")
        return rollout

    def writing_slowly(*args: Any) -> None:
        if order.count("written") < 2:  # later ones have no update after them
            assert made.wait(20)
            made.clear()
        writes(*args)
        order.append("written")

    def updating(*args: Any) -> Any:
        outcome = update(*args)
        order.append("updated")
        made.set()
        return outcome

    monkeypatch.setattr(TrainingRun, "roll_out", rolling_out)
    monkeypatch.setattr(TrainingRun, "update", updating)
    monkeypatch.setattr(CheckpointStore, "_write", writing_slowly)
    TeamTRTrainer(team, even, config(), ROWS, ROWS).train()
    assert order == ["played", "updated", "written", "played", "updated", "written", "written", "written"]
    saved = Saved()
    monkeypatch.setattr(CheckpointStore, "_write", writes)
    TeamTRTrainer(team, even, config(output_dir=str(Path(config().output_dir) / "heard")), ROWS, ROWS, callbacks=[saved]).train()
    assert saved.found == [(1, 1), (2, 2), (3, 2), (4, 2)]

    def full(*_: Any) -> None:
        raise UserError("no space left to write")

    monkeypatch.setattr(CheckpointStore, "_write", full)
    order.clear()
    with pytest.raises(UserError, match="no space left"):
        TeamTRTrainer(team, even, config(output_dir=str(Path(config().output_dir) / "full")), ROWS, ROWS).train()
    assert order == ["played", "updated"], "no update is recorded before the checkpoint before it, which failed"
    assert not (Path(config().output_dir) / "full").exists(), "a start that failed leaves nothing"


def test_callbacks_are_called_at_the_natural_points(team: dict[str, Any], config: Callable[..., TeamTRConfig]) -> None:
    recorder, late = Recorder(), Recorder()
    trainer = TeamTRTrainer(team, even, config(stages=2), ROWS, ROWS, callbacks=[recorder])
    trainer.add_callback(late)
    trainer.train()
    update = ["on_step_begin", "on_log", "on_step_end", "on_save"]
    stage = ["on_epoch_begin", *update, *update, "on_evaluate", "on_log", "on_save", "on_epoch_end"]
    assert recorder.events == ["on_train_begin", "on_evaluate", "on_log", "on_save", *stage, *stage, "on_train_end"]
    assert late.events == recorder.events
    assert recorder.steps == [1, 2, 3, 4]
    assert [row["kind"] for row in recorder.logs] == ["stage", "update", "update", "stage", "update", "update", "stage"]
    assert all("avg_at_k" in metrics for metrics in recorder.metrics) and len(recorder.metrics) == 3


class StopAfter(TrainerCallback):
    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step >= self.updates
        return control


def test_stopping_and_resuming_is_the_undisturbed_run(
    team: dict[str, Any], config: Callable[..., TeamTRConfig], tmp_path: Path
) -> None:
    """Stopped inside a stage, and again at the end of one."""

    def trainer(name: str, *callbacks: TrainerCallback) -> TeamTRTrainer:
        return TeamTRTrainer(team, even, config(stages=2, output_dir=str(tmp_path / name)), ROWS, ROWS, callbacks)

    whole = trainer("whole").train()
    assert trainer("stopped", StopAfter(1)).train().updates == 1
    assert trainer("stopped", StopAfter(2)).train(resume=True).updates == 2
    recorder, threads = Recorder(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    resumed = trainer("stopped", recorder).train(resume=True)
    now = torch.get_num_threads()
    torch.set_num_threads(threads)
    assert now == threads + 1, "the run goes on with its own number of threads, and then they are the script's again"
    assert resumed.adapters == whole.adapters and resumed.updates == 4
    assert recorder.steps == [3, 4], "nothing is done twice"
    times = {"seconds", "start_seconds", "tokens_per_second", "time", "peak_memory_bytes", "checksum"}
    rows = [
        [{k: v for k, v in json.loads(line).items() if k not in times} for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("whole", "stopped")
    ]
    assert rows[0] == rows[1]


def test_resuming_needs_the_same_settings(team: dict[str, Any], config: Callable[..., TeamTRConfig]) -> None:
    run = TeamTRTrainer(team, even, config(), ROWS, ROWS).train().run_dir
    assert not list(Path(run).rglob("events.out*")), "no tracker unless one is named"
    with pytest.raises(UserError, match="already holds a run"):
        TeamTRTrainer(team, even, config(), ROWS, ROWS).train()
    with pytest.raises(UserError, match=r"another recipe's run: delta is 0\.05 there and 0\.06 here"):
        TeamTRTrainer(team, even, config(delta=0.06), ROWS, ROWS).train(resume=True)


def test_a_folder_with_somebodys_recipe_is_no_run(
    team: dict[str, Any], config: Callable[..., TeamTRConfig], tmp_path: Path
) -> None:
    """Not to train in, for its recipe would be overwritten, nor to go on with."""
    mine = tmp_path / "mine" / "recipe.yaml"
    mine.parent.mkdir()
    mine.write_text("# my own words\nteam: {agents: [{name: a}]}\n")
    with pytest.raises(UserError, match="holds a recipe but no run; choose another output_dir"):
        TeamTRTrainer(team, even, config(output_dir=str(mine.parent)), ROWS, ROWS).train()
    with pytest.raises(UserError, match=r"holds a recipe but no run; use: teamtr-lora train .*mine/recipe\.yaml"):
        load_run_recipe(mine.parent)
    assert mine.read_text().startswith("# my own words") and len(list(mine.parent.iterdir())) == 1


def test_a_start_that_failed_can_be_resumed(team: dict[str, Any], config: Callable[..., TeamTRConfig]) -> None:
    class Fails(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        TeamTRTrainer(team, even, config(), ROWS, ROWS, [Fails()]).train()
    assert TeamTRTrainer(team, even, config(), ROWS, ROWS).train(resume=True).updates > 0


def test_a_sampler_that_was_stopped_in_the_middle_is_replaced(team: dict[str, Any], config: Callable[..., TeamTRConfig]) -> None:
    with TeamTRTrainer(team, even, config(), ROWS, ROWS) as trainer:
        first: Any = trainer.open().sampler
        wanted = trainer.evaluate(items=2)
        assert trainer.open().sampler is first
        first.failed = KeyboardInterrupt()
        assert trainer.evaluate(items=2).avg_at_k == wanted.avg_at_k and trainer.open().sampler is not first


def test_training_that_breaks_off_within_an_update_leaves_the_last_checkpoints_team(
    team: dict[str, Any], config: Callable[..., TeamTRConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    after_update = RunDiagnostics.after_update

    def interrupted(self: Any, state: Any, agent: str, stage: int, outcome: Any) -> None:
        after_update(self, state, agent, stage, outcome)
        if outcome.accepted:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunDiagnostics, "after_update", interrupted)
    with TeamTRTrainer(team, even, config(stages=4), ROWS, ROWS) as trainer:
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert trainer.run is not None and trainer.playable is not None
        assert set(trainer.run.state.versions) and trainer.evaluate(items=4).episodes
        kept = {agent: version.name for agent, version in trainer.run.run_dir.checkpoints.state().versions.items()}
        assert trainer.playable.versions() == kept
        monkeypatch.undo()
        assert trainer.train(resume=True).stages == 4


def test_a_team_goes_on_from_an_earlier_run(
    tiny_base: Path, config: Callable[..., TeamTRConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier run named its base relative to where it was; the new script runs elsewhere."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "my-base").symlink_to(tiny_base)
    monkeypatch.chdir(tmp_path / "project")
    team = {"base": {"source": "my-base", "device": "cpu"}, "agents": AGENTS}
    first = TeamTRTrainer(team, even, config(), ROWS, ROWS).train()
    monkeypatch.chdir(tmp_path)
    second = TeamTRTrainer(tmp_path / "run", even, config(output_dir=str(tmp_path / "second")), ROWS, ROWS)
    versions = second.open().bank
    assert {agent: versions.version(agent).content_hash for agent in versions.agents} == first.adapters


def test_another_run_of_one_trainer_says_where_its_adapters_are_from(
    team: dict[str, Any], config: Callable[..., TeamTRConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the run before it, whatever that one began with."""
    monkeypatch.chdir(tmp_path)
    with TeamTRTrainer(team, even, config(output_dir=None, gain="none"), ROWS, ROWS) as trainer:
        runs = [Path(trainer.train().run_dir) for _ in range(3)]
    origins = [json.loads((run / "origin.json").read_text()).get("started_from") for run in runs]
    assert origins[0] is None
    for before, origin in zip(runs, origins[1:], strict=False):
        assert origin["source"] == str(before)
        assert all((before / "adapters" / agent / version).is_dir() for agent, version in origin["versions"].items())


@pytest.fixture
def recipe_file(tiny_base: Path, tmp_path: Path) -> Path:
    """One agent, one stage, a dataset and a reward of the user's own."""
    (tmp_path / "api_rewards.py").write_text(
        "def even(completions, **_):\n    return [float(sum(t.encode()) % 2) for t in completions]\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "recipe.yaml").write_text(
        f"base: {{source: {tiny_base}, device: cpu}}\n"
        "team: {agents: [{name: planner, lora: {rank: 2}}]}\n"
        "task: {name: dataset, path: rows.jsonl, test_path: rows.jsonl, on_overlap: allow, reward: 'api_rewards:even'}\n"
        "rollout: {items_per_stage: 8, episodes_per_item: 2, max_message_tokens: 4}\n"
        "training: {stages: 1, inner_epochs: 1}\n"
        "evaluation: {items: 4}\n"
        f"output_dir: {tmp_path / 'run'}\n"
    )
    return tmp_path / "recipe.yaml"


def test_a_run_whose_reward_or_data_changed_says_so(recipe_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    def stages(count: int) -> str:
        caplog.clear()
        with TeamTRTrainer.from_recipe(load_recipe(recipe_file, [f"training.stages={count}"])) as trainer:
            trainer.train(resume=count > 1)
        return " ".join(record.getMessage() for record in caplog.records if "not comparable" in record.getMessage())

    assert stages(1) == stages(2) == ""
    origin = recipe_file.parent / "run" / "origin.json"  # a process loads a module once, so it is the other end that changes
    held = json.loads(origin.read_text())
    (reward,) = [key for key in held["contents"] if key.startswith("task.reward")]
    origin.write_text(json.dumps(held | {"contents": held["contents"] | {reward: "0" * 64}}))
    assert f"what {reward} names" in stages(3)
    assert stages(4) == "", "once is enough"
    rows = recipe_file.with_name("rows.jsonl")
    rows.write_text(rows.read_text() + json.dumps(ROWS[0] | {"prompt": "one more"}) + "\n")
    assert "task.path and task.test_path names" in stages(5)


def test_tensorboard_through_the_recipe(recipe_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with recipe_file.open("a") as file:
        file.write("tracking: {trackers: [tensorboard], project: my-project}\n")
    TeamTRTrainer.from_recipe(load_recipe(tmp_path / "recipe.yaml")).train()
    files = list((tmp_path / "run").rglob("events.out.tfevents.*"))
    assert files and all("my-project" in str(path) for path in files)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags: set[str] = set()
    texts: set[str] = set()
    for folder in {path.parent for path in files}:
        events = EventAccumulator(str(folder))
        events.Reload()
        tags |= set(events.Tags()["scalars"])
        texts |= set(events.Tags()["tensors"])
    assert {"planner/reward", "planner/kl_bound", "team/accuracy", "team/mean_reward"} <= tags and len(tags) <= 40
    assert any(tag.startswith("transcripts") for tag in texts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward_funcs": []}, "reward_funcs"),
        ({"train_dataset": None}, "train_dataset"),
        ({"train_dataset": []}, "empty"),
        ({"train_dataset": [{"question": "x"}]}, "no column 'prompt'"),
        ({"eval_dataset": [{"question": "x"}]}, "test dataset has no column 'prompt'"),
        ({"team": {"agents": []}}, "agents"),
        ({"team": {"agents": [{"name": "a"}, {"name": "a"}]}}, "same name"),
        ({"team": {"agents": [{"name": "../a"}]}}, "name"),
        ({"team": {"agents": [{"name": "a"}], "colour": "red"}}, "colour"),
        ({"team": "no/such/run"}, "no run or team here"),
        ({"team": AGENTS}, r"^team: give a TeamSpec, .* not list$"),
        ({"args": {"stages": 1}}, r"^args: give a TeamTRConfig, not dict$"),
        ({"reward_funcs": "some/reward-model"}, "^reward_funcs: 'some/reward-model' is no function"),
        ({"reward_funcs": [even, 3]}, "^reward_funcs: 3 is no function"),
        ({"reward_funcs": None}, "^reward_funcs: None is no function"),
        ({"team": {"agents": [{"name": "a"}], "routr": {}}}, r"^TeamSpec: routr: unknown key; did you mean 'router'\?$"),
        ({"team": {"agents": [{"name": "a", "lora": {"r": 4}}]}}, r"^TeamSpec: .*lora.r = 4: .*'agents\.\*\.lora\.rank'\?$"),
        ({"team": {"agents": [{"name": "a", "top_p": 1}]}}, r"^TeamSpec: agents.0.top_p = 1: .*; give top_p to TeamTRConfig$"),
        ({"team": {"agents": [{"name": "a"}], "base": "nano"}}, r"^TeamSpec: base = 'nano': .* write \{\"source\": \.\.\.\}$"),
        ({"team": {"agents": [{"name": "a"}], "own_answer_share": 2.0}}, r"^TeamSpec: own_answer_share = 2.0: .* at most 1"),
        ({"args": TeamTRConfig(order=["a", "b"])}, r"^TeamTRTrainer: order = .*names every agent once"),
        (
            {"reward_range": (1.0, 0.0)},
            r"^TeamTRTrainer: reward_range = \[1.0, 0.0\]: the lowest reward must be below the highest",
        ),
        ({"reward_range": (0.0, float("inf"))}, "reward_range"),
        ({"reward_range": 1.0}, "reward_range = 1.0: must be a list of 2 numbers"),
        ({"on_reward_error": "skip"}, "on_reward_error = 'skip': must be one of stop, zero"),
        ({"on_overlap": "dorp"}, "on_overlap = 'dorp': must be one of refuse, drop, allow"),
        ({"train_datset": ROWS}, "^TeamTRTrainer: train_datset: unknown argument; did you mean 'train_dataset'?"),
        ({"model": "nano"}, r"^TeamTRTrainer: model: is no argument of TeamTRTrainer; the base is TeamSpec's, as base="),
        ({"lr": 1e-3}, "^TeamTRTrainer: lr: is no setting of TeamTRTrainer; give learning_rate to TeamTRConfig$"),
        ({"run_dir": "runs/x"}, "^TeamTRTrainer: run_dir: is no setting of TeamTRTrainer; give output_dir to TeamTRConfig"),
        ({"warmup_ratio": 0.1}, "^TeamTRTrainer: warmup_ratio: unknown argument; there is no warm-up"),
        ({"digits": 3}, "^TeamTRTrainer: digits: unknown argument; there are team, reward_funcs, args, "),
    ],
)
def test_mistakes_in_a_script(
    team: dict[str, Any], config: Callable[..., TeamTRConfig], change: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = {
        "team": team,
        "reward_funcs": [even],
        "args": config(),
        "train_dataset": ROWS,
        "eval_dataset": ROWS,
    }
    with pytest.raises(UserError, match=message):
        TeamTRTrainer(**{**arguments, **change})


def test_prompts_of_both_datasets_are_refused_or_dropped(
    team: dict[str, Any], config: Callable[..., TeamTRConfig], caplog: pytest.LogCaptureFixture
) -> None:
    held = [{"prompt": "Question  3?", "answer": 3}, {"prompt": "another", "answer": 0}]
    with pytest.raises(UserError, match=r"1 train items are test items too.*train-3 = test-0; .*pass on_overlap='drop'"):
        TeamTRTrainer(team, even, config(), ROWS, held)
    dropped = TeamTRTrainer(team, even, config(), ROWS, held, on_overlap="drop").task.items("train")
    assert dropped.size == 11 and "question 3" not in [dropped[i].prompt for i in range(11)]
    assert TeamTRTrainer(team, even, config(), ROWS, held, on_overlap="allow").task.items("train").size == 12
    TeamTRTrainer(team, even, config(), ROWS, ROWS)
    assert "eval_dataset is train_dataset" in caplog.text


def test_a_script_run_says_where_it_goes_on(team: dict[str, Any], config: Callable[..., TeamTRConfig], tmp_path: Path) -> None:
    from teamtr_lora.cli import main

    hidden = lambda **columns: even(**columns)  # noqa: E731  (no name leads to it)
    TeamTRTrainer(team, hidden, config(), ROWS, ROWS).train()
    with pytest.raises(UserError, match="script"):
        TeamTRTrainer.from_recipe(load_recipe(tmp_path / "run" / "recipe.yaml"))
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert main(["ask", str(tmp_path / "run"), "hello"]) == 0, "talking to the team needs no reward"


def test_callbacks_may_be_none_or_classes_as_in_transformers(team: dict[str, Any], config: Callable[..., TeamTRConfig]) -> None:
    class Counting(TrainerCallback):
        begun = 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            Counting.begun += 1

    assert TeamTRTrainer(team, even, config(), ROWS, callbacks=None)._callbacks == []
    TeamTRTrainer(team, even, config(), ROWS, callbacks=[Counting]).train()
    assert Counting.begun == 1


def test_a_null_or_repeated_id_column_does_not_make_one_item_of_all(
    team: dict[str, Any], config: Callable[..., TeamTRConfig]
) -> None:
    for value in (None, "same"):
        trainer = TeamTRTrainer(team, even, config(), [{**row, "id": value} for row in ROWS])
        items = trainer.task.items("train")
        assert items.size is not None and len({items[i].id for i in range(items.size)}) == items.size


def test_a_tracker_that_is_not_installed_is_named(team: dict[str, Any], config: Callable[..., TeamTRConfig]) -> None:
    with pytest.raises(UserError, match="wandb is not installed"):
        TeamTRTrainer(team, even, config(trackers=["wandb"]), ROWS).train()


def test_a_tampered_team_file_is_one_line(team: dict[str, Any], config: Callable[..., TeamTRConfig]) -> None:
    summary = TeamTRTrainer(team, even, config(), ROWS).train()
    file = Path(summary.run_dir) / "team.json"
    stored = json.loads(file.read_text())
    for key, value in (("number", "x"), ("content_hash", 5), ("content_hash", "../../../etc")):
        broken = json.loads(json.dumps(stored))
        next(iter(broken.values()))[key] = value
        file.write_text(json.dumps(broken))
        with pytest.raises(UserError, match="damaged"):
            TeamTRTrainer(summary.run_dir, even, config(), ROWS)


def wide(prompts: list[str], completions: list[str], answer: list[int], **columns: Any) -> list[float]:
    return [5 * reward - 1 for reward in even(prompts, completions, answer)]


def test_certificates_have_the_range_of_rewards_that_the_script_says(
    team: dict[str, Any], config: Callable[..., TeamTRConfig], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def trainer(within: Any, **values: Any) -> TeamTRTrainer:
        return TeamTRTrainer(team, wide, config(inner_epochs=2, **values), ROWS, ROWS, reward_range=within)

    with trainer((-1, 4)) as first:
        run = Path(first.train().run_dir)
    assert "reward_range" not in caplog.text
    assert load_recipe(run / "recipe.yaml").task.reward_range == (-1.0, 4.0) == first.task.reward_range
    certificates = certify_run(run)
    assert certificates.advantage_bound == pytest.approx(5.0)
    assert trainer([-1.0, 4.0], stages=2).train(resume=True).stages == 2
    with pytest.raises(UserError, match=r"another recipe's run: reward_range is 4\.0 there and 3\.0 here"):
        trainer((-1, 3)).train(resume=True)
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("- 4.0\n", "- 9.0\n"))
    assert certify_run(run).advantage_bound == pytest.approx(10.0)


def test_rewards_outside_the_range_are_told_once(
    team: dict[str, Any], config: Callable[..., TeamTRConfig], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = TeamTRTrainer(team, lambda completions, **_: [5.0] * len(completions), config(), ROWS, ROWS)
    assert trainer.evaluate(items=4, k=2).mean_reward == 5.0 and trainer.evaluate(items=2, k=1).mean_reward == 5.0
    told = [record.message for record in caplog.records if "reward_range" in record.message]
    assert len(told) == 1 and "got reward 5, outside reward_range = [0, 1]" in told[0]


def test_a_trainer_is_closed_at_the_end_of_its_with(team: dict[str, Any], config: Callable[..., TeamTRConfig]) -> None:
    closed: list[str] = []
    with pytest.raises(RuntimeError, match="mine"), TeamTRTrainer(team, even, config(), ROWS, ROWS) as trainer:
        sampler = trainer.open().sampler
        sampler.close = lambda: closed.append("sampler")  # type: ignore[method-assign]
        raise RuntimeError("mine")
    trainer.close()
    assert closed == ["sampler"], "once"
    for use in (trainer.open, trainer.evaluate, trainer.train):
        with pytest.raises(UserError, match="the trainer is closed; make another one"):
            use()
    with TeamTRTrainer(team, even, config(), ROWS, ROWS) as untouched:
        pass
    assert untouched.playable is None, "nothing was loaded for closing it"


@pytest.mark.parametrize("wrong", [{"items": 0}, {"k": 0}, {"k": -1}])
def test_an_evaluation_plays_something(team: dict[str, Any], config: Callable[..., TeamTRConfig], wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(UserError, match=f"{name} = {wrong[name]}: must be at least 1"):
        TeamTRTrainer(team, even, config(), ROWS, ROWS).evaluate(**wrong)


def test_a_mistake_in_a_team_names_the_fields_of_its_spec() -> None:
    with pytest.raises(RecipeError) as caught:
        TeamSpec(base={"device": "gpu"}, agents=[AgentSection(name="a"), {"name": "B"}])
    assert {problem.key for problem in caught.value.problems} == {"base.device", "agents.1.name"}
    with pytest.raises(RecipeError, match="TeamSpec: agents: the team has no agents"):
        TeamSpec()
    debating = TeamSpec(agents=[{"name": "a"}, {"name": "b"}], router={"kind": "debate"})
    with pytest.raises(RecipeError, match=r"set protocol\.view='per_agent'$"):  # recipes are not spoken of
        TeamTRTrainer(debating, even, TeamTRConfig(), ROWS, ROWS)


def test_every_argument_of_trls_trainer_has_a_place_here() -> None:
    theirs = inspect.signature(pytest.importorskip("trl").GRPOTrainer).parameters
    for name in set(theirs) - set(inspect.signature(TeamTRTrainer).parameters):
        with pytest.raises(UserError, match=f"^TeamTRTrainer: {name}: is no argument of TeamTRTrainer; "):
            TeamTRTrainer(**{name: None})
