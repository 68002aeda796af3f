"""A single agent trained by TRL's GRPOTrainer in the place of a team: `teamtr-lora baseline`.

TRL's trainer owns the loop and the learning; this file plays the episodes it asks for and, after every update, stores the new
adapter version, measures how far the update went, evaluates where due and commits, in the formats of `train`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from teamtr_lora.base.memory import peak_memory
from teamtr_lora.base.versions import write_version
from teamtr_lora.baselines.algorithms import Algorithm, batch_settings, group_settings
from teamtr_lora.baselines.bridge import Columns, prompt_keys, reward, trl_columns
from teamtr_lora.baselines.record import BaselineState, check_folder, summary, write_state
from teamtr_lora.baselines.single import budget, single_agent_recipe
from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation.evaluate import plan_in_training
from teamtr_lora.evaluation.returns import recorded
from teamtr_lora.recipe import Recipe, ScriptSettings
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.rollout.playable import PlayableTeam, fits, load_versions, open_recipe
from teamtr_lora.runs.metrics import StageRow
from teamtr_lora.runs.run_dir import RunDir, chosen_run_dir, elsewhere
from teamtr_lora.tasks import DataOrder, Task
from teamtr_lora.team import Episode
from teamtr_lora.training.events import Events
from teamtr_lora.training.optimize import OptimizeReport
from teamtr_lora.training.outside_step import OutsideStep
from teamtr_lora.training.rows import update_row
from teamtr_lora.training.stage_rollouts import Rollout
from teamtr_lora.training.trainer import TrainSummary

TRL_VERSION = "1.16"  # whose rollout_func and env_mask this is written for: TRL calls them experimental
EXTRA = 'pip install "teamtr-lora[trl]"'


def train_baseline(
    recipe: Recipe,
    algorithm: Algorithm,
    *,
    agent: str | None = None,
    resume: bool = False,
    name: str = "baseline",
    callbacks: Sequence[TrainerCallback] = (),
) -> TrainSummary:
    """Trains one agent on the budget of the recipe's team. With `resume` a finished run is only read."""
    started = time.monotonic()
    _trl_version()
    if isinstance(recipe.task, ScriptSettings):
        raise UserError("task.name = 'script': this run's items and rewards live in a Python script; use TRL there")
    single = single_agent_recipe(recipe, agent)
    batch_settings(single, longest=1, iterations=1)  # refuses steps that TRL cannot take before anything is loaded
    path = chosen_run_dir(recipe.output_dir, name, resume=resume).path
    state = check_folder(path, single, algorithm, resume=resume)
    if state and state.stage >= single.training.stages:
        return summary(path, single, state)
    task = single.task.build(single.folder)
    with fits(single):
        return _train(recipe, single, algorithm, path, task=task, resume=resume, callbacks=callbacks, started=started)


def _train(
    recipe: Recipe,
    single: Recipe,
    algorithm: Algorithm,
    path: Path,
    *,
    task: Task,
    resume: bool,
    callbacks: Sequence[TrainerCallback],
    started: float,
) -> TrainSummary:
    with closing(open_recipe(single)) as playable:
        _check_devices(playable)
        run_dir = RunDir(path)
        with run_dir.lock():
            # read again: another process may have gone on here while the base was loading
            state = check_folder(path, single, algorithm, resume=resume) or BaselineState(algorithm)
            state.budget, state.trl = budget(recipe), _trl_version()
            if state.stage < single.training.stages:
                events = Events(callbacks, single, single.training.stages)
                run = BaselineRun(
                    playable=playable, task=task, recipe=single, run_dir=run_dir, state=state, events=events, started=started
                )
                run.train(algorithm)
            return summary(path, single, state)


def _trl_version() -> str:
    if importlib.util.find_spec("trl") is None:
        raise UserError(f"baseline needs TRL, which is not installed; {EXTRA}")
    version = importlib.metadata.version("trl")
    if not version.startswith(f"{TRL_VERSION}."):
        raise UserError(f"baseline needs TRL {TRL_VERSION}, and {version} is installed; {EXTRA}")
    return version


def _check_devices(playable: PlayableTeam) -> None:
    """transformers' Trainer takes the first GPU, and TRL only one."""
    device = playable.base.device
    if device.type == "cuda" and (torch.cuda.device_count() > 1 or device.index not in (None, 0)):
        raise UserError("baseline: TRL trains on the first visible GPU, alone; choose it with CUDA_VISIBLE_DEVICES=N")


class BaselineRun:
    def __init__(
        self,
        *,
        playable: PlayableTeam,
        task: Task,
        recipe: Recipe,
        run_dir: RunDir,
        state: BaselineState,
        events: Events,
        started: float,
    ) -> None:
        self.playable, self.task, self.recipe, self.run_dir = playable, task, recipe, run_dir
        self.state, self.events = state, events
        self.agent = playable.team.names[0]
        self._meter = OutsideStep(playable, recipe, self.agent)
        per_stage, stages, held_out = recipe.rollout.items_per_stage, recipe.training.stages, recipe.evaluation.items
        task.check_team(playable.team, seed=recipe.seed, per_stage=per_stage, stages=stages, held_out=held_out)
        self._order = DataOrder(task.items("train"), recipe.seed)
        self._clock = started
        self._lent = ExitStack()  # memory that the sampler lends while TRL learns
        self._rollout = Rollout(episodes=[], versions={}, seconds=0.0)
        self._update_began = 0.0
        self._longest = 1
        self.trl_logs: dict[str, float] = {}
        self.rates: list[float] = []  # of the update's steps

    def train(self, algorithm: Algorithm) -> None:
        """From wherever the last commit left off to the last stage."""
        if self.state.stage < 0:
            write_state(self.run_dir, self.state)
            self.run_dir.write_recipe(self.recipe)
            self.events.fire("on_train_begin")
            self._begin(algorithm)
        else:
            self.run_dir.write_recipe(self.recipe)
            self._resume()
            self.events.fire("on_train_begin")
        with self._lent:
            self._run_trl()
        self.events.fire("on_train_end")

    def _begin(self, algorithm: Algorithm) -> None:
        self.run_dir.metrics.truncate(0)
        evaluation = self._evaluate()
        self.state.accuracy_before, self.state.reward_before = evaluation["avg_at_k"], evaluation["mean_reward"]
        settings = group_settings(algorithm, self.recipe)
        steps = batch_settings(self.recipe, longest=self._longest, iterations=settings["num_iterations"])
        self.state.settings = settings | steps  # kept, so that a resumed run steps as it began
        self._commit(0, evaluation)

    def _resume(self) -> None:
        version = self.state.adapter_version(self.agent)
        load_versions(self.playable, {self.agent: version}, self.run_dir.adapters)
        self.run_dir.metrics.truncate(self.state.metrics_bytes)
        self.events.state.global_step = self.events.state.epoch = self.state.stage

    def _run_trl(self) -> None:
        from datasets import Dataset

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TRL currently supports vLLM")  # which it does not use here
            from trl import GRPOConfig, GRPOTrainer
        checkpoint = self.run_dir.trl / f"checkpoint-{self.state.step}"
        if self.state.step and not checkpoint.is_dir():
            raise UserError(f"{checkpoint}: TRL's checkpoint is missing; {elsewhere()}")
        settings = self._settings()
        items, stages = self.recipe.rollout.items_per_stage, self.recipe.training.stages
        keys = [key for stage in range(1, stages + 1) for key in prompt_keys(stage, items)]
        bank = self.playable.bank
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*rollout_func.*")
            trainer = GRPOTrainer(
                model=bank.model,
                reward_funcs=[reward],
                args=GRPOConfig(**settings),
                train_dataset=Dataset.from_dict({"prompt": keys}),
                processing_class=self.playable.base.tokenizer,
                callbacks=[AfterEachUpdate(self)],
                rollout_func=self.roll_out,
            )
        trainer.remove_callback(PrinterCallback)  # it would print TRL's logs to stdout
        bank.activate(self.agent)
        for parameter in bank.parameters(self.agent).values():  # only now: TRL would make a quantised base's adapters bf16
            parameter.requires_grad_(True)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if self.state.step else None)
        finally:
            bank.model.eval()
            for parameter in bank.parameters(self.agent).values():
                parameter.requires_grad_(False)
                parameter.grad = None

    def _settings(self) -> dict[str, Any]:
        base, recipe = self.playable.base, self.recipe
        return self.state.settings | {
            "max_steps": recipe.training.stages * self.state.settings["save_steps"],
            "output_dir": str(self.run_dir.trl),
            "max_completion_length": self.playable.team.router.max_messages * recipe.rollout.max_message_tokens,
            "shuffle_dataset": False,
            "save_total_limit": 2,  # the newest may be ahead of the last commit
            "report_to": list(recipe.tracking.trackers) or "none",
            "disable_tqdm": True,
            "use_cpu": base.device.type == "cpu",
            "fp16": base.dtype == torch.float16,
            "bf16": base.dtype == torch.bfloat16,
            "gradient_checkpointing": recipe.training.gradient_checkpointing,
            "dataloader_pin_memory": base.device.type != "cpu",
        }

    def roll_out(self, prompts: list[str], trainer: Any) -> Columns:
        """TRL's rollout_func: the next stage's items, played by the agent as it is now."""
        self._lent.close()
        rollout, stage = self.recipe.rollout, self.state.stage + 1
        expected = [k for k in prompt_keys(stage, rollout.items_per_stage) for _ in range(rollout.episodes_per_item)]
        if prompts != expected:
            raise RuntimeError(
                f"TRL asked for {prompts[:1]}..., stage {stage} is {expected[:1]}...: it lost its place in the data"
            )
        self.events.state.epoch = stage - 1
        self.events.fire("on_epoch_begin", order=[self.agent])
        items = self._order.take((stage - 1) * rollout.items_per_stage, rollout.items_per_stage)
        plan = PlayPlan.of(rollout, items, f"{self.recipe.seed}/stage {stage}/update 0")
        started, versions = time.monotonic(), self.playable.versions()
        episodes = self._play(plan, "rollout")
        self._rollout = Rollout(episodes=episodes, versions=versions, seconds=time.monotonic() - started)
        self._lent.enter_context(self.playable.training_memory())
        self._meter.begin()
        self.events.progress("update", 0, 1, 0)
        self._update_began = time.monotonic()
        self.state.sampled_tokens += sum(episode.tokens for episode in episodes)
        return trl_columns(episodes, self.agent, mask_truncated=rollout.truncated_messages == "mask")

    def finish_update(self, step: int) -> None:
        """After TRL has saved its own checkpoint: a new version, its rows, and the commit."""
        seconds = {"optimize": time.monotonic() - self._update_began}
        started, bank = time.monotonic(), self.playable.bank
        bank.model.eval()
        self._check_finite()
        version = bank.commit(self.agent)
        report = OptimizeReport(
            steps=self.state.settings["save_steps"],
            learning_rate=fmean(self.rates),
            beta=0.0,
            clip_rate=float(self.trl_logs.get("clip_ratio/region_mean") or 0.0),
            gradient_norm=float(self.trl_logs.get("grad_norm") or 0.0),
        )
        self.rates.clear()
        outcome = self._meter.outcome(self._rollout.episodes, report)  # with our advantages: TRL's own are in no row
        seconds["gate"] = time.monotonic() - started
        self._lent.close()
        self.playable.publish(version)
        seconds["publish"] = time.monotonic() - started - seconds["gate"]
        outcome.seconds.update(seconds)
        stage, episodes = self.state.stage + 1, self._rollout.episodes
        row = update_row(outcome, self._rollout, stage=stage, update=1)
        self.state.out_of_region += row.out_of_region
        self.run_dir.metrics.append(row)
        self.run_dir.write_episodes(f"stage-{stage:04d}-update-1-{self.agent}", episodes, self.recipe.diagnostics.save_episodes)
        self.events.state.global_step = stage
        self.events.log(row.model_dump())
        due = self.recipe.evaluation.due(stage, self.recipe.training.stages)
        evaluation = self._evaluate() if due else None
        self.state.step = step
        self._commit(stage, evaluation)
        bank.model.train()

    def _check_finite(self) -> None:
        if not all(bool(torch.isfinite(tensor).all()) for tensor in self.playable.bank.tensors(self.agent).values()):
            raise UserError(
                f"baseline: TRL's update made the adapter of {self.agent!r} infinite or NaN; lower training.learning_rate = "
                f"{self.recipe.training.starting_rate:g} (the last good version is stored)"
            )

    def _commit(self, stage: int, evaluation: dict[str, Any] | None) -> None:
        """Until this returns, the update just made does not exist for a resumed run."""
        state, bank = self.state, self.playable.bank
        version = bank.version(self.agent)
        write_version(self.run_dir.adapters, version, bank.tensors(self.agent), bank.config(self.agent))
        if evaluation:
            state.accuracy_after, state.episodes_evaluated = evaluation["avg_at_k"], evaluation["episodes"]
            state.reward_after = evaluation["mean_reward"]
        now = time.monotonic()
        state.seconds, self._clock = state.seconds + now - self._clock, now
        row = self._stage_row(stage, evaluation)
        self.run_dir.metrics.append(row)
        self.events.log(row.model_dump())
        self.run_dir.write_team({self.agent: version}, {})
        state.stage, state.metrics_bytes = stage, self.run_dir.metrics.size
        state.version = version.stored()
        write_state(self.run_dir, state)
        self.events.fire("on_save")

    def _stage_row(self, stage: int, evaluation: dict[str, Any] | None) -> StageRow:
        return StageRow(
            stage=stage,
            order=[self.agent] if stage else [],
            versions=self.playable.versions(),
            evaluation=evaluation,
            floors=None,
            items_seen=stage * self.recipe.rollout.items_per_stage,
            updates=stage,
            accepted=stage,
            shrunk=0,
            rejected=0,
            skipped=0,
            out_of_region_accepted=self.state.out_of_region,
            sampled_tokens=self.state.sampled_tokens,
            seconds=self.state.seconds,
            peak_memory_bytes=peak_memory(self.playable.base.device),
            time=time.time(),
        )

    def _evaluate(self) -> dict[str, Any]:
        """On the items and seeds of `train`, so that the two are compared on common random numbers."""
        plan = plan_in_training(self.task, self.recipe)
        episodes = self._play(plan, "evaluation")
        record = recorded(episodes, self.task, plan, self._meter.discount)
        self.state.sampled_tokens += record["sampled_tokens"]
        self.events.evaluated(record)
        return record

    def _play(self, plan: PlayPlan, phase: str) -> list[Episode]:
        model = self.playable.bank.model
        training = model.training
        model.eval()  # a checkpointing model in training mode keeps no cache to sample from
        try:
            episodes = self.playable.play(self.task, plan, lambda d, n, t: self.events.progress(phase, d, n, t))
        finally:
            model.train(training)
        self._longest = max(self._longest, *(len(m.prompt_ids) + len(m.token_ids) for e in episodes for m in e.messages))
        return episodes


class AfterEachUpdate(TrainerCallback):
    """TRL saves once an update, after it has logged: the moment when everything about the update is known."""

    def __init__(self, run: BaselineRun) -> None:
        self._run = run

    def on_step_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        self._run.rates.append(lr_scheduler.get_last_lr()[0])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "clip_ratio/region_mean" in logs:
            self._run.trl_logs = logs

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.finish_update(state.global_step)
        control.should_training_stop = control.should_training_stop or self._run.events.control.should_training_stop
