"""One agent trained by TRL on the embedded base: the run directory it leaves, and that TRL learns from what was sampled."""

from __future__ import annotations

import builtins
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from teamtr_lora.base.versions import read_adapter_folder
from teamtr_lora.baselines import trl_baseline
from teamtr_lora.baselines.single import budget
from teamtr_lora.baselines.trl_baseline import BaselineRun, train_baseline
from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation.commands import opened
from teamtr_lora.evaluation.evaluate import plan_in_training, summarise
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.registry.stored import find_team
from teamtr_lora.runs.metrics import TIME_FIELDS, StageRow, UpdateRow, read_rows
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.training.trainer import TrainSummary

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"
SMALL = ["rollout.items_per_stage=4", "rollout.episodes_per_item=3", "trust_region.holdout=0.5", "training.stages=1",
         "training.minibatches_per_epoch=1", "training.inner_epochs=2", "evaluation.items=6", "diagnostics.save_episodes=all",
         "training.tokens_per_microbatch=500", "training.learning_rate=0.01", "task.digits=2",
         "team.agents=[{name: planner, role: ones, lora: {rank: 2}}, {name: solver, role: tens}]"]  # fmt: skip


def small(run_dir: Path, *more: str) -> Recipe:
    recipe = load_recipe(QUICKSTART, [*SMALL, *more])
    return recipe.model_copy(update={"output_dir": str(run_dir)}).placed_in(recipe.folder)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Without what depends on the moment."""
    return [{k: v for k, v in row.model_dump().items() if k not in TIME_FIELDS} for row in read_rows(run_dir)]


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    """What TRL computed its losses from."""
    return []


@pytest.fixture(scope="module")
def done(trl: Any, seen: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainSummary, Path]:
    run_dir = tmp_path_factory.mktemp("grpo") / "run"
    compute, patch = trl.GRPOTrainer._compute_loss, pytest.MonkeyPatch()

    def watched(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        seen.append({k: v.clone() for k, v in inputs.items() if isinstance(v, torch.Tensor)})
        return compute(self, model, inputs)

    patch.setattr(trl.GRPOTrainer, "_compute_loss", watched)
    try:
        return train_baseline(small(run_dir), "grpo"), run_dir
    finally:
        patch.undo()


def test_the_run_directory_has_what_a_run_of_train_has(done: tuple[TrainSummary, Path]) -> None:
    summary, run_dir = done
    found = read_rows(run_dir)
    updates = [row for row in found if isinstance(row, UpdateRow)]
    stages = [row for row in found if isinstance(row, StageRow)]
    team = budget(small(run_dir))
    assert [row.stage for row in stages] == [0, 1, 2] and [row.stage for row in updates] == [1, 2]
    assert sum(row.fresh_episodes for row in updates) == team["episodes"] == 24
    assert sum(row.sampled_tokens for row in updates) <= team["tokens"]
    assert all(row.messages == 24 and row.optimizer_steps == 2 and row.decision == "accepted" for row in updates)
    assert stages[0].evaluation and stages[0].evaluation["avg_at_k"] == summary.accuracy_before
    assert stages[-1].evaluation and stages[-1].evaluation["avg_at_k"] == summary.accuracy_after
    assert len({stage.evaluation["items_digest"] for stage in stages if stage.evaluation}) == 1, "compared item by item"
    spent = sum(row.sampled_tokens for row in updates) + sum(s.evaluation["sampled_tokens"] for s in stages if s.evaluation)
    assert summary.tokens == stages[-1].sampled_tokens == spent
    assert summary.out_of_region_accepted == sum((row.kl["exact"].bound or 9) > 0.02 for row in updates)
    assert len(list((run_dir / "episodes").iterdir())) == 2
    assert summary.adapters == {"planner": updates[-1].content_hash}


def test_every_update_is_a_new_version_of_the_recipes_adapter(done: tuple[TrainSummary, Path]) -> None:
    _, run_dir = done
    updates = [row for row in read_rows(run_dir) if isinstance(row, UpdateRow)]
    folders = sorted((run_dir / "adapters" / "planner").iterdir())
    assert [folder.name for folder in folders[1:]] == [row.version for row in updates] and len(folders) == 3
    assert [row.team_versions["planner"] for row in updates] == [folder.name for folder in folders[:2]]
    for folder in folders:
        tensors, config = read_adapter_folder(folder)
        assert config["r"] == 2 and all(t.dtype == torch.float32 for t in tensors.values())


def test_eval_reads_the_run_and_finds_the_same(done: tuple[TrainSummary, Path]) -> None:
    summary, run_dir = done
    with opened(find_team(run_dir)) as (recipe, playable):
        task = recipe.task.build(recipe.folder)
        plan = plan_in_training(task, recipe, 6, k=1)
        again = summarise(playable.play(task, plan), task, plan)
    assert again.avg_at_k == summary.accuracy_after
    assert [agent.role for agent in recipe.team.agents] == ["ones; tens"]


def test_trl_learns_from_exactly_what_was_sampled(done: tuple[TrainSummary, Path], seen: list[dict[str, Any]]) -> None:
    """Its log-probabilities of the agent's tokens are the sampler's, and its advantages are the rewards' by hand."""
    first = seen[: len(seen) // 4]  # one pass of two rollouts of two passes
    compared = 0
    for inputs in first:
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        assert mask.any() and not mask.all()
        gap = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"])[mask]
        assert gap.abs().max() < 1e-3
        compared += int(mask.sum())
    lines = (done[1] / "episodes" / "stage-0001-update-1-planner.jsonl").read_text().splitlines()
    episodes = [json.loads(line) for line in lines]
    assert compared == sum(m["tokens"] for e in episodes for m in e["messages"])
    by_group = torch.tensor([e["reward"] for e in episodes]).view(4, 3)
    expected = ((by_group - by_group.mean(1, keepdim=True)) / (by_group.std(1, keepdim=True) + 1e-4)).flatten()
    got = torch.cat([inputs["advantages"] for inputs in first])
    assert sorted(got.tolist()) == pytest.approx(sorted(expected.tolist()), abs=1e-4)
    assert got.abs().max() > 0


def test_the_measured_kl_is_that_of_the_stored_versions(done: tuple[TrainSummary, Path]) -> None:
    """Against full distributions in float64 arithmetic on the softmax, one message at a time."""
    _, run_dir = done
    row = next(r for r in read_rows(run_dir) if isinstance(r, UpdateRow))
    before, after = sorted((run_dir / "adapters" / "planner").iterdir())[:2]
    lines = (run_dir / "episodes" / "stage-0001-update-1-planner.jsonl").read_text().splitlines()
    with opened(find_team(run_dir)) as (_, playable):
        protocol, bank = playable.team.protocol, playable.bank
        total, count = 0.0, 0
        for episode in map(json.loads, lines[:6]):  # the first two of four items: holdout is a half
            transcript = protocol.begin(episode["prompt"])
            for message in episode["messages"]:
                prompt = transcript.prompt_for("planner")
                tokens = protocol.chat.encode(message["text"]) + protocol.end_ids[:1] * (message["finish"] == "stop")
                assert len(tokens) == message["tokens"], "the embedded tokenizer reads sums back as they were written"
                transcript.add_message("planner", tokens)
                logp = []
                for folder in (before, after):
                    bank.restore("planner", read_adapter_folder(folder)[0])
                    bank.activate("planner")
                    with torch.no_grad():
                        logits = bank.model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
                    logp.append(torch.log_softmax(logits.double(), -1))
                total += float((logp[0].exp() * (logp[0] - logp[1])).sum())
                count += 1
    assert row.kl_message_sum == pytest.approx(total / count, rel=1e-3) and total > 0


def test_an_interrupted_run_goes_on_and_ends_as_if_nothing_had_happened(
    done: tuple[TrainSummary, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted where TRL has saved its checkpoint of the second update and we have not committed it."""
    finish, played = BaselineRun.finish_update, []

    def killed(self: BaselineRun, step: int) -> None:
        assert json.loads((tmp_path / "run" / "baseline.json").read_text())["settings"] == self.state.settings
        if self.state.stage == 1:
            raise KeyboardInterrupt
        finish(self, step)

    def counted(self: BaselineRun, step: int) -> None:
        played.append(self.state.stage + 1)
        finish(self, step)

    monkeypatch.setattr(BaselineRun, "finish_update", killed)
    with pytest.raises(KeyboardInterrupt):
        train_baseline(small(tmp_path / "run"), "grpo")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"half a row')
    with pytest.raises(UserError, match="already holds a run of this baseline; add --resume"):
        train_baseline(small(tmp_path / "run"), "grpo")
    monkeypatch.setattr(BaselineRun, "finish_update", counted)
    summary = train_baseline(small(tmp_path / "run"), "grpo", resume=True)
    assert played == [2], "only what was lost is done again"
    assert rows(tmp_path / "run") == rows(done[1])
    assert summary.adapters == done[0].adapters and summary.tokens == done[0].tokens
    again = train_baseline(small(tmp_path / "run"), "grpo", resume=True)
    assert again == summary and played == [2], "a finished run is only read"


def test_dapo_and_ppo_train_too_through_the_command(trl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = ["team.agents=[{name: solver, role: ones}]", "task.digits=1", "evaluation.items=2", "rollout.episodes_per_item=2",
           "training.schedule=linear"]  # fmt: skip
    for name, steps in (("dapo", 2), ("ppo", 2)):
        run_dir = tmp_path / name
        assert main(["baseline", name, str(QUICKSTART), *SMALL, *one, "--run-dir", str(run_dir), "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["run_dir"] == str(run_dir) and printed["updates"] == 1 and list(printed["adapters"]) == ["solver"]
        stored = json.loads((run_dir / "baseline.json").read_text())
        assert stored["algorithm"] == name and stored["step"] == steps and stored["trl"].startswith("1.16")
        (row,) = (row for row in read_rows(run_dir) if isinstance(row, UpdateRow))
        assert row.learning_rate == pytest.approx((0.01 + 0.005) / 2), "of two steps, of which the second is half as long"
        assert main(["train", str(QUICKSTART), *SMALL, "--run-dir", str(run_dir), "--resume"]) == 2
        assert "holds a run of `teamtr-lora baseline`" in capsys.readouterr().err
        assert main(["baseline", "grpo", str(QUICKSTART), *SMALL, *one, "--run-dir", str(run_dir), "--resume"]) == 2
        assert f"holds a run of {name}, not of grpo" in capsys.readouterr().err


def test_a_longer_run_goes_on_from_a_shorter_one(done: tuple[TrainSummary, Path], tmp_path: Path) -> None:
    """The team of one that the baseline itself is has one rollout a stage."""
    alone = ["team.agents=[{name: planner, role: ones; tens, lora: {rank: 2}}]", "team.router.rounds=2"]
    short = train_baseline(small(tmp_path / "run", *alone), "grpo")
    longer = train_baseline(small(tmp_path / "run", *alone, "training.stages=2"), "grpo", resume=True)
    assert (short.stages, longer.stages) == (1, 2)
    assert longer.adapters == done[0].adapters, "the same agent, episodes and steps as in place of the team of two"
    assert json.loads((tmp_path / "run" / "baseline.json").read_text())["budget"]["rollouts"] == 2
    with pytest.raises(UserError, match="holds another recipe's run: training.learning_rate"):
        train_baseline(small(tmp_path / "run", *alone, "training.learning_rate=0.5"), "grpo", resume=True)


def test_a_folder_of_something_else_is_left_alone(trl: Any, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and holds no baseline"):
        train_baseline(small(tmp_path), "grpo", resume=True)
    with pytest.raises(UserError, match="is a file"):
        train_baseline(small(tmp_path / "precious.txt"), "grpo")
    (tmp_path / "precious.txt").unlink()
    (tmp_path / "baseline.json").write_text('{"format": 1, "stage": "no')
    with pytest.raises(UserError, match=r"baseline\.json: no proper JSON"):
        train_baseline(small(tmp_path), "grpo", resume=True)
    with pytest.raises(UserError, match="baseline"):
        RunDir(tmp_path).check(small(tmp_path), resume=True)


def test_without_trl_one_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find, load = importlib.util.find_spec, builtins.__import__

    def blocked(name: str, *rest: Any, **more: Any) -> Any:
        assert name.split(".")[0] != "trl", "it was imported all the same"
        return load(name, *rest, **more)

    monkeypatch.setattr(trl_baseline.importlib.util, "find_spec", lambda name, *a: None if name == "trl" else find(name, *a))
    monkeypatch.setattr(builtins, "__import__", blocked)
    assert main(["baseline", "grpo", str(QUICKSTART), "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and 'pip install "teamtr-lora[trl]"' in said[0] and not (tmp_path / "run").exists()


def test_what_trl_cannot_do_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_baseline, "_trl_version", lambda: "1.16.0")
    for change, line in (
        ("training.minibatches_per_epoch=5", r"training\.minibatches_per_epoch = 5: TRL takes equal steps"),
        ("task={name: script}", "use TRL there"),
    ):
        with pytest.raises(UserError, match=line):
            train_baseline(small(tmp_path / "run", change), "grpo")
    with pytest.raises(UserError, match="--agent nobody"):
        train_baseline(small(tmp_path / "run"), "grpo", agent="nobody")
    assert not (tmp_path / "run").exists()


def test_another_trl_is_refused_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_baseline.importlib.util, "find_spec", lambda name, *a: object())
    monkeypatch.setattr(trl_baseline.importlib.metadata, "version", lambda name: "2.0.1")
    with pytest.raises(UserError, match=r"needs TRL 1\.16, and 2\.0\.1 is installed"):
        train_baseline(small(tmp_path / "run"), "grpo")
