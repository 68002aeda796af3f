"""A run in progress: what the stage loop acts on. Every method is one step of the loop and leaves the run resumable."""

from __future__ import annotations

import logging
import os
import time
from functools import cached_property
from typing import Any

import torch

from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.algorithm.variants.reduction import REDUCTIONS
from teamtr_lora.common.files import sha256
from teamtr_lora.evaluation.evaluate import plan_in_training
from teamtr_lora.evaluation.returns import recorded
from teamtr_lora.recipe.engine_facts import ENGINES
from teamtr_lora.rollout.playable import load_versions
from teamtr_lora.rollout.sampler import derive_seed
from teamtr_lora.runs.run_state import RunState
from teamtr_lora.tasks import Item
from teamtr_lora.team import Episode
from teamtr_lora.training.floor import check_floors, least_radius, measure_floors
from teamtr_lora.training.idle_stage import idle_warning
from teamtr_lora.training.microbatch_size import update_bytes
from teamtr_lora.training.recording import Recorder
from teamtr_lora.training.run_context import RunContext
from teamtr_lora.training.run_diagnostics import RunDiagnostics
from teamtr_lora.training.saving import Saver
from teamtr_lora.training.stage_rollouts import Rollout, StageRollouts
from teamtr_lora.training.update import AgentUpdater, UpdateOutcome

logger = logging.getLogger(__name__)


class TrainingRun:
    def __init__(self, context: RunContext) -> None:
        self.context, self.config, self.events = context, context.config, context.events
        self.playable, self.task, self.run_dir = context.playable, context.task, context.run_dir
        self.ranks, config = context.playable.ranks, context.config
        per_stage, stages, held_out = config.rollout.items_per_stage, config.training.stages, config.evaluation.items
        self.task.check_team(self.playable.team, seed=config.seed, per_stage=per_stage, stages=stages, held_out=held_out)
        self.variants = Variants.of(context.config)
        self.state = RunState()
        self.updater = AgentUpdater(self.playable, self.config)
        self.rollouts = StageRollouts(context, self.variants)
        self.diagnostics = RunDiagnostics(context, self.updater)
        self._recorder = Recorder(context, self.diagnostics, self.updater.discount)
        self._last_played: list[Episode] = []
        self._saver = Saver(self.run_dir, self.playable.bank, writes=self.ranks.first)
        self._storing = 0.0  # seconds that storing the last update took, which the next row counts: its own is written before
        self._clock = time.monotonic() if context.started is None else context.started

    @property
    def agents(self) -> list[str]:
        return self.context.agents

    @property
    def stopping(self) -> bool:
        """Asked by all ranks at once: the first rank's callbacks decide, and what it had to write is written."""
        return self.ranks.broadcast(bool(self.events.control.should_training_stop))

    def resume(self) -> None:
        """Everything is put back as the newest checkpoint has it; what was written after that is cut off. Every rank reads it,
        whatever their number was when it was written."""
        self.state, optimizers = self.run_dir.checkpoints.load()
        engine = ENGINES[self.config.rollout.engine]
        if not engine.exact_resume:
            logger.warning("rollout.engine = %s: the resumed run may draw other tokens than one that never stopped", engine.name)
        load_versions(self.playable, self.state.versions, self.run_dir.adapters)
        with self.run_dir.checkpoints.understood():
            self.updater.resume(self.state, optimizers)
        self.rollouts.window.resume(self.state.rollouts)
        self._take_up_threads()
        self.ranks.check_equal((self.state.step, self.state.versions), "its checkpoint")
        if self.ranks.first:
            self._saver.tidy()
            self.run_dir.metrics.truncate(self.state.metrics_bytes)
            self.run_dir.check_rows()
            self.run_dir.restore_team(self.state.versions, self.state.loras)
        self.events.state.global_step, self.events.state.epoch = self.state.counts["updates"], self.state.stage
        self.events.state.best_metric = self.state.best_accuracy

    def _take_up_threads(self) -> None:
        """On a CPU, those that the run was started with: torch rounds by their number."""
        threads, given = self.state.threads, os.environ.get("OMP_NUM_THREADS", "")
        if not threads or self.playable.base.device.type != "cpu":
            return
        torch.set_num_threads(threads)
        most = int(given) if given.isdigit() else os.cpu_count() or 1
        if most < threads:
            logger.warning("the run had %d threads, and this process can have %d: it may round differently", threads, most)

    def begin(self) -> None:
        """Stage 0: the evaluation before training, and the numerical floors of this machine's passes."""
        self.events.fire("on_train_begin", run_dir=str(self.run_dir.path))
        if self.state.started:
            return
        for agent in self.agents:
            self._saver.learned(agent)
        if self.ranks.first:
            self.run_dir.metrics.truncate(0)
        evaluation, episodes = self._evaluate()
        region, scorer = self.config.trust_region, self.updater.scorer
        speaker = next((m.agent for e in episodes for m in e.messages), self.agents[0])
        with self.playable.training_memory(measured=False):
            found = measure_floors(scorer, self.playable.bank, speaker, episodes, region=region)
        floors, scorer.tf32, scorer.float32_sum = self.ranks.broadcast((found, scorer.tf32, scorer.float32_sum))
        check_floors(floors, least_radius(region), tf32=scorer.tf32)
        begun = {"process": self.context.process_seconds, **self.playable.opening_seconds}
        self.state.accuracy_before = self.state.accuracy_after = evaluation["avg_at_k"]
        self.state.reward_before = self.state.reward_after = evaluation["mean_reward"]
        self.state.started = True
        self._recorder.stage(
            self.state, 0, self._since_checkpoint(), order=[], evaluation=evaluation, floors=floors, start_seconds=begun
        )
        self.checkpoint()

    def begin_stage(self, stage: int, order: list[str]) -> list[Item]:
        """Returns the stage's items."""
        self.events.state.epoch = stage - 1
        self.diagnostics.begin_stage(self.state, stage)
        self.events.fire("on_epoch_begin", order=order)
        items = self.rollouts.items(self.state)
        contents = repr([(item.id, item.prompt) for item in items])  # every rank has built the task for itself
        self.ranks.check_equal(sha256(contents.encode())[:12], f"the items of stage {stage}")
        return items

    def roll_out(self, items: list[Item], stage: int, place: int) -> Rollout:
        self.events.fire("on_step_begin")
        rollout = self.rollouts.roll_out(items, stage, place)
        if not self.state.counts["updates"]:
            self._tell_radius(rollout)
        return rollout

    def _tell_radius(self, rollout: Rollout) -> None:
        """A radius is of a whole message; what it means depends on how long those are."""
        region, messages = self.config.trust_region, sum(len(episode.messages) for episode in rollout.episodes)
        tokens = sum(episode.tokens for episode in rollout.episodes) / max(1, messages)
        if REDUCTIONS[region.reduction].whole and tokens:
            mean = f"messages have {tokens:.0f} tokens on average"
            delta = self.config.written("trust_region.delta")
            self.events.note(f"  {mean}, so {delta} = {region.delta:g} is about {region.delta / tokens:.1g} nats a token")

    @cached_property
    def _largest_update(self) -> int:
        """In bytes; found once, since the base's shapes are built for it."""
        return update_bytes(self.playable, self.config, self.updater.scorer.tokens_per_microbatch)

    def update(self, agent: str, rollout: Rollout, stage: int, place: int) -> UpdateOutcome:
        self.diagnostics.before_update(self.state, agent, stage, place, lambda: self.rollouts.probe_items(self.state))
        self.events.progress("update", 0, 1, 0)
        seed = derive_seed(self.config.seed, "holdout", stage, agent)
        with self.playable.training_memory(least=self._largest_update):
            material = self.rollouts.material(rollout, place, self.updater.discount)
            outcome = self.updater.update(agent, material, seed, stage)
            self.diagnostics.after_update(self.state, agent, stage, outcome)
        name = f"adapter, decision and settings of {agent} after update {place + 1} of stage {stage}"
        self.ranks.check_equal((outcome.version.content_hash, outcome.decision, self.updater.dials[agent]), name)
        return outcome

    def publish(self, outcome: UpdateOutcome) -> None:
        started = time.monotonic()
        if outcome.accepted:
            self._saver.learned(outcome.version.agent)
            self.variants.publishing.after_update(self.playable, outcome.version)
        outcome.seconds["publish"] = time.monotonic() - started

    def record_update(self, stage: int, place: int, rollout: Rollout, outcome: UpdateOutcome) -> None:
        started = time.monotonic()
        self._saver.settle()  # so that a kill costs one update at most
        outcome.seconds["saving"] = self._storing + time.monotonic() - started
        self._last_played = rollout.episodes
        self._recorder.update(self.state, stage, place, rollout, outcome)
        self.state.accepted_since += outcome.accepted
        started = time.monotonic()
        self.rollouts.keep(f"stage-{stage:04d}-update-{place + 1:03d}", rollout, outcome)
        self.checkpoint()
        self._storing = time.monotonic() - started

    def end_stage(self, stage: int, order: list[str]) -> None:
        """Closes the stage: evaluation where due, the stage's row, the next stage's radii and place in the data."""
        self.variants.publishing.catch_up(self.playable)
        self._end_if_idle(stage)
        due = self.stopping or self.config.evaluation.due(stage, self.config.training.stages)
        evaluation = self._evaluate()[0] if due else None
        if evaluation:
            self.state.accuracy_after, self.state.reward_after = evaluation["avg_at_k"], evaluation["mean_reward"]
        self.updater.end_stage()
        self.state.stage, self.state.update = stage, 0
        self.state.cursor += self.config.rollout.items_per_stage
        self._recorder.stage(self.state, stage, self._since_checkpoint(), order=order, evaluation=evaluation)
        started = time.monotonic()
        self.checkpoint()
        self._storing += time.monotonic() - started
        self.events.state.epoch = stage
        if self.events.heard("on_epoch_end"):
            self._saver.settle()
        self.events.fire("on_epoch_end")

    def _end_if_idle(self, stage: int) -> None:
        """Tells at once of a stage that taught nothing, and ends the run after as many as the recipe says."""
        idle, stops = self.state.idle_updates // len(self.agents), self._idled and stage < self.config.training.stages
        if not idle:
            return
        if self._last_played:
            logger.warning(idle_warning(self._last_played, self.config, stage=stage, idle=idle, stops=stops))
        if stops:
            self.events.control.should_training_stop = True

    @property
    def _idled(self) -> bool:
        """For as many stages as end a run."""
        limit = self.config.training.stop_after_idle_stages
        return 0 < limit <= self.state.idle_updates // len(self.agents)

    def end(self) -> None:
        self._saver.settle()
        self.variants.publishing.catch_up(self.playable)
        if self.state.stage < self.config.training.stages and not self._idled:
            done, planned = self.state.counts["updates"], self.config.training.stages * len(self.agents)
            self.events.note(f"a callback has ended the run after {done} of {planned} updates; resumed, it goes on")
        self.events.fire("on_train_end")
        for tracker in self.context.accelerator.trackers:
            tracker.finish()  # not end_training: that would also end the process group of a vLLM in this process

    def checkpoint(self) -> None:
        """The commit point. What a resumed run goes on from is copied now and written while the next update is made, which is not
        recorded before that is done."""
        state = self.state
        state.step += 1
        state.versions = self.playable.adapter_versions()
        state.rollouts = self.rollouts.window.records()
        self.updater.store(state)
        state.threads = torch.get_num_threads() if self.playable.base.device.type == "cpu" else 0
        state.metrics_bytes = self.run_dir.metrics.size
        state.seconds += self._since_checkpoint()
        self._clock = time.monotonic()
        self._saver.save(state, self.updater.optimizers)
        if self.events.heard("on_save"):
            self._saver.settle()
        self.events.fire("on_save")

    def close(self) -> None:
        self._saver.close()

    def _since_checkpoint(self) -> float:
        return time.monotonic() - self._clock

    def _evaluate(self) -> tuple[dict[str, Any], list[Episode]]:
        plan = plan_in_training(self.task, self.config)
        episodes = self.playable.play(self.task, plan, lambda d, n, t: self.events.progress("evaluation", d, n, t))
        record = recorded(episodes, self.task, plan, self.updater.discount)
        self.state.episodes_evaluated, self.state.accepted_since = record["episodes"], 0
        self.state.sampled_tokens += record["sampled_tokens"]
        if self.events.heard("on_evaluate"):  # who listens may copy the adapters that did so well
            self._saver.settle_versions()
        self.events.evaluated(record)
        self.state.best_accuracy = self.events.state.best_metric
        return record, episodes
